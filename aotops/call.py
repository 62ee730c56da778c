"""The call path: an operator bound to its attributes, as a function of tensors.

ctypes loads the library and then gets out of the way: CPython itself makes builtins of two C functions of the library
(cuda_src/host/python.cpp). There are three rungs, and a frontend takes the highest that works for its tensors:

1. ``tensors(op, attrs)``: a builtin that takes tensors, read in C (torch with its DLPack exchange table, NumPy);
   ``function(...)`` is the same for torch with the outputs allocated, as the forward and backward of an autograd
   function too, and ``public(...)`` is all of a call, from Python's arguments on;
2. ``addresses(op, attrs, device, specs)``: a builtin that takes addresses as ints, with shapes and dtypes fixed;
3. the same through plain ctypes, on interpreters that are not CPython.

``AOTOPS_CALL_PATH`` (tensors, addresses or ctypes) holds a process to a lower rung.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_char,
    c_char_p,
    c_int,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
    pythonapi,
)
from functools import cache, lru_cache, partial
from inspect import Parameter, signature
from typing import Any, NamedTuple

from . import library
from .extra import encode
from .op import Attr, Op
from .spec import TensorSpec

RUNGS = ("ctypes", "addresses", "tensors")
_DEVICES = ("cpu", "cuda")
_METH_KEYWORDS, _METH_FASTCALL = 0x02, 0x80
_MOST_SLOTS = 16
MOST_BOUND = 256
"""Bindings of an operator to attributes that are kept, of those used last: a program has few, unless it changes an
attribute with each call."""
_Slots = c_int * _MOST_SLOTS


class _MethodDef(Structure):
    _fields_ = [("name", c_char_p), ("function", c_void_p), ("flags", c_int), ("doc", c_char_p)]


class _Interpreter(Structure):
    _fields_ = [
        ("none", c_void_p), ("errors", c_void_p * 6), ("types", c_void_p * 5), ("type_offset", c_int64),
        ("head_size", c_int64),
    ]  # fmt: skip


class Gate(Structure):
    """What cuda_src/host/gate.h has to know of a torch; the frontend fills it."""

    _fields_ = [
        ("tensor_keys", c_uint64 * 4), ("autocast_keys", c_uint64), ("inference", c_uint64 * 2),
        ("impl_offset", c_int64), ("key_offset", c_int64), ("forward_ad", c_void_p), ("level", c_void_p),
        ("no_level", c_void_p),
    ]  # fmt: skip


class _Torch(Structure):
    _fields_ = [
        ("exchange", c_void_p), ("types", c_void_p * 2), ("size_type", c_void_p), ("empty_like", c_void_p),
        ("gate", Gate),
    ]  # fmt: skip


class _Numpy(Structure):
    _fields_ = [("type", c_void_p), ("n", c_int), ("dtypes", c_void_p * 8), ("names", c_char_p * 8)]


class _Function(Structure):
    _fields_ = [
        ("call", c_void_p), ("model", _Slots), ("has_models", c_bool), ("always", c_uint32), ("residuals", c_uint32),
        ("scratch", c_uint32), ("keep_from", c_int64), ("n_returned", c_int), ("n_saved", c_int), ("saved", _Slots),
        ("instead", _Slots), ("make_models", c_void_p), ("models", c_void_p),
    ]  # fmt: skip


class _Backward(Structure):
    _fields_ = [
        ("function", c_void_p), ("n_grads", c_int), ("n_inputs", c_int), ("source", _Slots), ("gradient", _Slots),
        ("otherwise", c_void_p),
    ]  # fmt: skip


class _Differentiable(Structure):
    _fields_ = [("function", c_void_p), ("apply", c_void_p), ("last_use", c_uint64)]


class _Public(Structure):
    _fields_ = [
        ("n_inputs", c_int), ("n_attrs", c_int), ("n_parameters", c_int), ("place", c_int * (2 * _MOST_SLOTS)),
        ("names", c_void_p * (2 * _MOST_SLOTS)), ("defaults", c_void_p * (2 * _MOST_SLOTS)),
        ("n_transposable", c_int), ("transposable", _Slots), ("transposes", _Slots),
        ("kinds", c_char * (2 * _MOST_SLOTS)), ("has_autocast", c_bool), ("most_bound", c_int), ("clock", c_uint64),
        ("bind", c_void_p), ("bound", c_void_p), ("otherwise", c_void_p),
    ]  # fmt: skip


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
    lib.aot_call_new.restype = lib.aot_plan_new.restype = c_void_p
    lib.aot_plan_new.argtypes = [
        c_void_p, c_int, c_uint32, c_int, POINTER(c_int), POINTER(c_int64), POINTER(c_char_p), POINTER(c_int),
    ]  # fmt: skip
    lib.aot_plan_delete.argtypes = [c_void_p]
    lib.aot_plan_run.argtypes = [c_void_p, c_int, c_void_p, POINTER(c_void_p)]
    if rung() != "ctypes":
        # ob_type is the last word of the object's head, in free-threaded builds too
        head = object.__basicsize__
        errors = (None, *(id(library.ERRORS[status]) for status in range(1, 6)))
        types = (c_void_p * 5)(*map(id, (int, float, bool, str, tuple)))
        facts = _Interpreter(id(None), (c_void_p * 6)(*errors), types, head - ctypes.sizeof(c_void_p), head)
        lib.aot_python_setup(byref(facts))
    return lib


def read_torch(torch: Any, gate: Gate | None) -> bool:
    """Lets ``tensors`` take torch tensors; False where this torch has no exchange table (before 2.10), or no gate."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if rung() != "tensors" or capsule is None or gate is None:
        return False
    get = pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, [py_object, c_char_p]
    types = (c_void_p * 2)(id(torch.Tensor), id(torch.nn.Parameter))
    exchange = get(capsule, b"dlpack_exchange_api")
    facts = _Torch(exchange, types, id(torch.Size), id(torch.empty_like), gate)
    return bool(_lib().aot_python_torch(byref(facts)))


