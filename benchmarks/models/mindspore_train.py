"""The training steps of GPT-2 in MindSpore: a graph of the loss, the gradients and AdamW."""

from __future__ import annotations

import time
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.experimental import optim

from . import data, parameters, timing
from .mindspore_gpt2 import FLAVOURS, GPT2
from .spec import BETA1, BETA2, EPS, LEARNING_RATE, WEIGHT_DECAY, Spec

VERSION = ms.__version__


def device() -> str:
    return ms.get_context("device_target").lower()


def measure(spec: Spec) -> dict[str, Any]:
    """The figures of a row."""
    ms.set_context(mode=ms.GRAPH_MODE)
    if spec.deterministic:
        ms.set_deterministic(True)
    model = GPT2(FLAVOURS[spec.flavour], spec.size, parameters.gpt2(spec.size))
    optimizer = optim.AdamW(model.trainable_params(), LEARNING_RATE, (BETA1, BETA2), EPS, WEIGHT_DECAY)
    gradients = ms.value_and_grad(model, None, optimizer.parameters)
    batches = [on_device(batch) for batch in data.batches(spec.model, spec.size, spec.trained)]
    losses: list[Tensor] = []

    @ms.jit
    def trained(tokens, targets):
        loss, found = gradients(tokens, targets)
        optimizer(found)
        return loss

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        losses.append(trained(*batch))
        return losses[-1]

    start = time.perf_counter()
    step(batches[0]).asnumpy()
    first = time.perf_counter() - start
    timed = spec.trained - spec.timed
    for batch in batches[1:timed]:
        step(batch).asnumpy()
    times = timing.times(step, batches[timed:], lambda loss: loss.asnumpy())
    curve = np.stack([loss.asnumpy() for loss in losses])
    return {
        **times,
        "tokens_per_s": round(spec.size.tokens_per_step / times["ms"] * 1e3),
        "peak_gib": None,
        "first_step_s": round(first, 2),
        "losses": [round(float(x), 6) for x in curve],
        "bits": timing.digest([curve, *(p.asnumpy() for p in model.trainable_params())]),
        "loss": round(held_out_loss(spec, model), 6),
    }


def on_device(batch: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(Tensor(array.astype(np.int32)) for array in batch)


def held_out_loss(spec: Spec, model: GPT2) -> float:
    """The loss of a batch that was not trained on."""
    return float(model(*on_device(data.batch(spec.model, spec.size, data.HELD_OUT))).asnumpy())
