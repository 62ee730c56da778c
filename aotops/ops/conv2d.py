"""Two-dimensional convolution."""

from __future__ import annotations

from ..op import operator
from ..spec import TensorSpec, accumulate_dtype, check_dtype, check_floating, check_like, shape_text, size

SLICES = 128  # cuda_src/conv2d.h: kSlices
FULL = 264  # cuda_src/conv2d.h: kFull
MOST = 1 << 50  # cuda_src/aot.h: kMostElements


def _pair(value):
    if type(value) is tuple:
        return value
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


def _image(spec, layout):
    """Channels, height and width: the last three axes of x, y and the weight."""
    a, b, c = spec.shape[-3:]
    return (a, b, c) if layout == "NCHW" else (c, a, b)


def _placed(leading, channels, height, width, layout):
    image = (channels, height, width) if layout == "NCHW" else (height, width, channels)
    return (*leading, *image)


def _check_pair(op, name, pair, least):
    if len(pair) != 2 or pair[0] < least or pair[1] < least:
        raise ValueError(f"{op}: {name} is {shape_text(pair)}, expected two integers of at least {least}")
    if pair[0] > MOST or pair[1] > MOST:
        raise ValueError(f"{op}: {name} is {shape_text(pair)}, expected two integers of at most 2**50")


def _output(op, x, weight, stride, padding, dilation, groups, layout):
    """Checks a call; the spec of y."""
    if layout not in ("NCHW", "NHWC"):
        raise ValueError(f"{op}: layout is {layout!r}, expected 'NCHW' or 'NHWC'")
    _check_pair(op, "stride", stride, 1)
    _check_pair(op, "padding", padding, 0)
    _check_pair(op, "dilation", dilation, 1)
    if groups < 1:
        raise ValueError(f"{op}: groups is {groups}, expected at least 1")
    nchw = layout == "NCHW"
    check_floating(op, "x", x)
    if len(x.shape) < 3:
        expected = "(..., C, H, W)" if nchw else "(..., H, W, C)"
        raise ValueError(f"{op}: x has shape {shape_text(x.shape)}, expected {expected}")
    check_floating(op, "weight", weight)
    check_dtype(op, "weight", weight, x.dtype)
    if len(weight.shape) != 4:
        expected = "(O, C / groups, kh, kw)" if nchw else "(O, kh, kw, C / groups)"
        raise ValueError(f"{op}: weight has shape {shape_text(weight.shape)}, expected {expected}")
    channels, height, width = _image(x, layout)
    inner, kh, kw = _image(weight, layout)
    shapes = f"weight has shape {shape_text(weight.shape)} and x {shape_text(x.shape)}"
    if channels != inner * groups or weight.shape[0] % groups != 0:
        raise ValueError(f"{op}: {shapes}, which do not fit in layout {layout} with groups {groups}")
    out_h = height + 2 * padding[0] - dilation[0] * (kh - 1) - 1
    out_w = width + 2 * padding[1] - dilation[1] * (kw - 1) - 1
    if kh < 1 or kw < 1 or out_h < 0 or out_w < 0:
        raise ValueError(
            f"{op}: {shapes}, expected a kernel that fits with padding {shape_text(padding)} and dilation "
            f"{shape_text(dilation)}"
        )
    out_h, out_w = out_h // stride[0] + 1, out_w // stride[1] + 1
    return TensorSpec(_placed(x.shape[:-3], weight.shape[0], out_h, out_w, layout), x.dtype)


# ------------------------------------------------------------------------------------------------------- the workspace
# cuda_src/conv2d.h has the same rules and their reasons.


def _ceil(a, b):
    return (a + b - 1) // b


def _words(elements, itemsize):
    return _ceil(elements * itemsize, 16) * 4


def _workspace(x, weight, y, groups, layout):
    """Words of the forward's and of the backward's: enough for every dtype."""
    outputs, images = weight.shape[0], size(x.shape[:-3])
    bias, dbias = _words(outputs + 7, 4), SLICES * outputs
    if groups != 1:
        return bias, dbias
    (channels, height, width), (_, out_h, out_w), (_, kh, kw) = (_image(t, layout) for t in (x, y, weight))
    whole_c, whole_o = _ceil(channels, 8) * 8, _ceil(outputs, 8) * 8
    cols = kh * kw * whole_c
    tiles = _ceil(whole_o, 128) * _ceil(cols, 128)  # one of 64 rows where there are no more: as many
    dweight = (_ceil(FULL, tiles) if tiles > 0 else 1) * whole_o * cols
    packed_weight = _words(whole_o * cols, 4)
    forward, backward = bias, packed_weight + dweight + dbias
    if layout == "NCHW" or whole_c != channels or whole_o != outputs:
        packed = _words(images * height * width * whole_c, 4) + _words(images * out_h * out_w * whole_o, 4)
        forward += packed_weight + packed
        backward += packed
    return forward, backward


