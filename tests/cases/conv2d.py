"""conv2d: all that is tried on it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aotops.bench.work import Convolution, conv2d_arguments
from aotops.testing import F32, Bad, Case, Row, X


def conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, layout="NCHW", allow_tf32=False):
    if layout == "NHWC":
        x, weight = np.moveaxis(x, -1, -3), np.moveaxis(weight, -1, 1)
    (stride_h, stride_w), (padding_h, padding_w), (dilation_h, dilation_w) = (
        np.broadcast_to(pair, 2) for pair in (stride, padding, dilation)
    )
    *batch, _, height, width = x.shape
    outputs, channels, kernel_h, kernel_w = weight.shape
    out_h = (height + 2 * padding_h - dilation_h * (kernel_h - 1) - 1) // stride_h + 1
    out_w = (width + 2 * padding_w - dilation_w * (kernel_w - 1) - 1) // stride_w + 1
    x = np.pad(x, [(0, 0)] * (len(batch) + 1) + [(padding_h, padding_h), (padding_w, padding_w)])
    y = np.zeros((*batch, groups, outputs // groups, out_h, out_w), np.result_type(x, weight))
    for r in range(kernel_h):
        for s in range(kernel_w):
            h, w = r * dilation_h, s * dilation_w
            met = x[..., h : h + (out_h - 1) * stride_h + 1 : stride_h, w : w + (out_w - 1) * stride_w + 1 : stride_w]
            met = met.reshape(*batch, groups, channels, out_h, out_w)
            y += np.einsum("...gchw,goc->...gohw", met, weight[:, :, r, s].reshape(groups, outputs // groups, channels))
    y = y.reshape(*batch, outputs, out_h, out_w) + (0 if bias is None else bias[:, None, None])
    return np.moveaxis(y, -3, -1) if layout == "NHWC" else y


def _conv2d(x, weight, bias=True, **attrs) -> Iterator[Case]:
    """Shapes of NCHW, and the same of NHWC."""
    bias = weight[:1] if bias else None
    yield Case({"x": x, "weight": weight, "bias": bias}, attrs)
    x, weight = (*x[:-3], *x[-2:], x[-3]), (weight[0], *weight[2:], weight[1])
    yield Case({"x": x, "weight": weight, "bias": bias}, attrs | {"layout": "NHWC"})


def _draw(draw):
    def pair(low, high):
        one, two = draw.integer(low, high), draw.integer(low, high)
        return (one, two) if draw.flag() else one

    groups, channels = draw.integer(1, 2), draw.integer(1, 3)
    kernel = draw.integer(1, 3), draw.integer(1, 3)
    image = tuple(2 * k + draw.integer(0, 3) for k in kernel)
    outputs = groups * draw.integer(1, 2)
    nchw, nhwc = _conv2d(
        (*draw.shape(1), groups * channels, *image),
        (outputs, channels, *kernel),
        draw.flag(),
        stride=pair(1, 3),
        padding=pair(0, 2),
        dilation=pair(1, 2),
        groups=groups,
    )
    return nchw if draw.flag() else nhwc


def _in_torch(torch, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, layout="NCHW", allow_tf32=False):
    conv2d, options = torch.nn.functional.conv2d, (stride, padding, dilation, groups)
    if layout == "NCHW":
        return conv2d(x, weight, bias, *options)
    x, weight = x.movedim(-1, -3).contiguous(), weight.movedim(-1, 1).contiguous()
    return conv2d(x, weight, bias, *options).movedim(-3, -1)


def _bench(layout, tf32=False):
    def call(f, shape):
        arguments = conv2d_arguments(shape)
        return lambda x, w: f.conv2d(x, w, None, *arguments, layout=layout, allow_tf32=tf32)

    return call


ROW = Row(
    conv2d,
    cases=(
        *_conv2d((2, 3, 3, 3), (2, 3, 3, 3), padding=1),
        *_conv2d((2, 3, 6, 5), (4, 3, 3, 2), bias=False),
        *_conv2d((1, 1, 1, 1), (1, 1, 1, 1)),
        *_conv2d((6, 6, 5), (4, 3, 3, 3), groups=2, padding=1),  # one image, without an axis for it
        *_conv2d((2, 2, 4, 5, 6), (3, 4, 2, 3), bias=False),
        *_conv2d((0, 3, 5, 5), (2, 3, 3, 3)),
        *_conv2d((2, 0, 4, 4), (2, 0, 3, 3)),
        *_conv2d((1, 2, 3, 3), (0, 2, 3, 3)),
        *_conv2d((0, 16, 5, 5), (2, 16, 3, 3)),
        *_conv2d((1, 16, 3, 3), (0, 16, 3, 3)),
        *_conv2d((1, 2, 0, 3), (2, 2, 1, 3), padding=1),
        *_conv2d((1, 16, 0, 8), (16, 8, 1, 1), padding=(1, 0), groups=2),
        *_conv2d((2, 5, 4, 7), (3, 5, 1, 1)),
        *_conv2d((2, 3, 9, 8), (4, 3, 3, 3), stride=2, padding=1),
        *_conv2d((2, 3, 9, 8), (4, 3, 3, 2), stride=(2, 3), padding=(2, 1), dilation=(1, 2)),
        *_conv2d((1, 2, 12, 11), (3, 2, 3, 3), stride=2, dilation=3, padding=(3, 4)),
        *_conv2d((1, 2, 3, 4), (3, 2, 2, 2), padding=5, stride=4),  # whole windows of padding
        *_conv2d((2, 6, 5, 5), (6, 1, 3, 3), padding=1, groups=6),
        *_conv2d((1, 19, 3, 11), (19, 1, 3, 3), stride=(2, 1), padding=1, groups=19),
        *_conv2d((2, 4, 7, 6), (8, 2, 3, 3), stride=2, groups=2),
        # groups of several channels: widths of whole vectors and of none, groups that share a tile or have several
        *_conv2d((1, 8, 17, 33), (8, 4, 3, 3), padding=1, groups=2),
        *_conv2d((2, 132, 5, 5), (132, 4, 3, 3), stride=2, padding=1, groups=33),
        *_conv2d((3, 24, 7, 7), (24, 8, 3, 3), bias=False, padding=(0, 1), groups=3),
        *_conv2d((1, 40, 9, 8), (40, 8, 3, 3), stride=2, padding=2, dilation=2, groups=5),
        *_conv2d((1, 32, 5, 4), (64, 16, 5, 5), stride=(1, 2), padding=2, groups=2),
        *_conv2d((1, 72, 9, 8), (72, 24, 3, 3), bias=False, stride=2, padding=1, groups=3),
        *_conv2d((1, 96, 5, 4), (96, 48, 2, 2), dilation=2, groups=2),
        *_conv2d((2, 128, 1, 1), (128, 64, 3, 3), padding=1, groups=2),
        *_conv2d((1, 192, 5, 4), (192, 96, 3, 1), bias=False, stride=(1, 2), padding=(1, 0), dilation=2, groups=2),
        *_conv2d((2, 256, 3, 3), (128, 128, 1, 1), groups=2),
        *_conv2d((1, 80, 7, 6), (16, 40, 3, 3), stride=3, padding=(0, 2), groups=2),
        *_conv2d((2, 32, 9, 6), (64, 8, 1, 1), stride=2, groups=4),
        *_conv2d((1, 12, 7, 7), (20, 6, 3, 3), padding=4, groups=2),
        *_conv2d((1, 6, 13, 9), (6, 2, 3, 3), padding=1, groups=3),
        *_conv2d((1, 36, 9, 17), (60, 12, 3, 3), padding=1, groups=3),
        *_conv2d((1, 40, 11, 20), (80, 8, 3, 5), stride=(1, 2), padding=(0, 2), groups=5),
        *_conv2d((1, 16, 6, 33), (48, 4, 3, 1), bias=False, padding=(2, 0), groups=4),
        *_conv2d((1, 96, 5, 6), (80, 48, 3, 3), padding=1, groups=2),
        *_conv2d((3, 9, 8, 7), (15, 3, 2, 2), bias=False, stride=(1, 2), padding=1, groups=3),
        # depthwise: kernels and strides of their own, a strided dx with dilation, and a plane in parts
        *_conv2d((3, 4, 9, 8), (4, 1, 5, 5), stride=2, padding=2, groups=4),
        *_conv2d((1, 6, 9, 11), (6, 1, 7, 7), padding=(3, 4), dilation=(1, 2), groups=6),
        *_conv2d((2, 4, 9, 10), (4, 1, 3, 3), stride=2, padding=3, dilation=3, groups=4),
        *_conv2d((1, 2, 70, 90), (2, 1, 3, 3), bias=False, padding=1, groups=2),
        # channels in whole vectors
        *_conv2d((2, 16, 8, 8), (24, 16, 3, 3), padding=1),
        *_conv2d((2, 32, 9, 7), (16, 32, 3, 3), stride=2, padding=1, bias=False),
        *_conv2d((3, 24, 5, 5), (40, 24, 1, 1)),
        *_conv2d((2, 16, 9, 9), (8, 16, 3, 3), dilation=2, padding=2),
        *_conv2d((2, 16, 9, 9), (8, 16, 2, 3), dilation=(2, 1), stride=(1, 2)),
        *_conv2d((2, 64, 3, 3), (72, 64, 3, 3), padding=1),
        *_conv2d((2, 3, 96, 64), (8, 3, 3, 3), stride=2, padding=1),
        *_conv2d((2, 8, 24, 20), (16, 8, 3, 3), padding=1),
        # few channels: several tiles of pixels, of output channels and of the kernel
        *_conv2d((1, 3, 41, 38), (72, 3, 7, 7), stride=2, padding=3),
        *_conv2d((1, 5, 20, 33), (4, 5, 5, 4), stride=(1, 2), padding=(2, 0), dilation=(1, 3), bias=False),
        # dx of few channels: 4 and 8 tiles of columns, a shifted origin, several groups of tiles, no window that fits
        *_conv2d((1, 7, 13, 12), (5, 7, 4, 5), stride=2, padding=2),
        *_conv2d((1, 3, 23, 22), (36, 3, 11, 11), stride=4, padding=2),
        *_conv2d((1, 3, 29, 27), (4, 3, 9, 10), stride=(9, 8), padding=4),
        *_conv2d((1, 1, 18, 17), (2, 1, 16, 16)),
        # patches: of a whole number of vectors or not, and pixels beyond the last patch
        *_conv2d((2, 3, 12, 9), (130, 3, 4, 4), stride=4),
        *_conv2d((1, 3, 30, 29), (132, 3, 14, 14), stride=14, bias=False),
        *_conv2d((2, 2, 7, 6), (3, 2, 2, 3), stride=(2, 3)),
    ),
    under_load=(  # large enough for wgmma
        *_conv2d((4, 32, 24, 24), (32, 32, 3, 3), padding=1, allow_tf32=True),
        *_conv2d((8, 32, 32, 32), (32, 32, 3, 3), stride=2, padding=1),
        *_conv2d((18, 32, 33, 32), (36, 32, 3, 2), stride=2, padding=1, allow_tf32=True),  # dweight of HWCN
        *_conv2d((33, 36, 10, 21), (32, 36, 1, 3), padding=(0, 4), dilation=(1, 2), allow_tf32=True),
        # dx of NCHW by phases of two columns, one of which may have no kernel element
        *_conv2d((8, 64, 28, 28), (72, 64, 3, 3), stride=2, padding=1, bias=False, allow_tf32=True),
        *_conv2d((12, 32, 30, 32), (40, 32, 5, 5), stride=(1, 2), padding=(2, 3), bias=False, allow_tf32=True),
        *_conv2d((8, 72, 32, 32), (32, 72, 1, 1), stride=2, bias=False, allow_tf32=True),
        # dweight of NCHW as it is
        *_conv2d((8, 68, 28, 28), (72, 68, 3, 3), padding=1, bias=False, allow_tf32=True),
        *_conv2d((8, 68, 56, 56), (72, 68, 3, 3), stride=2, padding=1, bias=False, allow_tf32=True),
        *_conv2d((2, 68, 56, 56), (132, 68, 3, 3), padding=1, bias=False, allow_tf32=True),
        *_conv2d((4, 64, 16, 16), (64, 64, 3, 3), padding=1),  # float32 in three parts of bfloat16
        # groups: several tiles of pixels
        *_conv2d((8, 128, 14, 14), (128, 4, 3, 3), padding=1, groups=32),
        *_conv2d((4, 64, 28, 28), (64, 8, 3, 3), stride=2, padding=1, groups=8),
        *_conv2d((4, 72, 28, 28), (72, 24, 3, 3), padding=1, groups=3),
        *_conv2d((4, 72, 29, 28), (72, 24, 3, 3), stride=2, padding=1, groups=3),
        *_conv2d((4, 128, 14, 14), (128, 64, 3, 3), padding=1, groups=2),
        *_conv2d((24, 64, 8, 9), (64, 32, 3, 3), padding=1, groups=2, allow_tf32=True),
    ),
    draw=_draw,
    bad=(
        Bad(
            {"x": ((2, 3, 5, 5), F32), "weight": ((4, 2, 3, 3), F32)},
            {},
            ValueError,
            "weight has shape (4, 2, 3, 3)",
            "x (2, 3, 5, 5)",
            "groups 1",
        ),
        Bad(
            {"x": ((2, 3, 5, 5), F32), "weight": ((4, 3, 7, 3), F32)},
            {"padding": (0, 1)},
            ValueError,
            "weight has shape (4, 3, 7, 3)",
            "x (2, 3, 5, 5)",
            "padding (0, 1)",
        ),
        Bad({"x": X, "weight": ((4, 3, 3, 3), F32)}, {}, ValueError, "x has shape (2, 3)", "(..., C, H, W)"),
        Bad(
            {"x": ((1, 4, 5, 5), F32), "weight": ((4, 2, 3, 3), F32), "bias": ((3,), F32)},
            {"groups": 2},
            ValueError,
            "bias has shape (3,)",
            "expected (4,)",
        ),
        Bad(
            {"x": ((1, 4, 5, 5), F32), "weight": ((4, 4, 3, 3), "float16")},
            {},
            TypeError,
            "weight has dtype float16",
            "expected float32",
        ),
        Bad(
            {"x": ((1, 4, 5, 5), F32), "weight": ((4, 4, 3, 3), F32)},
            {"stride": (1, 0)},
            ValueError,
            "stride is (1, 0)",
            "at least 1",
        ),
        Bad(
            {"x": ((1, 4, 5, 5), F32), "weight": ((4, 4, 3, 3), F32)},
            {"layout": "CHWN"},
            ValueError,
            "layout is 'CHWN'",
            "'NCHW' or 'NHWC'",
        ),
    ),
    torch=_in_torch,
    samples={"": next(_conv2d((2, 2, 3, 4), (2, 2, 2, 3)))},
    opcheck=(
        next(_conv2d((2, 4, 5, 6), (6, 4, 3, 3), padding=1)),
        next(_conv2d((2, 4, 5, 6), (6, 2, 3, 2), False, stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2)),
    ),
    # as each dtype is fastest
    bench=(
        Convolution("xw", "y", ("yxw", "xw"), variant="nhwc", dtypes=("float16", "bfloat16"), call=_bench("NHWC")),
        Convolution("xw", "y", ("yxw", "xw"), variant="nchw", dtypes=("float32", "float64"), call=_bench("NCHW")),
        Convolution("xw", "y", ("yxw", "xw"), variant="nchw tf32", dtypes=("float32",), call=_bench("NCHW", True)),
    ),
    complex=True,
)
