"""Runs the kernels of entries in Triton's interpreter, a process of its own, which needs neither a GPU nor torch. Calls
are read from stdin, and their tensors written to stdout, by pickle."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from .declaration import Entry, load
from .plan import ITEMSIZES, Launched, Placed, Unplanned, bind, plan, shape_of
from .worker import DEFAULTS, Refused, kernel, stated_options

POISONS = (0xA5, 0x5A)
"""In each byte of memory that has not been written. A result that is one of them by chance is not both."""
_SLACK = 4096
MOST_PROGRAMS = 4096
"""More are not interpreted: each takes about a millisecond."""


@dataclass(frozen=True)
class Question:
    """A call of an entry."""

    entry: str
    arch: str
    inputs: Mapping[str, tuple[bytes, tuple[int, ...], str]]
    """Bytes, shape and dtype."""
    attrs: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    outputs: Mapping[str, tuple[bytes, tuple[int, ...], str]]
    changed: Mapping[str, bytes]
    """The inputs that were written to."""
    grids: Sequence[str]
    fault: str = ""
    """Why there are no outputs."""
    skipped: bool = False
    """Whether the call was too large."""
    unwritten: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The elements of outputs that no program wrote, of those that have some."""


def unusable() -> str:
    """Why the interpreter runs no kernel here; empty if it does."""
    if not find_spec("triton"):
        return "triton is not installed"
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):  # it takes arrays of one element for numbers
        return f"the interpreter of Triton {version('triton')} needs NumPy below 2.4, and {version('numpy')} is here"
    return ""


def ask(file: Path, questions: Sequence[Question]) -> list[Answer]:
    """The answers of the interpreter in a process of its own.

    Raises:
        RuntimeError: the process failed, with what it said.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = (sys.executable, "-c", f"from {__name__} import main; main()")
    given = pickle.dumps((str(file.absolute()), list(sys.path), list(questions)))
    done = subprocess.run(command, input=given, capture_output=True, env=environment)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        ended = f"it ended by signal {-done.returncode}" if done.returncode < 0 else "it failed"
        raise RuntimeError(f"Triton's interpreter: {ended}: {said[-1] if said else 'it said nothing'}")
    return pickle.loads(done.stdout)


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints is not part of the answers
    os.environ |= {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}
    file, path, questions = pickle.load(sys.stdin.buffer)
    sys.path[:] = path
    try:
        entries = {entry.name: entry for entry in load(Path(file))}
        found = [_answered(entries[question.entry], Path(file).parent, question) for question in questions]
    except (Refused, ValueError) as error:
        sys.exit(str(error))
    pickle.dump(found, answers)
    answers.flush()


# ------------------------------------------------------------------------------------------------------------- memory


class _Memory:
    """A tensor as the interpreter takes it, and memory around it that tells of writes out of bounds."""

    def __init__(self, data: bytes, shape: tuple[int, ...], dtype: str) -> None:
        import numpy as np

        self.shape, self.dtype, self.nbytes = shape, f"torch.{dtype}", len(data)
        self._bytes = np.full(len(data) + 2 * _SLACK, POISONS[0], np.uint8)
        self._start = _SLACK - self._bytes.ctypes.data % 256
        self._bytes[self._start : self._start + len(data)] = np.frombuffer(data, np.uint8)

    def data_ptr(self) -> int:
        return self._bytes.ctypes.data + self._start

    def content(self) -> bytes:
        return self._bytes[self._start : self._start + self.nbytes].tobytes()

    def is_intact(self) -> bool:
        """Whether nothing was written around it."""
        before, after = self._bytes[: self._start], self._bytes[self._start + self.nbytes :]
        return bool((before == POISONS[0]).all() and (after == POISONS[0]).all())

    # what the interpreter does to move a tensor of torch to the CPU and back
    def untyped_storage(self) -> _Memory:
        return self

    def cpu(self) -> _Memory:
        return self

    def new_empty(self, *size: Any, **options: Any) -> _Memory:
        return self

    def set_(self, *view: Any) -> _Memory:
        return self

    def copy_(self, other: Any) -> _Memory:
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


def _answered(entry: Entry, folder: Path, question: Question) -> Answer:
    answer = _tried(entry, folder, question, POISONS[0])
    suspects = _poisoned(answer, POISONS[0])
    if not suspects:
        return answer
    again = _poisoned(_tried(entry, folder, question, POISONS[1]), POISONS[1])
    both = {slot: sorted(suspects[slot] & again.get(slot, set())) for slot in suspects}
    return replace(answer, unwritten={slot: found for slot, found in both.items() if found})


def _poisoned(answer: Answer, byte: int) -> dict[str, set[int]]:
    """The elements of outputs whose bytes are all this one."""
    import numpy as np

    found = {}
    for slot, (data, _, dtype) in answer.outputs.items():
        elements = np.frombuffer(data, np.uint8).reshape(-1, ITEMSIZES[dtype])
        found[slot] = set(map(int, np.flatnonzero((elements == byte).all(axis=1))))
    return {slot: elements for slot, elements in found.items() if elements}


def _tried(entry: Entry, folder: Path, question: Question, poison: int) -> Answer:
    memory = {slot: _Memory(*given) for slot, given in question.inputs.items()}
    placed = {slot: Placed(m.data_ptr(), m.shape, m.dtype[6:]) for slot, m in memory.items()}
    names = bind(entry, placed, question.attrs)
    for slot, tensor in {**entry.outputs, **entry.scratch}.items():
        shape, dtype = shape_of(tensor, names), names.types.get(tensor.type, tensor.type)
        byte = 0 if slot in entry.zeroed else poison
        memory[slot] = _Memory(bytes([byte]) * (prod(shape) * ITEMSIZES[dtype]), shape, dtype)
        placed[slot] = Placed(memory[slot].data_ptr(), shape, dtype)
    if not any(memory[slot].nbytes for slot in entry.outputs):
        return Answer({slot: (b"", memory[slot].shape, placed[slot].dtype) for slot in entry.outputs}, {}, ())
    try:
        launches = plan(entry, names, placed, question.arch)
    except (Unplanned, ArithmeticError) as error:
        return Answer({}, {}, (), str(error))
    grids = [f"{each.call.launch.kernel} {each.grid}" for each in launches]
    if sum(prod(each.grid) for each in launches) > MOST_PROGRAMS:
        return Answer({}, {}, grids, skipped=True)
    for each in launches:
        if fault := _run(each, folder, memory):
            return Answer({}, {}, grids, fault)
    if spoiled := [slot for slot, m in memory.items() if not m.is_intact()]:
        return Answer({}, {}, grids, f"it writes out of bounds, beside {', '.join(spoiled)}")
    changed = {slot: memory[slot].content() for slot, given in question.inputs.items()
               if memory[slot].content() != given[0]}  # fmt: skip
    outputs = {slot: (memory[slot].content(), memory[slot].shape, memory[slot].dtype[6:]) for slot in entry.outputs}
    return Answer(outputs, changed, grids)


def _run(launched: Launched, folder: Path, memory: Mapping[str, _Memory]) -> str:
    """Why it failed; empty if it did not."""
    call = launched.call
    function = kernel(call, folder)
    arguments = {
        parameter: memory[value] if parameter in call.pointers else value
        for parameter, value in launched.arguments.items()
    }
    config = call.configs[launched.config]
    try:
        function[launched.grid](**arguments, **config.constexprs, **stated_options(call, function, config))
    except Exception as error:  # whatever a kernel raises
        return f"{call.launch.kernel}, {call.configs[launched.config]}: {type(error).__name__}: {error}"
    return ""
