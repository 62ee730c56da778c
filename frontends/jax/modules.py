"""Modules, in the form that is usual in JAX: a tuple of sizes, with ``init`` and ``apply``."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aotops.ops import BUILTIN

from .public import of
from .sharding import Array

_ops = of(BUILTIN)


class LLTM(NamedTuple):
    """The cell of PyTorch's tutorial "Custom C++ and CUDA Extensions". It has no state, as is usual in
    JAX: ``init(key)`` returns the parameters, ``apply(parameters, input, (old_h, old_cell))`` new_h and
    new_cell."""

    input_features: int
    state_size: int

    def init(self, key: Array, dtype: Any = jnp.float32) -> dict[str, Array]:
        """``weights`` (3 * state, state + features) and ``bias`` (1, 3 * state), uniform within 1 / sqrt(state)."""
        shapes = {
            "weights": (3 * self.state_size, self.state_size + self.input_features),
            "bias": (1, 3 * self.state_size),
        }
        bound = self.state_size**-0.5
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.uniform(key, shape, dtype, -bound, bound)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def apply(self, parameters: dict[str, Array], input: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        return _ops.lltm(input, parameters["weights"], parameters["bias"], *state)
