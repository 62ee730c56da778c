"""Facts of this torch for the gate (cuda_src/host/gate.h), measured on tensors whose dispatch keys are known.

There is no gate if a tensor's keys are not found in its memory, or a thread's do not change as expected; then every
call goes through torch's dispatcher.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

from . import private
from .private import LEVEL, NO_LEVEL, DispatchKey, DispatchKeySet
from .structs import GateFacts

_WORD = ctypes.sizeof(ctypes.c_void_p)


def facts() -> GateFacts | None:
    """None if this torch does not have what the gate needs."""
    try:
        return _facts()
    except (AttributeError, TypeError, ValueError, OSError, LookupError):  # TypeError: a private name is None
        return None


def _facts() -> GateFacts | None:
    if private.forward_level() != NO_LEVEL:
        return None
    samples = _samples()
    impl = _offset([(id(t), t._cdata) for t in samples], object.__basicsize__, 8)
    keys = _offset([(t._cdata, _keys(t)) for t in samples], 0, 25)
    inference, autocast = _local_keys(torch.inference_mode), _local_keys(lambda: torch.autocast("cpu", torch.bfloat16))
    autocast_keys = _union("AutocastCPU") | _union("AutocastCUDA")
    if _local_keys(torch.no_grad) != (0, 0) or autocast != (0, _union("AutocastCPU")) or inference == (0, 0):
        return None
    level = private.level_facts
    plain = (_plain_keys(device, made) for device in ("CPU", "CUDA") for made in (False, True))
    return GateFacts(
        tensor_keys=(ctypes.c_uint64 * 4)(*plain),
        autocast_keys=autocast_keys,
        inference=(ctypes.c_uint64 * 2)(*inference),
        impl_offset=impl,
        key_offset=keys,
        forward_ad=id(level),
        level=id(next(name for name in level if name == LEVEL)),
        no_level=id(level[LEVEL]),
    )


def _samples() -> list[torch.Tensor]:
    """Tensors with different dispatch keys; the first is plain."""
    plain = torch.empty(2)
    with torch.inference_mode():
        inference = torch.empty(2)
    if (_keys(plain), _keys(inference)) != (_plain_keys("CPU", False), _plain_keys("CPU", True)):
        raise ValueError("a plain tensor has other keys")
    others = [plain.to("meta"), torch.nn.Parameter(plain), plain.to_sparse(), private.neg_view(plain)]
    return [plain, inference, *others, private.zero_tensor(2)]


def _keys(t: torch.Tensor) -> int:
    return private.keys_of(t).raw_repr()


def _union(*names: str) -> int:
    keys = DispatchKeySet(getattr(DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | DispatchKeySet(getattr(DispatchKey, name))
    return keys.raw_repr()


def _plain_keys(device: str, inference: bool) -> int:
    autograd = () if inference else (f"Autograd{device}", "ADInplaceOrView")
    return _union(device, f"Autocast{device}", *autograd)


def _offset(pairs: list[tuple[int, int]], start: int, words: int) -> int:
    """The one offset at which, for every (address, word), the memory at the address holds the word. Raises ValueError
    if there is none, or more than one."""
    offsets = range(start, start + words * _WORD, _WORD)
    (offset,) = [o for o in offsets if all(ctypes.c_uint64.from_address(a + o).value == word for a, word in pairs)]
    return offset


def _local_keys(context: Callable[[], Any]) -> tuple[int, ...]:
    """This thread's dispatch keys in a context, as a difference from a plain thread's: included, excluded."""
    c10 = ctypes.CDLL("libc10.so", os.RTLD_NOW | os.RTLD_NOLOAD)
    with context():
        return tuple((ctypes.c_uint64 * 2).in_dll(c10, "_ZN3c104impl26raw_local_dispatch_key_setE"))
