"""Queries, keys and values of a packed projection, with rotary position embedding."""

from __future__ import annotations

from ..op import Autocast, operator
from ._qkv import head_counts, joined, split
from ._rope import gradient_dims, rotated_heads, sequence_axis, table_dims, table_gradients

# -------------------------------------------------------------------------------------------------------------- shapes


def _shape(tensor):
    """The shape of q, k or v. ``tensor``: its number."""

    def shape(call):
        counts = head_counts(call.heads, call.kv_heads)
        *lead, seq, row = call.qkv
        n, dim = counts[tensor], row // sum(counts)
        return (*lead, n, seq, dim) if call.layout == "BHSD" else (*lead, seq, n, dim)

    return shape


def _packed_shape(call):
    seq, row = call.dq[sequence_axis(call.layout)], sum(head_counts(call.heads, call.kv_heads)) * call.dq[-1]
    return (*call.dq[:-3], seq, row)


def _table_shape(call):
    """The gradient of a table that is absent has no elements."""
    return (0,) if call.cos is None else call.cos


# ------------------------------------------------------------------------------------------------------------ sharding


def _stated(call, qkv, packed, separate):
    """The heads of a row are one axis of qkv, which is taken whole. ``qkv``: its shape."""
    tables, seq, lead = table_dims(call, qkv[:-2], qkv[-2])
    lead = " ".join(["...", *lead])
    heads = {slot: "Q" if slot in ("q", "dq") else "K" for slot in separate}
    rows = {
        slot: f"{lead} {h} {seq} D" if call.layout == "BHSD" else f"{lead} {seq} {h} D" for slot, h in heads.items()
    }
    return rows | dict.fromkeys(packed, f"{lead} {seq} R") | tables


def _dims(call):
    return _stated(call, call.qkv, ("qkv",), ("q", "k", "v"))


def _backward_dims(call):
    return gradient_dims(_stated(call, _packed_shape(call), ("qkv", "dqkv"), ("dq", "dk", "dv")))


# ------------------------------------------------------------------------------------------------------------ formulas


def _formula(m, qkv, cos, sin, positions, heads, kv_heads, interleaved, layout, rotary_dim, grouped):
    q, k, v = split(m, qkv, head_counts(heads, kv_heads), grouped)
    if cos is not None:
        q, k = (rotated_heads(m, x, cos, sin, positions, interleaved, "BSHD", rotary_dim) for x in (q, k))
    return tuple(_laid_out(m, x, layout) for x in (q, k, v))


def _backward_formula(
    m, dq, dk, dv, qkv, cos, sin, positions, heads, kv_heads, interleaved, layout, rotary_dim, grouped
):
    counts = head_counts(heads, kv_heads)
    given = [_laid_out(m, m.wide(d), layout) for d in (dq, dk, dv)]
    if cos is None:
        dqkv = joined(m, given, counts, grouped)
        nothing = m.reshape(dqkv[..., :0], (0,))
        return dqkv, nothing, nothing
    rotation = interleaved, "BSHD", rotary_dim
    turned = [rotated_heads(m, d, cos, sin, positions, *rotation, back=True) for d in given[:2]]
    dqkv = joined(m, [*turned, given[2]], counts, grouped)
    if qkv is None:  # nobody wants these
        return dqkv, m.zeros(cos), m.zeros(sin)
    of_q, of_k = (
        table_gradients(m, d, x, cos, positions, *rotation)
        for d, x in zip(given[:2], split(m, qkv, counts, grouped)[:2], strict=True)
    )
    return dqkv, of_q[0] + of_k[0], of_q[1] + of_k[1]


def _laid_out(m, x, layout):
    """(..., sequence, heads, head_dim) in this layout, or the other way."""
    return m.swapaxes(x, x.ndim - 3, x.ndim - 2) if layout == "BHSD" else x


# ---------------------------------------------------------------------------------------------------------- definition


@operator(
    inputs=("qkv", "cos", "sin", "positions"),
    outputs=("q", "k", "v"),
    optional=("cos", "sin", "positions"),
    attrs={
        "heads": "int",
        "kv_heads": "int?",
        "interleaved": "bool",
        "layout": "str",
        "rotary_dim": "int?",
        "grouped": "bool",
    },
    shapes={"q": _shape(0), "k": _shape(1), "v": _shape(2)},
    dims=_dims,
    formula=_formula,
    saved_for={"qkv": ("cos", "sin")},
    vmappable=("qkv", "q", "k", "v"),
    min_rank=2,
    autocast=Autocast.IF_REFUSED,
    backward={
        "inputs": ("dq", "dk", "dv", "qkv", "cos", "sin", "positions"),
        "outputs": ("dqkv", "dcos", "dsin"),
        "optional": ("qkv", "cos", "sin", "positions", "dqkv", "dcos", "dsin"),
        "shapes": {"dqkv": _packed_shape, "dcos": _table_shape, "dsin": _table_shape},
        "dims": _backward_dims,
        "formula": _backward_formula,
        "vmappable": ("dq", "dk", "dv", "qkv", "dqkv"),
        "min_rank": 2,
    },
)
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
    """Queries, keys and values as attention takes them, of the packed result of one projection, in one pass:
    ``q, k, v = split(qkv)``, and ``rope`` of q and k.

    Args:
        qkv: (..., sequence, (heads + 2 kv_heads) head_dim): the heads of q, then those of k, then those of v; float16,
            bfloat16, float32 or float64.
        cos, sin: as for ``rope``, or both None: then nothing is rotated, as in GPT-2, BERT and a vision transformer.
        heads: the heads of q.
        kv_heads: those of k, and those of v. None for as many.
        interleaved, positions, rotary_dim: as for ``rope``.
        layout: of q, k and v: "BSHD" for (..., sequence, heads, head_dim), or "BHSD" for (..., heads, sequence,
            head_dim).
        grouped: qkv is packed by heads of k, as in Megatron, and in GPT-NeoX, where kv_heads is heads: for each of them
            the heads / kv_heads heads of q that share it, then k, then v.

    Returns:
        q, k and v, contiguous and of qkv's dtype. q and k are rounded once; v is a copy. The gradient of qkv is
        contiguous too; qkv is kept for the gradients of cos and sin alone.

    Raises:
        TypeError: a dtype that is not accepted.
        ValueError: shapes that do not fit; a kv_heads that does not divide heads, if grouped; one of cos and sin
            without the other; positions or a rotary_dim without them; and what ``rope`` raises it for.

    Source: Su et al., arXiv:2104.09864.
    """
    return (qkv, cos, sin, positions), (heads, kv_heads, interleaved, layout, rotary_dim, grouped)
