"""Whether a function has the instructions of another, in the interpreter that runs."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

Names = Mapping[str, str]
"""The names that the names in capitals of a reference stand for."""

_KINDS_OF_CODE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE


class Form(NamedTuple):
    """``methods``: the references, by the names of the methods. ``options``: of the replacement of this kind."""

    kind: str
    methods: Mapping[str, Any]
    options: Mapping[str, Any]


def named(function: Any, reference: Any, but: Collection[str] = ()) -> Names | None:
    """The names that the reference's names in capitals stand for in a function that has its instructions; else None.
    ``but``: global names whose meaning is not compared."""
    if not isinstance(function, FunctionType) or function.__closure__ or not _same_arguments(function, reference):
        return None
    names: dict[str, str] = {}
    mine, its = list(_steps(reference)), list(_steps(function))
    if len(mine) != len(its):
        return None
    for (opname, value), (its_opname, its_value) in zip(mine, its, strict=True):
        if opname != its_opname:
            return None
        if _is_placeholder(value):
            fits = names.setdefault(value, its_value) == its_value
        else:
            fits = value == its_value
            if opname == "LOAD_GLOBAL" and value not in but:
                fits = fits and global_of(function, value) is global_of(reference, value)
        if not fits:
            return None
    return names if len(set(names.values())) == len(names) else None


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, str) and len(value) > 1 and value.isupper()  # a constant is quoted, and F is a module


def _same_arguments(function: Any, reference: Any) -> bool:
    codes = function.__code__, reference.__code__
    kinds = [(c.co_argcount, c.co_kwonlyargcount, c.co_flags & _KINDS_OF_CODE) for c in codes]
    return kinds[0] == kinds[1] and function.__defaults__ == reference.__defaults__


def _steps(function: Any) -> Iterator[tuple[str, Any]]:
    """The instructions: opcode, and its argument. A local variable is a number: arguments in their order, others in
    that of their use."""
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = {name: i for i, name in enumerate(arguments)}
    for opname, value in steps_of(function):
        yield opname, known.setdefault(value, len(known)) if "FAST" in opname else value


def steps_of(function: Any) -> Iterator[tuple[str, Any]]:
    """The instructions, with names of local variables. A jump is by how many. Python from 3.13 on takes two variables
    at a time, and from 3.14 on borrows some: here each has a step of its own, and is loaded."""
    steps, places = _called_alike(function)
    for i, step in enumerate(steps):
        value, opname = step.argval, step.opname.replace("LOAD_METHOD", "LOAD_ATTR").replace("_BORROW", "")
        if isinstance(value, tuple) and "FAST" in opname:
            yield from zip(re.findall("[A-Z]+_FAST", opname), value, strict=True)
            continue
        if step.opcode in dis.hasconst:
            value = repr(value)  # 1 is not 1.0, and code is no other code
        elif step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            value = places[value] - i
        yield opname, value


def places_of(reference: Any, steps: list[tuple[str, Any]]) -> set[int]:
    """The numbers of the steps that are those of the reference, from its first one to its name END."""
    mine = [step for step in steps_of(reference) if step[0] != "RESUME"]
    mine = mine[: next(i for i, (_, value) in enumerate(mine) if value == "END")]
    found: set[int] = set()
    for start in range(len(steps) - len(mine) + 1):
        its = steps[start : start + len(mine)]
        if all(a[0] == b[0] and (a[1] == b[1] or _is_placeholder(a[1])) for a, b in zip(mine, its, strict=True)):
            found.update(range(start, start + len(mine)))
    return found


def _called_alike(function: Any) -> tuple[list[dis.Instruction], dict[int, int]]:
    """The instructions, and their numbers by their offsets, without NOP, which a string that stands alone leaves, and
    PUSH_NULL: whether there is one, and LOAD_ATTR instead of LOAD_METHOD, depends on where the name of a method's
    object was imported."""
    steps: list[dis.Instruction] = []
    places = {}
    for step in dis.get_instructions(function):
        places[step.offset] = len(steps)
        if step.opname not in ("NOP", "PUSH_NULL"):
            steps.append(step)
    return steps, places


def global_of(function: Any, name: str) -> Any:
    return function.__globals__.get(name, function.__builtins__.get(name))
