"""MindSpore: ``ops.Custom`` of type "aot" on the library's own entries, in PyNative and in graph mode, on CPU and GPU.

The functions work eagerly, in ``nn.Cell.construct`` and under ``ms.jit``, with static and dynamic shapes, and under
``ms.grad``, ``value_and_grad`` and ``vmap``. Limits:

- Derivatives of a higher order, and ``ms.jvp``, which is a gradient of a gradient, are compositions that the operators'
  definitions state (second_order.py). In graph mode they need known dimensions. PyNative mode has no third order,
  except of elementwise operators and of products. A backward of a hosted operator is not differentiable. Each of these
  raises NotImplementedError.
- A backward computes the gradients of all inputs that are present, wanted or not. That of class weights is zeros: they
  are constants.
- vmap calls the kernel once per example.
- In graph mode, attributes and the axes normalized over are constants; every other dimension may be unknown.
  MindSpore itself rounds some numbers to float32 when it compiles: 1e300 becomes infinity, and 16777217.0 becomes
  16777216.0, but 0.1 keeps its digits.
- Inside a graph, ``ms.grad`` and ``ms.vmap`` need every argument of a function, including those with defaults.
- With unknown dimensions, only the kernel can find some errors, and MindSpore's exception does not contain the message;
  ``aotops.library.last_error()`` returns it.
- Automatic mixed precision of level O1 casts nothing here: the functions and modules compute in the dtype of their
  input.
"""

from __future__ import annotations

from aotops.ops import BUILTIN, OPS

from .modules import (
    GELU,
    LLTM,
    Conv2d,
    CrossEntropyLoss,
    LayerNorm,
    Linear,
    LinearCrossEntropyLoss,
    RMSNorm,
    Softmax,
)
from .optim import AdamW
from .primitives import functions, of
from .registration import registered

__all__ = [
    *OPS, "GELU", "LLTM", "AdamW", "Conv2d", "CrossEntropyLoss", "LayerNorm", "Linear", "LinearCrossEntropyLoss",
    "RMSNorm", "Softmax", "functions", "of", "registered",
]  # fmt: skip

globals().update(functions(BUILTIN))
