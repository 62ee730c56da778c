"""The running statistics of batch norms, in one call of the library where torch's operators are four or five."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from aotops.call import builtin, struct_capsule

from .tensors import READS_TENSORS, is_compiling, is_plain

_update = builtin("running", "aot_torch_running", struct_capsule(ctypes.c_int())) if READS_TENSORS else None


Running = tuple[Tensor, Tensor, Tensor | None]
"""running_mean, running_var and num_batches_tracked."""


def update(mean: Tensor, var: Tensor, running: Running, share: float, terms: int) -> bool:
    """Moves running_mean and running_var, in place, by their share towards mean and the unbiased var of so many terms,
    and adds 1 to num_batches_tracked. False: nothing was done, because the tensors are not plain ones of the dtypes
    that the library takes, or torch refuses to write to them."""
    if is_compiling() or is_plain is None or _update is None or running[2] is None or not may_write(running):
        return False
    if not is_plain(mean, var, *running) or not _update(mean, var, *running, share, terms):
        return False
    torch.autograd.graph.increment_version([t for t in running if t is not None and not t.is_inference()])
    return True


def may_write(running: Running) -> bool:
    """Whether torch's elementwise operators write to them: not to a leaf that requires a gradient, to integers, or to
    what was made in inference mode, outside of it."""
    if is_compiling():
        return True
    given = [t for t in running if t is not None]
    if not all(t.is_floating_point() for t in given[:2]) or any(t.requires_grad for t in given):
        return False
    return torch.is_inference_mode_enabled() or not any(t.is_inference() for t in given)


def refuse_shared(**statistics: Tensor) -> None:
    """Raises an error if channels have the same memory, which torch's batch norm writes to from several threads."""
    for name, t in statistics.items():
        if t.numel() > 1 and 0 in t.stride():
            raise RuntimeError(f"batch_norm: {name} has a single memory location, expected one for each channel")
