"""Depthwise convolutions on the CPU, of blocks of channels and bands of lines: no tap, channel, line or pixel is left
out or taken twice."""

from __future__ import annotations

import numpy as np
import pytest

from aotops.frontends import numpy as arrays

# x (N, C, H, W), kernel, stride, padding, dilation: images smaller than the kernel, of several bands, and of lines
# beside the pixels that registers hold; channels of less than a vector, of one, of two, and of some more
CASES = [
    ((2, 33, 7, 7), (7, 7), 1, 3, 1),
    ((3, 16, 9, 15), (3, 3), 1, 1, 1),
    ((1, 40, 14, 13), (5, 4), (2, 3), (2, 1), 1),
    ((2, 9, 11, 12), (3, 3), 2, 4, (2, 3)),
    ((1, 35, 90, 71), (3, 3), 1, 1, 1),
    ((1, 35, 91, 70), (3, 5), 2, 1, 1),
    ((2, 64, 2, 3), (3, 3), 3, 2, 1),
    ((5, 3, 20, 20), (3, 3), 1, 1, 1),
    ((2, 80, 9, 8), (3, 3), 2, 1, 1),
]


def whole(*shape, dtype):
    return np.random.default_rng(sum(shape)).integers(-2, 3, shape).astype(dtype)


def laid(array, layout):
    return array if layout == "NCHW" else np.ascontiguousarray(np.moveaxis(array, 1, -1))


def convolve(x, weight, stride, padding, dilation):
    """y, and a function of dy for dx and dweight, exact."""
    x, weight = x.astype(np.int64), weight[:, 0].astype(np.int64)
    (sh, sw), (ph, pw), (dh, dw) = (np.broadcast_to(pair, 2) for pair in (stride, padding, dilation))
    (height, width), (kh, kw) = x.shape[2:], weight.shape[1:]
    padded = np.pad(x, [(0, 0), (0, 0), (ph, ph), (pw, pw)])
    out_h, out_w = (height + 2 * ph - dh * (kh - 1) - 1) // sh + 1, (width + 2 * pw - dw * (kw - 1) - 1) // sw + 1

    def met(r, s):
        return np.s_[..., r * dh : r * dh + (out_h - 1) * sh + 1 : sh, s * dw : s * dw + (out_w - 1) * sw + 1 : sw]

    taps = [(r, s) for r in range(kh) for s in range(kw)]
    y = sum(padded[met(r, s)] * weight[:, r, s, None, None] for r, s in taps)

    def backward(dy):
        dx, dweight, dy = np.zeros_like(padded), np.zeros_like(weight), dy.astype(np.int64)
        for r, s in taps:
            dx[met(r, s)] += dy * weight[:, r, s, None, None]
            dweight[:, r, s] = (padded[met(r, s)] * dy).sum((0, 2, 3))
        return dx[:, :, ph : ph + height, pw : pw + width], dweight[:, None]

    return y, backward


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_numbers_are_exact(case, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    shape, kernel, stride, padding, dilation = case
    x, weight, bias = (whole(*s, dtype=dtype) for s in (shape, (shape[1], 1, *kernel), shape[1:2]))
    y, backward = convolve(x, weight, stride, padding, dilation)
    dy = whole(*y.shape, dtype=dtype)
    exact = y + bias[:, None, None].astype(np.int64), *backward(dy)
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": shape[1]}
    for layout in ("NCHW", "NHWC"):
        of_x, of_weight, of_dy = (laid(array, layout) for array in (x, weight, dy))
        found = (
            arrays.conv2d(of_x, of_weight, bias, layout=layout, **attrs),
            *arrays.conv2d_backward(of_dy, of_x, of_weight, layout=layout, **attrs)[:2],
        )
        for name, one, other in zip(("y", "dx", "dweight"), found, exact, strict=True):
            np.testing.assert_array_equal(one, laid(other, layout).astype(dtype), f"{layout} {name}")


@pytest.mark.parametrize("groups", [1, 16])
def test_a_stride_beyond_the_image_is_any_such_stride(groups):
    """A depthwise dx wrote outside of its memory, and the forward prefetched 2**50 rows."""
    x, weight = (whole(*s, dtype="float32") for s in ((1, 16, 3, 512), (16, 16 // groups, 3, 3)))
    for layout in ("NCHW", "NHWC"):
        one, other = (laid(array, layout) for array in (x, weight))
        dy, found = whole(*laid(whole(1, 16, 1, 512, dtype="float32"), layout).shape, dtype="float32"), []
        for stride in (5, 2**50):
            attrs = {"stride": (stride, 1), "padding": 1, "groups": groups, "layout": layout}
            found.append((arrays.conv2d(one, other, **attrs), *arrays.conv2d_backward(dy, one, other, **attrs)))
        for near, far in zip(*found, strict=True):
            np.testing.assert_array_equal(near, far)


def test_padding_that_no_index_can_have_is_refused():
    """An image with its zeros had 2**68 elements, of which 64 bits are 0."""
    x, weight = np.ones((1, 4, 4, 4), "float32"), np.ones((5, 4, 3, 3), "float32")
    with pytest.raises(ValueError, match="at most 2\\*\\*50 elements with padding"):
        arrays.conv2d(x, weight, padding=2**33 - 2, stride=2**33)


def test_padding_and_dilation_far_beyond_the_image():
    x, weight, far = whole(1, 16, 3, 5, dtype="float32"), whole(16, 1, 2, 3, dtype="float32"), 2**40
    y, _ = convolve(x, weight, (9, 1), (9, 1), (9, 1))
    found = arrays.conv2d(x, weight, stride=(far, 1), padding=(far, 1), dilation=(far, 1), groups=16)
    np.testing.assert_array_equal(found, y)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_on_any_number_of_threads(dtype):
    torch = pytest.importorskip("torch")
    from aotops.frontends import torch as ours

    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    for shape, kernel, stride, padding, dilation in CASES:
        for memory in (torch.contiguous_format, torch.channels_last):
            x, weight = (
                torch.randn(s, generator=generator).to(getattr(torch, dtype), memory_format=memory).requires_grad_()
                for s in (shape, (shape[1], 1, *kernel))
            )
            found = []
            try:
                for count in (1, 2, 5):
                    torch.set_num_threads(count)
                    y = ours.conv2d(x, weight, None, stride, padding, dilation, shape[1])
                    found.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
            finally:
                torch.set_num_threads(threads)
            for other in found[1:]:
                assert all(map(torch.equal, found[0], other)), (shape, memory)
