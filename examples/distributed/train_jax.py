"""Trains two models on all devices, under jit with sharded arrays, beside the same training on one device:

    python examples/distributed/train_jax.py

- digits: the classifier of examples/digits.py, linear - LayerNorm - GELU - linear, its batches split over all devices.
- transformer: a decoder of two layers (RMSNorm, attention, SwiGLU) that continues sequences of numbers. Its batches are
  split over pairs of devices; heads, hidden features and the classes of the loss over the two of each pair. An odd
  number of devices splits batches alone.

Runs on the GPUs, or on the CPU, which XLA presents as four devices. For another number:
XLA_FLAGS=--xla_force_host_platform_device_count=2, and JAX_PLATFORMS=cpu where there is a GPU. A batch is cut to a
multiple of the devices that it is split over. Exits with 1 if a loss is not the one of one device.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

# XLA takes the last of several.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from aotops import library
from aotops.frontends import jax as F

MAX_DISTANCE = 1e-4  # relative, between the losses of several devices and of one
LEARNING_RATE, MOMENTUM = 0.05, 0.9
Weights = dict[str, Any]
Batches = Iterator[tuple[np.ndarray, np.ndarray]]


# -------------------------------------------------------------------------------------------------------------- models


def digits_weights(rng: np.random.Generator, hidden: int = 128) -> Weights:
    return {
        "w1": uniform(rng, hidden, 64), "b1": np.zeros(hidden, "float32"),
        "gamma": np.ones(hidden, "float32"), "beta": np.zeros(hidden, "float32"),
        "w2": uniform(rng, 10, hidden), "b2": np.zeros(10, "float32"),
    }  # fmt: skip


def uniform(rng: np.random.Generator, n_out: int, n_in: int) -> np.ndarray:
    return rng.uniform(-1, 1, (n_out, n_in)).astype("float32") / np.sqrt(n_in, dtype="float32")


def digits_logits(weights: Weights, x: jax.Array) -> jax.Array:
    h = F.linear(x, weights["w1"], weights["b1"])
    h = F.gelu(F.layer_norm(h, h.shape[-1], weights["gamma"], weights["beta"]))
    return F.linear(h, weights["w2"], weights["b2"])


def digits_batches() -> Batches:
    """Batches of images and their classes, as in examples/digits.py."""
    sys.path.append(str(Path(__file__).parents[1]))
    from digits import make_task

    task, _ = make_task()
    for order in task["batches"]:
        for batch in order:
            yield task["x"][batch], task["y"][batch]


TOKENS, WIDTH, HEAD = 64, 64, 16


def transformer_weights(rng: np.random.Generator, depth: int = 2) -> Weights:
    weights = {
        "embedding": rng.standard_normal((TOKENS, WIDTH)).astype("float32"),
        "norm": np.ones(WIDTH, "float32"),
        "logits": uniform(rng, TOKENS, WIDTH),
    }
    for layer in range(depth):
        weights |= {f"{layer}.{norm}": np.ones(WIDTH, "float32") for norm in ("attention_norm", "ffn_norm")}
        weights |= {f"{layer}.{name}": uniform(rng, WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        weights |= {f"{layer}.{name}": uniform(rng, 2 * WIDTH, WIDTH) for name in ("gate", "up")}
        weights |= {f"{layer}.down": uniform(rng, WIDTH, 2 * WIDTH), f"{layer}.down_bias": np.zeros(WIDTH, "float32")}
    return weights


def transformer_sharding(name: str) -> P:
    """Columns of the first products and rows of the second, so that heads and hidden features are split."""
    kind = name.rpartition(".")[2]
    if kind in ("q", "k", "v", "gate", "up", "logits"):
        return P("model", None)
    return P(None, "model") if kind in ("out", "down") else P()


def transformer_logits(weights: Weights, tokens: jax.Array) -> jax.Array:
    x = weights["embedding"][tokens]
    for layer in range(sum(name.endswith(".q") for name in weights)):
        own = {name.partition(".")[2]: w for name, w in weights.items() if name.startswith(f"{layer}.")}
        x = F.add(x, attention(own, F.rms_norm(x, WIDTH, own["attention_norm"])))
        x = F.add(x, feed_forward(own, F.rms_norm(x, WIDTH, own["ffn_norm"])))
    return F.linear(F.rms_norm(x, WIDTH, weights["norm"]), weights["logits"])


def attention(weights: Weights, x: jax.Array) -> jax.Array:
    """Causal. Heads are independent: a device may have a part of them."""

    def heads(y: jax.Array) -> jax.Array:
        return y.reshape(*y.shape[:-1], -1, HEAD).swapaxes(1, 2)

    q, k, v = (heads(F.linear(x, weights[name])) for name in ("q", "k", "v"))
    scores = F.matmul(q, k, transpose_b=True) / HEAD**0.5
    later = jnp.triu(jnp.ones(scores.shape[-2:], bool), 1)
    mixed = F.matmul(F.softmax(jnp.where(later, -jnp.inf, scores)), v)
    return F.linear(mixed.swapaxes(1, 2).reshape(x.shape), weights["out"])


def feed_forward(weights: Weights, x: jax.Array) -> jax.Array:
    hidden = F.swiglu(F.linear(x, weights["gate"]), F.linear(x, weights["up"]))
    return F.linear(hidden, weights["down"], weights["down_bias"])


def transformer_batches(length: int = 32, batch: int = 16) -> Batches:
    """Sequences that count up by a number of their own, from 1 to 4, and what follows each element."""
    rng = np.random.default_rng(0)
    while True:
        start, step = rng.integers(0, TOKENS, (batch, 1)), rng.integers(1, 5, (batch, 1))
        sequence = (start + step * np.arange(length + 1)) % TOKENS
        yield sequence[:, :-1], sequence[:, 1:]


@dataclass
class Task:
    weights: Callable[[np.random.Generator], Weights]
    logits: Callable[[Weights, jax.Array], jax.Array]
    batches: Callable[[], Batches]
    pairs: bool
    """Whether two devices share the model, where the number of devices is even."""
    sharding: Callable[[str], P]


TASKS = {
    "digits": Task(digits_weights, digits_logits, digits_batches, False, lambda name: P()),
    "transformer": Task(transformer_weights, transformer_logits, transformer_batches, True, transformer_sharding),
}


def mesh_of(task: Task) -> Mesh:
    devices = np.array(jax.devices())
    model = 2 if task.pairs and len(devices) % 2 == 0 else 1
    return Mesh(devices.reshape(-1, model), ("data", "model"))


# ------------------------------------------------------------------------------------------------------------ training


def step_of(task: Task) -> Callable:
    def loss_of(weights: Weights, x: jax.Array, target: jax.Array) -> jax.Array:
        logits = task.logits(weights, x)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))

    def step(weights: Weights, velocity: Weights, x: jax.Array, target: jax.Array):
        loss, gradient = jax.value_and_grad(loss_of)(weights, x, target)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
        return jax.tree.map(lambda w, v: w - LEARNING_RATE * v, weights, velocity), velocity, loss

    return step


def train(step: Callable, weights: Weights, batches: list, place: Callable[[np.ndarray], Any]) -> np.ndarray:
    """The losses of the steps. ``step``: compiled."""
    velocity = jax.tree.map(jnp.zeros_like, weights)
    losses = []
    for x, target in batches:
        weights, velocity, loss = step(weights, velocity, place(x), place(target))
        losses.append(loss)
    return np.array(losses)


def compare(name: str, steps: int) -> bool:
    """Trains on one device and on all; prints the losses and what moves between devices in a step. Returns whether the
    losses are equal."""
    task = TASKS[name]
    weights, mesh = task.weights(np.random.default_rng(0)), mesh_of(task)
    data, model = mesh.devices.shape
    batches = [(x[: len(x) // data * data], y[: len(y) // data * data]) for x, y in islice(task.batches(), steps)]
    one = train(jax.jit(step_of(task)), jax.device_put(weights, jax.devices()[0]), batches, jnp.asarray)

    rows = NamedSharding(mesh, P("data"))
    sharded = {key: jax.device_put(w, NamedSharding(mesh, task.sharding(key))) for key, w in weights.items()}
    kept = {key: w.sharding for key, w in sharded.items()}
    arguments = sharded, jax.tree.map(jnp.zeros_like, sharded), *(jax.device_put(t, rows) for t in batches[0])
    step = jax.jit(step_of(task), out_shardings=(kept, kept, None)).lower(*arguments).compile()
    many = train(step, sharded, batches, lambda t: jax.device_put(t, rows))

    moved = Counter(re.findall(r" (all-gather|all-reduce|all-to-all|reduce-scatter)(?:-start)?\(", step.as_text()))
    distance = float((np.abs(many - one) / np.abs(one)).max())
    split = f"batches of {len(batches[0][0])} in {data}, the model in {model}"
    print(
        f"{name:11} {split}: loss {many[0]:.6f} to {many[-1]:.6f}, on one device {one[0]:.6f} to {one[-1]:.6f}; "
        f"relative distance {distance:.1e}; "
        f"in a step {', '.join(f'{n} {what}' for what, n in sorted(moved.items())) or 'nothing'}",
        flush=True,
    )
    return distance <= MAX_DISTANCE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(TASKS), help="some of: %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    args = parser.parse_args()

    if not library.has_cuda():
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    print(f"{len(jax.devices())} devices, {jax.default_backend()}", flush=True)
    equal = [compare(name, args.steps) for name in args.models.split(",")]
    return not all(equal)


if __name__ == "__main__":
    sys.exit(main())
