"""Calls of entries by address, on memory of our own: what the checks of memory are made of.

A call is data that another process can run, with the library's path in the place of the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from aotops import call
from aotops.infer import infer
from aotops.library import Library
from aotops.op import Attr, Op
from aotops.spec import TensorSpec

from .dtypes import ITEMSIZE, numpy_dtype
from .row import Arrays, Case
from .trial import Trial, dtype_of


def nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * ITEMSIZE[spec.dtype]


def raw(array: np.ndarray, dtype: str) -> bytes:
    """The bytes of an array in ``dtype``, whose numbers it can hold."""
    if dtype == "bfloat16":
        return (np.asarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return np.asarray(array).astype(numpy_dtype(dtype)).tobytes()


def numbers(data: bytes, spec: TensorSpec) -> np.ndarray:
    """The array of such bytes, of float64 where it is floating, of 8 bits too."""
    if spec.dtype == "bfloat16":
        bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64).reshape(spec.shape)
    array = np.frombuffer(data, numpy_dtype(spec.dtype)).reshape(spec.shape)
    return array if array.dtype.kind in "biuc" else array.astype(np.float64)


class Bound(NamedTuple):
    """The inputs and attributes of a call, as the entry takes them."""

    op: Op
    inputs: tuple[np.ndarray | None, ...]
    specs: tuple[TensorSpec | None, ...]
    attrs: tuple[Attr, ...]

    def written(self, device: str) -> dict[str, TensorSpec]:
        """The spec of every output, residual and workspace."""
        return infer(self.op, self.attrs, self.specs, device)


def bound(op: Op, case: Case, arrays: Arrays, dtype: str) -> Bound:
    inputs, attrs = op.bind(**arrays, **case.attrs)
    if op.broadcast and all(x is not None for x in inputs):
        inputs = tuple(np.broadcast_arrays(*inputs))
    pairs = zip(op.inputs, inputs, strict=True)
    specs = (None if x is None else TensorSpec(x.shape, dtype_of(x, dtype, slot in case.wide)) for slot, x in pairs)
    return Bound(op, tuple(inputs), tuple(specs), op.canonical(attrs))


def placeholders(case: Case, dtype: str) -> Arrays:
    """Arrays of the shapes, without memory."""
    return {
        slot: None if shape is None else np.broadcast_to(np.zeros((), numpy_dtype(case.array_dtype(slot))), shape)
        for slot, shape in case.shapes.items()
    }


@dataclass(frozen=True)
class EntryCall:
    """A call of an operator's entry: for each slot a spec, or None, and the bytes of the inputs."""

    op: Op
    attrs: tuple[Attr, ...]
    specs: Mapping[str, TensorSpec | None]
    inputs: Mapping[str, bytes]
    forward: EntryCall | None = None
    """For a backward, the call whose results are the inputs that are not in ``inputs``."""

    @property
    def given(self) -> dict[str, TensorSpec]:
        return {slot: spec for slot, spec in self.specs.items() if spec is not None}

    def bound(self, device: str) -> Callable[..., None]:
        """A function of the device's number, the stream and an address for each slot given."""
        return call.addresses(self.op, self.attrs, device, tuple(self.specs[slot] for slot in self.op.slots))

    def run(self, device: str, addresses: Mapping[str, int], index: int = 0, stream: int = 0) -> None:
        """Runs the entry on memory at these addresses, one for each slot given."""
        self.bound(device)(index, stream, *(addresses[slot] for slot in self.given))

    def __reduce__(self) -> Any:
        """The call in another process."""
        return EntryCall, (_portable(self.op), self.attrs, self.specs, self.inputs, self.forward)


def forward_call(op: Op, trial: Trial, device: str) -> EntryCall:
    given = bound(op, trial.case, trial.inputs, trial.dtype)
    specs: dict[str, TensorSpec | None] = dict(zip(op.inputs, given.specs, strict=True))
    written = given.written(device)
    specs |= {slot: written[slot] for slot in op.entry_outputs}
    arrays = zip(op.inputs, given.inputs, given.specs, strict=True)
    inputs = {slot: raw(x, spec.dtype) for slot, x, spec in arrays if x is not None and spec is not None}
    return EntryCall(op, given.attrs, specs, inputs)


