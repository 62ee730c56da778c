"""Functions that the forward of a module calls by a global name: the rotation of queries and keys, torch's attention,
and transformers' table of attentions. The class of torch's loss, which is made as a module's is, joins them in
replaced_classes.py.

The replaced module's forward has the code of the original one, and globals in which that name is another function's.
They are copied when the class is made: a name that is assigned to later in transformers' file is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import functional as F
from . import packed_heads
from .attention import scaled_dot_product_attention
from .bytecode import global_of
from .known_rotations import is_partial, is_rotation


class Called(NamedTuple):
    """Global names of a forward, and the function that makes ours of what they mean."""

    names: tuple[str, ...]
    is_known: Callable[[Any], bool]
    ours: Callable[[Any], Any]
    methods: tuple[str, ...] = ("forward",)
    unknown: Callable[[FunctionType], str] = lambda function: ""
    """Another name in a method that is not known, or ""."""
    is_read: Callable[[FunctionType, str], bool] = lambda function, name: True
    """Whether a method that has one of the names has it for that kind."""


def kinds_of(cls: type) -> tuple[str, ...]:
    """The kinds of operators whose functions a class's methods call."""
    return tuple(kind for kind, unknown in called_by(cls).items() if not unknown)


def called_by(cls: type) -> dict[str, str]:
    """The kinds whose names a class's methods have, and the name that does not mean what it is known to mean, or ""."""
    found = {}
    for kind, called in CALLED.items():
        functions = [each for each in map(partial(_caller, cls, called), called.methods) if each]
        if functions:
            unknown = (
                next((name for name in _names(each, called) if not called.is_known(global_of(each, name))), "")
                or called.unknown(each)
                for each in functions
            )
            found[kind] = next(filter(None, unknown), "")
    return found


def _caller(cls: type, called: Called, method: str) -> FunctionType | None:
    """The method of a class, without decorators, if it has one of the names."""
    function = undecorated(getattr(cls, method, None))
    return function if function and _names(function, called) else None


def _names(function: FunctionType, called: Called) -> list[str]:
    names = (name for name in called.names if name in function.__code__.co_names and name in function.__globals__)
    return [name for name in names if called.is_read(function, name)]


def methods_of(cls: type, kinds: tuple[str, ...]) -> dict[str, FunctionType]:
    """The methods of a class that call functions of these kinds, on ours."""
    callers: dict[str, list[Called]] = {}
    for kind in kinds:
        for method in CALLED[kind].methods:
            if _caller(cls, CALLED[kind], method):
                callers.setdefault(method, []).append(CALLED[kind])
    return {method: exchanged(getattr(cls, method), all_called) for method, all_called in callers.items()}


def undecorated(function: Any) -> FunctionType | None:
    """The function below decorators, each of which holds the next one in its closure; else None."""
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        inner = function.__wrapped__
        function = inner if any(_holds(cell, inner) for cell in function.__closure__ or ()) else None
    return function if isinstance(function, FunctionType) else None


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


def exchanged(forward: Any, all_called: list[Called]) -> FunctionType:
    """A function, or one below its decorators, with ours for the names that it calls.

    Torch's compiler takes a global of a function without ``__name__`` from the function, not from the module of that
    name."""
    others, closure = forward.__globals__, forward.__closure__
    inner = getattr(forward, "__wrapped__", None)
    if inner is None:
        own = {name: each.ours(global_of(forward, name)) for each in all_called for name in _names(forward, each)}
        others = {name: value for name, value in others.items() if name != "__name__"} | own
    else:
        made_inner = exchanged(inner, all_called)
        closure = tuple(CellType(made_inner) if _holds(cell, inner) else cell for cell in closure)
    made = FunctionType(forward.__code__, others, forward.__name__, forward.__defaults__, closure)
    for name in ("__kwdefaults__", "__annotations__", "__doc__", "__module__", "__qualname__"):
        setattr(made, name, getattr(forward, name))
    if inner is not None:
        made.__wrapped__ = made_inner  # type: ignore[attr-defined]
    return made


# ------------------------------------------------------------------------------------------------------------ rotations


