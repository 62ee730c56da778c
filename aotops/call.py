"""The call path: an operator bound to its attributes, as a function of tensors.

ctypes only loads the library: CPython itself makes builtins of two C functions in it (cuda_src/host/calls.cpp). There
are three call paths, and a frontend takes the highest that works for its tensors:

1. ``tensors(op, attrs)``: a builtin that takes tensors, which are read in C (NumPy arrays, and tensors of a framework
   with a DLPack exchange table);
2. ``addresses(op, attrs, device, specs)``: a builtin that takes addresses as ints, with shapes and dtypes fixed;
3. the same through plain ctypes, on interpreters that are not CPython.

Without the GIL, in free-threaded builds of CPython, ``addresses`` is the highest: ``tensors`` reads structs of objects
that another thread may be changing.

``AOTOPS_CALL_PATH`` (tensors, addresses or ctypes) limits a process to a lower one.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int64, c_uint64, c_void_p, py_object, pythonapi
from functools import cache, lru_cache
from typing import Any

from . import library
from .extra import encode
from .op import Attr, Op
from .spec import DEVICES, TensorSpec

CALL_PATHS = ("ctypes", "addresses", "tensors")
METH_FASTCALL = 0x80
MOST_SLOTS = 63
MOST_OPTIONAL = 14  # cuda_src/host/calls.h: kMaxOptional
MOST_BOUND = 256
"""Cached bindings of operators to attributes. A program has few, unless an attribute changes with each call."""
_N_STATUSES = len(library.ERRORS) + 1


class _MethodDef(Structure):
    _fields_ = [("name", c_char_p), ("function", c_void_p), ("flags", c_int), ("doc", c_char_p)]


class _Interpreter(Structure):
    _fields_ = [
        ("none", c_void_p), ("errors", c_void_p * _N_STATUSES), ("int_type", c_void_p), ("float_type", c_void_p),
        ("bool_type", c_void_p), ("str_type", c_void_p), ("tuple_type", c_void_p), ("type_offset", c_int64),
        ("head_size", c_int64),
    ]  # fmt: skip


class _Numpy(Structure):
    _fields_ = [("type", c_void_p), ("n", c_int), ("dtypes", c_void_p * 32), ("names", c_char_p * 32)]


class _EntryFunctions(Structure):
    _fields_ = [("entry", c_void_p), ("init", c_void_p), ("infer", c_void_p), ("last_error", c_void_p)]


@cache
def call_path() -> str:
    """The highest call path that this process may use.

    Raises:
        ValueError: AOTOPS_CALL_PATH names none of them.
    """
    highest = "ctypes" if sys.implementation.name != "cpython" else "tensors" if _has_gil() else "addresses"
    wanted = os.environ.get("AOTOPS_CALL_PATH", highest)
    if wanted not in CALL_PATHS:
        raise ValueError(f"AOTOPS_CALL_PATH is {wanted!r}, expected one of {', '.join(CALL_PATHS)}")
    return min(wanted, highest, key=CALL_PATHS.index)


def _has_gil() -> bool:
    """Once the GIL is on, no import turns it off."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


# -------------------------------------------------------------------------------------------- facts that C is told


@cache
def lib() -> ctypes.CDLL:
    lib = library.load()
    check_structs("aot_call_structs", 4, (_Interpreter, _Numpy, _EntryFunctions))
    lib.aot_call_new.restype = lib.aot_plan_new.restype = c_void_p
    lib.aot_plan_new.argtypes = [
        c_void_p, c_int, c_uint64, c_int, POINTER(c_int), POINTER(c_int64), POINTER(c_char_p), POINTER(c_int),
    ]  # fmt: skip
    lib.aot_plan_delete.argtypes = [c_void_p]
    lib.aot_plan_run.argtypes = [c_void_p, c_int, c_void_p, POINTER(c_void_p)]
    if call_path() != "ctypes":
        # ob_type is the last word of the object's header, in free-threaded builds too
        head = object.__basicsize__
        errors = (None, *(id(library.ERRORS[status]) for status in range(1, _N_STATUSES)))
        facts = _Interpreter(
            none=id(None),
            errors=(c_void_p * _N_STATUSES)(*errors),
            **{f"{kind.__name__}_type": id(kind) for kind in (int, float, bool, str, tuple)},
            type_offset=head - ctypes.sizeof(c_void_p),
            head_size=head,
        )
        lib.aot_python_setup(byref(facts))
    return lib


def check_structs(symbol: str, version: int, mirrors: Sequence[type[Structure]]) -> None:
    """Compares structs that a Python file mirrors with what the library exports of them as ``symbol``.

    Raises:
        LibraryError: a size, the place of a member or the version differs.
    """
    describe = getattr(library.load(), symbol)
    describe.restype = c_char_p
    built = dict(line.split() for line in describe().decode().splitlines())
    facts = {"version": version}
    for name, mirror in ((m.__name__.removeprefix("_"), m) for m in mirrors):
        facts[f"sizeof({name})"] = ctypes.sizeof(mirror)
        facts |= {f"{name}.{member}": getattr(mirror, member).offset for member, *_ in mirror._fields_}
    for name, expected in facts.items():
        if (found := built.get(name)) != str(expected):
            raise library.LibraryError(
                f"{library.path()}: {symbol}: {name} is {found}, expected {expected}: rebuild it with `make clean lib`"
            )


def read_numpy(numpy: Any, dtypes: Sequence[Any]) -> bool:
    """Lets ``tensors`` take NumPy arrays of these dtypes; False if this process is limited to a lower call path."""
    if call_path() != "tensors":
        return False
    facts = _Numpy(type=id(numpy.ndarray), n=len(dtypes))
    for i, dtype in enumerate(dtypes):
        facts.dtypes[i], facts.names[i] = id(dtype), keep(dtype.name.encode())
    keep(tuple(dtypes))
    lib().aot_python_numpy(byref(facts))
    return True


