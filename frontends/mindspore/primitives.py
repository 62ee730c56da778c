"""The operators as functions, and the primitives that they call: each with the gradient that its definition states, as
a primitive again.

Graph mode compiles these functions from their source, and Op.bind with them: a nested function may use what its
enclosing function has, and the names of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from inspect import signature
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from aotops.hosting import Namespace, written_out
from aotops.infer import infer
from aotops.library import Library
from aotops.op import Attr, Op
from aotops.spec import TensorSpec

from .entries import backward_specs, primitive
from .rules import bprop_of_rule, refusal
from .second_order import gradient_of_backward, has_second_order
from .specs import DEVICES, Constant, aligner, spec_of


def functions(library: Library, module: str = __package__) -> dict[str, Callable[..., Any]]:
    """The functions of a library's operators. ``module``: where they are found, for pickle."""
    return {name: _function(op, module) for name, op in library.ops.items()}


@cache
def of(library: Library) -> Namespace:
    """The functions of a library's operators as a module, each made when it is first asked for: those that are defined
    later too. Of a hosted operator:

    - With a rule for shapes in Python, there is a primitive for each set of shapes, and graph mode needs known ones.
    - One that writes to inputs should be given Parameters in graph mode, which orders reads of no other tensor after
      the call.
    """
    return Namespace(library, "mindspore", lambda op, module: {op.name: _function(op, module)}, at_once=True)


def _function(op: Op, module: str) -> Callable[..., Any]:
    run, parameters = _run(op), signature(op.bind)
    # A nested function: automatic mixed precision of level O1 rewrites the sources that it can, and not such.
    bound = f"def bound(): return bind({', '.join(parameters.parameters)})"
    body = f"{bound}\n        inputs, attrs = bound(); return run(inputs, attrs)"
    function = written_out(op.name, str(parameters), body, bind=op.bind, run=run)
    function.__module__, function.__qualname__, function.__doc__ = module, op.name, op.bind.__doc__
    return function


@cache
def _run(op: Op, forward: Op | None = None) -> Callable[..., Any]:
    """The operator as a function of its inputs, as a tuple, and its attributes. ``forward``: the operator of which it
    is the backward."""
    choose = _Choose(op, forward)
    align = aligner(op) if op.broadcast else None
    many, visible = len(op.entry_outputs) > 1, 0 if len(op.outputs) == 1 else slice(len(op.outputs))
    none = not op.outputs

    def run(inputs, attrs):
        if align is not None:
            inputs = align(inputs)
        chosen = choose(attrs, *inputs)
        results = chosen(*[t for t in inputs if t is not None])
        if none:
            return None
        return results[visible] if many else results

    return run


class _Choose(Constant):
    """Checks a call and returns the primitive for it."""

    def __init__(self, op: Op, forward: Op | None = None) -> None:
        super().__init__(op, "primitive")
        self.forward = forward

    def evaluate(self, attrs, specs):
        for (name, kind), value in zip(self.op.attrs.items(), attrs, strict=True):
            if (value is None and not kind.endswith("?")) or (isinstance(value, tuple) and None in value):
                raise TypeError(f"{self.op.name}: {name} is unknown while the graph is compiled, expected a constant")
        given = {slot: spec for slot, spec in zip(self.op.inputs, specs, strict=True) if spec is not None}
        if self.op.foreign is not None:
            return self.hosted(attrs, given)
        attrs, target = self.op.canonical(attrs), ms.get_context("device_target")
        known = given | infer(self.op, attrs, tuple(specs), DEVICES.get(target, target))
        needed = any(spec.shape == () for spec in known.values())  # see primitive
        needed = needed or (self.op.backward is not None and bool(self.op.backward.duplicates))  # see _gradient
        dtypes = tuple((slot, spec.dtype) for slot, spec in known.items() if needed)
        if self.forward is not None:
            return _backward(self.forward, attrs, tuple(given), self.op.entry_outputs, dtypes, target)
        return differentiable(self.op, attrs, tuple(given), dtypes, target)

    def hosted(self, attrs: Any, given: dict[str, TensorSpec]) -> ops.Custom:
        attrs, target = self.op.canonical(attrs), ms.get_context("device_target")
        known = given | infer(self.op, attrs, tuple(given.values()), DEVICES.get(target, target))
        dtypes = tuple((slot, spec.dtype) for slot, spec in known.items())
        if not _needs_shapes(self.op):
            return differentiable(self.op, attrs, tuple(given), dtypes, target)
        if any(dim < 0 for spec in known.values() for dim in spec.shape):
            raise ValueError(
                f"{self.op.name}: a dimension is unknown while the graph is compiled, and the rule for the shapes of "
                f"results is Python's: expected the library to have an InferShape, or same_spec_as"
            )
        shapes = tuple((slot, spec.shape) for slot, spec in known.items())
        return differentiable(self.op, attrs, tuple(given), dtypes, target, shapes)


def _needs_shapes(op: Op) -> bool:
    """Whether MindSpore must be told the shapes of results, of a hosted operator or its backward."""
    own = op.foreign is not None and not op.foreign.by_shapes_alone(op)
    return own or (op.backward is not None and _needs_shapes(op.backward))


# ---------------------------------------------------------------------------------------------------------- primitives


