"""AdamW in JAX: as the formula in float64, and in place where a jit donates."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402

from aotops.frontends.jax import AdamW  # noqa: E402

SHAPES = {"a": (33, 65), "b": [(7,), ()], "c": (0, 3)}


def tree(dtype, seed):
    random = np.random.default_rng(seed)

    def drawn(shape):
        return jnp.asarray(random.normal(size=shape), jnp.bfloat16).astype(dtype)

    return jax.tree.map(drawn, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def exact(params, steps, lr, decay):
    arrays = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    state = jax.tree.map(np.zeros_like, arrays), jax.tree.map(np.zeros_like, arrays)
    for i in range(steps):
        arrays, state = exact_step(arrays, state, i, lr(i) if callable(lr) else lr, decay)
    return arrays


def exact_step(params, state, i, lr, decay, b1=0.9, b2=0.999, eps=1e-8):
    grads = jax.tree.map(lambda g: np.asarray(g, np.float64), tree(jnp.float64, i + 1))
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state[0], grads)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state[1], grads)

    def stepped(p, m, v, decay):
        corrected = m / (1 - b1 ** (i + 1)), v / (1 - b2 ** (i + 1))
        return p - lr * decay * p - lr * corrected[0] / (np.sqrt(corrected[1]) + eps)

    return jax.tree.map(stepped, params, m, v, decay), (m, v)


def close(mine, expected, tolerance):
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=tolerance)


def decays(decay, mask=None):
    return jax.tree.map(lambda _, on: decay if on else 0.0, tree(jnp.float32, 0), mask or ALL)


ALL = {"a": True, "b": [True, True], "c": True}
SOME = {"a": True, "b": [False, True], "c": False}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("kind", "state_dtype", "tolerance"),
    [("float32", None, 2e-6), ("float64", None, 1e-8), ("bfloat16", "float32", 0.05), ("float16", None, 0.02)],
)
def test_steps_are_the_formulas(kind, state_dtype, tolerance, fused):
    optimizer = AdamW(0.01, weight_decay=0.3, state_dtype=state_dtype)
    params = tree(kind, 0)
    state = optimizer.init(params)
    assert {x.dtype.name for x in jax.tree.leaves((state.mu, state.nu))} == {state_dtype or kind}

    @jax.jit
    def train(params, state, grads):
        if fused:
            return optimizer.step(grads, state, params)
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for i in range(4):
        params, state = train(params, state, tree(kind, i + 1))
    assert int(state.count) == 4
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {kind}
    close(params, exact(tree(kind, 0), 4, float(np.float32(0.01)), decays(0.3)), tolerance)


@pytest.mark.parametrize("mask", [SOME, lambda params: SOME])
def test_a_schedule_and_a_mask(mask):
    optimizer = AdamW(lambda count: 0.1 / (count + 1), weight_decay=0.5, mask=mask)
    params = tree("float32", 0)
    state = optimizer.init(params)
    for i in range(3):
        params, state = optimizer.step(tree("float32", i + 1), state, params)
    close(params, exact(tree("float32", 0), 3, lambda i: 0.1 / (i + 1), decays(0.5, SOME)), 2e-6)


def test_a_step_leaves_arrays_as_they_are_unless_they_are_donated():
    optimizer = AdamW(0.1)
    params = {"w": jnp.ones((8, 128))}
    state, grads = optimizer.init(params), {"w": jnp.ones((8, 128))}
    eager, _ = optimizer.step(grads, state, params)
    assert (params["w"] == 1).all()
    assert (state.mu["w"] == 0).all()
    train = jax.jit(lambda params, state, grads: optimizer.step(grads, state, params), donate_argnums=(0, 1))
    compiled = train.lower(params, state, grads).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < params["w"].nbytes, "params and state are not copied"
    addresses = {x.unsafe_buffer_pointer() for x in (params["w"], state.mu["w"], state.nu["w"])}
    new, after = train(params, state, grads)
    assert {x.unsafe_buffer_pointer() for x in (new["w"], after.mu["w"], after.nu["w"])} == addresses
    assert (new["w"] == eager["w"]).all()


def test_refuses():
    params = {"w": jnp.ones(3, jnp.float32)}
    with pytest.raises(ValueError, match="params is None"):
        AdamW(0.1).update(params, AdamW(0.1).init(params))
    for optimizer, grads, error, text in (
        (AdamW(0.1, b1=1.0), jnp.ones(3, jnp.float32), ValueError, r"beta1 is 1, expected a number in \[0, 1\)"),
        (AdamW(0.1, eps=-1.0), jnp.ones(3, jnp.float32), ValueError, "eps is -1"),
        (AdamW(0.1), jnp.ones(3, jnp.bfloat16), TypeError, "grad has dtype bfloat16, expected float32"),
        (AdamW(0.1), jnp.ones(4, jnp.float32), ValueError, r"grad has shape \(4,\)"),
        (AdamW(0.1, state_dtype="float16"), jnp.ones(3, jnp.float32), TypeError, "exp_avg has dtype float16"),
    ):
        with pytest.raises(error, match=text):
            optimizer.step({"w": grads}, optimizer.init(params), params)
