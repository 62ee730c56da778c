"""paged_attention: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Decoding
from aotops.testing import F32, F64, I32, I64, Bad, Case, Row


def paged_attention(q, k_cache, v_cache, lengths, block_table=None, scale=None, window=None, softcap=0.0):
    if block_table is not None:
        k_cache, v_cache = (x[block_table].reshape(len(q), -1, *x.shape[2:]) for x in (k_cache, v_cache))
    group = q.shape[2] // max(k_cache.shape[2], 1)
    k, v = (np.repeat(x, group, 2) for x in (k_cache, v_cache))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    seen = np.broadcast_to(
        _seen(np.arange(q.shape[1]), np.arange(k.shape[1]), lengths, q.shape[1], window), scores.shape
    )
    most = np.max(scores, axis=-1, keepdims=True, initial=-np.inf, where=seen)
    e = np.where(seen, np.exp(np.where(seen, scores - np.where(seen.any(-1, keepdims=True), most, 0), 0)), 0)
    total = e.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", e / np.where(total == 0, 1, total), v)


def _seen(query, key, lengths, queries, window):
    """Which keys a query sees: (batch, 1, queries, keys)."""
    after = key - (lengths[:, None, None, None] - queries + query[:, None])
    return (after <= 0) if window is None else (after <= 0) & (after >= -window)


def _case(batch, queries, keys, heads, dim, kv_heads=None, v_dim=None, block_size=None, blocks=None, **attrs):
    """``block_size``: of a cache of ``blocks``, of which each example has as many as its keys need."""
    kv_heads, v_dim = heads if kv_heads is None else kv_heads, dim if v_dim is None else v_dim
    shapes = {"q": (batch, queries, heads, dim)}
    classes, dtypes = {"lengths": keys + 1}, {}
    lead, table = (batch, keys), None
    if block_size is not None:
        lead, table = (blocks or max(2 * batch, 1), block_size), (batch, -(-keys // block_size))
        classes, dtypes = classes | {"block_table": lead[0]}, {"block_table": I32}
    shapes |= {"k_cache": (*lead, kv_heads, dim), "v_cache": (*lead, kv_heads, v_dim)}
    shapes |= {"lengths": (batch,), "block_table": table}
    # in 16 bits the probabilities are rounded
    return Case(shapes, attrs, classes=classes, dtypes=dtypes, inner_roundings=2)


def _draw(draw):
    kv_heads, keys = draw.integer(1, 3), draw.size()
    attrs = {"softcap": draw.choice(0.0, 1.5), "window": draw.choice(None, draw.integer(0, 4))}
    attrs |= {"scale": draw.choice(None, 0.5)}
    sizes = draw.size(), draw.size(), keys, kv_heads * draw.integer(1, 3), draw.integer(1, 5)
    return _case(*sizes, kv_heads, draw.integer(1, 5), draw.choice(None, draw.integer(1, 3)), **attrs)


def _in_torch(torch, q, k_cache, v_cache, lengths, block_table=None, scale=None, window=None, softcap=0.0):
    """Written out: torch has no function of a table, lengths or softcap."""
    if block_table is not None:
        k_cache, v_cache = (x[block_table].flatten(1, 2) for x in (k_cache, v_cache))
    group = q.shape[2] // k_cache.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k_cache, v_cache))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = (torch.arange(n, device=q.device) for n in (q.shape[1], k.shape[1]))
    seen = _seen(query, key, lengths, q.shape[1], window)
    p = torch.softmax(scores.masked_fill(~seen, torch.finfo(scores.dtype).min), -1) * seen
    return torch.einsum("bhqk,bkhd->bqhd", p, v).contiguous()


_GIVEN = {
    "q": ((2, 3, 4, 6), F32),
    "k_cache": ((2, 5, 2, 6), F32),
    "v_cache": ((2, 5, 2, 7), F32),
    "lengths": ((2,), I64),
    "block_table": None,
}
_PAGED = {"k_cache": ((9, 4, 2, 6), F32), "v_cache": ((9, 4, 2, 7), F32), "block_table": ((2, 3), I32)}


def _bad(given, attrs, error, *words) -> Bad:
    return Bad(_GIVEN | given, attrs, error, *words)


ROW = Row(
    paged_attention,
    cases=(
        _case(2, 1, 5, 4, 6),
        _case(2, 3, 9, 4, 6, 2),
        _case(3, 2, 9, 4, 6, 2, 7, block_size=4),
        _case(2, 7, 5, 3, 6, 1, scale=0.3),  # more queries than keys: the first see nothing
        _case(2, 4, 30, 2, 5, window=6),
        _case(2, 2, 30, 4, 5, 2, block_size=3, window=0, softcap=0.7),
        _case(1, 1, 1, 1, 1, scale=-1.0),
        _case(2, 0, 3, 2, 4),
        _case(2, 3, 0, 2, 4),
        _case(2, 1, 0, 2, 4, block_size=2),
        _case(0, 1, 3, 2, 4),
        _case(2, 1, 3, 0, 4),
        # one for each path of a kernel: rows of a head, head sizes, chunks
        _case(2, 1, 1700, 8, 64, 2),
        _case(2, 3, 1300, 8, 128, 1, block_size=16, blocks=70),
        _case(1, 16, 700, 32, 128, 8, 96, block_size=64, blocks=5, window=300),
        _case(2, 5, 300, 4, 256, 1, softcap=5.0),
        _case(1, 2, 900, 2, 192, block_size=128, blocks=9),
        _case(1, 9, 600, 3, 300, 1),
        _case(3, 2, 260, 6, 15, 2, 17, block_size=7),
        _case(3, 2, 200, 12, 64, 2),
        _case(2, 7, 5, 6, 16, 3, 24, softcap=2.0),
        _case(2, 1, 1100, 6, 36, 3, 12, block_size=16, window=700),
    ),
    draw=_draw,
    bad=(
        _bad({"q": ((3, 4, 6), F32)}, {}, ValueError, "q has shape (3, 4, 6)", "(batch, queries, heads, head_dim)"),
        _bad({"k_cache": ((5, 2, 6), F32)}, {}, ValueError, "k_cache has shape (5, 2, 6)", "(batch, keys, kv_heads"),
        _bad(_PAGED | {"v_cache": ((2, 7), F32)}, {}, ValueError, "v_cache has shape (2, 7)", "(blocks, block_size"),
        _bad({"q": ((2, 3, 4, 6), I64)}, {}, TypeError, "q has dtype int64", "expected float16"),
        _bad({"k_cache": ((2, 5, 2, 6), F64)}, {}, TypeError, "k_cache has dtype float64", "expected float32"),
        _bad({"v_cache": ((2, 5, 2, 7), F64)}, {}, TypeError, "v_cache has dtype float64", "expected float32"),
        _bad({"k_cache": ((2, 5, 2, 5), F32)}, {}, ValueError, "k_cache has shape (2, 5, 2, 5)", "the head_dim of q"),
        _bad({"k_cache": ((3, 5, 2, 6), F32)}, {}, ValueError, "k_cache has shape (3, 5, 2, 6)", "the batch of q"),
        _bad({"k_cache": ((2, 5, 3, 6), F32)}, {}, ValueError, "of 3 heads", "a divisor of q's 4 heads"),
        _bad({"v_cache": ((2, 4, 2, 7), F32)}, {}, ValueError, "v_cache has shape (2, 4, 2, 7)", "that of k_cache"),
        _bad({"q": ((2, 3, 4, 0), F32)}, {}, ValueError, "q has shape (2, 3, 4, 0)", "head_dim of at least 1"),
        _bad({"lengths": ((3,), I64)}, {}, ValueError, "lengths has shape (3,)", "(batch,)", "(2, 3, 4, 6)"),
        _bad({"lengths": ((2,), F32)}, {}, TypeError, "lengths has dtype float32", "int32 or int64"),
        _bad({"lengths": None}, {}, TypeError, "lengths is None", "expected"),
        _bad(_PAGED | {"block_table": ((2,), I32)}, {}, ValueError, "block_table has shape (2,)", "(batch, blocks"),
        _bad(_PAGED | {"block_table": ((3, 3), I32)}, {}, ValueError, "block_table has shape (3, 3)", "the batch of q"),
        _bad(_PAGED | {"block_table": ((2, 3), F32)}, {}, TypeError, "block_table has dtype float32", "int32 or int64"),
        _bad({}, {"window": -1}, ValueError, "window is -1", "None for all"),
        _bad({}, {"scale": float("inf")}, ValueError, "scale is inf", "finite"),
        _bad({}, {"softcap": -1.0}, ValueError, "softcap is -1", "at least 0"),
    ),
    torch=_in_torch,
    gradient=False,
    samples={"": _case(2, 2, 5, 4, 6, 2), "paged": _case(2, 2, 9, 4, 6, 2, block_size=4, window=5)},
    opcheck=(_case(2, 2, 5, 4, 6, 2, block_size=2, window=3, softcap=2.0, scale=0.4),),
    bench=(Decoding("qkkn", "q", call=lambda f, shape: lambda q, k, v, n: f.paged_attention(q, k, v, n)),),
)
