"""The operators in Inductor: decompositions, fallbacks, and results over inputs.

An operator that Inductor can fuse with what stands around it is decomposed: the elementwise ones, by their formulas,
and on a GPU 16-bit reductions (reductions.py) and products, which become torch's own, with the activation and the sum
of a bias's gradient beside them. The others are fallbacks: Inductor calls the kernel.

Inductor makes a fallback of an operator that it does not know, which is right. But before torch 2.13 it formats the
operator's arguments for its log first, even where nothing is logged. The text of an argument contains all that it was
computed from, and an argument that is used twice appears twice: in a residual network the text doubles with each
operator. So each operator is made a fallback before Inductor sees it.

Inductor takes seconds to import, which only those who compile should wait for. So the operators are registered after
something else has imported Inductor's tables. A public function or an operator's fake kernel would be too late: they do
not run where their result is cached, or where the graph was exported before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from aotops.formula import fuse, fused, is_bilinear
from aotops.op import Op

from ..imports import after_import
from ..torch_schema import splitter
from . import compiled, contiguous, laid_out, last_relu, packed_graphs, padding, private, recomputed, reductions, views
from .graphs import RESHAPES
from .images import images_of
from .mathematics import Mathematics, all_narrow
from .tensors import packed

# ------------------------------------------------------------------------------------------------------ decompositions
# Functions of an operator's arguments, which return its results, or NotImplemented for a call that the kernel serves.


def _fuses(x: Tensor) -> bool:
    """Whether products and reductions are torch's. float32 is left to the kernel, whose TF32 is an argument of products
    and not torch's setting."""
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16)


def _has_fused_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the library's product with an activation is faster than torch's and a kernel of Inductor's: on Hopper,
    where lines are whole vectors."""
    if x.device.type != "cuda" or not torch.cuda.is_available():
        return False
    aligned = all(isinstance(n, int) and n % 8 == 0 for n in weight.shape)
    return aligned and torch.cuda.get_device_capability(x.device)[0] == 9


_RECOMPUTED: MutableMapping[Tensor, Callable[[], Tensor]] = WeakIdKeyDictionary()
"""While a graph is traced: for what a fused kernel returned, a function that computes it from the residuals. A backward
calls it instead of keeping both."""
_AS_IT_IS = ContextVar("as_it_is", default=False)


def _of_products(op: Op, forward: Op, overload: Any, formula: Callable[..., Any]) -> Callable[..., Any]:
    split = splitter(op)

    def of_products(*args):
        inputs, attrs, wanted = split(args)
        if _AS_IT_IS.get() or not _fuses(inputs[0]):
            return NotImplemented
        named = {slot: t for slot, t in zip(op.inputs, inputs, strict=True) if t is not None}
        if op is not forward:
            named = {slot: _RECOMPUTED[t]() if t in _RECOMPUTED else t for slot, t in named.items()}
        elif not is_bilinear(op, attrs) and _has_fused_kernel(*(named[slot] for slot in op.bilinear)):
            return _by_fused_kernel(op, overload, formula, args) if op.residuals else NotImplemented
        results = fuse(formula, Mathematics(None, all_narrow(inputs)), op, attrs, named)
        return results if results is NotImplemented else _packed(op, wanted, results)

    return of_products


def _by_fused_kernel(op: Op, overload: Any, formula: Callable[..., Any], args: Sequence[Any]) -> Any:
    token = _AS_IT_IS.set(True)
    try:
        y, *kept = overload(*args)
    finally:
        _AS_IT_IS.reset(token)
    attrs, residuals = args[len(op.inputs) :], dict(zip(op.residuals, kept, strict=True))
    _RECOMPUTED[y] = lambda: fuse(formula, Mathematics(None, all_narrow(kept)), op, attrs, residuals)[0]
    return y, *kept


def _packed(op: Op, wanted: Sequence[str], results: Iterable[Any]) -> Any:
    """The results as the operator returns them: None where they are not wanted."""
    return packed([y if name in wanted else None for name, y in zip(op.results, results, strict=True)])


def _without_instead(op: Op, forward: Op, overload: Any) -> Callable[..., Any]:
    """A backward on the residual alone, in the place of the input that it stands for, which need not be kept then.

    Not where saved tensors are not donated to the backward: then it may run again, and must not be compiled to write
    over the residual. Inductor's cache of compiled graphs does not know this setting, and so the graph must differ."""
    split = splitter(op)

    def on_residuals(*args):
        if not private.donates_buffers():
            return NotImplemented
        given = list(args)
        for slot, residual in _places(op, forward.replaced(split(args)[1])):
            if args[residual] is not None:
                given[slot] = args[residual]
        return NotImplemented if all(a is b for a, b in zip(args, given, strict=True)) else overload(*given)

    return on_residuals


