"""Whether a backward may write a gradient over a saved tensor (``Op.overwrites``)."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from . import private

FROM = 1 << 20
"""Bytes from which a saved tensor is worth these checks, of some microseconds."""


def may_overwrite(i: int, saved: tuple[Any, ...]) -> bool:
    """In a backward, whether nobody else will read ``saved[i]``: the graph is freed afterwards, and the tensor and its
    memory are referred to as by a backward alone. So it is not if the caller has kept it or a view of it, or if a hook
    has packed it. Counts the new version."""
    if not frees_graph() or packs() or _is_shared(saved[i].untyped_storage()):
        return False
    times = sum(t is saved[i] for t in saved)  # it also stands for an input (Op.instead)
    if _references(saved, i) != _references_of_backward(times):
        return False
    torch.autograd.graph.increment_version(saved[i])
    return True


def keeps_graph() -> bool:
    """Whether a backward is running that keeps its graph. torch says so, too, where none is running."""
    return private.graph_task() != -1 and private.keeps_graph()


def frees_graph() -> bool:
    """Whether a backward is running that frees its graph: a node that is called by hand keeps what it has saved."""
    return private.graph_task() != -1 and not private.keeps_graph()


def keep_inputs(context: Any, inputs: tuple[Any, ...]) -> None:
    """Keeps the inputs that a residual is saved instead of (Op.instead), for a derivative of the gradient, with their
    versions: as attributes, so that they may be changed in place."""
    context.inputs, context.versions = inputs, tuple(t._version for t in inputs)


def drop_inputs(context: Any) -> None:
    """After a backward: a node lives as long as its result, and torch frees only what it has saved itself."""
    if frees_graph():
        context.inputs = context.versions = ()


def packs() -> bool:
    """Whether a hook packs what is saved, such as a checkpoint's, which drops it."""
    return private.saved_tensor_hooks(False) is not None


def _is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether another process may have the memory."""
    if not storage.is_cuda:  # for CUDA is_shared() is always true
        return storage.is_shared()
    sent = list(torch.multiprocessing.reductions.shared_cache.values())
    return any(reference.cdata == storage._cdata for reference in sent)


def _references(saved: tuple[Any, ...], i: int) -> tuple[int, int, int, int]:
    """To the Python object, to the tensor, and to the object and the memory of its storage."""
    t = saved[i]
    storage = t.untyped_storage()
    return sys.getrefcount(t), t._use_count(), sys.getrefcount(storage), private.storage_use_count(storage._cdata)


@functools.cache
def _references_of_backward(times: int) -> tuple[int, int, int, int]:
    """The counts of ``_references`` in a backward for a tensor that it alone has, saved so many times. They depend on
    the versions of torch and Python, and so are measured once, where no hook packs what is saved."""
    found = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(*[x.new_empty(1)] * times)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            saved = ctx.saved_tensors
            found.append(_references(saved, 0))
            return dy

    with torch.enable_grad():
        Probe.apply(torch.zeros((), requires_grad=True)).backward()
    return found[0]
