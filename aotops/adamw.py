"""A step of AdamW on many tensors at once: the functions of the library, which take lists of addresses
(cuda_src/operators/adamw.h)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from ctypes import Structure, byref, c_char_p, c_double, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

from . import library
from .call import check_structs

LISTS = ("param", "grad", "exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq", "master")
NUMBERS = ("lr_number", "grad_scale", "found_inf")


class _AdamwTensors(Structure):
    _fields_ = [
        ("count", c_int64), ("sizes", c_void_p), *((name, c_void_p) for name in (*LISTS, *NUMBERS)), ("lr", c_double),
        ("beta1", c_double), ("beta2", c_double), ("eps", c_double), ("weight_decay", c_double), ("dtype", c_char_p),
        ("state_dtype", c_char_p), ("unscale", c_int), ("maximize", c_int), ("device", c_int), ("stream", c_void_p),
    ]  # fmt: skip


def step(kind: str, sizes: array[int], lists: Mapping[str, array[int]], **fields: Any) -> None:
    """Runs a step on tensors of the same dtypes, and adds 1 to their counts of steps.

    Args:
        kind: "cpu" or "cuda", of which ``device`` is the number.
        sizes: of the tensors, in elements; of 64 bits.
        lists: by the names of ``LISTS``, an address for each tensor. The last two may be absent.
        fields: the other members of the struct; the addresses in ``NUMBERS`` may be absent.

    Raises:
        NotImplementedError: the library was built without CUDA.
        TypeError: dtypes that do not go together.
    """
    given = {name: addresses.buffer_info()[0] for name, addresses in lists.items()}
    call = _AdamwTensors(count=len(sizes), sizes=sizes.buffer_info()[0], **given, **fields)
    library.check(_function(kind)(byref(call)))


@cache
def _function(kind: str) -> Any:
    check_structs("aot_adamw_structs", 1, (_AdamwTensors,))
    if library.load().address(f"aot_adamw_tensors_{kind}") is None:
        raise NotImplementedError(f"adamw: {library.path()} was built without {kind.upper()}")
    function = getattr(library.load(), f"aot_adamw_tensors_{kind}")
    function.argtypes = [ctypes.POINTER(_AdamwTensors)]
    return function
