"""The mathematics of operators' formulas in MindSpore: placeholders that write down what is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType, SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from aotops.hosting import written_out
from aotops.infer import infer
from aotops.op import Attr, Op
from aotops.spec import TensorSpec, accumulate_dtype

Call = Callable[[Op], Callable[..., Any]]
"""For an operator, the function of its inputs, as a tuple, and its attributes."""


def dtype_of(name: str) -> Any:
    return getattr(ms, "bool_" if name == "bool" else name)


class Writer:
    """The lines of a function, and the names in them that are not its arguments."""

    def __init__(self, known: Mapping[str, Op], call: Call, device: str) -> None:
        self.known, self.operator, self.device = known, call, device
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.reshapes = False
        """Whether a shape changes, other than by broadcasting."""

    def argument(self, name: str, spec: TensorSpec) -> Placeholder:
        return Placeholder(self, name, spec.shape, spec.dtype)

    def write(self, expression: str, shape: Sequence[int], dtype: str) -> Placeholder:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return Placeholder(self, name, shape, dtype)

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def call(self, op: Op, inputs: Sequence[Placeholder | None], attrs: Sequence[Attr]) -> dict[str, Placeholder]:
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
            return {y: Placeholder(self, many.name, outs[y].shape, outs[y].dtype) for y in op.outputs}
        return {y: self.write(f"{many.name}[{i}]", outs[y].shape, outs[y].dtype) for i, y in enumerate(op.outputs)}

    def function(self, name: str, parameters: Sequence[str], results: str) -> Callable[..., Any]:
        body = "\n        ".join([*self.lines, f"return {results}"])
        return written_out(name, f"({', '.join(parameters)})", body, **self.names)


def _binary(template: str, dtype: str | None = None) -> Any:
    """A method for an operator of Python's. ``dtype``: of the result, if it is not the tensor's."""

    def method(self: Placeholder, other: Any) -> Placeholder:
        shape = np.broadcast_shapes(self.shape, getattr(other, "shape", ()))
        if isinstance(other, Placeholder):
            operand = other.name
        else:
            operand = self.writer.constant(Tensor(other, dtype_of(self.dtype)))  # MindSpore rounds a number to float32
        return self.writer.write(template.format(self.name, operand), shape, dtype or self.dtype)

    return method


class Placeholder:
    """A tensor of the function that is written."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, writer: Writer, name: str, shape: Sequence[int], dtype: str) -> None:
        self.writer, self.name, self.dtype = writer, name, dtype
        self.shape = tuple(shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    __add__ = __radd__ = _binary("{0} + {1}")
    __mul__ = __rmul__ = _binary("{0} * {1}")
    __sub__, __rsub__ = _binary("{0} - {1}"), _binary("{1} - {0}")
    __truediv__, __rtruediv__ = _binary("{0} / {1}"), _binary("{1} / {0}")
    __floordiv__, __mod__ = _binary("{0} // {1}"), _binary("{0} % {1}")
    __gt__, __lt__ = _binary("{0} > {1}", "bool"), _binary("{0} < {1}", "bool")
    __ge__, __le__ = _binary("{0} >= {1}", "bool"), _binary("{0} <= {1}", "bool")
    __eq__, __ne__ = _binary("{0} == {1}", "bool"), _binary("{0} != {1}", "bool")

    def __neg__(self) -> Placeholder:
        return self.writer.write(f"-{self.name}", self.shape, self.dtype)

    def __getitem__(self, index: Any) -> Placeholder:
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


def _elementwise(function: Any) -> Any:
    return lambda self, x: self._apply(function, x, "", x.shape)


class Mathematics:
    """aotops.formula.Mathematics, of what is written. ``log_softmax`` is composed: MindSpore's own can be
    differentiated once."""

    narrow = False
    exp, expm1, tanh, erfc = map(_elementwise, (ops.exp, ops.expm1, ops.tanh, ops.erfc))
    sigmoid, rsqrt, zeros = map(_elementwise, (ops.sigmoid, ops.rsqrt, ops.zeros_like))

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.ops = SimpleNamespace(**{name: self._operator(op) for name, op in writer.known.items()})

    def _operator(self, op: Op) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            inputs, attrs = op.bind(*arguments)
            found = tuple(self._writer.call(op, inputs, attrs).values())
            return found[0] if len(found) == 1 else found

        return call

    def _apply(
        self, function: Any, x: Placeholder, rest: str, shape: Sequence[int], dtype: str | None = None
    ) -> Placeholder:
        self._writer.reshapes |= tuple(shape) != x.shape
        return self._writer.write(f"{self._writer.constant(function)}({x.name}{rest})", shape, dtype or x.dtype)

    def _as(self, x: Placeholder, dtype: str) -> Placeholder:
        if x.dtype == dtype:
            return x
        return self._writer.write(f"{x.name}.astype({self._writer.constant(dtype_of(dtype))})", x.shape, dtype)

    def wide(self, x: Placeholder) -> Placeholder:
        return self._as(x, accumulate_dtype(x.dtype))

    def like(self, x: Placeholder, model: Placeholder) -> Placeholder:
        return self._as(x, model.dtype)

    def unsigned(self, x: Placeholder) -> Placeholder:
        return self._as(x, "int64") % 2**32

    def xor(self, x: Placeholder, y: Placeholder) -> Placeholder:
        shape = np.broadcast_shapes(x.shape, y.shape)
        return self._apply(ops.bitwise_xor, x, f", {y.name}", shape)

    def epsilon(self, x: Placeholder) -> float:
        return 2.0**-52 if x.dtype == "float64" else 2.0**-23

    def log_softmax(self, x: Placeholder, axis: int) -> Placeholder:
        less, _, log = self._exponentials(x, axis)
        return less - log

    def logsumexp(self, x: Placeholder, axis: int) -> Placeholder:
        _, most, log = self._exponentials(x, axis)
        return self.reshape(most + log, _reduced(x, (axis,), keepdims=False))

    def _exponentials(self, x: Placeholder, axis: int) -> tuple[Placeholder, Placeholder, Placeholder]:
        """x less its maximum, that maximum, and the logarithm of the sum of their exponentials."""
        shape = _reduced(x, (axis,), keepdims=True)
        most = self._apply(ops.stop_gradient, self._apply(ops.amax, x, f", {axis}, True", shape), "", shape)
        less = x - most
        total = self.sum(self.exp(less), (axis,), keepdims=True)
        return less, most, self._apply(ops.log, total, "", shape)

    def argmax(self, x: Placeholder, axis: int) -> Placeholder:
        return self._apply(ops.argmax, x, f", {axis}", _reduced(x, (axis,), keepdims=False), "int64")

    def where(self, condition: Placeholder, x: Placeholder, y: Placeholder) -> Placeholder:
        return self._apply(ops.where, condition, f", {x.name}, {y.name}", x.shape, x.dtype)

    def arange(self, n: int, model: Placeholder) -> Placeholder:
        numbers = self._writer.constant(Tensor(list(range(n)), dtype_of(model.dtype)))
        return Placeholder(self._writer, numbers, (n,), model.dtype)

    def sum(self, x: Placeholder, axes: tuple[int, ...], keepdims: bool = False) -> Placeholder:
        if not axes:
            return x
        return self._apply(ops.sum, x, f", {axes}, {keepdims}", _reduced(x, axes, keepdims))

    def mean(self, x: Placeholder, axes: tuple[int, ...]) -> Placeholder:
        return self._apply(ops.mean, x, f", {axes}, True", _reduced(x, axes, keepdims=True))

    def any(self, x: Placeholder, axis: int) -> Placeholder:
        return self._apply(ops.any, x, f", {axis}", _reduced(x, (axis,), keepdims=False))

    def count(self, x: Placeholder, model: Placeholder) -> Placeholder:
        return self.sum(self._as(x, model.dtype), tuple(range(x.ndim)))

    def concatenate(self, arrays: Sequence[Placeholder]) -> Placeholder:
        self._writer.reshapes = True
        joined = self._writer.constant(ops.concat)
        length = sum(x.shape[-1] for x in arrays)
        names = ", ".join(x.name for x in arrays)
        return self._writer.write(f"{joined}(({names}), -1)", (*arrays[0].shape[:-1], length), arrays[0].dtype)

    def take(self, x: Placeholder, rows: Placeholder) -> Placeholder:
        return self._apply(ops.gather, x, f", {rows.name}, 0", (*rows.shape, *x.shape[1:]))

    def scatter_sum(self, x: Placeholder, rows: Placeholder, n: int) -> Placeholder:
        return self._apply(ops.unsorted_segment_sum, x, f", {rows.name}, {n}", (n, *x.shape[1:]))

    def reshape(self, x: Placeholder, shape: Sequence[int]) -> Placeholder:
        return self._apply(ops.reshape, x, f", {tuple(shape)}", shape)

    def swapaxes(self, x: Placeholder, a: int, b: int) -> Placeholder:
        shape = list(x.shape)
        shape[a], shape[b] = shape[b], shape[a]
        self._writer.reshapes = True
        return self._apply(ops.swapaxes, x, f", {a}, {b}", shape)

    def matrix(self, x: Placeholder) -> Placeholder:
        return self.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _reduced(x: Placeholder, axes: Sequence[int], keepdims: bool) -> tuple[int, ...]:
    gone = {axis % x.ndim for axis in axes}
    return tuple(1 if i in gone else n for i, n in enumerate(x.shape) if keepdims or i not in gone)