# Objects that C keeps pointers to: dtypes, methods and public functions, which are few. importlib.reload keeps them.
_kept: list[Any] = globals().get("_kept", [])


def keep(value: Any) -> Any:
    _kept.append(value)
    return value


@cache
def _text(value: str) -> bytes:
    return value.encode()


# ------------------------------------------------------------------------------------------------------------- calls


@lru_cache(maxsize=MOST_BOUND)
def handle_of(op: Op, attrs: tuple[Attr, ...]) -> Any:
    """The C side of an operator bound to its attributes: a capsule that owns it."""
    n = len(op.slots)
    last_error, address = op.library.functions_of(op).address("aot_last_error"), op.library.entry_address
    functions = (_EntryFunctions * 2)()
    for made, device in zip(functions, DEVICES, strict=True):
        if not op.foreign and address(op, device):
            op.library.check_entry(op, device)
        made.entry, made.init = address(op, device), address(op, device, "Init")
        made.infer, made.last_error = address(op, device, "Infer"), last_error
    handle = lib().aot_call_new(
        op.name.encode(),
        encode(op, attrs).encode(),
        len(op.inputs),
        n,
        (c_char_p * n)(*(slot.encode() for slot in op.slots)),
        (c_int * n)(*(op.is_optional(slot) for slot in op.slots)),
        c_uint64(sum(1 << i for i, slot in enumerate(op.slots) if slot in op.accepts_scalar)),
        functions,
    )
    if not handle:
        raise NotImplementedError(
            f"{op.name} has {n} tensors, {sum(map(op.is_optional, op.slots))} of them optional, expected at most "
            f"{MOST_SLOTS} and {MOST_OPTIONAL}"
        )
    return _capsule(handle, "aot_call_capsule_delete")


@lru_cache(maxsize=MOST_BOUND)
def tensors(op: Op, attrs: tuple[Attr, ...]) -> Callable[..., None]:
    """A builtin that takes one tensor, or None, for each of ``op.slots``, and runs the entry of their device on the
    framework's current stream. All must be contiguous and on one device; the outputs must be allocated."""
    return builtin(op.name, "aot_call_tensors", handle_of(op, attrs))


@lru_cache(maxsize=4096)
def addresses(
    op: Op, attrs: tuple[Attr, ...], device: str, specs: tuple[TensorSpec | None, ...]
) -> Callable[..., None]:
    """A function of the device's number, the stream (0 on the CPU) and the address of each tensor given, all ints.
    ``specs`` has one for each of ``op.slots``, None where a tensor is absent."""
    if len(specs) != len(op.slots):
        raise TypeError(f"{op.name}: {len(specs)} specs given, expected {len(op.slots)}")
    given = [spec for spec in specs if spec is not None]
    ndims = [len(spec.shape) for spec in given]
    dims = [dim for spec in given for dim in spec.shape]
    status = c_int()
    handle = handle_of(op, attrs)  # another thread's binding may drop it from its cache
    plan = lib().aot_plan_new(
        pointer_of(handle),
        DEVICES.index(device),
        sum(1 << i for i, spec in enumerate(specs) if spec is not None),
        len(given),
        (c_int * len(given))(*ndims),
        (c_int64 * max(len(dims), 1))(*dims),
        (c_char_p * len(given))(*(_text(spec.dtype) for spec in given)),
        byref(status),
    )
    library.check(status.value)
    if call_path() == "ctypes":
        return _CtypesPlan(plan, len(given))
    return builtin(op.name, "aot_call_addresses", _capsule(plan, "aot_plan_capsule_delete"))


class _CtypesPlan:
    def __init__(self, plan: int, n: int) -> None:
        self._plan, self._params = plan, c_void_p * n

    def __call__(self, device: int, stream: int, *pointers: int) -> None:
        library.check(lib().aot_plan_run(self._plan, device, stream, self._params(*pointers)))

    def __del__(self) -> None:
        lib().aot_plan_delete(self._plan)


# A builtin is bound to a capsule, which owns what the C side reads and frees it with the last reference to the builtin.


def builtin(name: str, function: str, capsule: Any, flags: int = METH_FASTCALL) -> Callable[..., Any]:
    pythonapi.PyCFunction_NewEx.restype = py_object
    pythonapi.PyCFunction_NewEx.argtypes = [c_void_p, py_object, py_object]
    return pythonapi.PyCFunction_NewEx(_method(name, function, flags), capsule, "aotops")


def struct_capsule(made: Any, *kept: Any) -> Any:
    """A capsule of a struct, which keeps the objects that the struct points at."""
    context = (made, *kept)
    capsule = _capsule(ctypes.addressof(made), "aot_capsule_release")
    pythonapi.Py_IncRef.argtypes = [py_object]
    pythonapi.PyCapsule_SetContext.argtypes = [py_object, py_object]
    pythonapi.Py_IncRef(context)
    pythonapi.PyCapsule_SetContext(capsule, context)
    return capsule


def _capsule(pointer: int, destructor: str) -> Any:
    pythonapi.PyCapsule_New.restype, pythonapi.PyCapsule_New.argtypes = py_object, [c_void_p, c_char_p, c_void_p]
    return pythonapi.PyCapsule_New(pointer, None, library.function(destructor))


def pointer_of(capsule: Any) -> int:
    get = pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, [py_object, c_char_p]
    return get(capsule, None)


@cache
def _method(name: str, function: str, flags: int) -> int:
    return ctypes.addressof(keep(_MethodDef(name.encode(), library.function(function), flags, None)))
