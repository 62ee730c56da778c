"""PyTorch: CPU and CUDA tensors, differentiable, on the current stream.

A call takes one of two paths:

- A plain eager call, as the gate decides (cuda_src/host/gate.h), runs the kernel directly. If a gradient is recorded,
  it goes through the C entry point of ``autograd.Function``, which costs a quarter of the Python wrapper.
- Every other call is an operator of torch's dispatcher, ``torch.ops.aotops.<op>``: under ``torch.compile``, ``export``,
  ``torch.func``, forward AD and modes, for subclasses, fake, meta, functional and batched tensors, and in a backward
  with ``create_graph=True``. If there is no gate (before torch 2.10), these are all calls.

The modules import one way: private < tensors < registered < gradients < autograd < dispatcher < eager < public <
functional < accumulation < modules. optim, beside them, has the optimizer, attention torch's own interfaces of that
operator, and replacing what changes a model that exists: it imports bytecode, known_modules, replaced_dtypes,
replaced_forwards, known_losses and replaced_losses. autocast, call, compositions, flops, gate, inductor, mathematics,
out, overwrite and sharding serve one of them each.
"""

from aotops.ops import OPS

from .attention import MultiheadAttention, scaled_dot_product_attention
from .functional import *  # noqa: F403
from .modules import (
    GELU,
    LLTM,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Conv2d,
    CrossEntropyLoss,
    LayerNorm,
    Linear,
    LinearCrossEntropyLoss,
    RMSNorm,
    Softmax,
)
from .optim import AdamW
from .public import functions, of
from .replacing import Replacement, replace, restore
from .tensors import KEEP_RESIDUALS_FROM

__all__ = [
    *OPS, "AdamW", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GELU", "KEEP_RESIDUALS_FROM", "LLTM", "Conv2d",
    "CrossEntropyLoss", "LayerNorm", "Linear", "LinearCrossEntropyLoss", "MultiheadAttention", "RMSNorm", "Replacement",
    "Softmax", "functions", "of", "replace", "restore", "scaled_dot_product_attention",
]  # fmt: skip
