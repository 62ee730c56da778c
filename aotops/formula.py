"""Formulas: operators as compositions, which a framework differentiates by itself.

A definition states ``Op.formula``, a function of a ``Mathematics`` and of inputs and attributes. A frontend evaluates
and differentiates it where no kernel computes a derivative: in forward mode, and for the derivatives of a backward. The
derivatives of products are products again; ``Op.product`` states those, and the functions here compose them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from inspect import signature
from typing import Any, Protocol

from .op import Attr, Op

Array = Any


class Mathematics(Protocol):
    """The functions of a formula, besides the operators +, -, *, /, comparisons and basic indexing of arrays, which
    broadcast. Each frontend has one. Axes may be negative."""

    ops: Any
    """The functions of the library's operators."""
    narrow: bool
    """Whether what is wide is rounded to 16 bits in the end, and is not differentiated: then an approximation to 1e-5
    will do."""

    def wide(self, x: Array) -> Array:
        """x in the dtype that kernels compute in: float32 for 16 bits."""

    def like(self, x: Array, model: Array) -> Array:
        """x in the dtype of model."""

    def unsigned(self, x: Array) -> Array:
        """The lower 32 bits of integers as a number from 0 on, in a dtype that has room for these. Such arrays have //,
        % and ``xor`` too, with operands below 2**16 that are Python's numbers."""

    def xor(self, x: Array, y: Array) -> Array: ...

    def epsilon(self, x: Array) -> float:
        """The machine epsilon of x's dtype, which is wide."""

    def exp(self, x: Array) -> Array: ...
    def expm1(self, x: Array) -> Array: ...
    def tanh(self, x: Array) -> Array: ...
    def erfc(self, x: Array) -> Array: ...
    def sigmoid(self, x: Array) -> Array: ...
    def rsqrt(self, x: Array) -> Array: ...
    def log_softmax(self, x: Array, axis: int) -> Array: ...
    def logsumexp(self, x: Array, axis: int) -> Array: ...

    def argmax(self, x: Array, axis: int) -> Array:
        """The first index of the greatest number, or of a NaN; of any dtype of integers."""

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        """Three arrays of one shape, except that the condition may have length 1 on an axis."""

    def zeros(self, x: Array) -> Array:
        """Zeros of x's shape and dtype."""

    def arange(self, n: int, model: Array) -> Array:
        """0 to n - 1, in the dtype and on the device of model."""

    def sum(self, x: Array, axes: tuple[int, ...], keepdims: bool = False) -> Array:
        """Without axes: x itself."""

    def mean(self, x: Array, axes: tuple[int, ...]) -> Array:
        """Keeps the axes, with length 1."""

    def any(self, x: Array, axis: int) -> Array: ...

    def count(self, x: Array, model: Array) -> Array:
        """How many elements are true: (), in the dtype of model."""

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        """Along the last axis."""

    def take(self, x: Array, rows: Array) -> Array:
        """Rows of a floating x, (n, m), by their indices, (k,): (k, m). NaN for an index that is no row, or the
        framework's error."""

    def scatter_sum(self, x: Array, rows: Array, n: int) -> Array:
        """The transpose of ``take``: (n, m), the sums of the rows of x, (k, m), that have an index."""

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array: ...
    def swapaxes(self, x: Array, a: int, b: int) -> Array: ...

    def matrix(self, x: Array) -> Array:
        """(..., n) as (rows, n)."""


