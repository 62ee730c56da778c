"""Attention of queries, keys and values that are parts of one packed projection, as a split or an unbind leaves them.

The kernel of ``qkv_attention`` reads them where they are. As three inputs each would be copied, by a kernel of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aotops.call import MOST_BOUND
from aotops.ops import OPS

from . import call, private
from .eager import apply_of
from .gradients import run_backward
from .tensors import KEEP_RESIDUALS_FROM, Tensors, is_compiling, is_plain, prototypes

_PACKED, _PARTS = OPS["qkv_attention"], OPS["attention"]
_record = functools.partial(private.RecordFunction, f"{_PACKED.library.name}::{_PACKED.name}")
"""A context manager, the event of a call of these tensors in a profile."""
_NUMBERS = (type(None), float, int)
"""Scales that a binding may be kept for: a tensor may change."""


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: tuple[int, int]) -> Tensor | None:
    """``attention`` of (..., heads, sequence, head_dim) without masks and dropout, as a transposed
    (..., sequence, heads, head_dim). None: they are no such parts, or the call is not plain."""
    if is_compiling() or is_plain is None or type(scale) not in _NUMBERS or not is_plain(query, key, value):
        return None
    if not _are_parts(query, key, value) or _is_cast(query):
        return None
    bound = _bound(query.shape[-3], key.shape[-3], scale, window)
    recorded = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    with _record([query, key, value]):
        return (bound.apply if recorded else bound.run)(query, key, value)


def _are_parts(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether their rows are parts of the rows of one tensor, in this order."""
    if query.is_contiguous():
        return False
    (*lead, heads, seq, dim), of_keys = query.shape, key.shape
    kv_heads = of_keys[-3]
    row = (heads + 2 * kv_heads) * dim
    if seq > 1 and query.stride(-2) != row:  # the end of most others
        return False
    alike = of_keys == (*lead, kv_heads, seq, dim) == value.shape and query.dtype == key.dtype == value.dtype
    begin, size = query.data_ptr(), query.itemsize * dim
    follow = key.data_ptr() == begin + heads * size and value.data_ptr() == begin + (heads + kv_heads) * size
    strides = (*strides_of((*lead, seq), row)[:-1], dim, row, 1)
    lie = alike and follow and all(has_strides(x, strides) for x in (query, key, value))
    return lie and _share_memory(query, key, value)


def _is_cast(x: Tensor) -> bool:
    """Whether autocast has the operator compute in another dtype."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype


def strides_of(rows: Sequence[int], row: int) -> list[int]:
    """The strides of axes of rows, where a row has so many elements."""
    return [row * prod(rows[i + 1 :]) for i in range(len(rows))]


def has_strides(x: Tensor, strides: tuple[int, ...]) -> bool:
    return all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))


def _share_memory(*tensors: Tensor) -> bool:
    """Parts of NumPy's memory may lie so, each with a storage of its own, which ends with it."""
    return len({x.untyped_storage().data_ptr() for x in tensors}) == 1


class _Bound(NamedTuple):
    """Functions of the parts."""

    run: Callable[..., Tensor]
    apply: Callable[..., Tensor]
    """Records a gradient: of the parts, so that what made them stays in the graph, with its hooks."""


class _Gradient(NamedTuple):
    """A context as the backward of the packed operator reads it."""

    saved_tensors: Tensors
    needs_input_grad: tuple[bool, ...] = (True, False)


@functools.lru_cache(maxsize=MOST_BOUND)
def _bound(heads: int, kv_heads: int, scale: float | None, window: tuple[int, int]) -> _Bound:
    options: dict[str, Any] = {"scale": scale, "window": window}
    attrs = _PACKED.canonical(_PACKED.bind(None, heads, kv_heads, **options)[1])
    of_parts = _PARTS.canonical(_PARTS.bind(None, None, None, layout="BHSD", **options)[1])
    fallback = functools.partial(run_backward, _PACKED, attrs)
    packed = call.function(_PACKED, attrs, prototypes, KEEP_RESIDUALS_FROM, fallback)

    def whole(query: Tensor) -> Tensor:
        *lead, _, seq, dim = query.shape
        shape = (*lead, seq, (heads + 2 * kv_heads) * dim)
        return query.as_strided(shape, (*strides_of(shape[:-1], shape[-1]), 1))

    def split(rows: Tensor, into: int) -> Tensor:
        return rows.view((*rows.shape[:-1], into, -1)).transpose(-3, -2)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return split(packed.run(whole(query), None), heads)

    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        y = packed.forward(ctx, whole(query), None)
        ctx.to_save = (*ctx.to_save, query, key, value)
        return split(y, heads)

    def backward(ctx: Any, dy: Tensor) -> Sequence[Tensor | None]:
        saved = ctx.saved_tensors
        *_, y, lse, query, key, value = saved
        if torch.is_grad_enabled():  # derivatives of the gradients are of the parts
            named = {"q": query, "k": key, "v": value, "y": split(y, heads), "lse": lse}
            needed = dict(zip(_PARTS.inputs, ctx.needs_input_grad, strict=False))
            given = [named.get(slot) for slot in _PARTS.saved], (dy,), [needed.get(x, False) for x in _PARTS.inputs]
            return run_backward(_PARTS, of_parts, *given, ctx)[:3]
        rows = dy.transpose(-3, -2)
        dqkv, _ = packed.backward(_Gradient(saved[:-3]), rows.reshape((*rows.shape[:-2], -1)))
        return split(dqkv, heads + 2 * kv_heads).split((heads, kv_heads, kv_heads), -3)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return _Bound(run, apply_of(type("PackedHeads", (torch.autograd.Function,), members)))