def _places(op: Op, replaced: Mapping[str, str]) -> list[tuple[int, int]]:
    """In a backward, each input of the forward that a residual stands for, and that residual."""
    return [(op.inputs.index(slot), op.inputs.index(residual)) for slot, residual in replaced.items()]


def _decomposition(one: Operator, composed: Callable[..., Any]) -> Callable[..., Any] | None:
    return contiguous.with_copies(one.op, one.overload, _formula(one.op, one.forward, one.overload, composed))


def _formula(op: Op, forward: Op, overload: Any, composed: Callable[..., Any]) -> Callable[..., Any] | None:
    if (formula := fused(op, forward)) is not None:
        return _of_products(op, forward, overload, formula)
    if op.fused is not None:
        return lambda *args: reductions.decomposed(op, args) if _fuses(args[0]) else NotImplemented
    if op is not forward and forward.instead:
        return _without_instead(op, forward, overload)
    if not (op.elementwise or op.fuses) or op.formula is None:
        return None
    split = splitter(op)

    def decomposed(*args):
        inputs, attrs, wanted = split(args)
        if op.fuses and not op.fuses.issuperset(wanted):
            return NotImplemented
        return _packed(op, wanted, composed(op, attrs, recomputed.made_once(inputs), wanted, all_narrow(inputs)))

    return decomposed


# ----------------------------------------------------------------------------------------------------------- lowerings


class Operator(NamedTuple):
    """An operator, or a backward, and what torch's dispatcher has of it."""

    op: Op
    forward: Op
    """The operator itself, or the one whose backward it is."""
    overload: Any
    overwriting: Any
    """The overload that writes results over inputs (``Op.overwrites``), or None."""


def _overwriting(lowering: ModuleType, one: Operator) -> Callable[..., Any]:
    """Writes results over inputs that nothing else uses, and else calls the operator."""
    op, allocating = one.op, lowering.lowerings[one.overload]
    in_place = lowering.fallback_handler(one.overwriting, add_to_fallback_set=False)
    over = {y: op.inputs.index(slot) for y, slot in op.overwrites.items()}
    absent = dict(_places(op, one.forward.instead)) if op is not one.forward else {}
    split = splitter(op)

    def may_overwrite(graph: Any) -> bool:
        node = graph.current_node
        if not one.forward.replaced(split(node.args)[1]):
            return False
        on_residuals = all(node.args[slot] is node.args[residual] for slot, residual in absent.items())
        return on_residuals and not graph.cpp_wrapper and all(_is_only_used_by(node, at, graph) for at in over.values())

    def lower(*args):
        if not may_overwrite(lowering.V.graph):
            return allocating(*args)
        written = in_place(*(arg for i, arg in enumerate(args) if i not in absent))
        returned = iter(written if isinstance(written, (list, tuple)) else (written,))
        results = [args[over[y]] if y in over else next(returned) for y in op.results]
        return results[0] if len(results) == 1 else results

    return lower


_aten = torch.ops.aten
_MAKE_MEMORY = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


def _is_only_used_by(user: torch.fx.Node, at: int, graph: Any) -> bool:
    """Whether this argument is memory that no other node uses: of a product, or of a saved tensor that is donated to
    the backward."""
    node = user.args[at]
    while isinstance(node, torch.fx.Node) and set(node.users) == {user}:
        if node.op == "placeholder":
            return _is_donated(graph.graph_inputs.get(node.name))
        if node.target in _MAKE_MEMORY:
            return True
        if node.target not in RESHAPES:
            return False
        user, node = node, node.args[0]
    return False


def _is_donated(box: Any) -> bool:
    donated = getattr(import_module(private.IR), "DonatedBuffer", ())  # from torch 2.6 on
    return isinstance(getattr(getattr(box, "data", None), "data", None), donated)


