"""qkv_attention: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Projections
from aotops.testing import F32, I64, Bad, Case, Row

from . import attention as of_attention


def qkv_attention(qkv, heads, kv_heads=None, lengths=None, **attrs):
    y = of_attention.attention(*_split(np, qkv, heads, kv_heads or heads), lengths, **attrs)
    return np.reshape(y, (*y.shape[:-2], y.shape[-2] * y.shape[-1]))


def _split(module, qkv, heads, kv_heads):
    """(..., sequence, heads, head_dim) of q, k and v."""
    *lead, row = qkv.shape
    rows = module.reshape(qkv, (*lead, heads + 2 * kv_heads, row // (heads + 2 * kv_heads)))
    return rows[..., :heads, :], rows[..., heads : heads + kv_heads, :], rows[..., heads + kv_heads :, :]


def _in_torch(torch, qkv, heads, kv_heads=None, lengths=None, **attrs):
    parts = (x.clone() for x in _split(torch, qkv, heads, kv_heads or heads))
    return of_attention.ROW.torch(torch, *parts, lengths, **attrs).flatten(-2)


def _packed(lead, seq, heads, dim, kv_heads=None, lengths=None, **attrs) -> Case:
    row = (heads + 2 * (kv_heads or heads)) * dim
    # in 16 bits the probabilities are rounded, and so is what the gradients are products of
    return Case(
        {"qkv": (*lead, seq, row), "lengths": lengths},
        {"heads": heads, "kv_heads": kv_heads, **attrs},
        classes={} if lengths is None else {"lengths": seq + 1},
        magnified=4.0 if seq > 100 else 1.0,  # an exponential magnifies a rounding of its argument by the argument
        inner_roundings=2,
        dtype_roundings=8,
    )


def _draw(draw):
    kv_heads, lead = draw.integer(1, 3), draw.shape(2)
    lengths = lead[draw.integer(0, len(lead)) :] if draw.flag() else None
    attrs = {"causal": draw.flag(), "softcap": draw.choice(0.0, 1.5), "scale": draw.choice(None, 0.5)}
    attrs |= {"window": draw.choice(None, (draw.integer(-1, 4), draw.integer(-1, 4)))}
    sizes = draw.size(), kv_heads * draw.integer(1, 3), draw.integer(1, 5)
    return _packed(lead, *sizes, kv_heads=kv_heads, lengths=lengths, **attrs)


_GIVEN = {"qkv": ((2, 3, 48), F32), "lengths": None}
_HEADS = {"heads": 4, "kv_heads": 2}


def _bad(given, attrs, error, *words) -> Bad:
    return Bad(_GIVEN | given, _HEADS | attrs, error, *words)


ROW = Row(
    qkv_attention,
    cases=(
        _packed((2,), 3, 4, 6),
        _packed((2,), 3, 4, 6, causal=True),
        _packed((2,), 3, 4, 6, 2, scale=0.3),
        _packed((2,), 5, 4, 6, 1, (2,), causal=True),
        _packed((2, 3), 3, 2, 6, None, (3,)),  # two leading axes
        _packed((), 5, 2, 6, 2, (), softcap=1.5),  # none
        _packed((2,), 6, 2, 5, 2, window=(1, 2)),
        _packed((2,), 6, 2, 5, 1, (2,), window=(2, -1), causal=True),
        _packed((1,), 1, 1, 1),
        _packed((2,), 0, 2, 4),
        _packed((0,), 3, 2, 4, None, (0,)),
        # one for each path of a kernel: blocks of queries and keys, and their ends, head sizes
        _packed((2,), 300, 2, 64, causal=True),
        _packed((2,), 197, 3, 64),
        _packed((2,), 261, 4, 64, 2, (2,)),
        _packed((1,), 200, 4, 128, 2, causal=True),
        _packed((1,), 140, 3, 96, 1, window=(70, 10)),
        _packed((1,), 130, 2, 128, softcap=5.0),
        _packed((1,), 97, 2, 160, causal=True),
        _packed((1,), 131, 2, 20),
        _packed((9,), 1, 8, 128, 2, causal=True),
        _packed((3,), 6, 4, 32, 2, (3,)),
    ),
    draw=_draw,
    bad=(
        _bad({"qkv": ((48,), F32)}, {}, ValueError, "qkv has shape (48,)", "sequence, a multiple of 8"),
        _bad({"qkv": ((2, 3, 47), F32)}, {}, ValueError, "qkv has shape (2, 3, 47)", "a multiple of 8", "2 kv_heads"),
        _bad({"qkv": ((2, 3, 0), F32)}, {}, ValueError, "qkv has shape (2, 3, 0)", "a multiple of 8"),
        _bad({"qkv": ((2, 3, 48), I64)}, {}, TypeError, "qkv has dtype int64", "expected float16"),
        _bad({"lengths": ((3,), I64)}, {}, ValueError, "lengths has shape (3,)", "leading axes of qkv", "(2, 3, 48)"),
        _bad({"lengths": ((2,), F32)}, {}, TypeError, "lengths has dtype float32", "int32 or int64"),
        _bad({}, {"heads": 0}, ValueError, "heads is 0", "expected 1 to"),
        _bad({}, {"kv_heads": -1}, ValueError, "kv_heads is -1", "expected 1 to"),
        _bad({}, {"heads": 2, "kv_heads": 3}, ValueError, "kv_heads is 3", "divisor of heads", "2"),
        _bad({}, {"window": (1, -2)}, ValueError, "window is (1, -2)", "-1 for all"),
        _bad({}, {"scale": float("inf")}, ValueError, "scale is inf", "finite"),
        _bad({}, {"softcap": -1.0}, ValueError, "softcap is -1", "at least 0"),
        _bad({}, {"causal": 1}, TypeError, "causal is 1", "True or False"),
        _bad({}, {"heads": None}, TypeError, "heads is None", "an integer"),
    ),
    torch=_in_torch,
    samples={"": _packed((2,), 3, 2, 4, 1), "causal": _packed((2,), 4, 4, 4, 2, causal=True)},
    opcheck=(
        _packed((2,), 3, 2, 4, None, (2,), window=(2, 1), softcap=2.0, scale=0.4),
        _packed((), 5, 2, 4, 1, causal=True),
    ),
    bench=(
        Projections(
            "p",
            "q",
            ("pqq", "p"),
            "causal",
            call=lambda f, shape: lambda p: f.qkv_attention(p, *shape[2:4], causal=True),
        ),
    ),
    complex=True,
)
