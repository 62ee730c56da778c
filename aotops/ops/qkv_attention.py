"""Scaled dot-product attention of a packed projection."""

from __future__ import annotations

from math import prod

from ..op import Autocast, Product, operator
from ._qkv import head_counts, joined, split
from .attention import _backward_formula as attention_backward_formula
from .attention import _formula as attention_formula

# -------------------------------------------------------------------------------------------------------------- shapes


def _head_dim(call):
    return call.qkv[-1] // sum(head_counts(call.heads, call.kv_heads))


def _shape(call):
    return (*call.qkv[:-1], call.heads * _head_dim(call))


def _lse_shape(call):
    return (*call.qkv[:-2], call.heads, call.qkv[-2])


def _flops(call):
    """The operations of all pairs of a query and a key, seen or not."""
    return 4 * prod(call.qkv[:-2]) * call.heads * call.qkv[-2] ** 2 * _head_dim(call)


# ------------------------------------------------------------------------------------------------------------ sharding


def _backward_dims(call):
    stated = _dims(call)
    return stated | {"dy": stated["y"], "dqkv": stated["qkv"]}


def _dims(call):
    """Leading axes are independent; rows and their heads are taken whole."""
    lead = " ".join(["...", *(f"b{i}" for i in range(len(call.lengths or ()), 0, -1))])
    lengths = "" if call.lengths is None else lead.removeprefix("... ").removeprefix("...")
    return {"qkv": f"{lead} S R", "y": f"{lead} S Y", "lse": f"{lead} H S", "lengths": lengths}


# ------------------------------------------------------------------------------------------------------------ formulas


def _formula(m, qkv, lengths, heads, kv_heads, causal, scale, window, softcap):
    q, k, v = split(m, qkv, head_counts(heads, kv_heads), False)
    options = causal, scale, window, softcap, "BSHD", 0.0
    y = attention_formula(m, q, k, v, lengths, *(None,) * 6, *options)
    return m.reshape(y, (*qkv.shape[:-1], heads * q.shape[-1]))


def _backward_formula(m, dy, qkv, lengths, heads, kv_heads, causal, scale, window, softcap):
    of = head_counts(heads, kv_heads)
    q, k, v = split(m, qkv, of, False)
    dy = m.reshape(dy, q.shape)
    options = causal, scale, window, softcap, "BSHD", 0.0
    found = attention_backward_formula(m, dy, q, k, v, lengths, *(None,) * 6, *options)
    return joined(m, found[:3], of, False)


# ---------------------------------------------------------------------------------------------------------- definition


@operator(
    inputs=("qkv", "lengths"),
    outputs=("y",),
    residuals=("lse",),
    optional=("lengths",),
    attrs={
        "heads": "int",
        "kv_heads": "int?",
        "causal": "bool",
        "scale": "float?",
        "window": "int[]",
        "softcap": "float",
    },
    shapes={"y": _shape, "lse": _lse_shape},
    dims=_dims,
    formula=_formula,
    product=Product(factors=("qkv", "qkv"), flops=_flops, bilinear=False),
    vmappable=("qkv", "y", "lse"),
    min_rank=2,
    always_save_residuals=True,
    autocast=Autocast.LOWER,
    backward={
        "inputs": ("dy", "qkv", "lengths", "y", "lse"),
        "outputs": ("dqkv",),
        "workspace": ("workspace",),
        "optional": ("lengths", "lse"),
        "same_spec_as": {"dqkv": "qkv"},
        "dims": _backward_dims,
        "formula": _backward_formula,
        "vmappable": ("dy", "qkv", "y", "lse", "dqkv"),
        "min_rank": 2,
    },
)
def qkv_attention(qkv, heads, kv_heads=None, lengths=None, causal=False, scale=None, window=None, softcap=0.0):
    """``attention`` of the parts of the packed result of one projection, which are read where they are:
    ``attention(*split(qkv))``, where nothing rotates q and k, as in GPT-2, BERT and a vision transformer. The gradient
    is written as the projection's backward takes it. Neither the parts nor their gradients are copied.

    Args:
        qkv: (..., sequence, (heads + 2 kv_heads) head_dim): the heads of q, then those of k, then those of v; float16,
            bfloat16, float32 or float64.
        heads: the heads of q.
        kv_heads: those of k, and those of v, a divisor of heads. None for as many.
        lengths: the number of keys, from the first on, that there are; int32 or int64, of the shape of the leading axes
            of qkv, or of the last of them.
        causal, scale, window, softcap: as for ``attention``.

    Returns:
        (..., sequence, heads head_dim), of qkv's dtype: a row as the projection after it takes it.

    Raises:
        TypeError: a dtype that is not accepted; lengths that are not int32 or int64.
        ValueError: shapes that do not fit; a kv_heads that does not divide heads; and what ``attention`` raises it for.

    Source: Dao, arXiv:2307.08691.
    """
    window = (-1, -1) if window is None else window
    return (qkv, lengths), (heads, kv_heads, causal, scale, window, softcap)
