"""Linear maps with a stated transpose, as a primitive of JAX.

``jax.custom_vjp`` states a gradient and forbids forward mode; ``jax.custom_jvp`` lets JAX transpose the tangent. The
tangent of an operator is such a map: it is evaluated in forward mode, and its transpose, in reverse mode, is the
operator's backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.tree_util import tree_flatten, tree_unflatten

from .private import needs_devices, with_leading_axis

Array = Any
Named = Mapping[str, Array]


class LinearMap(Protocol):
    """Hashable: it is part of the program."""

    def evaluate(self, residuals: Named, tangents: Named) -> tuple[Array, ...]:
        """Linear in the tangents. Those that are absent are zero."""

    def transpose(self, residuals: Named, cotangents: Sequence[Array], names: Sequence[str]) -> dict[str, Array]:
        """The cotangents of the tangents of these names, except those that are zero."""

    def takes_none(self, i: int) -> bool:
        """Whether ``transpose`` takes None for cotangent ``i`` where it is zero, and then has less to do."""


def tangent_map(map: LinearMap, residuals: Named, tangents: Named, types: Sequence[Any]) -> tuple[Array, ...]:
    """The map of the tangents. ``types``: of the results, as JAX's abstract values."""
    leaves, tree = tree_flatten((dict(residuals), dict(tangents)))
    return tuple(_linear.bind(*leaves, map=map, tree=tree, types=tuple(types)))


_linear = Primitive("aotops_linear")
_linear.multiple_results = True


def _evaluate(*operands, map, tree, types):
    return list(map.evaluate(*tree_unflatten(tree, operands)))


def _jvp(operands, moved, *, map, tree, types):
    residuals, tangents = tree_unflatten(tree, operands)
    n = len(operands) - len(tangents)
    moving = [i for i, t in enumerate(moved[:n]) if type(t) is not ad.Zero]
    further = {name: t for name, t in zip(sorted(tangents), moved[n:], strict=True) if type(t) is not ad.Zero}
    terms = []
    if further:
        terms.append(tangent_map(map, residuals, further, types))
    if moving:

        def of_residuals(*values):
            given = dict(zip(moving, values, strict=True))
            return _evaluate(*(given.get(i, x) for i, x in enumerate(operands)), map=map, tree=tree, types=types)

        terms.append(jax.jvp(of_residuals, [operands[i] for i in moving], [moved[i] for i in moving])[1])
    first = tangent_map(map, residuals, tangents, types)
    return first, terms[0] if len(terms) == 1 else [add(*pair) for pair in zip(*terms, strict=True)]


def _transpose(cotangents, *operands, map, tree, types):
    is_linear = [ad.is_undefined_primal(x) for x in operands]
    residuals, tangents = tree_unflatten(tree, operands)
    names = [name for name, x in tangents.items() if ad.is_undefined_primal(x)]
    whole = [
        None if type(ct) is ad.Zero and map.takes_none(i) else ad.instantiate_zeros(ct)
        for i, ct in enumerate(cotangents)
    ]
    found = map.transpose(residuals, whole, names)
    places = tree_unflatten(tree, range(len(operands)))[1]
    results: list[Any] = [ad.Zero(x.aval) if linear else None for x, linear in zip(operands, is_linear, strict=True)]
    for name, ct in found.items():
        results[places[name]] = ct
    return results


def _batch(operands, axes, *, map, tree, types):
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    residual_axes, tangent_axes = (tuple(sorted(a.items())) for a in tree_unflatten(tree, axes))
    batched = _Batched(map, size, residual_axes, tangent_axes)
    types = tuple(with_leading_axis(size, t) for t in types)
    return _linear.bind(*operands, map=batched, tree=tree, types=types), (0,) * len(types)


@dataclass(frozen=True)
class _Batched:
    """A map of each example of a batch. Results are batched along the first axis; an axis is None for what all examples
    share."""

    map: LinearMap
    size: int
    residual_axes: tuple[tuple[str, int | None], ...]
    tangent_axes: tuple[tuple[str, int | None], ...]

    def evaluate(self, residuals: Named, tangents: Named) -> tuple[Array, ...]:
        axes = {name: axis for name, axis in self.tangent_axes if name in tangents}
        return self._each(self.map.evaluate, (dict(self.residual_axes), axes))(residuals, tangents)

    def transpose(self, residuals: Named, cotangents: Sequence[Array], names: Sequence[str]) -> dict[str, Array]:
        def transpose(residuals, cotangents):
            return self.map.transpose(residuals, cotangents, names)

        found = self._each(transpose, (dict(self.residual_axes), 0))(residuals, list(cotangents))
        axes = dict(self.tangent_axes)
        return {
            name: ct.sum(0) if axes[name] is None else jnp.moveaxis(ct, 0, axes[name]) for name, ct in found.items()
        }

    def takes_none(self, i: int) -> bool:
        return self.map.takes_none(i)

    def _each(self, function, axes):
        return jax.vmap(function, axes, axis_size=self.size)


_linear.def_impl(_evaluate)
_linear.def_abstract_eval(lambda *operands, map, tree, types: list(types))
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_evaluate, multiple_results=True))
needs_devices(_linear)
