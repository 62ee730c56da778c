"""MindSpore: the gradient of a backward, for derivatives of a higher order and for forward mode, which is a gradient of
a gradient. It is composed as the operator's definition states (aotops/formula.py).

Graph mode compiles sources, and a formula is more Python than it accepts. So a formula runs once for given shapes and
dtypes, on placeholders that write down what it computes, and MindSpore differentiates the function so written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from types import EllipsisType, SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from aotops.formula import backward_cotangents, compose, is_bilinear
from aotops.hosting import written_out
from aotops.infer import infer
from aotops.op import Attr, Op
from aotops.spec import FLOATING, TensorSpec, accumulate_dtype

Specs = Sequence[TensorSpec | None]
Call = Callable[[Op], Callable[..., Any]]
"""Of an operator, the function of its inputs, as a tuple, and its attributes."""


def has_second_order(op: Op, attrs: Sequence[Attr]) -> bool:
    """Whether a definition states the gradient of the operator's backward."""
    return op.backward is not None and (op.backward.formula is not None or is_bilinear(op, attrs))


def gradient_of_backward(
    op: Op,
    attrs: Sequence[Attr],
    given: Sequence[str],
    wanted: Sequence[str],
    specs: Specs,
    call: Call,
    device: str,
    eager: bool,
) -> Callable[..., Any]:
    """A function of the backward's inputs, and of the gradients of its outputs as a tuple, that returns a gradient for
    each of the inputs.

    Args:
        given, wanted: the backward's inputs and outputs that are present.
        specs: of ``given``.
        eager: PyNative is to call it.

    Raises:
        NotImplementedError: an unknown dimension, with which MindSpore differentiates none of its own sums twice.
    """
    assert op.backward is not None
    if any(spec is not None and min(spec.shape, default=0) < 0 for spec in specs):
        raise NotImplementedError(
            f"{op.backward.name}: a dimension is unknown while the graph is compiled, expected known ones for "
            f"derivatives of a higher order"
        )
    writer = _Writer(op.library.ops, attrs, call, device)
    known = dict(zip(given, specs, strict=True))
    if is_bilinear(op, attrs):
        return _of_products(op, attrs, wanted, known, writer)
    return _of_formula(op.backward, attrs, wanted, known, writer, eager)


def _of_formula(
    backward: Op, attrs: Sequence[Attr], wanted: Sequence[str], specs: Mapping[str, Any], writer: _Writer, eager: bool
) -> Callable[..., Any]:
    given = tuple(specs)
    arrays = {slot: writer.argument(slot, spec) for slot, spec in specs.items()}
    outputs = compose(_Mathematics(writer), backward, attrs, [arrays.get(slot) for slot in backward.inputs])
    composed = dict(zip(backward.composed, outputs, strict=True))
    outs = infer(backward, tuple(attrs), tuple(specs.get(slot) for slot in backward.inputs), writer.device)
    returned = [y for y in wanted if y in composed]
    results = ", ".join(f"{composed[y].name}.astype({writer.constant(_dtype(outs[y].dtype))})" for y in returned)
    floating = [slot for slot in given if specs[slot].dtype in FLOATING]
    function = writer.function("formula", given, results)
    # Graph mode leaves constants, such as the gradient of a sum, out of the gradients, unless they are mutable.
    # PyNative detaches from the enclosing gradient what the inner one is with respect to: it gets copies.
    variables = "".join(f"mutable(copy({slot})), " for slot in floating)
    cotangents = ", ".join(f"copy(dout[{wanted.index(y)}])" for y in returned)
    sens = cotangents if len(returned) == 1 else f"({cotangents})"
    rest = {slot: f"found[{floating.index(slot)}]" if slot in floating else f"zeros_like({slot})" for slot in given}
    return written_out(
        "gradient_of_backward",
        f"({', '.join(given)}, dout)",
        f"def formula({', '.join(floating)}): return of({', '.join(given)})\n"
        f"        found = differentiate(formula)({variables}{sens})\n"
        f"        return {', '.join(rest[slot] for slot in given)},",
        of=function,
        copy=_CopyOfSecondOrder(backward) if eager and writer.reshapes else _copy,
        differentiate=ops.GradOperation(get_all=True, sens_param=True),
        mutable=ms.mutable,
        zeros_like=ops.zeros_like,
    )


