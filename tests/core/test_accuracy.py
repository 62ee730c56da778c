"""Every operator's error against the exact value stays under a bar that is derived from its arithmetic, in values and
in gradients: in the far tails, near zero, about a mean that is large, and in sums of 2^20 terms. torch's error is told
beside ours (``pytest -rA``, and as a property in JUnit's XML); it differs between processors and decides nothing.

What both are measured against is the formula in long double, or, for sums, torch's own operator in float64. An error is
in units in the last place of what is exact, or, where terms cancel, of the largest number: half a unit is the rounding
of the result itself. Inputs are drawn by NumPy, because torch.randn draws other numbers on other processors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.testing.cases import CASES  # noqa: E402

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
WHERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])

ROUNDING = 0.5
LONG = 1 << 20
"""Terms of a long sum."""


def _drawn(seed: int, *shape: int) -> torch.Tensor:
    """Normally distributed float32."""
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32))


# -------------------------------------------------------------------------------------------------- in long double


def _normal(x):
    """The normal distribution function and its density."""
    t = np.abs(x)
    density = np.exp(-t * t / 2) / np.sqrt(2 * np.arctan(np.longdouble(1)) * 4)
    with np.errstate(over="ignore", invalid="ignore"):
        term, middle = t.copy(), t.copy()
        for n in range(1, 80):  # all terms are positive: nothing cancels
            term = term * t * t / (2 * n + 1)
            middle = middle + term
        fraction = t.copy()
        for n in range(400, 0, -1):
            fraction = t + n / fraction
        tail = np.where(t < 2, 0.5 - density * middle, density / fraction)
    return np.where(x < 0, tail, 1 - tail), density


def _logistic(x):
    """The logistic function and its slope."""
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-x))
        return s, s / (1 + np.exp(x))


# A value, its slope, and the largest term of the slope, which may cancel.


def _gelu(x):
    below, density = _normal(x)
    return x * below, below + x * density, np.maximum(below, np.abs(x) * density)


def _gelu_tanh(x):
    k, c = 2 * np.sqrt(np.longdouble(0.5) / np.arctan(np.longdouble(1))), np.longdouble(0.044715)
    s, slope = _logistic(k * (x + c * x**3))
    steep = slope * k * (1 + 3 * c * x * x)
    return x * s, s + x * steep, np.maximum(s, np.abs(x) * steep)


def _silu(x):
    s, slope = _logistic(x)
    return x * s, s + x * slope, np.maximum(s, np.abs(x) * slope)


# --------------------------------------------------------------------------------------------------------- errors


def _run(function, inputs, dy):
    """The result and the gradients of the inputs, in float64."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    results = [y, *torch.autograd.grad(y, leaves, dy if dy is not None else torch.ones_like(y))]
    return [np.asarray(r.detach().double().cpu()) for r in results]


def _in_ulp(got, exact, size, dtype):
    """The error of each element."""
    info = torch.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(size, info.tiny).astype(np.longdouble)))
    return np.abs(got.astype(np.longdouble) - exact) / (info.eps * 2**exponent)


@pytest.fixture
def tell(record_property):
    """Records an error beside its bar and torch's error, and fails if it is above the bar."""

    def tell(what: str, error: float, bar: float, torchs: float) -> None:
        record_property(what, f"{error:.2f}, bar {bar:.2f}, torch {torchs:.4g}")
        print(f"{what}: {error:.2f} units in the last place, bar {bar:.2f}, torch's {torchs:.4g}")
        assert error <= bar, f"{what}: {error:.2f} units in the last place, expected at most {bar:.2f}"

    return tell


# ---------------------------------------------------------------------------------------------------- elementwise

