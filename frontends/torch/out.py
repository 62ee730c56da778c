"""The argument ``out`` of a public function."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from aotops.infer import infer
from aotops.op import Op

from . import private
from .tensors import Tensors, is_compiling, is_plain, run, spec_of


def write(op: Op, out: Tensor, inputs: Tensors, attrs: tuple[Any, ...]) -> bool:
    """Has the entry write the result to ``out``. False, and nothing is written, if it does not accept these inputs, or
    ``out`` as the tensor that it writes to."""
    if not _writes_directly(op, out, inputs, attrs):
        return False
    with private.RecordFunction(f"{op.library.name}::{op.name}", [t for t in inputs if t is not None]):
        run(op, inputs, op.canonical(attrs), op.outputs, {op.outputs[0]: out})
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return True


def _writes_directly(op: Op, out: Tensor, inputs: Tensors, attrs: tuple[Any, ...]) -> bool:
    given = [t for t in inputs if t is not None]
    if op.alias or op.foreign is not None or not given or not all(isinstance(t, Tensor) for t in given):
        return False
    if is_plain is None or not is_plain(out, *given) or out.is_inference() != torch.is_inference_mode_enabled():
        return False
    if any(not t.is_contiguous() or t.device != out.device for t in (out, *given)):
        return False
    if (op.autocast and torch.is_autocast_enabled(out.device.type)) or (
        op.broadcast and any(t.shape != given[0].shape for t in given)
    ):
        return False
    try:
        spec = infer(op, op.canonical(attrs), tuple(map(spec_of, inputs)), out.device.type)[op.outputs[0]]
    except (TypeError, ValueError):
        return False
    if spec != spec_of(out):
        return False
    same = [op.elementwise and t.data_ptr() == out.data_ptr() and t.shape == out.shape for t in given]
    return all(one or _disjoint(t, out) for t, one in zip(given, same, strict=True))


def _disjoint(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share no memory."""
    start, other = a.data_ptr(), b.data_ptr()
    return start + a.numel() * a.itemsize <= other or other + b.numel() * b.itemsize <= start


def check_unrecorded(op: Op, out: Any, arguments: Iterable[Any]) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"{op.name}: out is {out!r:.40}, expected a torch.Tensor")
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (out, *arguments)):
        raise RuntimeError(f"{op.name}: out is given and an argument requires a gradient, expected a call without out")
    if not is_compiling():
        _check_memory(op, out)


def _check_memory(op: Op, out: Tensor) -> None:
    """torch's own copy_ writes to a storage that was freed or made smaller."""
    if not private.has_storage(out) or not out.numel():
        return
    last = out.storage_offset() + sum((n - 1) * step for n, step in zip(out.shape, out.stride(), strict=True))
    wanted, found = (last + 1) * out.itemsize, out.untyped_storage().nbytes()
    if found < wanted:
        raise RuntimeError(f"{op.name}: out has a storage of {found} bytes, expected at least {wanted} for its shape")


def copied(op: Op, out: Tensor, y: Tensor) -> Tensor:
    """``out`` with the values of y. As torch's, an ``out`` without elements takes y's shape."""
    for what, found, expected in (("dtype", out.dtype, y.dtype), ("device", out.device, y.device)):
        if found != expected:
            error = TypeError if what == "dtype" else ValueError
            raise error(f"{op.name}: out has {what} {found}, expected {expected}".replace("torch.", ""))
    if any(n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"{op.name}: out has elements that share memory, expected none")
    if out.shape != y.shape and not out.numel():
        out.resize_(y.shape)
    if out.shape != y.shape:
        raise ValueError(f"{op.name}: out has shape {tuple(out.shape)}, expected {tuple(y.shape)}")
    return out.copy_(y)
