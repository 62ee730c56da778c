"""The operators as functions, and the primitives that they call: each with the gradient that its definition states, as
a primitive again.

Graph mode compiles these functions from their source, and Op.bind with them: a nested function may use what its
enclosing function has, and the names of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from inspect import signature
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from aotops.hosting import Namespace, written_out
from aotops.infer import infer
from aotops.library import Library
from aotops.op import ATTRIBUTE_TYPES, Attr, Op
from aotops.spec import TensorSpec

from .entries import Facts, facts_of_backward, primitive
from .rules import bprop_of_rule, refusal
from .second_order import gradient_of_backward, has_second_order
from .specs import Constant, aligner, device, spec_of, zeros_like


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
                raise TypeError(
                    f"{self.op.name}: {name} is {value}, or unknown while the graph is compiled, expected a constant, "
                    f"{ATTRIBUTE_TYPES[kind.rstrip('?')].expected}"
                )
        op, attrs, on = self.op, self.op.canonical(attrs), device()
        given = {slot: spec for slot, spec in zip(op.inputs, specs, strict=True) if spec is not None}
        known = given | infer(op, attrs, tuple(specs), on)
        told = op.foreign is not None or any(spec.shape == () for spec in known.values())  # see primitive
        told = told or (op.backward is not None and bool(op.backward.duplicates))  # see _gradient
        dtypes = tuple((slot, spec.dtype) for slot, spec in known.items() if told)
        shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
        if _needs_shapes(op):
            if any(dim < 0 for spec in known.values() for dim in spec.shape):
                raise ValueError(
                    f"{op.name}: a dimension is unknown while the graph is compiled, and the rule for the shapes of "
                    f"results is Python's: expected the library to have an InferShape, or same_spec_as"
                )
            shapes = tuple((slot, spec.shape) for slot, spec in known.items())
        facts = Facts(attrs, on, dtypes, shapes)
        if self.forward is not None:
            return _backward(self.forward, tuple(given), op.entry_outputs, facts)
        return differentiable(op, tuple(given), facts)


def primitive_of(op: Op, attrs: tuple[Attr, ...], specs: tuple[TensorSpec | None, ...]) -> ops.Custom:
    """The primitive for inputs of these specs, None for absent ones: a function of those that are given."""
    return _Choose(op).evaluate(attrs, specs)


def _needs_shapes(op: Op) -> bool:
    """Whether MindSpore must be told the shapes of results, of a hosted operator or its backward."""
    own = op.foreign is not None and not op.foreign.by_shapes_alone(op)
    return own or (op.backward is not None and _needs_shapes(op.backward))


# ---------------------------------------------------------------------------------------------------------- primitives


@lru_cache(maxsize=256)  # a network has some dozens; bounded, for attributes that change with each step
def differentiable(op: Op, given: tuple[str, ...], facts: Facts) -> ops.Custom:
    """``given``: the inputs that are present."""
    bprop = bprop_of_rule(op, op.rule, facts.attrs, of(op.library)) if op.rule is not None else None
    if op.backward is not None:
        inputs = "".join(f"{slot}, " for slot in given)
        body = f"return gradient(({inputs}), out, dout)"
        bprop = written_out("bprop", f"({inputs}out, dout)", body, gradient=_gradient(op, op.backward, given, facts))
    return primitive(op, facts, given, op.entry_outputs, bprop)


def _gradient(op: Op, backward: Op, given: tuple[str, ...], facts: Facts) -> Callable[..., Any]:
    """A function of the inputs, as a tuple, the results and their gradients that returns the gradient of each input.
    Without dtypes all tensors have one (``registered``)."""
    dtypes = dict(facts.dtypes)
    written = op.entry_outputs
    named = [*given, *written, *(f"d{name}" for name in written)]
    taken = [slot for slot in backward.inputs if slot in named]
    merged = backward.merged({**{f"d{y}": dtypes[y] for y in op.outputs}, **dtypes}) if dtypes else backward.duplicates
    shared = {**backward.alias, **merged}
    gradients = [shared.get(f"d{slot}", f"d{slot}") for slot in given]
    factors = backward.factors(facts.attrs)
    scales = [Tensor(factors[f"d{slot}"], ms.float64) if f"d{slot}" in factors else None for slot in given]
    wanted = [y for y in backward.entry_outputs if y in gradients or y in backward.workspace]
    kernel = None
    if backward.has_kernel:
        if backward.foreign is not None:
            facts = facts_of_backward(op, backward, facts)
        else:
            facts = facts._replace(dtypes=tuple((f"d{slot}", dtypes[slot]) for slot in given if dtypes))
        kernel = _backward(op, tuple(taken), tuple(wanted), facts)
        named += wanted
    arguments = [named.index(slot) for slot in taken]
    places = [named.index(name) if name in named else None for name in gradients]
    one, one_gradient = len(written) == 1, len(backward.entry_outputs) == 1

    def gradient(inputs, out, dout):
        tensors = (*inputs, out, dout) if one else (*inputs, *out, *dout)
        if kernel is not None:
            grads = kernel(*[tensors[i] for i in arguments])
            tensors = (*tensors, grads) if one_gradient else (*tensors, *grads)
        found = [zeros_like(x) if i is None else tensors[i] for i, x in zip(places, inputs)]  # noqa: B905
        return tuple([x if scale is None else times(x, scale) for x, scale in zip(found, scales)])  # noqa: B905

    def times(x, scale):
        wide = ms.float64 if x.dtype == ms.float64 else ms.float32
        return (x.astype(wide) * scale.astype(wide)).astype(x.dtype)

    return gradient


@lru_cache(maxsize=256)
def _backward(op: Op, given: tuple[str, ...], wanted: tuple[str, ...], facts: Facts) -> ops.Custom:
    """The backward of ``op``, whose gradient is composed. ``given``, ``wanted``: its inputs and outputs."""
    backward = op.backward
    assert backward is not None
    bprop = refusal(backward, given)
    if has_second_order(op, facts.attrs):
        choose = _Compose(backward, op, facts, wanted)
        inputs = "".join(f"{slot}, " for slot in given)
        every = "".join(f"{slot if slot in given else None}, " for slot in backward.inputs)
        dout = "(dout,)" if len(backward.entry_outputs) == 1 else "dout"
        body = f"return choose((), {every})({inputs}{dout})"
        bprop = written_out("bprop", f"({inputs}out, dout)", body, choose=choose)
    return primitive(backward, facts, given, wanted, bprop)


class _Compose(Constant):
    """Returns the gradient of a backward, a function of its inputs and of the gradients of its outputs."""

    def __init__(self, backward: Op, op: Op, facts: Facts, wanted: tuple[str, ...]) -> None:
        super().__init__(backward, "gradient")
        self.call = op, facts.attrs, wanted, facts.device

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
    return gradient_of_backward(op, attrs, given, wanted, call, device, eager)
