"""Products on a GPU, by each choice of the kernel (AOTOPS_GEMM), and the gradient of a linear layer's bias."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from aotops.frontends import torch as ours  # noqa: E402
from aotops.testing.tolerances import allowed_sum  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]

MODES = """
import torch

from aotops.frontends import torch as ours

torch.manual_seed(0)


def slopes(y):
    return (torch.arange(len(y), device="cuda") % 7 - 3).to(y.dtype)[:, None].expand_as(y).contiguous()


def steps(*leaves, activation):
    y = ours.linear(*leaves, activation=activation)
    return [y, *torch.autograd.grad(y, leaves, slopes(y))]


for shape in ((512, 256, 768), (300, 72, 40), (257, 33, 65)):
    rows, k, n = shape
    for activation in (None, "gelu"):
        given = [torch.randn(size, device="cuda").mul(0.25).bfloat16() for size in ((rows, k), (n, k), (n,))]
        leaves, wide = [[t.to(dtype).requires_grad_() for t in given] for dtype in (torch.bfloat16, torch.float64)]
        z = torch.nn.functional.linear(*wide)
        y = torch.nn.functional.gelu(z) if activation else z
        exact = [y, *torch.autograd.grad(y, wide, slopes(y))]
        found = steps(*leaves, activation=activation)
        for one, other, right in zip(found, steps(*leaves, activation=activation), exact):
            assert (one.double() - right).abs().max() <= 2**-6 * right.abs().max(), (shape, activation)
            assert torch.equal(one, other), (shape, activation)

x, weight = torch.randn(640, 384, device="cuda").bfloat16(), torch.randn(256, 384, device="cuda").bfloat16()
exact = x.double() @ weight.double().T
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # the first product of this shape: nothing is known of it
    y = ours.linear(x, weight)
for _ in range(2):
    y.zero_()
    graph.replay()
    assert (y.double() - exact).abs().max() <= 2**-7 * exact.abs().max()
"""


@pytest.mark.parametrize("mode", ["auto", "cublaslt", "own"])
def test_the_choice_of_the_kernel(mode):
    """Values, the same bits again, and capture into a graph."""
    env = {**os.environ, "AOTOPS_GEMM": mode}
    run = subprocess.run(
        [sys.executable, "-c", MODES], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize("shape", [(3072, 2048), (2048, 2048), (1536, 1536)], ids=str)
def test_long_sums_in_float32_have_the_same_bits_again(shape):
    """Parts of them are added in place, or in scratch."""
    a, b = (torch.randn(4096, n, device="cuda") for n in shape)
    found, exact = ours.matmul(a, b, transpose_a=True), a.double().T @ b.double()
    norm = (a.double().square().T @ b.double().square()).sqrt()
    assert ((found - exact).abs() <= allowed_sum(4096, "float32") * norm).all()
    for _ in range(4):
        assert torch.equal(found, ours.matmul(a, b, transpose_a=True))


@pytest.mark.parametrize("rows", [33, 64, 128, 129])
def test_few_rows_in_float32_have_the_same_bits_again(rows):
    x, weight, bias = (torch.randn(shape, device="cuda") for shape in ((rows, 1024), (1024, 1024), (1024,)))
    found, exact = ours.linear(x, weight, bias), x.double() @ weight.double().T + bias
    norm = (x.double().square() @ weight.double().square().T + bias.double().square()).sqrt()
    assert ((found - exact).abs() <= allowed_sum(1025, "float32") * norm).all()
    for _ in range(4):
        assert torch.equal(found, ours.linear(x, weight, bias))


def quarters(*shape, dtype, most=8):
    return torch.randint(-most, most + 1, shape, device="cuda").to(dtype) / 4


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_dbias_is_the_exact_sum_rounded_once(dtype, activation, offset):
    """With multiples of 1/4, whose sums float32 holds: no row and no column is left out, or taken twice. offset: the
    elements by which dy is misaligned."""
    for rows, n in (
        (1, 8),
        (7, 1),
        (33, 256),
        (100, 264),
        (255, 31),
        (1000, 771),
        (16385, 96),
        (8192, 2304),
        (3, 50304),
    ):
        x, weight, bias = (quarters(*shape, dtype=dtype, most=2) for shape in ((rows, 2), (n, 2), (n,)))
        dy = quarters(offset + rows * n, dtype=dtype)[offset:].view(rows, n)
        leaves = [x.requires_grad_(), bias.requires_grad_()]
        y = ours.linear(x, weight, bias, activation=activation)
        dx, dbias = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        dz = dy.double() * (y.detach() > 0 if activation else 1)
        assert torch.equal(dbias, dz.sum(0).to(dtype)), (rows, n)
        error = (dx.double() - dz @ weight.double()).abs()
        assert (error <= 4 * torch.finfo(dtype).eps * (dz.abs() @ weight.double().abs())).all(), (rows, n)
        assert torch.equal(dbias, torch.autograd.grad(y, leaves, dy)[1])


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dbias_behind_an_activation(dtype, activation):
    functional = torch.nn.functional
    formula = {
        "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"), "gelu": functional.gelu, "silu": functional.silu
    }[activation]  # fmt: skip
    for rows, n in ((1000, 776), (129, 33)):
        x, weight, bias = (quarters(*shape, dtype=dtype, most=2) for shape in ((rows, 4), (n, 4), (n,)))
        dy = quarters(rows, n, dtype=dtype)
        y = ours.linear(x, weight, bias.requires_grad_(), activation=activation)
        (dbias,) = torch.autograd.grad(y, bias, dy)
        z = functional.linear(x.double(), weight.double(), bias.detach().double()).requires_grad_()
        (dz,) = torch.autograd.grad(formula(z), z, dy.double())
        allowed = torch.finfo(dtype).eps * dz.sum(0).abs() + 2**-13 * dz.abs().sum(0) / rows**0.5
        assert ((dbias.double() - dz.sum(0)).abs() <= allowed).all(), (rows, n)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dbias_of_many_rows_is_as_exact_as_its_type(dtype):
    """A thread adds some hundreds of terms in float32 before it starts a new sum."""
    rows, n = 1 << 20, 8
    x, weight, bias = (torch.zeros(shape, device="cuda", dtype=dtype) for shape in ((rows, 1), (n, 1), (n,)))
    dy = (torch.rand(rows, n, device="cuda") / 16).to(dtype)
    (dbias,) = torch.autograd.grad(ours.linear(x, weight, bias.requires_grad_()), bias, dy)
    exact = dy.double().sum(0)
    assert ((dbias.double() - exact).abs() <= (torch.finfo(dtype).eps / 2 + 2**-15) * exact).all()


@pytest.mark.parametrize(("ta", "tb"), [(False, True), (False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(1288, 1025, 136), (1160, 1090, 64), (1168, 1284, 72)], ids=str)
def test_lines_of_the_result_that_are_not_aligned(size, dtype, ta, tb):
    """Sums of small integers, which float32 holds: only the result is rounded. Beside the operands are NaNs."""
    m, n, k = size
    n = n if tb else n // 8 * 8  # whose lines are of n elements
    a, b = (among_nans(*s, dtype=dtype) for s in ((k, m) if ta else (m, k), (n, k) if tb else (k, n)))
    exact = (a.double().mT if ta else a.double()) @ (b.double().mT if tb else b.double())
    assert torch.equal(ours.matmul(a, b, ta, tb), exact.to(dtype))


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "size", [(2309, 3002, 776), (2304, 2309, 776), (1816, 1824, 1289), (1817, 1811, 1290)], ids=str
)
def test_a_linear_layer_whose_sizes_are_no_multiples_of_8(size, dtype, activation):
    """Its sizes are those for which lines are copied (cuda_src/operators/linear.h)."""
    rows, out, inner = size
    x, weight, bias, dy = (among_nans(*s, dtype=dtype) for s in ((rows, inner), (out, inner), (out,), (rows, out)))
    for given in ((x, weight, bias), (x, weight)):
        wide = [t.double().requires_grad_() for t in given]
        y = torch.nn.functional.linear(*wide)
        y = y.relu() if activation else y
        exact = [y, *torch.autograd.grad(y, wide, dy.double())]
        leaves = [t.detach().requires_grad_() for t in given]
        y = ours.linear(*leaves, activation=activation)
        for found, right in zip((y, *torch.autograd.grad(y, leaves, dy)), exact, strict=True):
            assert torch.equal(found, right.to(dtype))


def among_nans(*shape, dtype):
    count = torch.Size(shape).numel()
    memory = torch.full((count + 256,), torch.nan, device="cuda", dtype=dtype)
    return memory[128 : 128 + count].copy_(torch.randint(-3, 4, (count,), device="cuda")).view(shape)


def kernels_of(step):
    """The kernels that ran, and the result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = step()
        torch.cuda.synchronize()
    events = profile.events()
    if not events:
        pytest.skip("the profiler finds nothing")
    return [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA], result


