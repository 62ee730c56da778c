"""Shapes, dtypes and workspaces of a call, inferred by the library (cuda_src/aot.h: ``<entry>Infer``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_void_p
from functools import lru_cache
from typing import Any

from . import library
from .extra import encode
from .op import Attr, Op
from .spec import TensorSpec

UNKNOWN_DIM, UNKNOWN_RANK = -1, -2
"""An unknown dimension; as the only element of a shape, an unknown rank."""

MAX_NDIM = 32  # cuda_src/aot.h: kMaxNdim
_Dims = POINTER(c_int64)
Specs = tuple[TensorSpec | None, ...]


@lru_cache(maxsize=4096)
def infer(op: Op, attrs: tuple[Attr, ...], specs: Specs, device: str = "cpu") -> dict[str, TensorSpec]:
    """The spec of every output, residual and workspace, by name.

    Args:
        attrs: as ``Op.canonical`` gives them.
        specs: one for each of ``op.inputs``, None where it is absent. Unknown dimensions make outputs that depend on
            them unknown.
        device: "cpu" or "cuda"; workspaces depend on it. A library without an entry for it infers for the other one.

    Raises:
        TypeError, ValueError: inputs or attributes that the operator does not accept.
    """
    _check_present(op, specs)
    if not op.has_kernel:
        return _with_aliases(op, specs, {})
    if op.foreign:
        return _infer_hosted(op, attrs, specs, device)
    found = _infer_in_library(op, attrs, specs, device)
    return _with_aliases(op, specs, dict(zip(op.entry_outputs, found, strict=True)))


def _infer_hosted(op: Op, attrs: tuple[Attr, ...], specs: Specs, device: str) -> dict[str, TensorSpec]:
    assert op.foreign is not None
    told = op.foreign.specs(op, attrs, specs, lambda: _infer_in_library(op, attrs, specs, device))
    found = dict(zip(op.outputs, told, strict=True))
    if op.workspace:
        found[op.workspace[0]] = _infer_in_library(op, attrs, (*specs, *told), device)[-1]
    return found


def _infer_in_library(op: Op, attrs: tuple[Attr, ...], specs: Specs, device: str) -> list[TensorSpec]:
    """One for each of ``op.entry_outputs``. Of a hosted operator, specs of outputs may follow those of the inputs, and
    a dtype that its library does not infer is empty."""
    bound = _bound(op, attrs, device, tuple(spec is not None for spec in specs[: len(op.inputs)]))
    given = [spec for spec in specs if spec is not None]
    rows = [(c_int64 * len(spec.shape))(*spec.shape) for spec in given]
    names = (c_char_p * len(given))(*(spec.dtype.encode() for spec in given))  # dtypes of outputs may be these
    n, n_out = len(given), len(op.entry_outputs)
    ndims, shapes, dtypes = (c_int * n_out)(), (c_int64 * (n_out * MAX_NDIM))(), (c_char_p * n_out)()
    status = bound.infer(
        n,
        (c_int * n)(*map(len, rows)),
        (_Dims * n)(*(ctypes.cast(row, _Dims) for row in rows)),
        names,
        bound.extra,
        ndims,
        shapes,
        dtypes,
    )
    op.library.functions_of(op).check(status)
    starts = range(0, n_out * MAX_NDIM, MAX_NDIM)
    return [
        TensorSpec(tuple(shapes[at : at + ndim]), (dtype or b"").decode())
        for at, ndim, dtype in zip(starts, ndims, dtypes, strict=True)
    ]


def infer_symbolic(
    op: Op,
    attrs: Sequence[Any],
    specs: Sequence[TensorSpec | None],
    number: Callable[[Any], int],
    device: str = "cpu",
) -> dict[str, TensorSpec]:
    """The spec of every output and residual, by name, for symbolic dimensions, which are objects of a framework.

    Args:
        number: a function of a dimension: the int to check instead of it, or ``UNKNOWN_DIM``.
    """
    if op.foreign:
        return _infer_hosted_symbolic(op, attrs, specs, device)
    numbers = op.canonical([tuple(map(number, a)) if isinstance(a, tuple) else a for a in attrs])
    plain = tuple(spec and TensorSpec(tuple(map(number, spec.shape)), spec.dtype) for spec in specs)
    found = infer(op, numbers, plain, device)
    call = op.call(attrs, [spec and spec.shape for spec in specs])
    shapes = {y: getattr(call, x) for y, x in op.same_spec_as.items()}
    shapes |= {y: shape(call) for y, shape in op.shapes.items()}
    return _with_aliases(op, specs, {y: TensorSpec(shapes[y], found[y].dtype) for y in op.results})


def _infer_hosted_symbolic(
    op: Op, attrs: Sequence[Any], specs: Sequence[TensorSpec | None], device: str
) -> dict[str, TensorSpec]:
    """A rule in Python takes the dimensions as they are. For the library each becomes a number, which a framework may
    refuse."""
    foreign = op.foreign
    assert foreign is not None

    def from_library() -> list[TensorSpec]:
        try:
            plain = tuple(spec and TensorSpec(tuple(map(int, spec.shape)), spec.dtype) for spec in specs)
            numbers = op.canonical([tuple(map(int, a)) if isinstance(a, tuple) else a for a in attrs])
        except Exception as error:
            raise ValueError(
                f"{op.name}: the InferShape of {op.library.path.name} takes numbers, and a dimension is symbolic: "
                f"define the operator with infer=, a rule in Python"
            ) from error
        return _infer_in_library(op, numbers, plain, device)

    return dict(zip(op.outputs, foreign.specs(op, attrs, specs, from_library), strict=True))


def _check_present(op: Op, specs: Specs) -> None:
    for slot, spec in zip(op.inputs, specs, strict=True):
        if spec is None and slot not in op.optional:
            raise TypeError(f"{op.name}: {slot} is None, expected a tensor")


def _with_aliases(op: Op, specs: Sequence[TensorSpec | None], written: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    named = op.with_aliases(dict(zip(op.inputs, specs, strict=True)) | written)
    return {name: named[name] for name in (*op.outputs, *op.residuals, *op.workspace) if name in named}


class _Bound:
    """An operator's attributes, read once by its Init, and the function that infers."""

    def __init__(self, of: Any, entry: str, attrs: str) -> None:
        host = library.load()
        self._delete = host.aot_extra_delete
        self.extra = c_void_p(host.aot_extra_new(attrs.encode()))
        of.check(getattr(of, f"{entry}Init")(None, None, None, self.extra))
        self.infer = getattr(of, f"{entry}Infer")
        ints, texts = POINTER(c_int), POINTER(c_char_p)
        self.infer.argtypes = [c_int, ints, POINTER(_Dims), texts, c_void_p, ints, _Dims, texts]

    def __del__(self) -> None:
        if extra := getattr(self, "extra", None):
            self._delete(extra)


def _other_device(op: Op) -> str:
    """The device to infer for instead of one without an entry."""
    return "cuda" if op.library.entry_address(op, "cpu") is None and op.library.entry_address(op, "cuda") else "cpu"


@lru_cache(maxsize=256)
def _bound(op: Op, attrs: tuple[Attr, ...], device: str, given: tuple[bool, ...]) -> _Bound:
    if op.library.entry_address(op, device) is None:
        device = next(iter(op.foreign.symbols)) if op.foreign else _other_device(op)
    entry = op.library.entry_name(op, device)
    masks = (*given, *(True for _ in op.entry_outputs))
    return _Bound(op.library.functions_of(op), entry, encode(op, attrs, masks))