def _infer(x, weight, bias, stride, padding, dilation, groups, layout, allow_tf32):
    y = _output("conv2d", x, weight, stride, padding, dilation, groups, layout)
    if bias is not None:
        check_like("conv2d", "bias", bias, "the output channels", TensorSpec(weight.shape[:1], x.dtype))
    work, _ = _workspace(x, weight, y, groups, layout)
    return y, TensorSpec((work,), accumulate_dtype(x.dtype))


def _infer_backward(dy, x, weight, stride, padding, dilation, groups, layout, allow_tf32):
    op = "conv2d_backward"
    y = _output(op, x, weight, stride, padding, dilation, groups, layout)
    check_like(op, "dy", dy, "the result", y)
    _, work = _workspace(x, weight, y, groups, layout)
    return x, weight, TensorSpec(weight.shape[:1], x.dtype), TensorSpec((work,), accumulate_dtype(x.dtype))


_ATTRS = {
    "stride": "int[]",
    "padding": "int[]",
    "dilation": "int[]",
    "groups": "int",
    "layout": "str",
    "allow_tf32": "bool",
}


@operator(
    inputs=("dy", "x", "weight"),
    outputs=("dx", "dweight", "dbias"),
    workspace=("workspace",),
    infer=_infer_backward,
    optional=("dx", "dweight", "dbias"),
    attrs=_ATTRS,
    like={"dx": "x", "dweight": "weight"},
    batched=("dy", "x", "dx"),
)
def conv2d_backward(dy, x, weight, stride=1, padding=0, dilation=1, groups=1, layout="NCHW", allow_tf32=False):
    return (dy, x, weight), (_pair(stride), _pair(padding), _pair(dilation), groups, layout, allow_tf32)


@operator(
    inputs=("x", "weight", "bias"),
    outputs=("y",),
    workspace=("workspace",),
    infer=_infer,
    optional=("bias",),
    attrs=_ATTRS,
    backward=conv2d_backward,
    batched=("x", "y"),
    autocast={"cpu": "autocast", "cuda": "autocast"},
)
def conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, layout="NCHW", allow_tf32=False):
    """Two-dimensional convolution, as ``torch.nn.functional.conv2d``: each output channel is the sum, over a window of
    x and the input channels of its group, of x times the weight.

    Args:
        x: (..., C, H, W), or (..., H, W, C) where layout is "NHWC"; float16, bfloat16, float32 or float64. Each index
            of the leading axes is an image.
        weight: (O, C / groups, kh, kw), or (O, kh, kw, C / groups) where layout is "NHWC"; of x's dtype.
        bias: (O,), of x's dtype, or None.
        stride, padding, dilation: an int, or one for height and one for width. Padding is zeros, on both sides.
        groups: of input and output channels, which divides both: a group's outputs are of its inputs alone.
        layout: "NCHW" or "NHWC". The weight's axes are in the order of x's, the kernel's in the place of the image's,
            so that for "NHWC" it is as torch's channels_last memory has it.
        allow_tf32: whether float32 may be multiplied as TF32, whose products have 11 bits, on a GPU. It is several
            times as fast there. Not by default: a float32 result has float32's digits unless you give them up.

    Returns:
        (..., O, P, Q), or (..., P, Q, O) where layout is "NHWC", with
        P = (H + 2 * padding - dilation * (kh - 1) - 1) // stride + 1 and Q likewise. Sums are taken in float32 (float64
        for float64).

    Raises:
        TypeError: a dtype that is not floating, or a weight or bias of another dtype than x's.
        ValueError: shapes that do not fit; a kernel that is larger than the padded image; another layout; a stride,
            dilation or number of groups below 1, a padding below 0; tensors on different devices.
    """
    return (x, weight, bias), (_pair(stride), _pair(padding), _pair(dilation), groups, layout, allow_tf32)
