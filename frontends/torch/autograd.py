"""The autograd kernel of an operator of the dispatcher: it records a node, for every level of torch.func too, and
evaluates the formula where a tangent needs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotops import formula
from aotops.op import Op

from ..torch_schema import mask, splitter
from . import overwrite, private
from .gradients import (
    all_tensors,
    composed,
    gradient_of_backward,
    has_tangents,
    kept_instead,
    other_levels,
    run_backward,
    tangents_of_product,
    with_zeros,
)
from .tensors import packed, results_of


def autograd_kernel(op: Op, forward: Op, dispatched: Any) -> Callable[..., Any]:
    """The operator's autograd kernel, for every level of torch.func too. ``forward``: the operator itself, or the one
    whose backward it is."""
    split = splitter(op)

    def below(keyset, args):
        with private.BelowAutograd():
            return dispatched.redispatch(keyset & private.after_autograd, *args)

    def run(ctx, keyset, attrs, names, *inputs):
        needed = (slot for slot, need in zip(op.inputs, ctx.needs_input_grad[3:], strict=True) if need)
        left_out = op.left_out(needed)
        residuals = (y for y in op.residuals if y not in left_out)
        with other_levels():
            results = below(keyset, (*inputs, *attrs, *mask(op, {*names, *residuals})))
        named = dict(zip((*op.inputs, *op.results), (*inputs, *results_of(results)), strict=True))
        ctx.attrs, ctx.wanted = attrs, names
        kept = kept_instead(ctx, op, attrs, named) | dict.fromkeys(left_out)
        ctx.save_for_backward(*(kept.get(slot, named[slot]) for slot in (op.saved if op.has_gradient else op.inputs)))
        if private.forward_level() >= 0:  # for ``tangents``
            ctx.save_for_forward(*inputs)
            ctx.shapes = {y: named[y].shape for y in names}
        ctx.mark_non_differentiable(*(named[slot] for slot in op.residuals if slot in names))
        if not op.has_gradient or op.unread:
            ctx.set_materialize_grads(False)
            ctx.outputs = [(named[y].shape, named[y].dtype) for y in op.outputs] if op.has_gradient else []
        return packed([named[y] if y in names else None for y in op.results])

    def differentiate(ctx, *grads):
        needed = ctx.needs_input_grad[3:]
        if op.has_gradient:
            saved, grads = ctx.saved_tensors, grads[: len(op.outputs)]
            if op.unread:
                grads = with_zeros(op, ctx.outputs, saved, grads)
            found = run_backward(op, ctx.attrs, saved, grads, needed, ctx)
            if op.instead:
                overwrite.drop_inputs(ctx)
        else:
            found = gradient_of_backward(op, forward, ctx.attrs, ctx.saved_tensors, grads, needed)
        return None, None, None, *found

    def tangents(ctx, _, __, ___, *tangents):
        primals = [t if t is None else private.unpack_dual(t).primal for t in ctx.saved_tensors]
        with other_levels():
            found = tangents_of_product(op, forward, ctx.attrs, ctx.wanted, primals, tangents)
        zeros = next(t for t in primals if t is not None).new_zeros
        moved = [y for y in ctx.wanted if y not in op.residuals]  # of others the tangent must be None
        found = {y: zeros(ctx.shapes[y]) for y in moved if y not in found} | found
        return packed([found.get(y) for y in op.results])

    members = {"forward": run, "backward": differentiate, "jvp": tangents}
    members = {name: staticmethod(function) for name, function in members.items()}
    function = type(op.name.title().replace("_", ""), (torch.autograd.Function,), members)
    apply = super(torch.autograd.Function, function).apply  # the wrapper would choose a level of torch.func

    def kernel(keyset, *args):
        if not torch.is_grad_enabled() and private.forward_level() < 0:
            return below(keyset, args)
        inputs, attrs, names = split(args)
        moved = has_tangents(inputs)
        recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        if not recorded and not moved:
            return below(keyset, args)
        if op.mutates:
            raise NotImplementedError(f"{op.name} writes to {', '.join(op.mutates)}, and has no derivative")
        by_formula = moved or (op is not forward and not all_tensors(inputs))
        if by_formula and not formula.is_bilinear(forward, attrs):
            if op.formula is not None:
                results = dict(zip(op.results, composed(op, attrs, inputs, names), strict=True))
                return packed([results[y] if y in names else None for y in op.results])
            if moved:
                raise NotImplementedError(f"{op.name}: forward-mode differentiation is not supported")
        with other_levels():
            return apply(keyset, attrs, names, *inputs)

    return kernel
