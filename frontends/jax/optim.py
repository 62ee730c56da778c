"""AdamW as a gradient transformation, in the form of optax, on the library's kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aotops.ops import BUILTIN
from aotops.ops._adamw import adamw

from .public import function_of

_kernel = function_of(adamw.bound_to(BUILTIN), __name__)
Tree = Any
Schedule = Callable[[jax.Array], Any]


class AdamWState(NamedTuple):
    """The number of steps, int32, and the moments, each a tree like the parameters."""

    count: jax.Array
    mu: Tree
    nu: Tree


class _Transformation(NamedTuple):
    init: Callable[[Tree], AdamWState]
    update: Callable[..., tuple[Tree, AdamWState]]


class AdamW(_Transformation):
    """AdamW on the library's kernel: ``init`` and ``update``, as ``optax.adamw``, and ``step``, which computes the
    parameters themselves.

    ``init(params)`` returns the state. ``update(grads, state, params)`` returns the updates, which
    ``optax.apply_updates`` adds, and the new state. ``step(grads, state, params)`` returns the new parameters and the
    new state, of a kernel that reads and writes each number once. It writes to the memory of params and state where a
    jit donates them, as ``jax.jit(train, donate_argnums=...)``; otherwise XLA copies them first.

    Args:
        learning_rate: a number, an array of shape (), or a function of the number of steps before this one.
        b1: a number in [0, 1), as b2.
        eps: a number of at least 0, as weight_decay.
        mask: a tree of bools like the parameters, or a function of them that returns it: whether each decays.
        state_dtype: of mu and nu: float32, bfloat16, or None for that of each parameter. float64 keeps its own.

    Parameters are float16, bfloat16, float32 or float64, and gradients of the same dtype. Arithmetic is in float32,
    float64 for float64; the learning rate is float32.

    Raises:
        TypeError: a dtype other than these.
        ValueError: numbers that are out of range; shapes that differ; no params.
    """

    step: Callable[[Tree, AdamWState, Tree], tuple[Tree, AdamWState]]

    def __new__(
        cls,
        learning_rate: float | jax.Array | Schedule,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 1e-4,
        mask: Tree | Callable[[Tree], Tree] | None = None,
        state_dtype: Any = None,
    ) -> AdamW:
        rule = _Rule(learning_rate, partial(_kernel, beta1=b1, beta2=b2, eps=eps), weight_decay, mask, state_dtype)
        made = super().__new__(cls, rule.init, rule.update)
        made.step = rule.step
        return made


class _Rule(NamedTuple):
    learning_rate: Any
    kernel: Callable[..., Any]
    weight_decay: float
    mask: Any
    state_dtype: Any

    def init(self, params: Tree) -> AdamWState:
        def zeros(p: jax.Array) -> jax.Array:
            own = self.state_dtype is None or p.dtype == jnp.float64
            return jnp.zeros_like(p, dtype=p.dtype if own else self.state_dtype)

        mu, nu = (jax.tree.map(zeros, params) for _ in range(2))  # two trees, so that both may be donated
        return AdamWState(jnp.zeros((), jnp.int32), mu, nu)

    def update(self, grads: Tree, state: AdamWState, params: Tree | None = None) -> tuple[Tree, AdamWState]:
        if params is None:
            raise ValueError("AdamW: params is None, expected the parameters, which decay")
        lr = self.rate(state)
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, state = self.applied(grads, state, zeros, lr, jax.tree.map(lambda _: 0.0, params))

        def decayed(update: jax.Array, p: jax.Array, decay: float) -> jax.Array:
            return (update - lr.astype(jnp.promote_types(p.dtype, lr.dtype)) * decay * p).astype(p.dtype)

        return jax.tree.map(decayed, updates, params, self.decays(params)), state

    def step(self, grads: Tree, state: AdamWState, params: Tree) -> tuple[Tree, AdamWState]:
        return self.applied(grads, state, params, self.rate(state), self.decays(params))

    def applied(
        self, grads: Tree, state: AdamWState, params: Tree, lr: jax.Array, decays: Tree
    ) -> tuple[Tree, AdamWState]:
        before = state.count.astype(jnp.float32)

        def one(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array, decay: float) -> tuple[jax.Array, ...]:
            return self.kernel(p, g, m, v, before, lr, weight_decay=decay)[1:]

        leaves, tree = jax.tree.flatten(params)
        others = [tree.flatten_up_to(each) for each in (grads, state.mu, state.nu, decays)]
        results = [one(*each) for each in zip(leaves, *others, strict=True)]
        new, mu, nu = (tree.unflatten([result[i] for result in results]) for i in range(3))
        return new, AdamWState(state.count + 1, mu, nu)

    def rate(self, state: AdamWState) -> jax.Array:
        lr = self.learning_rate(state.count) if callable(self.learning_rate) else self.learning_rate
        return jnp.asarray(lr, jnp.float32)

    def decays(self, params: Tree) -> Tree:
        mask = self.mask(params) if callable(self.mask) else self.mask
        if mask is None:
            return jax.tree.map(lambda _: self.weight_decay, params)
        return jax.tree.map(lambda _, on: self.weight_decay if on else 0.0, params, mask)
