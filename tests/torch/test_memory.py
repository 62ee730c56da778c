"""The memory of torch's calls: what a forward and a backward have at their peak and keep afterwards, against what the
operator's definition states: results, residuals, workspace and gradients, in bytes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.autograd.graph import save_on_cpu  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.infer import infer  # noqa: E402
from aotops.ops import OPS  # noqa: E402
from aotops.testing.cases import CASES, row_samples  # noqa: E402
from aotops.testing.frameworks import Torch  # noqa: E402

MISSING = Torch().missing("cuda")
WHERE = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING or "")])]
PLAIN = pytest.mark.skipif(not ours.tensors.READS_TENSORS, reason="this torch has no path of plain calls")


# ------------------------------------------------------------------------------------------------------- the statement


class Stated(NamedTuple):
    """Bytes."""

    results: int
    residuals: int
    scratch: int
    """Scratch of the forward."""
    gradients: int
    backward_scratch: int


def nbytes(spec) -> int:
    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize


def stated(op, attrs, inputs: Sequence[Any], device: str) -> Stated:
    def total(specs, names):
        return sum(nbytes(specs[name]) for name in names)

    given = tuple(map(ours.tensors.spec_of, inputs))
    specs = infer(op, attrs, given, device)
    large = device == "cuda" and inputs[0].numel() > ours.KEEP_RESIDUALS_FROM
    residuals = op.kept_residuals(attrs) if op.always_save_residuals or large else ()
    known = dict(zip(op.inputs, given, strict=True)) | specs
    known |= {f"d{y}": specs[y] for y in op.outputs} | dict.fromkeys({*op.residuals} - {*residuals})
    backward = op.backward
    scratch, gradients, backward_scratch = total(specs, op.workspace), 0, 0
    if backward.has_kernel:
        written = infer(backward, attrs, tuple(known[slot] for slot in backward.inputs), device)
        dtypes = {slot: known[slot] and known[slot].dtype for slot in backward.inputs}
        absent = {f"d{slot}" for slot in op.inputs if known[slot] is None} | set(backward.merged(dtypes))
        gradients = total(written, [y for y in backward.results if y not in absent])
        backward_scratch = total(written, backward.workspace)
        # autograd's zeros
        backward_scratch += total(specs, [y for y in op.outputs if f"d{y}" not in backward.inputs])
    factors = backward.factors(attrs)
    gradients += total(known, [backward.alias[y] for y in factors])  # products of torch's, with a number as two tensors
    backward_scratch += 12 * len(factors)
    results = total(specs, [y for y in op.outputs if y not in op.alias])
    return Stated(results, total(specs, residuals), scratch, gradients, backward_scratch)


# ---------------------------------------------------------------------------------------------------------- measuring


def collect() -> None:
    """Frees what an earlier call has left in a cycle. What is left is not looked at again: a collection of all that is
    imported takes half a second."""
    gc.collect()
    gc.freeze()


def requested(when: str) -> int:
    """Bytes that were asked for: the allocator gives whole blocks, of up to 1 MiB more."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


def settled() -> int:
    """Bytes that are asked for now. autograd's thread of a device drops a graph a moment after a backward returns."""
    torch.cuda.synchronize()
    found, same = requested("current"), 0
    while same < 5:
        time.sleep(0.001)
        before, found = found, requested("current")
        same = same + 1 if found == before else 0
    return found


