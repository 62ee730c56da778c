"""The training steps of GPT-2 in JAX: one program under jit, whose parameters and moments are donated."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import data, parameters, timing
from .jax_gpt2 import FLAVOURS, Jax, adamw, logits, loss
from .spec import Size, Spec

VERSION = jax.__version__
Array = Any
State = tuple[Array, dict[str, Array], dict[str, Array], dict[str, Array]]  # steps done, parameters, moments


def device() -> str:
    found = jax.devices()[0]
    return found.device_kind if found.platform == "gpu" else "cpu"


def measure(spec: Spec) -> dict[str, Any]:
    """The figures of a row."""
    ops = FLAVOURS[spec.flavour]
    state = initial_state(spec)
    batches = [on_device(batch) for batch in data.batches(spec.model, spec.size, spec.trained)]
    losses: list[Array] = []

    def step(batch: tuple[Array, ...]) -> Array:
        nonlocal state
        state, found = trained(ops, spec.size, state, *batch)
        losses.append(found)
        return found

    jax.block_until_ready((state, batches))
    start = time.perf_counter()
    jax.block_until_ready(step(batches[0]))
    first = time.perf_counter() - start
    timed = spec.trained - spec.timed
    for batch in batches[1:timed]:
        step(batch)
    jax.block_until_ready(state)
    times = timing.times(step, batches[timed:], jax.block_until_ready)
    peak = peak_gib()
    held_out = on_device(data.batch(spec.model, spec.size, data.HELD_OUT))
    curve = np.stack([np.asarray(x) for x in losses])
    return {
        **times,
        "tokens_per_s": round(spec.size.tokens_per_step / times["ms"] * 1e3),
        "peak_gib": peak,
        "first_step_s": round(first, 2),
        "losses": [round(float(x), 6) for x in curve],
        "bits": timing.digest([curve, *(np.asarray(p) for p in state[1].values())]),
        "loss": round(float(exact_loss(ops, spec.size, state[1], *held_out)), 6),
    }


def on_device(batch: tuple[Any, ...]) -> tuple[Array, ...]:
    return tuple(jnp.asarray(array.astype(np.int32)) for array in batch)


def initial_state(spec: Spec) -> State:
    dtype = jnp.bfloat16 if spec.precision == "bfloat16" else jnp.float32
    p = {name: array.astype(dtype) for name, array in parameters.gpt2(spec.size).items()}
    m, v = ({name: np.zeros_like(array) for name, array in p.items()} for _ in range(2))
    return jax.device_put((np.int32(0), p, m, v))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def trained(ops: Any, size: Size, state: State, tokens: Array, targets: Array) -> tuple[State, Array]:
    """The state after a step, and the loss before it."""
    step, p, m, v = state
    step = step + 1
    found, gradients = jax.value_and_grad(partial(loss, ops, size))(p, tokens, targets)
    new = {name: adamw(step, p[name], m[name], v[name], gradients[name]) for name in p}
    p, m, v = ({name: parts[i] for name, parts in new.items()} for i in range(3))
    return (step, p, m, v), found


@partial(jax.jit, static_argnums=(0, 1))
def exact_loss(ops: Any, size: Size, p: dict[str, Array], tokens: Array, targets: Array) -> Array:
    """The loss of a batch that was not trained on, from logits in float32 by the same function for all."""
    return Jax.cross_entropy(logits(ops, size, p, tokens).reshape(-1, size.vocabulary), targets.reshape(-1))


def peak_gib() -> float | None:
    """The peak of the process, compilation included: JAX cannot reset it."""
    found = jax.devices()[0].memory_stats()
    return round(found["peak_bytes_in_use"] / 2**30, 3) if found else None
