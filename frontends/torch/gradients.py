"""The derivatives of operators, as calls of other operators of the dispatcher: backwards by kernels, rules, formulas,
and the products that the derivatives of a product are (aotops/formula.py). All of them are compositions of operators,
so that derivatives of any order follow."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotops import formula
from aotops.op import Attr, Op
from aotops.spec import check_devices

from ..torch_schema import mask
from . import overwrite, private
from .mathematics import MATHEMATICS, Mathematics
from .registered import dispatched, namespaces
from .tensors import DTYPES, PLAIN_TYPES, Tensors, results_of, specs_of


def run_backward(op: Op, attrs: tuple[Attr, ...], saved: Tensors, grads: Tensors, needed: Sequence[bool], ctx: Any):
    """One gradient, or None, for each input of ``op``, by the dispatcher, which accepts tensors of any kind."""
    if not any(needed):
        return (None,) * len(needed)
    if op.rule is not None:
        named = dict(zip(op.attrs, attrs, strict=True)) | dict(zip(op.saved, saved, strict=True))
        named |= zip((f"d{y}" for y in op.outputs), grads, strict=True)
        gradients = op.rule(op, namespaces[op.library], named)
        return tuple(gradient if need else None for gradient, need in zip(gradients, needed, strict=True))
    backward = op.backward
    if backward is None:
        raise NotImplementedError(f"{op.name} has no derivative")
    given = dict(zip((f"d{y}" for y in op.outputs), grads, strict=True)) | dict(zip(op.saved, saved, strict=True))
    if torch.is_grad_enabled() or has_tangents(grads):
        given |= _replaced(op, ctx)
    dtypes = {slot: given[slot] is not None and given[slot].dtype for slot in backward.inputs}
    merged = backward.merged(dtypes)
    if backward.has_kernel:
        names = {f"d{x}" for x, need in zip(op.inputs, needed, strict=True) if need}
        names = {merged.get(name, backward.alias.get(name, name)) for name in names}
        inputs = (given[slot] for slot in backward.inputs)
        results = results_of(dispatched[backward](*inputs, *attrs, *mask(backward, names)))
        given |= zip(backward.results, results, strict=True)
    given |= {y: given[other] for y, other in merged.items()}
    given = backward.with_aliases(given)
    given |= {y: given[y] * factor for y, factor in backward.factors(attrs).items()}
    for x, need in zip(op.inputs, needed, strict=True):
        if need and f"d{x}" not in given:
            raise NotImplementedError(f"{op.name}: {x} requires a gradient, expected a constant: it has no derivative")
    return tuple(given.get(f"d{x}") if need else None for x, need in zip(op.inputs, needed, strict=True))


def with_zeros(op: Op, outputs: Sequence[tuple[Any, torch.dtype]], saved: Tensors, grads: Tensors) -> tuple[Any, ...]:
    """The gradients of the outputs, of these shapes and dtypes, where autograd gives None for what nobody has read:
    zeros, or None if the backward takes it."""
    model = next(t for t in (*grads, *saved) if t is not None)
    return tuple(
        model.new_zeros(shape, dtype=dtype) if dy is None and y not in op.unread else dy
        for y, (shape, dtype), dy in zip(op.outputs, outputs, grads, strict=True)
    )


def kept_instead(ctx: Any, op: Op, attrs: tuple[Attr, ...], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each input that a residual is saved instead of (Op.replaced) the residual, as on the path of plain calls: the
    input may be changed in place. Nothing is replaced under torch.func, which makes copies of both; where a hook packs
    what is saved; and in code that must not write over saved tensors, whose graph must differ (_without_instead)."""
    replaced = op.replaced(attrs)
    if not replaced or private.transforms_are_active() or overwrite.packs():
        return {}
    if not private.donates_buffers():
        return {}
    overwrite.keep_inputs(ctx, tuple(named[slot] for slot in replaced))
    return {slot: named[residual] for slot, residual in replaced.items()}


def _replaced(op: Op, ctx: Any) -> dict[str, Tensor]:
    """The inputs that a residual was saved instead of: derivatives of the gradients are of them."""
    replaced = dict(zip(op.instead, getattr(ctx, "inputs", ()), strict=False))
    for (slot, t), version in zip(replaced.items(), getattr(ctx, "versions", ()), strict=True):
        if t._version != version:
            raise RuntimeError(
                f"{op.name}: {slot} was changed in place after the forward, expected its values there for a derivative "
                f"of the gradient"
            )
    return replaced


