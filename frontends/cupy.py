"""CuPy: arrays on a CUDA device, on CuPy's current stream, with explicit ``*_backward`` functions. bfloat16 is
ml_dtypes's.

Arrays of other libraries are accepted by DLPack, else by ``__cuda_array_interface__``, and CuPy's current stream waits
for their producer. Subclasses of cupy.ndarray raise TypeError.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import cupy as cp

from aotops import call
from aotops.hosting import Namespace
from aotops.library import Library
from aotops.op import Attr, Op
from aotops.ops import BUILTIN, OPS
from aotops.spec import TensorSpec, check_devices

from .explicit_gradients import ArrayFrontend, first_line

__all__ = ["functions", "of", *OPS, *(f"{name}_backward" for name, op in OPS.items() if op.backward)]


_DLPACK_CUDA = (2, 13)
"""DLPack's types of devices whose memory a GPU reads: kDLCUDA, kDLCUDAManaged."""


class _CuPy(ArrayFrontend):
    device = "cuda"
    xp = cp
    plain_types = (cp.ndarray,)

    def prepare(self, op: Op, slot: str, value) -> cp.ndarray:
        if type(value) is not cp.ndarray:
            value = self.imported(op.name, slot, value)
        return value if value.flags.c_contiguous else cp.array(value, order="C")

    def imported(self, op: str, slot: str, value: Any) -> cp.ndarray:
        """An array of the memory of an object of another library. A subclass of CuPy's may store its elements
        differently, and a tensor with a gradient means more than its elements."""
        what = f"{op}: {slot} is a {type(value).__name__}"
        if isinstance(value, cp.ndarray) or not _is_on_gpu(value):
            raise TypeError(f"{what}, expected a cupy.ndarray")
        try:
            if getattr(value, "is_neg", bool)():  # torch's: its export would lose the sign
                value = value.resolve_neg()
            array = cp.from_dlpack(value) if hasattr(value, "__dlpack__") else cp.asarray(value)
        except Exception as error:  # of another library
            raise TypeError(f"{what} that CuPy cannot read: {first_line(error)}") from error
        if array.size and not array.data.ptr:
            raise TypeError(f"{what} that CuPy cannot read: it has no memory")
        return array

    def target(self, op: str, slot: str, out: cp.ndarray) -> cp.ndarray | None:
        if out.device != (device := cp.cuda.Device()):
            raise ValueError(f"{op}: {slot} is on {out.device}, expected {device}")
        return out if out.flags.c_contiguous else None

    def spec(self, array: cp.ndarray) -> TensorSpec:
        return TensorSpec(array.shape, array.dtype.name)

    def empty(self, spec: TensorSpec, model: cp.ndarray) -> cp.ndarray:
        return cp.empty(spec.shape, model.dtype if spec.dtype == model.dtype.name else spec.dtype)

    def number(self, value, dtype: str, model) -> cp.ndarray:
        with self.device_of(model):
            return cp.array(value, dtype)

    def device_of(self, array):
        if isinstance(array, cp.ndarray):
            return array.device
        return cp.cuda.Device(_device_id(array)) if _is_on_gpu(array) else nullcontext()

    def share_memory(self, a, b) -> bool:
        return cp.may_share_memory(a, b)  # the exact answer is computed on the GPU

    def launch(self, op: Op, attrs: tuple[Attr, ...], arrays) -> None:
        check_devices(op.name, op.slots, arrays)
        given = [a for a in arrays if a is not None]
        specs = tuple(None if a is None else self.spec(a) for a in arrays)
        stream = cp.cuda.get_current_stream().ptr
        call.addresses(op, attrs, "cuda", specs)(given[0].device.id, stream, *(a.data.ptr for a in given))


def _is_on_gpu(value: Any) -> bool:
    if hasattr(value, "__dlpack_device__"):
        return value.__dlpack_device__()[0] in _DLPACK_CUDA
    return hasattr(value, "__cuda_array_interface__")


def _device_id(value: Any) -> int:
    kind, number = value.__dlpack_device__() if hasattr(value, "__dlpack_device__") else (None, 0)
    if kind == _DLPACK_CUDA[0]:
        return number
    # cp.asarray would copy to the current device
    pointer = value.__cuda_array_interface__["data"][0] if kind is None else cp.from_dlpack(value).data.ptr
    return cp.cuda.runtime.pointerGetAttributes(pointer).device if pointer else cp.cuda.Device().id


_frontend = _CuPy()


def functions(library: Library, module: str = __name__) -> dict[str, Callable[..., Any]]:
    """The functions of a library's operators. ``module``: where they are found, for pickle."""
    return _frontend.functions(library, module)


def of(library: Library) -> Namespace:
    """The functions of a library's operators as a module, each made when it is first asked for: those that are defined
    later too."""
    return _frontend.of(library)


globals().update(functions(BUILTIN))
