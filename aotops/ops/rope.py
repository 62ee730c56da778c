"""Rotary position embedding."""

from __future__ import annotations

from ..op import Autocast, operator
from ._rope import gradient_dims, rotated_heads, sequence_axis, table_dims, table_gradients

# ------------------------------------------------------------------------------------------------------------ sharding


def _dims(x, *like_x):
    """Heads are independent too. ``x``: the first input."""

    def stated(call):
        shape = getattr(call, x)
        tables, seq, lead = table_dims(call, shape[:-3], shape[sequence_axis(call.layout)])
        heads = f"h {seq}" if call.layout == "BHSD" else f"{seq} h"
        rows = " ".join(["...", *lead, heads, "D"])
        return dict.fromkeys((x, *like_x), rows) | tables

    return stated


def _backward_dims(call):
    return gradient_dims(_dims("dy", "x", "dx")(call))


# ------------------------------------------------------------------------------------------------------------ formulas


def _formula(m, x, cos, sin, positions, interleaved, layout, rotary_dim):
    return rotated_heads(m, x, cos, sin, positions, interleaved, layout, rotary_dim)


def _backward_formula(m, dy, x, cos, sin, positions, interleaved, layout, rotary_dim):
    dx = rotated_heads(m, dy, cos, sin, positions, interleaved, layout, rotary_dim, back=True)
    if x is None:  # nobody wants these
        return dx, m.zeros(cos), m.zeros(sin)
    return dx, *table_gradients(m, dy, x, cos, positions, interleaved, layout, rotary_dim)


# ---------------------------------------------------------------------------------------------------------- definition


@operator(
    inputs=("x", "cos", "sin", "positions"),
    outputs=("y",),
    optional=("positions",),
    attrs={"interleaved": "bool", "layout": "str", "rotary_dim": "int?"},
    same_spec_as={"y": "x"},
    dims=_dims("x", "y"),
    formula=_formula,
    fuses=("y",),
    saved_for={"x": ("cos", "sin")},
    vmappable=("x", "y"),
    min_rank=3,
    autocast=Autocast.IF_REFUSED,
    backward={
        "inputs": ("dy", "x", "cos", "sin", "positions"),
        "outputs": ("dx", "dcos", "dsin"),
        "optional": ("x", "positions", "dx", "dcos", "dsin"),
        "same_spec_as": {"dx": "dy", "dcos": "cos", "dsin": "sin"},
        "dims": _backward_dims,
        "formula": _backward_formula,
        "fuses": ("dx",),
        "vmappable": ("dy", "x", "dx"),
        "min_rank": 3,
    },
)
def rope(x, cos, sin, interleaved=False, positions=None, layout="BSHD", rotary_dim=None):
    """Rotary position embedding: each pair of elements ``a, b`` of a head becomes ``a * cos - b * sin, b * cos + a *
    sin``, by the angle that its position and its place in the head have.

    Args:
        x: (..., sequence, heads, head_dim), or (..., heads, sequence, head_dim) by ``layout``; float16, bfloat16,
            float32 or float64.
        cos, sin: (positions, rotary_dim / 2), one number for each pair; of x's dtype, or float32 where x has 16 bits.
            Row i is for row i of the sequence, unless ``positions`` says otherwise; there may be more rows. They may
            have leading axes of x, or 1, and then have as many rows as the sequence: (batch, sequence, rotary_dim / 2).
            Rows of rotary_dim, whose halves are equal, as Hugging Face makes them, are accepted unless ``interleaved``;
            the first halves are read.
        interleaved: the pairs are elements ``2 i, 2 i + 1``, as in GPT-J; else ``i, i + rotary_dim / 2``, as in
            GPT-NeoX and Hugging Face's Llama.
        positions: (sequence,) or (batch, sequence), int32 or int64: the row of cos and sin for each row of the
            sequence, as for packed sequences and a cache. Or None.
        layout: "BSHD" or "BHSD".
        rotary_dim: the elements of a head that are rotated, the first ones; the others are copied. None for all.

    Returns:
        A tensor like x, computed in float32 (float64 for float64) and rounded once. The gradient of x is the rotation
        by the opposite angle; x is kept for the gradients of cos and sin alone. In rows of rotary_dim, the second half
        is not read, and has a gradient of 0.

    Raises:
        TypeError: a dtype that is not accepted.
        ValueError: shapes that do not fit; another layout; a rotary_dim that is odd, or larger than head_dim; tensors
            on different devices; on the CPU, a position that is no row of cos. On a GPU the elements that are rotated
            by it are NaN.

    Source: Su et al., arXiv:2104.09864.
    """
    return (x, cos, sin, positions), (interleaved, layout, rotary_dim)
