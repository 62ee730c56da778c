"""An entry of a library as a primitive of MindSpore's, ``ops.Custom``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import ops

from aotops.extra import encode_foreign
from aotops.infer import UNKNOWN_RANK, infer
from aotops.op import Attr, Op
from aotops.spec import TensorSpec


class Facts(NamedTuple):
    """The facts of a call, besides the operator and the slots that are present: a part of keys of caches."""

    attrs: tuple[Attr, ...]
    device: str
    dtypes: tuple[tuple[str, str], ...] = ()
    """The slots' dtypes, if MindSpore is told them (``primitive``)."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The slots' shapes, if MindSpore is told them: where only Python can infer them."""


def primitive(
    op: Op, facts: Facts, given: Sequence[str], wanted: Sequence[str], bprop: Callable[..., Any] | None = None
) -> ops.Custom:
    """An entry bound to its attributes and to the slots that are present.

    The library infers shapes and dtypes, because graph mode asks for them without Python, with dynamic shapes and in a
    program loaded from a file. With 0-dim tensors ``facts`` states the dtypes instead: MindSpore turns a 0-dim result
    whose dtype the library inferred into a number and, after ``set_inputs`` in PyNative mode, raises.
    """
    dtypes, shapes = dict(facts.dtypes), dict(facts.shapes)
    entry = op.library.entry_name(op, facts.device)
    one, known = len(op.entry_outputs) == 1, all(name in dtypes for name in wanted)
    types = tuple(ms.dtype.TensorType(getattr(ms, dtypes[name])) for name in wanted) if known else None
    file = op.library.functions_of(op).real_path()
    told = tuple(shapes[name] for name in wanted) if shapes else None
    shape = told[0] if told and one else told
    primitive = ops.Custom(f"{file}:{entry}", shape, types[0] if types and one else types, "aot", bprop)
    primitive.add_prim_attr("reg_op_name", primitive.uniq_name)  # MindSpore 2.10 needs it to infer in C++
    primitive.add_prim_attr("multi_output", not one)
    if op.mutates:
        primitive.add_prim_attr("side_effect_mem", True)
    if op.foreign is not None:
        known_dtypes = [dtypes[slot] for slot in (*op.inputs, *op.outputs)]
        primitive.add_prim_attr("hosted", encode_foreign(op, facts.attrs, known_dtypes))
        return primitive
    for name, value in entry_attrs(op, facts.attrs, given, wanted).items():
        primitive.add_prim_attr(name, value)
    return primitive


def entry_attrs(op: Op, attrs: Sequence[Attr], given: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    """The attributes that an entry reads from its AotExtra. MindSpore's own floats are float32: a decimal string keeps
    the digits."""
    values = {name: value for name, value in zip(op.attrs, attrs, strict=True) if value is not None}
    plain = {name: repr(value) if isinstance(value, float) else value for name, value in values.items()}
    return {**plain, "inputs": mask(op.inputs, given), "outputs": mask(op.entry_outputs, wanted)}


def mask(slots: Sequence[str], present: Sequence[str]) -> int:
    return sum(1 << i for i, slot in enumerate(slots) if slot in present)


def facts_of_backward(op: Op, backward: Op, facts: Facts) -> Facts:
    """The dtypes of a hosted backward's slots, and their shapes, where they are known."""
    shapes = dict(facts.shapes)
    specs = {slot: TensorSpec(shapes.get(slot, (UNKNOWN_RANK,)), dtype) for slot, dtype in facts.dtypes}
    specs |= {f"d{y}": specs[y] for y in op.outputs}
    taken = tuple(specs[slot] for slot in backward.inputs)
    named = dict(zip(backward.inputs, taken, strict=True)) | infer(backward, facts.attrs, taken, facts.device)
    dtypes = tuple((slot, spec.dtype) for slot, spec in named.items())
    return Facts(facts.attrs, facts.device, dtypes, tuple((slot, spec.shape) for slot, spec in named.items() if shapes))
