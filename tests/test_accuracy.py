"""No operator's error is more than twice that of torch's own at the same dtype, in values and in gradients: in the far
tails, near zero, about a mean that is large, and in sums of 2^20 terms.

What both are measured against is the formula in long double, or, for sums, torch's own operator in float64. An error is
in units in the last place of what is exact, or, where terms cancel, of the largest number: half a unit is the rounding
of the result itself, which may be nothing by luck, so that it is added to what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.testing.cases import CASES  # noqa: E402

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
WHERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])

# Not reached on CUDA: an H100 beside torch 2.11. Who mends one takes it away here.
SHORT_ON_CUDA = {
    ("gelu", torch.bfloat16, -80), ("linear_gelu", torch.bfloat16, -80), ("gelu_tanh", torch.float32, -0.001),
    ("linear_gelu_tanh", torch.float32, -0.001), "linear_rows", "linear_rows_mean", "softmax_axis", "layer_norm",
    "layer_norm_mean", "lltm_rows",
}  # fmt: skip


def _expect_short(request: pytest.FixtureRequest, where: str, what: object) -> None:
    if where == "cuda" and what in SHORT_ON_CUDA:
        request.applymarker(pytest.mark.xfail(strict=True, reason="more than twice torch's error"))


ROUNDING = 0.5
LONG = 1 << 20
"""Terms of a long sum."""


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
    info = torch.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(size, info.tiny).astype(np.longdouble)))
    return float(np.max(np.abs(got.astype(np.longdouble) - exact) / (info.eps * 2**exponent)))


def _check(what, ours, torchs, floor=ROUNDING):
    assert ours <= 2 * torchs + floor, f"{what}: {ours:.2f} units in the last place, torch's {torchs:.2f}"


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
# Below -87 in float32, and of squares below -37 in float64, an exponential is no normal number: it is 0 here.
_RANGES = {
    torch.float32: [(-87, -80), (-80, -13), (-13, -5), (-5, -1), (-1, 1), (-1e-3, 1e-3), (1, 5), (5, 80)],
    torch.float64: [(-700, -80), (-37, -13), (-13, -5), (-5, -1), (-1, 1), (-1e-3, 1e-3), (1, 5), (5, 80)],
    torch.bfloat16: [(-80, -5), (-5, 5), (5, 80)],
    torch.float16: [(-13, -5), (-5, 5), (5, 80)],
}


@cache
def _points(exact, dtype, low, high):
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(4000, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)
    return x, exact(np.asarray(x.double()).astype(np.longdouble))


@WHERE
@pytest.mark.parametrize(("kind", "low", "high"), [(d, *r) for d, ranges in _RANGES.items() for r in ranges], ids=str)
@pytest.mark.parametrize("name", _POINTWISE)
def test_pointwise(request, name, kind, low, high, where):
    _expect_short(request, where, (name, kind, low))
    exact, mine, torchs = _POINTWISE[name]
    x, (value, slope, size) = _points(exact, kind, low, high)
    sizes = [np.abs(value), size]
    found, yardstick = (_run(f, [x.to(where)], None) for f in (mine, torchs))
    for i, (what, truth) in enumerate((("value", value), ("gradient", slope))):
        _check(what, *(_in_ulp(r[i], truth, sizes[i], kind) for r in (found, yardstick)))


# ---------------------------------------------------------------------------------------------------------- sums


@dataclass
class Sums:
    """Of inputs of these shapes, normally distributed about a mean."""

    shapes: tuple[tuple[int, ...], ...]
    mine: Callable
    torchs: Callable
    mean: float = 0.0
    mixed: bool = False
    """The first input's rows are of magnitudes from 1e-3 to 1e3."""


_lltm = CASES["lltm"].in_torch(torch, "lltm")