def measured(device: str, f: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result of ``f``, and by how many bytes torch's memory was larger afterwards, and at its peak: of all that
    allocates through torch, in C too."""
    collect()
    if device == "cuda":
        before = settled()
        torch.cuda.reset_peak_memory_stats()
        result = f()
        return result, settled() - before, requested("peak") - before
    gc.disable()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = f()
    finally:
        gc.enable()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return result, now, peak


class _Usage(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def in_use() -> int:
    """Bytes of this process that are allocated, by whatever: C's malloc."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
    if mallinfo is None:
        pytest.skip("this C library does not tell what is allocated")
    mallinfo.restype = _Usage
    collect()
    usage = mallinfo()
    return usage.uordblks + usage.hblkhd


def call_of(name: str, case, device: str):
    """A function that calls the operator, its leaves, and the definition's inputs and attributes."""
    arrays = case.random(np.random.default_rng(0))
    given = {
        slot: None if x is None
        else torch.tensor(x, device=device) if slot in case.classes or slot in case.dtypes
        else torch.tensor(x, dtype=torch.float32, device=device).requires_grad_(slot not in case.constants)
        for slot, x in arrays.items()
    }  # fmt: skip
    op = OPS[name]
    inputs, attrs = op.bind(**given, **case.attrs)
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    return lambda: getattr(ours, name)(**given, **case.attrs), leaves, inputs, op.canonical(attrs)


def cases_with_a_kernel(name: str) -> list[Any]:
    """The row's samples and its largest case, where the kernel is called as the definition says: no input is broadcast,
    and none is empty."""
    op = OPS[name]
    shapes = lambda case: [s for s in case.shapes.values() if s is not None]  # noqa: E731
    given = {
        id(c): c for c in [*row_samples(name).values(), *CASES[name].opcheck, max(CASES[name].cases, key=elements)]
    }.values()
    return [
        case
        for case in given
        if all(math.prod(s) for s in shapes(case)) and not (op.broadcast and len(set(shapes(case))) > 1)
    ]


def elements(case) -> int:
    return sum(math.prod(s) for s in case.given.values())


def as_tuple(y):
    return y if isinstance(y, tuple) else (y,)


def recorded(y):
    """The results that have a gradient."""
    return [t for t in as_tuple(y) if t.requires_grad]


# -------------------------------------------------------------------------------------------------------------- tests

DIFFERENTIABLE = sorted(name for name, op in OPS.items() if op.backward is not None)


@pytest.fixture
def bound(monkeypatch):
    """All values of attributes are bound when they are first used: the dispatcher, which runs others, keeps a residual
    without a graph, too."""
    ours.eager._uses.cache_clear()
    monkeypatch.setattr(ours.eager, "_first_values", Counter())
    monkeypatch.setattr(ours.eager, "_VALUES", 1 << 30)


@PLAIN
@pytest.mark.usefixtures("bound")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_call_has_the_memory_that_is_stated(name, where):
    """With the graph, a forward keeps results and residuals; after a backward that frees the
    graph results and gradients are left, also where the result is kept; and no step has more than that and scratch."""
    for case in cases_with_a_kernel(name):
        call, leaves, inputs, attrs = call_of(name, case, where)
        say = stated(OPS[name], attrs, inputs, where)
        dys = [torch.randn_like(y) for y in recorded(call())]
        torch.autograd.grad(recorded(call()), leaves, dys)  # what is cached for these shapes
        with torch.no_grad():
            y, kept, peak = measured(where, call)
        assert kept == say.results, f"{case}: result alone"
        assert peak <= say.results + say.scratch, f"{case}: peak without a graph"
        del y
        y, kept, peak = measured(where, call)
        assert kept == say.results + say.residuals, f"{case}: result and graph"
        assert peak <= kept + say.scratch, f"{case}: peak of the forward"
        for keep in (True, False):
            step = partial(torch.autograd.grad, recorded(y), leaves, dys, retain_graph=keep)
            found, kept, peak = measured(where, step)
            freed = 0 if keep else say.residuals
            assert kept == say.gradients - freed, f"{case}: retain_graph={keep}, the result is kept"
            assert peak <= say.gradients + say.backward_scratch, f"{case}: peak of a backward, retain_graph={keep}"
            del found, step
        del y


@PLAIN
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_result_that_is_kept_keeps_nothing_else(name):
    """Also of what C allocates, without a profiler: of a step that frees its graph the result is left."""
    case = max(cases_with_a_kernel(name), key=elements)
    call, leaves, inputs, attrs = call_of(name, case, "cpu")
    say, times, kept = stated(OPS[name], attrs, inputs, "cpu"), 8, []
    copies = [t.detach().clone().requires_grad_() for t in leaves]
    dys = [torch.randn_like(y) for y in recorded(call())]

    def step():
        """The inputs are of the step, as logits are: nothing but the step has them."""
        own = dict(zip(map(id, leaves), (t * 1 for t in copies), strict=True))
        named = {slot: own.get(id(t), t) for slot, t in zip(OPS[name].inputs, inputs, strict=True)}
        y = as_tuple(getattr(ours, name)(**named, **case.attrs))
        torch.autograd.grad(recorded(y), copies, dys)
        return y

    for _ in range(3):
        step()
    before = in_use()
    for _ in range(times):
        kept.append(step())
    each, own = (in_use() - before) / times, sum(t.numel() * 4 for t in leaves)
    slack = 8192  # nodes of autograd and Python's objects
    assert each <= say.results + slack, f"{each} bytes a step of {case}; results {say.results}, inputs {own}"


ROWS, CLASSES = 64, 4096


def logits(**more):
    torch.manual_seed(0)
    return torch.randn(ROWS, CLASSES, **more), torch.randint(CLASSES, (ROWS,))


class Anything(TorchDispatchMode):
    """A mode that changes nothing: no call is plain."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("path", ["plain", "dispatcher"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_loss_lets_go_of_its_logits(path, reduction):
    """In a backward that frees the graph, though the loss is kept, and not in one that keeps it."""
    h, target = logits(requires_grad=True)
    x = h * 1
    alive = []  # the logits' own node and the loss's see the same Python object
    weakref.finalize(x, alive.append, "freed")
    with contextlib.nullcontext() if path == "plain" else Anything():
        loss = ours.cross_entropy(x, target, reduction=reduction)
    del x
    dy = torch.full_like(loss, 0.5)
    first = torch.autograd.grad(loss, h, dy, retain_graph=True)[0]
    second = torch.autograd.grad(loss, h, dy, create_graph=True)[0]
    again = torch.autograd.grad(second.square().sum(), h, retain_graph=True)[0]
    assert again.any()
    assert not alive
    torch.testing.assert_close(second.detach(), first)
    del second, again
    torch.autograd.grad(loss, h, dy)
    gc.collect()
    assert alive
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward(dy)


@PLAIN
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_losses_of_a_loop(reduction):
    """Kept losses keep neither logits nor slope."""
    h, target = logits(requires_grad=True)
    size, kept = h.numel() * 4, []

    def step():
        loss = ours.cross_entropy(h * 1, target, reduction=reduction)
        torch.autograd.grad(loss, h, torch.full_like(loss, 0.5))
        return loss

    step()
    before = in_use()
    for _ in range(5):
        kept.append(step())
    assert in_use() - before < size / 4
    for loss in kept:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward(torch.ones_like(loss))


@PLAIN
@pytest.mark.parametrize("compute", [F.cross_entropy, ours.cross_entropy], ids=["torch", "aotops"])
def test_a_checkpoint_keeps_no_logits(compute):
    """A hook keeps what it packs: a checkpoint computes logits again."""
    h, target = logits(requires_grad=True)
    expected = torch.autograd.grad(F.cross_entropy(h * 2, target), h)[0]
    run = lambda: checkpoint(lambda h: compute(h * 2, target), h, use_reentrant=False)  # noqa: E731
    run()
    before = in_use()
    loss = run()
    assert in_use() - before < h.numel()
    x = torch.autograd.grad(loss, h)[0]
    torch.testing.assert_close(x, expected)
    with save_on_cpu():
        loss = compute(h * 2, target)
    torch.testing.assert_close(torch.autograd.grad(loss, h)[0], expected)
