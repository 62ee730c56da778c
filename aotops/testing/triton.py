"""Operators whose kernels are Triton's, without a GPU: the library plans the launches of the declaration, results of
fake tensors have the reference's shapes, and Triton's interpreter gives the reference's values."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aotops import library as _library
from aotops.extra import encode
from aotops.op import Op
from aotops.triton.declaration import DeclarationError, Entry, load
from aotops.triton.interpreter import Answer, Question, ask, unusable
from aotops.triton.plan import Launched, Placed, Unplanned, bind, check_operator, plan, scratch_places, shape_of

from .calls import EntryCall, bound, calls_of, forward_call, nbytes, numbers, placeholders, raw
from .frameworks import adapters, requested
from .report import FAIL, PASS, UNAVAILABLE, Failure, Item
from .row import Case
from .search import counted, failure_of
from .subject import LARGEST, SMALL, Subject, elements
from .trial import Trial, dtype_of

CAPABILITIES = (75, 80, 86, 89, 90, 100, 103, 120, 121)
INTERPRETED = ("float16", "float32", "float64")
"""The interpreter computes wrongly with bfloat16."""
_TEXT = 1 << 16


class Declared(NamedTuple):
    file: Path
    entries: Mapping[str, Entry]


def declared(op: Op) -> Declared | None:
    """The declaration that an operator's library names, if the operator or its gradient is of it.

    Raises:
        DeclarationError: the module is missing, or wrong.
    """
    if op.library.triton is None:
        return None
    found = find_spec(op.library.triton)
    if found is None or found.origin is None:
        raise DeclarationError(f"Library(triton={op.library.triton!r}): there is no such module")
    entries = {entry.name: entry for entry in load(Path(found.origin))}
    own = {name: entries[name] for name in (op.name, op.backward.name if op.backward else "") if name in entries}
    return Declared(Path(found.origin), own) if own else None


# --------------------------------------------------------------------------------------------------------------- plans


def launch_plan(subject: Subject) -> Iterator[Item]:
    """On every GPU that the library has code for, with aligned and unaligned tensors."""
    try:
        found = declared(subject.op)
        if found is None:
            return
        for one in (subject.op, subject.op.backward):
            if one is not None and one.name in found.entries:
                entry = found.entries[one.name]
                check_operator(entry, one.inputs, one.results, list(one.attrs))
                if bool(one.workspace) != entry.workspace:
                    states = 'workspace=("workspace",)' if entry.workspace else "no workspace"
                    raise entry.error(f"the operator's workspace is {one.workspace!r}, expected {states}")
    except DeclarationError as error:
        yield Item("launch plan", "declaration", FAIL, failure=Failure(str(error)))
        return
    pairs = _pairs(subject, LARGEST)
    if not pairs:
        yield Item("launch plan", "", UNAVAILABLE, "no case is small enough")
        return
    archs: set[str] = set()
    for case, dtype in pairs:
        try:
            _compare_plans(subject, found, subject.trial(case, dtype), archs)
        except Exception as error:  # of the declaration, or of the library
            failure = failure_of(subject, "launch plan", error, case, dtype)
            yield Item("launch plan", "", FAIL, failure=failure)
            return
    yield Item("launch plan", "", PASS, f"{counted(pairs)}, for {', '.join(sorted(archs))}")


def _pairs(subject: Subject, most: int) -> list[tuple[Case, str]]:
    cases = [case for case in subject.cases if elements(case) <= (SMALL if subject.quick else most)]
    return subject.pairs(cases)


def _compare_plans(subject: Subject, found: Declared, trial: Trial, archs: set[str]) -> None:
    for one in calls_of(subject.op, trial, "cuda"):
        entry = found.entries.get(one.op.name)
        for capability in CAPABILITIES if entry else ():
            for shift in (0, 8):
                _compare(one, entry, capability, shift, archs)  # type: ignore[arg-type]


def _compare(one: EntryCall, entry: Entry, capability: int, shift: int, archs: set[str]) -> None:
    """Raises AssertionError where the library plans other launches than the declaration says."""
    if not any(nbytes(one.given[slot]) for slot in one.op.results):
        return  # it launches nothing
    addresses = {slot: ((i + 1) << 40) + shift for i, slot in enumerate(one.given)}
    told = _told(one, addresses, capability)
    if isinstance(told, NotImplementedError) and "has no code for" in str(told):
        return
    expected = _expected(
        one, entry, addresses, capability if isinstance(told, Exception) else int(told["arch"][3:].rstrip("af"))
    )
    if isinstance(told, Exception) or isinstance(expected, Exception):
        assert isinstance(told, Exception) and isinstance(expected, Exception), (  # noqa: PT018
            f"on compute capability {capability} the library says {told}, expected {expected}"
        )
        return
    archs.add(told["arch"])
    launches, zeroed = expected
    assert [tuple(each) for each in told["zeroed"]] == zeroed, f"zeroed is {told['zeroed']}, expected {zeroed}"
    for got, launched in zip(told["launches"], launches, strict=True):
        config = launched.call.configs[launched.config]
        facts = {"config": launched.config, "hint": launched.hint, "grid": list(launched.grid)}
        wrong = {name: (got[name], value) for name, value in facts.items() if got[name] != value}
        if tuple(got["values"][:-2]) != launched.values:
            wrong["values"] = (got["values"][:-2], list(launched.values))
        assert not wrong, f"{got['kernel']}, {config}: (library, declaration) are {wrong}"


def _expected(
    one: EntryCall, entry: Entry, addresses: Mapping[str, int], arch: int
) -> tuple[list[Launched], list[tuple[int, int]]] | Exception:
    placed = {slot: Placed(addresses[slot], spec.shape, spec.dtype) for slot, spec in one.given.items()}
    try:
        inputs = {slot: placed[slot] for slot in entry.inputs}
        names = bind(entry, inputs, dict(zip(one.op.attrs, one.attrs, strict=True)))
        placed |= scratch_places(entry, names, addresses[one.op.workspace[0]]) if entry.scratch else {}
        zeroed = [(placed[name].address, _bytes_of(entry, name, names)) for name in entry.zeroed]
        return plan(entry, names, placed, str(arch)), zeroed
    except (Unplanned, ArithmeticError) as error:
        return error


def _bytes_of(entry: Entry, name: str, names: Any) -> int:
    from aotops.spec import TensorSpec

    tensor = entry.tensors[name]
    return nbytes(TensorSpec(shape_of(tensor, names), names.types.get(tensor.type, tensor.type)))


def _told(one: EntryCall, addresses: Mapping[str, int], capability: int) -> Any:
    """The plan of the library, or its error."""
    functions, host = one.op.library.functions, _library.load()
    specs = [(addresses[slot], one.given[slot]) for slot in one.op.slots if slot in one.given]
    n, text = len(specs), ctypes.create_string_buffer(_TEXT)
    rows = [(ctypes.c_int64 * max(1, len(spec.shape)))(*spec.shape) for _, spec in specs]
    present = [one.specs.get(slot) is not None for slot in one.op.slots]
    extra = ctypes.c_void_p(host.aot_extra_new(encode(one.op, one.attrs, present).encode()))
    try:
        status = getattr(functions, f"{one.op.entry}_cudaPlan")(
            n,
            (ctypes.c_void_p * n)(*(address for address, _ in specs)),
            (ctypes.c_int * n)(*(len(spec.shape) for _, spec in specs)),
            (ctypes.POINTER(ctypes.c_int64) * n)(*(ctypes.cast(row, ctypes.POINTER(ctypes.c_int64)) for row in rows)),
            (ctypes.c_char_p * n)(*(spec.dtype.encode() for _, spec in specs)),
            extra,
            capability,
            text,
            _TEXT,
        )
        functions.check(status)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        return error
    finally:
        host.aot_extra_delete(extra)
    return json.loads(text.value)


# -------------------------------------------------------------------------------------------------------- fake tensors


def fake_tensors(subject: Subject) -> Iterator[Item]:
    """Shapes and dtypes without values, in torch and JAX."""
    try:
        if declared(subject.op) is None:
            return
    except DeclarationError:
        return  # launch plan tells
    for name, of in (("torch", _fake_in_torch), ("jax", _fake_in_jax)):
        if name not in requested() or not find_spec(name):
            continue
        (adapter,) = adapters(name, subject.op.library)
        pairs = [(case, dtype) for case, dtype in _pairs(subject, SMALL) if adapter.has_dtype(dtype)]
        yield _item_of_fakes(subject, adapter, of, pairs)


def _item_of_fakes(subject: Subject, adapter: Any, of: Any, pairs: Sequence[tuple[Case, str]]) -> Item:
    for case, dtype in pairs:
        try:
            trial = subject.trial(case, dtype)
            specs = bound(subject.op, case, placeholders(case, dtype), dtype).written("cuda")
            got = of(adapter, subject, trial)
            expected = [(specs[y].shape, specs[y].dtype) for y in subject.op.outputs]
            assert got == expected, f"fake tensors give {got}, expected {expected}"
            shapes = [tuple(y.shape) for y in trial.expected[: len(expected)]]
            assert [shape for shape, _ in got] == shapes, f"the results have shapes {got}, the reference's are {shapes}"
        except Exception as error:  # of a framework too
            failure = failure_of(subject, "fake tensors", error, case, dtype)
            return Item("fake tensors", adapter.name, FAIL, failure=failure)
    return Item("fake tensors", adapter.name, PASS, counted(pairs)) if pairs else Item(
        "fake tensors", adapter.name, UNAVAILABLE, "no case is small enough"
    )  # fmt: skip


def _fake_in_torch(adapter: Any, subject: Subject, trial: Trial) -> list[tuple[tuple[int, ...], str]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch = adapter.torch
    with FakeTensorMode():
        inputs = {
            slot: None if x is None else torch.empty(
                x.shape, dtype=getattr(torch, dtype_of(x, trial.dtype, slot in trial.case.wide)), device="cuda")
            for slot, x in trial.inputs.items()
        }  # fmt: skip
        results = adapter.forward(subject.op.name, inputs, trial.case.attrs)
    results = results if isinstance(results, tuple) else (results,)
    return [(tuple(y.shape), adapter.dtype(y)) for y in results]


def _fake_in_jax(adapter: Any, subject: Subject, trial: Trial) -> list[tuple[tuple[int, ...], str]]:
    from .dtypes import numpy_dtype

    jax = adapter.jax
    inputs = {
        slot: jax.ShapeDtypeStruct(x.shape, numpy_dtype(dtype_of(x, trial.dtype, slot in trial.case.wide)))
        for slot, x in trial.inputs.items()
        if x is not None
    }
    results = jax.eval_shape(lambda given: adapter.forward(subject.op.name, given, trial.case.attrs), inputs)
    results = results if isinstance(results, tuple) else (results,)
    return [(tuple(y.shape), adapter.dtype(y)) for y in results]


# --------------------------------------------------------------------------------------------------------- interpreter


def interpreted(subject: Subject) -> Iterator[Item]:
    """Values, and gradients where the backward is Triton's too, by Triton's interpreter."""
    try:
        found = declared(subject.op)
    except DeclarationError:
        return
    if found is None or subject.op.name not in found.entries:
        return
    if reason := unusable():
        yield Item("interpreter", "", UNAVAILABLE, reason)
        return
    pairs = [(case, dtype) for case, dtype in _pairs(subject, 1 << 16) if dtype in INTERPRETED]
    if not pairs:
        yield Item("interpreter", "", UNAVAILABLE, "no case is small enough, or of a dtype that it computes with")
        return
    try:
        yield from _interpreted(subject, found, pairs)
    except Exception as error:  # of the declaration, or of the interpreter
        yield Item("interpreter", "", FAIL, failure=Failure(f"{type(error).__name__}: {error}"))


def _interpreted(subject: Subject, found: Declared, pairs: Sequence[tuple[Case, str]]) -> Iterator[Item]:
    op = subject.op
    arch = _arch_of(subject, found, pairs)
    calls = [forward_call(op, subject.trial(case, dtype), "cuda") for case, dtype in pairs]
    answers = ask(found.file, [_question(one, arch, one.inputs) for one in calls])
    yield _item(subject, "values", pairs, answers, lambda trial, answer: _assert_values(subject, trial, answer))
    backward = op.backward
    if backward is None or backward.name not in found.entries:
        return
    kept = [i for i, answer in enumerate(answers) if not (answer.fault or answer.skipped)]
    some = [pairs[i] for i in kept]
    calls = [calls_of(op, subject.trial(*pair), "cuda")[1] for pair in some]
    results = [{slot: data for slot, (data, _, _) in answers[i].outputs.items()} for i in kept]
    given = [{**saved, **one.inputs} for saved, one in zip(results, calls, strict=True)]
    answers = ask(found.file, [_question(one, arch, data) for one, data in zip(calls, given, strict=True)])
    yield _item(subject, "gradients", some, answers, lambda trial, answer: _assert_gradients(subject, trial, answer))


def _arch_of(subject: Subject, found: Declared, pairs: Sequence[tuple[Case, str]]) -> str:
    """A GPU that the library has code for."""
    entry = found.entries[subject.op.name]
    archs: set[str] = set()
    for pair in reversed(pairs):
        one = forward_call(subject.op, subject.trial(*pair), "cuda")
        for capability in CAPABILITIES:
            _compare(one, entry, capability, 0, archs)
        if archs:
            break
    return max((arch[3:].rstrip("af") for arch in archs), key=lambda arch: (arch == "90", int(arch)), default="90")


def _question(one: EntryCall, arch: str, data: Mapping[str, bytes]) -> Question:
    inputs = {slot: (data[slot], one.given[slot].shape, one.given[slot].dtype) for slot in one.op.inputs}
    return Question(one.op.name, arch, inputs, dict(zip(one.op.attrs, one.attrs, strict=True)))


def _item(
    subject: Subject, where: str, pairs: Sequence[tuple[Case, str]], answers: Sequence[Answer], try_: Any
) -> Item:
    tried = []
    for (case, dtype), answer in zip(pairs, answers, strict=True):
        if answer.skipped:
            continue
        try:
            assert not answer.fault, answer.fault
            try_(subject.trial(case, dtype), answer)
        except Exception as error:
            failure = failure_of(subject, "interpreter", error, case, dtype)
            return Item("interpreter", where, FAIL, failure=failure)
        tried.append((case, dtype))
    if not tried:
        return Item("interpreter", where, UNAVAILABLE, "every case has too many programs")
    return Item("interpreter", where, PASS, counted(tried))


def _assert_values(subject: Subject, trial: Trial, answer: Answer) -> None:
    _assert_written(answer)
    if others := set(answer.changed) - set(subject.op.mutates):
        raise AssertionError(f"it writes to {', '.join(sorted(others))}, an input")
    names = subject.op.outputs
    results = [_numbers(answer, y) for y in names]
    for slot in subject.op.mutates:
        spec = forward_call(subject.op, trial, "cuda").given[slot]
        results.append(numbers(answer.changed.get(slot) or raw(trial.inputs[slot], spec.dtype), spec))  # type: ignore[arg-type]
    trial.assert_values(tuple(results))


def _assert_gradients(subject: Subject, trial: Trial, answer: Answer) -> None:
    _assert_written(answer)
    names = [name for name in answer.outputs if name[0] == "d" and name[1:] in subject.op.inputs]
    floating = {slot for slot, x in trial.inputs.items() if x is not None and x.dtype.kind == "f"}
    got: dict[str, np.ndarray | None] = {name[1:]: _numbers(answer, name) for name in names if name[1:] in floating}
    trial.assert_gradients(got)


def _numbers(answer: Answer, name: str) -> np.ndarray:
    from aotops.spec import TensorSpec

    data, shape, dtype = answer.outputs[name]
    return numbers(data, TensorSpec(shape, dtype))


def _assert_written(answer: Answer) -> None:
    """Raises AssertionError where memory of a result is as it was before the call."""
    for name, missed in answer.unwritten.items():
        _, shape, _ = answer.outputs[name]
        at = tuple(map(int, np.unravel_index(missed[0], shape))) if shape else ()
        raise AssertionError(
            f"{len(missed)} of {int(np.prod(shape))} elements of {name} are not written, the first at {at}: the grid "
            f"does not cover it; launched: {', '.join(answer.grids)}"
        )