def composed(
    op: Op, attrs: tuple[Attr, ...], inputs: Tensors, wanted: Container[str], narrow: bool = False
) -> list[Tensor]:
    """The results by the operator's formula, which torch differentiates, except with ``narrow``
    (``aotops.formula.Mathematics``); residuals, which have no derivative, by the operator itself, where they are
    ``wanted``."""
    check_devices(op.name, op.inputs, inputs)
    specs = specs_of(op, attrs, inputs)
    values = formula.compose(Mathematics(namespaces[op.library], narrow), op, attrs, inputs)
    found = {y: value.to(DTYPES[specs[y].dtype]) for y, value in zip(op.composed, values, strict=True)}
    if op.residuals:
        constants = [t if t is None else private.unpack_dual(t).primal.detach() for t in inputs]
        results = results_of(dispatched[op](*constants, *attrs, *mask(op, wanted)))
        found = dict(zip(op.results, results, strict=True)) | found
    return [found[y] for y in op.results]


def tangents_of_product(
    op: Op, forward: Op, attrs: tuple[Attr, ...], names: Container[str], saved: Tensors, tangents: Tensors
):
    """By name, the tangents of the results of a bilinear operator, or of its backward, where they are not zero."""
    named = {slot: t for slot, t in zip(op.inputs, saved, strict=True) if t is not None}
    given = {slot: t for slot, t in zip(op.inputs, tangents, strict=True) if t is not None}
    if op is not forward:
        return formula.backward_tangents(MATHEMATICS, _runner(attrs), forward, named, given, names)
    return {op.outputs[0]: formula.bilinear_tangent(MATHEMATICS, _runner(attrs), op, named, given)}


def _runner(attrs: Sequence[Attr]) -> formula.Run:
    """Runs operators of the dispatcher, with these attributes."""

    def run(op: Op, named: Mapping[str, Tensor], wanted: Container[str]) -> dict[str, Tensor]:
        results = dispatched[op](*(named.get(slot) for slot in op.inputs), *attrs, *mask(op, wanted))
        return dict(zip(op.results, results_of(results), strict=True))

    return run


def gradient_of_backward(
    op: Op, forward: Op, attrs: tuple[Attr, ...], saved: Tensors, grads: Tensors, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """One gradient, or None, for each input of a backward."""
    is_product = op is not forward and formula.is_bilinear(forward, attrs)
    if not is_product and (op is forward or op.formula is None):
        once = f": {forward.name} can be differentiated once" if forward is not op else ""
        raise NotImplementedError(f"{op.name} has no derivative{once}")
    named = {slot: t for slot, t in zip(op.inputs, saved, strict=True) if t is not None}
    given = {y: t for y, t in zip(op.results, grads, strict=True) if t is not None}
    wanted = [slot for slot, need in zip(op.inputs, needed, strict=True) if need]
    if is_product:
        found = formula.backward_cotangents(MATHEMATICS, _runner(attrs), forward, named, given, wanted)
    else:
        found = _gradients_of_formula(op, attrs, named, given, wanted)
    return tuple(found.get(slot) for slot in op.inputs)


def _gradients_of_formula(
    op: Op, attrs: tuple[Attr, ...], named: Mapping[str, Tensor], given: Mapping[str, Tensor], wanted: Sequence[str]
) -> dict[str, Tensor]:
    if not given:
        return {}

    def of_wanted(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = {**named, **dict(zip(wanted, tensors, strict=True))}
        results = composed(op, attrs, tuple(inputs.get(slot) for slot in op.inputs), given)
        found = dict(zip(op.results, results, strict=True))
        return tuple(found[y] for y in given)

    at, along = [named[slot] for slot in wanted], tuple(given.values())
    if overwrite.packs():  # torch.func refuses hooks of saved tensors
        return dict(zip(wanted, _gradients_of_graph(of_wanted, at, along), strict=True))
    _, gradient = torch.func.vjp(of_wanted, *at)
    return dict(zip(wanted, gradient(along), strict=True))


def _gradients_of_graph(function: Any, at: Tensors, along: Tensors) -> tuple[Tensor, ...]:
    """As ``torch.func.vjp``, of a graph that is recorded here, with the hooks of its saved tensors."""
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        views = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in at]
        pairs = [(y, dy) for y, dy in zip(function(*views), along, strict=True) if y.requires_grad]
    results, gradients = zip(*pairs, strict=True) if pairs else ((), ())
    options = {"create_graph": is_recorded, "allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(results, views, gradients, **options)


def all_tensors(inputs: Tensors) -> bool:
    """Whether none is of a subclass, such as DTensor, that ``torch.func`` does not take."""
    return all(t is None or type(t) in PLAIN_TYPES for t in inputs)


@contextlib.contextmanager
def other_levels():
    """An autograd.Function handles one level of torch.func. Its forward and jvp run the lower levels, for which
    gradients and tangents must be recorded."""
    if not private.transforms_are_active():
        yield
        return
    allowed = private.get_one_level()
    private.set_one_level(True)
    try:
        with torch.enable_grad(), private.records_tangents(True):
            yield
    finally:
        private.set_one_level(allowed)


def has_tangents(inputs: Tensors) -> bool:
    if private.forward_level() < 0:
        return False
    return any(t is not None and private.unpack_dual(t).tangent is not None for t in inputs)
