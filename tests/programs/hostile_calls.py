"""Calls every CPU entry through ctypes, with one thing wrong at a time: hostile_calls.py [OPERATOR ...].

A call that is refused must return a status with a message that begins with the operator's name and names what is wrong,
and must write nothing. Before each call its name is printed, so that a crash has one. What no kernel may read is never
pointed at: of a call that may be right after all, such as one of fewer rows, the memory is large enough.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from ctypes import c_char_p, c_int, c_int64, c_void_p
from typing import NamedTuple

import numpy as np

from aotops import library
from aotops.extra import encode
from aotops.infer import infer
from aotops.ops import BUILTIN, OPS
from aotops.ops._adamw import adamw
from aotops.ops._linear_accumulate import linear_accumulate
from aotops.spec import TensorSpec
from aotops.testing.calls import ALIGNMENT, POISON, SLACK, EntryCall, calls_of, filled, nbytes, run_on_cpu
from aotops.testing.cases import CASES, first_case, row_samples
from aotops.testing.trial import Trial

F32 = "float32"
ROOM = 16
"""Times the bytes of an input: its memory, which has room for one more in a dimension, and for any dtype."""
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# By the type of an attribute: what is none, and what is out of the range of many.
NOT_OF_TYPE = {
    "int": ("", "x", "1.5", " 1", "1 ", "0x10", str(2**63)),
    "float": ("", "x", "0x1p3", "9e999", "1 ", "1,5", "nan("),
    "bool": ("", "x", "2", "-1", "True"),
    "str": ("", "quick", "a" * 100),
    "int[]": ("x", "1,", "2,,2", "1;1", ",".join("1" * 33), str(2**63)),
}
OUT_OF_RANGE = {
    "int": ("-1", "0", "33", str(2**31), str(2**62), str(INT64_MIN), str(INT64_MAX)),
    "float": ("-1.0", "0.0", "nan", "inf", "-inf", "1e308", "5e-324"),
    "bool": (),
    "str": (),
    "int[]": ("", "0", "-1,-1", "0,0", "1,1,1,1,1", f"{2**62},{2**62}", f"{INT64_MIN},{INT64_MAX}"),
}


class Wrong(NamedTuple):
    """A call with one thing wrong."""

    title: str
    spoil: Callable[[Call], object]
    names: str | None
    """A regular expression of what the message must name; None: the call may be right."""


class Call:
    """A call that is right, with arrays of its own that can be spoilt and made again."""

    def __init__(self, one: EntryCall) -> None:
        self.op, self.given, lib = one.op, one, library.load()
        self.entry, self.init = (getattr(lib, f"aot_{self.op.name}_cpu{suffix}") for suffix in ("", "Init"))
        self.slots, self.specs = list(one.given), list(one.given.values())
        self.attrs = encode(self.op, one.attrs, [one.specs[slot] is not None for slot in self.op.slots])
        self.memory = [self._memory(slot, data) for slot, data in filled(one, run_on_cpu, POISON).items()]
        self.before = [memory.copy() for memory in self.memory]
        self.right()
        self.written = [slot in self.op.entry_outputs or slot in self.op.mutates for slot in self.slots]

    def _memory(self, slot: str, data: bytes) -> np.ndarray:
        """The tensor, between bytes that are nobody's."""
        is_input = slot in self.op.inputs
        size = ROOM * len(data) if is_input else len(data)
        memory = np.full(size + 3 * SLACK, 0 if is_input else POISON, np.uint8)
        memory = memory[-memory.ctypes.data % ALIGNMENT :][: size + 2 * SLACK]
        memory[SLACK : SLACK + len(data)] = np.frombuffer(data, np.uint8)
        return memory

    def right(self) -> None:
        """Makes all of the call as it should be, with room for a tensor too many and dimensions too many."""
        self.text, self.extra_is_null, self.foreign_data, self.n = self.attrs, False, False, len(self.slots)
        for memory, before in zip(self.memory, self.before, strict=True):
            memory[...] = before
        self.rows = [(c_int64 * 40)(*s.shape, *[1] * (40 - len(s.shape))) for s in (*self.specs, self.specs[0])]
        places = [memory.ctypes.data + SLACK for memory in (*self.memory, self.memory[0])]
        specs = [*self.specs, self.specs[0]]
        self.params: ctypes.Array | None = (c_void_p * len(specs))(*places)
        self.ndims: ctypes.Array | None = (c_int * len(specs))(*(len(s.shape) for s in specs))
        addresses = (ctypes.addressof(row) if s.shape else None for row, s in zip(self.rows, specs, strict=True))
        self.shapes: ctypes.Array | None = (c_void_p * len(specs))(*addresses)
        self.dtypes: ctypes.Array | None = (c_char_p * len(specs))(*(s.dtype.encode() for s in specs))

    def run(self, with_init: bool) -> tuple[int, str]:
        """The status and the message, of Init or the call."""
        lib = library.load()
        extra = None if self.extra_is_null else c_void_p(lib.aot_extra_new(self.text.encode()))
        try:
            if self.foreign_data:
                other = "gelu" if self.op.name != "gelu" else "softmax"
                assert getattr(lib, f"aot_{other}_cpuInit")(None, None, None, extra) == 0
            elif with_init and extra and self.init(None, None, None, extra):
                said = library.last_error()
                assert self._call(extra), f"{said}; but the call was taken"
                assert library.last_error() == said
                return 1, said
            status = self._call(extra)
            return status, library.last_error() if status else ""
        finally:
            if extra:
                lib.aot_extra_delete(extra)

    def _call(self, extra: c_void_p | None) -> int:
        return self.entry(self.n, self.params, self.ndims, self.shapes, self.dtypes, None, extra)

    def infers(self, slot: str, dtype: str) -> bool:
        """Whether an input may have this dtype, as far as the inputs tell."""
        specs = {**self.given.specs, slot: TensorSpec(self.given.given[slot].shape, dtype)}
        try:
            infer(self.op, self.given.attrs, tuple(specs[x] for x in self.op.inputs), "cpu")
        except TypeError:
            return False
        return True

    def changed(self) -> list[str]:
        """The slots whose memory, or that beside it, is not as before."""
        pairs = zip(self.slots, self.memory, self.before, strict=True)
        return [slot for slot, memory, before in pairs if memory.tobytes() != before.tobytes()]

    def beside(self) -> list[str]:
        """The slots of which memory was written that is not theirs to write."""
        found = []
        for slot, spec, written, memory, before in zip(
            self.slots, self.specs, self.written, self.memory, self.before, strict=True
        ):
            now = memory.copy()
            if written:
                now[SLACK : SLACK + nbytes(spec)] = before[SLACK : SLACK + nbytes(spec)]
            if now.tobytes() != before.tobytes():
                found.append(slot)
        return found

    def results(self) -> list[bytes]:
        pairs = zip(self.slots, self.memory, strict=True)
        return [memory.tobytes() for slot, memory in pairs if slot not in self.op.workspace]


