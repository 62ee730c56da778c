"""attention: all that is tried on it."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from aotops.bench.work import Attention
from aotops.testing import F32, F64, I64, Bad, Case, Row


def attention(
    q,
    k,
    v,
    lengths=None,
    mask=None,
    bias=None,
    sinks=None,
    cu_seqlens=None,
    cu_seqlens_k=None,
    causal=False,
    scale=None,
    window=None,
    softcap=0.0,
    layout="BSHD",
    seed=None,
    dropout=0.0,
):
    if layout == "BSHD":
        q, k, v = (np.swapaxes(x, -3, -2) for x in (q, k, v))
    group = q.shape[-3] // max(k.shape[-3], 1)
    k, v = (np.repeat(x, group, -3) for x in (k, v))
    scores = (q @ np.swapaxes(k, -2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    queries, keys = scores.shape[-2:]
    query, key = np.arange(keys - queries, keys), np.arange(keys)
    within = True
    if cu_seqlens is not None:
        own, other, query = _sequences(query + queries - keys, key, query, cu_seqlens, cu_seqlens_k)
        within = (own[:, None] == other) & (other > 0) & (other < len(cu_seqlens))
    seen = _seen(query[:, None], key, lengths, causal, window) & within
    seen = np.broadcast_to(seen if mask is None else seen & mask, scores.shape)
    if sinks is not None:  # a key of the value 0
        more = (*scores.shape[:-1], 1)
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], more)], -1)
        seen = np.concatenate([seen, np.ones(more, bool)], -1)
        v = np.concatenate([v, np.zeros((*v.shape[:-2], 1, v.shape[-1]))], -2)
    most = np.max(scores.real, axis=-1, keepdims=True, initial=-np.inf, where=seen)
    e = np.where(seen, np.exp(np.where(seen, scores - np.where(seen.any(-1, keepdims=True), most, 0), 0)), 0)
    total = e.sum(-1, keepdims=True)
    if dropout:
        kept = _kept_by_numpy(*map(int, seed), (*e.shape[:-1], keys), dropout) / (1 - dropout)
        e = np.concatenate([e[..., :keys] * kept, e[..., keys:]], -1)
    y = e @ v / np.where(total == 0, 1, total)
    return np.swapaxes(y, -3, -2) if layout == "BSHD" else y


def _kept(m, seed, shape, dropout, **place):
    """Which probabilities dropout keeps (cuda_src/operators/attention_dropout.h). m: numpy, or torch, whose products of
    int64 have their lower 64 bits too. seed: int64. place: what ``arange`` needs beside."""
    word = 2**32 - 1
    head, query, key = (m.arange(n, **place) for n in (prod(shape[:-2]), *shape[-2:]))
    a, b, c, d = key // 8, query[:, None], head[:, None, None], 0 * key
    low, high = seed[0], seed[1]
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (right >> 32 ^ b ^ low) & word, right & word
        c, d = (left >> 32 ^ d ^ high) & word, left & word
        low, high = low + 0x9E3779B9, high + 0xBB67AE85
    lane = key % 8
    pair = m.where(lane < 4, m.where(lane < 2, a, b), m.where(lane < 6, c, d))
    return ((pair >> 16 * (lane % 2)) % 2**16 >= int(dropout * 2**16)).reshape(shape)


@lru_cache(2)
def _kept_by_numpy(low, high, shape, dropout):
    """Once for all derivatives of a case: ten rounds of integers take longer than the rest of the reference."""
    return _kept(np, (low, high), shape, dropout)


def _sequences(i, key, query, cu_seqlens, cu_seqlens_k):
    """The number of the sequence, from 1, of queries i and of keys; and the key that each query stands beside."""
    own = (cu_seqlens[:, None] <= i).sum(0)
    if cu_seqlens_k is None:
        return own, own, query
    end = own.clip(0, len(cu_seqlens) - 1)
    return own, (cu_seqlens_k[:, None] <= key).sum(0), i + (cu_seqlens_k - cu_seqlens)[end]


def _seen(query, key, lengths, causal, window):
    """Which keys a query sees. query: (queries, 1), from how many keys there are more; key: (keys,)."""
    after, (left, right) = key - query, window or (-1, -1)
    seen = after == after
    if causal or right >= 0:
        seen = seen & (after <= (0 if causal else right))
    if left >= 0:
        seen = seen & (after >= -left)
    return seen if lengths is None else seen & (key < lengths[..., None, None, None])


def _attention(lead, queries, keys, heads, dim, kv_heads=None, v_dim=None, **given):
    """``lengths``, ``mask``, ``bias``: their shapes; ``sinks``: whether there are; ``sequences``: how many are packed;
    ``of_keys``: whether keys are packed otherwise; ``wide``: what is float32 beside 16 bits; ``seed``: the dtype of
    dropout's; else attributes."""
    kv_heads, v_dim = heads if kv_heads is None else kv_heads, dim if v_dim is None else v_dim

    def shape(seq, heads, dim):
        return (*lead, heads, seq, dim) if given.get("layout") == "BHSD" else (*lead, seq, heads, dim)

    shapes = {"q": shape(queries, heads, dim), "k": shape(keys, kv_heads, dim), "v": shape(keys, kv_heads, v_dim)}
    shapes |= {slot: given.pop(slot, None) for slot in ("lengths", "mask", "bias")}
    shapes["sinks"] = (heads,) if given.pop("sinks", False) else None
    sequences, wide = given.pop("sequences", None), given.pop("wide", ())
    shapes["cu_seqlens"] = None if sequences is None else (sequences + 1,)
    shapes["cu_seqlens_k"] = shapes["cu_seqlens"] if given.pop("of_keys", False) else None
    shapes["seed"], seed = (2,) if given.get("dropout") else None, given.pop("seed", "int64")
    classes = {"seed": 2**31, "lengths": keys + 1, "cu_seqlens": queries + 1, "cu_seqlens_k": keys + 1}
    classes = {slot: n for slot, n in classes.items() if shapes[slot] is not None}
    ascending = tuple(slot for slot in classes if slot.startswith("cu_seqlens"))
    dtypes = {"mask": "bool", "seed": seed}
    dtypes = {slot: dtype for slot, dtype in dtypes.items() if shapes[slot] is not None}
    # in 16 bits the probabilities are rounded, and so is what the gradients are products of
    return Case(
        shapes,
        given,
        classes=classes,
        ascending=ascending,
        dtypes=dtypes,
        wide=wide,
        # an exponential magnifies a rounding of its argument by the argument, and dropout by its factor that of a
        # result, and again that of a gradient
        magnified=(4.0 if keys > 100 else 1.0) / (1 - given.get("dropout", 0.0)) ** 2,
        inner_roundings=2,
        dtype_roundings=8,
    )


