"""Layer normalization over the trailing axes."""

from __future__ import annotations

from ..op import operator
from ..spec import TensorSpec, accumulate_dtype, check_floating, check_like, shape_text, size


def partial_rows(rows, cols):
    """Rows of partial sums that the backward keeps; cuda_src/layer_norm.h has the same rule and its reason."""
    fit = min(max((1 << 21) // max(cols, 1), 16), 1056)
    return min(rows, fit) if isinstance(rows, int) else fit


def _check(op, x, normalized_shape, **affine):
    check_floating(op, "x", x)
    n = len(normalized_shape)
    if n == 0:
        raise ValueError(f"{op}: normalized_shape is empty, expected at least one axis")
    if tuple(x.shape[-n:]) != normalized_shape:
        raise ValueError(
            f"{op}: x has shape {shape_text(x.shape)}, expected its trailing axes to be normalized_shape "
            f"{shape_text(normalized_shape)}"
        )
    for slot, spec in affine.items():
        if spec is not None:
            check_like(op, slot, spec, "normalized_shape", TensorSpec(normalized_shape, x.dtype))


def _stats(x, normalized_shape):
    return TensorSpec((*x.shape[: -len(normalized_shape)], 2), accumulate_dtype(x.dtype))


def _infer(x, weight, bias, normalized_shape, eps):
    _check("layer_norm", x, normalized_shape, weight=weight, bias=bias)
    return x, _stats(x, normalized_shape)


def _infer_backward(dy, x, weight, stats, normalized_shape, eps):
    op = "layer_norm_backward"
    _check(op, x, normalized_shape)
    check_like(op, "dy", dy, "x", x)
    _check(op, x, normalized_shape, weight=weight)
    if stats is not None:
        check_like(op, "stats", stats, "each row's mean and rstd", _stats(x, normalized_shape))
    affine = TensorSpec(normalized_shape, x.dtype)
    rows, cols = size(x.shape[: -len(normalized_shape)]), size(normalized_shape)
    work = 2 * partial_rows(rows, cols) * cols + (2 * rows if stats is None else 0)
    return x, affine, affine, TensorSpec((work,), accumulate_dtype(x.dtype))


def _axes(normalized_shape):
    if type(normalized_shape) is tuple:
        return normalized_shape
    return tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)


@operator(
    inputs=("dy", "x", "weight", "stats"),
    outputs=("dx", "dweight", "dbias"),
    workspace=("workspace",),
    infer=_infer_backward,
    optional=("weight", "stats", "dx", "dweight", "dbias"),
    attrs={"normalized_shape": "int[]", "eps": "float"},
    like={"dx": "x"},
    batched=("dy", "x", "stats", "dx"),
)
def layer_norm_backward(dy, x, weight, stats, normalized_shape, eps=1e-5):
    return (dy, x, weight, stats), (_axes(normalized_shape), eps)


@operator(
    inputs=("x", "weight", "bias"),
    outputs=("y",),
    residuals=("stats",),
    infer=_infer,
    optional=("weight", "bias"),
    attrs={"normalized_shape": "int[]", "eps": "float"},
    backward=layer_norm_backward,
    like={"y": "x"},
    batched=("x", "y", "stats"),
    autocast="float32",
)
def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Layer normalization, as ``torch.nn.functional.layer_norm``:
    ``(x - mean) / sqrt(var + eps) * weight + bias``, mean and (biased) variance taken over the trailing axes.

    Args:
        x: (..., *normalized_shape); float16, bfloat16, float32 or float64.
        normalized_shape: the trailing axes to normalize over; an int stands for one axis.
        weight, bias: normalized_shape, of x's dtype; either may be None.
        eps: added to the variance.

    Returns:
        A tensor like x. Statistics are taken in float32 (float64 for float64).

    Raises:
        TypeError: a dtype that is not floating, or a weight or bias of another dtype than x's.
        ValueError: shapes that do not fit; tensors on different devices.

    Source: Ba, Kiros and Hinton, arXiv:1607.06450.
    """
    return (x, weight, bias), (_axes(normalized_shape), eps)