# ------------------------------------------------------------------------------------------------------ what is wrong


def of_arrays(call: Call) -> Iterator[Wrong]:
    n, last = len(call.slots), call.slots[-1]
    for count in (0, -1, INT_MIN, n + 1, INT_MAX):
        yield Wrong(f"nparam = {count}", lambda c, count=count: setattr(c, "n", count), "tensors given")
    yield Wrong(f"nparam without {last}", lambda c: setattr(c, "n", c.n - 1), f"{last} is missing")
    for name in ("params", "ndims", "shapes", "dtypes"):
        yield Wrong(f"{name} is null", lambda c, name=name: setattr(c, name, None), name)
    yield Wrong("extra is null", lambda c: setattr(c, "extra_is_null", True), None)
    yield Wrong("extra of another", lambda c: setattr(c, "foreign_data", True), "another operator's Init")


def of_tensor(call: Call, i: int) -> Iterator[Wrong]:
    slot, spec = call.slots[i], call.specs[i]
    is_input, ndim = slot in call.op.inputs, len(spec.shape)
    is_work = slot in call.op.workspace
    may_differ = None if is_input or is_work else slot  # of a shape: an output's is inferred

    def dim(d: int, value: int) -> Callable[[Call], None]:
        return lambda c: c.rows[i].__setitem__(d, value)

    def item(name: str, value: object) -> Callable[[Call], None]:
        return lambda c: getattr(c, name).__setitem__(i, value)

    for value in (-1, INT_MIN, 33, INT_MAX):
        yield Wrong(f"ndims of {slot} = {value}", item("ndims", value), slot)
    yield Wrong(f"ndims of {slot} + 1", item("ndims", ndim + 1), may_differ)
    if ndim:
        yield Wrong(f"ndims of {slot} - 1", item("ndims", ndim - 1), may_differ)
        yield Wrong(f"shape of {slot} is null", item("shapes", None), slot)
    if nbytes(spec):
        yield Wrong(f"data of {slot} is null", item("params", None), slot)
    for d, size in enumerate(spec.shape):
        for value in (-1, -2, INT64_MIN, 2**51, 2**62, INT64_MAX):
            yield Wrong(f"shape[{d}] of {slot} = {value}", dim(d, value), slot)
        yield Wrong(f"shape[{d}] of {slot} + 1", dim(d, size + 1), may_differ)
        if size:
            yield Wrong(f"shape[{d}] of {slot} - 1", dim(d, size - 1), slot if is_work else may_differ)
            yield Wrong(f"shape[{d}] of {slot} = 0", dim(d, 0), slot if is_work else may_differ)
    if ndim > 1:
        yield Wrong(f"shape of {slot} all 2**32", lambda c: [dim(d, 2**32)(c) for d in range(ndim)], slot)
    for dtype in (b"", b"Float32", b"float128", b"float32 ", b"x" * 300, None):
        said = "null" if dtype is None else repr(dtype[:9])
        yield Wrong(f"dtype of {slot} = {said}", item("dtypes", dtype), slot)
    wider = {"int64"} if spec.dtype == "int32" else set()  # which would be other indices
    for other in sorted({"complex64", "uint16", "float8_e5m2", "int8", "int64", "float64", F32} - {spec.dtype} - wider):
        names = None if is_input and call.infers(slot, other) else f"({'|'.join(call.slots)}) has dtype"
        yield Wrong(f"dtype of {slot} = {other}", item("dtypes", other.encode()), names)