def backward_call(op: Op, trial: Trial, device: str) -> EntryCall | None:
    """The call of the gradient's entry; None if there is none."""
    backward = op.backward
    if backward is None or not backward.has_kernel:
        return None
    forward = forward_call(op, trial, device)
    every = zip((f"d{y}" for y in op.outputs), trial.output_gradients, strict=True)
    gradients = {slot: dy for slot, dy in every if dy is not None}
    dtypes = {slot: dtype_of(dy, trial.dtype, slot[1:] in trial.case.wide) for slot, dy in gradients.items()}
    specs: dict[str, TensorSpec | None] = {
        slot: TensorSpec(gradients[slot].shape, dtypes[slot]) if slot in gradients else forward.specs.get(slot)
        for slot in backward.inputs
    }
    inferred = infer(backward, forward.attrs, tuple(specs.values()), device)
    wanted = {f"d{slot}" for slot in forward.inputs} | set(backward.workspace)
    specs |= {
        slot: inferred[slot] if slot in wanted or slot not in backward.optional else None
        for slot in backward.entry_outputs
    }
    inputs = {slot: raw(dy, dtypes[slot]) for slot, dy in gradients.items() if slot in backward.inputs}
    inputs |= {slot: data for slot, data in forward.inputs.items() if slot in backward.inputs}
    return EntryCall(backward, forward.attrs, specs, inputs, forward)


def calls_of(op: Op, trial: Trial, device: str) -> list[EntryCall]:
    """The forward's and, where it has a kernel, the backward's."""
    backward = backward_call(op, trial, device)
    return [forward_call(op, trial, device), *([backward] if backward else [])]


# ------------------------------------------------------------------------------------------------------------- running

POISON = 0xFF
"""In each byte: NaN in every floating dtype, an invalid class in an integer one."""
SLACK = 256
"""Bytes around plain memory, so that a small access out of bounds is harmless."""
ALIGNMENT = 64
"""A vector's bytes, and a cache line's: kernels know no stricter alignment."""

Runner = Callable[[EntryCall, int], dict[str, bytes]]


def placed(data: bytes, offset: int = 0) -> np.ndarray:
    """The bytes in memory, ``offset`` past a multiple of ALIGNMENT."""
    memory = np.full(len(data) + 3 * SLACK, POISON, np.uint8)
    start = SLACK + -memory.ctypes.data % ALIGNMENT + offset
    array = memory[start : start + len(data)]
    array[...] = np.frombuffer(data, np.uint8)
    return array


def run_on_cpu(one: EntryCall, poison: int) -> dict[str, bytes]:
    """The bytes of every slot after a call, whose outputs held ``poison`` in each byte before it."""
    return run_at(one, filled(one, run_on_cpu, poison), {})


def run_at(one: EntryCall, before: Mapping[str, bytes], offsets: Mapping[str, int]) -> dict[str, bytes]:
    """The bytes of every slot after a call, on memory that holds ``before``. ``offsets``: as ``placed`` takes them."""
    buffers = {slot: placed(data, offsets.get(slot, 0)) for slot, data in before.items()}
    one.run("cpu", {slot: buffer.ctypes.data for slot, buffer in buffers.items()})
    return {slot: buffer.tobytes() for slot, buffer in buffers.items()}


def run_on_cuda(one: EntryCall, poison: int) -> dict[str, bytes]:
    """The buffers on a GPU, in torch's memory."""
    import torch

    tensors = {
        slot: torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8).cuda()
        for slot, data in filled(one, run_on_cuda, poison).items()
    }
    stream, index = torch.cuda.current_stream().cuda_stream, torch.cuda.current_device()
    one.run("cuda", {slot: tensor.data_ptr() for slot, tensor in tensors.items()}, index, stream)
    torch.cuda.synchronize()
    return {slot: t.cpu().numpy().tobytes()[: nbytes(one.given[slot])] for slot, t in tensors.items()}


def filled(one: EntryCall, run: Runner, poison: int) -> dict[str, bytes]:
    """The bytes of every slot before a call."""
    results = run(one.forward, poison) if one.forward and set(one.op.inputs) & set(one.given) - set(one.inputs) else {}
    before = {**results, **one.inputs}
    return {
        slot: before[slot] if slot in one.op.inputs else bytes([poison]) * nbytes(spec)
        for slot, spec in one.given.items()
    }


# ------------------------------------------------------------------------------------------------------ other processes


def _portable(op: Op) -> Op:
    """The definition as far as the call path needs it: without functions, which may be of no module."""
    foreign = op.foreign and replace(op.foreign, rule=None, shape=None, dtype=None)
    library = Library(op.library.name, [], op.library._file)
    plain = replace(op, library=library, foreign=foreign, bind=_unused, backward=None, rule=None, shapes={})
    return replace(plain, dims=None, parts=None, keeps=None, formula=None, product=None)


def _unused(*args: Any) -> Any:
    raise NotImplementedError