def gate() -> Callable[..., bool]:
    """After ``read_torch``: a builtin of tensors, or None, that tells whether a call on them is plain
    (cuda_src/host/gate.h), with autocast on or off."""
    return _builtin("gate", "aot_gate", _struct(c_int()))


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


# What C points at for good: dtypes, methods and public functions, which are few. importlib.reload keeps it.
_kept: list[Any] = globals().get("_kept", [])


def _keep(value: Any) -> Any:
    _kept.append(value)
    return value


@cache
def _text(value: str) -> bytes:
    return value.encode()


# ------------------------------------------------------------------------------------------------------------- calls


@lru_cache(maxsize=MOST_BOUND)
def _handle(op: Op, attrs: tuple[Attr, ...]) -> Any:
    """The C side of an operator bound to its attributes: a capsule that owns it."""
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
        c_uint32(sum(1 << i for i, slot in enumerate(op.slots) if slot in op.uniform)),
        entries,
        inits,
    )
    assert handle, f"{op.name} has more than 16 slots, or more than 8 optional ones"
    return _capsule(handle, "aot_call_capsule_delete")


@lru_cache(maxsize=MOST_BOUND)
def tensors(op: Op, attrs: tuple[Attr, ...]) -> Callable[..., None]:
    """A builtin that takes one tensor, or None, for each of ``op.slots``, and runs the entry for their device, on the
    framework's current stream. All must be contiguous and on one device; the outputs must be allocated."""
    return _builtin(op.name, "aot_call_tensors", _handle(op, attrs))


class Function(NamedTuple):
    """Builtins for torch that take one tensor, or None, for each input and allocate what they return."""

    run: Callable[..., Any]
    """Returns the output, or a tuple of them."""
    forward: Callable[..., Any]
    """The same as the forward of a ``torch.autograd.Function``: takes its context first, and saves for the backward."""
    backward: Callable[..., Any] | None
    """For the class of that context: the method that takes the gradients of the outputs and returns those of the
    inputs. None where the operator has no backward."""


def function(
    op: Op,
    attrs: tuple[Attr, ...],
    models: Callable[..., tuple[Any, ...]],
    keep_residuals_from: int,
    backward: Callable[..., Any],
) -> Function:
    """An operator with its attributes as builtins.

    Args:
        models: takes an operator, its attributes and one tensor, or None, for each input; returns, for each of
            ``op.extra_outputs`` that is not like an input, a tensor of its shape, dtype and device, else None.
        keep_residuals_from: so many elements of a first input on a GPU are too few to keep residuals.
        backward: the backward in Python, for what is not plain: a function of the saved tensors, the gradients of the
            outputs, for each input whether its gradient is needed, and the context, which has as ``inputs`` those that
            were replaced by a residual (Op.instead).
    """
    handle, method = _function_handle(op, attrs, models, keep_residuals_from), None
    if op.backward is not None:
        its = _function_handle(op.backward, attrs, models, keep_residuals_from)
        method = _backward_method(op, op.backward, its, backward)
    return Function(
        _builtin(op.name, "aot_function_run", handle), _builtin(op.name, "aot_function_forward", handle), method
    )


