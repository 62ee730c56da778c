"""The dtypes in which torch's operators compute a call, under autocast and without."""

from __future__ import annotations

import torch
from torch import Tensor

from .tensors import is_known


def autocasts(x: Tensor) -> bool:
    return torch.is_autocast_enabled("cuda") if x.is_cuda else x.is_cpu and torch.is_autocast_enabled("cpu")


def as_it_is(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether torch's operators compute in x's dtype. Autocast computes some of 16 bits in float32."""
    if x.element_size() == 2 and autocasts(x):
        return False
    dtype = x.dtype
    for p in parameters:  # noqa: SIM110  a generator takes 1 us, and a norm asks at each call
        if p is not None and p.dtype is not dtype:
            return False
    return True


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype of a product; None for a call that torch refuses, and for a weight that is not dense."""
    if not is_known(weight):
        return None
    if autocasts(x):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype if x.dtype is weight.dtype else None