def _of_products(
    op: Op, attrs: Sequence[Attr], wanted: Sequence[str], specs: Mapping[str, Any], writer: _Writer
) -> Callable[..., Any]:
    """Products again: no formula is differentiated."""
    backward = op.backward
    assert backward is not None
    given = tuple(specs)
    arrays = {slot: writer.argument(slot, spec) for slot, spec in specs.items()}
    outs = infer(backward, tuple(attrs), tuple(specs.get(slot) for slot in backward.inputs), writer.device)
    cotangents = {
        y: writer.write(f"dout[{i}]", outs[y].shape, outs[y].dtype)
        for i, y in enumerate(wanted)
        if y in backward.outputs
    }

    def run(op: Op, named: Mapping[str, Any], _: Container[str]) -> dict[str, Any]:
        return writer.call(op, [named.get(slot) for slot in op.inputs], attrs)

    found = backward_cotangents(_Mathematics(writer), run, op, arrays, cotangents, given)
    results = [found[slot].name if slot in found else f"zeros_like({slot})" for slot in given]
    writer.names["zeros_like"] = ops.zeros_like
    return writer.function("gradient_of_backward", (*given, "dout"), ", ".join(results) + ",")


def _copy(x):
    return x * 1


class _CopyOfSecondOrder(nn.Cell):
    """A copy that refuses to be differentiated. MindSpore 2.10's PyNative loses terms, silently, when it differentiates
    the gradient of what changes a shape (reshape, sum, transpose): so it does of its own operators."""

    def __init__(self, backward: Op) -> None:
        super().__init__()
        self.backward = backward

    def construct(self, x):
        return x * 1

    def bprop(self, x, out, dout):
        raise NotImplementedError(
            f"{self.backward.name}: derivatives of the third order are not supported in PyNative mode, except of "
            f"elementwise operators and of products: differentiate in graph mode or within ms.jit"
        )


def _dtype(name: str) -> Any:
    return getattr(ms, "bool_" if name == "bool" else name)


# ------------------------------------------------------------------------------------------------------ what is written


class _Writer:
    """The lines of a function, and the names in them that are not its arguments."""

    def __init__(self, known: Mapping[str, Op], attrs: Sequence[Attr], call: Call, device: str) -> None:
        self.known, self.attrs, self.operator, self.device = known, attrs, call, device
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.reshapes = False
        """Whether a shape changes, other than by broadcasting."""

    def argument(self, name: str, spec: TensorSpec) -> _Array:
        return _Array(self, name, spec.shape, spec.dtype)

    def write(self, expression: str, shape: Sequence[int], dtype: str) -> _Array:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return _Array(self, name, shape, dtype)

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def call(self, op: Op, inputs: Sequence[_Array | None], attrs: Sequence[Attr]) -> dict[str, _Array]:
        """The outputs of an operator of the library."""
        attrs = op.canonical(attrs)
        specs = tuple(None if x is None else TensorSpec(x.shape, x.dtype) for x in inputs)
        outs = infer(op, attrs, specs, self.device)
        name = self.constant(self.operator(op))
        arguments = "".join(f"{x.name if x is not None else None}, " for x in inputs)
        values = self.constant(attrs)
        line = f"{name}(({arguments}), {values})"
        if len(op.entry_outputs) == 1:
            (y,) = op.outputs
            return {y: self.write(line, outs[y].shape, outs[y].dtype)}
        many = self.write(line, (), "")
        if len(op.outputs) == 1:
            return {y: _Array(self, many.name, outs[y].shape, outs[y].dtype) for y in op.outputs}
        return {y: self.write(f"{many.name}[{i}]", outs[y].shape, outs[y].dtype) for i, y in enumerate(op.outputs)}

    def function(self, name: str, parameters: Sequence[str], results: str) -> Callable[..., Any]:
        body = "\n        ".join([*self.lines, f"return {results}"])
        return written_out(name, f"({', '.join(parameters)})", body, **self.names)


