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


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("lines", [(), (2,)])
@pytest.mark.parametrize("cols", [6008, 16392, 40000, 131072])
@pytest.mark.parametrize(
    ("narrow", "wide"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_norms_of_long_rows(cols, narrow, wide, lines):
    """A row is spread over several blocks; the last ones have a part, or none of it."""
    random = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape, dtype=narrow):
        return torch.randn(shape, generator=random, device="cuda", dtype=torch.float64).to(dtype)

    x, residual = drawn(3, 2, cols) + 2, drawn(3, 2, cols, dtype=wide)
    weight, bias, dy, dh = drawn(*lines, cols), drawn(*lines, cols), drawn(3, 2, cols), drawn(3, 2, cols, dtype=wide)

    def added(x, residual):
        """The sum, and the same rounded, whose gradient is the sum's."""
        h = x + residual
        return h, h + (h.to(wide) - h).detach()

    def add_layer_norm(x, residual, weight, bias):
        h, rounded = added(x, residual)
        return F.layer_norm(rounded, (cols,)) * weight + bias, h

    def add_rms_norm(x, residual, weight):
        h, rounded = added(x, residual)
        return F.rms_norm(rounded, (cols,), eps=1e-5) * weight, h

    cases = [
        (lambda x, r, w, b: ours.add_layer_norm(x, r, cols, w, b), add_layer_norm, (x, residual, weight, bias)),
        (lambda x, r, w: ours.add_rms_norm(x, r, cols, w, 1e-5), add_rms_norm, (x, residual, weight)),
    ]
    if narrow == wide:
        cases += [
            (
                lambda x, w: (ours.rms_norm(x, cols, w, 1e-5),),
                lambda x, w: (F.rms_norm(x, (cols,), eps=1e-5) * w,),
                (x, weight),
            )
        ]
    for f, expected, args in cases:
        found = []
        for g, given in ((f, args), (f, args), (expected, [t.double() for t in args])):
            given = [t.detach().clone().requires_grad_() for t in given]
            outputs = g(*given)
            cotangents = [d.to(y.dtype) for d, y in zip((dy, dh), outputs, strict=False)]
            gradients = torch.autograd.grad(outputs, given, cotangents)
            found.append([*outputs, *gradients])
        for a, again, b in zip(*found, strict=True):
            assert torch.equal(a, again)
            torch.testing.assert_close(a.double(), b, rtol=2**-7, atol=2**-6 if narrow == torch.bfloat16 else 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("shape", [(8, 256), (4096, 1024), (200, 40000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_waits_for_what_the_kernel_before_writes(shape, dtype):
    """It may start before that one has ended. Kernels in a row, and in a graph, give what they give one at a time."""
    cols = shape[1]
    x = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(dtype)
    weight = torch.linspace(0.5, 1.5, cols, device="cuda").to(dtype).requires_grad_()
    steps = (
        lambda y: ours.add(y, x, alpha=0.5),
        lambda y: ours.rms_norm(y, cols, weight),
        lambda y: ours.add_layer_norm(y, x, cols, weight)[0],
        lambda y: ours.gelu(y),
        lambda y: ours.layer_norm(y, cols, weight),
        lambda y: ours.add_rms_norm(y, x, cols, weight)[0],
    )

    def run(each=lambda: None):
        y = start = x.clone().requires_grad_()
        for step in steps * 4:
            y = step(y)
            each()
        gradients = torch.autograd.grad(y.float().square().mean(), (start, weight))
        return [y.detach(), *gradients]

    expected = run(torch.cuda.synchronize)
    for _ in range(5):
        assert all(map(torch.equal, run(), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        graph.replay()
        assert all(map(torch.equal, found, expected))


def integers(*shape, begin=0, dtype=torch.bfloat16):
    """Small ones, of which every sum is exact but for the rounding of the result, behind `begin` others."""
    random = torch.Generator("cuda").manual_seed(sum(shape))
    size = begin + torch.Size(shape).numel()
    flat = torch.randint(-3, 4, (size,), generator=random, device="cuda").to(dtype)
    return flat[begin:].view(shape)


def kernels(f):
    """The names of the kernels that f runs, and its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        results = f()
        torch.cuda.synchronize()
    return [event.name() for event in profile.profiler.kineto_results.events()], results


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize(
    # way: how dy comes to the products of a backward with a bias, where its lines are odd
    ("rows", "inputs", "outputs", "way"),
    [
        (8187, 768, 5623, "lines"),  # lines of dy begin at eight places in 16 bytes
        (8190, 768, 5622, "lines"),  # at four
        (8193, 768, 5620, "lines"),  # at two
        (8187, 761, 5623, "lines"),  # x and weight are copied
        (4090, 768, 28001, "lines"),  # dx has tiles for half of a device: sums are in slices
        (2050, 768, 30001, "lines"),  # and dweight's of its last rows; dx has tiles of 128 columns
        (16381, 768, 1003, "lines"),  # and all of dweight's
        (4099, 1023, 1024, None),  # the products' sizes are whole vectors with the copies' zeros
        (4096, 1023, 1024, None),  # dweight has tiles of 64 rows
        (4096, 1021, 1019, "copied"),
        (16384, 1023, 1200, None),  # dweight's sizes are padded, and it is copied
        (8192, 1024, 4097, "copied"),  # dweight's tiles are an odd number in a column: clusters are in rows
        (8192, 1016, 4098, "copied"),  # without a bias both are of lines
        (1100, 768, 2053, "copied"),  # too few tiles
        (8187, 768, 517, "copied"),
    ],
)
def test_linear_of_odd_sizes(rows, inputs, outputs, way, begin, dtype):
    args = [integers(*shape, dtype=dtype).requires_grad_() for shape in [(rows, inputs), (outputs, inputs), (outputs,)]]
    dy = integers(rows, outputs, begin=begin, dtype=dtype)
    x, weight, bias = (t.detach().double() for t in args)
    expected = F.linear(x, weight, bias), dy.double() @ weight, dy.double().mT @ x, dy.double().sum(0)
    names, (y, *grads) = kernels(lambda: (y := ours.linear(*args), *torch.autograd.grad(y, args, dy)))
    for got, of in zip((y, *grads), expected, strict=True):
        assert torch.equal(got, of.to(dtype))
    for some in [(0,), (1,), (0, 1), (0, 2), (1, 2)]:
        wanted = torch.autograd.grad(ours.linear(*args), [args[i] for i in some], dy)
        assert all(torch.equal(got, grads[i]) for got, i in zip(wanted, some, strict=True))
    device = torch.cuda.get_device_properties(0)
    if (device.major, device.multi_processor_count) == (9, 132):  # for which the choice is made
        for kernel, runs in {
            "gemm_odd_lines_kernel": way == "lines",
            "gemm_odd_lines_of_t_kernel": way == "lines",
            "copy_and_sum": way == "copied",
            "copy_rows": outputs == 1200,
        }.items():
            assert any(kernel in name for name in names) == runs


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
def test_lines_of_odd_sizes_are_apart():
    """What is in a line of a matrix changes no result of other lines, also where vectors lie across both."""
    weight, x, bias = (integers(*shape).requires_grad_() for shape in [(5623, 768), (8187, 768), (5623,)])
    dy = integers(8187, 5623)

    def gradients():
        return torch.autograd.grad(ours.linear(x, weight, bias), (x, weight, bias), dy)

    dx, dweight, dbias = gradients()
    dy[1000:1002] = torch.nan
    of_nan, *_ = gradients()
    assert of_nan[1000:1002].isnan().all()
    assert torch.equal(of_nan[:1000], dx[:1000])
    assert torch.equal(of_nan[1002:], dx[1002:])
    dy = integers(8187, 5623)
    for column in (17, 5622):
        dy[:, column] = torch.inf
    _, *of_inf = gradients()
    others = [i for i in range(5623) if i not in (17, 5622)]
    for got, of in zip(of_inf, (dweight, dbias), strict=True):
        assert torch.equal(got[others], of[others])
