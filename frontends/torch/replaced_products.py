"""The forwards of modules that are a product alone, as those of replaced_forwards.py, and which products pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import functional as F
from .bytecode import Form, Names
from .replaced_dtypes import product_dtype
from .tensors import READS_TENSORS, is_compiling

ALIKE = "a product alone: torch's uses cuBLASLt too"
LARGE_WEIGHT, MANY_ROWS = 1 << 20, 64
"""Elements of a weight, and rows of x."""


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether a product and its activation in one kernel take less time (docs/lab_notes.md): on a GPU in 16 bits from
    256 rows on, and for fewer where eager mode saves a launch and the weight is small. In float32 torch's cuBLASLt is
    faster than the library's kernel, which takes an activation, saves. The kernel reads a copy of a transposed weight,
    as a ``Conv1D``'s: on a CPU that costs more than the activation."""
    dtype, rows = product_dtype(x, weight), x.numel() // max(weight.shape[1], 1)
    if dtype is None:
        return False
    if not x.is_cuda:
        return dtype.itemsize > 2 and weight.is_contiguous() and _at_least(2, rows)
    if dtype.itemsize != 2:
        return False
    if not weight.is_contiguous():
        return _at_least(16 * weight.shape[1], rows)
    return (weight.numel() <= 1 << 22 and not is_compiling()) or _at_least(256, rows)


def _at_least(n: int, rows: int) -> bool:
    """A trace that cannot know the number of rows takes them for many, and an export, whose program shall serve any."""
    if not torch.compiler.is_compiling():
        return rows >= n
    if not torch.compiler.is_dynamo_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(rows >= n)


def _is_uneven(weight: Tensor) -> bool:
    """Whether cuBLAS needs up to 4 times as long as for the next multiples of 8 (docs/lab_notes.md)."""
    return weight.numel() >= LARGE_WEIGHT and any(n % 8 for n in weight.shape)


def alone(names: Names, **_: Any) -> Callable[..., Any]:
    """A product alone, of sizes that are no multiples of 8. torch.compile pads those by itself."""

    def serve(self, x):
        if not _is_uneven(self.weight):
            return NotImplemented
        dtype, rows = product_dtype(x, self.weight), x.numel() // max(self.in_features, 1)
        if dtype is None or dtype.itemsize != 2 or not x.is_cuda or rows < MANY_ROWS:
            return NotImplemented
        return F.linear(x, self.weight, self.bias)

    return serve


def alone_refusal(module: Any, form: Form, names: Names) -> str:
    """A module is replaced too where replaced_calls.py serves products of even sizes: on a GPU in 16 bits."""
    weight = module.weight
    is_even = not any(n % 8 for n in weight.shape)
    if _is_uneven(weight) or (is_even and READS_TENSORS and weight.is_cuda and weight.element_size() == 2):
        return ""
    return ALIKE
