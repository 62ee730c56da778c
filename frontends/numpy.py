"""NumPy: arrays on the CPU, with explicit ``*_backward`` functions. bfloat16 and float8 are ml_dtypes's.

A result is a plain array. Memory maps, NumPy's scalars and objects that export their memory are accepted: by DLPack
(CPU tensors of torch, JAX and others), ``__array_interface__`` or the buffer protocol. What NumPy's own functions
would return another type for raises TypeError: masked arrays, numpy.matrix and other subclasses, and types with
``__array_function__``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from aotops import call
from aotops.hosting import Namespace
from aotops.library import Library
from aotops.op import Attr, Op
from aotops.ops import BUILTIN, OPS
from aotops.spec import DTYPES, TensorSpec

from .explicit_gradients import ArrayFrontend, Arrays, first_line

__all__ = ["functions", "of", *OPS, *(f"{name}_backward" for name, op in OPS.items() if op.backward)]


@lru_cache(maxsize=64)
def _name(dtype: np.dtype) -> str:
    """``dtype.name``, which NumPy puts together each time, in several microseconds."""
    return dtype.name


_OF_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_DLPACK_CPU = (1, 3, 11)
"""DLPack's types of devices whose memory the CPU reads: kDLCPU, kDLCUDAHost, kDLROCMHost."""


class _NumPy(ArrayFrontend):
    device = "cpu"
    xp = np
    plain_types = np.ndarray, np.memmap  # NumPy's own functions keep others, such as numpy.ma.MaskedArray

    def __init__(self) -> None:
        self.dtypes = {name: np.dtype(name) for name in DTYPES if name not in _OF_ML_DTYPES}
        self.reads_tensors = call.read_numpy(np, list(self.dtypes.values()))

    def prepare(self, op: Op, slot: str, value) -> np.ndarray:
        if type(value) not in self.plain_types and not isinstance(value, np.generic):
            value = self.imported(op.name, slot, value)
        name = _name(value.dtype)
        if name in _OF_ML_DTYPES and name not in self.dtypes:
            self.dtypes[name] = value.dtype
            call.read_numpy(np, list(self.dtypes.values()))
        dtype = self.dtypes.get(name, value.dtype)
        array = np.require(value, None if value.dtype.isnative else dtype, ("C", "A", "E")).reshape(value.shape)
        # the call path compares dtypes by identity; an equal one may be another object
        return array if array.dtype is dtype else array.view(dtype)

    def spec(self, array: np.ndarray) -> TensorSpec:
        return TensorSpec(array.shape, _name(array.dtype))

    def empty(self, spec: TensorSpec, model: np.ndarray) -> np.ndarray:
        return np.empty(spec.shape, self.dtypes.get(spec.dtype) or self.of_ml_dtypes(spec.dtype))

    def of_ml_dtypes(self, name: str) -> np.dtype:
        """The dtype of a result where no input was of that dtype."""
        import ml_dtypes

        return self.prepare(next(iter(OPS.values())), "x", np.empty(0, getattr(ml_dtypes, name))).dtype

    def number(self, value, dtype: str, model) -> np.ndarray:
        return np.array(value, self.dtypes[dtype])

    def imported(self, op: str, slot: str, value: Any) -> np.ndarray:
        """An array of the memory of an object that is not an array of NumPy."""
        what = f"{op}: {slot} is a {type(value).__name__}"
        if isinstance(value, np.ndarray) or hasattr(type(value), "__array_function__"):
            raise TypeError(f"{what}, expected a numpy.ndarray; numpy.asarray gives the elements alone")
        try:
            if hasattr(value, "__dlpack__"):
                if (kind := value.__dlpack_device__()[0]) not in _DLPACK_CPU:
                    raise _OtherDevice(f"{op}: {slot} is on a device of DLPack's type {int(kind)}, expected the CPU")
                # torch's __dlpack__ exports negated views and fake tensors, which its __array__ refuses
                array = np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
                if array.size and hasattr(value, "data_ptr") and not value.data_ptr():
                    raise BufferError("it has no memory")
                return array
            if hasattr(value, "__array_interface__") or _exports_buffer(value):
                return np.asarray(value)
        except _OtherDevice:
            raise
        except Exception as error:  # of another library
            raise TypeError(f"{what} that NumPy cannot read: {first_line(error)}") from error
        raise TypeError(f"{what}, expected a numpy.ndarray")

    def target(self, op: str, slot: str, out: np.ndarray) -> np.ndarray | None:
        if not out.flags.carray or not out.dtype.isnative:
            return None
        plain = out.view(np.ndarray)  # of a memory map
        # the call path compares dtypes by identity
        return plain if (dtype := self.dtypes.get(_name(out.dtype))) is None else plain.view(dtype)

    def share_memory(self, a, b) -> bool:
        return np.shares_memory(a, b)

    def plain(self, op: Op) -> Callable[[Arrays, tuple[Attr, ...], Any], Any] | None:
        """The call of a hosted operator whose one output is like an input. It refuses arrays that need a copy."""
        is_like_one = len(op.outputs) == 1 and op.outputs[0] in op.same_spec_as
        if not op.foreign or not is_like_one or op.workspace or op.mutates or not self.reads_tensors:
            return None
        model = op.inputs.index(op.same_spec_as[op.outputs[0]])
        tensors, ndarray, empty = call.tensors, np.ndarray, np.empty

        def run(inputs: Arrays, attrs: tuple[Attr, ...], out: Any) -> Any:
            for a in inputs:
                if type(a) is not ndarray:
                    return None
                if out is not None and (a is out or not a.flags.owndata):  # their memory may be shared
                    return None
            like = inputs[model]
            if out is None:
                out = empty(like.shape, like.dtype)
            elif (
                type(out) is not ndarray
                or out.shape != like.shape
                or out.dtype is not like.dtype
                or not (out.flags.owndata and out.flags.carray)
            ):
                return None
            try:
                tensors(op, attrs)(*inputs, out)
            except Exception:
                return None  # it raises again where that is not all
            return out

        return run

    def launch(self, op: Op, attrs: tuple[Attr, ...], arrays) -> None:
        if self.reads_tensors:
            call.tensors(op, attrs)(*arrays)
        else:
            specs = tuple(None if a is None else self.spec(a) for a in arrays)
            call.addresses(op, attrs, "cpu", specs)(0, 0, *(a.ctypes.data for a in arrays if a is not None))


class _OtherDevice(ValueError):
    """An object whose memory the CPU does not read."""


def _exports_buffer(value: Any) -> bool:
    """Text and bytes have no elements that an operator takes."""
    try:
        return not isinstance(value, (bytes, bytearray)) and memoryview(value) is not None
    except TypeError:
        return False


_frontend = _NumPy()


def functions(library: Library, module: str = __name__) -> dict[str, Callable[..., Any]]:
    """The functions of a library's operators. ``module``: where they are found, for pickle."""
    return _frontend.functions(library, module)


def of(library: Library) -> Namespace:
    """The functions of a library's operators as a module, each made when it is first asked for: those that are defined
    later too."""
    return _frontend.of(library)


globals().update(functions(BUILTIN))
