"""The primitive that a call of an operator is in JAX's programs, and its batching rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.tree_util import tree_flatten, tree_unflatten

from aotops.op import Op

from .custom_call import custom_call
from .sharding import Array, Attrs, Names


@dataclass(frozen=True)
class OperatorCall:
    """A call for the ``wanted`` slots. ``forward``: the operator whose backward it is of, if it is one's."""

    op: Op
    forward: Op | None
    attrs: Attrs
    wanted: Names

    def __repr__(self) -> str:
        return f"{self.op.name}({', '.join(map(str, self.attrs))}) -> {', '.join(self.wanted)}"


def apply(op: Op, attrs: Attrs, wanted: Names, *inputs: Array | None, forward: Op | None = None) -> tuple[Array, ...]:
    """The wanted outputs of an operator. ``forward``: see ``OperatorCall``. JAX itself differentiates aliases."""
    results = dict(zip(op.inputs, inputs, strict=True))
    merged = op.merged({s: x is not None and x.dtype for s, x in results.items()}) if op.duplicates else {}
    sources = {merged.get(s, op.alias.get(s, s)) for s in wanted}
    written = tuple(s for s in (*op.entry_outputs, *op.mutates) if s in sources)
    if written:
        leaves, tree = tree_flatten(inputs)
        launch = partial(custom_call, op, attrs, written)
        program = jax.make_jaxpr(lambda *leaves: launch(*tree_unflatten(tree, leaves)))(*leaves)
        outputs = operator_p.bind(*leaves, call=OperatorCall(op, forward, attrs, written), tree=tree, program=program)
        results |= zip(written, outputs, strict=True)
    results |= {s: results[other] for s, other in merged.items() if s in wanted}
    results = op.with_aliases(results)
    return tuple(results[s] for s in wanted)


operator_p = Primitive("aotops")  # its rule for derivatives: derivatives.py
operator_p.multiple_results = True


def _evaluate(*leaves, call, tree, program):
    return jaxpr_as_fun(program)(*leaves)


def _batch(leaves, axes, *, call, tree, program):
    size = next(x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(leaves, axes, strict=True)]
    batched = tree_unflatten(tree, [axis is not None for axis in axes])
    return _batched(call, size, batched, *tree_unflatten(tree, moved)), (0,) * len(call.wanted)


def _batched(call: OperatorCall, n: int, batched: Sequence[bool], *inputs: Array | None) -> list[Array]:
    """The batching rule. Outputs that may have another leading axis come from one call, the others from a call for each
    index. XLA removes a call whose results are not used, such as the dweight of a weight that is not trained."""
    op, attrs, wanted = call.op, call.attrs, call.wanted
    run = partial(apply, forward=call.forward)
    slots = list(zip(op.inputs, inputs, batched, strict=True))
    ndims = [None if x is None else x.ndim - b for _, x, b in slots]
    at_once = op.takes_batch((slot for slot, _, b in slots if b), ndims)
    together = tuple(s for s in wanted if at_once and s in op.vmappable)
    apart = tuple(s for s in wanted if s not in together)
    results: dict[str, Array] = {}
    if together:
        grown = [
            x if x is None or b or slot not in op.vmappable else jnp.broadcast_to(x, (n, *x.shape))
            for slot, x, b in slots
        ]
        results |= zip(together, run(op, attrs, together, *grown), strict=True)
    if apart:

        def one(rows):
            return run(op, attrs, apart, *(row if b else x for row, (_, x, b) in zip(rows, slots, strict=True)))

        results |= zip(apart, jax.lax.map(one, tuple(x if b else None for _, x, b in slots)), strict=True)
    return [results[s] for s in wanted]


operator_p.def_impl(_evaluate)
operator_p.def_abstract_eval(lambda *leaves, call, tree, program: program.out_avals)
batching.primitive_batchers[operator_p] = _batch
mlir.register_lowering(operator_p, mlir.lower_fun(_evaluate, multiple_results=True))
