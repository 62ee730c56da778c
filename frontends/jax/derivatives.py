"""Derivatives: the JVP rule of the primitive. The tangent of an operator is a linear map, whose transpose is the
backward's kernel; that of an operator without a backward is the derivative of its formula.

It is not ``jax.custom_jvp``: JAX drops its rule when it splits a scan that is differentiated twice.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from functools import cache, partial, reduce
from operator import add as plus
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad
from jax.tree_util import tree_unflatten

from aotops.formula import backward_cotangents, backward_tangents, bilinear_tangent, compose, is_bilinear, parameters
from aotops.library import Library
from aotops.op import Op
from aotops.spec import accumulate_dtype

from .custom_call import vary, varying
from .linear_map import tangent_map
from .mathematics import Mathematics
from .primitive import OperatorCall, apply, operator_p
from .private import tangent_type
from .public import of
from .sharding import Array, Attrs, Names


def _jvp(leaves, moved, *, call, tree, program):
    op, attrs = call.op, call.attrs
    given = dict(zip(op.inputs, tree_unflatten(tree, leaves), strict=True))
    tangents = dict(zip(op.inputs, tree_unflatten(tree, moved), strict=True))
    tangents = {slot: t for slot, t in tangents.items() if not (t is None or type(t) is ad.Zero)}
    written = call.wanted
    if call.forward is None and op.has_gradient:
        left_out = op.left_out(tangents)
        written = tuple(s for s in op.entry_outputs if s in call.wanted or (s in op.saved and s not in left_out))
    inputs = tuple(given.values())
    results = apply(op, attrs, written, *inputs, forward=call.forward)
    if call.forward is None:  # named for the policies of jax.checkpoint
        results = tuple(checkpoint_name(y, f"{op.library.name}.{op.name}") for y in results)
    given |= zip(written, results, strict=True)
    # Residuals have no tangent: formulas and derivatives of a higher order are of the inputs.
    outputs = tuple(s for s in call.wanted if s in op.outputs)
    found = dict(zip(outputs, _tangents(call, outputs, given, tangents), strict=True))
    return (
        [given[s] for s in call.wanted],
        [found[s] if s in found else ad.Zero(tangent_type(given[s])) for s in call.wanted],
    )


ad.primitive_jvps[operator_p] = _jvp


def _transpose(cotangents, *leaves, call, tree, program):
    """For ``jax.linear_transpose`` and the rules of others, in whose tangents an operator is called. Of a call that is
    linear in some inputs, the gradient is the transpose, whatever numbers they have."""
    named = dict(zip(call.op.inputs, tree_unflatten(tree, leaves), strict=True))
    places = [i for i, x in enumerate(leaves) if ad.is_undefined_primal(x)]
    slots = [slot for slot, x in named.items() if ad.is_undefined_primal(x)]
    if not _is_linear(call, slots):
        raise NotImplementedError(f"{call.op.name} has no transpose: it is not linear in {' and '.join(slots)}")

    def function(*values):
        whole = dict(enumerate(leaves)) | dict(zip(places, values, strict=True))
        return operator_p.bind(*whole.values(), call=call, tree=tree, program=program)

    zeros = [ad.instantiate_zeros(ad.Zero(leaves[i].aval)) for i in places]
    found = jax.vjp(function, *zeros)[1](list(map(ad.instantiate_zeros, cotangents)))
    transposed = dict(zip(places, found, strict=True))
    return [transposed.get(i) for i in range(len(leaves))]


def _is_linear(call: OperatorCall, slots: Collection[str]) -> bool:
    """Whether the call is linear in some inputs together: as a backward in what it takes for its outputs, a product in
    one factor, or any operator whose gradient for them reads neither them nor a result."""
    op = call.op
    if call.forward is not None:
        return {*slots} <= {f"d{y}" for y in call.forward.outputs}
    if not op.has_gradient:
        return False
    if is_bilinear(op, call.attrs):
        return len({*slots} & {*op.bilinear}) < 2
    return op.rule is None and not (set(op.saved) - op.left_out(slots)) & {*slots, *op.entry_outputs}


ad.primitive_transposes[operator_p] = _transpose


def _tangents(call: OperatorCall, outputs: Names, given: Mapping[str, Array], tangents: Mapping[str, Array]):
    """The tangents of outputs. ``given``: inputs and whatever the backward saves."""
    op, attrs = call.op, call.attrs
    kind: type[_Tangent] | type[_TangentOfBackward]
    if op.backward is not None and not op.backward.has_kernel:
        factors = op.backward.factors(attrs)
        return [reduce(plus, (_times(t, factors.get(f"d{slot}", 1)) for slot, t in tangents.items()))]
    if call.forward is not None and is_bilinear(call.forward, attrs):
        kind, saved = _TangentOfBackward, op.inputs
    elif op.has_gradient and op.constants.isdisjoint(tangents):
        kind, saved = _TangentOfProduct if is_bilinear(op, attrs) else _Tangent, op.saved
    else:
        return _tangents_of_formula(op, attrs, outputs, given, tangents)
    types = tuple(tangent_type(given[s]) for s in outputs)
    left_out = op.left_out(tangents)
    residuals = {s: given[s] for s in saved if s not in left_out and given[s] is not None}
    return tangent_map(kind(op, call.forward, attrs, outputs, types), residuals, tangents, types)


def _times(x: Array, factor: float) -> Array:
    return x if factor == 1 else (x.astype(accumulate_dtype(x.dtype.name)) * factor).astype(x.dtype)


def _tangents_of_formula(op, attrs, wanted, given, moving):
    """For an operator without a gradient of its own, such as a backward, or without one for these inputs."""
    if op.formula is None:
        why = "" if op.foreign else ": derivatives of a higher order are not supported"
        raise NotImplementedError(f"{op.name} has no gradient{why}")

    def formula(moving):
        outputs = _composed(op, attrs, wanted, {**given, **moving})
        return [y.astype(given[s].dtype) for s, y in zip(wanted, outputs, strict=True)]

    return jax.jvp(formula, ({s: given[s] for s in moving},), (moving,))[1]


def _composed(op: Op, attrs: Attrs, wanted: Names, given: Mapping[str, Array]) -> tuple[Array, ...]:
    """The wanted outputs, computed by the formula."""
    outputs = compose(_mathematics(op.library), op, attrs, [given[s] for s in op.inputs])
    named = op.with_aliases(dict(zip(op.composed, outputs, strict=True)))
    return tuple(named[s] for s in wanted)


@cache
def _mathematics(library: Library) -> Mathematics:
    return Mathematics(of(library))


@dataclass(frozen=True)
class _LinearMap:
    """A tangent of an operator's ``moved`` outputs, which are of these types. ``forward``: see ``OperatorCall``."""

    op: Op
    forward: Op | None
    attrs: Attrs
    moved: Names
    types: tuple[Any, ...]

    def takes_none(self, i: int) -> bool:
        return False

    def _product(self, op: Op, inputs: Mapping[str, Array], names: Container[str]) -> dict[str, Array]:
        """These outputs of a product, or of its backward."""
        forward = None if op.backward else self.forward or self.op
        wanted = tuple(y for y in op.outputs if y in names)
        found = apply(op, self.attrs, wanted, *(inputs.get(slot) for slot in op.inputs), forward=forward)
        return dict(zip(wanted, found, strict=True))

    def _zeros(self, residuals: Mapping[str, Array], tangents: Mapping[str, Array]) -> list[Array | None]:
        """Zeros for the moved outputs, on the mesh axes of the arguments."""
        zeros = [jnp.zeros(t.shape, t.dtype) for t in self.types]
        return vary(zeros, varying([*residuals.values(), *tangents.values()]))


