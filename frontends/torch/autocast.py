"""Casts under torch.autocast, as each operator's definition says.

Autocast casts a leaf that requires a gradient, such as a weight, once for each outermost region, and keeps the result
in a cache of torch's. The operators here take it from the same cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aotops.call import builtin, struct_capsule
from aotops.op import Autocast, Op

from ..torch_schema import mask, splitter
from . import private
from .tensors import PLAIN_TYPES, READS_TENSORS, Tensors, packed, results_of, specs_of


def autocast_kernel(op: Op, dispatched: Callable[..., Any], device: str) -> Callable[..., Any]:
    split, key = splitter(op), getattr(private.DispatchKey, f"Autocast{device}")
    keys = private.DispatchKeySet(key)

    def kernel(*args):
        inputs, attrs, names = split(args)
        cast, attrs, back = cast_inputs(op, attrs, device.lower(), inputs)
        with private.ExcludeKeys(keys):
            results = results_of(dispatched(*cast, *attrs, *mask(op, names)))
        if back is None:
            return packed(results)
        n = len(op.outputs)
        return packed([*(y.to(back) for y in results[:n]), *results[n:]])

    return kernel


def caster(op: Op) -> Callable[..., tuple[Any, ...] | None] | None:
    """For plain calls of an operator that autocast changes, a function of its inputs and public attributes: it returns
    those that it then runs with, or None where ``run_eager`` must make the call."""
    if op.autocast in (None, Autocast.IF_REFUSED):
        return None
    n, are_public = len(op.inputs), op.public_attrs == tuple(op.attrs)

    def cast_arguments(*arguments: Any) -> tuple[Any, ...] | None:
        if arguments[0] is None or not are_public:
            return None
        device = arguments[0].device.type
        if not torch.is_autocast_enabled(device):
            return arguments
        inputs, attrs, back = cast_inputs(op, arguments[n:], device, arguments[:n])
        return (*inputs, *attrs) if back is None else None

    return cast_arguments


def cast_inputs(op: Op, attrs: tuple[Any, ...], device: str, inputs: Tensors):
    """The inputs as autocast casts them, the attributes, and the dtype to cast the results to, or None."""
    if op.autocast is Autocast.LOWER:
        lower = torch.get_autocast_dtype(device)
        return [cast(t, lower) if t is not None and _is_cast(t, lower) else t for t in inputs], attrs, None
    if op.autocast is Autocast.WIDE_LOSS:
        return inputs, _with_wide_loss(op, attrs, inputs[0].dtype), None
    if op.autocast is Autocast.IF_REFUSED:
        with contextlib.suppress(TypeError):
            specs_of(op, attrs, inputs)
            return inputs, attrs, None
    floating = [t for t in inputs if t is not None and t.is_floating_point()]
    lowers = op.autocast is Autocast.LOWER_WIDE_LOSS
    dtype, back = torch.get_autocast_dtype(device) if lowers else None, None
    if op.autocast is Autocast.FLOAT32_ON_CUDA and device == "cuda":
        dtype = torch.float32
    if dtype is None:
        if len({t.dtype for t in floating}) < 2:
            return inputs, attrs, None
        dtype = _widest(floating)
        rows = [t for slot, t in zip(op.inputs, inputs, strict=True) if slot in op.vmappable]
        back = _widest(rows) if rows else dtype
        back = None if back == dtype else back
    casts = {id(t) for t in floating if _is_cast(t, dtype)}
    kept = op.constants if op.autocast is Autocast.LOWER_WIDE_LOSS else ()
    inputs = [
        cast(t, dtype) if id(t) in casts and slot not in kept else t for slot, t in zip(op.inputs, inputs, strict=True)
    ]
    if op.autocast is Autocast.LOWER_WIDE_LOSS:
        attrs = _with_wide_loss(op, attrs, inputs[0].dtype)
    return inputs, attrs, back


def _is_cast(t: Tensor, dtype: torch.dtype) -> bool:
    return t.dtype not in (dtype, torch.float64) and t.is_floating_point()


def _with_wide_loss(op: Op, attrs: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """The attributes for an x of this dtype."""
    if not dtype.is_floating_point or dtype.itemsize != 2:
        return attrs
    given = dict(zip(op.attrs, attrs, strict=True))
    if given["dtype"] is None:
        given["dtype"] = "float32"
    return tuple(given.values())


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors))


def _caster() -> Callable[[Tensor, torch.dtype], Tensor]:
    """A function that casts as autocast does. It needs builtins that take torch's tensors (call.set_up)."""
    cached = builtin("cached_cast", "aot_torch_cached_cast", struct_capsule(ctypes.c_int()))
    if not _works(cached):
        return Tensor.to

    def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
        if not (t.requires_grad and t.is_leaf and type(t) in PLAIN_TYPES and torch.is_autocast_cache_enabled()):
            return t.to(dtype)
        found = _from_cache(cached, t, dtype)
        return found if found is not None and _is_current(found, t) else t.to(dtype)

    return cast


def _from_cache(cached: Callable[..., Tensor | None], t: Tensor, dtype: torch.dtype) -> Tensor | None:
    return cached(t._cdata, *_numbers(dtype, t.device.type))


def _works(cached: Callable[..., Tensor | None]) -> bool:
    """Whether a leaf is cast as expected: the function has no name in torch's interface, and might mean another thing
    in a later version."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        leaf = torch.arange(3.0, requires_grad=True)
        try:
            found = _from_cache(cached, leaf, torch.bfloat16)
        except (AttributeError, OSError):  # torch has no number of the dtype
            return False
        if found is None or type(found) is not Tensor or found.dtype != torch.bfloat16:
            return False
        return found.requires_grad and torch.equal(found.detach(), leaf.detach().to(torch.bfloat16))


def _is_current(cast: Tensor, source: Tensor) -> bool:
    """Whether the cast has the gradient that is asked for, and the values of now. torch's cache asks neither: it keeps
    what was cast without a gradient, or before the source was changed in place."""
    if torch.is_grad_enabled() and not cast.requires_grad:
        return False
    if not hasattr(cast, "_version_of_source"):
        cast._version_of_source = source._version  # type: ignore[attr-defined]
    return cast._version_of_source == source._version  # type: ignore[attr-defined]


@functools.cache
def _numbers(dtype: torch.dtype, device: str) -> tuple[int, int]:
    """LibTorch's numbers of a dtype and a type of device."""
    library, name = ctypes.CDLL("libtorch_cpu.so", os.RTLD_NOW | os.RTLD_NOLOAD), str(dtype).removeprefix("torch.")
    return getattr(library, f"aoti_torch_dtype_{name}")(), getattr(library, f"aoti_torch_device_type_{device}")()


cast = _caster() if READS_TENSORS else Tensor.to