def of_attributes(call: Call) -> Iterator[Wrong]:
    lines = dict(line.split("=", 1) for line in call.attrs.split("\n"))

    def text(**changes: str) -> Callable[[Call], None]:
        return lambda c: setattr(c, "text", "\n".join(f"{k}={v}" for k, v in {**lines, **changes}.items()))

    for name, kind in call.op.attrs.items():
        for value in NOT_OF_TYPE[kind.rstrip("?")]:
            yield Wrong(f"{name} = {value[:40]!r}", text(**{name: value}), name)
        for value in OUT_OF_RANGE[kind.rstrip("?")]:
            yield Wrong(f"{name} = {value[:40]!r}", text(**{name: value}), None)
    for name, slots in (("inputs", call.op.inputs), ("outputs", call.op.entry_outputs)):
        for value in NOT_OF_TYPE["int"]:
            yield Wrong(f"{name} = {value!r}", text(**{name: value}), name)
        yield Wrong(f"{name} = 0", text(**{name: "0"}), f"{slots[0]}|expected")
        for i, slot in enumerate(slots):
            title = f"{name} {'without' if slot in call.slots else 'with'} {slot}"
            yield Wrong(title, text(**{name: str(int(lines[name]) ^ 1 << i)}), "")


def right_ones(call: Call) -> Iterator[Wrong]:
    yield Wrong("nothing is wrong", lambda c: None, None)
    yield Wrong("an attribute that no operator has", lambda c: setattr(c, "text", c.text + "\nnonsense=1"), None)
    if call.slots == list(call.op.slots[: len(call.slots)]):
        plain = "\n".join(line for line in call.attrs.split("\n") if not re.match("(in|out)puts=", line))
        yield Wrong("without masks", lambda c: setattr(c, "text", plain), None)


# ------------------------------------------------------------------------------------------------------------ all calls


def entry_calls(name: str) -> Iterator[EntryCall]:
    row = CASES[name]
    for case in {id(c): c for c in (row.cases[first_case(name)], *row_samples(name).values())}.values():
        yield from calls_of(OPS[name], Trial(row, case, F32, name), "cpu")


def unlisted_calls() -> Iterator[EntryCall]:
    """Calls of the entries that only functions of the frontends use."""
    scalar, x = TensorSpec((), F32), TensorSpec((2, 3), F32)
    for one, attrs, given in (
        (adamw, (0.9, 0.999, 1e-8, 0.01, False), (x, x, x, x, scalar, scalar, scalar, scalar)),
        (
            linear_accumulate,
            ("relu", False),
            (TensorSpec((2, 4), F32), x, TensorSpec((4, 3), F32), None, None, TensorSpec((4, 3), F32)),
        ),
    ):
        op = one.bound_to(BUILTIN)
        specs = dict(zip(op.inputs, given, strict=True)) | infer(op, attrs, given, "cpu")
        inputs = {slot: bytes(nbytes(spec)) for slot, spec in zip(op.inputs, given, strict=True) if spec}
        yield EntryCall(op, attrs, {slot: specs.get(slot) for slot in op.slots}, inputs)


def faults(call: Call) -> Iterator[str]:
    tensors = (wrong for i in range(len(call.slots)) for wrong in of_tensor(call, i))
    name, expected = call.op.name, None
    for wrong in right_ones(call):
        for with_init in (False, True):
            call.right()
            print(f"{name}: {wrong.title}", flush=True)
            wrong.spoil(call)
            status, said = call.run(with_init)
            expected = expected or call.results()
            if status or call.results() != expected or call.beside():
                yield f"{wrong.title}: {said or 'other results'}"
    for kind in (of_arrays(call), tensors, of_attributes(call)):
        for wrong in kind:
            call.right()
            print(f"{name}: {wrong.title}", flush=True)
            wrong.spoil(call)
            for with_init in (False, True):
                try:
                    status, said = call.run(with_init)
                except AssertionError as error:
                    yield f"{wrong.title}: {error}"
                    continue
                if not status:
                    if wrong.names is not None:
                        yield f"{wrong.title}: was taken"
                    if beside := call.beside():
                        yield f"{wrong.title}: memory beside {beside} was written"
                    break
                if not said.startswith(f"{name}: ") or not re.search(rf"\b({wrong.names or ''})\b", said):
                    yield f"{wrong.title}: the message is {said!r}, expected one that names {wrong.names!r}"
                if changed := call.changed():
                    yield f"{wrong.title}: {changed} were written"


def main(names: list[str]) -> int:
    found, entries = [], set()
    ones = [one for name in names or OPS for one in entry_calls(name)] + ([] if names else [*unlisted_calls()])
    for one in ones:
        call = Call(one)
        entries.add(f"aot_{call.op.name}_cpu")
        found += [f"{call.op.name} of {call.slots} {fault}" for fault in faults(call)]
    print("entries:", *sorted(entries))
    print("\n".join(f"FAULT: {fault}" for fault in found) or "no fault")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