def _backward_method(op: Op, backward: Op, handle: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    sources = [*(f"d{y}" for y in op.outputs), *op.saved]
    slots = {slot: i for i, slot in enumerate(backward.slots)}
    gradients = [backward.alias.get(f"d{x}", f"d{x}") for x in op.inputs]
    made = _Backward(
        _pointer(handle),
        len(op.outputs),
        len(op.inputs),
        _Slots(*(sources.index(slot) for slot in backward.inputs)),
        _Slots(*(slots.get(gradient, -1) for gradient in gradients)),
        id(otherwise),
    )
    pythonapi.PyInstanceMethod_New.restype, pythonapi.PyInstanceMethod_New.argtypes = py_object, [py_object]
    return pythonapi.PyInstanceMethod_New(_builtin(op.name, "aot_function_backward", _struct(made, handle, otherwise)))


def serve(function: Callable[..., Any], builtin: Any) -> None:
    """Where CPython lets it (3.12), a call of ``function``, which forwards to a builtin of ``public``, is one of that
    builtin, without a frame. It stays a function of Python for all who look at it, torch.compile among them."""
    _keep(function)
    address = library.function("aot_python_serve")
    ctypes.PYFUNCTYPE(None, py_object, py_object)(address)(function, builtin.__self__)


def _function_handle(
    op: Op, attrs: tuple[Attr, ...], models: Callable[..., tuple[Any, ...]], keep_residuals_from: int
) -> Any:
    slots = {slot: i for i, slot in enumerate(op.slots)}
    written = range(len(op.inputs), len(slots))
    model = [slots.get(op.like.get(slot, ""), -1) for slot in op.slots]

    def bits(names: Iterable[str]) -> int:
        return sum(1 << slots[name] for name in names)

    handle, make_models = _handle(op, attrs), partial(models, op, attrs)
    made_models: dict[Any, Any] = {}
    made = _Function(
        _pointer(handle),
        _Slots(*model),
        any(model[i] < 0 for i in written),
        bits([*(y for y in op.outputs if y in slots and y not in op.optional), *op.workspace]),
        bits(op.residuals),
        bits(op.workspace),
        -1 if op.costly else keep_residuals_from,
        len(op.outputs),
        len(op.saved),
        _Slots(*(slots[slot] for slot in op.saved)),
        _Slots(*(slots.get(op.instead.get(slot, ""), -1) for slot in op.saved)),
        id(make_models),
        id(made_models),
    )
    return _struct(made, handle, make_models, made_models)


def differentiable(function: Function, apply: Callable[..., Any]) -> Any:
    """What ``public`` takes: an operator bound to attributes, and the ``apply`` of its autograd function."""
    handle = function.run.__self__  # type: ignore[attr-defined]
    return _struct(_Differentiable(_pointer(handle), id(apply)), handle, apply)


def public(op: Op, bind: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A builtin that is called as ``op.bind`` is, and does the whole of a plain call.

    Args:
        bind: takes the attributes as they are given; returns what ``differentiable`` gives for them.
        otherwise: serves in Python a call that is not plain, or that the entry refuses.
    """
    parameters = signature(op.bind).parameters.values()
    places = {name: i for i, name in enumerate((*op.inputs, *op.attrs))}
    names, defaults = [sys.intern(p.name) for p in parameters], [p.default for p in parameters]
    bound: dict[Any, Any] = {}
    made = _Public(len(op.inputs), len(op.attrs), len(names), has_autocast=bool(op.autocast), most_bound=MOST_BOUND)
    for i, (name, default) in enumerate(zip(names, defaults, strict=True)):
        made.place[i], made.names[i] = places[name], id(name)
        made.defaults[i] = None if default is Parameter.empty else id(default)
    made.n_transposable = len(op.transposable)
    for i, (slot, attr) in enumerate(op.transposable):
        made.transposable[i], made.transposes[i] = slot, len(op.inputs) + attr
    made.kinds = "".join("l" if kind == "int[]" else kind[0] for kind in op.attrs.values()).encode()
    made.bind, made.bound, made.otherwise = id(bind), id(bound), id(otherwise)
    handle = _struct(made, names, defaults, bound, bind, otherwise)
    return _builtin(op.name, "aot_public", handle, _METH_FASTCALL | _METH_KEYWORDS)


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
    plan = _lib().aot_plan_new(
        _pointer(_handle(op, attrs)),
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
    return _builtin(op.name, "aot_call_addresses", _capsule(plan, "aot_plan_capsule_delete"))


class _CtypesPlan:
    def __init__(self, plan: int, n: int) -> None:
        self._plan, self._params = plan, c_void_p * n

    def __call__(self, device: int, stream: int, *pointers: int) -> None:
        library.check(_lib().aot_plan_run(self._plan, device, stream, self._params(*pointers)))

    def __del__(self) -> None:
        _lib().aot_plan_delete(self._plan)


# What a builtin is bound to is a capsule, which owns what the C side reads: its destructor frees that with the last
# reference to the builtin.


def _builtin(name: str, function: str, capsule: Any, flags: int = _METH_FASTCALL) -> Callable[..., Any]:
    pythonapi.PyCFunction_NewEx.restype = py_object
    pythonapi.PyCFunction_NewEx.argtypes = [c_void_p, py_object, py_object]
    return pythonapi.PyCFunction_NewEx(_method(name, function, flags), capsule, "aotops")


def _struct(made: Any, *kept: Any) -> Any:
    """A capsule of a struct that keeps what the struct points at."""
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


def _pointer(capsule: Any) -> int:
    get = pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, [py_object, c_char_p]
    return get(capsule, None)


@cache
def _method(name: str, function: str, flags: int) -> int:
    return ctypes.addressof(_keep(_MethodDef(name.encode(), library.function(function), flags, None)))
