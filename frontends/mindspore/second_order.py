"""MindSpore: the gradient of a backward, for derivatives of a higher order and for forward mode, which is a gradient of
a gradient. It is composed as the operator's definition states (aotops/formula.py).

Graph mode compiles sources, and a formula is more Python than it accepts. So a formula runs once for given shapes and
dtypes, on placeholders that write down what it computes, and MindSpore differentiates the function so written.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from aotops.formula import backward_cotangents, compose, is_bilinear
from aotops.hosting import written_out
from aotops.infer import infer
from aotops.op import Attr, Op
from aotops.spec import FLOATING, TensorSpec

from .mathematics import Call, Mathematics, Placeholder, Writer, dtype_of
from .specs import zeros_like


def has_second_order(op: Op, attrs: Sequence[Attr]) -> bool:
    """Whether a definition states the gradient of the operator's backward."""
    return op.backward is not None and (op.backward.formula is not None or is_bilinear(op, attrs))


def gradient_of_backward(
    op: Op,
    attrs: tuple[Attr, ...],
    given: Mapping[str, TensorSpec],
    wanted: Sequence[str],
    call: Call,
    device: str,
    eager: bool,
) -> Callable[..., Any]:
    """A function of the backward's inputs, and of the gradients of its outputs as a tuple, that returns a gradient for
    each of the inputs.

    Args:
        given, wanted: the backward's inputs, with their specs, and outputs that are present.
        eager: PyNative is to call it.

    Raises:
        NotImplementedError: an unknown dimension, with which MindSpore differentiates none of its own sums twice.
    """
    backward = op.backward
    assert backward is not None
    if any(dim < 0 for spec in given.values() for dim in spec.shape):
        raise NotImplementedError(
            f"{backward.name}: a dimension is unknown while the graph is compiled, expected known ones for "
            f"derivatives of a higher order"
        )
    writer = Writer(op.library.ops, call, device)
    arrays = {slot: writer.argument(slot, spec) for slot, spec in given.items()}
    outs = infer(backward, attrs, tuple(given.get(slot) for slot in backward.inputs), device)
    if is_bilinear(op, attrs):
        return _of_products(op, attrs, arrays, {y: outs[y] for y in wanted}, writer)
    return _of_formula(backward, attrs, arrays, {y: outs[y] for y in wanted}, writer, eager)


def _of_formula(
    backward: Op,
    attrs: Sequence[Attr],
    arrays: Mapping[str, Placeholder],
    wanted: Mapping[str, TensorSpec],
    writer: Writer,
    eager: bool,
) -> Callable[..., Any]:
    outputs = compose(Mathematics(writer), backward, attrs, [arrays.get(slot) for slot in backward.inputs])
    composed = dict(zip(backward.composed, outputs, strict=True))
    returned = [y for y in wanted if y in composed]
    results = ", ".join(f"{composed[y].name}.astype({writer.constant(dtype_of(wanted[y].dtype))})" for y in returned)
    given, at = tuple(arrays), list(wanted)
    floating = [slot for slot in given if arrays[slot].dtype in FLOATING]
    function = writer.function("formula", given, results)
    # Graph mode leaves constants, such as the gradient of a sum, out of the gradients, unless they are mutable.
    # PyNative detaches from the enclosing gradient what the inner one is with respect to: it gets copies.
    variables = "".join(f"mutable(copy({slot})), " for slot in floating)
    cotangents = ", ".join(f"copy(dout[{at.index(y)}])" for y in returned)
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
        zeros_like=zeros_like,
    )


def _of_products(
    op: Op,
    attrs: Sequence[Attr],
    arrays: Mapping[str, Placeholder],
    wanted: Mapping[str, TensorSpec],
    writer: Writer,
) -> Callable[..., Any]:
    """Products again: no formula is differentiated."""
    assert op.backward is not None
    given = tuple(arrays)
    cotangents = {
        y: writer.write(f"dout[{i}]", spec.shape, spec.dtype)
        for i, (y, spec) in enumerate(wanted.items())
        if y in op.backward.outputs
    }

    def run(op: Op, named: Mapping[str, Any], _: Container[str]) -> dict[str, Any]:
        return writer.call(op, [named.get(slot) for slot in op.inputs], attrs)

    found = backward_cotangents(Mathematics(writer), run, op, arrays, cotangents, given)
    results = [found[slot].name if slot in found else f"zeros_like({slot})" for slot in given]
    writer.names["zeros_like"] = zeros_like
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
