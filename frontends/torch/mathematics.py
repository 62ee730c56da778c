"""The mathematics that formulas of operators are made of, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def all_narrow(tensors: Sequence[Tensor | None]) -> bool:
    """Whether they have 16 bits."""
    return all(t is None or t.dtype.itemsize == 2 for t in tensors)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of floating numbers are taken in: float32 for 16 bits."""
    return torch.promote_types(dtype, torch.float32)


class Mathematics:
    """``aotops.formula.Fusing`` of torch."""

    exp, expm1, tanh, sigmoid, rsqrt = torch.exp, torch.expm1, torch.tanh, torch.sigmoid, torch.rsqrt
    erfc, where, zeros = torch.special.erfc, torch.where, torch.zeros_like
    reshape, swapaxes, argmax, xor = torch.reshape, torch.swapaxes, torch.argmax, torch.bitwise_xor
    log_softmax, logsumexp = staticmethod(torch.log_softmax), staticmethod(torch.logsumexp)
    linear = staticmethod(torch.nn.functional.linear)

    def __init__(self, ops: Any, narrow: bool = False) -> None:
        self.ops, self.narrow = ops, narrow

    @staticmethod
    def wide(x: Tensor) -> Tensor:
        return x.to(wide_dtype(x.dtype))

    @staticmethod
    def like(x: Tensor, model: Tensor) -> Tensor:
        return x.to(model.dtype)

    @staticmethod
    def unsigned(x: Tensor) -> Tensor:
        return x.to(torch.int64) % 2**32

    @staticmethod
    def epsilon(x: Tensor) -> float:
        return torch.finfo(x.dtype).eps

    @staticmethod
    def arange(n: int, model: Tensor) -> Tensor:
        # not torch.arange, which beside a DTensor would be a plain tensor
        return model.new_ones(n).cumsum(0, dtype=model.dtype) - 1

    @staticmethod
    def sum(x: Tensor, axes: tuple[int, ...], keepdims: bool = False) -> Tensor:
        return x.sum(axes, keepdim=keepdims) if axes else x  # torch sums over all axes if there are none

    @staticmethod
    def mean(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x.mean(axes, keepdim=True) if axes else x

    @staticmethod
    def var_mean(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return torch.var_mean(x, axes, correction=0, keepdim=True) if axes else (torch.zeros_like(x), x)

    @staticmethod
    def any(x: Tensor, axis: int) -> Tensor:
        return x.any(axis)

    @staticmethod
    def count(x: Tensor, model: Tensor) -> Tensor:
        return x.sum(dtype=model.dtype)

    @staticmethod
    def concatenate(arrays: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(arrays), -1)

    @staticmethod
    def take(x: Tensor, rows: Tensor) -> Tensor:
        is_row = (rows >= 0) & (rows < x.shape[0])
        found = x[torch.where(is_row, rows, 0)] if x.shape[0] else x.new_zeros(*rows.shape, *x.shape[1:])
        return torch.where(is_row[:, None], found, float("nan"))

    @staticmethod
    def scatter_sum(x: Tensor, rows: Tensor, n: int) -> Tensor:
        is_row = (rows >= 0) & (rows < n)
        x = torch.where(is_row[:, None], x, 0)
        return x.new_zeros(n, *x.shape[1:]).index_add(0, torch.where(is_row, rows, 0), x) if n else x[:0]

    @staticmethod
    def matrix(x: Tensor) -> Tensor:
        return x.flatten(0, -2) if x.dim() > 1 else x[None]

    @staticmethod
    def matmul(a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
        return (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)


MATHEMATICS = Mathematics(None)
"""For products, whose derivatives need no other operator."""
