"""``check``: all that is tried on an operator."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from aotops.frontends import FRONTENDS
from aotops.op import Op
from aotops.registry import get
from aotops.spec import DEVICES
from aotops.terminal import check_known
from aotops.tvm_ffi_functions import FunctionLibrary

from . import audit, inputs, memory, odd, runs, torchs, triton, values
from .frameworks import ADAPTERS, adapters
from .report import FAIL, UNAVAILABLE, Failure, Item, Report
from .subject import Subject, as_cases, default_cases, elements, importable, reference_name, row_of
from .trial import DTYPES
from .worker import Worker

CHECKS: dict[str, Callable[[Subject], Iterator[Item]]] = {
    "library": audit.library,
    "launch plan": triton.launch_plan,
    "fake tensors": triton.fake_tensors,
    "interpreter": triton.interpreted,
    "bounds": memory.bounds,
    "outputs written": memory.written,
    "inputs unchanged": memory.unchanged,
    "alignment": memory.alignment,
    "leaks": memory.leaks,
    "values": values.values,
    "gradients": values.gradients,
    "shapes": inputs.shapes,
    "NaN and infinity": odd.odd_numbers,
    "layouts": inputs.layouts,
    "same bits": runs.repeat,
    "threads": runs.threads,
    "opcheck": torchs.opcheck,
    "gradcheck": torchs.gradcheck,
    "CUDA graph": torchs.capture,
    "sanitizer": memory.sanitizer,
}
"""In the order in which they run: what may end the process is first tried in another one."""


def check(
    op: Op | str,
    reference: Callable[..., Any] | None = None,
    *,
    cases: Sequence[Any] | None = None,
    frameworks: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    devices: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    seed: int = 0,
    sanitize: bool = False,
    quick: bool = False,
    huge: bool = False,
    progress: Callable[[Item], None] | None = None,
) -> Report:
    """Checks an operator: its library, memory accesses, values, gradients, and behaviour in each framework.

    Args:
        op: an operator, or its name in the registry.
        reference: the formula in NumPy, a function of float64 arrays and attributes by the names of the public
            function. Without it, that of the row of the operator's library.
        cases: what to call it with: ``Case`` objects, dicts of shapes by input, or tuples of shapes. Without it, the
            row's; for an operator without a row, a few shapes, the same for every input.
        frameworks: of "numpy", "torch", "jax", "cupy" and "mindspore"; one that is not installed fails. Without it,
            those installed.
        dtypes: of "float16", "bfloat16", "float32" and "float64"; one that the operator refuses fails. Without it,
            those that it accepts.
        devices: of "cpu" and "cuda". Without it, those that the library has an entry for and the machine has.
        only: names of checks; all without it.
        seed: of the numbers.
        sanitize: on a GPU, run the kernels under compute-sanitizer too.
        quick: fewer cases, for a result in a few seconds.
        huge: a tensor of more than 2**31 elements too, where there is memory for it.
        progress: called with each item as it is known.

    Returns:
        A report. ``report.ok`` says whether everything passed; ``print(report.render())`` prints it.

    Raises:
        ValueError: there is neither a row nor a reference; an unknown framework, dtype, device or check.
        KeyError: no operator has this name.
        NotImplementedError: the operator hosts a function object, which the processes that try it do not have.
    """
    started = time.perf_counter()
    op = get(op) if isinstance(op, str) else op
    check_known("check: frameworks", frameworks, sorted(FRONTENDS))
    check_known("check: dtypes", dtypes, sorted(DTYPES))
    check_known("check: devices", devices, DEVICES)
    check_known("check: only", only, sorted(CHECKS))
    items: list[Item] = []

    def add(item: Item) -> None:
        items.append(item)
        if progress:
            progress(item)

    with _settings_kept(), closing(Worker()) as worker:
        subject = _subject(op, reference, cases, seed)
        subject = replace(subject, quick=quick, huge=huge, sanitize=sanitize, worker=worker)
        subject = _where(subject, frameworks, devices, add)
        subject = _in_dtypes(subject, dtypes, add)
        for name in CHECKS if only is None else only:
            if any(item.check == "bounds" and item.status == FAIL for item in items):
                add(Item("other checks", "", UNAVAILABLE, "not run: the kernel would corrupt this process's memory"))
                break
            if subject.dtypes or name == "library":
                for item in CHECKS[name](subject):
                    add(item)
    return Report(op.name, str(op.library.path), items, time.perf_counter() - started)


def _subject(op: Op, reference: Any, cases: Sequence[Any] | None, seed: int) -> Subject:
    if isinstance(op.library, FunctionLibrary):
        raise NotImplementedError(
            f"{op.name}: it hosts a function object, which the processes that try it do not have: check an operator of "
            f"the library's file"
        )
    row = row_of(op, reference)
    if row is None:
        raise ValueError(
            f"{op.name}: its library {op.library.name} has no row of cases for it (Library(cases=...)), expected a "
            f"reference: check(op, reference)"
        )
    tried = as_cases(op, cases) if cases is not None else list(row.cases) or default_cases(op)
    if cases is None and not row.cases:
        probe = Subject(op, row, tuple(tried), (), (), ())
        tried = [case for case in tried if any(probe.refusal(case, dtype) is None for dtype in DTYPES)]
    if not tried:
        raise ValueError(
            f"{op.name}: it accepts no inputs of one shape, expected cases: check(op, reference, cases=...)"
        )
    tried.sort(key=elements)
    imports, expression = importable(op)
    named = ""
    if reference is not None:
        more, named = reference_name(reference)
        imports = "; ".join(filter(None, (imports, more)))
    subject = Subject(op, row, tuple(tried), (), (), (), seed, from_row=cases is None)
    return replace(subject, expression=expression, imports=imports, reference=named)


def _where(
    subject: Subject, frameworks: Sequence[str] | None, devices: Sequence[str] | None, add: Callable[[Item], None]
) -> Subject:
    """With the frameworks and devices that are here. One that was asked for and is not here is a failure."""
    no_entry = {device: _no_entry(subject.op, device) for device in devices or DEVICES}
    missing = {
        (adapter, device): adapter.missing(device)
        for name in frameworks or ADAPTERS
        for adapter in adapters(name, subject.op.library)
        for device in adapter.devices
        if no_entry.get(device, "") is None
    }
    usable = [run for run, why in missing.items() if why is None]
    on = [device for device in DEVICES if any(d == device for _, d in usable)]
    for device, why in no_entry.items():
        if device not in on:
            add(
                _absent(
                    "devices", device, why or f"no framework that is tested has a {device} device here", bool(devices)
                )
            )
    if not devices and subject.op.has_kernel and all(no_entry.values()):
        add(Item("devices", "", FAIL, failure=Failure(str(no_entry["cuda"]))))
    reasons = {(adapter.frontend, why) for (adapter, device), why in missing.items() if why and device in ("cpu", *on)}
    for frontend, why in sorted(reasons):
        add(_absent("frameworks", frontend, why, bool(frameworks)))
    return replace(subject, usable=tuple(usable), devices=tuple(on))


def _no_entry(op: Op, device: str) -> str | None:
    try:
        op.library.entry_name(op, device)
    except NotImplementedError as error:
        return str(error)
    return None


def _absent(check: str, where: str, why: str, asked: bool) -> Item:
    if asked:
        return Item(check, where, FAIL, failure=Failure(why))
    return Item(check, where, UNAVAILABLE, why)


def _in_dtypes(subject: Subject, dtypes: Sequence[str] | None, add: Callable[[Item], None]) -> Subject:
    accepted = []
    for dtype in dtypes or subject.row.dtypes:
        # a kernel is not asked about empty tensors
        cases = [case for case in subject.cases if all(0 not in shape for shape in case.given.values())]
        refusals = [subject.refusal(case, dtype) for case in cases or subject.cases]
        if all(refusals):
            add(_absent("dtypes", dtype, f"refused: {refusals[0]}", bool(dtypes)))
        else:
            accepted.append(dtype)
    if not accepted and not dtypes:
        add(Item("dtypes", "", FAIL, failure=Failure(f"{subject.op.name} refuses every dtype that is tried")))
    return replace(subject, dtypes=tuple(accepted))


@contextmanager
def _settings_kept() -> Iterator[None]:
    """JAX's 64-bit numbers, which the adapter of JAX switches on. MindSpore warns of every empty tensor."""
    os.environ.setdefault("GLOG_v", "3")  # read when MindSpore is imported: errors alone
    before = sys.modules["jax"].config.jax_enable_x64 if "jax" in sys.modules else None
    try:
        yield
    finally:
        if before is not None:
            sys.modules["jax"].config.update("jax_enable_x64", before)
