"""The digits classifier in MindSpore, in graph mode, on the CPU."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from aotops.frontends.mindspore import GELU, LayerNorm


def train(report, x, y, x_test, batches, learning_rate, momentum, **weights):
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU", deterministic="ON")
    y = y.astype(np.int32)  # MindSpore's cross_entropy requires int32

    hidden, features = weights["w1"].shape
    classes = len(weights["b2"])
    model = nn.SequentialCell(
        nn.Dense(features, hidden),
        LayerNorm([hidden], epsilon=1e-5),  # MindSpore's defaults are 1e-7 and the tanh approximation
        GELU(approximate=False),
        nn.Dense(hidden, classes),
    )
    parameters = model.trainable_params()
    for parameter, initial in zip(parameters, weights.values(), strict=True):
        parameter.set_data(Tensor(initial))
    optimizer = nn.Momentum(parameters, learning_rate=float(learning_rate), momentum=float(momentum))

    def loss_of(x, y):
        return ops.cross_entropy(model(x), y)

    value_and_grad = ms.value_and_grad(loss_of, None, parameters)

    @ms.jit
    def step(x, y):
        loss, gradient = value_and_grad(x, y)
        optimizer(gradient)
        return loss

    losses = []
    for epoch, order in enumerate(batches, start=1):
        for batch in order:
            loss = step(Tensor(x[batch]), Tensor(y[batch]))
            losses.append(loss.asnumpy())
        report(epoch, losses[-1])

    logits = model(Tensor(x_test)).asnumpy()
    return "cpu", np.array(losses), [p.asnumpy() for p in parameters], logits
