"""Packed projections of queries, keys and values: what ``qkv_rope`` and ``qkv_attention`` share."""

from __future__ import annotations


def head_counts(heads, kv_heads):
    """The heads of q, k and v."""
    return heads, *(2 * [heads if kv_heads is None else kv_heads])


def split(m, qkv, counts, grouped):
    """q, k and v: (..., sequence, heads, head_dim)."""
    heads, kv_heads, _ = counts
    *lead, row = qkv.shape
    dim = row // sum(counts)
    if grouped:  # as if each group were a row
        qkv = m.reshape(qkv, (*lead, kv_heads, row // kv_heads))
    of_q = (heads // kv_heads if grouped else heads) * dim
    of_k = dim if grouped else kv_heads * dim
    parts = qkv[..., :of_q], qkv[..., of_q : of_q + of_k], qkv[..., of_q + of_k :]
    return tuple(m.reshape(x, (*lead, n, dim)) for x, n in zip(parts, counts, strict=True))


def joined(m, parts, counts, grouped):
    """dqkv of its parts, (..., sequence, heads, head_dim)."""
    *lead, _, dim = parts[0].shape
    _, kv_heads, _ = counts

    def rows(n):
        return (*lead, kv_heads, n // kv_heads * dim) if grouped else (*lead, n * dim)

    joined = m.concatenate([m.reshape(x, rows(n)) for x, n in zip(parts, counts, strict=True)])
    return m.reshape(joined, (*lead, sum(counts) * dim))
