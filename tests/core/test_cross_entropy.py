"""cross_entropy: a loss in float32 of 16-bit logits, and results that are written over an input."""

from __future__ import annotations

import numpy as np
import pytest

from aotops.infer import infer
from aotops.ops import OPS
from aotops.spec import TensorSpec
from aotops.testing.calls import EntryCall, numbers, raw
from aotops.testing.dtypes import ITEMSIZE
from aotops.testing.frameworks import Torch, requested
from aotops.testing.tolerances import PRECISION

FORWARD = OPS["cross_entropy"]
BACKWARD = FORWARD.backward
ROWS, CLASSES = 6, 11


def draw(rows: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits that bfloat16 and float16 hold, and classes, of which one row has none."""
    random = np.random.default_rng(rows * classes)
    x = random.integers(-63, 64, (rows, classes)) / 16
    target = random.integers(0, classes, rows)
    target[rows // 2] = -100
    return x, target


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_loss_in_float32_of_16_bits(framework, device, reduction):
    x, target = draw(ROWS, CLASSES)
    kind = {"reduction": reduction, "label_smoothing": 0.1}

    def of(own, **attrs):
        inputs = {"x": framework.make(x, own, device), "target": framework.make(target, target.dtype.name, device)}
        (y,) = framework.results("cross_entropy", inputs, kind | attrs)
        assert framework.dtype(y) == "float32"
        dy = framework.make(np.full(np.shape(framework.numpy(y)), 0.375), "float32", device)
        dx = framework.gradients("cross_entropy", inputs, kind | attrs, (dy,))["x"]
        assert framework.dtype(dx) == own
        return framework.numpy(y), framework.numpy(dx)

    (y, dx), (expected, gradient) = of("float16", dtype="float32"), of("float32")
    np.testing.assert_allclose(y, expected, 1e-6, 1e-6)
    np.testing.assert_allclose(dx, gradient, 0, 2 * PRECISION["float16"].result)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_an_infinite_weight_makes_an_infinite_loss_with_smoothing(framework, device, reduction):
    """Each class has a part in each loss then, and none of these parts is negative."""
    random = np.random.default_rng(0)
    x, head, target = random.standard_normal((4, 6)), random.standard_normal((5, 6)), np.arange(4)
    weights = np.array([1.0, 1.0, np.inf, 1.0, 1.0])
    kind = {"reduction": reduction, "label_smoothing": 0.2}

    def of(operator, **arrays):
        inputs = {name: framework.make(array, "float32", device) for name, array in arrays.items()}
        inputs["target"] = framework.make(target, target.dtype.name, device)
        return framework.numpy(framework.results(operator, inputs, kind)[0])

    expected = np.full((4,) if reduction == "none" else (), np.inf)
    np.testing.assert_array_equal(of("cross_entropy", x=x @ head.T, weight=weights), expected)
    np.testing.assert_array_equal(of("cross_entropy_lse", x=x @ head.T, weight=weights), expected)
    np.testing.assert_array_equal(of("linear_cross_entropy", x=x, weight=head, class_weight=weights), expected)


# -------------------------------------------------------------------------------------------------- written over inputs

SHAPES = [(5, 7), (6, 50), (3, 1025)]
LONG = [(3, 20001), (3, 50257), (2, 50304), (2, 70001), (900, 33)]
MISSING = Torch().missing("cuda") if "torch" in requested() else "torch is not under test"
GPU = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]
WHERE = [
    *(("cpu", shape) for shape in SHAPES),
    *(pytest.param("cuda", shape, marks=GPU) for shape in (*SHAPES, *LONG)),
]


def memory(where, data: bytes, offset: int):
    """A vector of these bytes that begins so many after a 64-byte boundary, and its address."""
    size = len(data)
    if where == "cpu":
        whole = np.zeros(size + offset + 64, np.uint8)
        part = whole[-whole.ctypes.data % 64 + offset :][:size]
        part[:] = np.frombuffer(data, np.uint8)
        return part, part.ctypes.data
    import torch

    part = torch.zeros(size + offset, dtype=torch.uint8, device="cuda")[offset:]
    part.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return part, part.data_ptr()


def run(where, op, attrs, arrays, specs, offset, over=()):
    """The numbers of each slot after a call. ``over``: of an output, the input that it is written over."""
    given = tuple(specs.get(slot) for slot in op.inputs)
    specs = dict(zip(op.inputs, given, strict=True)) | dict.fromkeys(op.entry_outputs)
    specs |= infer(op, attrs, given, where)
    one = EntryCall(op, attrs, specs, {})
    parts, addresses = {}, {}
    for slot, spec in one.given.items():
        data = raw(arrays.get(slot, np.full(spec.shape, 77.0)), spec.dtype)
        shifted = slot in ("x", "slope", "dx")
        parts[slot], addresses[slot] = memory(where, data, offset if shifted else 0)
    for y, x in dict(over).items():
        parts[y], addresses[y] = parts[x], addresses[x]
    one.run(where, addresses)
    if where == "cuda":
        import torch

        torch.cuda.synchronize()
        parts = {slot: part.cpu().numpy() for slot, part in parts.items()}
    return {slot: numbers(part.tobytes(), one.given[slot]) for slot, part in parts.items()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("where", "shape"), WHERE)
def test_results_over_inputs_are_those_beside_them(where, shape, dtype):
    """slope over x and dx over slope: rows on any boundary; a dy of 1, where nothing is left to do, and an infinite one
    beside a row that is ignored."""
    x, target = draw(*shape)
    like_x, classes = TensorSpec(shape, dtype), TensorSpec(shape[:1], "int64")
    for offset in (0, ITEMSIZE[dtype]):
        for reduction, z_loss, softcap in (("sum", 0, 0), ("mean", 0, 0), ("mean", 0.1, 2.0)):
            attrs = FORWARD.canonical((-100, reduction, 0.1, None, z_loss, softcap))
            arrays, specs = {"x": x, "target": target}, {"x": like_x, "target": classes}
            beside = run(where, FORWARD, attrs, arrays, specs, offset)
            over = run(where, FORWARD, attrs, arrays, specs, offset, {"slope": "x"})
            for slot in ("y", "slope"):
                np.testing.assert_array_equal(over[slot], beside[slot])
            for dy in map(np.asarray, (1.0, 0.375, np.inf)):
                arrays = {"dy": dy, "x": x, "target": target, "slope": beside["slope"]}
                specs = {"dy": TensorSpec(dy.shape, dtype), "x": like_x, "target": classes, "slope": like_x}
                apart, onto = (run(where, BACKWARD, attrs, arrays, specs, offset, o) for o in ({}, {"dx": "slope"}))
                np.testing.assert_array_equal(onto["dx"], apart["dx"])
                assert not onto["dx"][target == -100].any()
                np.testing.assert_array_equal(apart["slope"], beside["slope"])


# ---------------------------------------------------------------------------------------------- roundings of a gradient


EXPONENTIAL = 2.0**-18
"""Exponentials whose results are rounded to 16 bits have at least that relative accuracy."""
ROUNDED_LOG2E = 5e-6
"""On a GPU, bfloat16's are powers of two whose exponent is x - max times a log2(e) of 16 bits: its relative error
(cuda_src/cuda/softmax.cuh)."""


def exact_gradient(x, target, dy, reduction, smoothing):
    """In float64, and the largest term of each element, in whose units the arithmetic errs."""
    e = np.exp(x - x.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    counts, hit = target != -100, np.where(target != -100, target, 0)
    aims = smoothing / x.shape[-1] + (1 - smoothing) * (np.arange(x.shape[-1]) == hit[:, None])
    factor = (dy * counts / (counts.sum() if reduction == "mean" else 1))[:, None]
    return factor * (p - aims), np.abs(factor) * (p + aims)


@pytest.mark.parametrize("own", ["float16", "bfloat16"])
@pytest.mark.parametrize(("reduction", "smoothing"), [("none", 0.0), ("none", 0.1), ("sum", 0.0), ("mean", 0.1)])
def test_a_gradient_of_16_bits_is_rounded_once(framework, device, own, reduction, smoothing):
    """For losses of rows with any gradients; for a sum or a mean if its gradient is a power of two. For another
    gradient, and a mean in float16, which is divided later, twice where a frontend keeps slope. An error of the
    exponential is allowed beside that."""
    if not framework.has_dtype(own):
        pytest.skip(f"{framework.name} has no {own}")
    x, target = draw(32, 50)
    inputs = {"x": framework.make(x, own, device), "target": framework.make(target, target.dtype.name, device)}
    kind = {"reduction": reduction, "label_smoothing": smoothing}
    half, least = (
        PRECISION[own].result,
        2.0**-25 if own == "float16" else 0.0,
    )  # the latter below float16's normal range
    exponential = EXPONENTIAL + (ROUNDED_LOG2E * np.ptp(x) if (own, device) == ("bfloat16", "cuda") else 0)

    def check(dy, roundings):
        dys = (framework.make(np.asarray(dy), own, device),)
        dx = framework.numpy(framework.gradients("cross_entropy", inputs, kind, dys)["x"])
        exact, largest = exact_gradient(x, target, dy, reduction, smoothing)
        own_rounding = half * 2.0 ** np.floor(np.log2(np.maximum(np.abs(exact), 1e-30)))
        bound = own_rounding if roundings == 1 else ((1 + half) ** 2 - 1) * np.abs(exact)
        assert (np.abs(dx - exact) <= bound + 2 * least + exponential * largest).all()

    if reduction == "none":
        check(np.random.default_rng(1).integers(1, 256, 32) / 128, roundings=1)
    else:
        check(0.25, roundings=2 if (reduction, own) == ("mean", "float16") else 1)
        check(0.8125, roundings=2)
