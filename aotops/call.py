"""The call path: an operator bound to its attributes, as a function of tensors.

ctypes loads the library and then gets out of the way: CPython itself makes builtins of two C functions of the library
(cuda_src/host/python.cpp). There are three rungs, and a frontend takes the highest that works for its tensors:

1. ``tensors(op, attrs)``: a builtin that takes tensors, read in C (torch with its DLPack exchange table, NumPy);
   ``function(...)`` is the same with the one output allocated;
2. ``addresses(op, attrs, device, specs)``: a builtin that takes addresses as ints, with shapes and dtypes fixed;
3. the same through plain ctypes, on interpreters that are not CPython.

``AOTOPS_CALL_PATH`` (tensors, addresses or ctypes) holds a process to a lower rung.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int64, c_uint32, c_void_p, py_object
from functools import cache, lru_cache
from typing import Any, NamedTuple

from . import library
from .extra import encode
from .op import Attr, Op
from .spec import TensorSpec

RUNGS = ("ctypes", "addresses", "tensors")
_DEVICES = ("cpu", "cuda")
_METH_FASTCALL = 0x80


class _MethodDef(Structure):
    _fields_ = [("name", c_char_p), ("function", c_void_p), ("flags", c_int), ("doc", c_char_p)]


class _Interpreter(Structure):
    _fields_ = [("none", c_void_p), ("errors", c_void_p * 6), ("type_offset", c_int64), ("head_size", c_int64)]


class _Torch(Structure):
    _fields_ = [("exchange", c_void_p), ("types", c_void_p * 2)]


class _Numpy(Structure):
    _fields_ = [("type", c_void_p), ("n", c_int), ("dtypes", c_void_p * 8), ("names", c_char_p * 8)]


@cache
def rung() -> str:
    """The highest rung that this process may use.

    Raises:
        ValueError: AOTOPS_CALL_PATH names none of the rungs.
    """
    highest = "tensors" if sys.implementation.name == "cpython" else "ctypes"
    wanted = os.environ.get("AOTOPS_CALL_PATH", highest)
    if wanted not in RUNGS:
        raise ValueError(f"AOTOPS_CALL_PATH is {wanted!r}, expected one of {', '.join(RUNGS)}")
    return min(wanted, highest, key=RUNGS.index)


# ------------------------------------------------------------------------------------------ what C must know of Python


@cache
def _lib() -> ctypes.CDLL:
    lib = library.load()
    lib.aot_call_new.restype = lib.aot_function_new.restype = lib.aot_plan_new.restype = c_void_p
    lib.aot_function_new.argtypes = [c_void_p, c_void_p, c_int, c_int, POINTER(c_int), c_void_p, c_int64]
    lib.aot_plan_new.argtypes = [
        c_void_p, c_int, c_uint32, c_int, POINTER(c_int), POINTER(c_int64), POINTER(c_char_p), POINTER(c_int),
    ]  # fmt: skip
    lib.aot_plan_delete.argtypes = [c_void_p]
    lib.aot_plan_run.argtypes = [c_void_p, c_int, c_void_p, POINTER(c_void_p)]
    if rung() != "ctypes":
        # ob_type is the last word of the object's head, in free-threaded builds too
        head = object.__basicsize__
        errors = (None, *(id(library.ERRORS[status]) for status in range(1, 6)))
        facts = _Interpreter(id(None), (c_void_p * 6)(*errors), head - ctypes.sizeof(c_void_p), head)
        lib.aot_python_setup(byref(facts))
    return lib


def read_torch(torch: Any) -> bool:
    """Lets ``tensors`` take torch tensors; False where this torch has no exchange table (before 2.10)."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if rung() != "tensors" or capsule is None:
        return False
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, [py_object, c_char_p]
    types = (c_void_p * 2)(id(torch.Tensor), id(torch.nn.Parameter))
    _lib().aot_python_torch(byref(_Torch(get(capsule, b"dlpack_exchange_api"), types)))
    return True


def read_numpy(numpy: Any, dtypes: Sequence[Any]) -> bool:
    """Lets ``tensors`` take NumPy arrays of these dtypes; False where the rung is not to be had."""
    if rung() != "tensors":
        return False
    facts = _Numpy(id(numpy.ndarray), len(dtypes))
    for i, dtype in enumerate(dtypes):
        facts.dtypes[i], facts.names[i] = id(dtype), _keep(dtype.name.encode())
    _keep(tuple(dtypes))
    _lib().aot_python_numpy(byref(facts))
    return True


_kept: list[Any] = []  # what C points at: as long-lived as the library


def _keep(value: Any) -> Any:
    _kept.append(value)
    return value


@cache
def _text(value: str) -> bytes:
    return value.encode()


# ------------------------------------------------------------------------------------------------------------- calls


