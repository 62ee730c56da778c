"""Rotary position embedding."""

from __future__ import annotations

from math import prod

from ..op import Autocast, operator

# ------------------------------------------------------------------------------------------------------------ sharding


def _rotated(call, x):
    return x[-1] if call.rotary_dim is None else call.rotary_dim


def _dims(x, *like_x):
    """Heads and leading axes are independent; so is the sequence where each of its rows has a row of the tables, or a
    position. ``x``: the first input."""

    def stated(call):
        shape = getattr(call, x)
        lines = call.cos[:-2] if call.positions is None else call.positions[:-1]
        own_rows = call.positions is not None or len(call.cos) > 2 or call.cos[0] == shape[_sequence(call.layout)]
        seq = "s" if own_rows else "S"
        lead = [f"b{i}" for i in range(len(lines))] if lines == shape[:-3][len(shape) - 3 - len(lines) :] else []
        of_lines = " ".join([*(lead or [f"B{i}" for i in range(len(lines))]), seq])
        table = "P W" if call.positions is not None or not own_rows else f"{of_lines} W"
        heads = f"h {seq}" if call.layout == "BHSD" else f"{seq} h"
        rows = " ".join(["...", *lead, heads, "D"])
        return dict.fromkeys((x, *like_x), rows) | {"positions": of_lines, "cos": table, "sin": table}

    return stated


def _backward_dims(call):
    stated = _dims("dy", "x", "dx")(call)
    return stated | {f"d{table}": stated[table] for table in ("cos", "sin")}


def _sequence(layout):
    return -2 if layout == "BHSD" else -3


# ------------------------------------------------------------------------------------------------------------ formulas


def _formula(m, x, cos, sin, positions, interleaved, layout, rotary_dim):
    rotated, rest = _parts(x, rotary_dim)
    c, s = (_rows(m, t, x, positions, layout, rotated) for t in (cos, sin))
    a, b = _pairs(m, m.wide(rotated), interleaved)
    return _joined(m, x, a * c - b * s, b * c + a * s, rest, interleaved)


def _backward_formula(m, dy, x, cos, sin, positions, interleaved, layout, rotary_dim):
    rotated, rest = _parts(dy, rotary_dim)
    c, s = (_rows(m, t, dy, positions, layout, rotated) for t in (cos, sin))
    da, db = _pairs(m, m.wide(rotated), interleaved)
    dx = _joined(m, dy, da * c + db * s, db * c - da * s, rest, interleaved)
    if x is None:  # nobody wants these
        return dx, m.zeros(cos), m.zeros(sin)
    a, b = _pairs(m, m.wide(_parts(x, rotary_dim)[0]), interleaved)
    dcos, dsin = (_summed(m, d, cos, positions, layout) for d in (da * a + db * b, db * a - da * b))
    return dx, dcos, dsin


def _parts(x, rotary_dim):
    """The elements that are rotated, and the rest, or None."""
    if rotary_dim is None or rotary_dim == x.shape[-1]:
        return x, None
    return x[..., :rotary_dim], x[..., rotary_dim:]


def _pairs(m, x, interleaved):
    """The first and the second elements of the pairs."""
    half = x.shape[-1] // 2
    if not interleaved:
        return x[..., :half], x[..., half:]
    pairs = m.reshape(x, (*x.shape[:-1], half, 2))
    return pairs[..., 0], pairs[..., 1]


def _joined(m, x, a, b, rest, interleaved):
    """Pairs, and the rest of x, as a tensor like x."""
    if interleaved:
        y = m.reshape(m.concatenate([a[..., None], b[..., None]]), (*a.shape[:-1], 2 * a.shape[-1]))
    else:
        y = m.concatenate([a, b])
    return y if rest is None else m.concatenate([y, m.wide(rest)])


def _rows(m, table, x, positions, layout, rotated):
    """The row of the table for each row of x, wide, of a shape that broadcasts."""
    half, seq = rotated.shape[-1] // 2, x.shape[_sequence(layout)]
    table = m.wide(table)
    if table.shape[-1] != half:
        table = table[..., :half]
    lead = table.shape[:-2] if positions is None else positions.shape[:-1]
    if positions is not None:
        table = m.take(table, m.reshape(positions, (prod(positions.shape),)))
    elif not lead and table.shape[0] != seq:
        table = m.reshape(m.reshape(table, (prod(table.shape),))[..., : seq * half], (seq, half))
    return m.reshape(table, (*lead, 1, seq, half) if layout == "BHSD" else (*lead, seq, 1, half))


def _summed(m, d, table, positions, layout):
    """The gradient of the table: the sums of d, which has a number for each pair of x, over rows of one position."""
    d = m.sum(d, (-3 if layout == "BHSD" else -2,))
    lead = table.shape[:-2] if positions is None else positions.shape[:-1]
    leading = d.shape[:-2]
    new = len(leading) - len(lead)
    axes = tuple(i for i in range(len(leading)) if i < new or (lead[i - new] == 1 and leading[i] != 1))
    d = m.sum(d, axes)
    seq, half = d.shape[-2:]
    if positions is not None:
        n = prod(positions.shape)
        d = m.scatter_sum(m.reshape(d, (n, half)), m.reshape(positions, (n,)), table.shape[0])
    elif not lead and table.shape[0] != seq:
        unread = m.zeros(m.reshape(m.wide(table), (prod(table.shape),))[..., : (table.shape[0] - seq) * half])
        d = m.reshape(m.concatenate([m.reshape(d, (seq * half,)), unread]), (table.shape[0], half))
    d = m.reshape(d, (*table.shape[:-1], half))
    return d if table.shape[-1] == half else m.concatenate([d, m.zeros(m.wide(table)[..., half:])])


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
