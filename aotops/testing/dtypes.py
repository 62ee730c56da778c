"""Dtypes of tensors as NumPy has them."""

from __future__ import annotations

import numpy as np

try:
    import ml_dtypes
except ImportError:  # then some dtypes are not here
    ml_dtypes = None  # type: ignore[assignment]

OF_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes that NumPy has by ml_dtypes alone."""

ITEMSIZE = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4,
    "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # fmt: skip


def numpy_dtype(dtype: str) -> np.dtype:
    if dtype in OF_ML_DTYPES and ml_dtypes is None:
        raise NotImplementedError(f"NumPy has no {dtype} without ml_dtypes")
    return np.dtype(getattr(ml_dtypes, dtype) if dtype in OF_ML_DTYPES else dtype)


def is_floating(array: np.ndarray) -> bool:
    """Whether it has the dtype that is tried, and a gradient: not complex numbers, and not those of 8 bits."""
    return array.dtype.kind == "f" and array.dtype.itemsize > 1


def plain(array: np.ndarray) -> np.ndarray:
    """The array in dtypes of NumPy's own: float64 in the place of those of ml_dtypes."""
    return array.astype(np.float64) if array.dtype.name in OF_ML_DTYPES else array
