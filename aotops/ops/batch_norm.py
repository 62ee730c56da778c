"""Batch normalization."""

from __future__ import annotations

from ..op import Autocast, operator
from ._batch_norm import (
    activated,
    activation_gradient,
    channels,
    dims,
    gradients,
    gradients_of_statistics,
    normalized,
    normalized_in_one_reduction,
    z_of_statistics,
)


def _formula(m, x, weight, bias, eps, axis, activation):
    z, mean, var = normalized(m, m.wide(x), weight, bias, eps, axis)
    return activated(m, z, activation), mean, var


def _backward_formula(m, dy, dmean, dvar, x, weight, bias, eps, axis, activation):
    x = m.wide(x)
    g = activation_gradient(m, m.wide(dy), lambda: normalized(m, x, weight, bias, eps, axis)[0], activation)
    return gradients(m, g, dmean, dvar, x, weight, eps, axis)


def _fused(m, x, weight, bias, eps, axis, activation):
    z, mean, var = normalized_in_one_reduction(m, m.wide(x), weight, bias, eps, axis)
    return activated(m, z, activation), mean, var


def _fused_backward(m, dy, dmean, dvar, x, weight, bias, mean, var, eps, axis, activation):
    x = m.wide(x)
    g = activation_gradient(
        m, m.wide(dy), lambda: z_of_statistics(m, x, weight, bias, mean, var, eps, axis), activation
    )
    return gradients_of_statistics(m, g, dmean, dvar, x, weight, mean, var, eps, axis)


@operator(
    inputs=("x", "weight", "bias"),
    outputs=("y", "mean", "var"),
    workspace=("workspace",),
    shapes={"mean": channels, "var": channels},
    optional=("weight", "bias"),
    attrs={"eps": "float", "axis": "int", "activation": "str?"},
    same_spec_as={"y": "x"},
    dims=dims(("x", "y"), ("weight", "bias", "mean", "var")),
    formula=_formula,
    fused=_fused,
    autocast=Autocast.IF_REFUSED,
    backward={
        "inputs": ("dy", "dmean", "dvar", "x", "weight", "bias", "mean", "var"),
        "outputs": ("dx", "dweight", "dbias"),
        "workspace": ("workspace",),
        "shapes": {"dweight": channels, "dbias": channels},
        "optional": ("dmean", "dvar", "weight", "bias", "dx", "dweight", "dbias"),
        "same_spec_as": {"dx": "x"},
        "dims": dims(("dy", "x", "dx"), ("dmean", "dvar", "weight", "bias", "mean", "var", "dweight", "dbias")),
        "formula": _backward_formula,
        "fused": _fused_backward,
    },
)
def batch_norm(x, weight=None, bias=None, eps=1e-5, axis=1, activation=None):
    """Batch normalization by the statistics of x itself, as ``torch.nn.functional.batch_norm`` in training:
    ``activation((x - mean) / sqrt(var + eps) * weight + bias)``, mean and (biased) variance taken over all axes but
    one.

    Args:
        x: any shape of at least one axis; float16, bfloat16, float32 or float64.
        weight, bias: (C,), a number for each index of the axis of channels; of x's dtype, or both float32 where x has
            16 bits. Either may be None; without a weight, bias is of x's dtype.
        eps: added to the variance. With 0 a constant channel is NaN, as a constant row of ``layer_norm``.
        axis: the axis of channels: 1 of (N, C, H, W), -1 of (N, H, W, C).
        activation: None, "relu", "silu" or "hardswish". The backward computes its input again, from x.

    Returns:
        A tensor like x; and mean and var, (C,), in float32 (float64 for float64), which are differentiable, and 0
        where there are no elements. Running statistics are the caller's: torch's take ``var * M / (M - 1)`` of
        M elements. All is computed in float32 (float64), and results are rounded once.

    Raises:
        TypeError: a dtype that is not floating, or a weight or bias of another dtype than those above.
        ValueError: shapes that do not fit; an axis that x does not have; another activation; tensors on different
            devices.

    Source: Ioffe and Szegedy, arXiv:1502.03167.
    """
    return (x, weight, bias), (eps, axis, activation)
