"""A residual connection and the layer normalization after it, in one pass."""

from __future__ import annotations

from ..op import Autocast, operator
from ._norm import affine, axes, dims, layer_norm_gradients, layer_normalized, scaled, statistics


def _formula(m, x, residual, weight, bias, normalized_shape, eps, weight_offset):
    h = m.like(m.wide(x) + m.wide(residual), residual)
    normed, _ = layer_normalized(m, m.wide(h), len(normalized_shape), eps)
    return scaled(m, normed, weight, weight_offset, bias), h


def _backward_formula(m, dy, dh, h, weight, normalized_shape, eps, weight_offset):
    dx, *rest = layer_norm_gradients(m, m.wide(dy), m.wide(h), weight, normalized_shape, eps, weight_offset)
    dx = dx if dh is None else dx + m.wide(dh)
    return dx, dx, *rest


@operator(
    inputs=("x", "residual", "weight", "bias"),
    outputs=("y", "h"),
    residuals=("stats",),
    shapes={"stats": statistics(2)},
    optional=("weight", "bias"),
    attrs={"normalized_shape": "int[]", "eps": "float", "weight_offset": "float"},
    same_spec_as={"y": "x", "h": "residual"},
    dims=dims(("x", "residual", "y", "h"), ("weight", "bias"), "stats"),
    formula=_formula,
    vmappable=("x", "residual", "y", "h", "stats"),
    autocast=Autocast.IF_REFUSED,
    backward={
        "inputs": ("dy", "dh", "h", "weight", "stats"),
        "outputs": ("dx", "dresidual", "dweight", "dbias"),
        "workspace": ("workspace",),
        "shapes": {"dweight": affine, "dbias": affine},
        "optional": ("dh", "weight", "stats", "dx", "dresidual", "dweight", "dbias"),
        "same_spec_as": {"dx": "dy", "dresidual": "h"},
        "formula": _backward_formula,
        "duplicates": {"dresidual": "dx"},
        "dims": dims(("dy", "dh", "h", "dx", "dresidual"), ("weight", "dweight", "dbias"), "stats"),
        "vmappable": ("dy", "dh", "h", "stats", "dx", "dresidual"),
    },
)
def add_layer_norm(x, residual, normalized_shape, weight=None, bias=None, eps=1e-5, weight_offset=0.0):
    """``h = x + residual`` and ``layer_norm(h, normalized_shape, weight, bias, eps, weight_offset)``.

    Args:
        x: (..., *normalized_shape); float16, bfloat16, float32 or float64.
        residual: the same shape; of x's dtype, or float32 where x has 16 bits. A stream that begins
            with a float32 one keeps that dtype, because h is like residual.
        normalized_shape: the trailing axes to normalize over; an int stands for one axis.
        weight, bias: normalized_shape, or both with more of the trailing axes of x, as (H, D) for a weight of each
            head; of x's dtype, or both float32 where x has 16 bits. Either may be None; without a weight, bias is
            normalized_shape and of x's dtype.
        eps: added to the variance.
        weight_offset: added to the weight: the rows are scaled by weight + weight_offset. Without a weight it has no
            effect.

    Returns:
        The norm, like x, and h, like residual. What is normalized is h as it is returned, rounded to its dtype.

    Raises:
        TypeError: a dtype that is not floating, or a residual, weight or bias of another dtype than those above.
        ValueError: shapes that do not fit; tensors on different devices.

    Source: Ba, Kiros and Hinton, arXiv:1607.06450.
    """
    return (x, residual, weight, bias), (axes(normalized_shape), eps, weight_offset)
