"""AdamW in MindSpore: its steps are the formula in float64, in both modes."""

from __future__ import annotations

import numpy as np
import pytest

ms = pytest.importorskip("mindspore")

from mindspore import Parameter, Tensor, nn  # noqa: E402

from aotops.frontends.mindspore import AdamW  # noqa: E402

MODES = pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"])
SHAPES = {"weight": (33, 65), "gamma": (7,), "scale": ()}


@pytest.fixture(autouse=True)
def _pynative_again():
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def drawn(seed):
    """Numbers of 16 bits, of which each dtype has the same."""
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float16) for name, shape in SHAPES.items()}


def parameters(dtype):
    return [Parameter(Tensor(x, dtype), name=name) for name, x in drawn(0).items()]


def gradients(dtype, step):
    return tuple(Tensor(x, dtype) for x in drawn(step + 1).values())


def exact(steps, lr, decays, sign=1, b1=0.9, b2=0.999, eps=1e-8):
    found = []
    for (name, p), decay in zip(drawn(0).items(), decays, strict=True):
        p, m, v = p.astype(np.float64), 0.0, 0.0
        for i in range(steps):
            g = sign * drawn(i + 1)[name].astype(np.float64)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            rate = lr(i) if callable(lr) else lr
            corrected = m / (1 - b1 ** (i + 1)), v / (1 - b2 ** (i + 1))
            p = p - rate * decay * p - rate * corrected[0] / (np.sqrt(corrected[1]) + eps)
        found.append(p)
    return found


def close(found, expected, tolerance):
    for p, e in zip(found, expected, strict=True):
        assert p.shape == e.shape
        np.testing.assert_allclose(p.astype(ms.float64).asnumpy(), e, rtol=0, atol=tolerance)


@MODES
@pytest.mark.parametrize(
    ("kind", "given", "tolerance"),
    [
        (ms.float32, {}, 2e-6),
        (ms.float64, {"maximize": True}, 1e-8),
        (ms.bfloat16, {"state_dtype": ms.float32}, 0.05),
        (ms.float16, {}, 0.02),
    ],
    ids=str,
)
def test_steps_are_the_formulas(mode, kind, given, tolerance):
    """The parameter "gamma" does not decay."""
    ms.set_context(mode=mode)
    params = parameters(kind)
    optimizer = AdamW(params, 0.01, weight_decay=0.3, **given)
    assert {p.dtype for p in (*optimizer.exp_avg, *optimizer.exp_avg_sq)} == {given.get("state_dtype", kind)}
    for i in range(4):
        optimizer(gradients(kind, i))
    close(params, exact(4, 0.01, (0.3, 0, 0.3), -1 if "maximize" in given else 1), tolerance)


@MODES
def test_master_weights(mode):
    """They are exact, and the parameters are what they are rounded to."""
    ms.set_context(mode=mode)
    params = parameters(ms.float16)
    optimizer = AdamW(params, 1e-4, weight_decay=0.3, state_dtype=ms.float32, master_weights=True)
    for i in range(4):
        optimizer(gradients(ms.float16, i))
    close(optimizer.master_weights, exact(4, 1e-4, (0.3, 0, 0.3)), 2e-6)
    for p, master in zip(params, optimizer.master_weights, strict=True):
        np.testing.assert_array_equal(p.asnumpy(), master.asnumpy().astype(np.float16))


@MODES
def test_groups_and_a_schedule(mode):
    ms.set_context(mode=mode)
    params = parameters(ms.float32)
    groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]
    rates = [0.01, 0.005, 0.0025]
    optimizer = AdamW(groups, rates)
    for i in range(3):
        optimizer(gradients(ms.float32, i))
    close(params, exact(3, lambda i: rates[i], (0.1, 0, 0)), 2e-6)


@MODES
def test_groups_with_rates_of_their_own(mode):
    ms.set_context(mode=mode)
    params = parameters(ms.float32)
    groups = [{"params": params[:1], "lr": 0.02}, {"params": params[1:], "weight_decay": 0.0}]
    optimizer = AdamW(groups, 0.01, weight_decay=0.2)
    for i in range(2):
        optimizer(gradients(ms.float32, i))
    fast, slow = (exact(2, lr, (0.2, 0, 0)) for lr in (0.02, 0.01))
    close(params, [fast[0], *slow[1:]], 2e-6)


class Loss(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.full(5, 3.0, np.float32)), name="weight")

    def construct(self, x):
        return ((self.weight - x) ** 2).sum()


@MODES
def test_a_network_is_trained(mode):
    ms.set_context(mode=mode)
    loss = Loss()
    train = nn.TrainOneStepCell(loss, AdamW(loss.trainable_params(), 0.1))
    x = Tensor(np.arange(5, dtype=np.float32))
    losses = [float(train(x).asnumpy()) for _ in range(60)]
    assert losses[-1] < losses[0] / 50


def test_a_weight_decay_that_changes_is_refused():
    with pytest.raises(NotImplementedError, match="AdamW: weight_decay"):
        AdamW(parameters(ms.float32), 0.01, weight_decay=nn.CosineDecayLR(0.0, 0.1, 10))
