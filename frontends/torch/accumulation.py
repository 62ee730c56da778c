"""A linear layer whose backward adds the gradient of its weight to ``weight.main_grad``, in the product's kernel.

The convention is Megatron's. ``main_grad`` is a tensor of the weight's shape in float32. If the weight also has
``grad_added_to_main_grad``, which a hook of its gradient reads, that is set to True, and autograd gets a gradient
without meaning, so that the hook runs: zeros if ``zero_out_wgrad`` is set. Else autograd gets none.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from aotops.ops import BUILTIN, OPS
from aotops.ops._linear_accumulate import linear_accumulate

from ..torch_schema import mask
from . import dispatcher, flops, private
from .autocast import cast_inputs
from .gradients import run_backward
from .registered import dispatched
from .tensors import PLAIN_TYPES, name_of

LINEAR, _ACCUMULATE = OPS["linear"], linear_accumulate.bound_to(BUILTIN)
dispatcher.register([LINEAR, _ACCUMULATE])
flops.register([(_ACCUMULATE, LINEAR, dispatched[_ACCUMULATE])])


def has_main_grad(weight: Tensor) -> bool:
    """Whether a backward now would add to its ``main_grad``."""
    return weight.requires_grad and weight.is_leaf and getattr(weight, "main_grad", None) is not None


@private.disable_dynamo  # it cannot trace a backward that writes to an attribute of a tensor
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """``linear`` of a weight that has a ``main_grad``.

    Raises:
        NotImplementedError: the weight is no plain tensor.
    """
    if type(weight) not in PLAIN_TYPES:
        raise NotImplementedError(f"Linear: weight is a {type(weight).__name__}, expected a torch.nn.Parameter")
    attrs, used = LINEAR.canonical((activation, False)), weight
    if not torch.is_autocast_enabled(x.device.type):
        return _Accumulating.apply(x, weight, used, bias, attrs)
    (x, used, bias), *_ = cast_inputs(LINEAR, attrs, x.device.type, (x, weight, bias))
    with torch.autocast(x.device.type, enabled=False):
        return _Accumulating.apply(x, weight, used.detach(), bias, attrs)


class _Accumulating(torch.autograd.Function):
    """Saves the weight itself and not what autocast has cast it to, so that microbatches keep no copies of it."""

    @staticmethod
    def forward(ctx, x, weight, used, bias, attrs):
        y, before = dispatched[LINEAR](x, used, bias, *attrs)
        ctx.save_for_backward(x, weight, bias, before if attrs[0] else None)
        ctx.attrs, ctx.weight = attrs, weight  # a hook may pack what is saved, and unpack another tensor
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, before = ctx.saved_tensors
        needs_dx, needs_dweight, _, needs_dbias, _ = ctx.needs_input_grad
        is_wanted, adds = _is_wanted(ctx.next_functions[1][0]) if needs_dweight else (False, False)
        used = weight.to(x.dtype)
        if not adds:
            needed = needs_dx, is_wanted, needs_dbias
            dx, dweight, dbias = run_backward(LINEAR, ctx.attrs, (x, used, bias, before), (dy,), needed, ctx)
            return dx, dweight, None, dbias, None
        if torch.is_grad_enabled():
            raise NotImplementedError("Linear: create_graph is True, expected False: weight.main_grad has no graph")
        main_grad = _main_grad(ctx.weight, used)
        wanted = [y for y, need in (("dx", needs_dx), ("dbias", needs_dbias)) if need]
        if main_grad.is_cuda:
            _wait_for_others(ctx.weight)
        inputs = dy, x, used, bias, before, main_grad
        dx, dbias = dispatched[_ACCUMULATE](*inputs, *ctx.attrs, *mask(_ACCUMULATE, wanted))
        return dx, _dummy(ctx.weight), None, dbias, None


def _is_wanted(node: Any) -> tuple[bool, bool]:
    """Whether the running backward wants the gradient of a leaf, whose node this is, and whether it adds it to the
    leaf's: ``torch.autograd.grad`` returns it, where torch refuses to say more of a leaf."""
    try:
        runs = private.will_run(node)
        return runs, runs
    except RuntimeError:
        return True, False


def _main_grad(weight: Tensor, used: Tensor) -> Tensor:
    t, expected = getattr(weight, "main_grad", None), torch.promote_types(used.dtype, torch.float32)
    if not isinstance(t, Tensor):
        raise TypeError(f"Linear: weight.main_grad is {t!r:.40}, expected the torch.Tensor of the forward")
    if t.dtype != expected:
        raise TypeError(f"Linear: weight.main_grad has dtype {name_of(t.dtype)}, expected {name_of(expected)}")
    if t.shape != weight.shape:
        raise ValueError(f"Linear: weight.main_grad has shape {tuple(t.shape)}, expected {tuple(weight.shape)}")
    if t.device != weight.device:
        raise ValueError(f"Linear: weight.main_grad is on {t.device}, expected {weight.device}")
    if t.requires_grad:
        raise ValueError("Linear: weight.main_grad requires a gradient, expected a tensor that does not")
    return t


def _dummy(weight: Any) -> Tensor | None:
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


# ------------------------------------------------------------------------------------------------------------- streams
# autograd orders what it adds to a leaf's gradient, and lets the caller wait for it. It knows nothing of main_grad.

_STREAMS: dict[int, dict[int, torch.cuda.Stream]] = {}
"""For each backward that runs, by the id of each weight, the stream that has last added to its main_grad."""


def _wait_for_others(weight: Tensor) -> None:
    """Lets this stream wait for what the running backward has added on another, and its caller's for this one."""
    task, stream = private.graph_task(), torch.cuda.current_stream(weight.device)
    if task not in _STREAMS:
        _STREAMS[task] = {}
        private.queue_callback(partial(_wait_in_caller, task))
    last = _STREAMS[task].get(id(weight), stream)
    if last != stream:
        stream.wait_stream(last)
    _STREAMS[task][id(weight)] = stream


def _wait_in_caller(task: int) -> None:
    """Called at the end of a backward, on the streams of its caller."""
    for last in _STREAMS.pop(task).values():
        stream = torch.cuda.current_stream(last.device)
        if last != stream:
            stream.wait_stream(last)
