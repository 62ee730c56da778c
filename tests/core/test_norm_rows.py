"""The norms on a GPU where a block has many rows, long or odd ones, and where one has all rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from aotops.testing.tolerances import PRECISION, STEPS, allowed_sum  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]

ROWS = 700  # of each of 132 multiprocessors more than a pipeline has at once
EPS = 1e-5


def formula(name, dtype, x, weight, residual=None):
    h = x if residual is None else x + residual
    h = h + (h.to(dtype) - h).detach()  # the sum is rounded, as far as its dtype is concerned
    centred = h - h.mean(-1, keepdim=True) if "layer" in name else h
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS) * weight
    return y if residual is None else (y, h)


# whole warps and not, one block and clusters
@pytest.mark.parametrize("cols", [4096, 4104, 5120, 7168, 8192, 16384, 20000, 70000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
def test_many_long_rows_are_exact_and_the_same_twice(name, dtype, cols):
    generator = torch.Generator("cuda").manual_seed(cols)

    def made(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    check(name, made, ROWS, cols, dtype)


# Rows that are no whole vectors of 16 bytes: one length for each shape of a kernel, and so many that each warp has
# several rows.
ODD = {49: 40_000, 131: 40_000, 150: 40_000, 197: 30_000, 301: 20_000, 401: 20_000, 601: 12_000, 777: 9_000}
ODD |= {4097: 3_000, 9001: 1_000, 16_001: 300}


@pytest.mark.parametrize("cols", ODD)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
def test_many_odd_rows_are_exact_and_the_same_twice(name, dtype, cols):
    generator = torch.Generator("cuda").manual_seed(cols)
    check(name, lambda *shape: torch.randn(shape, device="cuda", generator=generator), ODD[cols], cols, dtype)


@pytest.mark.parametrize("cols", [49, 131, 197, 301, 1023, 4097])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_odd_rows_are_apart(name, cols):
    """They share vectors of 16 bytes with their neighbours, of which nothing counts."""
    from aotops.frontends import torch as ours

    def results(x, dy):
        x = x.clone().requires_grad_()
        y = getattr(ours, name)(x, cols, weight, eps=EPS)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    x, dy = (torch.randn(60, cols, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(cols, device="cuda", dtype=torch.bfloat16)
    plain = results(x, dy)
    x[::3], dy[1::3] = float("nan"), float("inf")
    for one, other in zip(results(x, dy), plain, strict=True):
        assert torch.equal(one[2::3], other[2::3])
        assert not one[::3].isfinite().any()


# a block alone has at most 32 rows of at most 256 columns
@pytest.mark.parametrize(("rows", "cols"), [(8, 64), (8, 256), (17, 200), (32, 256), (32, 260), (33, 256)])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
def test_few_rows_are_exact_and_the_same_twice(name, rows, cols):
    generator = torch.Generator("cuda").manual_seed(rows + cols)
    check(name, lambda *shape: torch.randn(shape, device="cuda", generator=generator), rows, cols)


def test_threads_run_a_kernel_with_more_and_less_shared_memory():
    """The limit of a kernel is the process's: one thread lowered it between another's request and its launch."""
    from aotops.frontends import torch as ours

    widths = 70_000, 80_000, 90_000, 100_000
    inputs = [(torch.randn(4, n, device="cuda"), torch.randn(n, device="cuda")) for n in widths]
    torch.cuda.synchronize()

    def run(x, weight):
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [ours.rms_norm(x, x.shape[1:], weight) for _ in range(200)]
            return all(torch.equal(y, results[0]) for y in results)

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(lambda each: run(*each), inputs))


def check(name, made, rows, cols, dtype_name="float32"):
    from aotops.frontends import torch as ours

    adds, stored, precision = "add" in name, getattr(torch, dtype_name), PRECISION[dtype_name]
    inputs = [t.to(stored) for t in (made(rows, cols), made(cols), *([made(rows, cols)] if adds else []))]
    incoming = [made(rows, cols).to(stored) for _ in range(1 + adds)]

    def results(function, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        y = function(*leaves)
        outputs = y if adds else (y,)
        return *outputs, *torch.autograd.grad(outputs, leaves, [d.to(dtype) for d in incoming])

    def own(x, weight, residual=None):
        f = getattr(ours, name)
        return f(x, cols, weight, eps=EPS) if residual is None else f(x, residual, cols, weight, eps=EPS)

    got, again = results(own, stored), results(own, stored)
    exact = results(lambda *a: formula(name, stored, *a), torch.float64)
    dweight = 2 + adds  # its place, behind the outputs and dx; its terms are dy * y of a weight of ones
    x, weight, *residual = (t.detach().double() for t in inputs)
    y = formula(name, stored, x, torch.ones_like(weight), *residual)
    norm = (incoming[0] * (y[0] if adds else y)).square().sum(0).sqrt()
    for i, (one, other, of) in enumerate(zip(got, again, exact, strict=True)):
        assert torch.equal(one, other)
        # a row's numbers have in common what is off in its statistics
        in_row = STEPS * precision.work * of.abs().amax(-1, keepdim=True)
        work = allowed_sum(rows, dtype_name) * norm if i == dweight else in_row
        assert ((one - of).abs() <= work + precision.result * of.abs()).all()
