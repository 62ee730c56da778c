"""Layer normalization over the trailing axes."""

from __future__ import annotations

from ..op import Autocast, operator
from ._norm import affine, axes, dims, layer_norm_gradients, layer_normalized, scaled, statistics


def _formula(m, x, weight, bias, normalized_shape, eps, weight_offset):
    normed, _ = layer_normalized(m, m.wide(x), len(normalized_shape), eps)
    return scaled(m, normed, weight, weight_offset, bias)


def _backward_formula(m, dy, x, weight, normalized_shape, eps, weight_offset):
    return layer_norm_gradients(m, m.wide(dy), m.wide(x), weight, normalized_shape, eps, weight_offset)


@operator(
    inputs=("x", "weight", "bias"),
    outputs=("y",),
    residuals=("stats",),
    shapes={"stats": statistics(2)},
    optional=("weight", "bias"),
    attrs={"normalized_shape": "int[]", "eps": "float", "weight_offset": "float"},
    same_spec_as={"y": "x"},
    dims=dims(("x", "y"), ("weight", "bias"), "stats"),
    formula=_formula,
    vmappable=("x", "y", "stats"),
    autocast=Autocast.IF_REFUSED,
    backward={
        "inputs": ("dy", "x", "weight", "stats"),
        "outputs": ("dx", "dweight", "dbias"),
        "workspace": ("workspace",),
        "shapes": {"dweight": affine, "dbias": affine},
        "optional": ("weight", "stats", "dx", "dweight", "dbias"),
        "same_spec_as": {"dx": "x"},
        "dims": dims(("dy", "x", "dx"), ("weight", "dweight", "dbias"), "stats"),
        "formula": _backward_formula,
        "vmappable": ("dy", "x", "stats", "dx"),
    },
)
def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5, weight_offset=0.0):
    """Layer normalization, as ``torch.nn.functional.layer_norm``:
    ``(x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias``, mean and (biased) variance taken over the
    trailing axes.

    Args:
        x: (..., *normalized_shape); float16, bfloat16, float32 or float64.
        normalized_shape: the trailing axes to normalize over; an int stands for one axis.
        weight, bias: normalized_shape, or both with more of the trailing axes of x, as (H, D) for a weight of each
            head; of x's dtype, or both float32 where x has 16 bits. Either may be None; without a weight, bias is
            normalized_shape and of x's dtype.
        eps: added to the variance.
        weight_offset: added to the weight: the rows are scaled by weight + weight_offset. Without a weight it has no
            effect.

    Returns:
        A tensor like x. Statistics are taken in float32 (float64 for float64).

    Raises:
        TypeError: a dtype that is not floating, or a weight or bias of another dtype than those above.
        ValueError: shapes that do not fit; tensors on different devices.

    Source: Ba, Kiros and Hinton, arXiv:1607.06450.
    """
    return (x, weight, bias), (axes(normalized_shape), eps, weight_offset)
