"""Attention of a decoder's step to a cache of keys and values."""

from __future__ import annotations

from ..op import Autocast, Product, operator


def _keys(call):
    """The most keys that an example has."""
    _, block_size, _, _ = call.k_cache
    return block_size if call.block_table is None else call.block_table[1] * block_size


def _flops(call):
    """The operations of all pairs of a query and a key that there may be."""
    batch, queries, heads, dim = call.q
    return 2 * batch * queries * heads * _keys(call) * (dim + call.v_cache[-1])


def _dims(call):
    """Examples are independent; heads where each of the keys has one of the queries; and the head_dim of v."""
    q_heads, kv_heads = ("h", "h") if call.q[2] == call.k_cache[2] else ("H", "K")
    lead = "n T" if call.block_table is None else "P T"
    return {
        "q": f"n Q {q_heads} D",
        "k_cache": f"{lead} {kv_heads} D",
        "v_cache": f"{lead} {kv_heads} e",
        "lengths": "n",
        "block_table": "n M",
        "y": f"n Q {q_heads} e",
    }


@operator(
    inputs=("q", "k_cache", "v_cache", "lengths", "block_table"),
    outputs=("y",),
    workspace=("workspace",),
    optional=("block_table",),
    attrs={"scale": "float?", "window": "int?", "softcap": "float"},
    shapes={"y": lambda call: (*call.q[:-1], call.v_cache[-1])},
    dims=_dims,
    product=Product(factors=(("q", "k_cache"), "v_cache"), flops=_flops, bilinear=False),
    autocast=Autocast.LOWER,
)
def paged_attention(q, k_cache, v_cache, lengths, block_table=None, scale=None, window=None, softcap=0.0):
    """``attention`` of the last few queries of each example to a cache of its keys and values, for a decoder's step. It
    has no gradient. The keys are split into chunks, so that one example keeps a GPU busy.

    The queries of an example are those of the last of its ``lengths`` keys, and each sees no key after its own: query i
    is at ``lengths - queries + i``. One that sees no key has a result of 0.

    Args:
        q: (batch, queries, heads, head_dim); float16, bfloat16, float32 or float64. Made for 1 to 16 queries; more are
            as right.
        k_cache: (batch, keys, kv_heads, head_dim), of q's dtype; with a ``block_table``, (blocks, block_size, kv_heads,
            head_dim). Each of its heads is shared by heads / kv_heads adjacent ones of q.
        v_cache: likewise, of any head_dim.
        lengths: the number of keys of each example, with those of the queries; (batch,), int32 or int64. Those after
            them are not read.
        block_table: key j of example b is row ``j % block_size`` of block ``block_table[b, j // block_size]``; (batch,
            the most blocks of an example), int32 or int64. Blocks of keys that no query sees are not read, and may have
            any number.
        scale: None for ``head_dim ** -0.5``.
        window: a query sees so many keys before its own; None for all.
        softcap: if not 0, scores are ``softcap * tanh(scores / softcap)``.

    Returns:
        (batch, queries, heads, head_dim of v_cache), of q's dtype. Sums are taken in float32 (float64 for float64). In
        16 bits the probabilities are rounded before they are multiplied.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes; lengths or a block_table that are not int32 or int64.
        ValueError: shapes that do not fit; a scale or softcap that is not finite, a softcap or window below 0; tensors
            on different devices; on the CPU, a length or a block that there is not. On a GPU the results of such an
            example are NaN.
        NotImplementedError: a gradient is asked for (in MindSpore RuntimeError, and not of this text).

    Source: Kwon et al., arXiv:2309.06180; the split: Dao et al., https://pytorch.org/blog/flash-decoding.
    """
    return (q, k_cache, v_cache, lengths, block_table), (scale, window, softcap)