class _Tangent(_LinearMap):
    """The transpose is the operator's backward. In forward mode it is the derivative of the operator's formula, or the
    transpose of the backward's where an input of that formula is not saved, so as to save no more."""

    def takes_none(self, i: int) -> bool:
        return self.op.rule is None and self._backward.is_optional(f"d{self.moved[i]}")

    def transpose(self, residuals, cotangents, names):
        given = self._given(residuals, dict(zip(self.moved, cotangents, strict=True)))
        if self.op.rule is not None:
            return self._by_rule(given, names)
        backward, wanted = self._backward, self._names(names)
        inputs = [given.get(s) for s in backward.inputs]
        found = apply(backward, self.attrs, wanted, *vary(inputs, varying(inputs)), forward=self.op)
        return {d[1:]: ct for d, ct in zip(wanted, found, strict=True)}

    def evaluate(self, residuals, tangents):
        op = self.op
        if op.rule is None and self._backward.formula is None:
            raise TypeError(f"{op.name} has no derivative in forward mode: expected grad or vjp, not jvp")
        given = dict.fromkeys(op.inputs) | residuals
        # XLA:CPU miscompiled the transposed backward of lltm in reverse over forward mode (JAX 0.10)
        kept = set(op.saved) - op.left_out(tangents)
        if op.formula and all(s in kept for s in parameters(op.formula) if s in op.inputs):
            types = dict(zip(self.moved, self.types, strict=True))
            return _tangents_of_formula(op, self.attrs, self.moved, given | types, tangents)
        found, transposed = jax.vjp(partial(self._gradients, residuals, tangents), *self._zeros(residuals, tangents))
        return transposed({slot: tangents[slot] for slot in found})

    def _gradients(self, residuals, inputs, *cotangents) -> dict[str, Array]:
        """The backward as a composition: by input, of its dtype."""
        given = self._given(residuals, dict(zip(self.moved, cotangents, strict=True)))
        if self.op.rule is not None:
            found = self._by_rule(given, inputs)
        else:
            wanted = self._names(inputs)
            given = dict.fromkeys(self._backward.inputs) | given
            gradients = _composed(self._backward, self.attrs, wanted, given)
            found = {d[1:]: ct for d, ct in zip(wanted, gradients, strict=True)}
        return {slot: ct.astype(inputs[slot].dtype) for slot, ct in found.items()}

    def _given(self, residuals, cotangents):
        zeros = dict.fromkeys(self.op.outputs)
        return residuals | {f"d{y}": ct for y, ct in (zeros | cotangents).items()}

    def _names(self, names) -> Names:
        return tuple(d for d in self._backward.outputs if d[1:] in names)

    @property
    def _backward(self) -> Op:
        assert self.op.backward is not None
        return self.op.backward

    def _by_rule(self, given, names):
        assert self.op.rule is not None
        attrs = dict(zip(self.op.attrs, self.attrs, strict=True))
        slots = dict.fromkeys(self.op.inputs)
        found = self.op.rule(self.op, of(self.op.library), slots | given | attrs)
        return {slot: ct for slot, ct in zip(self.op.inputs, found, strict=True) if slot in names and ct is not None}


class _TangentOfProduct(_Tangent):
    def evaluate(self, residuals, tangents):
        return (bilinear_tangent(_mathematics(self.op.library), self._product, self.op, residuals, tangents),)


class _TangentOfBackward(_LinearMap):
    """The tangent of the backward of a product."""

    def evaluate(self, residuals, tangents):
        assert self.forward is not None
        m = _mathematics(self.op.library)
        found = backward_tangents(m, self._product, self.forward, residuals, tangents, self.moved)
        zeros = self._zeros(residuals, tangents)
        return tuple(found.get(d, zero) for d, zero in zip(self.moved, zeros, strict=True))

    def transpose(self, residuals, cotangents, names):
        assert self.forward is not None
        given = dict(zip(self.moved, cotangents, strict=True))
        return backward_cotangents(_mathematics(self.op.library), self._product, self.forward, residuals, given, names)
