"""Tensors with the same values and another layout: strided, reversed, and not aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .dtypes import OF_ML_DTYPES, numpy_dtype
from .frameworks import Framework

Layout = Callable[[Framework, str, str, np.ndarray], Any]
"""A tensor of the framework, the device, the dtype and the array."""


def transposed(framework: Framework, device: str, dtype: str, array: np.ndarray) -> Any:
    """A tensor of these values, stored the other way round."""
    tensor = framework.make(array, dtype, device)
    axes = tuple(reversed(range(len(tensor.shape))))
    if hasattr(tensor, "permute"):  # torch
        return tensor.permute(axes).contiguous().permute(axes)
    return tensor.transpose(axes).copy().transpose(axes)


def stepped(framework: Framework, device: str, dtype: str, array: np.ndarray) -> Any:
    """Every second element of a wider one."""
    if not array.ndim:
        return framework.make(array, dtype, device)
    wide = np.repeat(array, 2, axis=-1)
    return framework.make(wide, dtype, device)[..., ::2]


def backwards(framework: Framework, device: str, dtype: str, array: np.ndarray) -> Any:
    """Read backwards."""
    if not array.ndim:
        return framework.make(array, dtype, device)
    return framework.make(array[..., ::-1].copy(), dtype, device)[..., ::-1]


def shifted(framework: Framework, device: str, dtype: str, array: np.ndarray) -> Any:
    """One element into a buffer: aligned to its dtype and to nothing more."""
    buffer = framework.make(np.concatenate([np.zeros(1, array.dtype), array.ravel()]), dtype, device)
    return buffer[1:].reshape(array.shape)


LAYOUTS: dict[str, Layout] = {
    "transposed": transposed,
    "stepped": stepped,
    "reversed": backwards,
    "shifted": shifted,
}


def unaligned(framework: Framework, device: str, dtype: str, array: np.ndarray) -> np.ndarray:
    """NumPy has arrays that start at any byte ..."""
    values = array.astype(numpy_dtype(dtype))
    buffer = np.empty(values.nbytes + 1, np.uint8)
    odd = buffer[1:].view(values.dtype).reshape(values.shape)
    odd[...] = values
    return odd


def swapped(framework: Framework, device: str, dtype: str, array: np.ndarray) -> np.ndarray:
    """... and of foreign byte order, except of the dtypes of ml_dtypes."""
    values = array.astype(numpy_dtype(dtype))
    return values if dtype in OF_ML_DTYPES else values.astype(values.dtype.newbyteorder())


def layouts_of(framework: Framework) -> dict[str, Layout]:
    if not framework.strides:
        return {}
    if framework.frontend == "torch":  # has no negative strides
        return {name: lay for name, lay in LAYOUTS.items() if lay is not backwards}
    return LAYOUTS | {"unaligned": unaligned, "swapped": swapped} if framework.name == "numpy" else LAYOUTS
