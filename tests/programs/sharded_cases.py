"""Cases of calls that sharded.py and sharded_jax.py split, by shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotops.testing import Case


def norm(shape: tuple[int, ...], n: int, *parameters: str, rows: Sequence[str] = ("x",), **attrs: Any) -> Case:
    shapes: dict[str, Any] = dict.fromkeys(rows, shape) | dict.fromkeys(parameters, shape[-n:])
    return Case(shapes, {"normalized_shape": shape[-n:], **attrs})


def linear(x: tuple[int, ...], out: int, bias: bool = False, **attrs: Any) -> Case:
    return Case({"x": x, "weight": (out, x[-1]), "bias": (out,) if bias else None}, attrs)


def head(x: tuple[int, ...], out: int, reduction: str, bias: bool = False, weights: bool = False, **attrs: Any) -> Case:
    shapes: dict[str, Any] = {"x": x, "weight": (out, x[-1]), "bias": (out,) if bias else None, "target": x[:-1]}
    shapes |= {"class_weight": (out,)} if weights else {}
    constants = ("class_weight",) if weights else ()
    return Case(shapes, {"reduction": reduction, **attrs}, classes={"target": out}, constants=constants)


def rope(x: tuple[int, ...], table: tuple[int, ...], positions: tuple[int, ...] | None = None, **attrs: Any) -> Case:
    shapes = {"x": x, "cos": table, "sin": table, "positions": positions}
    return Case(shapes, attrs, classes={"positions": table[0]} if positions else {})


def qkv(qkv: tuple[int, ...], table: Any, positions: tuple[int, ...] | None = None, **attrs: Any) -> Case:
    shapes = {"qkv": qkv, "cos": table, "sin": table, "positions": positions}
    return Case(shapes, {"heads": 2, "kv_heads": 1, **attrs}, classes={"positions": table[0]} if positions else {})


def attention(lead: tuple[int, ...], kv_heads: int, lengths: tuple[int, ...] | None = None, **given: Any) -> Case:
    """``bias``, ``sinks``: their shapes; else attributes. v's heads are of 8 with dropout, which splits these alone."""
    of_v = 8 if given.get("dropout") else 6
    shapes = {"q": (*lead, 8, 4, 6), "k": (*lead, 5, kv_heads, 6), "v": (*lead, 5, kv_heads, of_v)}
    shapes |= {"lengths": lengths, **{slot: given.pop(slot, None) for slot in ("bias", "sinks")}}
    shapes["seed"] = (2,) if given.get("dropout") else None
    classes = {"lengths": 6, "seed": 2**31}
    return Case(shapes, given, classes={slot: n for slot, n in classes.items() if shapes[slot] is not None})


def decoding(keys: int, kv_heads: int, block_size: int | None = None, **attrs: Any) -> Case:
    lead, table = ((8, keys), None) if block_size is None else ((12, block_size), (8, keys // block_size))
    shapes = {"q": (8, 2, 4, 6), "k_cache": (*lead, kv_heads, 6), "v_cache": (*lead, kv_heads, 8)}
    return Case(
        shapes | {"lengths": (8,), "block_table": table},
        attrs,
        classes={"lengths": keys + 1} | ({"block_table": 12} if block_size else {}),
    )


SHARED: dict[str, list[Case]] = {
    "gelu": [Case({"x": (8, 6)}, {"approximate": "tanh"})],
    "swiglu": [Case({"gate": (8, 6), "up": (8, 6)})],
    "attention": [
        attention((4,), 4),
        attention((4,), 2, (4,), causal=True),
        attention((2, 4), 4, (4,), window=(2, 1), softcap=2.0),
        attention((4,), 4, bias=(4, 8, 5), sinks=(4,)),
        attention((4,), 4, bias=(4, 1, 1, 5), causal=True),
        attention((4,), 2, (4,), causal=True, dropout=0.4),
    ],
    "paged_attention": [decoding(9, 4), decoding(8, 2, 4, window=5, softcap=2.0)],
    "batch_norm": [
        Case({"x": (4, 8, 6), "weight": (8,), "bias": (8,)}),
        Case({"x": (4, 6, 8), "weight": None, "bias": (8,)}, {"axis": -1, "activation": "silu"}),
    ],
    "batch_norm_relu": [Case({"x": (4, 8, 6), "weight": (8,), "bias": (8,), "residual": (4, 8, 6)})],
    "lltm": [Case({"input": (8, 5), "weights": (12, 9), "bias": (1, 12), "old_h": (8, 4), "old_cell": (8, 4)})],
}
