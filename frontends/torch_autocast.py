"""Casts under torch.autocast: a part of the torch frontend.

Autocast casts a leaf that requires a gradient, such as a weight, once for each outermost region, and keeps the result
in a cache of torch's. The operators here take it from the same cache.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from aotops import call

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def caster() -> Callable[[Tensor, torch.dtype], Tensor]:
    """A function that casts as autocast does. It needs builtins that take torch's tensors (torch_call.set_up)."""
    cached = call.builtin("cached_cast", "aot_torch_cached_cast", call.struct_capsule(ctypes.c_int()))
    if not _works(cached):
        return Tensor.to

    def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
        if not (t.requires_grad and t.is_leaf and type(t) in _PLAIN_TYPES and torch.is_autocast_cache_enabled()):
            return t.to(dtype)
        found = _from_cache(cached, t, dtype)
        return found if found is not None and _is_current(found, t) else t.to(dtype)

    return cast


def _from_cache(cached: Callable[..., Tensor | None], t: Tensor, dtype: torch.dtype) -> Tensor | None:
    return cached(t._cdata, _number(f"dtype_{dtype}"), _number(f"device_type_{t.device.type}"))


def _works(cached: Callable[..., Tensor | None]) -> bool:
    """Whether a leaf is cast as expected: the function has no name in torch's interface, and might mean another thing
    in a later version."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        leaf = torch.arange(3.0, requires_grad=True)
        try:
            found = _from_cache(cached, leaf, torch.bfloat16)
        except (AttributeError, OSError):  # torch has no number of the dtype
            return False
        is_cast = type(found) is Tensor and found.dtype == torch.bfloat16 and found.requires_grad
        return is_cast and torch.equal(found.detach(), leaf.detach().to(torch.bfloat16))


def _is_current(cast: Tensor, source: Tensor) -> bool:
    """Whether the cast has the gradient that is asked for, and the values of now. torch's cache asks neither: it keeps
    what was cast without a gradient, or before the source was changed in place."""
    if torch.is_grad_enabled() and not cast.requires_grad:
        return False
    if not hasattr(cast, "_version_of_source"):
        cast._version_of_source = source._version  # type: ignore[attr-defined]
    return cast._version_of_source == source._version  # type: ignore[attr-defined]


@functools.cache
def _number(name: str) -> int:
    """LibTorch's number of a dtype, or of a type of device."""
    library = ctypes.CDLL("libtorch_cpu.so", os.RTLD_NOW | os.RTLD_NOLOAD)
    return getattr(library, f"aoti_torch_{name.replace('torch.', '')}")()
