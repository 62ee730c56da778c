"""Two-dimensional convolution."""

from __future__ import annotations

from math import prod

from ..op import Autocast, Product, operator


def _pair(value):
    """(n, n) of n and of (n,)."""
    value = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    return value * 2 if len(value) == 1 else value


def _padding(padding, weight, stride, dilation, layout):
    """In numbers: "valid" is 0, and "same" such that the result has the image's size."""
    if not isinstance(padding, str) or padding not in ("same", "valid"):
        return _pair(padding)
    if padding == "valid":
        return 0, 0
    if len(getattr(weight, "shape", ())) != 4 or len(_pair(dilation)) != 2:
        return 0, 0  # the library refuses these
    if _pair(stride) != (1, 1):
        raise ValueError(f"conv2d: padding is 'same', expected numbers with a stride of {stride}")
    height, width = weight.shape[2:] if layout == "NCHW" else weight.shape[1:3]
    reach = (_pair(dilation)[0] * (height - 1), _pair(dilation)[1] * (width - 1))
    if reach[0] % 2 or reach[1] % 2:
        raise ValueError(
            f"conv2d: padding is 'same', expected numbers for a kernel of {height} by {width}, which needs one more "
            f"zero on the right than on the left: pad x first"
        )
    return reach[0] // 2, reach[1] // 2


def _output(call):
    """(..., O, P, Q), or (..., P, Q, O)."""
    nchw = call.layout == "NCHW"
    image, kernel = (shape[-2:] if nchw else shape[-3:-1] for shape in (call.x, call.weight))
    options = zip(image, kernel, call.stride, call.padding, call.dilation, strict=True)
    sizes = [(n + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for n, k, stride, padding, dilation in options]
    return (*call.x[:-3], call.weight[0], *sizes) if nchw else (*call.x[:-3], *sizes, call.weight[0])


def _attrs(weight, stride, padding, dilation, groups, layout, allow_tf32):
    padding = _padding(padding, weight, stride, dilation, layout)
    return _pair(stride), padding, _pair(dilation), groups, layout, allow_tf32


def _dims(call):
    """The axes of the inputs and y. Groups pair the channels of both sides, which are then whole."""
    o, c, each = ("O", "C", "I") if call.groups > 1 else ("o", "c", "c")
    if call.layout == "NCHW":
        x, weight, y = f"... {c} H W", f"{o} {each} KH KW", f"... {o} P Q"
    else:
        x, weight, y = f"... H W {c}", f"{o} KH KW {each}", f"... P Q {o}"
    return {"x": x, "weight": weight, "bias": o, "y": y}


def _gradients(axes, groups):
    dbias = axes["bias"] if groups > 1 else f"{axes['bias']} (c)"
    x, weight = axes["x"], axes["weight"]
    return {"dy": axes["y"], "x": x, "weight": weight, "dx": x, "dweight": weight, "dbias": dbias}


@operator(
    inputs=("x", "weight", "bias"),
    outputs=("y",),
    workspace=("workspace",),
    shapes={"y": _output},
    optional=("bias",),
    attrs={
        "stride": "int[]",
        "padding": "int[]",
        "dilation": "int[]",
        "groups": "int",
        "layout": "str",
        "allow_tf32": "bool",
    },
    dims=_dims,
    product=Product(("x", "weight"), flops=lambda call: 2 * prod(_output(call)) * prod(call.weight[1:])),
    vmappable=("x", "y"),
    autocast=Autocast.LOWER,
    backward={
        "inputs": ("dy", "x", "weight"),
        "outputs": ("dx", "dweight", "dbias"),
        "workspace": ("workspace",),
        "shapes": {"dbias": lambda call: call.weight[:1]},
        "optional": ("dx", "dweight", "dbias"),
        "same_spec_as": {"dx": "x", "dweight": "weight"},
        "dims": lambda call: _gradients(_dims(call), call.groups),
        "vmappable": ("dy", "x", "dx"),
    },
)
def conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, layout="NCHW", allow_tf32=False):
    """Two-dimensional convolution, as ``torch.nn.functional.conv2d``: each output channel is the sum, over a window of
    x and the input channels of its group, of x times the weight.

    Args:
        x: (..., C, H, W), or (..., H, W, C) where layout is "NHWC"; float16, bfloat16, float32 or float64. Each index
            of the leading axes is an image.
        weight: (O, C / groups, kh, kw), or (O, kh, kw, C / groups) where layout is "NHWC"; of x's dtype.
        bias: (O,), of x's dtype, or None.
        stride, padding, dilation: an int, or one for height and one for width. Padding is zeros, on both sides; "valid"
            is none, "same" keeps the image's size, with a stride of 1.
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
    return (x, weight, bias), _attrs(weight, stride, padding, dilation, groups, layout, allow_tf32)