class _Array:
    """A tensor of the function that is written."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, writer: _Writer, name: str, shape: Sequence[int], dtype: str) -> None:
        self.writer, self.name, self.dtype = writer, name, dtype
        self.shape = tuple(shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def _operand(self, other: Any) -> str:
        if isinstance(other, _Array):
            return other.name
        return self.writer.constant(Tensor(other, _dtype(self.dtype)))  # MindSpore rounds a number to float32

    def _binary(self, template: str, other: Any, dtype: str | None = None) -> _Array:
        shape = np.broadcast_shapes(self.shape, getattr(other, "shape", ()))
        return self.writer.write(template.format(self.name, self._operand(other)), shape, dtype or self.dtype)

    def __add__(self, other: Any) -> _Array:
        return self._binary("{0} + {1}", other)

    def __sub__(self, other: Any) -> _Array:
        return self._binary("{0} - {1}", other)

    def __rsub__(self, other: Any) -> _Array:
        return self._binary("{1} - {0}", other)

    def __mul__(self, other: Any) -> _Array:
        return self._binary("{0} * {1}", other)

    def __truediv__(self, other: Any) -> _Array:
        return self._binary("{0} / {1}", other)

    def __rtruediv__(self, other: Any) -> _Array:
        return self._binary("{1} / {0}", other)

    def __neg__(self) -> _Array:
        return self.writer.write(f"-{self.name}", self.shape, self.dtype)

    __radd__, __rmul__ = __add__, __mul__

    def __gt__(self, other: Any) -> _Array:
        return self._binary("{0} > {1}", other, "bool")

    def __lt__(self, other: Any) -> _Array:
        return self._binary("{0} < {1}", other, "bool")

    def __ge__(self, other: Any) -> _Array:
        return self._binary("{0} >= {1}", other, "bool")

    def __le__(self, other: Any) -> _Array:
        return self._binary("{0} <= {1}", other, "bool")

    def __eq__(self, other: Any) -> _Array:  # type: ignore[override]
        return self._binary("{0} == {1}", other, "bool")

    def __ne__(self, other: Any) -> _Array:  # type: ignore[override]
        return self._binary("{0} != {1}", other, "bool")

    def __getitem__(self, index: Any) -> _Array:
        """``[..., i]``, of which i is None, an integer or a slice."""
        self.writer.reshapes = True
        rest, last = index
        assert isinstance(rest, EllipsisType)
        if last is None:
            return self.writer.write(f"{self.name}[..., None]", (*self.shape, 1), self.dtype)
        before = self.shape[:-1]
        if isinstance(last, int):
            return self.writer.write(f"{self.name}[..., {last}]", before, self.dtype)
        ends = "" if last.start is None else last.start, "" if last.stop is None else last.stop
        n = len(range(self.shape[-1])[last])
        return self.writer.write(f"{self.name}[..., {ends[0]}:{ends[1]}]", (*before, n), self.dtype)


class _Mathematics:
    """aotops.formula.Mathematics, of what is written. ``log_softmax`` is composed: MindSpore's own can be
    differentiated once."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self.ops = SimpleNamespace(**{name: self._operator(op) for name, op in writer.known.items()})

    def _operator(self, op: Op) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            inputs, attrs = op.bind(*arguments)
            found = tuple(self._writer.call(op, inputs, attrs).values())
            return found[0] if len(found) == 1 else found

        return call

    def exp(self, x: _Array) -> _Array:
        return self._apply(ops.exp, x, "", x.shape)

    def expm1(self, x: _Array) -> _Array:
        return self._apply(ops.expm1, x, "", x.shape)

    def tanh(self, x: _Array) -> _Array:
        return self._apply(ops.tanh, x, "", x.shape)

    def erfc(self, x: _Array) -> _Array:
        return self._apply(ops.erfc, x, "", x.shape)

    def sigmoid(self, x: _Array) -> _Array:
        return self._apply(ops.sigmoid, x, "", x.shape)

    def rsqrt(self, x: _Array) -> _Array:
        return self._apply(ops.rsqrt, x, "", x.shape)

    def _apply(self, function: Any, x: _Array, rest: str, shape: Sequence[int], dtype: str | None = None) -> _Array:
        self._writer.reshapes |= tuple(shape) != x.shape
        return self._writer.write(f"{self._writer.constant(function)}({x.name}{rest})", shape, dtype or x.dtype)

    def _as(self, x: _Array, dtype: str) -> _Array:
        if x.dtype == dtype:
            return x
        return self._writer.write(f"{x.name}.astype({self._writer.constant(_dtype(dtype))})", x.shape, dtype)

    def wide(self, x: _Array) -> _Array:
        return self._as(x, accumulate_dtype(x.dtype))

    def like(self, x: _Array, model: _Array) -> _Array:
        return self._as(x, model.dtype)

    def epsilon(self, x: _Array) -> float:
        return 2.0**-52 if x.dtype == "float64" else 2.0**-23

    def log_softmax(self, x: _Array, axis: int) -> _Array:
        shape = _reduced(x, (axis,), keepdims=True)
        most = self._apply(ops.amax, x, f", {axis}, True", shape)
        less = x - self._apply(ops.stop_gradient, most, "", shape)
        total = self.sum(self.exp(less), (axis,), keepdims=True)
        return less - self._apply(ops.log, total, "", shape)

    def where(self, condition: _Array, x: _Array, y: _Array) -> _Array:
        return self._apply(ops.where, condition, f", {x.name}, {y.name}", x.shape, x.dtype)

    def zeros(self, x: _Array) -> _Array:
        return self._apply(ops.zeros_like, x, "", x.shape)

    def arange(self, n: int, model: _Array) -> _Array:
        numbers = self._writer.constant(Tensor(list(range(n)), _dtype(model.dtype)))
        return _Array(self._writer, numbers, (n,), model.dtype)

    def sum(self, x: _Array, axes: tuple[int, ...], keepdims: bool = False) -> _Array:
        if not axes:
            return x
        return self._apply(ops.sum, x, f", {axes}, {keepdims}", _reduced(x, axes, keepdims))

    def mean(self, x: _Array, axes: tuple[int, ...]) -> _Array:
        return self._apply(ops.mean, x, f", {axes}, True", _reduced(x, axes, keepdims=True))

    def any(self, x: _Array, axis: int) -> _Array:
        return self._apply(ops.any, x, f", {axis}", _reduced(x, (axis,), keepdims=False))

    def count(self, x: _Array, model: _Array) -> _Array:
        return self.sum(self._as(x, model.dtype), tuple(range(x.ndim)))

    def concatenate(self, arrays: Sequence[_Array]) -> _Array:
        self._writer.reshapes = True
        joined = self._writer.constant(ops.concat)
        length = sum(x.shape[-1] for x in arrays)
        names = ", ".join(x.name for x in arrays)
        return self._writer.write(f"{joined}(({names}), -1)", (*arrays[0].shape[:-1], length), arrays[0].dtype)

    def reshape(self, x: _Array, shape: Sequence[int]) -> _Array:
        return self._apply(ops.reshape, x, f", {tuple(shape)}", shape)

    def matrix(self, x: _Array) -> _Array:
        return self.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _reduced(x: _Array, axes: Sequence[int], keepdims: bool) -> tuple[int, ...]:
    gone = {axis % x.ndim for axis in axes}
    return tuple(1 if i in gone else n for i, n in enumerate(x.shape) if keepdims or i not in gone)