def _rotation(theirs: Any) -> Callable[..., Any]:
    partial = is_partial(theirs)

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        if not all(_rotates(x, cos, sin, unsqueeze_dim, partial) for x in (q, k)):
            return theirs(q, k, cos, sin, unsqueeze_dim)
        return _rotated(q, cos, sin, unsqueeze_dim), _rotated(k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


def _rotates(x: Tensor, cos: Tensor, sin: Tensor, heads: int, partial: bool) -> bool:
    """Whether the operator takes the call. ``heads``: the axis of the heads of x, which has four. The cosines are of
    (batch or 1, rows, elements that are rotated), and not learned."""
    if heads not in (1, 2) or x.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or cos.dtype != sin.dtype:
        return False
    rotated = cos.shape[2] == x.shape[3] or (partial and cos.shape[2] < x.shape[3])
    learned = cos.requires_grad or sin.requires_grad
    return rotated and not learned and cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == x.shape[3 - heads]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """x rotated, in the dtype that torch promotes the product to."""
    dtype = torch.promote_types(x.dtype, cos.dtype)
    x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
    if heads == 1 and not x.is_contiguous():  # a view of (batch, rows, heads, head_dim)
        return _rotated(x.transpose(1, 2), cos, sin, 2).transpose(1, 2)
    return F.rope(x, cos, sin, False, None, "BHSD" if heads == 1 else "BSHD", cos.shape[-1])


# ------------------------------------------------------------------------------------------------------------ attention


_TABLE = "ALL_ATTENTION_FUNCTIONS"
_SCALED = "scaled_dot_product_attention"


def _is_of_torch(value: Any) -> bool:
    return value is torch or value is nn or value is functional


def _with_attention(theirs: ModuleType) -> ModuleType:
    """A module of torch's as it is, with the library's attention: for what that does not take, it calls torch's."""
    made = ModuleType(theirs.__name__)
    own: dict[str, Any] = {_SCALED: scaled_dot_product_attention}
    if theirs is not functional:
        own = {"functional": _with_attention(functional)} if theirs is nn else {"nn": _with_attention(nn)}
    vars(made).update(vars(theirs) | own)
    return made


def _is_table(value: Any) -> bool:
    cls = type(value)
    return (cls.__module__, cls.__name__) == ("transformers.modeling_utils", "AttentionInterface")


class _Attentions:
    """Transformers' table of attentions, with the operator in place of torch's."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def get_interface(self, implementation: str, default: Any) -> Any:
        theirs = self.theirs.get_interface(implementation, default)
        return _ours(theirs)

    def __getitem__(self, implementation: str) -> Any:
        """Transformers before 5.0 reads the table so."""
        return _ours(self.theirs[implementation])


_SDPA: dict[str, Any] = {}
"""Transformers' function that calls torch's attention: this package imports nothing of transformers by itself."""


def _ours(theirs: Any) -> Any:
    return _attention if theirs is _SDPA.get("function") else theirs


def _attentions(theirs: Any) -> Any:
    if _is_of_torch(theirs):
        return _with_attention(theirs)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _SDPA["function"] = sdpa_attention_forward
    return _Attentions(theirs)


def _attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    others = (attention_mask, kwargs.get("position_bias"), kwargs.get("cache"), kwargs.get("softcap"))
    if any(other is not None for other in others) or dropout or not _fits(query, key, value):
        theirs = _SDPA["function"]
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return theirs(module, query, key, value, attention_mask, **options, **kwargs)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = (-1, 0 if is_causal else -1)
    if (y := packed_heads.attention(query, key, value, scaling, window)) is not None:
        return y.transpose(1, 2), None
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return F.attention(q, k, v, window=window, scale=scaling), None


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the operator takes the call: as many queries as keys, where torch's causal attention is its own."""
    alike = query.dtype is key.dtype is value.dtype and query.dim() == 4
    return alike and 1 < query.shape[2] == key.shape[2] and query.shape[1] % key.shape[1] == 0


CALLED = {
    "rope": Called(("apply_rotary_pos_emb",), is_rotation, _rotation),
    "attention": Called(
        (_TABLE, "F", "functional", "nn", "torch"),
        lambda value: _is_table(value) or _is_of_torch(value),
        _attentions,
        is_read=lambda function, name: name == _TABLE or _SCALED in function.__code__.co_names,
    ),
}
