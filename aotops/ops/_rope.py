"""The rotation of heads: what ``rope`` and ``qkv_rope`` share."""

from __future__ import annotations

from math import prod


def sequence_axis(layout):
    return -2 if layout == "BHSD" else -3


# ------------------------------------------------------------------------------------------------------------ sharding


def table_dims(call, leading, seq):
    """The axes of tables and positions, and the names of the sequence and of the last leading axes of what is rotated:
    leading axes are independent, and so is the sequence where each of its rows has a row of the tables, or a position.

    Args:
        leading: the leading axes of what is rotated.
        seq: its sequence.
    """
    if call.cos is None:
        return dict.fromkeys(("positions", "cos", "sin"), "0"), "s", []
    lines = call.cos[:-2] if call.positions is None else call.positions[:-1]
    own_rows = call.positions is not None or len(call.cos) > 2 or call.cos[0] == seq
    s = "s" if own_rows else "S"
    lead = [f"b{i}" for i in range(len(lines))] if lines == leading[len(leading) - len(lines) :] else []
    of_lines = " ".join([*(lead or [f"B{i}" for i in range(len(lines))]), s])
    table = "P W" if call.positions is not None or not own_rows else f"{of_lines} W"
    return {"positions": of_lines, "cos": table, "sin": table}, s, lead


def gradient_dims(stated):
    """With the gradients of the tables."""
    return stated | {f"d{table}": stated[table] for table in ("cos", "sin")}


# ------------------------------------------------------------------------------------------------------------ formulas


def rotated_heads(m, x, cos, sin, positions, interleaved, layout, rotary_dim, back=False):
    """x by the angles of its positions. ``back``: by the opposite ones. Each half is rounded before both are joined: a
    compiler may keep what is joined in memory."""
    rotated, rest = _parts(x, rotary_dim)
    c, s = (_rows(m, t, x, positions, layout, rotated) for t in (cos, sin))
    a, b = _pairs(m, m.wide(rotated), interleaved)
    a, b = (a * c + b * s, b * c - a * s) if back else (a * c - b * s, b * c + a * s)
    return _joined(m, m.like(a, x), m.like(b, x), rest, interleaved)


def table_gradients(m, dy, x, cos, positions, interleaved, layout, rotary_dim):
    """dcos and dsin."""
    (da, db), (a, b) = (_pairs(m, m.wide(_parts(t, rotary_dim)[0]), interleaved) for t in (dy, x))
    return tuple(_summed(m, d, cos, positions, layout) for d in (da * a + db * b, db * a - da * b))


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


def _joined(m, a, b, rest, interleaved):
    """Pairs, and the rest of the head."""
    if interleaved:
        y = m.reshape(m.concatenate([a[..., None], b[..., None]]), (*a.shape[:-1], 2 * a.shape[-1]))
    else:
        y = m.concatenate([a, b])
    return y if rest is None else m.concatenate([y, rest])


def _rows(m, table, x, positions, layout, rotated):
    """The row of the table for each row of x, wide, of a shape that broadcasts."""
    half, seq = rotated.shape[-1] // 2, x.shape[sequence_axis(layout)]
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
