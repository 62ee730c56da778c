"""The running statistics of batch norms, in one call of the library where torch's operators are four or five."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from aotops.call import builtin, struct_capsule

from .tensors import READS_TENSORS, is_compiling

Running = tuple[Tensor, Tensor, Tensor | None]
"""running_mean, running_var and num_batches_tracked."""

_update = builtin("running", "aot_torch_running", struct_capsule(ctypes.c_int())) if READS_TENSORS else None


def track(mean: Tensor, var: Tensor, running: Running, momentum: float | None, terms: int) -> bool:
    """Moves running_mean and running_var, in place, by ``momentum`` towards mean and the unbiased var of so many terms,
    or, where that is None, so that they are those of all batches; and adds 1 to num_batches_tracked. An empty batch is
    counted, and moves nothing. False: nothing was done, because torch's operators do not write to them; torch's batch
    norm may."""
    if not is_compiling() and _update is not None and _update(mean, var, *running, momentum, terms):
        torch.autograd.graph.increment_version(running if running[2] is not None else running[:2])
        return True
    running_mean, running_var, batches = running
    _refuse_shared(running_mean=running_mean, running_var=running_var)
    if not _may_write(running):
        return False
    if not running_mean.numel() == running_var.numel() == mean.numel():
        raise ValueError(f"batch_norm: x has {mean.numel()} channels, expected {running_mean.numel()}")
    share = 0.0 if momentum is None else momentum
    if batches is not None:
        batches.add_(1)
        share = 1 / float(batches) if momentum is None else momentum
    if terms:
        mean, var = mean.detach(), var.detach()
        running_mean.lerp_(mean.to(running_mean.dtype), share)
        running_var.mul_(1 - share).add_(var, alpha=share * terms / (terms - 1))
    return True


def _may_write(running: Running) -> bool:
    """Whether torch's elementwise operators write to them: not to a leaf that requires a gradient, to integers, or to
    what was made in inference mode, outside of it."""
    if is_compiling():
        return True
    given = [t for t in running if t is not None]
    if not all(t.is_floating_point() for t in given[:2]) or any(t.requires_grad for t in given):
        return False
    return torch.is_inference_mode_enabled() or not any(t.is_inference() for t in given)


def _refuse_shared(**statistics: Tensor) -> None:
    """Raises an error if channels have the same memory, which torch's batch norm writes to from several threads."""
    for name, t in statistics.items():
        if t.numel() > 1 and 0 in t.stride():
            raise RuntimeError(f"batch_norm: {name} has a single memory location, expected one for each channel")
