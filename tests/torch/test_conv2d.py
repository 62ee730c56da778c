"""conv2d beside torch's: channels_last, the module, gradients, and tensor cores."""

from __future__ import annotations

import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.ops import OPS  # noqa: E402
from aotops.testing.calls import POISON, calls_of, filled, numbers, run_on_cpu, run_on_cuda  # noqa: E402
from aotops.testing.cases import CASES, Case  # noqa: E402
from aotops.testing.trial import Trial  # noqa: E402

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
ON = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def convolved(function, x, weight, bias, dy, *args, **kwargs):
    """y, and the gradients of x, the weight and the bias."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves, *args, **kwargs)
    return y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))


@ON
def test_conv2d_keeps_channels_last(where):
    """Without a copy: the kernel reads the very memory, and so the result and the gradients lie as x does."""
    last = torch.channels_last
    x = torch.randn(2, 6, 5, 7, device=where).to(memory_format=last)
    weight, bias = torch.randn(8, 6, 3, 3, device=where), torch.randn(8, device=where)
    dy = torch.randn(2, 8, 5, 7, device=where)
    for w in (weight, weight.to(memory_format=last)):
        results = convolved(ours.conv2d, x, w, bias, dy, padding=1)
        plain = convolved(ours.conv2d, x.contiguous(), weight, bias, dy, padding=1)
        for t, expected in zip(results[:2], plain[:2], strict=True):
            assert t.is_contiguous(memory_format=last)
            torch.testing.assert_close(t, expected)
    assert results[2].is_contiguous(memory_format=last)
    weights_alone = ours.conv2d(x.contiguous(), weight.to(memory_format=last), bias, padding=1)
    assert weights_alone.is_contiguous(memory_format=last)
    torch.testing.assert_close(weights_alone, results[0])


@ON
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": (1, 2), "bias": False},
        {"groups": 2, "dilation": 2, "padding": 2},
        {"padding": "same"},
        {"padding": "valid"},
        {"padding": 1, "padding_mode": "reflect"},
    ],
    ids=str,
)
def test_conv2d_module(where, options):
    theirs = torch.nn.Conv2d(4, 6, 3, **options).to(where, torch.float64)
    mine = ours.Conv2d(4, 6, 3, **options).to(where, torch.float64)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 9, 8, device=where, dtype=torch.float64)
    y = mine(x)
    close(y, theirs(x))
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, mine.parameters(), dy)
    for a, b in zip(gradients, torch.autograd.grad(theirs(x), theirs.parameters(), dy), strict=True):
        close(a, b)
    close(torch.compile(mine, fullgraph=True, backend="aot_eager")(x), y)
    close(mine(x[0]), theirs(x[0]))


@ON
def test_conv2d_gradients(where):
    for layout, x, w in (("NCHW", (2, 4, 5, 6), (6, 2, 3, 2)), ("NHWC", (2, 5, 6, 4), (6, 3, 2, 2))):
        tensors = [torch.randn(s, device=where, dtype=torch.float64, requires_grad=True) for s in (x, w, (6,))]
        function = functools.partial(ours.conv2d, stride=(2, 1), padding=1, dilation=(1, 2), groups=2, layout=layout)
        assert torch.autograd.gradcheck(function, tensors)


# Cases for the products on tensor cores: the shape of x, outputs, kernel, and the rest.
CONVOLUTIONS = [
    ((8, 64, 28, 28), 64, (3, 3), {"padding": 1}),
    ((8, 256, 28, 28), 64, (1, 1), {}),
    ((4, 128, 14, 15), 200, (3, 3), {"padding": 1}),
    ((32, 512, 7, 7), 512, (3, 3), {"padding": 1}),  # few tiles: slices
    ((4, 64, 28, 27), 128, (3, 3), {"stride": 2, "padding": 1}),
    ((4, 40, 29, 30), 72, (5, 3), {"stride": (1, 2), "padding": (0, 3)}),
    ((4, 128, 28, 27), 128, (1, 1), {"stride": 2}),  # dx has pixels that no product is for
    ((4, 128, 29, 28), 96, (1, 1), {"stride": 3, "padding": (3, 0)}),
    ((8, 64, 28, 28), 128, (1, 1), {"stride": 2, "padding": 1}),  # dx: the first phase meets no kernel element
    ((4, 64, 30, 30), 64, (3, 3), {"dilation": 3, "padding": 2}),
    ((4, 64, 30, 30), 80, (3, 2), {"dilation": 2, "stride": 2, "padding": 9}),
    ((4, 35, 40, 30), 51, (3, 3), {"padding": 4}),  # channels that are no whole vectors
    # images of one pixel, which both layouts have alike: with vectors, without, few channels, groups, padding
    ((96, 240, 1, 1), 10, (1, 1), {}),
    ((96, 64, 1, 1), 960, (1, 1), {}),
    ((33, 6, 1, 1), 144, (1, 1), {"stride": 3, "padding": 1}),
    ((40, 128, 1, 1), 128, (1, 1), {"groups": 4}),
    ((40, 96, 1, 1), 96, (1, 1), {"groups": 96}),
    ((2, 3, 112, 112), 64, (7, 7), {"stride": 2, "padding": 3}),
    ((2, 3, 75, 149), 72, (7, 7), {"stride": 2, "padding": 3}),  # rows of odd sizes
    ((2, 1, 40, 40), 6, (5, 5), {}),
    ((2, 4, 30, 64), 32, (3, 5), {"stride": (2, 1), "padding": (1, 4), "dilation": (2, 3)}),
    ((2, 8, 40, 40), 200, (3, 3), {"padding": 1}),  # two quads of channels
    ((2, 3, 67, 67), 64, (11, 11), {"stride": 4, "padding": 2}),  # two parts of the kernel, tiles of 8 rows
    ((2, 7, 45, 50), 48, (5, 5), {"stride": 2, "padding": 2}),
    ((1, 3, 60, 63), 70, (9, 10), {"stride": (9, 8), "padding": 4}),
    ((2, 5, 50, 47), 64, (3, 3), {"stride": (1, 2), "padding": 1, "dilation": (4, 1)}),
    ((2, 3, 66, 70), 96, (4, 4), {"stride": 4}),
    ((4, 3, 66, 70), 256, (16, 16), {"stride": 16}),  # patches, and pixels of none
    ((4, 3, 56, 60), 136, (14, 14), {"stride": 14}),  # of no whole number of vectors
    ((4, 2, 9, 8), 132, (2, 3), {"stride": (2, 3)}),
    ((4, 64, 30, 30), 64, (3, 3), {"groups": 4, "padding": 1}),
    ((16, 64, 9, 9), 256, (3, 3), {"stride": 2}),  # dx: one stride phase in slices, others not
    ((128, 512, 7, 7), 512, (3, 3), {"padding": 1}),
    ((32, 512, 7, 7), 1024, (1, 1), {}),
    # boxes of whole rows, in 16 bits and NHWC: each tile, images that share one, several tiles a block, parts of tiles
    ((45, 64, 7, 7), 264, (3, 3), {"padding": 1}),
    ((5, 136, 23, 21), 200, (3, 5), {"padding": (1, 2)}),
    ((1, 64, 56, 55), 72, (3, 3), {}),
    ((66, 64, 16, 16), 72, (3, 3), {"padding": 1}),
    ((67, 72, 16, 17), 136, (3, 3), {"padding": 2}),
    ((33, 72, 28, 29), 64, (3, 3), {"padding": (0, 1)}),
    ((4, 64, 58, 57), 128, (3, 1), {"padding": (1, 0)}),
    ((3, 136, 65, 64), 192, (3, 2), {"padding": (2, 1), "dilation": (2, 1)}),
    # dx by phases of two columns, in TF32 and NCHW: each tile, parts of tiles, a phase without kernel elements, phases
    # of as many, three and four, and a stride of columns alone
    ((17, 112, 56, 56), 40, (3, 3), {"stride": 2, "padding": 1}),
    ((5, 72, 29, 32), 72, (3, 3), {"stride": 2, "padding": 2}),
    ((8, 64, 28, 28), 128, (1, 1), {"stride": 2}),
    ((12, 64, 16, 32), 64, (3, 2), {"stride": 2}),
    ((4, 64, 30, 32), 64, (7, 7), {"stride": 2, "padding": 3}),
    ((4, 40, 29, 32), 72, (5, 3), {"stride": (1, 2), "padding": (0, 2)}),
    # dweight of x and dy as they are, in TF32 and NCHW: each stride and number of columns, several tiles
    ((8, 68, 28, 28), 136, (3, 3), {"padding": 1}),
    ((2, 132, 56, 56), 72, (3, 3), {"padding": 1}),
    ((8, 128, 56, 56), 96, (3, 3), {"stride": 2, "padding": 1}),
    ((2, 72, 112, 112), 72, (3, 3), {"stride": 2, "padding": 1}),
    # depthwise: whole planes and parts of them, and several blocks of channels
    ((3, 72, 56, 56), 72, (3, 3), {"padding": 1, "groups": 72}),
    ((70, 130, 14, 14), 130, (5, 5), {"padding": 2, "stride": 2, "groups": 130}),
    ((2, 20, 112, 90), 20, (7, 7), {"padding": 3, "groups": 20}),
    ((2, 20, 41, 37), 20, (3, 3), {"stride": 2, "padding": (2, 5), "dilation": (1, 3), "groups": 20}),
]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, "tf32"], ids=str)
@pytest.mark.parametrize(("shape", "outputs", "kernel", "options"), CONVOLUTIONS, ids=str)
def test_conv2d_on_tensor_cores(shape, outputs, kernel, options, dtype, format):
    """With small integers, of which all sums are exact in float32 and every operand in each dtype: equal to the last
    bit before the result is rounded."""
    kwargs, dtype = in_dtype(options, dtype)
    random = torch.Generator("cuda").manual_seed(0)

    def integers(*size):
        t = torch.randint(-3, 4, size, generator=random, device="cuda", dtype=torch.float64)
        return t.to(memory_format=format) if t.dim() == 4 else t

    x, bias = integers(*shape), integers(outputs)
    weight = integers(outputs, shape[1] // options.get("groups", 1), *kernel)
    dy = integers(*F.conv2d(x, weight, bias, **options).shape)
    expected = convolved(F.conv2d, x, weight, bias, dy, **options)
    results = convolved(ours.conv2d, x.to(dtype), weight.to(dtype), bias.to(dtype), dy.to(dtype), **kwargs)
    for t, exact in zip(results, expected, strict=True):
        assert torch.equal(t, exact.to(dtype))


# Groups of several channels: the shape of x, outputs, kernel, and the rest.
GROUPED = [
    # of RegNet: groups of 8, 16, 24, 48 and 56
    ((2, 24, 56, 56), 24, (3, 3), {"groups": 3, "padding": 1}),
    ((2, 24, 57, 56), 24, (3, 3), {"groups": 3, "stride": 2, "padding": 1}),
    ((3, 56, 28, 28), 56, (3, 3), {"groups": 7, "padding": 1}),
    ((5, 152, 14, 14), 152, (3, 3), {"groups": 19, "padding": 1}),
    ((3, 368, 7, 7), 368, (3, 3), {"groups": 46, "padding": 1}),
    ((2, 64, 28, 27), 64, (3, 3), {"groups": 4, "stride": 2, "padding": 1}),
    ((2, 72, 28, 28), 72, (3, 3), {"groups": 3, "padding": 1}),
    ((1, 72, 56, 56), 72, (3, 3), {"groups": 3, "stride": 2, "padding": 1}),
    ((9, 168, 7, 7), 168, (3, 3), {"groups": 7, "padding": 1}),
    ((9, 168, 14, 14), 168, (3, 3), {"groups": 7, "stride": 2, "padding": 1}),
    ((3, 144, 15, 14), 144, (3, 3), {"groups": 3, "stride": 2, "padding": 1}),
    ((2, 224, 14, 14), 224, (3, 3), {"groups": 4, "padding": 1}),
    # of ResNeXt: 32 groups of 4, 8, 16 and 32
    ((2, 128, 28, 28), 128, (3, 3), {"groups": 32, "padding": 1}),
    ((1, 256, 28, 28), 256, (3, 3), {"groups": 32, "stride": 2, "padding": 1}),
    ((2, 256, 14, 14), 256, (3, 3), {"groups": 32, "padding": 1}),
    ((2, 512, 14, 14), 512, (3, 3), {"groups": 32, "stride": 2, "padding": 1}),
    ((3, 512, 7, 7), 512, (3, 3), {"groups": 32, "padding": 1}),
    ((2, 1024, 7, 7), 1024, (3, 3), {"groups": 32, "padding": 1}),
    # wider ones, two widths, no whole vectors, one group more than tiles have, odd widths
    ((2, 192, 14, 13), 192, (3, 3), {"groups": 2, "padding": 1}),
    ((2, 256, 9, 9), 128, (3, 3), {"groups": 2, "stride": 2, "padding": 1}),
    ((2, 80, 13, 14), 16, (3, 3), {"groups": 2, "padding": 1}),
    ((3, 32, 14, 14), 128, (1, 1), {"groups": 4, "stride": 2}),
    ((2, 18, 23, 21), 30, (3, 3), {"groups": 3, "padding": 1}),
    ((2, 12, 31, 33), 12, (3, 3), {"groups": 6, "stride": 2, "padding": 1}),
    ((2, 132, 15, 15), 132, (3, 3), {"groups": 33, "padding": 1}),
    ((2, 21, 16, 17), 35, (3, 3), {"groups": 7, "padding": 1}),
    # stride 2 by planes: odd numbers of pixels, padding of both parities, wide kernels, chunks of channels
    ((3, 96, 33, 30), 96, (3, 3), {"groups": 4, "stride": 2, "padding": (0, 2)}),
    ((2, 80, 31, 29), 80, (3, 5), {"groups": 2, "stride": 2, "padding": (1, 2)}),
    ((2, 48, 9, 70), 72, (3, 2), {"groups": 3, "stride": 2, "padding": (2, 0)}),
    ((1, 24, 40, 41), 24, (3, 3), {"groups": 3, "stride": 2, "padding": (1, 2), "dilation": (1, 2)}),
    # multiples of 64, which are the implicit GEMM's on compute capability 9.0: of 64, 128 and 192, and two widths. With
    # a stride of 3 dx is not.
    ((8, 256, 14, 14), 256, (3, 3), {"groups": 4, "padding": 1}),
    ((8, 256, 15, 14), 256, (3, 3), {"groups": 4, "stride": 2, "padding": 1}),
    ((9, 512, 14, 13), 512, (3, 3), {"groups": 4, "padding": 1}),
    ((9, 256, 15, 16), 256, (3, 3), {"groups": 2, "stride": 2, "padding": 1}),
    ((7, 384, 9, 10), 384, (1, 1), {"groups": 2}),
    ((9, 256, 14, 14), 256, (1, 1), {"groups": 2, "stride": 2}),
    ((5, 128, 17, 16), 256, (5, 5), {"groups": 2, "padding": 2}),
    ((8, 512, 14, 13), 256, (3, 3), {"groups": 4, "padding": (1, 0)}),
    ((9, 128, 17, 16), 256, (5, 5), {"groups": 2, "stride": 2, "padding": 2}),
    ((4, 128, 22, 21), 128, (3, 3), {"groups": 2, "dilation": 2, "padding": 2}),
    ((5, 128, 22, 21), 128, (3, 2), {"groups": 2, "stride": (1, 2), "dilation": (2, 1), "padding": (2, 0)}),
    ((4, 128, 40, 41), 128, (3, 3), {"groups": 2, "stride": 3, "padding": (0, 4)}),
    ((1, 128, 29, 30), 128, (3, 3), {"groups": 2, "padding": 1}),
    # narrow ones, several of which share a box there: of 32, 16 and 8, and images for HWCN
    ((8, 128, 14, 14), 128, (3, 3), {"groups": 4, "padding": 1}),
    ((33, 64, 9, 11), 64, (3, 3), {"groups": 2, "padding": 1}),
    ((40, 192, 7, 7), 192, (3, 3), {"groups": 6, "padding": 1}),
    ((24, 128, 15, 14), 128, (3, 3), {"groups": 4, "stride": 2, "padding": 1}),
    ((9, 128, 15, 14), 128, (3, 3), {"groups": 8, "padding": 1}),
    ((9, 128, 22, 24), 128, (3, 3), {"groups": 8, "stride": 2, "padding": 1}),
    ((2, 64, 41, 42), 64, (3, 3), {"groups": 4, "padding": 1}),
    ((9, 64, 23, 24), 64, (5, 3), {"groups": 4, "stride": (1, 2), "padding": (2, 0)}),
    ((9, 128, 20, 24), 128, (3, 2), {"groups": 16, "stride": (2, 1), "padding": (0, 1)}),
    ((34, 64, 13, 14), 64, (1, 1), {"groups": 2, "stride": 2}),
    ((34, 128, 13, 14), 128, (1, 1), {"groups": 8}),
    ((9, 64, 20, 19), 64, (3, 3), {"groups": 2, "dilation": 2, "padding": 2}),
    ((17, 256, 12, 13), 256, (3, 3), {"groups": 8, "stride": 3, "padding": 2}),
    # one, of fewer channels than a box there; with a stride dx alone, or neither
    ((3, 24, 19, 37), 24, (3, 3), {"groups": 1, "padding": 1}),
    ((1, 28, 9, 40), 160, (3, 3), {"groups": 1, "padding": 1}),
    ((2, 12, 15, 14), 30, (3, 2), {"groups": 1, "padding": (1, 0)}),
    ((2, 10, 13, 12), 8, (3, 3), {"groups": 1, "dilation": 2, "padding": 2}),
    ((2, 16, 18, 21), 72, (3, 3), {"groups": 1, "stride": 2, "padding": 1}),
    ((2, 20, 17, 16), 20, (5, 5), {"groups": 1, "stride": 2, "padding": 2}),
    # other kernels, strides, paddings and dilations
    ((2, 64, 17, 33), 64, (5, 5), {"groups": 8, "padding": 2}),
    ((2, 48, 19, 17), 48, (7, 1), {"groups": 2, "stride": (1, 2), "padding": (3, 0)}),
    ((2, 48, 20, 23), 48, (3, 3), {"groups": 3, "stride": 3, "padding": (0, 4)}),
    ((2, 64, 22, 21), 96, (3, 2), {"groups": 4, "dilation": (2, 3), "padding": 2}),
    ((2, 64, 22, 21), 64, (3, 3), {"groups": 8, "stride": 2, "dilation": 2, "padding": 2}),
    ((70, 32, 1, 1), 32, (3, 3), {"groups": 4, "padding": 1}),
    ((1, 16, 3, 301), 16, (3, 3), {"groups": 2, "padding": 1}),
]
IN_EACH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "tf32", torch.float32], ids=str)
IN_EITHER = pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])


def of_integers(shape, outputs, kernel, options):
    """x, weight, bias and dy of small ones, of which all sums are exact in float32."""
    random, sizes = torch.Generator().manual_seed(0), (shape, (outputs, shape[1] // options["groups"], *kernel))
    y = F.conv2d(*(torch.empty(size, device="meta") for size in sizes), **options)
    return [torch.randint(-3, 4, size, generator=random).double() for size in (*sizes, (outputs,), y.shape)]


def in_dtype(options, dtype):
    """The options and the dtype of a call, which "tf32" is, too."""
    return dict(options, allow_tf32=dtype == "tf32"), torch.float32 if dtype == "tf32" else dtype


def on_gpu(tensors, dtype, format):
    tensors = [t.to("cuda", dtype) for t in tensors]
    return [t.contiguous(memory_format=format) if t.dim() == 4 else t for t in tensors]


@pytest.fixture(scope="module", params=GROUPED, ids=str)
def grouped(request):
    """The tensors and options of a call, and its results in float64 on the CPU."""
    tensors, options = of_integers(*request.param), request.param[-1]
    return tensors, options, convolved(F.conv2d, *tensors, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@IN_EITHER
@IN_EACH
def test_groups_are_exact(grouped, dtype, format):
    """To the last bit before the result is rounded, with small integers. The same bits twice, with any numbers."""
    tensors, options, expected = grouped
    options, dtype = in_dtype(options, dtype)
    tensors = on_gpu(tensors, dtype, format)
    for got, exact in zip(convolved(ours.conv2d, *tensors, **options), expected, strict=True):
        assert torch.equal(got.cpu(), exact.to(dtype))
    others = [torch.randn_like(t) for t in tensors]
    assert all(map(torch.equal, *(convolved(ours.conv2d, *others, **options) for _ in range(2))))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@IN_EITHER
@IN_EACH
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("channels", "outputs", "groups", "images"),
    [
        *((2, 2, 9, 2), (3, 5, 5, 2), (4, 4, 33, 2), (6, 10, 4, 2), (8, 8, 7, 2), (16, 16, 5, 2), (24, 24, 3, 2)),
        *((16, 16, 8, 24), (32, 32, 4, 24), (32, 8, 3, 2), (64, 64, 2, 2), (64, 64, 5, 8), (128, 64, 5, 8)),
        (64, 128, 3, 8),
    ],
)
def test_what_is_in_a_group_stays_there(channels, outputs, groups, images, stride, dtype, format):
    """NaN or infinities as all of a group's x, weight or dy: no bit of other groups' results differs, and the group has
    no finite result that they are terms of."""
    options = {"groups": groups, "stride": stride, "padding": 1}
    tensors = of_integers((images, channels * groups, 10, 12), outputs * groups, (3, 3), options)
    options, dtype = in_dtype(options, dtype)
    x, weight, bias, dy = on_gpu(tensors, dtype, format)

    def by_group(t, axis):
        return t.unflatten(axis, (groups, -1)).movedim(axis, 0)

    def results():
        found = convolved(ours.conv2d, x, weight, bias, dy, **options)
        return [by_group(t, axis) for t, axis in zip(found, (1, 1, 0, 0), strict=True)]

    expected = results()
    for part, of_part in (
        (by_group(x, 1), (True, False, True, False)),
        (by_group(weight, 0), (True, True, False, False)),
        (by_group(dy, 1), (False, True, True, True)),
    ):
        for group, value in itertools.product({0, groups // 2, groups - 1}, (math.nan, math.inf)):
            kept = part[group].clone()
            part[group] = value
            for got, exact, has_it in zip(results(), expected, of_part, strict=True):
                others = [i for i in range(groups) if i != group or not has_it]
                assert torch.equal(got[others], exact[others])
                assert not (has_it and got[group].isfinite().any())
            part[group] = kept


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@IN_EITHER
@IN_EACH
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (2, 0)])
@pytest.mark.parametrize(
    ("width", "groups", "images"),
    [
        *((2, 3, 2), (4, 3, 2), (6, 3, 2), (8, 3, 2), (16, 3, 2), (24, 3, 2), (48, 3, 2)),
        *((16, 4, 17), (32, 4, 17), (64, 3, 5), (128, 3, 5)),
    ],
)
def test_infinities_in_groups_reach_what_meets_them(width, groups, images, stride, padding, dtype, format):
    """And no more: neither pixels beside their windows, nor anything from an x that no window has. Windows of the
    infinities in dy are whole, since zeros beside the image would be their factors in dweight."""
    options = {"groups": groups, "stride": stride, "padding": padding}
    x, weight, bias, dy = of_integers((images, groups * width, 18, 20), groups * width, (3, 3), options)
    weight, dy = weight.abs() + 1, dy.abs() + 1
    x[0, 0, 5, 7] = x[1, -1, 17, 19] = x[1, width, 8, 0] = math.inf
    dy[1, 1, 3, 2] = dy[0, -1, 5, 6] = math.inf
    expected = convolved(F.conv2d, x, weight, bias, dy, **options)
    options, dtype = in_dtype(options, dtype)
    results = convolved(ours.conv2d, *on_gpu((x, weight, bias, dy), dtype, format), **options)
    for got, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(got.cpu(), exact.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("width", "groups"), [(4, 9), (6, 3), (8, 5), (16, 16), (24, 2), (32, 8), (48, 2), (64, 4)])
def test_groups_in_one_buffer(width, groups, stride, dtype, layout):
    """All tensors of a call are in one, among bytes that are NaN. These stay, and no result is of them. A tensor alone,
    or each, begins at a multiple of 16 bytes, of 8 or of an element; the workspace, which is the library's own, of
    256."""
    x, weight = (2, 13, 11, width * groups), (width * groups, 3, 3, width)
    if layout == "NCHW":
        x, weight = ((n, channels, *size) for n, *size, channels in (x, weight))
    attrs = {"stride": stride, "padding": 1, "groups": groups, "layout": layout}
    case = Case({"x": x, "weight": weight, "bias": weight[:1]}, attrs, grid=1.0)
    trial = Trial(CASES["conv2d"], case, dtype, "groups")
    trial.output_gradients = tuple(map(np.round, trial.output_gradients))
    least = 4 if dtype == "float32" else 2
    for here, one in zip(*(calls_of(OPS["conv2d"], trial, device) for device in ("cpu", "cuda")), strict=True):
        expected = run_on_cpu(here, POISON)
        slots = [slot for slot in one.given if slot not in one.op.workspace]
        for shifted, shift in [((), 0), *itertools.product((*((slot,) for slot in slots), slots), (least, 8))]:
            found = in_one_buffer(one, dict.fromkeys(shifted, shift))
            for slot in slots:
                spec = one.given[slot]
                np.testing.assert_array_equal(numbers(found[slot], spec), numbers(expected[slot], spec), slot)


def in_one_buffer(one, shifts):
    """The bytes of each slot after the call, of a new thread, which has no context of the driver before. A shift is how
    far behind a multiple of 256 bytes the slot begins."""
    buffer, places = bytearray([POISON] * 4096), {}
    for slot, data in filled(one, run_on_cuda, POISON).items():
        begin = len(buffer) + shifts.get(slot, 0)
        places[slot] = slice(begin, begin + len(data))
        buffer += bytes([POISON]) * (-(-(len(data) + 4096) // 256) * 256)
        buffer[places[slot]] = data
    memory = torch.frombuffer(buffer, dtype=torch.uint8).cuda()
    addresses = {slot: memory.data_ptr() + place.start for slot, place in places.items()}
    with ThreadPoolExecutor(1) as thread:
        on = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
        thread.submit(one.run, "cuda", addresses, *on).result()
    after = memory.cpu().numpy()
    found = {slot: after[place].tobytes() for slot, place in places.items()}
    for place in places.values():
        after[place] = POISON
    assert (after == POISON).all(), "a byte beside the tensors is not what it was"
    return found


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [np.array([1, 1]), np.array([1.0, 1.0])], ids=str)
def test_an_array_is_no_pair(name, value):
    with pytest.raises(TypeError, match=f"conv2d: {name} is .*, expected integers"):
        ours.conv2d(torch.zeros(1, 2, 5, 5), torch.zeros(2, 2, 3, 3), **{name: value})


ON_A_CPU = [
    ((2, 32, 9, 9), 40, 3, {"padding": 1}),
    ((3, 20, 13, 13), 70, 3, {"padding": 1, "stride": 2}),
    ((2, 64, 12, 12), 96, 5, {"padding": 2, "groups": 2}),
    ((2, 24, 11, 11), 33, 3, {"padding": 2, "stride": 3, "dilation": 2}),
    ((1, 16, 7, 7), 50, 1, {"stride": 2}),
    ((2, 18, 10, 10), 34, 2, {"stride": 3}),  # columns of x that no window has
    ((1, 17, 8, 8), 40, 3, {"padding": 1}),
    ((1, 600, 7, 7), 40, 3, {"padding": 1}),
    ((2, 64, 23, 40), 64, 3, {"padding": 1, "stride": 2}),  # dweight in several bands of lines
    ((1, 32, 5, 600), 32, 3, {"padding": 1}),
    ((1, 32, 3, 3), 64, 7, {"padding": 3}),
    ((2, 48, 6, 6), 16, 3, {"padding": 5}),
    ((1, 32, 30, 30), 32, 3, {"padding": 1, "stride": 4}),
    ((2, 160, 8, 8), 160, 3, {"padding": 1, "groups": 5}),
]


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize(("shape", "outputs", "kernel", "options"), ON_A_CPU, ids=str)
def test_conv2d_in_bfloat16_on_a_cpu(shape, outputs, kernel, options, format):
    """With small integers, as on a GPU: in pairs or tile registers where the processor has them. An infinity reaches
    what meets it, and no more."""
    random = torch.Generator().manual_seed(0)

    def integers(*size):
        t = torch.randint(-3, 4, size, generator=random).double()
        return t.to(memory_format=format) if t.dim() == 4 else t

    x, bias = integers(*shape), integers(outputs)
    weight = integers(outputs, shape[1] // options.get("groups", 1), kernel, kernel).abs() + 1
    dy = integers(*F.conv2d(x, weight, bias, **options).shape).abs() + 1

    def check():
        exact = convolved(F.conv2d, x, weight, bias, dy, **options)
        results = convolved(ours.conv2d, *(t.bfloat16() for t in (x, weight, bias, dy)), **options)
        for t, expected in zip(results, exact, strict=True):
            torch.testing.assert_close(t, expected.bfloat16(), rtol=0, atol=0, equal_nan=True)

    check()
    x[0, 3, shape[2] // 2, -1] = x[-1, 5, 0, 0] = float("inf")
    dy[-1, 1, 0, -1] = float("inf")
    check()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("wide", range(3))
@pytest.mark.parametrize(("shape", "outputs", "kernel", "options"), CONVOLUTIONS, ids=str)
def test_conv2d_in_float32_has_all_bits(shape, outputs, kernel, options, wide, format):
    """With one operand's integers of 12 bits and a sign, which TF32 has not: products of three of TF32 are exact."""
    random = torch.Generator("cuda").manual_seed(0)

    def integers(*size, most=2):
        t = torch.randint(-most, most + 1, size, generator=random, device="cuda", dtype=torch.float64)
        return t.to(memory_format=format) if t.dim() == 4 else t

    sizes = [4095 if wide == i else 2 for i in range(3)]
    x, bias = integers(*shape, most=sizes[0]), integers(outputs)
    weight = integers(outputs, shape[1] // options.get("groups", 1), *kernel, most=sizes[1])
    dy = integers(*F.conv2d(x, weight, bias, **options).shape, most=sizes[2])
    expected = convolved(F.conv2d, x, weight, bias, dy, **options)
    results = convolved(ours.conv2d, x.float(), weight.float(), bias.float(), dy.float(), **options)
    for t, exact in zip(results, expected, strict=True):
        assert exact.abs().max() < 2**24
        assert torch.equal(t, exact.float())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("offset", [1, 8])
def test_views_in_bfloat16_beside_others(offset):
    """x, weight and dy are views from an element on that is aligned to 2 or 16 bytes, among infinities, of which no
    result has one."""
    sizes = (3, 72, 15, 13), (136, 72, 3, 3), (136,), (3, 136, 15, 13)
    views = []
    for size in sizes:
        flat = torch.full((math.prod(size) + 1024,), math.inf, device="cuda", dtype=torch.bfloat16)
        part = flat[512 + offset :][: math.prod(size)].copy_(torch.randint(-3, 4, (math.prod(size),)))
        views.append(part.view(size[0], *size[2:], size[1]).permute(0, 3, 1, 2) if len(size) == 4 else part)
    exact = convolved(F.conv2d, *(t.double() for t in views), padding=1)
    for t, expected in zip(convolved(ours.conv2d, *views, padding=1), exact, strict=True):
        assert torch.equal(t, expected.bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("stride", [1, 2])
def test_views_in_tf32_that_are_not_aligned(stride):
    """dweight reads x and dy in NCHW by TMA where these begin at multiples of 16 bytes."""
    sizes = (8, 68, 28 * stride, 28 * stride), (72, 68, 3, 3), (72,), (8, 72, 28, 28)
    flat = torch.randint(-3, 4, (1 + sum(map(math.prod, sizes)),), device="cuda").float()
    parts = flat[1:].split([math.prod(size) for size in sizes])
    views = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
    options = {"stride": stride, "padding": 1}
    exact = convolved(F.conv2d, *(t.double() for t in views), **options)
    for t, expected in zip(convolved(ours.conv2d, *views, **options, allow_tf32=True), exact, strict=True):
        assert torch.equal(t, expected.float())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("channels", "stride", "kernel"), [(3, 2, 7), (3, 1, 3), (1, 2, 5), (7, 2, 5), (3, 4, 11)])
def test_infinite_dy_stays_in_its_window(channels, stride, kernel, dtype, format):
    """dx of few channels has pixels as columns of one product, where those that do not meet an element have zeros."""
    x = torch.zeros(1, channels, 40, 43, device="cuda", dtype=dtype).to(memory_format=format)
    weight = torch.ones(8, channels, kernel, kernel, device="cuda", dtype=dtype)
    y = ours.conv2d(x.requires_grad_(), weight, None, stride=stride, padding=2)
    dy = torch.ones_like(y)
    dy[0, 1, 2, 3] = float("inf")
    (dx,) = torch.autograd.grad(y, x, dy)
    top, left = 2 * stride - 2, 3 * stride - 2
    window = torch.zeros(40, 43, device="cuda", dtype=torch.bool)
    window[max(top, 0) : top + kernel, max(left, 0) : left + kernel] = True
    assert torch.equal(dx[0].isinf(), window.expand(channels, -1, -1))
    assert not dx.isnan().any()


@ON
def test_parameters_of_a_flat_buffer(where):
    """Whose addresses are no multiples of 16 bytes, as images and weights of 1 x 1 are read in vectors."""
    sizes = ((12, 64, 20, 22), (64, 64, 1, 1), (64,))
    flat = torch.randn(1 + sum(map(math.prod, sizes)), device=where)
    parts = flat[1:].split([math.prod(size) for size in sizes])
    x, weight, bias = (part.view(size) for part, size in zip(parts, sizes, strict=True))
    dy = torch.randn_like(F.conv2d(x, weight, bias, stride=2))
    exact = convolved(F.conv2d, *(t.double().cpu() for t in (x, weight, bias, dy)), stride=2)
    for a, b in zip(convolved(ours.conv2d, x, weight, bias, dy, stride=2), exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize(
    ("channels", "kernel", "stride"), [(3, 7, 2), (4, 3, 1), (24, 3, 1), (24, 3, 2), (64, 3, 1), (64, 3, 2)]
)
def test_infinities_in_float32(channels, kernel, stride, format):
    """An infinity has no second part, nor some NaN a first one of TF32: what they meet is as in float32, and all else
    as without them. Such a NaN is lost in a sum with an infinity, so each has calls of its own."""
    random = torch.Generator("cuda").manual_seed(0)
    batch, outputs = (12, 64) if channels == 64 else (2, 20)  # in three parts of bfloat16 on Hopper
    sizes = ((batch, channels, 19, 22), (outputs, channels, kernel, kernel), (outputs,))
    x, weight, bias = (torch.randn(*size, generator=random, device="cuda") for size in sizes)
    options = {"stride": stride, "padding": kernel // 2}
    dy = torch.randn_like(F.conv2d(x, weight, bias, **options))
    of_a_gpu = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # the NaN of a GPU's arithmetic
    infinities = {(1, 2, 1, 2): float("inf"), (0, 1, 2, 0): float("-inf")}
    for t, special in itertools.product((x, weight, dy), (infinities, {(0, 2, 0, 1): of_a_gpu})):
        kept = t.clone()
        for place, value in special.items():
            t[place] = value
        exact = convolved(F.conv2d, *(t.double().cpu() for t in (x, weight, bias, dy)), **options)
        given = (t.contiguous(memory_format=format) if t.dim() == 4 else t for t in (x, weight, bias, dy))
        results = list(zip(convolved(ours.conv2d, *given, **options), exact, strict=True))
        if t is weight:  # zeros beside dy are its factors in dx
            results[1] = tuple(dx[..., 3:-3, 3:-3] for dx in results[1])
        for a, b in results:
            torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-4, equal_nan=True)
        t.copy_(kept)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 0)])
