"""Primitives with MindSpore's registration information."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import mindspore as ms
from mindspore import ops

from aotops.infer import infer
from aotops.library import Library
from aotops.op import Attr, Op
from aotops.ops import BUILTIN
from aotops.spec import FLOATING, INTEGERS, TensorSpec

from .entries import Facts, entry_attrs
from .primitives import differentiable
from .specs import device, spec_of


def registered(name: str, *arguments: Any, library: Library = BUILTIN, **keywords: Any) -> ops.Custom:
    """The primitive of an operator, with MindSpore's registration information (``ops.CustomRegOp``): the names of its
    tensors, the dtypes that it takes, and its attributes. MindSpore then checks the dtypes of each call.

    Args:
        name: the operator's.
        arguments, keywords: those of its function. The tensors are examples: which are given, and their ranks.

    Returns:
        A function of the tensors that are given, in the order of the operator's inputs, which returns every output of
        the entry, residuals and workspace too. It is differentiable as the function is.

    Raises:
        ValueError: MindSpore wants the same attributes of each registration of an entry in a process: one that is None
            here and was not before, or the other way round.
        NotImplementedError: a hosted operator; tensors of different shapes, of an operator that broadcasts.
    """
    op = library.ops[name]
    if op.foreign is not None:
        raise NotImplementedError(f"{name}: a hosted operator cannot be registered: call its function")
    inputs, attrs = op.bind(*arguments, **keywords)
    attrs = op.canonical(attrs)
    specs = {slot: spec for slot, t in zip(op.inputs, inputs, strict=True) if (spec := spec_of(op, slot, t))}
    if op.broadcast and len({spec.shape for spec in specs.values()}) > 1:
        raise NotImplementedError(f"{name}: tensors of different shapes cannot be registered: call its function")
    plain = differentiable(op, tuple(specs), Facts(attrs, device()))
    entry = op.library.entry_name(op, device())
    info = ops.CustomRegOp(f"{entry}_{zlib.crc32(repr((attrs, tuple(specs))).encode()):x}")
    for i, slot in enumerate(specs):
        info.input(i, slot)
    for i, slot in enumerate(op.entry_outputs):
        info.output(i, slot)
    for dtypes in _dtype_rows(op, attrs, specs):
        info.dtype_format(*(getattr(ops.DataType, f"{_DATA_TYPES[dtype]}_Default") for dtype in dtypes))
    for attr, value in entry_attrs(op, attrs, tuple(specs), op.entry_outputs).items():
        info.attr(attr, "required", "all", value=value)
    reg_info = info.target(ms.get_context("device_target")).get_op_info()
    file = op.library.functions_of(op).real_path()
    primitive = ops.Custom(f"{file}:{entry}", None, None, "aot", plain.bprop, reg_info)
    primitive.add_prim_attr("multi_output", len(op.entry_outputs) > 1)
    return primitive


_DATA_TYPES = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "int32": "I32", "int64": "I64",
    "uint8": "U8", "int8": "I8", "bool": "BOOL", "int16": "I16", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "complex64": "C64", "complex128": "C128",
}  # fmt: skip


def _dtype_rows(op: Op, attrs: tuple[Attr, ...], specs: Mapping[str, TensorSpec]) -> list[tuple[str, ...]]:
    """The dtypes of the inputs given and of the outputs, for each dtype that the operator takes."""
    rows = []
    for dtype in FLOATING:
        for integer in INTEGERS if any(spec.dtype in INTEGERS for spec in specs.values()) else INTEGERS[:1]:
            given = {
                slot: TensorSpec(
                    spec.shape, dtype if spec.dtype in FLOATING else integer if spec.dtype in INTEGERS else spec.dtype
                )
                for slot, spec in specs.items()
            }
            outputs = infer(op, attrs, tuple(given.get(slot) for slot in op.inputs), device())
            rows.append((*(given[s].dtype for s in given), *(outputs[y].dtype for y in op.entry_outputs)))
    return rows
