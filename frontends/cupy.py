"""CuPy: arrays on a CUDA device, on CuPy's current stream, with explicit ``*_backward`` functions.

Subclasses of cupy.ndarray raise TypeError.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import cupy as cp

from aotops import call
from aotops.arrays import ArrayFrontend
from aotops.hosting import Namespace
from aotops.library import Library
from aotops.op import Attr, Op
from aotops.ops import BUILTIN, OPS
from aotops.spec import TensorSpec

__all__ = ["functions", "of", *OPS, *(f"{name}_backward" for name, op in OPS.items() if op.backward)]


class _CuPy(ArrayFrontend):
    device = "cuda"

    def prepare(self, op: Op, slot: str, value) -> cp.ndarray:
        if type(value) is not cp.ndarray:  # a subclass may store its elements differently
            raise TypeError(f"{op.name}: {slot} is a {type(value).__name__}, expected a cupy.ndarray")
        return value if value.flags.c_contiguous else cp.array(value, order="C")

    def spec(self, array: cp.ndarray) -> TensorSpec:
        return TensorSpec(array.shape, array.dtype.name)

    def empty(self, spec: TensorSpec, model: cp.ndarray) -> cp.ndarray:
        return cp.empty(spec.shape, model.dtype if spec.dtype == model.dtype.name else spec.dtype)

    def number(self, value, dtype: str, model) -> cp.ndarray:
        with self.device_of(model):
            return cp.array(value, dtype)

    def device_of(self, array):
        return array.device if isinstance(array, cp.ndarray) else nullcontext()

    def broadcast(self, arrays):
        return cp.broadcast_arrays(*arrays)

    def launch(self, op: Op, attrs: tuple[Attr, ...], arrays) -> None:
        given = [(slot, a) for slot, a in zip(op.slots, arrays, strict=True) if a is not None]
        first, device = given[0][0], given[0][1].device
        for slot, a in given:
            if a.device != device:
                raise ValueError(f"{op.name}: {slot} is on {a.device}, expected {device}, the device of {first}")
        specs = tuple(None if a is None else self.spec(a) for a in arrays)
        stream = cp.cuda.get_current_stream().ptr
        call.addresses(op, attrs, "cuda", specs)(device.id, stream, *(a.data.ptr for _, a in given))


_frontend = _CuPy()


def functions(library: Library, module: str = __name__) -> dict[str, Callable[..., Any]]:
    """The functions of a library's operators. ``module``: where they are found, for pickle."""
    return _frontend.functions(library, module)


def of(library: Library) -> Namespace:
    """The functions of a library's operators as a module, each made when it is first asked for: those that are defined
    later too."""
    return _frontend.of(library)


globals().update(functions(BUILTIN))