def _norm(name, width, mean=0.0, mixed=False):
    mine, torchs = getattr(ours, name), getattr(F, name)
    shapes = ((LONG // 4, width), (width,), *(((width,),) if name == "layer_norm" else ()))
    return Sums(shapes, lambda x, *p: mine(x, width, *p), lambda x, *p: torchs(x, (width,), *p), mean, mixed)


_SUMS = {
    "linear_rows": Sums(((LONG, 4), (3, 4), (3,)), ours.linear, F.linear),
    "linear_rows_mean": Sums(((LONG, 4), (3, 4), (3,)), ours.linear, F.linear, mean=1),
    "linear_terms": Sums(((5, LONG), (3, LONG)), ours.linear, F.linear),
    "linear_many_rows": Sums(((80, LONG // 8), (3, LONG // 8)), ours.linear, F.linear),
    "matmul": Sums(((4, LONG), (LONG, 3)), ours.matmul, torch.matmul),
    "matmul_mean": Sums(((4, LONG), (LONG, 3)), ours.matmul, torch.matmul, mean=1),
    "matmul_wide": Sums(((70, LONG // 8), (LONG // 8, 40)), ours.matmul, torch.matmul),
    "softmax": Sums(((2, LONG),), lambda x: ours.softmax(x, -1), lambda x: F.softmax(x, -1)),
    "softmax_axis": Sums(((LONG, 3),), lambda x: ours.softmax(x, 0), lambda x: F.softmax(x, 0)),
    "layer_norm": _norm("layer_norm", 4),
    "layer_norm_mean": _norm("layer_norm", 33, mean=1000),
    "rms_norm": _norm("rms_norm", 4),
    "rms_norm_mixed": _norm("rms_norm", 24, mixed=True),
    "conv2d": Sums(
        ((1, 2, 512, 1024), (3, 2, 1, 3), (3,)),
        lambda x, w, b: ours.conv2d(x, w, b, padding=(0, 1)),
        lambda x, w, b: F.conv2d(x, w, b, padding=(0, 1)),
    ),
    "lltm_mean": Sums(
        ((64, 48), (96, 80), (96,), (64, 32), (64, 32)),
        lambda x, w, *rest: ours.lltm(x, w / 1024, *rest)[0],
        lambda x, w, *rest: _lltm(x, w / 1024, *rest)[0],
        mean=1000,
    ),
    "lltm_rows": Sums(
        ((LONG // 4, 3), (6, 5), (6,), (LONG // 4, 2), (LONG // 4, 2)),
        lambda *x: ours.lltm(*x)[0],
        lambda *x: _lltm(*x)[0],
    ),
}


@WHERE
@pytest.mark.parametrize("name", _SUMS)
def test_sums(request, name, where):
    _expect_short(request, where, name)
    case, dtype = _SUMS[name], torch.float32
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    inputs = [normal(*shape) for shape in case.shapes]
    inputs[0] += case.mean
    if case.mixed:
        inputs[0] *= 10 ** (6 * torch.rand(len(inputs[0]), 1, generator=generator) - 3)
    dy = normal(*case.torchs(*inputs).shape)
    truths = _run(case.torchs, [x.double() for x in inputs], dy.double())
    inputs, dy = [x.to(where) for x in inputs], dy.to(where)
    found, yardstick = (_run(f, inputs, dy) for f in (case.mine, case.torchs))
    for i, truth in enumerate(truths):
        size = np.abs(truth).max()
        errors = (np.abs(r[i] - truth).max() / (size * torch.finfo(dtype).eps) for r in (found, yardstick))
        _check(f"gradient {i - 1}" if i else "value", *errors)


@WHERE
def test_a_mean_of_many_losses(where):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(LONG, 3, generator=generator)
    target = torch.randint(3, (LONG,), generator=generator)
    truth = _run(lambda x: F.cross_entropy(x, target), [x.double()], None)
    found, yardstick = (
        _run(lambda x, f=f: f(x, target.to(where)), [x.to(where)], None) for f in (ours.cross_entropy, F.cross_entropy)
    )
    for i in range(2):
        eps = torch.finfo(x.dtype).eps
        _check("loss", *(np.abs(r[i] - truth[i]).max() / (np.abs(truth[i]).max() * eps) for r in (found, yardstick)))


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
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(4)).to(where)
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
    generator = torch.Generator().manual_seed(5)
    x, w, b = (torch.randn(*s, generator=generator).to(where, dtype) for s in ((m, k), (n, k), (n,)))
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
