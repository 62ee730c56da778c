"""GPT-2 in JAX, over two flavours of the same functions: jax.numpy's, as its user writes them, and this library's.

Parameters are a dictionary of arrays (parameters.py), x is (batch, tokens, width). Attention is JAX's in both flavours,
and the library's in a third, "aotops.attention".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from aotops.frontends import jax as aotops

from .spec import BETA1, BETA2, EPS, LEARNING_RATE, WEIGHT_DECAY, Size

Array = Any
Parameters = dict[str, Array]
NORM_EPS = 1e-5


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal, of (batch, tokens, heads, head_dim); by cuDNN's flash attention where JAX has it: 16 bits, on a GPU."""
    flash = jax.default_backend() == "gpu" and q.dtype.itemsize == 2
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if flash else "xla")


class Jax:
    """Norms and the loss are computed in float32, sums of products by XLA."""

    attention = staticmethod(attention)

    @staticmethod
    def linear(x: Array, weight: Array, bias: Array | None = None, activation: str | None = None) -> Array:
        y = x @ weight.T
        y = y if bias is None else y + bias
        return y if activation is None else jax.nn.gelu(y, approximate=True)

    @staticmethod
    def norm(x: Array, weight: Array, bias: Array) -> Array:
        wide = x.astype(jnp.float32)
        centered = wide - wide.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + NORM_EPS)
        return (centered * scale * weight + bias).astype(x.dtype)

    @classmethod
    def add_norm(cls, x: Array, residual: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
        h = x + residual
        return cls.norm(h, weight, bias), h

    @staticmethod
    def cross_entropy(logits: Array, targets: Array) -> Array:
        wide = logits.astype(jnp.float32)
        found = jnp.take_along_axis(wide, targets[:, None], axis=-1)[:, 0]
        return (jax.nn.logsumexp(wide, axis=-1) - found).mean()


class Aotops:
    attention = staticmethod(attention)

    @staticmethod
    def linear(x: Array, weight: Array, bias: Array | None = None, activation: str | None = None) -> Array:
        return aotops.linear(x, weight, bias, activation and "gelu_tanh")

    @staticmethod
    def norm(x: Array, weight: Array, bias: Array) -> Array:
        return aotops.layer_norm(x, weight.shape, weight, bias, NORM_EPS)

    @staticmethod
    def add_norm(x: Array, residual: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
        return aotops.add_layer_norm(x, residual, weight.shape, weight, bias, NORM_EPS)

    @staticmethod
    def cross_entropy(logits: Array, targets: Array) -> Array:
        wide = "float32" if logits.dtype.itemsize == 2 else None
        return aotops.cross_entropy(logits, targets, dtype=wide)


class AotopsAttention(Aotops):
    @staticmethod
    def attention(q: Array, k: Array, v: Array) -> Array:
        return aotops.attention(q, k, v, causal=True)


FLAVOURS: dict[str, Any] = {"jax": Jax, "aotops": Aotops, "aotops.attention": AotopsAttention}


def logits(ops: Any, size: Size, p: Parameters, tokens: Array) -> Array:
    def linear(x, name, activation=None):
        return ops.linear(x, p[f"{name}.weight"], p[f"{name}.bias"], activation)

    def add_norm(x, residual, name):
        return ops.add_norm(x, residual, p[f"{name}.weight"], p[f"{name}.bias"])

    h = p["tokens.weight"][tokens] + p["places.weight"]
    y = ops.norm(h, p["blocks.0.norm1.weight"], p["blocks.0.norm1.bias"])
    for i in range(size.layers):
        block = f"blocks.{i}"
        q, k, v = heads(linear(y, f"{block}.attention.qkv"), size.heads)
        y = ops.attention(q, k, v).reshape(*tokens.shape, -1)
        y, h = add_norm(linear(y, f"{block}.attention.out"), h, f"{block}.norm2")
        y = linear(linear(y, f"{block}.up", "gelu_tanh"), f"{block}.down")
        y, h = add_norm(y, h, f"blocks.{i + 1}.norm1" if i + 1 < size.layers else "norm")
    return ops.linear(y, p["tokens.weight"])


def heads(qkv: Array, n: int) -> list[Array]:
    """q, k and v, each (batch, tokens, n, head_dim)."""
    return [part.reshape(*part.shape[:-1], n, -1) for part in jnp.split(qkv, 3, axis=-1)]


def loss(ops: Any, size: Size, p: Parameters, tokens: Array, targets: Array) -> Array:
    rows = logits(ops, size, p, tokens).reshape(-1, size.vocabulary)
    return ops.cross_entropy(rows, targets.reshape(-1))


def adamw(step: Array, p: Array, m: Array, v: Array, gradient: Array) -> tuple[Array, Array, Array]:
    """As torch's: the moments have the parameter's dtype, and are computed in float32. ``step`` counts from 1."""
    wide, gradient = p.astype(jnp.float32), gradient.astype(jnp.float32)
    first = BETA1 * m + (1 - BETA1) * gradient
    second = BETA2 * v + (1 - BETA2) * gradient**2
    size = jnp.sqrt(second / (1 - BETA2**step)) + EPS
    new = wide * (1 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE / (1 - BETA1**step) * first / size
    return new.astype(p.dtype), first.astype(p.dtype), second.astype(p.dtype)