@pytest.mark.parametrize("shape", [(2048, 384, 2304), (1999, 72, 2308), (3, 520, 260), (130, 72, 6)], ids=str)
def test_gelu_in_tf32(shape):
    """One kernel on Hopper, where tiles are many and nothing keeps the pre-activation."""
    rows, k, n = shape
    x, weight, bias = (torch.randn(size, device="cuda") for size in ((rows, k), (n, k), (n,)))
    ours.linear(x, weight, bias, "gelu", True)  # loads the kernel
    names, y = kernels_of(lambda: ours.linear(x, weight, bias, "gelu", True))
    if torch.cuda.get_device_capability() == (9, 0) and rows > 1000:
        assert len(names) == 1, names
    z = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    allowed = 2**-9 * (x.double().abs() @ weight.double().abs().T)
    with_gradient = ours.linear(x.requires_grad_(), weight, bias, "gelu", True)
    for found in (y, ours.linear(x.detach(), weight, bias, "gelu", True), with_gradient.detach()):
        assert ((found.double() - torch.nn.functional.gelu(z.detach())).abs() <= allowed.detach()).all()


@pytest.mark.parametrize("shape", [(2048, 2052, 1028), (2304, 2052, 9000), (2048, 1000, 1028)], ids=str)
def test_terms_along_columns_in_tf32(shape):
    """On Hopper factors are copied and transposed, all terms at once or in parts, where they are large. Sums of small
    integers, which TF32 holds, are exact."""
    m, n, k = shape
    a, b = (among_nans(k, size, dtype=torch.float32) for size in (m, n))
    exact = a.double().T @ b.double()
    weight = among_nans(m, n, dtype=torch.float32).requires_grad_()
    names, y = kernels_of(lambda: ours.matmul(a, b, transpose_a=True, allow_tf32=True))
    (dweight,) = torch.autograd.grad(ours.linear(b, weight, allow_tf32=True), weight, a)
    (db,) = torch.autograd.grad(ours.matmul(a, weight, allow_tf32=True), weight, b)
    for found in (y, dweight, db):
        assert torch.equal(found.double(), exact)
    if torch.cuda.get_device_capability() == (9, 0) and not os.environ.keys() & {"AOTOPS_GEMM", "AOTOPS_CUBLASLT"}:
        assert any("transpose_lines" in name for name in names) == (n > 2000), names