_POINTWISE = {
    "gelu": (_gelu, ours.gelu, F.gelu),
    "gelu_tanh": (_gelu_tanh, lambda x: ours.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "silu": (_silu, lambda x: ours.swiglu(x, torch.ones_like(x)), F.silu),
    **{
        f"linear_{name}": (
            exact,
            lambda x, name=name: ours.linear(x[:, None], x.new_ones(1, 1), activation=name)[:, 0],
            theirs,
        )
        for name, exact, theirs in (
            ("gelu", _gelu, F.gelu),
            ("gelu_tanh", _gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
            ("silu", _silu, F.silu),
        )
    },
}
_RANGES = {
    torch.float32: [(-87, -80), (-80, -13), (-13, -5), (-5, -1), (-1, 1), (-1e-3, 1e-3), (1, 5), (5, 80)],
    torch.float64: [(-700, -80), (-37, -13), (-13, -5), (-5, -1), (-1, 1), (-1e-3, 1e-3), (1, 5), (5, 80)],
    torch.bfloat16: [(-80, -5), (-5, 5), (5, 80)],
    torch.float16: [(-13, -5), (-5, 5), (5, 80)],
}


# The bars of a value and of a gradient: how many roundings of the arithmetic, each of which is at most a unit in the
# last place of a result, precede that of the result. That is half a unit, or one of a sum of two terms, which is
# measured by the larger one. On the CPU:
#
#   exp         3   of the reduced argument, the polynomial and its product with 2^n; one more of an argument squared
#   silu        exp, 1 + e, a division and a product are 6; 1 - s for x > 0 is one more
#   its slope   of s (1 - s) two more, a product and the sum: 11
#   gelu        Phi(-t) = e^(-t^2 / 2) (1 - s) (...) with s = t / (t + pole): two roundings of s and one of its product
#               count t / pole times in 1 - s, which cancels, and up to once more in the polynomial, which adds 5 to exp
#   its slope   x times the density is larger than Phi: exp, two products, a sum; of Phi as many as of s
#   gelu_tanh   as silu, of u(x) = 2 k x (1 + c x^2), whose 5 roundings e^-|u| magnifies by |u| for x < 0
#
# In 16 bits the arithmetic is float32's, and the polynomials are right to 3e-5 together, or in
# bfloat16 to 8e-5. The largest errors measured,
# of all ranges, with the instruction sets baseline and avx2, of value and gradient:
#
#               float32       float64        16 bits
#   gelu        8.9  3.1      17.8   4.0     0.50  1.00
#   gelu_tanh   152  153      1746  1765     0.50  1.00
#   silu        2.7  2.7       2.7   2.9     0.50  1.00
#
# CUDA computes the same, in other orders. In 16 bits the hardware's exponential and reciprocal, of 2 units each, fit
# the same bars. An absolute error is added where a formula on CUDA gives 0 although the result is not.


def _flushes() -> bool:
    """Whether the processor's instructions for products of bfloat16, vdpbf16ps and tdpbf16ps, may be used: they take
    subnormal factors for zeros."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512_bf16" in flags and os.environ.get("AOTOPS_CPU_ISA", "") == ""


_FLUSHES = _flushes()


def _lost(name, t, sizes, dtype):
    """The absolute errors of values and gradients on CUDA, which are 0 in most places."""
    if name.endswith("gelu_tanh") and dtype in (torch.bfloat16, torch.float64):
        # The logistic function is 1 / (1 + e^u): 0 where that overflows or the reciprocal is subnormal. float32
        # divides e^-u by 1 + e^-u.
        tiny = torch.finfo(dtype).tiny
        return tuple(np.where(sizes[0] <= 1.001 * t * tiny, size, 0) for size in sizes)
    if name == "linear_gelu" and dtype == torch.bfloat16:
        # The epilogues of products state float16's formula, which is fitted down to -7: below, the error is at most
        # 2e-5 of the value at -7. The gradient's formula is that of gelu.
        return np.where(t > 7, 2e-16, 0), 0 * t
    return 0 * t, 0 * t


def _roundings(name, x, sizes, dtype, where):
    """Roundings in each value and each gradient, before that of the result."""
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    info = torch.finfo(wide)
    t = np.minimum(np.abs(x), np.sqrt(-2 * np.log(np.longdouble(info.tiny))))
    if name.endswith("silu"):
        value, gradient = 7 + 0 * t, 11 + 0 * t
    elif name.endswith("tanh"):
        u = np.minimum(1.6 * t * (1 + 0.045 * t * t), 60 - np.log(info.tiny)) * (x < 0)
        value, gradient = 7 + 5 * u, 11 + 5 * u
    else:
        value, gradient = 8 + 4 * t / (2.9 if wide == torch.float32 else 5.2), 11 + 0 * t
    if dtype != wide:
        approximations = 3e-5 if dtype == torch.float16 else 8e-5
        value, gradient = ((n * info.eps + approximations) / torch.finfo(dtype).eps for n in (value, gradient))
    if where == "cpu":
        if _FLUSHES and name.startswith("linear") and dtype == torch.bfloat16:  # dz is a factor of a product
            gradient = gradient + np.where(
                sizes[1] <= torch.finfo(dtype).tiny, _in_ulp(sizes[1], 0, sizes[1], dtype), 0
            )
        return value, gradient
    lost = _lost(name, np.abs(x), sizes, dtype)
    value, gradient = (n + _in_ulp(lost[i], 0, sizes[i], dtype) for i, n in enumerate((value, gradient)))
    return value, gradient


@cache
def _points(exact, dtype, low, high):
    random = np.random.default_rng(1)
    x = torch.from_numpy(random.uniform(low, high, 4000)).to(dtype)
    return x, exact(np.asarray(x.double()).astype(np.longdouble))


def _judge_pointwise(tell, name, dtype, points, where, dy=None):
    _, mine, torchs = _POINTWISE[name]
    x, (value, slope, size) = points
    scale = 1 if dy is None else np.asarray(dy.double())
    truths, sizes = (value, slope * scale), (np.abs(value), size * scale)
    found, yardstick = (_run(f, [x.to(where)], dy if dy is None else dy.to(where)) for f in (mine, torchs))
    bars = _roundings(name, np.asarray(x.double()), (np.abs(value), size * scale), dtype, where)
    for i, (what, rounding) in enumerate((("value", 0.5), ("gradient", 1.0))):
        ours_is, torchs_is = (_in_ulp(r[i], truths[i], sizes[i], dtype) for r in (found, yardstick))
        bar = rounding + bars[i]
        worst = np.argmax(ours_is / bar)
        at = f"{what} at {float(x[worst]):.6g}"
        tell(at, float(ours_is[worst]), float(bar[worst]), float(np.max(torchs_is)))


@WHERE
@pytest.mark.parametrize(("kind", "low", "high"), [(d, *r) for d, ranges in _RANGES.items() for r in ranges], ids=str)
@pytest.mark.parametrize("name", _POINTWISE)
def test_pointwise(tell, name, kind, low, high, where):
    _judge_pointwise(tell, name, kind, _points(_POINTWISE[name][0], kind, low, high), where)


# Where e^-|x| and e^(-x^2 / 2) are subnormal, and their products with 2^50 are not.
_SUBNORMAL = {
    torch.float32: {"gelu": (-16, -13), "gelu_tanh": (-11.5, -10), "silu": (-125, -86)},
    torch.bfloat16: {"gelu": (-16, -13), "gelu_tanh": (-11.5, -10), "silu": (-125, -86)},
    torch.float64: {"gelu": (-38.5, -37), "gelu_tanh": (-21.5, -20.5), "silu": (-740, -707)},
}


@pytest.mark.parametrize("dtype", _SUBNORMAL, ids=str)
@pytest.mark.parametrize("name", _POINTWISE)
def test_a_product_is_right_though_a_factor_is_subnormal(tell, name, dtype):
    x, truths = _points(_POINTWISE[name][0], dtype, *_SUBNORMAL[dtype][name.removeprefix("linear_")])
    _judge_pointwise(tell, name, dtype, (x, truths), "cpu", torch.full_like(x, 2.0**50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_swiglu_is_right_though_its_logistic_is_subnormal(dtype):
    low, high = _SUBNORMAL[dtype]["silu"]
    gate, (value, _, _) = _points(_silu, dtype, low, high)
    up = torch.full_like(gate, 2.0**50)
    y, _, dup = _run(ours.swiglu, [gate, up], up)
    for found in (y, dup):
        assert _in_ulp(found, value * 2.0**50, np.abs(value) * 2.0**50, dtype).max() <= 8  # as of silu


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_probabilities_that_are_subnormal_are_rounded_and_not_zero(dtype, axis):
    """In units of the smallest number: half of one is the rounding, another for what precedes it."""
    low = np.log(torch.finfo(dtype).tiny)
    x = torch.cat([torch.zeros(1), torch.linspace(low - 3, low + 1, 40, dtype=torch.float64)])[:, None].repeat(1, 3)
    x = (x if axis == 0 else x.T.contiguous()).to(dtype)
    exact = np.exp(np.asarray(x.double()).astype(np.longdouble))
    exact /= exact.sum(axis, keepdims=True)
    found = np.asarray(ours.softmax(x, axis).double()).astype(np.longdouble)
    last = torch.finfo(dtype).eps * torch.finfo(dtype).tiny
    roundings = {torch.float32: 8, torch.float64: 8, torch.bfloat16: 0.1}[dtype]
    assert (np.abs(found - exact) <= (0.5 + roundings) * np.maximum(last, exact * torch.finfo(dtype).eps)).all()


@WHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_slope_where_a_square_overflows_is_0_or_1(dtype, where):
    x = torch.tensor([-1.0, 1.0], device=where, dtype=dtype) * torch.finfo(dtype).max ** 0.75
    for f in (lambda x: ours.gelu(x, "tanh"), _POINTWISE["linear_gelu_tanh"][1], ours.gelu):
        np.testing.assert_array_equal(_run(f, [x], None)[1], [0, 1])


# ---------------------------------------------------------------------------------------------------------- sums


@dataclass
class Sums:
    """An operator that sums inputs of these shapes, normally distributed about a mean."""

    shapes: tuple[tuple[int, ...], ...]
    mine: Callable
    torchs: Callable
    terms: tuple[int, ...]
    """Terms in a sum of the value, and of each gradient; the last number stands for those that follow."""
    mean: float = 0.0
    mixed: bool = False
    """The first input's rows are of magnitudes from 1e-3 to 1e3."""
    condition: float = 0
    """Units by which a result differs because of a rounding that it magnifies."""


# The bar is half a unit, the condition, and six times the deviation of a sum. A term of variance 1 that is added to i
# others is rounded by at most 2^-24 sqrt(i), evenly distributed: the sum of n terms in chains of L has an error of
# deviation 2^-24 sqrt(n L / 6), and is itself near sqrt(n). In units of eps: sqrt(L / 6) / 2. A sum of positive terms
# grows with n: sqrt(n) / 6 units, of which softmax along an axis has the n = 4096 runs.
#
# On the CPU L is at most the sum of the lengths of the stages: of a product 256 terms of a panel (kDepth), 16 panels of
# a partial sum (kPartialTerms) and all partial sums; of dot products, which the value of linear_terms is, 4096 terms
# of a lane and the 64 partial sums; of a column 256 (kPiece), which are added up in double. On CUDA cuBLAS chooses the
# order of a product's sums, and the number of multiprocessors that of columns: a chain is no longer than the sum.
DEVIATIONS = 6


def _bar_of_sums(name: str, i: int, where: str) -> float:
    case = _SUMS[name]
    n = case.terms[min(i, len(case.terms) - 1)]
    stages = 4096 + 64 if (name, i) == ("linear_terms", 0) else 256 + 16 + n // 4096
    chain = min(n, stages) if where == "cpu" else n
    return ROUNDING + case.condition + DEVIATIONS * (chain / 6) ** 0.5 / 2


_lltm = CASES["lltm"].in_torch(torch, "lltm")


def _norm(name, width, mean=0.0, mixed=False, condition=4.0):
    """eps is given, because rms_norm's own depends on the dtype."""
    mine, torchs = getattr(ours, name), getattr(F, name)
    shapes = ((LONG // 4, width), (width,), *(((width,),) if name == "layer_norm" else ()))
    rest = (None,) if name == "rms_norm" else (None, None)

    def with_eps(f, size):
        return lambda x, *p: f(x, size, *p, *rest[len(p) :], 1e-6)

    return Sums(shapes, with_eps(mine, width), with_eps(torchs, (width,)), (LONG // 4,), mean, mixed, condition)


_SUMS = {
    "linear_rows": Sums(((LONG, 4), (3, 4), (3,)), ours.linear, F.linear, (5, 3, LONG)),
    "linear_rows_mean": Sums(((LONG, 4), (3, 4), (3,)), ours.linear, F.linear, (5, 3, LONG), mean=1),
    "linear_terms": Sums(((5, LONG), (3, LONG)), ours.linear, F.linear, (LONG, 3, 5)),
    "linear_many_rows": Sums(((80, LONG // 8), (3, LONG // 8)), ours.linear, F.linear, (LONG // 8, 3, 80)),
    "matmul": Sums(((4, LONG), (LONG, 3)), ours.matmul, torch.matmul, (LONG, 3, 4)),
    "matmul_mean": Sums(((4, LONG), (LONG, 3)), ours.matmul, torch.matmul, (LONG, 3, 4), mean=1),
    "matmul_wide": Sums(((70, LONG // 8), (LONG // 8, 40)), ours.matmul, torch.matmul, (LONG // 8, 40, 70)),
    "softmax": Sums(((2, LONG),), lambda x: ours.softmax(x, -1), lambda x: F.softmax(x, -1), (256,)),
    "softmax_axis": Sums(
        ((LONG, 3),),
        lambda x: ours.softmax(x, 0),
        lambda x: F.softmax(x, 0),
        (256,),
        condition=DEVIATIONS * 64 / 6,
    ),
    "layer_norm": _norm("layer_norm", 4),
    # The mean that the backward is given is rounded to float32: by 256 units of the normalized numbers.
    "layer_norm_mean": _norm("layer_norm", 33, mean=1000, condition=2 * 256),
    "rms_norm": _norm("rms_norm", 4),
    "rms_norm_mixed": _norm("rms_norm", 24, mixed=True),
    "conv2d": Sums(
        ((1, 2, 512, 1024), (3, 2, 1, 3), (3,)),
        lambda x, w, b: ours.conv2d(x, w, b, padding=(0, 1)),
        lambda x, w, b: F.conv2d(x, w, b, padding=(0, 1)),
        (7, 9, LONG // 2),
    ),
    "lltm_mean": Sums(
        ((64, 48), (96, 80), (96,), (64, 32), (64, 32)),
        lambda x, w, *rest: ours.lltm(x, w / 1024, *rest)[0],
        lambda x, w, *rest: _lltm(x, w / 1024, *rest)[0],
        (80 + 96,),
        mean=1000,
    ),
    "lltm_rows": Sums(
        ((LONG // 4, 3), (6, 5), (6,), (LONG // 4, 2), (LONG // 4, 2)),
        lambda *x: ours.lltm(*x)[0],
        lambda *x: _lltm(*x)[0],
        (LONG // 4,),
    ),
}


@WHERE
@pytest.mark.parametrize("name", _SUMS)
def test_sums(tell, name, where):
    case, dtype = _SUMS[name], torch.float32
    inputs = [_drawn(2 + i, *shape) for i, shape in enumerate(case.shapes)]
    inputs[0] += case.mean
    if case.mixed:
        inputs[0] *= 10 ** torch.linspace(-3, 3, len(inputs[0]))[:, None]
    dy = _drawn(1, *case.torchs(*inputs).shape)
    truths = _run(case.torchs, [x.double() for x in inputs], dy.double())
    inputs, dy = [x.to(where) for x in inputs], dy.to(where)
    found, yardstick = (_run(f, inputs, dy) for f in (case.mine, case.torchs))
    for i, truth in enumerate(truths):
        unit = np.abs(truth).max() * torch.finfo(dtype).eps
        error, torchs = (float(np.abs(r[i] - truth).max() / unit) for r in (found, yardstick))
        tell(f"gradient {i - 1}" if i else "value", error, _bar_of_sums(name, i, where), torchs)


@WHERE
def test_a_mean_of_many_losses(tell, where):
    """A loss is a logarithm and two sums; the losses are positive, and added up in double. A gradient is a probability,
    of an exponential and a quotient, less 1, times 1 / n: 6 roundings."""
    x = _drawn(3, LONG, 3)
    target = torch.from_numpy(np.random.default_rng(3).integers(3, size=LONG))
    truth = _run(lambda x: F.cross_entropy(x, target), [x.double()], None)
    found, yardstick = (
        _run(lambda x, f=f: f(x, target.to(where)), [x.to(where)], None) for f in (ours.cross_entropy, F.cross_entropy)
    )
    for i, (what, roundings) in enumerate((("loss", 3), ("gradient", 6))):
        unit = np.abs(truth[i]).max() * torch.finfo(x.dtype).eps
        error, torchs = (float(np.abs(r[i] - truth[i]).max() / unit) for r in (found, yardstick))
        tell(what, error, ROUNDING + roundings, torchs)


@WHERE
def test_a_mean_over_weights_that_cancel_is_as_right_as_its_condition(where):
    """Each loss, its product with the weight, and both sums are rounded to 16 bits: 4 roundings of half a unit, which
    cancellation magnifies. By so much the result, of 1 part in 2000 here, differs from torch's."""
    weight = torch.tensor([6.0625, -1.3828125, -2.796875], dtype=torch.bfloat16)
    for draw in range(50):
        x = _drawn(100 + draw, 15, 3).bfloat16()
        target = torch.from_numpy(np.random.default_rng(draw).integers(3, size=15))
        w = weight.double()[target]
        loss = w * F.cross_entropy(x.double(), target, reduction="none")
        condition = float(loss.abs().sum() / loss.sum().abs() + w.abs().sum() / w.sum().abs())
        found = ours.cross_entropy(*(t.to(where) for t in (x, target)), weight=weight.to(where))
        exact = float(loss.sum() / w.sum())
        assert abs(float(found) - exact) <= 2 * torch.finfo(x.dtype).eps * condition * abs(exact)


# ------------------------------------------------------------------------------------------------------- not finite


@WHERE
@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_goes_through_an_activation_as_in_torch(name, dtype, where):
    """Among others: relu's slope at NaN is 1, and 0 times an infinite gradient is 0. Values are as torch's in float64:
    its GELU of infinity is NaN in vectors of 32 bits, and infinity elsewhere."""
    theirs = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
    }[name]
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([nan, inf, -inf, -1.0, 0.0, 2.0], dtype=dtype)
    x, dy = (t.reshape(-1).to(where) for t in torch.meshgrid(values, values, indexing="ij"))
    one = x.new_ones(1, 1)
    found = _run(lambda x: ours.linear(x[:, None], one, activation=name)[:, 0], [x], dy)
    expected = [_run(theirs, [x.double()], dy.double())[0], _run(theirs, [x], dy)[1]]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(a[np.isinf(b)], b[np.isinf(b)])
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b))


@WHERE
@pytest.mark.parametrize("width", [16, 64, 1000, 4096])
def test_a_variance_that_overflows_is_nan(width, where):
    """torch's is NaN, too, or a row of zeros, as the width has it: its shares of a row cancel or do not."""
    x = _drawn(4, 3, width).to(where)
    x[1] *= 1e30
    for y in (
        ours.layer_norm(x, width),
        ours.add_layer_norm(x, torch.zeros_like(x), width)[0],
    ):
        assert torch.isnan(y[1]).all()
        assert torch.isfinite(y[[0, 2]]).all()
    for norm in (ours.rms_norm(x, width), F.rms_norm(x, (width,))):
        assert (norm[1] == 0).all()


# ---------------------------------------------------------------------------------------------------------- bits


@WHERE
@pytest.mark.parametrize("shape", [(6, 6, 6), (33, 65, 17), (64, 128, 64), (1, 8, 40), (200, 264, 136)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_rounded_once_whether_a_gradient_is_recorded_or_not(bias, activation, dtype, shape, where):
    m, k, n = shape
    x, w, b = (_drawn(5, *s).to(where, dtype) for s in ((m, k), (n, k), (n,)))
    b = b if bias else None
    y = ours.linear(x, w, b, activation=activation)
    assert torch.equal(y, ours.linear(x, w.clone().requires_grad_(), b, activation=activation))
    if dtype.itemsize > 2:
        return
    act = {
        None: lambda x: x,
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
    }[activation]
    exact = act(F.linear(x.double(), w.double(), b.double() if bias else None)).cpu()
    # one rounding, and that of float32 sums, of k terms; the formulas on a GPU, right to 1e-5, are a 40th of float16's
    allowed = 0.5 * 1.06 * torch.finfo(dtype).eps * exact.abs() + k * 2**-24 * 2 * k**0.5 + torch.finfo(dtype).tiny
    assert ((y.double().cpu() - exact).abs() <= allowed).all()
