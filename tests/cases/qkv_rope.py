"""qkv_rope: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Projections
from aotops.testing import F32, F64, I64, Bad, Case, Row

from . import rope as of_rope


def qkv_rope(
    qkv,
    cos,
    sin,
    heads,
    kv_heads=None,
    interleaved=False,
    positions=None,
    layout="BSHD",
    rotary_dim=None,
    grouped=False,
):
    parts = _split(np, qkv, heads, kv_heads, grouped)
    if cos is not None:
        attrs = {"interleaved": interleaved, "positions": positions, "rotary_dim": rotary_dim}
        parts = (*(of_rope.rope(x, cos, sin, **attrs) for x in parts[:2]), parts[2])
    return tuple(np.swapaxes(x, -3, -2) for x in parts) if layout == "BHSD" else parts


def _split(module, qkv, heads, kv_heads, grouped):
    """(..., sequence, heads, head_dim) of q, k and v."""
    kv_heads = kv_heads or heads
    *lead, row = qkv.shape
    dim = row // (heads + 2 * kv_heads)
    if not grouped:
        rows = module.reshape(qkv, (*lead, heads + 2 * kv_heads, dim))
        return rows[..., :heads, :], rows[..., heads : heads + kv_heads, :], rows[..., heads + kv_heads :, :]
    of_group = heads // kv_heads
    groups = module.reshape(qkv, (*lead, kv_heads, of_group + 2, dim))
    q = module.reshape(groups[..., :of_group, :], (*lead, heads, dim))
    return q, groups[..., of_group, :], groups[..., of_group + 1, :]


def _qkv(lead, heads, dim, table=None, positions=None, rows=0, wide=False, rotates=True, **attrs) -> Case:
    """``lead``: leading axes and the sequence. ``table``: the shape of cos and sin, or that of this many rows."""
    kv_heads = attrs.get("kv_heads") or heads
    table = (table or (rows or lead[-1], attrs.get("rotary_dim", dim) // 2)) if rotates else None
    shapes = {"qkv": (*lead, (heads + 2 * kv_heads) * dim), "cos": table, "sin": table, "positions": positions}
    classes = {"positions": table[0]} if positions is not None else {}
    return Case(shapes, {"heads": heads, **attrs}, classes=classes, wide=("cos", "sin") if wide else ())


def _draw(draw):
    kv_heads, grouped, interleaved = draw.integer(1, 3), draw.flag(), draw.flag()
    heads = kv_heads * draw.integer(1, 3) if grouped else draw.integer(1, 5)
    attrs = {"kv_heads": kv_heads, "layout": draw.choice("BSHD", "BHSD"), "grouped": grouped}
    lead, seq = draw.shape(1), draw.size()
    kind = draw.choice("none", "rows", "lines", "positions")
    if kind == "none":
        return _qkv((*lead, seq), heads, draw.size(), rotates=False, **attrs)
    rotary_dim = 2 * draw.integer(1, 4)
    attrs |= {"rotary_dim": rotary_dim, "interleaved": interleaved}
    width = rotary_dim if draw.flag() and not interleaved else rotary_dim // 2
    call = (*lead, seq), heads, rotary_dim + draw.integer(0, 3)
    if kind == "positions":
        return _qkv(*call, (draw.integer(1, 6), width), (*(lead if draw.flag() else ()), seq), **attrs)
    if kind == "lines" and lead:
        return _qkv(*call, (*(lead if draw.flag() else (1,)), seq, width), **attrs)
    return _qkv(*call, (seq + draw.integer(0, 2), width), **attrs)


_GIVEN = {"qkv": ((2, 3, 48), F32), "cos": ((3, 3), F32), "sin": ((3, 3), F32)}
_HEADS = {"heads": 4, "kv_heads": 2}
_NOTHING = {"cos": None, "sin": None}


def _bad(given, attrs, error, *words) -> Bad:
    return Bad(_GIVEN | given, _HEADS | attrs, error, *words)


def _in_torch(torch, qkv, cos, sin, heads, kv_heads=None, **attrs):
    """As models write it. Views of qkv are not multiplied: torch would save them for the backward."""
    grouped, layout = attrs.pop("grouped", False), attrs.pop("layout", "BSHD")
    q, k, v = (x.clone() for x in _split(torch, qkv, heads, kv_heads, grouped))
    if cos is not None:
        q, k = (of_rope.ROW.torch(torch, x, cos, sin, **attrs) for x in (q, k))
    parts = (x.transpose(-3, -2) if layout == "BHSD" else x for x in (q, k, v))
    return tuple(x.contiguous() for x in parts)


ROW = Row(
    qkv_rope,
    cases=(
        _qkv((2, 3), 4, 6),
        _qkv((2, 3), 4, 6, kv_heads=2),
        _qkv((2, 3), 4, 6, kv_heads=2, layout="BHSD", interleaved=True),
        _qkv((2, 3), 2, 6, kv_heads=3),
        _qkv((2, 3), 4, 6, kv_heads=2, grouped=True),
        _qkv((2, 3), 3, 6, layout="BHSD", grouped=True),
        _qkv((3,), 2, 6, kv_heads=1),  # no leading axes
        _qkv((2, 2, 3), 1, 4),  # two
        _qkv((1, 1), 1, 2),
        _qkv((2, 3), 2, 0),
        _qkv((0, 3), 2, 6),
        _qkv((2, 0), 2, 6, rows=2),
        # no rotation
        _qkv((1, 1), 1, 1, rotates=False),
        _qkv((2, 3), 4, 5, rotates=False),
        _qkv((2, 3), 4, 5, kv_heads=1, layout="BHSD", rotates=False),
        _qkv((2, 3), 4, 6, kv_heads=2, grouped=True, layout="BHSD", rotates=False),
        # a part of the head
        _qkv((2, 3), 2, 7, rotary_dim=4),
        _qkv((2, 3), 2, 7, rotary_dim=4, interleaved=True, kv_heads=1),
        # tables: more rows, whose halves are equal, with leading axes, wider
        _qkv((2, 3), 2, 6, rows=5),
        _qkv((2, 3), 2, 6, (3, 6), layout="BHSD"),
        _qkv((2, 3), 2, 6, (2, 3, 3)),
        _qkv((2, 3), 2, 6, (1, 3, 6), layout="BHSD"),
        _qkv((2, 3), 2, 6, kv_heads=1, wide=True),
        # positions
        _qkv((2, 3), 2, 6, (7, 3), (3,)),
        _qkv((2, 3), 4, 7, (2, 2), (2, 3), kv_heads=2, layout="BHSD", rotary_dim=4, interleaved=True, grouped=True),
        # one for each path of a kernel: vectors, heads that are not whole groups, rows that are not whole blocks
        _qkv((2, 53), 5, 64, kv_heads=1),
        _qkv((2, 33), 6, 64, kv_heads=2, layout="BHSD", interleaved=True, grouped=True),
        _qkv((2, 33), 3, 64, layout="BHSD", rotates=False),
        _qkv((2, 17), 3, 64, kv_heads=1, interleaved=True, wide=True),
        _qkv((3, 17), 1, 128, wide=True),
        _qkv((2, 9), 3, 96, rotary_dim=32),
        _qkv((2, 9), 3, 80, (40, 32), (2, 9), kv_heads=1, rotary_dim=64, interleaved=True),
        _qkv((1, 3), 1, 4096),
    ),
    draw=_draw,
    bad=(
        _bad({"qkv": ((48,), F32)}, {}, ValueError, "qkv has shape (48,)", "sequence, a multiple of 8"),
        _bad({"qkv": ((2, 3, 47), F32)}, {}, ValueError, "qkv has shape (2, 3, 47)", "a multiple of 8", "2 kv_heads"),
        _bad({"qkv": ((2, 3, 40), F32)}, {}, ValueError, "qkv has shape (2, 3, 40)", "even head_dim, or a rotary_dim"),
        _bad({"qkv": ((2, 3, 48), I64)}, {}, TypeError, "qkv has dtype int64", "expected float16"),
        _bad({"cos": ((3, 3), F64)}, {}, TypeError, "cos has dtype float64", "expected float32"),
        _bad({"sin": ((4, 3), F32)}, {}, ValueError, "sin has shape (4, 3)", "expected (3, 3), the shape of cos"),
        _bad({"cos": ((3, 4), F32)}, {}, ValueError, "cos has shape (3, 4)", "rows of 3 or 6"),
        _bad({"cos": ((2, 3), F32)}, {}, ValueError, "cos has shape (2, 3)", "at least 3 rows", "qkv", "(2, 3, 48)"),
        _bad({"cos": ((3, 3, 3), F32)}, {}, ValueError, "cos has shape (3, 3, 3)", "leading axes of qkv"),
        _bad({"positions": ((4,), I64)}, {}, ValueError, "positions has shape (4,)", "expected (..., 3)"),
        _bad({"positions": ((3,), F32)}, {}, TypeError, "positions has dtype float32", "int32 or int64"),
        _bad({"sin": None}, {}, ValueError, "sin is None", "as cos is"),
        _bad({"cos": None}, {}, ValueError, "cos is None", "as sin is"),
        _bad(_NOTHING | {"positions": ((3,), I64)}, {}, ValueError, "positions has shape (3,)", "None without cos"),
        _bad(_NOTHING, {"rotary_dim": 4}, ValueError, "rotary_dim is 4", "None without cos"),
        _bad({}, {"heads": 0}, ValueError, "heads is 0", "expected 1 to"),
        _bad({}, {"kv_heads": -1}, ValueError, "kv_heads is -1", "expected 1 to"),
        _bad({}, {"heads": 2, "kv_heads": 3, "grouped": True}, ValueError, "kv_heads is 3", "divisor of heads", "2"),
        _bad({}, {"rotary_dim": 3}, ValueError, "rotary_dim is 3", "even number from 0 to 6", "qkv"),
        _bad({}, {"layout": "SBHD"}, ValueError, "layout is 'SBHD'", "'BSHD' or 'BHSD'"),
        _bad({}, {"heads": None}, TypeError, "heads is None", "an integer"),
    ),
    torch=_in_torch,
    samples={
        "": _qkv((2, 3), 2, 6, kv_heads=1),
        "grouped": _qkv((2, 3), 4, 6, (7, 3), (2, 3), kv_heads=2, layout="BHSD", grouped=True),
    },
    opcheck=(_qkv((2, 3), 2, 5, rotates=False), _qkv((2, 3), 2, 7, (1, 3, 2), rotary_dim=4, interleaved=True)),
    bench=(
        Projections(
            "pcc", "qkk", ("qkkcc", "p"), call=lambda f, shape: lambda p, c, s: f.qkv_rope(p, c, s, *shape[2:4])
        ),
    ),
    complex=True,
)