def _draw(draw):
    kv_heads, lead = draw.integer(1, 3), draw.shape(2)
    lengths = lead[draw.integer(0, len(lead)) :] if draw.flag() else None
    attrs = {"causal": draw.flag(), "layout": draw.choice("BSHD", "BHSD"), "softcap": draw.choice(0.0, 1.5)}
    attrs |= {"window": draw.choice(None, (draw.integer(-1, 4), draw.integer(-1, 4)))}
    attrs |= {"scale": draw.choice(None, 0.5), "dropout": draw.choice(0.0, 0.4)}
    queries, keys, heads = draw.size(), draw.size(), kv_heads * draw.integer(1, 3)
    if draw.flag():
        attrs |= {"sequences": draw.integer(0, 3), "of_keys": draw.flag()}
        queries = queries if attrs["of_keys"] else keys

    def broadcast():
        scores = (*lead, heads, queries, keys)
        return tuple(draw.choice(n, 1) for n in scores[draw.integer(0, len(scores)) :]) if draw.flag() else None

    given = {"lengths": lengths, "mask": broadcast(), "bias": broadcast(), "sinks": draw.flag()}
    given["wide"] = ("bias", "sinks") if draw.flag() else ()
    sizes = queries, keys, heads, draw.integer(1, 5)
    return _attention(lead, *sizes, kv_heads=kv_heads, v_dim=draw.size(), **given, **attrs)


_GIVEN = {"q": ((2, 3, 4, 6), F32), "k": ((2, 5, 2, 6), F32), "v": ((2, 5, 2, 7), F32), "lengths": None}
_GIVEN |= dict.fromkeys(("mask", "bias", "sinks", "cu_seqlens", "cu_seqlens_k", "seed"))


def _bad(given, attrs, error, *words) -> Bad:
    return Bad(_GIVEN | given, attrs, error, *words)