# -------------------------------------------------------------------------------------------------------- registration


def register(operators: Sequence[Operator], composed: Callable[..., Any]) -> None:
    """Tells Inductor of operators: now, or as soon as it is imported. ``composed``: evaluates the formula of an
    operator, given its attributes and inputs."""
    after_import(private.LOWERING, lambda: _register(import_module(private.LOWERING), operators, composed))
    after_import(private.JOINT_GRAPH, lambda: _register_passes(operators))


def _register(lowering: ModuleType, operators: Sequence[Operator], composed: Callable[..., Any]) -> None:
    try:
        for one in operators:
            _make_fallback(lowering, one.overload)
            lowering.lowerings[one.overload] = compiled.binding(one.op, lowering.lowerings[one.overload])
            if (images := images_of(one.forward)) is not None:
                laid_out.follow(lowering, one.op, images, one.overload)
            if one.overwriting is not None:
                lowering.lowerings[one.overload] = _overwriting(lowering, one)
        # after the fallbacks, which an operator with a decomposition is refused
        _decompose({one.overload: _decomposition(one, composed) for one in operators})
    except Exception as error:  # Inductor must work: without this it does, though more slowly
        warnings.warn(f"aotops: Inductor {torch.__version__} took no operators: {error!r}", stacklevel=2)


def _register_passes(operators: Sequence[Operator]) -> None:
    """For joint graphs. Products are padded before Inductor does so; views are read where it has removed those that
    undo each other."""
    overloads = {one.op: one.overload for one in operators}
    try:
        passes, on_each = _joint_graph_passes()
        early, on_each_last = getattr(passes, "early_patterns", None), partial(on_each, passes.pass_patterns[-1])
        for op, overload in overloads.items():
            if early is not None and op.padding is not None and op.backward is not None:  # from torch 2.6 on
                on_each(early, overload, partial(_pad, op, overloads[op.backward]))
            if op.has_gradient:
                on_each_last(overload, views.read_through)
        for one in operators:
            if images_of(one.forward) is not None:
                on_each_last(one.overload, laid_out.set_free)
        packed_graphs.register(overloads, on_each_last)
        if private.CheckpointPolicy is not None:
            recomputed.register(overloads, on_each_last)
            last_relu.register({overloads[op] for op in overloads if images_of(op) is not None}, on_each_last)
    except Exception as error:
        warnings.warn(f"aotops: Inductor {torch.__version__} took no passes: {error!r}", stacklevel=2)


def _joint_graph_passes() -> tuple[ModuleType, Callable[..., None]]:
    """Inductor's passes, and what adds a function of each call of an operator to one, if a condition holds."""
    matcher = import_module(private.PATTERNS)

    def on_each(
        passes: Any,
        overload: Any,
        function: Callable[[torch.fx.Node], None],
        condition: Callable[[torch.fx.Node], bool] = lambda _: True,
    ) -> None:
        def handler(match: Any, *_: Any, **__: Any) -> None:
            function(match.output_node())

        def holds(match: Any) -> bool:
            return condition(match.output_node())

        matcher.register_graph_pattern(matcher.CallFunctionVarArgs([overload]), holds, pass_dict=passes)(handler)

    return import_module(private.JOINT_GRAPH), on_each


def _pad(op: Op, backward: Any, node: torch.fx.Node) -> None:
    if (found := padding.find(op, node, backward, _fuses)) is not None:
        padding.pad(found)


def _decompose(functions: Mapping[Any, Callable[..., Any] | None]) -> None:
    table = import_module(private.DECOMPOSITION)
    table.decompositions.update({operator: function for operator, function in functions.items() if function})
    if (copied := getattr(table, "fast_random_decomps", None)) is not None:
        copied.cache_clear()


def _make_fallback(lowering: ModuleType, operator: Any) -> None:
    """The strides of an operator's results follow from those of its inputs. So these must be what the fake kernel
    saw: exactly where Inductor can do that (torch 2.7), else in the same order."""
    as_traced = getattr(lowering, "constrain_to_fake_tensors", None) or lowering.constrain_to_fx_strides
    # with warn=True a decomposition that is registered already is an error under CI
    lowering.make_fallback(operator, as_traced, warn=False)
