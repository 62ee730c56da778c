"""Batch norms by the statistics of their input: what the modules of torch and those of this library have alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from . import functional as F
from . import running
from .attributes import Classes, has_own
from .tensors import is_number

_STATE = Classes("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def normalized(
    module: Any, state: tuple[Any, ...], x: Tensor, residual: Tensor | None = None, activation: str | None = None
) -> Tensor | None:
    """A call of a module of torch's batch norms by the statistics of x, which moves the running ones; None if torch's
    operator computes it: by running statistics, or of a state that torch's may refuse.

    Args:
        state: see ``state_of``.
        residual: what is added to the result.
        activation: of the sum: None, "relu", "silu" or "hardswish".

    Raises:
        ValueError: a channel has one element.
    """
    weight, bias, running_mean, running_var, batches = state
    eps, has_mean = module.eps, running_mean is not None
    evaluates = has_mean and not module.training
    if evaluates or has_mean != (running_var is not None) or not (is_number(eps) and eps > 0):
        return None
    terms = x.numel() // (x.shape[1] or 1)
    if terms == 1:
        shape = tuple(x.shape)
        raise ValueError(f"batch_norm: x has shape {shape}, expected more than one element for each channel")
    if residual is None:
        y, mean, var = F.batch_norm(x, weight, bias, eps, activation=activation)
    elif activation == "relu":
        y, mean, var = F.batch_norm_relu(x, weight, bias, residual, eps)
    else:
        y, mean, var = F.batch_norm(x, weight, bias, eps)
        y = activated(y + residual, activation)
    if module.training and module.track_running_stats:
        if has_mean:
            if not running.track(mean, var, (running_mean, running_var, batches), module.momentum, terms):
                return None
        elif batches is not None:
            batches.add_(1)
    return y


def activated(y: Tensor, activation: str | None) -> Tensor:
    return y if activation is None else getattr(functional, activation)(y)


def state_of(module: Any) -> tuple[Any, ...]:
    """The weight, the bias, running_mean, running_var and num_batches_tracked."""
    if has_own(module, _STATE):
        own, buffers = module._parameters, module._buffers
        try:
            mean, var, batches = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
            return own["weight"], own["bias"], mean, var, batches
        except KeyError:  # deleted, and set as another attribute
            pass
    return tuple([getattr(module, name) for name in _STATE.names])
