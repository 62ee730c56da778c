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

    def unsigned(self, x):
        return x.astype(jnp.uint32)

    def epsilon(self, x):
        return float(jnp.finfo(x.dtype).eps)

    exp = staticmethod(jnp.exp)
    expm1 = staticmethod(jnp.expm1)
    tanh = staticmethod(jnp.tanh)
    erfc = staticmethod(jax.lax.erfc)
    sigmoid = staticmethod(jax.nn.sigmoid)
    rsqrt = staticmethod(jax.lax.rsqrt)
    log_softmax = staticmethod(jax.nn.log_softmax)
    logsumexp = staticmethod(jax.nn.logsumexp)
    argmax = staticmethod(jnp.argmax)
    where = staticmethod(jnp.where)
    xor = staticmethod(jnp.bitwise_xor)
    zeros = staticmethod(jnp.zeros_like)
    reshape = staticmethod(jnp.reshape)
    swapaxes = staticmethod(jnp.swapaxes)

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

    def take(self, x, rows):
        is_row = (rows >= 0) & (rows < x.shape[0])
        return x.at[jnp.where(is_row, rows, x.shape[0])].get(mode="fill", fill_value=jnp.nan)

    def scatter_sum(self, x, rows, n):
        is_row = (rows >= 0) & (rows < n)
        return jnp.zeros((n, *x.shape[1:]), x.dtype).at[jnp.where(is_row, rows, n)].add(x, mode="drop")

    def matrix(self, x):
        return x.reshape(-1, x.shape[-1])
