"""rope: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Rotations
from aotops.testing import F32, F64, I64, Bad, Case, Row


def rope(x, cos, sin, interleaved=False, positions=None, layout="BSHD", rotary_dim=None):
    n = (x.shape[-1] if rotary_dim is None else rotary_dim) // 2
    x, rows = np.swapaxes(x, -3, -2) if layout == "BHSD" else x, x.shape[-2 if layout == "BHSD" else -3]
    c, s = ((t[..., :rows, :n] if positions is None else t[positions][..., :n])[..., None, :] for t in (cos, sin))
    a, b = (x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2]) if interleaved else (x[..., :n], x[..., n : 2 * n])
    pairs = a * c - b * s, b * c + a * s
    rotated = np.stack(pairs, -1).reshape(*a.shape[:-1], 2 * n) if interleaved else np.concatenate(pairs, -1)
    y = np.concatenate([rotated, x[..., 2 * n :]], -1)
    return np.swapaxes(y, -3, -2) if layout == "BHSD" else y


def _rope(x, table=None, positions=None, rows=0, wide=False, **attrs) -> Case:
    """``table``: the shape of cos and sin, or that of this many rows; they are no cosines and sines of anything."""
    half = attrs.get("rotary_dim", x[-1]) // 2
    table = table or (rows or x[-2 if attrs.get("layout") == "BHSD" else -3], half)
    shapes = {"x": x, "cos": table, "sin": table, "positions": positions}
    classes = {"positions": table[0]} if positions is not None else {}
    return Case(shapes, attrs, classes=classes, wide=("cos", "sin") if wide else ())


def _draw(draw):
    layout, interleaved = draw.choice("BSHD", "BHSD"), draw.flag()
    rotary_dim = 2 * draw.integer(1, 4)
    lead, seq, heads = draw.shape(1), draw.size(), draw.size()
    x = (*lead, *((heads, seq) if layout == "BHSD" else (seq, heads)), rotary_dim + draw.integer(0, 3))
    width = rotary_dim if draw.flag() and not interleaved else rotary_dim // 2
    attrs = {"rotary_dim": rotary_dim, "layout": layout, "interleaved": interleaved}
    kind = draw.choice("rows", "lines", "positions")
    if kind == "positions":
        return _rope(x, (draw.integer(1, 6), width), (*(lead if draw.flag() else ()), seq), **attrs)
    if kind == "lines" and lead:
        return _rope(x, (*(lead if draw.flag() else (1,)), seq, width), **attrs)
    return _rope(x, (seq + draw.integer(0, 2), width), **attrs)


_X, _TABLE = ((2, 3, 4, 6), F32), ((3, 3), F32)
_GIVEN = {"x": _X, "cos": _TABLE, "sin": _TABLE}


def _bad(given, attrs, error, *words) -> Bad:
    return Bad(_GIVEN | given, attrs, error, *words)


def _in_torch(torch, x, cos, sin, interleaved=False, positions=None, layout="BSHD", rotary_dim=None):
    """As Hugging Face computes it. Views of x are not multiplied: torch would save them for the backward."""
    n = (x.shape[-1] if rotary_dim is None else rotary_dim) // 2
    rows = x.shape[-2 if layout == "BHSD" else -3]
    rest = x[..., 2 * n :] if 2 * n < x.shape[-1] else None
    x = x if rest is None else x[..., : 2 * n]
    tables = (t[..., :rows, :n] if positions is None else t[positions][..., :n] for t in (cos, sin))
    tables = (t.unsqueeze(-3 if layout == "BHSD" else -2) for t in tables)
    if interleaved:
        c, s = (torch.stack([t, t], -1).flatten(-2) for t in tables)
        y = x * c + torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2) * s
    else:
        c, s = (torch.cat([t, t], -1) for t in tables)
        y = x * c + torch.cat([-x[..., n:], x[..., :n]], -1) * s
    return y if rest is None else torch.cat([y, rest], -1)


ROW = Row(
    rope,
    cases=(
        _rope((2, 3, 4, 6)),
        _rope((2, 3, 4, 6), interleaved=True),
        _rope((2, 4, 3, 6), layout="BHSD"),
        _rope((2, 4, 3, 6), layout="BHSD", interleaved=True),
        _rope((3, 4, 6)),  # no leading axes
        _rope((2, 2, 3, 1, 4)),  # two
        _rope((1, 1, 1, 2)),
        _rope((1, 1, 1, 1), rotary_dim=0),
        _rope((2, 3, 4, 0)),
        _rope((0, 3, 4, 6)),
        _rope((2, 0, 4, 6), rows=2),
        # a part of the head
        _rope((2, 3, 4, 7), rotary_dim=4),
        _rope((2, 3, 4, 7), rotary_dim=4, interleaved=True),
        _rope((2, 3, 4, 16), rotary_dim=8, layout="BHSD"),
        # tables: more rows, whose halves are equal, with leading axes, wider
        _rope((2, 3, 4, 6), rows=5),
        _rope((2, 3, 4, 6), (3, 6)),
        _rope((2, 3, 4, 8), (5, 4), rotary_dim=4),
        _rope((2, 3, 4, 6), (2, 3, 3)),
        _rope((2, 4, 3, 6), (1, 3, 6), layout="BHSD"),
        _rope((2, 2, 3, 1, 4), (2, 3, 2)),
        _rope((2, 3, 4, 6), wide=True),
        # positions
        _rope((2, 3, 4, 6), (7, 3), (3,)),
        _rope((2, 3, 4, 6), (7, 3), (2, 3)),
        _rope((2, 3, 4, 6), (7, 6), (1, 3), layout="BSHD"),
        _rope((2, 4, 3, 7), (2, 2), (2, 3), layout="BHSD", rotary_dim=4, interleaved=True),
        # one for each path of a kernel: vectors, heads that are not whole groups, rows that are not whole blocks
        _rope((2, 53, 5, 64)),
        _rope((2, 53, 6, 64)),
        _rope((2, 3, 33, 64), layout="BHSD"),
        _rope((2, 5, 33, 64), layout="BHSD", interleaved=True),
        _rope((2, 33, 4, 64), interleaved=True, wide=True),
        _rope((2, 7, 33, 64), layout="BHSD", wide=True),
        _rope((3, 17, 1, 128)),
        _rope((2, 9, 3, 96), rotary_dim=32),
        _rope((2, 9, 3, 80), (40, 32), (2, 9), rotary_dim=64, interleaved=True),
        _rope((1, 3, 2, 4096)),
        _rope((1, 3, 2, 1030), rotary_dim=514),
    ),
    draw=_draw,
    bad=(
        Bad(
            {"x": ((3, 6), F32), "cos": _TABLE, "sin": _TABLE}, {}, ValueError, "x has shape (3, 6)", "sequence, heads"
        ),
        _bad({"x": ((2, 3, 4, 5), F32)}, {}, ValueError, "x has shape (2, 3, 4, 5)", "even head_dim, or a rotary_dim"),
        _bad({"x": ((2, 3, 4, 6), I64)}, {}, TypeError, "x has dtype int64", "expected float16"),
        _bad({"cos": ((3, 3), F64)}, {}, TypeError, "cos has dtype float64", "expected float32"),
        _bad({"x": ((2, 3, 4, 6), "float16"), "cos": ((3, 3), F64)}, {}, TypeError, "cos has", "float16 or float32"),
        _bad({"sin": ((3, 3), "float16"), "x": ((2, 3, 4, 6), "float16")}, {}, TypeError, "sin has", "float32"),
        _bad({"sin": ((4, 3), F32)}, {}, ValueError, "sin has shape (4, 3)", "expected (3, 3), the shape of cos"),
        _bad({"cos": ((3, 4), F32)}, {}, ValueError, "cos has shape (3, 4)", "rows of 3 or 6"),
        _bad({"cos": ((3, 6), F32)}, {"interleaved": True}, ValueError, "cos has shape (3, 6)", "rows of 3, for 6"),
        _bad({"cos": ((2, 3), F32)}, {}, ValueError, "cos has shape (2, 3)", "at least 3 rows"),
        _bad({"cos": ((2, 4, 3), F32)}, {}, ValueError, "cos has shape (2, 4, 3)", "expected 3 rows"),
        _bad({"cos": ((3, 3, 3), F32)}, {}, ValueError, "cos has shape (3, 3, 3)", "leading axes of x", "(2, 3, 4, 6)"),
        _bad({"cos": ((3,), F32)}, {}, ValueError, "cos has shape (3,)", "(positions, rotary_dim / 2)"),
        _bad({"positions": ((4,), I64)}, {}, ValueError, "positions has shape (4,)", "expected (..., 3)"),
        _bad({"positions": ((3, 3), I64)}, {}, ValueError, "positions has shape (3, 3)", "leading axes of x"),
        _bad({"positions": ((3,), F32)}, {}, TypeError, "positions has dtype float32", "int32 or int64"),
        _bad({}, {"rotary_dim": 3}, ValueError, "rotary_dim is 3", "even number from 0 to 6"),
        _bad({}, {"rotary_dim": 8}, ValueError, "rotary_dim is 8", "even number from 0 to 6"),
        _bad({}, {"layout": "SBHD"}, ValueError, "layout is 'SBHD'", "'BSHD' or 'BHSD'"),
        _bad({"cos": None}, {}, TypeError, "cos is None", "expected"),
    ),
    torch=_in_torch,
    samples={"": _rope((2, 3, 4, 6)), "positions": _rope((2, 4, 3, 6), (7, 3), (2, 3), layout="BHSD")},
    opcheck=(_rope((2, 3, 4, 7), (5, 2), rotary_dim=4, interleaved=True), _rope((2, 3, 4, 6), (1, 3, 6))),
    bench=(
        Rotations("xcc", "x", ("xcc", "x")),
        Rotations(
            "xcc",
            "x",
            ("xcc", "x"),
            variant="interleaved",
            call=lambda f, shape: lambda x, cos, sin: f.rope(x, cos, sin, True),
        ),
    ),
    complex=True,
)