def test_infinite_x_stays_in_its_sums(stride, padding):
    """A thread of a depthwise dweight has more pixels than those that elements of dy meet."""
    x = torch.randint(-3, 4, (2, 64, 14, 14), device="cuda").double().to(memory_format=torch.channels_last)
    x[:, :32, 13, 13] = x[0, 33, 0, 0] = x[0, 3, 3, 3] = float("inf")
    weight = torch.ones(64, 1, 3, 3, device="cuda", dtype=torch.float64)
    options = {"stride": stride, "padding": padding, "groups": 64}
    dy = torch.randint(-3, 4, F.conv2d(x, weight, **options).shape, device="cuda").double()
    bias = torch.zeros(64, device="cuda", dtype=torch.float64)
    *_, exact, _ = convolved(F.conv2d, x, weight, bias, dy, **options)
    *_, dweight, _ = convolved(ours.conv2d, x.bfloat16(), weight.bfloat16(), bias.bfloat16(), dy.bfloat16(), **options)
    torch.testing.assert_close(dweight, exact.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
def test_first_thing_in_a_thread():
    """conv2d encodes tensor maps, for which the driver wants a context. Where memory is at hand, nothing before has
    given the thread one."""
    x = torch.randn(8, 16, 16, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(128, 3, 3, 128, device="cuda", dtype=torch.bfloat16)

    def run():
        return ours.conv2d(x, weight, padding=1, layout="NHWC")

    expected = run()
    run()
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(run).result(), expected)
