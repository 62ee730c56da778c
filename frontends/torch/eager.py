"""Plain eager calls: an operator bound to its attributes, as an autograd function without torch's Python wrapper."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from ctypes import py_object, pythonapi
from typing import Any

import torch
from torch import Tensor

from aotops.call import MOST_BOUND
from aotops.infer import infer
from aotops.op import Attr, Op
from aotops.spec import check_devices

from . import call, private
from .autocast import cast_inputs
from .gradients import run_backward, with_zeros
from .images import Images, images_of, moved_backward
from .registered import in_c
from .tensors import (
    DTYPES,
    KEEP_RESIDUALS_FROM,
    Tensors,
    all_given,
    plain_tensor,
    prototypes,
    public_outputs,
    results_of,
    spec_of,
    specs_of,
)


class Eager:
    """An operator bound to its attributes, for plain tensors. Only the entry checks the call; ``_general`` handles a
    call that it refuses. ``last``: images in channels_last, which the attributes describe with their channels last."""

    def __init__(self, op: Op, attrs: tuple[Attr, ...], last: Images | None) -> None:
        run = functools.partial(_run_backward, op, attrs)
        fallback = moved_backward(last, op, run) if last else run
        builtins = call.function(op, attrs, prototypes, KEEP_RESIDUALS_FROM, fallback, last)
        members = {"forward": staticmethod(builtins.forward), "backward": staticmethod(builtins.backward)}
        function = type(op.name.title().replace("_", ""), (torch.autograd.Function,), members)
        self.run = builtins.run
        self.apply = apply_of(function)
        self.differentiable = call.differentiable(builtins, self.apply)

    def __call__(self, *inputs: Tensor | None):
        recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        return self.apply(*inputs) if recorded else self.run(*inputs)


def _run_backward(op: Op, attrs: tuple[Attr, ...], saved: Tensors, grads: Tensors, needed: Any, ctx: Any):
    if call.none_for_unread(op) and not all_given(grads):
        grads = with_zeros(op, _specs_of_outputs(op, attrs, dict(zip(op.saved, saved, strict=True))), saved, grads)
    return run_backward(op, attrs, saved, grads, needed, ctx)


def _specs_of_outputs(op: Op, attrs: tuple[Attr, ...], saved: dict[str, Tensor]) -> list[tuple[Any, torch.dtype]]:
    """The shape and dtype of each output that may not be left unread, which is given no zeros."""
    if set(op.inputs) <= set(saved):
        specs = specs_of(op, attrs, [saved[slot] for slot in op.inputs])
        return [(specs[y].shape, DTYPES[specs[y].dtype]) for y in op.outputs]
    like = [None if y in op.unread else saved[op.same_spec_as[y]] for y in op.outputs]
    return [((), torch.float32) if t is None else (t.shape, t.dtype) for t in like]


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The function's ``apply``, for plain calls: without torch's Python wrapper, which is for torch.func and takes 2 to
    3 us, and of a class that has all members itself, which are looked up in each call: 0.2 us less."""
    base = private.FunctionBase
    if base is None or base not in function.__mro__:
        return function.apply
    members: dict[str, Any] = {}
    for parent in reversed(function.__mro__[: function.__mro__.index(base)]):
        members |= vars(parent)
    own = {"apply", "__dict__", "__weakref__"}
    made = type(base)(function.__name__, (base,), {k: v for k, v in members.items() if k not in own})
    if node := getattr(made, "_backward_cls", None):  # the backward itself, not a method that looks for it: 1 us less
        bind = pythonapi.PyInstanceMethod_New
        bind.restype, bind.argtypes = py_object, [py_object]
        node.apply = bind(made.backward)
    return made.apply


@functools.lru_cache(maxsize=MOST_BOUND)
def eager(op: Op, attrs: tuple[Attr, ...], channels_last: bool) -> Eager:
    return Eager(op, attrs, images_of(op) if channels_last else None)


_VALUES, _USES = 8, 16
"""An operator is bound to so many values of its attributes when they are first used, which takes a millisecond each.
To a later one, such as a label_smoothing that changes in each step, it is bound when it has been used so often: until
then the dispatcher, which binds nothing, runs the call."""
_first_values: Counter[Op] = Counter()


@functools.lru_cache(maxsize=MOST_BOUND)
def _uses(op: Op, attrs: tuple[Attr, ...]) -> list[int]:
    """How often they have been used: one number, to be counted up."""
    return [0]


def is_worth_binding(op: Op, attrs: tuple[Attr, ...]) -> bool:
    """Counts a use of these attributes. Integers and strings choose among few kernels; numbers may be any."""
    if not _may_pass_unbound(op):
        return True
    uses = _uses(op, attrs)
    if not uses[0] and _first_values[op] < _VALUES:
        _first_values[op] += 1
        uses[0] = _USES
    uses[0] += 1
    return uses[0] > _USES


@functools.cache
def _may_pass_unbound(op: Op) -> bool:
    """Whether the dispatcher, where its kernels are in C, computes the same bits: it always keeps residuals."""
    same = op.always_save_residuals or not op.residuals
    return op in in_c and same and any(kind.startswith("float") for kind in op.attrs.values())


def run_eager(op: Op, inputs: Tensors, attrs: tuple[Attr, ...]):
    """A plain call that the builtin refused, after casting, broadcasting and copying to contiguous tensors."""
    back = None
    if op.autocast and torch.is_autocast_enabled(inputs[0].device.type):
        inputs, attrs, back = cast_inputs(op, attrs, inputs[0].device.type, inputs)
    inputs, attrs = op.absorb_transposed_views(inputs, attrs, Tensor.is_contiguous)
    if op.broadcast and all_given(inputs):
        inputs = torch.broadcast_tensors(*inputs)
    infer(op, attrs, tuple(map(spec_of, inputs)), inputs[0].device.type)
    check_devices(op.name, op.inputs, inputs)
    with private.RecordFunction(f"{op.library.name}::{op.name}", [t for t in inputs if t is not None]):
        results = eager(op, attrs, False)(*(None if t is None else plain_tensor(t) for t in inputs))
    return results if back is None else public_outputs(op, [y.to(back) for y in results_of(results)])