class Fusing(Mathematics, Protocol):
    """The mathematics of a framework whose compiler fuses its own reductions, and what stands around its own products
    (``Op.fused``, ``Product.fused``)."""

    def var_mean(self, x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
        """The variance, of as many terms as there are, and the mean: in one reduction. Both keep the axes, with length
        1."""

    def matmul(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array: ...

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """``x @ weight.T + bias``."""


class PartMathematics(Mathematics, Protocol):
    """The mathematics of a part of a call whose axes are split over devices (``Op.parts``). An axis is named as in
    ``Parts.dims``."""

    def log(self, x: Array) -> Array: ...

    def max(self, x: Array) -> Array:
        """Along the last axis; -inf where it has no elements."""

    def is_split(self, axis: str) -> bool: ...

    def length(self, axis: str) -> Any:
        """The length of the whole axis."""

    def offset(self, axis: str, length: Any) -> Any:
        """Where this part of a split axis, of this length, begins."""

    def reduce(self, x: Array, how: str, axis: str) -> Array:
        """The "sum" or "max" of x of all parts of an axis; x if it is not split."""

    def is_known(self, x: Array) -> bool:
        """Whether values may be looked at: those of the CPU, outside a compiler."""

    def run(self, **named: Any) -> Any:
        """The results of the entry on this part, with these inputs and attributes instead of its own."""


def compose(m: Mathematics, op: Op, attrs: Sequence[Attr], inputs: Sequence[Array | None]) -> tuple[Array, ...]:
    """The outputs ``op.composed`` by the formula, some of them perhaps wide.

    Raises:
        TypeError: a parameter of the formula is neither an input nor an attribute.
    """
    assert op.formula is not None, f"{op.name} has no formula"
    return _evaluated(op.formula, m, op, attrs, dict(zip(op.inputs, inputs, strict=True)))


def compose_part(
    m: PartMathematics, op: Op, attrs: Sequence[Attr], inputs: Sequence[Array | None]
) -> tuple[Array, ...]:
    """The results of a part of a call by ``op.parts``."""
    assert op.parts is not None, f"{op.name} has no parts"
    return _evaluated(op.parts.function, m, op, attrs, dict(zip(op.inputs, inputs, strict=True)))


def fused(op: Op, forward: Op) -> Callable[..., Any] | None:
    """``Product.fused`` of an operator, or of the backward of ``forward``."""
    if forward.product is None:
        return None
    return forward.product.fused if op is forward else forward.product.fused_backward


def fuse(formula: Callable[..., Any], m: Fusing, op: Op, attrs: Sequence[Attr], tensors: Mapping[str, Array]) -> Any:
    """The results by ``fused``, of inputs or residuals, absent ones left out; or NotImplemented."""
    return _evaluated(formula, m, op, attrs, dict.fromkeys(op.slots) | dict(tensors))


def _evaluated(
    formula: Callable[..., Any], m: Any, op: Op, attrs: Sequence[Attr], tensors: Mapping[str, Array | None]
) -> Any:
    named = dict(zip(op.attrs, attrs, strict=True)) | dict(tensors)
    if odd := [name for name in parameters(formula) if name not in named]:
        raise TypeError(
            f"{op.name}: its formula takes {', '.join(odd)}, expected inputs and attributes: {', '.join(named)}"
        )
    outputs = formula(m, *(named[name] for name in parameters(formula)))
    return outputs if isinstance(outputs, tuple) or outputs is NotImplemented else (outputs,)


def parameters(formula: Callable[..., Any]) -> tuple[str, ...]:
    """The inputs and attributes that a formula takes."""
    return tuple(signature(formula).parameters)[1:]


# ------------------------------------------------------------------------------------------------------------ products
# f(a, b, c) is linear in a and in b, and c is added. Its backward is F(dy, a, b) = (da, db, dc): da is linear in dy and
# in b, db in dy and in a, and dc in dy. So each derivative below is f or F of other arguments.

Run = Callable[[Op, Mapping[str, Array], Container[str]], Mapping[str, Array]]
"""Runs an operator on inputs by name, with the attributes at hand; those that are absent are None. Of the outputs, only
those in the last argument are read."""


def is_bilinear(op: Op, attrs: Sequence[Attr]) -> bool:
    """Whether the operator is bilinear with these attributes."""
    if op.product is None or not op.product.bilinear:
        return False
    return dict(zip(op.attrs, attrs, strict=True)).get(op.product.unless) is None


def bilinear_tangent(m: Mathematics, run: Run, op: Op, inputs: Mapping, tangents: Mapping) -> Array:
    """f(ta, b, tc) + f(a, tb): the output's tangent. ``tangents``: by input, those that are not zero."""
    a, b = op.bilinear  # type: ignore[misc]
    (y,) = op.outputs
    added = {slot: t for slot, t in tangents.items() if slot not in op.bilinear}
    terms = []
    if a in tangents or (added and b not in tangents):
        terms.append({a: tangents[a] if a in tangents else m.zeros(inputs[a]), b: inputs[b]})
    if b in tangents:
        terms.append({a: inputs[a], b: tangents[b]})
    terms[0] |= added
    values = [run(op, term, {y})[y] for term in terms]
    return values[0] if len(values) == 1 else values[0] + values[1]


def backward_tangents(
    m: Mathematics, run: Run, op: Op, inputs: Mapping, tangents: Mapping, wanted: Container[str]
) -> dict[str, Array]:
    """F(tdy, a, b) + F(dy, ta, tb), and dc of tdy alone: the tangents of the backward's outputs that are wanted, where
    they are not zero. ``inputs`` and ``tangents``: of the backward."""
    backward, (a, b), (y,) = op.backward, op.bilinear, op.outputs  # type: ignore[misc]
    assert backward is not None
    found: dict[str, Array] = {}
    if (dy := f"d{y}") in tangents:
        first = run(backward, {**inputs, dy: tangents[dy]}, wanted)
        found |= {name: value for name, value in first.items() if name in wanted}
    names = [name for name in (f"d{a}", f"d{b}") if name in wanted]
    if names and (a in tangents or b in tangents):
        given = {slot: tangents[slot] if slot in tangents else m.zeros(inputs[slot]) for slot in (a, b)}
        second = run(backward, {**inputs, **given}, names)
        found |= {name: found[name] + second[name] if name in found else second[name] for name in names}
    return found


def backward_cotangents(
    m: Mathematics, run: Run, op: Op, inputs: Mapping, cotangents: Mapping, wanted: Container[str]
) -> dict[str, Array]:
    """By input of the backward that is wanted, the gradient for ``cotangents`` of its outputs: f(dda, b, ddc) +
    f(a, ddb) for dy, and F(dy, dda, ddb) for a and b. Those that are absent are zero."""
    backward, (a, b), (y,) = op.backward, op.bilinear, op.outputs  # type: ignore[misc]
    assert backward is not None
    given, dy = {name[1:]: value for name, value in cotangents.items()}, f"d{y}"
    found = {dy: bilinear_tangent(m, run, op, inputs, given)} if given and dy in wanted else {}
    slots = [slot for slot, other in ((a, b), (b, a)) if other in given and slot in wanted]
    if slots:
        factors = {slot: given.get(slot, inputs[slot]) for slot in (a, b)}
        second = run(backward, {**inputs, **factors}, [f"d{slot}" for slot in slots])
        found |= {slot: second[f"d{slot}"] for slot in slots}
    return found