@cache
def _handle(op: Op, attrs: tuple[Attr, ...]) -> int:
    """The C side of an operator bound to its attributes. Kept for good: a program has few of them."""
    n = len(op.slots)
    entries = (c_void_p * 2)(*(library.address(f"aot_{op.name}_{device}") for device in _DEVICES))
    inits = (c_void_p * 2)(*(library.address(f"aot_{op.name}_{device}Init") for device in _DEVICES))
    handle = _lib().aot_call_new(
        op.name.encode(),
        encode(op, attrs).encode(),
        len(op.inputs),
        n,
        (c_char_p * n)(*(slot.encode() for slot in op.slots)),
        (c_int * n)(*(op.is_optional(slot) for slot in op.slots)),
        entries,
        inits,
    )
    assert handle, f"{op.name} has more than 16 slots, or more than 8 optional ones"
    return handle


@cache
def tensors(op: Op, attrs: tuple[Attr, ...]) -> Callable[..., None]:
    """A builtin that takes one tensor, or None, for each of ``op.slots``, and runs the entry for their device, on the
    framework's current stream. All must be contiguous and on one device; the outputs must be allocated."""
    return _builtin(op.name, "aot_call_tensors", _handle(op, attrs), b"aotops.call", None)


class Function(NamedTuple):
    """Builtins that take one tensor, or None, for each input and allocate the one output, which is like an input."""

    run: Callable[..., Any]
    """Returns the output."""
    forward: Callable[..., Any]
    """The same as the forward of a ``torch.autograd.Function``: takes its context first, and saves for the backward."""


def function(
    op: Op,
    attrs: tuple[Attr, ...],
    empty_like: Callable[[Any], Any],
    keep_residuals: Callable[..., Any] | None = None,
    keep_residuals_from: int = 0,
) -> Function | None:
    """None where the operator has another number of outputs, or one that is not like an input.

    ``keep_residuals`` serves CUDA tensors of more elements than ``keep_residuals_from`` in the place of ``forward``.
    """
    if len(op.outputs) != 1 or op.outputs[0] not in op.like:
        return None
    positions = {slot: i for i, slot in enumerate(op.slots)}
    saved = [positions[slot] for slot in op.saved]
    handle = _lib().aot_function_new(
        _handle(op, attrs),
        id(_keep(empty_like)),
        positions[op.like[op.outputs[0]]],
        len(saved),
        (c_int * len(saved))(*saved),
        id(_keep(keep_residuals)) if op.residuals and keep_residuals else None,
        keep_residuals_from,
    )
    return Function(
        _builtin(op.name, "aot_function_run", handle, b"aotops.function", None),
        _builtin(op.name, "aot_function_forward", handle, b"aotops.function", None),
    )


@lru_cache(maxsize=4096)
def addresses(
    op: Op, attrs: tuple[Attr, ...], device: str, specs: tuple[TensorSpec | None, ...]
) -> Callable[..., None]:
    """A function of the device's number, the stream (0 on the CPU) and the address of each tensor given, all ints.
    ``specs`` has one for each of ``op.slots``, None where a tensor is absent."""
    given = [spec for spec in specs if spec is not None]
    ndims = [len(spec.shape) for spec in given]
    dims = [dim for spec in given for dim in spec.shape]
    status = c_int()
    plan = _lib().aot_plan_new(
        _handle(op, attrs),
        _DEVICES.index(device),
        sum(1 << i for i, spec in enumerate(specs) if spec is not None),
        len(given),
        (c_int * len(given))(*ndims),
        (c_int64 * max(len(dims), 1))(*dims),
        (c_char_p * len(given))(*(_text(spec.dtype) for spec in given)),
        byref(status),
    )
    library.check(status.value)
    if rung() == "ctypes":
        return _CtypesPlan(plan, len(given))
    destructor = library.address("aot_plan_capsule_delete")
    return _builtin(op.name, "aot_call_addresses", plan, b"aotops.plan", destructor)


class _CtypesPlan:
    def __init__(self, plan: int, n: int) -> None:
        self._plan, self._params = plan, c_void_p * n

    def __call__(self, device: int, stream: int, *pointers: int) -> None:
        library.check(_lib().aot_plan_run(self._plan, device, stream, self._params(*pointers)))

    def __del__(self) -> None:
        _lib().aot_plan_delete(self._plan)


def _builtin(name: str, function: str, handle: int, capsule_name: bytes, destructor: int | None) -> Callable[..., None]:
    api = ctypes.pythonapi
    api.PyCapsule_New.restype, api.PyCapsule_New.argtypes = py_object, [c_void_p, c_char_p, c_void_p]
    api.PyCFunction_NewEx.restype = py_object
    api.PyCFunction_NewEx.argtypes = [c_void_p, py_object, py_object]
    capsule = api.PyCapsule_New(handle, capsule_name, destructor)
    return api.PyCFunction_NewEx(_method(name, function), capsule, "aotops")


@cache
def _method(name: str, function: str) -> int:
    definition = _MethodDef(name.encode(), library.address(function), _METH_FASTCALL, None)
    return ctypes.addressof(_keep(definition))