def _in_torch(
    torch,
    q,
    k,
    v,
    lengths=None,
    mask=None,
    bias=None,
    sinks=None,
    cu_seqlens=None,
    cu_seqlens_k=None,
    causal=False,
    scale=None,
    window=None,
    softcap=0.0,
    layout="BSHD",
    seed=None,
    dropout=0.0,
):
    """Written out: torch's own function has no window, lengths, sequences or softcap, and its kernels no second
    derivative."""
    if layout == "BSHD":
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias.to(scores.dtype)
    queries, keys = scores.shape[-2:]
    seen = None
    if causal or window or lengths is not None or cu_seqlens is not None:
        query, key = torch.arange(keys - queries, keys, device=q.device), torch.arange(keys, device=q.device)
        if cu_seqlens is not None:
            own, other, query = _sequences(query + queries - keys, key, query, cu_seqlens, cu_seqlens_k)
        seen = _seen(query[:, None], key, lengths, causal, window)
        if cu_seqlens is not None:
            seen = seen & (own[:, None] == other) & (other > 0) & (other < len(cu_seqlens))
    if mask is not None:
        seen = mask if seen is None else seen & mask
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    p = torch.softmax(scores, -1)[..., :keys]
    p = p if seen is None else p * seen
    if dropout:
        p = p * _kept(torch, seed.long(), p.shape, dropout, device=p.device) / (1 - dropout)
    y = p @ v
    return (y.transpose(-3, -2) if layout == "BSHD" else y).contiguous()