@lru_cache(maxsize=256)  # a network has some dozens; bounded, for attributes that change with each step
def differentiable(
    op: Op,
    attrs: tuple[Attr, ...],
    given: tuple[str, ...],
    dtypes: tuple[tuple[str, str], ...],
    target: str,
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> ops.Custom:
    """``given``: the inputs that are present."""
    bprop = bprop_of_rule(op, op.rule, attrs, of(op.library)) if op.rule is not None else None
    if op.backward is not None:
        inputs = "".join(f"{slot}, " for slot in given)
        body = f"return gradient(({inputs}), out, dout)"
        gradient = _gradient(op, attrs, given, dict(dtypes), target, dict(shapes))
        bprop = written_out("bprop", f"({inputs}out, dout)", body, gradient=gradient)
    return primitive(op, attrs, given, op.entry_outputs, dict(dtypes), target, bprop, dict(shapes))


def _gradient(
    op: Op,
    attrs: Sequence[Attr],
    given: Sequence[str],
    dtypes: Mapping[str, str],
    target: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> Callable[..., Any]:
    """A function of the inputs, as a tuple, the results and their gradients that returns the gradient of each input.
    Without ``dtypes`` all tensors have one (``registered``)."""
    backward = op.backward
    assert backward is not None
    written = op.entry_outputs
    named = [*given, *written, *(f"d{name}" for name in written)]
    taken = [slot for slot in backward.inputs if slot in named]
    merged = backward.merged({**{f"d{y}": dtypes[y] for y in op.outputs}, **dtypes}) if dtypes else backward.duplicates
    shared = {**backward.alias, **merged}
    gradients = [shared.get(f"d{slot}", f"d{slot}") for slot in given]
    factors = backward.factors(attrs)
    scales = [Tensor(factors[f"d{slot}"], ms.float64) if f"d{slot}" in factors else None for slot in given]
    wanted = [y for y in backward.entry_outputs if y in gradients or y in backward.workspace]
    kernel = None
    if backward.has_kernel:
        if backward.foreign is not None:
            dtypes, shapes = backward_specs(op, backward, attrs, dtypes, target, shapes)
        else:
            dtypes = {f"d{slot}": dtypes[slot] for slot in given if dtypes}
        known = tuple(dtypes.items()), target, tuple(shapes.items())
        kernel = _backward(op, tuple(attrs), tuple(taken), tuple(wanted), *known)
        named += wanted
    arguments = [named.index(slot) for slot in taken]
    places = [named.index(name) if name in named else None for name in gradients]
    one, one_gradient = len(written) == 1, len(backward.entry_outputs) == 1

    def gradient(inputs, out, dout):
        tensors = (*inputs, out, dout) if one else (*inputs, *out, *dout)
        if kernel is not None:
            grads = kernel(*[tensors[i] for i in arguments])
            tensors = (*tensors, grads) if one_gradient else (*tensors, *grads)
        found = [ops.zeros_like(x) if i is None else tensors[i] for i, x in zip(places, inputs)]  # noqa: B905
        return tuple([x if scale is None else times(x, scale) for x, scale in zip(found, scales)])  # noqa: B905

    def times(x, scale):
        wide = ms.float64 if x.dtype == ms.float64 else ms.float32
        return (x.astype(wide) * scale.astype(wide)).astype(x.dtype)

    return gradient


@lru_cache(maxsize=256)
def _backward(
    op: Op,
    attrs: tuple[Attr, ...],
    given: tuple[str, ...],
    wanted: tuple[str, ...],
    dtypes: tuple[tuple[str, str], ...],
    target: str,
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> ops.Custom:
    """The backward of ``op``, whose gradient is composed. ``given``, ``wanted``: its inputs and outputs."""
    backward = op.backward
    assert backward is not None
    bprop = refusal(backward, given)
    if has_second_order(op, attrs):
        choose = _Compose(op, attrs, wanted, target)
        inputs = "".join(f"{slot}, " for slot in given)
        every = "".join(f"{slot if slot in given else None}, " for slot in backward.inputs)
        dout = "(dout,)" if len(backward.entry_outputs) == 1 else "dout"
        body = f"return choose((), {every})({inputs}{dout})"
        bprop = written_out("bprop", f"({inputs}out, dout)", body, choose=choose)
    return primitive(backward, attrs, given, wanted, dict(dtypes), target, bprop, dict(shapes))


class _Compose(Constant):
    """Returns the gradient of a backward, a function of its inputs and of the gradients of its outputs."""

    def __init__(self, op: Op, attrs: tuple[Attr, ...], wanted: tuple[str, ...], target: str) -> None:
        assert op.backward is not None
        super().__init__(op.backward, "gradient")
        self.call = op, attrs, wanted, DEVICES.get(target, target)

    def __call__(self, attrs, *inputs):
        specs = [spec_of(self.op, slot, t) for slot, t in zip(self.op.inputs, inputs, strict=True)]
        return _composed(*self.call, tuple(specs), eager=True)

    def evaluate(self, attrs, specs):
        return _composed(*self.call, tuple(specs), eager=False)


@lru_cache(maxsize=256)
def _composed(
    op: Op,
    attrs: tuple[Attr, ...],
    wanted: tuple[str, ...],
    device: str,
    specs: tuple[TensorSpec | None, ...],
    eager: bool,
) -> Callable[..., Any]:
    assert op.backward is not None

    def call(called: Op) -> Callable[..., Any]:
        return _run(called, op if called is op.backward else None)

    given = {slot: spec for slot, spec in zip(op.backward.inputs, specs, strict=True) if spec is not None}
    return gradient_of_backward(op, attrs, tuple(given), wanted, tuple(given.values()), call, device, eager)
