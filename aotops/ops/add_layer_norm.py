"""A residual connection and the layer normalization after it, in one pass."""

from __future__ import annotations

from ..op import operator
from ._norm import axes, dims, layer_norm_gradients, layer_normalized, normalized, scaled, statistics


def _formula(m, x, residual, weight, bias, normalized_shape, eps):
    h = m.like(m.wide(x) + m.wide(residual), x)
    normed, _ = layer_normalized(m, m.wide(h), len(normalized_shape), eps)
    return scaled(m, normed, weight, bias), h


def _backward_formula(m, dy, dh, h, weight, normalized_shape, eps):
    dx, *rest = layer_norm_gradients(m, m.wide(dy), m.wide(h), weight, normalized_shape, eps)
    return dx + m.wide(dh), *rest


@operator(
    inputs=("dy", "dh", "h", "weight", "stats"),
    outputs=("dx", "dresidual", "dweight", "dbias"),
    workspace=("workspace",),
    shapes={"dweight": normalized, "dbias": normalized},
    optional=("weight", "stats", "dx", "dresidual", "dweight", "dbias"),
    attrs={"normalized_shape": "int[]", "eps": "float"},
    same_spec_as={"dx": "h"},
    formula=_backward_formula,
    alias={"dresidual": "dx"},
    dims=dims(("dy", "dh", "h", "dx"), ("weight", "dweight", "dbias"), "stats"),
    vmappable=("dy", "dh", "h", "stats", "dx", "dresidual"),
)
def add_layer_norm_backward(dy, dh, h, weight, stats, normalized_shape, eps=1e-5):
    return (dy, dh, h, weight, stats), (axes(normalized_shape), eps)


@operator(
    inputs=("x", "residual", "weight", "bias"),
    outputs=("y", "h"),
    residuals=("stats",),
    shapes={"stats": statistics(2)},
    optional=("weight", "bias"),
    attrs={"normalized_shape": "int[]", "eps": "float"},
    backward=add_layer_norm_backward,
    same_spec_as={"y": "x", "h": "x"},
    dims=dims(("x", "residual", "y", "h"), ("weight", "bias"), "stats"),
    formula=_formula,
    vmappable=("x", "residual", "y", "h", "stats"),
    autocast={"cuda": "float32"},
)
def add_layer_norm(x, residual, normalized_shape, weight=None, bias=None, eps=1e-5):
    """``h = x + residual`` and ``layer_norm(h, normalized_shape, weight, bias, eps)``.

    Args:
        x, residual: (..., *normalized_shape); float16, bfloat16, float32 or float64, both the same.
        normalized_shape: the trailing axes to normalize over; an int stands for one axis.
        weight, bias: normalized_shape, of x's dtype; either may be None.
        eps: added to the variance.

    Returns:
        The norm and h, in this order, each like x. What is normalized is h as it is returned, rounded to its dtype.

    Raises:
        TypeError: a dtype that is not floating, or a residual, weight or bias of another dtype than x's.
        ValueError: shapes that do not fit; tensors on different devices.

    Source: Ba, Kiros and Hinton, arXiv:1607.06450.
    """
    return (x, residual, weight, bias), (axes(normalized_shape), eps)
