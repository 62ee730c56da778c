"""Tensors that are large enough for the kernels of large tiles, and for 64-bit indices."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.testing.cases import CASES  # noqa: E402

CUDA = torch.cuda.is_available()
lltm_as_written = CASES["lltm"].in_torch(torch, "lltm")


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
def test_lltm_of_a_large_state():
    """Enough tiles for a device: float32 multiplies in another kernel then."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (3333, 908), (3300, 2008), (3300,), (3333, 1100), (3333, 1100)
    args = [torch.randn(s, generator=generator, device="cuda") * 0.03 for s in shapes]
    results = []
    for f, dtype in ((ours.lltm, torch.float32), (lltm_as_written, torch.float64)):
        given = [t.to(dtype).requires_grad_() for t in args]
        with torch.no_grad():
            alone = f(*given)
        results.append([*alone, *f(*given), *torch.autograd.grad([y.square().sum() for y in f(*given)], given)])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize(("batch", "m", "k", "n"), [(1, 2048, 72, 2048), (4, 1024, 64, 1024), (1, 2047, 65, 2049)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_large_products(dtype, batch, m, k, n, transpose_a, transpose_b):
    """Large tiles: small integers, of which every sum is exact but for the rounding of the result."""
    random = torch.Generator("cuda").manual_seed(0)
    shapes = (batch, k, m) if transpose_a else (batch, m, k), (batch, n, k) if transpose_b else (batch, k, n)
    a, b = (torch.randint(-3, 4, s, generator=random, device="cuda", dtype=torch.float64) for s in shapes)
    expected = (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)
    assert torch.equal(ours.matmul(a.to(dtype), b.to(dtype), transpose_a, transpose_b), expected.to(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
def test_large_linear():
    """Large tiles, with what goes into the activation kept and not."""
    random = torch.Generator("cuda").manual_seed(0)
    shapes = (2048, 64), (2048, 64), (2048,)
    x, weight, bias = (torch.randint(-8, 9, s, generator=random, device="cuda").double() / 16 for s in shapes)
    z = F.linear(x, weight, bias)
    half = [t.bfloat16().requires_grad_() for t in (x, weight, bias)]
    for args in half, [t.detach() for t in half]:
        torch.testing.assert_close(ours.linear(*args, "gelu").double(), F.gelu(z), rtol=2**-6, atol=2**-8)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
def test_many_elements():
    """More than 2^31 elements: indices do not wrap."""
    free, _ = torch.cuda.mem_get_info()
    n = (1 << 31) + 4096
    if free < 5 * 2 * n:
        pytest.skip("the GPU has too little memory")
    x = torch.zeros(n // 4096, 4096, dtype=torch.float16, device="cuda")
    x[-1] = torch.arange(4096, device="cuda") % 7
    for y, expected in (
        (ours.gelu(x), F.gelu(x[-1])),
        (ours.add(x, x), 2 * x[-1]),
        (ours.layer_norm(x, 4096), F.layer_norm(x[-1], (4096,))),
    ):
        torch.testing.assert_close(y[-1], expected)
        torch.testing.assert_close(y[0], torch.zeros_like(y[0]))
        del y
