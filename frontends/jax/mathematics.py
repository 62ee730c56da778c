"""The mathematics that formulas of operators are made of, in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from aotops.spec import accumulate_dtype

Array = Any


class Mathematics:
    """``aotops.formula.Mathematics``. ``ops``: the functions of the library's operators."""

    narrow = False

    def __init__(self, ops: Any):
        self.ops = ops

    def wide(self, x):
        return x.astype(accumulate_dtype(x.dtype.name))

    def like(self, x, model):
        return x.astype(model.dtype)

    def epsilon(self, x):
        return float(jnp.finfo(x.dtype).eps)

    exp = staticmethod(jnp.exp)
    expm1 = staticmethod(jnp.expm1)
    tanh = staticmethod(jnp.tanh)
    erfc = staticmethod(jax.lax.erfc)
    sigmoid = staticmethod(jax.nn.sigmoid)
    rsqrt = staticmethod(jax.lax.rsqrt)
    log_softmax = staticmethod(jax.nn.log_softmax)
    where = staticmethod(jnp.where)
    zeros = staticmethod(jnp.zeros_like)
    reshape = staticmethod(jnp.reshape)

    def arange(self, n, model):
        return jnp.arange(n, dtype=model.dtype)

    def sum(self, x, axes, keepdims=False):
        return jnp.sum(x, axes, keepdims=keepdims)

    def mean(self, x, axes):
        return jnp.mean(x, axes, keepdims=True)

    def any(self, x, axis):
        return jnp.any(x, axis)

    def count(self, x, model):
        return jnp.sum(x, dtype=model.dtype)

    def concatenate(self, arrays):
        return jnp.concatenate(arrays, -1)

    def matrix(self, x):
        return x.reshape(-1, x.shape[-1])
