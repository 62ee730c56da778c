"""NumPy: arrays on the CPU, with explicit ``*_backward`` functions. bfloat16 is ml_dtypes's.

A result is a plain array. Masked arrays, numpy.matrix and other subclasses, whose type a result would have to keep,
raise TypeError. Memory maps and NumPy's scalars are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from aotops import call
from aotops.arrays import ArrayFrontend
from aotops.hosting import Namespace
from aotops.library import Library
from aotops.op import Attr, Op
from aotops.ops import BUILTIN, OPS
from aotops.spec import DTYPES, TensorSpec

__all__ = ["functions", "of", *OPS, *(f"{name}_backward" for name, op in OPS.items() if op.backward)]

_PLAIN = (np.ndarray, np.memmap)
"""Types that NumPy's own functions turn into plain arrays. They keep others, such as numpy.ma.MaskedArray."""


@lru_cache(maxsize=64)
def _name(dtype: np.dtype) -> str:
    """``dtype.name``, which NumPy puts together each time, in several microseconds."""
    return dtype.name


class _NumPy(ArrayFrontend):
    device = "cpu"

    def __init__(self) -> None:
        self.dtypes = {name: np.dtype(name) for name in DTYPES if name != "bfloat16"}
        self.reads_tensors = call.read_numpy(np, list(self.dtypes.values()))

    def prepare(self, op: Op, slot: str, value) -> np.ndarray:
        if type(value) not in _PLAIN and not isinstance(value, np.generic):
            what = f"{op.name}: {slot} is a {type(value).__name__}, expected a numpy.ndarray"
            lost = "; numpy.asarray gives the elements alone" if isinstance(value, np.ndarray) else ""
            raise TypeError(what + lost)
        name = _name(value.dtype)
        if name == "bfloat16" and name not in self.dtypes:
            self.dtypes[name] = value.dtype
            call.read_numpy(np, list(self.dtypes.values()))
        dtype = self.dtypes.get(name, value.dtype)
        array = np.require(value, None if value.dtype.isnative else dtype, ("C", "A", "E")).reshape(value.shape)
        # the call path compares dtypes by identity; an equal one may be another object
        return array if array.dtype is dtype else array.view(dtype)

    def spec(self, array: np.ndarray) -> TensorSpec:
        return TensorSpec(array.shape, _name(array.dtype))

    def empty(self, spec: TensorSpec, model: np.ndarray) -> np.ndarray:
        return np.empty(spec.shape, self.dtypes[spec.dtype] if spec.dtype in self.dtypes else self.bfloat16())

    def bfloat16(self) -> np.dtype:
        """Of a result where no input was of that dtype."""
        import ml_dtypes

        return self.prepare(next(iter(OPS.values())), "x", np.empty(0, ml_dtypes.bfloat16)).dtype

    def number(self, value, dtype: str, model) -> np.ndarray:
        return np.array(value, self.dtypes[dtype])

    def write_back(self, op: Op, slot: str, given, written) -> None:
        if not isinstance(given, np.ndarray) or not given.flags.writeable:
            raise ValueError(f"{op.name}: {slot} is read-only, expected an array to write to")
        if not np.shares_memory(given, written):
            given[...] = written

    def broadcast(self, arrays):
        return np.broadcast_arrays(*arrays)

    def launch(self, op: Op, attrs: tuple[Attr, ...], arrays) -> None:
        if self.reads_tensors:
            call.tensors(op, attrs)(*arrays)
        else:
            specs = tuple(None if a is None else self.spec(a) for a in arrays)
            call.addresses(op, attrs, "cpu", specs)(0, 0, *(a.ctypes.data for a in arrays if a is not None))


_frontend = _NumPy()


def functions(library: Library, module: str = __name__) -> dict[str, Callable[..., Any]]:
    """The functions of a library's operators. ``module``: where they are found, for pickle."""
    return _frontend.functions(library, module)


def of(library: Library) -> Namespace:
    """The functions of a library's operators as a module, each made when it is first asked for: those that are defined
    later too."""
    return _frontend.of(library)


globals().update(functions(BUILTIN))