ROW = Row(
    attention,
    cases=(
        _attention((2,), 3, 5, 4, 6),
        _attention((2,), 3, 5, 4, 6, causal=True),
        _attention((2,), 5, 3, 4, 6, causal=True),  # the first queries see nothing
        _attention((2,), 3, 5, 4, 6, 2, layout="BHSD", causal=True, scale=0.3),
        _attention((2,), 3, 5, 3, 6, 1, 7, lengths=(2,)),
        _attention((2, 3), 3, 5, 2, 6, lengths=(3,), layout="BHSD"),  # two leading axes
        _attention((2, 3), 3, 5, 2, 6, 1, lengths=(2, 3)),
        _attention((), 3, 5, 2, 6),  # none
        _attention((), 3, 5, 2, 6, lengths=()),
        _attention((2,), 4, 6, 2, 5, window=(1, 2)),
        _attention((2,), 4, 6, 2, 5, window=(2, -1), causal=True, lengths=(2,)),
        _attention((2,), 6, 6, 2, 5, window=(-1, 0), layout="BHSD"),
        _attention((2,), 4, 6, 2, 5, softcap=1.5),
        _attention((2,), 4, 6, 4, 5, 2, softcap=0.7, causal=True, scale=2.0),
        _attention((1,), 1, 1, 1, 1),
        _attention((1,), 1, 1, 1, 1, scale=-1.0),
        _attention((2,), 0, 3, 2, 4),
        _attention((2,), 3, 0, 2, 4),
        _attention((0,), 3, 3, 2, 4, lengths=(0,)),
        _attention((2,), 3, 3, 0, 4),
        _attention((2,), 3, 4, 2, 4, v_dim=0),
        # one for each path of a kernel: blocks of queries and keys, and their ends, head sizes, one query
        _attention((2,), 131, 261, 2, 64, 1, causal=True),
        _attention((1,), 300, 270, 2, 64, layout="BHSD"),
        _attention((2,), 150, 530, 1, 32, lengths=(2,), window=(200, 40)),
        _attention((1,), 140, 140, 4, 96, 2, 128, causal=True),
        _attention((1,), 70, 130, 2, 128, v_dim=40, lengths=(1,), layout="BHSD"),
        _attention((1,), 65, 97, 1, 256, softcap=5.0),
        _attention((2,), 140, 150, 2, 192, 1, 128, causal=True),
        _attention((2,), 70, 200, 1, 256, lengths=(2,)),
        _attention((1,), 20, 2100, 1, 64),  # Hopper's kernel for many keys
        _attention((1,), 40, 300, 3, 80, window=(-1, 3)),
        _attention((1,), 9, 300, 1, 300),
        _attention((3,), 1, 700, 8, 64, 2, lengths=(3,)),
        _attention((1,), 64, 64, 16, 64, causal=True),
        # few queries and keys
        _attention((3,), 5, 7, 8, 128, 2, causal=True),
        _attention((2,), 4, 6, 3, 12, 3, 20, lengths=(2,), window=(2, 1), layout="BHSD"),
        # masks, biases, sinks and packed sequences: each alone, broadcast along each axis, and together
        _attention((2,), 3, 5, 4, 6, mask=(2, 1, 3, 5)),
        _attention((2,), 3, 5, 4, 6, 2, mask=(3, 5), causal=True, layout="BHSD"),
        _attention((2,), 3, 5, 4, 6, bias=(2, 4, 3, 5)),
        _attention((2,), 3, 5, 4, 6, 2, bias=(4, 3, 5), softcap=1.5, wide=("bias",)),
        _attention((2,), 3, 5, 2, 6, bias=(2, 1, 1, 5), layout="BHSD"),
        _attention((2,), 3, 5, 2, 6, bias=(3, 1), causal=True),
        _attention((2, 3), 3, 5, 2, 6, bias=(3, 1, 3, 5), mask=(2, 1, 2, 1, 1)),
        _attention((2, 2), 3, 5, 2, 6, bias=(2, 1, 1, 1, 5)),
        _attention((), 3, 5, 2, 6, bias=(), mask=(5,)),
        _attention((2,), 4, 5, 2, 6, bias=(2, 1, 1, 5), mask=(4, 1), sinks=True, v_dim=3),
        _attention((2,), 3, 5, 4, 6, 2, sinks=True),
        _attention((2,), 5, 3, 4, 6, sinks=True, causal=True, lengths=(2,), wide=("sinks",)),
        _attention((2,), 3, 0, 2, 4, sinks=True, bias=(2, 1, 3, 1)),
        _attention((), 9, 9, 2, 6, 1, sequences=3),
        _attention((2,), 9, 9, 2, 6, sequences=2, causal=True, layout="BHSD", sinks=True),
        _attention((), 9, 9, 2, 6, sequences=2, bias=(9, 9)),
        _attention((), 9, 9, 2, 6, sequences=2, window=(2, 1), sinks=True, mask=(9, 9), bias=(2, 1, 9), softcap=2.0),
        _attention((), 3, 3, 2, 6, sequences=0),  # none
        _attention(
            *((2,), 4, 5, 6, 5, 1),
            **{
                "lengths": (2,),
                "mask": (2, 1, 4, 5),
                "bias": (6, 4, 5),
                "sinks": True,
                "sequences": 2,
                "of_keys": True,
                "dropout": 0.2,
            },
        ),
        _attention((2,), 140, 270, 4, 64, 2, mask=(2, 1, 140, 270), causal=True),
        _attention((2,), 140, 270, 2, 64, bias=(1, 2, 140, 270), wide=("bias",), layout="BHSD"),
        _attention((1,), 140, 270, 2, 64, bias=(2, 140, 270)),  # Hopper's, as the next one
        _attention((1,), 140, 270, 2, 128, 1, mask=(140, 270), causal=True),
        _attention((2,), 140, 270, 2, 96, bias=(2, 1, 1, 270), mask=(140, 1), sinks=True, v_dim=128),
        _attention((1,), 65, 97, 2, 256, bias=(2, 65, 1), window=(20, 7), softcap=5.0),
        # rows of a bias that no word of several keys fits, which ends with the last key of the last head; sinks alone,
        # where a head is larger than a mask's kernels take
        _attention((2,), 77, 301, 4, 40, 2, 64, mask=(2, 1, 77, 1), bias=(4, 1, 301)),
        _attention((2,), 77, 301, 4, 128, 2, bias=(4, 1, 301), wide=("bias",), causal=True),
        _attention((1,), 70, 136, 2, 64, 1, bias=(2, 70, 136), scale=1e-40),  # whose reciprocal is no float
        _attention((1,), 130, 130, 2, 160, sinks=True),
        _attention((2,), 150, 140, 4, 64, 2, sinks=True, causal=True, lengths=(2,)),
        _attention((1,), 70, 200, 2, 128, 1, sinks=True, window=(30, 5)),
        _attention((), 600, 600, 2, 64, 1, sequences=6, causal=True, sinks=True),
        _attention((), 300, 300, 2, 128, sequences=5, window=(40, 9), bias=(300, 300)),
        # sequences of keys of their own
        _attention((), 7, 12, 4, 6, 2, sequences=3, of_keys=True),
        _attention((2,), 12, 7, 2, 6, sequences=2, of_keys=True, causal=True, layout="BHSD", sinks=True),
        _attention((), 9, 9, 2, 6, sequences=3, of_keys=True, window=(2, 1), mask=(9, 9), bias=(2, 1, 9)),
        _attention((2,), 5, 8, 2, 6, lengths=(2,), sequences=2, of_keys=True, window=(-1, 1), softcap=2.0),
        _attention((), 3, 5, 2, 6, sequences=0, of_keys=True),
        _attention((), 200, 500, 4, 64, 2, sequences=5, of_keys=True, causal=True),
        _attention((), 500, 200, 2, 128, sequences=5, of_keys=True, window=(60, 30), bias=(2, 1, 200)),
        # dropout
        _attention((2,), 3, 5, 4, 6, 2, dropout=0.3),
        _attention((2, 3), 5, 7, 2, 4, layout="BHSD", causal=True, dropout=0.5, seed="int32"),
        _attention(
            (2,), 4, 6, 2, 5, lengths=(2,), mask=(2, 1, 4, 6), bias=(4, 6), sinks=True, softcap=1.5, dropout=0.2
        ),
        _attention((), 9, 9, 2, 6, 1, sequences=3, window=(3, -1), dropout=0.7),
        _attention((2,), 3, 0, 2, 4, dropout=0.5),
        _attention((2,), 0, 3, 2, 4, dropout=0.5),
        _attention((2,), 140, 270, 4, 64, 2, causal=True, dropout=0.1),
        _attention((2,), 150, 330, 2, 128, 1, lengths=(2,), window=(200, 40), layout="BHSD", dropout=0.2),
        _attention((2,), 77, 301, 4, 40, 2, 64, bias=(4, 1, 301), mask=(2, 1, 77, 1), sinks=True, dropout=0.3),
        _attention((2,), 70, 130, 2, 104, bias=(70, 130), softcap=5.0, dropout=0.5, seed="int32"),
        _attention((1,), 65, 97, 1, 256, dropout=0.4),
        _attention((), 300, 300, 2, 64, sequences=4, causal=True, dropout=0.1),
    ),
    draw=_draw,
    bad=(
        _bad({"q": ((4, 6), F32)}, {}, ValueError, "q has shape (4, 6)", "(..., sequence, heads, head_dim)"),
        _bad({"v": ((5, 7), F32)}, {}, ValueError, "v has shape (5, 7)", "(..., sequence, heads, head_dim)"),
        _bad({"q": ((2, 3, 4, 6), I64)}, {}, TypeError, "q has dtype int64", "expected float16"),
        _bad({"k": ((2, 5, 2, 6), F64)}, {}, TypeError, "k has dtype float64", "expected float32"),
        _bad({"v": ((2, 5, 2, 7), F64)}, {}, TypeError, "v has dtype float64", "expected float32"),
        _bad({"k": ((2, 5, 2, 5), F32)}, {}, ValueError, "k has shape (2, 5, 2, 5)", "head_dim of q", "(2, 3, 4, 6)"),
        _bad({"k": ((3, 5, 2, 6), F32)}, {}, ValueError, "k has shape (3, 5, 2, 6)", "leading axes"),
        _bad({"k": ((2, 5, 3, 6), F32)}, {}, ValueError, "of 3 heads", "a divisor of q's 4 heads"),
        _bad({"v": ((2, 4, 2, 7), F32)}, {}, ValueError, "v has shape (2, 4, 2, 7)", "that of k", "(2, 5, 2, 6)"),
        _bad({"q": ((2, 3, 4, 0), F32)}, {}, ValueError, "q has shape (2, 3, 4, 0)", "head_dim of at least 1"),
        _bad({"lengths": ((3,), I64)}, {}, ValueError, "lengths has shape (3,)", "leading axes of q"),
        _bad({"lengths": ((2,), F32)}, {}, TypeError, "lengths has dtype float32", "int32 or int64"),
        _bad({"v": None}, {}, TypeError, "v is None", "expected"),
        _bad({"mask": ((3, 5), F32)}, {}, TypeError, "mask has dtype float32", "expected bool"),
        _bad({"mask": ((3, 4), "bool")}, {}, ValueError, "mask has shape (3, 4)", "broadcasts to", "(2, 4, 3, 5)"),
        _bad({"bias": ((3, 5), I64)}, {}, TypeError, "bias has dtype int64", "expected float16"),
        _bad({"bias": ((3, 5), F64)}, {}, TypeError, "bias has dtype float64", "expected float32"),
        _bad({"bias": ((2, 3, 3, 5), F32)}, {}, ValueError, "bias has shape (2, 3, 3, 5)", "(2, 4, 3, 5)"),
        _bad({"bias": ((1, 2, 4, 3, 5), F32)}, {}, ValueError, "bias has shape (1, 2, 4, 3, 5)", "broadcasts to"),
        _bad({"sinks": ((2,), F32)}, {}, ValueError, "sinks has shape (2,)", "expected (4,)", "each head of q"),
        _bad({"sinks": ((4,), F64)}, {}, TypeError, "sinks has dtype float64", "expected float32"),
        _bad({"cu_seqlens": ((2,), F32)}, {}, TypeError, "cu_seqlens has dtype float32", "int32 or int64"),
        _bad({"cu_seqlens": ((0,), I64)}, {}, ValueError, "cu_seqlens has shape (0,)", "(sequences + 1,)"),
        _bad({"cu_seqlens": ((2,), I64)}, {}, ValueError, "k has shape (2, 5, 2, 6)", "as many keys", "3"),
        _bad({"cu_seqlens_k": ((2,), I64)}, {}, ValueError, "cu_seqlens is absent", "with cu_seqlens_k"),
        _bad(
            {"cu_seqlens": ((2,), I64), "cu_seqlens_k": ((2,), F32)},
            {},
            TypeError,
            "cu_seqlens_k has dtype float32",
            "int32 or int64",
        ),
        _bad(
            {"cu_seqlens": ((2,), I64), "cu_seqlens_k": ((2,), "int32")},
            {},
            TypeError,
            "cu_seqlens_k has dtype int32",
            "expected int64",
        ),
        _bad(
            {"cu_seqlens": ((2,), I64), "cu_seqlens_k": ((3,), I64)},
            {},
            ValueError,
            "cu_seqlens_k has shape (3,)",
            "that of cu_seqlens, (2,)",
        ),
        _bad({"seed": ((2,), F32)}, {"dropout": 0.5}, TypeError, "seed has dtype float32", "int32 or int64"),
        _bad({"seed": ((3,), I64)}, {"dropout": 0.5}, ValueError, "seed has shape (3,)", "expected (2,)"),
        _bad({}, {"dropout": 0.5}, ValueError, "seed is absent", "with dropout"),
        _bad({"seed": ((2,), I64)}, {"dropout": 1.0}, ValueError, "dropout is 1", "from 0 on and below 1"),
        _bad({"seed": ((2,), I64)}, {"dropout": -0.5}, ValueError, "dropout is -0.5", "from 0 on and below 1"),
        _bad({}, {"window": (1,)}, ValueError, "window is (1,)", "(left, right)"),
        _bad({}, {"window": (1, -2)}, ValueError, "window is (1, -2)", "-1 for all"),
        _bad({}, {"scale": float("inf")}, ValueError, "scale is inf", "finite"),
        _bad({}, {"softcap": -1.0}, ValueError, "softcap is -1", "at least 0"),
        _bad({}, {"causal": 1}, TypeError, "causal is 1", "True or False"),
        _bad({}, {"layout": "SBHD"}, ValueError, "layout is 'SBHD'", "'BSHD' or 'BHSD'"),
    ),
    torch=_in_torch,
    samples={
        "": _attention((2,), 3, 4, 2, 4, 1),
        "causal": _attention((2,), 3, 5, 4, 4, 2, causal=True, layout="BHSD"),
        "biased": _attention((2,), 3, 4, 2, 4, 1, bias=(2, 3, 4), sinks=True),
    },
    opcheck=(
        _attention((2,), 3, 5, 2, 4, lengths=(2,), window=(2, 1), softcap=2.0, scale=0.4),
        _attention((2,), 3, 5, 2, 4, mask=(2, 1, 3, 5), bias=(2, 1, 5)),
        _attention((), 5, 5, 2, 4, sequences=2, sinks=True, causal=True),
        _attention((), 5, 8, 2, 4, sequences=2, of_keys=True, causal=True),
        _attention((2,), 3, 5, 2, 4, 1, dropout=0.5),
    ),
    bench=(
        Attention("qkk", "q", ("qqqkk", "qkk"), call=lambda f, shape: lambda q, k, v: f.attention(q, k, v)),
        Attention(
            "qkk",
            "q",
            ("qqqkk", "qkk"),
            "causal",
            call=lambda f, shape: lambda q, k, v: f.attention(q, k, v, causal=True),
        ),
    ),
    complex=True,
)
