"""The digits classifier in JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from aotops import library
from aotops.frontends.jax import gelu, layer_norm


def model(weights, x):
    w1, b1, gamma, beta, w2, b2 = weights
    h = gelu(layer_norm(x @ w1.T + b1, len(gamma), gamma, beta))
    return h @ w2.T + b2


def loss_of(weights, x, y):
    log_p = jax.nn.log_softmax(model(weights, x))
    return -(log_p * jax.nn.one_hot(y, log_p.shape[1])).sum(axis=1).mean()


def train(report, x, y, x_test, batches, learning_rate, momentum, **weights):
    if not library.has_cuda():
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")  # on a GPU JAX defaults to TF32, unlike PyTorch
    x, y, x_test = map(jnp.asarray, (x, y, x_test))

    def step(state, batch):
        weights, velocity = state
        loss, gradient = jax.value_and_grad(loss_of)(weights, x[batch], y[batch])
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradient)
        weights = jax.tree.map(lambda w, v: w - learning_rate * v, weights, velocity)
        return (weights, velocity), loss

    @jax.jit
    def run_epoch(state, order):
        return jax.lax.scan(step, state, order)

    initial = [jnp.asarray(w) for w in weights.values()]
    state = initial, [jnp.zeros_like(w) for w in initial]
    losses = []
    for epoch, order in enumerate(batches, start=1):
        state, epoch_losses = run_epoch(state, order)
        losses.append(np.asarray(epoch_losses))
        report(epoch, losses[-1][-1])

    trained, _ = state
    device = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    return device, np.concatenate(losses), [np.asarray(w) for w in trained], np.asarray(model(trained, x_test))
