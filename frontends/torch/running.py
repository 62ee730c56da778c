"""The running statistics of batch norms, in one call of the library where torch's operators are four or five."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from aotops.call import builtin, struct_capsule

from .tensors import READS_TENSORS, is_compiling, is_plain

_update = builtin("running", "aot_torch_running", struct_capsule(ctypes.c_int())) if READS_TENSORS else None


def update(mean: Tensor, var: Tensor, running: tuple[Tensor, Tensor, Tensor], share: float, terms: int) -> bool:
    """Moves running_mean and running_var, in place, by their share towards mean and the unbiased var of so many terms,
    and adds 1 to num_batches_tracked. False: nothing was done, because the tensors are not plain ones of the dtypes
    that the library takes, or torch refuses to write to them."""
    if is_compiling() or is_plain is None or _update is None or not is_plain(mean, var, *running):
        return False
    one, other, count = running
    if count is None or one.requires_grad or other.requires_grad:
        return False
    if (
        one.is_inference()
        or other.is_inference()
        or count.is_inference()
        or not _update(mean, var, one, other, count, share, terms)
    ):
        return False
    torch.autograd.graph.increment_version(running)
    return True


def may_write(*running: Tensor) -> bool:
    """Whether torch's elementwise operators write to them: not to a leaf that requires a gradient, to integers, or to
    what was made in inference mode, outside of it."""
    if is_compiling():
        return True
    may_infer = torch.is_inference_mode_enabled()
    return all(t.is_floating_point() and not t.requires_grad and (may_infer or not t.is_inference()) for t in running)


def refuse_shared(**statistics: Tensor) -> None:
    """Raises an error if channels have the same memory, which torch's batch norm writes to from several threads."""
    for name, t in statistics.items():
        if t.numel() > 1 and 0 in t.stride():
            raise RuntimeError(f"batch_norm: {name} has a single memory location, expected one for each channel")
