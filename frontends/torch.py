"""PyTorch: CPU and CUDA tensors, differentiable, on the current stream.

A call takes one of two paths:

- A plain eager call, as the gate decides (cuda_src/host/gate.h), runs the kernel directly. If a gradient is recorded,
  it goes through the C entry point of ``autograd.Function``, which costs a quarter of the Python wrapper.
- Every other call is an operator of torch's dispatcher, ``torch.ops.aotops.<op>``: under ``torch.compile``, ``export``,
  ``torch.func``, forward AD and modes, for subclasses, fake, meta, functional and batched tensors, and in a backward
  with ``create_graph=True``. Without a gate (before torch 2.10) these are all calls.

Forward mode, and the derivatives of a backward, are compositions of operators (torch_mathematics.py). A hosted operator
has neither: the error names the operator.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import forward_ad

from aotops import call, formula
from aotops.hosting import NUMBERS, Namespace
from aotops.infer import UNKNOWN_DIM, infer, infer_symbolic
from aotops.library import ERRORS, Library, LibraryError, check, load
from aotops.op import Attr, Autocast, Op, Rule
from aotops.ops import BUILTIN, OPS
from aotops.spec import DTYPES, TensorSpec, check_broadcast

from . import (
    torch_arguments,
    torch_autocast,
    torch_call,
    torch_flops,
    torch_gate,
    torch_inductor,
    torch_mathematics,
    torch_overwrite,
    torch_sharding,
)
from .torch_schema import mask, overwriting_schema, schema, wanted

__all__ = [
    *OPS, "GELU", "KEEP_RESIDUALS_FROM", "LLTM", "Conv2d", "CrossEntropyLoss", "LayerNorm", "Linear", "RMSNorm",
    "Softmax", "functions", "of",
]  # fmt: skip
_DTYPES = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_READS_TENSORS = torch_call.set_up(torch, torch_gate.facts())

KEEP_RESIDUALS_FROM = 1 << 18
"""Elements of a CUDA tensor from which the forward keeps residuals. For smaller ones, and on the CPU, allocating them
costs more than recomputing them."""

Tensors = Sequence["Tensor | None"]
_NONE: Mapping[str, Tensor] = {}


# ------------------------------------------------------------------------------------------------------------- running


def _spec(t: Tensor | None) -> TensorSpec | None:
    return None if t is None else TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))


def _launcher(op: Op, attrs: tuple[Attr, ...]) -> Callable[..., None]:
    """A function of one tensor, or None, for each slot."""
    return call.tensors(op, attrs) if _READS_TENSORS else functools.partial(_by_address, op, attrs)


def _by_address(op: Op, attrs: tuple[Attr, ...], *tensors: Tensor | None) -> None:
    given = [t for t in tensors if t is not None]
    device = given[0].device
    run = call.addresses(op, attrs, device.type, tuple(map(_spec, tensors)))
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    run(device.index or 0, stream, *(t.data_ptr() for t in given))


_PLAIN_TYPES = {Tensor, torch.nn.Parameter}


def _plain(t: Tensor) -> Tensor:
    """A contiguous Tensor. Subclasses that only override __torch_function__ come here too."""
    t = t.contiguous().resolve_neg()
    return t if type(t) in _PLAIN_TYPES else t.as_subclass(Tensor)


def _check_devices(op: Op, inputs: Tensors) -> None:
    given = [(slot, t) for slot, t in zip(op.inputs, inputs, strict=True) if t is not None]
    first, device = given[0][0], given[0][1].device
    for slot, t in given:
        if t.device != device:
            raise ValueError(f"{op.name}: {slot} is on {t.device}, expected {device}, the device of {first}")


def _infer(op: Op, attrs: tuple[Any, ...], inputs: Tensors) -> dict[str, TensorSpec]:
    """The spec of every output and residual, for dimensions that may be symbolic."""
    specs, device = tuple(map(_spec, inputs)), inputs[0].device.type
    if _symbolic(attrs) or _symbolic([spec.shape for spec in specs if spec]):
        return infer_symbolic(op, attrs, specs, _hint, device)
    return infer(op, op.canonical(attrs), specs, device)


def _symbolic(values: Sequence[Any]) -> bool:
    """Whether one of the values, or of the elements of one that is a sequence, is symbolic."""
    parts = (part for v in values for part in (v if isinstance(v, (tuple, list)) else (v,)))
    return any(isinstance(part, _SYMBOLIC) for part in parts)


def _hint(dim: Any) -> int:
    """The value that torch traces a symbolic dimension with. Comparing it adds no guard."""
    if not isinstance(dim, torch.SymInt):
        return dim
    return dim.node.hint if dim.node.has_hint() else UNKNOWN_DIM


@functools.lru_cache(maxsize=4096)
def _written(op: Op, attrs: tuple[Attr, ...], device: str, given: tuple[tuple[torch.Size, torch.dtype] | None, ...]):
    """The arguments of ``torch.empty`` for everything that an entry writes."""
    specs = tuple(g and TensorSpec(tuple(g[0]), str(g[1]).removeprefix("torch.")) for g in given)
    return {name: _empty_arguments(spec) for name, spec in infer(op, attrs, specs, device).items()}


def _empty_arguments(spec: TensorSpec) -> dict[str, Any]:
    return {"size": spec.shape, "dtype": _DTYPES[spec.dtype]}


def _models(op: Op, attrs: tuple[Attr, ...], *inputs: Tensor | None) -> tuple[Tensor | None, ...] | None:
    """For each output that is not like an input, a tensor for ``empty_like``, with the memory of one element. None if
    the operator refuses the inputs: a composition may serve them (torch_arguments.py)."""
    try:
        specs = infer(op, attrs, tuple(map(_spec, inputs)), inputs[0].device.type)
    except (TypeError, ValueError):
        return None
    arguments = {name: _empty_arguments(specs[name]) for name in op.entry_outputs if name not in op.same_spec_as}
    for one in arguments.values():
        one["stride"] = (0,) * len(one["size"])
    device = inputs[0].device
    return tuple(
        torch.empty_strided(**arguments[name], device=device) if name in arguments else None
        for name in op.entry_outputs
    )


def _run(
    op: Op, inputs: Tensors, attrs: tuple[Attr, ...], wanted: Sequence[str], into: Mapping[str, Tensor] = _NONE
) -> tuple[Tensor | None, ...]:
    """Runs the entry on tensors that have memory. Returns each output and residual, None for one that is not wanted.
    ``into``: contiguous tensors to write results to."""
    names = {*(op.alias.get(name, name) for name in wanted), *op.workspace}
    names |= {y for y in op.outputs if y not in op.optional}
    device = inputs[0].device
    written = _written(op, attrs, device.type, tuple([None if t is None else (t.shape, t.dtype) for t in inputs]))
    _check_devices(op, inputs)
    for slot, t in zip(op.inputs, inputs, strict=True):
        if t is not None and t.numel() and not t.data_ptr():
            raise RuntimeError(f"{op.name}: {slot} has no memory: its storage was freed")
    if op.elementwise and (strides := _common_strides(inputs)):
        return _run_elementwise(op, inputs, attrs, names, strides)
    plain = [None if t is None else _plain(t) for t in inputs]
    results = [
        into[name] if name in into else torch.empty(**written[name], device=device) if name in names else None
        for name in op.entry_outputs
    ]
    _launcher(op, attrs)(*plain, *results)
    for slot, t, used in zip(op.inputs, inputs, plain, strict=True) if op.mutates else ():
        if slot in op.mutates and t is not used:
            t.copy_(used)
    return tuple(results[: len(op.results)])


def _common_strides(inputs: Tensors) -> tuple[int, ...] | None:
    """The strides that torch gives the result of an elementwise operator; None if it is contiguous."""
    if all(t is None or t.is_contiguous() for t in inputs):
        return None
    from torch._prims_common import compute_elementwise_output_strides  # slow to import, seldom needed

    return compute_elementwise_output_strides(*(t for t in inputs if t is not None))


def _run_elementwise(
    op: Op, inputs: Tensors, attrs: tuple[Attr, ...], names: Container[str], strides: tuple[int, ...]
) -> tuple[Tensor | None, ...]:
    """Runs the entry on tensors of the same strides, without gaps, as vectors."""
    model = inputs[0]

    def laid_out(t: Tensor | None) -> Tensor | None:
        t = t if t is None else t.resolve_neg()
        if t is None or t.stride() == strides:
            return t
        return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)

    def vector(t: Tensor | None) -> Tensor | None:
        return t if t is None else _plain(t.as_strided((t.numel(),), (1,)))

    given = [laid_out(t) for t in inputs]
    results = [
        torch.empty_strided(model.shape, strides, dtype=model.dtype, device=model.device) if name in names else None
        for name in op.entry_outputs
    ]
    _launcher(op, attrs)(*map(vector, given), *map(vector, results))
    return tuple(results)


def _run_backward(op: Op, attrs: tuple[Attr, ...], saved: Tensors, grads: Tensors, needed: Sequence[bool], ctx: Any):
    """One gradient, or None, for each input of ``op``, by the dispatcher, which accepts tensors of any kind."""
    if not any(needed):
        return (None,) * len(needed)
    if op.rule is not None:
        return _run_rule(op, op.rule, attrs, saved, grads, needed)
    backward = op.backward
    assert backward is not None
    given = dict(zip((f"d{y}" for y in op.outputs), grads, strict=True)) | dict(zip(op.saved, saved, strict=True))
    if torch.is_grad_enabled() or _has_tangents(grads):
        given |= _replaced(op, ctx)
    dtypes = {slot: given[slot] is not None and given[slot].dtype for slot in backward.inputs}
    merged = backward.merged(dtypes)
    if backward.has_kernel:
        names = {f"d{x}" for x, need in zip(op.inputs, needed, strict=True) if need}
        names = {merged.get(name, backward.alias.get(name, name)) for name in names}
        inputs = (given[slot] for slot in backward.inputs)
        results = _results(dispatched[backward](*inputs, *attrs, *mask(backward, names)))
        given |= zip(backward.results, results, strict=True)
    given |= {y: given[other] for y, other in merged.items()}
    given = backward.with_aliases(given)
    given |= {y: given[y] * factor for y, factor in backward.factors(attrs).items()}
    return tuple(given.get(f"d{x}") if need else None for x, need in zip(op.inputs, needed, strict=True))


def _kept_instead(ctx: Any, op: Op, attrs: tuple[Attr, ...], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each input that a residual is saved instead of (Op.replaced) the residual, as on the path of plain calls: the
    input may be changed in place. Nothing is replaced under torch.func, which makes copies of both; where a hook packs
    what is saved; and in code that must not write over saved tensors, whose graph must differ (_without_instead)."""
    replaced = op.replaced(attrs)
    if not replaced or torch._C._are_functorch_transforms_active() or torch_overwrite.packs():
        return {}
    if not torch_inductor.donates():
        return {}
    torch_overwrite.keep_inputs(ctx, tuple(named[slot] for slot in replaced))
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


def _run_rule(op: Op, rule: Rule, attrs: tuple[Attr, ...], saved: Tensors, grads: Tensors, needed: Sequence[bool]):
    named = dict(zip(op.attrs, attrs, strict=True)) | dict(zip(op.saved, saved, strict=True))
    named |= zip((f"d{y}" for y in op.outputs), grads, strict=True)
    gradients = rule(op, of(op.library), named)
    return tuple(gradient if need else None for gradient, need in zip(gradients, needed, strict=True))


def _results(value) -> tuple:
    return () if value is None else tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _attributes(args: Iterable[Any]) -> tuple[Any, ...]:
    """As the definitions have them: the dispatcher passes lists."""
    return tuple(tuple(a) if isinstance(a, list) else a for a in args)


def _packed(results: Sequence[Any]):
    """As the dispatcher returns them."""
    return results[0] if len(results) == 1 else tuple(results) or None


def _public_outputs(op: Op, written: Sequence[Tensor]):
    """None where there is none, of an operator that writes to its inputs alone."""
    if not op.outputs:
        return None
    return written[0] if len(op.outputs) == 1 else tuple(written[: len(op.outputs)])


# --------------------------------------------------------------------------------------------------------- plain eager


class _Eager:
    """An operator bound to its attributes, for plain tensors. Only the entry checks the call; ``_general`` handles a
    call that it refuses."""

    def __init__(self, op: Op, attrs: tuple[Attr, ...]) -> None:
        fallback = functools.partial(_run_backward, op, attrs)
        builtins = torch_call.function(op, attrs, _models, KEEP_RESIDUALS_FROM, fallback, torch_overwrite.SAVED)
        backward = builtins.backward or functools.partial(_refuse_derivative, op)
        if op.rule is not None:
            backward = _by_rule(op, op.rule, attrs)
        members = {"forward": staticmethod(builtins.forward), "backward": staticmethod(backward)}
        function = type(op.name.title().replace("_", ""), (torch.autograd.Function,), members)
        self.run = builtins.run
        self.apply = _apply_of(function)
        self.differentiable = torch_call.differentiable(builtins, self.apply)

    def __call__(self, *inputs: Tensor | None):
        recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        return self.apply(*inputs) if recorded else self.run(*inputs)


def _apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The function's ``apply``, for plain calls: without torch's Python wrapper, which is for torch.func and takes 2 to
    3 us, and of a class that has all members itself, which are looked up in each call: 0.2 us less."""
    base = getattr(torch._C, "_FunctionBase", None)
    if base is None or base not in function.__mro__:
        return function.apply
    members = {}
    for parent in reversed(function.__mro__[: function.__mro__.index(base)]):
        members |= vars(parent)
    own = {"apply", "__dict__", "__weakref__"}
    return type(base)(function.__name__, (base,), {k: v for k, v in members.items() if k not in own}).apply


def _by_rule(op: Op, rule: Rule, attrs: tuple[Attr, ...]) -> Callable[..., Any]:
    return lambda ctx, *dys: _run_rule(op, rule, attrs, ctx.saved_tensors, dys, ctx.needs_input_grad)


def _refuse_derivative(op: Op, ctx: Any, *grads: Tensor):
    raise NotImplementedError(f"{op.name} has no derivative")


@functools.lru_cache(maxsize=call.MOST_BOUND)
def _eager(op: Op, attrs: tuple[Attr, ...]) -> _Eager:
    return _Eager(op, attrs)


_VALUES, _USES = 8, 16
"""An operator is bound to so many values of its attributes when they are first used, which takes a millisecond each.
To a later one, such as a label_smoothing that changes in each step, it is bound when it has been used so often: until
then the dispatcher, which binds nothing, runs the call."""
_first_values: Counter[Op] = Counter()


@functools.lru_cache(maxsize=call.MOST_BOUND)
def _uses(op: Op, attrs: tuple[Attr, ...]) -> list[int]:
    """How often they have been used: one number, to be counted up."""
    return [0]


def _is_worth_binding(op: Op, attrs: tuple[Attr, ...]) -> bool:
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
    return op in _in_c and same and any(kind.startswith("float") for kind in op.attrs.values())


# ---------------------------------------------------------------------------------------------------------- dispatcher

_in_c: set[Op] = set()
"""Operators whose kernels for the dispatcher are in C."""
dispatched: dict[Op, Callable[..., Any]] = {}
"""The operator of torch's dispatcher for each operator and backward that has a kernel."""
# The strides of results depend on those of inputs; opcheck passes.
_TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order), torch.Tag.pt2_compliant_tag)


@functools.cache  # which keeps the namespace: it is unregistered when it is deleted
def _namespace(library: Library) -> torch.library.Library:
    try:
        return torch.library.Library(library.name, "FRAGMENT" if library is BUILTIN else "DEF")
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the library's name is {library.name!r}, which torch.ops has already") from error


def _register_once(ops: Iterable[Op]) -> None:
    """Registers operators and their backwards that are not registered yet."""
    pairs = [(one, op) for op in ops for one in (op.backward, op) if one and one.has_kernel and one not in dispatched]
    pairs = list(dict(pairs).items())  # the backward of several operators once
    for one, forward in pairs:
        dispatched[one] = _register(_namespace(one.library), one, forward)
    told = [torch_inductor.Operator(one, f, dispatched[one], _register_overwriting(one, f)) for one, f in pairs]
    torch_inductor.register(told, _composed)
    triples = [(one, forward, dispatched[one]) for one, forward in pairs]
    torch_sharding.register(triples)
    torch_flops.register(triples)


def _register(namespace: torch.library.Library, op: Op, forward: Op) -> Callable[..., Any]:
    """``torch.ops.<library>.<op>``: returns every output and residual. ``forward``: the operator itself, or the one
    whose backward it is."""
    n, end, name = len(op.inputs), len(op.inputs) + len(op.attrs), f"{namespace.ns}::{op.name}"
    if in_c := _define(namespace, op):
        _in_c.add(op)
    dispatched = getattr(getattr(torch.ops, namespace.ns), op.name).default

    def split(args):
        """The inputs, the attributes and the names of the results that are wanted."""
        return args[:n], _attributes(args[n:end]), wanted(op, args[end:])

    def kernel(*args):
        inputs, attrs, names = split(args)
        return _packed(_run(op, inputs, op.canonical(attrs), names))

    def fake(*args):
        inputs, attrs, names = split(args)
        specs = _infer(op, attrs, inputs)
        _check_devices(op, inputs)
        strides, device = op.elementwise and _common_strides(inputs), inputs[0].device

        def empty(spec):
            arguments = _empty_arguments(spec)
            if strides:
                return torch.empty_strided(**arguments, stride=strides, device=device)
            return torch.empty(**arguments, device=device)

        return _packed([empty(specs[y]) if y in names else None for y in op.results])

    def vmap(info, dims, *args):
        if op.mutates:
            raise NotImplementedError(f"{op.name}: vmap of an operator that writes to its inputs is not supported")
        inputs, attrs, names = split(args)
        run = lambda *t: _results(dispatched(*t, *attrs, *mask(op, names)))  # noqa: E731
        results, out_dims = _batch(op, info.batch_size, dims[:n], inputs, names, run)
        return _packed(results), _packed(out_dims)

    for device in ("CPU", "CUDA"):
        if not in_c:
            namespace.impl(op.name, kernel, device)
        if op.autocast:
            namespace.impl(op.name, _autocast_kernel(op, dispatched, device, split), f"Autocast{device}")
    torch.library.register_fake(name, fake, lib=namespace)
    if hasattr(torch.library, "register_vmap"):  # torch 2.5; before, vmap calls the operator for each example
        torch.library.register_vmap(name, vmap, lib=namespace)
    namespace.impl(op.name, _autograd_kernel(op, forward, dispatched, split), "Autograd", with_keyset=True)
    if op.mutates:
        namespace.impl(op.name, _versions_kernel(op, dispatched), "ADInplaceOrView", with_keyset=True)
    return dispatched


def _define(namespace: torch.library.Library, op: Op) -> bool:
    """Whether the kernels for the CPU and CUDA are in C (cuda_src/host/torch_stable.cpp), which needs torch 2.10. A C++
    program may have registered the operator before.

    Raises:
        LibraryError: it has registered another one of this name.
    """
    wanted, name = schema(op), f"{namespace.ns}::{op.name}"
    if torch._C._dispatch_has_kernel(name):
        found = str(torch._C._get_schema(name, ""))
        if found != f"{namespace.ns}::{wanted}":
            raise LibraryError(f"{name} is registered as {found}, expected {wanted}: by another version of the library")
        return True
    namespace.define(wanted, tags=_TAGS)
    if op.library is not BUILTIN or not _READS_TENSORS:
        return False
    status = load().aot_torch_implement(wanted.encode())
    if ERRORS.get(status) is not NotImplementedError:  # which says that this torch has no such functions
        check(status)
    return not status


def _register_overwriting(op: Op, forward: Op) -> Callable[..., Any] | None:
    """``torch.ops.<library>.<op>.overwriting``, which writes results over inputs as ``op.overwrites`` says, and has no
    derivative. A backward takes no input that a residual stands for."""
    if not op.overwrites:
        return None
    namespace = _namespace(op.library)
    instead = forward.instead if op is not forward else {}
    name = f"{op.name}.overwriting"
    namespace.define(overwriting_schema(op, instead), tags=_TAGS)
    taken = [slot for slot in op.inputs if slot not in instead]
    returned = [y for y in op.results if y not in op.overwrites]

    def named(args):
        given = dict(zip(taken, args, strict=False))
        return given, [given[instead.get(slot, slot)] for slot in op.inputs], _attributes(args[len(taken) :])

    def kernel(*args):
        if op is not forward and torch_overwrite.keeps_graph():
            raise RuntimeError(
                f"{op.name}: compiled code writes over {', '.join(op.overwrites.values())}, expected a graph that is "
                f"not kept: for retain_graph=True, set torch._functorch.config.donated_buffer = False"
            )
        given, inputs, attrs = named(args)
        over = {y: given[slot] for y, slot in op.overwrites.items() if y not in op.residuals or op.replaced(attrs)}
        results = dict(zip(op.results, _run(op, inputs, op.canonical(attrs), op.results, over), strict=True))
        return _packed([results[y] for y in returned])

    def fake(*args):
        _, inputs, attrs = named(args)
        specs, device = _infer(op, attrs, inputs), inputs[0].device
        return _packed([torch.empty(**_empty_arguments(specs[y]), device=device) for y in returned])

    torch.library.register_fake(f"{namespace.ns}::{name}", fake, lib=namespace)
    for device in ("CPU", "CUDA"):
        namespace.impl(name, kernel, device)
    return getattr(getattr(torch.ops, namespace.ns), op.name).overwriting


def _autograd_kernel(op: Op, forward: Op, dispatched: Callable[..., Any], split) -> Callable[..., Any]:
    """The operator's autograd kernel, for every level of torch.func too. ``forward``: the operator itself, or the one
    whose backward it is."""

    def below(keyset, args):
        with torch._C._AutoDispatchBelowAutograd():
            return dispatched.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def run(ctx, keyset, attrs, names, *inputs):
        with _other_levels():
            results = below(keyset, (*inputs, *attrs, *mask(op, names)))
        named = dict(zip((*op.inputs, *op.results), (*inputs, *_results(results)), strict=True))
        ctx.attrs, ctx.wanted = attrs, names
        kept = _kept_instead(ctx, op, attrs, named)
        ctx.save_for_backward(*(kept.get(slot, named[slot]) for slot in (op.saved if op.has_gradient else op.inputs)))
        if forward_ad._current_level >= 0:  # for ``tangents``
            ctx.save_for_forward(*inputs)
            ctx.shapes = {y: t.shape for y, t in zip(op.results, _results(results), strict=True) if y in names}
        ctx.mark_non_differentiable(*(named[slot] for slot in op.residuals))
        if not op.has_gradient:
            ctx.set_materialize_grads(False)
        return results

    def differentiate(ctx, *grads):
        needed = ctx.needs_input_grad[3:]
        if op.has_gradient:
            found = _run_backward(op, ctx.attrs, ctx.saved_tensors, grads[: len(op.outputs)], needed, ctx)
            if op.instead:
                torch_overwrite.drop_inputs(ctx)
        else:
            found = _gradient_of_backward(op, forward, ctx.attrs, ctx.saved_tensors, grads, needed)
        return None, None, None, *found

    def tangents(ctx, _, __, ___, *tangents):
        primals = [t if t is None else forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors]
        with _other_levels():
            found = _tangents_of_product(op, forward, ctx.attrs, ctx.wanted, primals, tangents)
        zeros = next(t for t in primals if t is not None).new_zeros
        moved = [y for y in ctx.wanted if y not in op.residuals]  # of others the tangent must be None
        found = {y: zeros(ctx.shapes[y]) for y in moved if y not in found} | found
        return _packed([found.get(y) for y in op.results])

    members = {"forward": run, "backward": differentiate, "jvp": tangents}
    members = {name: staticmethod(function) for name, function in members.items()}
    function = type(op.name.title().replace("_", ""), (torch.autograd.Function,), members)
    apply = super(torch.autograd.Function, function).apply  # the wrapper would choose a level of torch.func

    def kernel(keyset, *args):
        inputs, attrs, names = split(args)
        has_tangents = _has_tangents(inputs)
        recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        if not recorded and not has_tangents:
            return below(keyset, args)
        if op.mutates:
            raise NotImplementedError(f"{op.name} writes to {', '.join(op.mutates)}, and has no derivative")
        by_formula = has_tangents or (op is not forward and not _all_tensors(inputs))
        if by_formula and not formula.is_bilinear(forward, attrs):
            if op.formula is not None:
                results = dict(zip(op.results, _composed(op, attrs, inputs), strict=True))
                return _packed([results[y] if y in names else None for y in op.results])
            if has_tangents:
                raise NotImplementedError(f"{op.name}: forward-mode differentiation is not supported")
        with _other_levels():
            return apply(keyset, attrs, names, *inputs)

    return kernel


def _composed(op: Op, attrs: tuple[Attr, ...], inputs: Tensors) -> list[Tensor]:
    """The results by the operator's formula, which torch differentiates; residuals, which have no derivative, by the
    operator itself."""
    _check_devices(op, inputs)
    dtypes = {y: _DTYPES[spec.dtype] for y, spec in _infer(op, attrs, inputs).items()}
    found = torch_mathematics.composed(op, attrs, inputs, of(op.library), dtypes)
    if op.residuals:
        constants = [t if t is None else forward_ad.unpack_dual(t).primal.detach() for t in inputs]
        found = dict(zip(op.results, _results(dispatched[op](*constants, *attrs)), strict=True)) | found
    return [found[y] for y in op.results]


def _tangents_of_product(
    op: Op, forward: Op, attrs: tuple[Attr, ...], names: Container[str], saved: Tensors, tangents: Tensors
):
    """By name, the tangents of the results of a bilinear operator, or of its backward, where they are not zero."""
    named = {slot: t for slot, t in zip(op.inputs, saved, strict=True) if t is not None}
    given = {slot: t for slot, t in zip(op.inputs, tangents, strict=True) if t is not None}
    run, m = torch_mathematics.runner(dispatched, attrs), torch_mathematics.MATHEMATICS
    if op is not forward:
        return formula.backward_tangents(m, run, forward, named, given, names)
    return {op.outputs[0]: formula.bilinear_tangent(m, run, op, named, given)}


def _gradient_of_backward(
    op: Op, forward: Op, attrs: tuple[Attr, ...], saved: Tensors, grads: Tensors, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """One gradient, or None, for each input of a backward."""
    if op is not forward and formula.is_bilinear(forward, attrs):
        return _gradient_of_products(op, forward, attrs, saved, grads, needed)
    if op is not forward and op.formula is not None:
        return _gradient_of_formula(op, attrs, saved, grads, needed)
    once = f": {forward.name} can be differentiated once" if forward is not op else ""
    raise NotImplementedError(f"{op.name} has no derivative{once}")


def _gradient_of_products(
    op: Op, forward: Op, attrs: tuple[Attr, ...], saved: Tensors, grads: Tensors, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    named = {slot: t for slot, t in zip(op.inputs, saved, strict=True) if t is not None}
    given = {y: t for y, t in zip(op.results, grads, strict=True) if t is not None}
    wanted = {slot for slot, need in zip(op.inputs, needed, strict=True) if need}
    run = torch_mathematics.runner(dispatched, attrs)
    found = formula.backward_cotangents(torch_mathematics.MATHEMATICS, run, forward, named, given, wanted)
    return tuple(found.get(slot) for slot in op.inputs)


def _all_tensors(inputs: Tensors) -> bool:
    """Whether none is of a subclass, such as DTensor, that ``torch.func`` does not take."""
    return all(t is None or type(t) in _PLAIN_TYPES for t in inputs)


def _gradient_of_formula(
    op: Op, attrs: tuple[Attr, ...], saved: Tensors, grads: Tensors, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    moved = [i for i, need in enumerate(needed) if need]
    given = {i: dy for i, dy in enumerate(grads) if dy is not None}
    if not given:
        return (None,) * len(saved)

    def of_moved(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(enumerate(saved)) | dict(zip(moved, tensors, strict=True))
        results = _composed(op, attrs, tuple(inputs.values()))
        return tuple(results[i] for i in given)

    _, gradient = torch.func.vjp(of_moved, *(saved[i] for i in moved))
    found = dict(zip(moved, gradient(tuple(given.values())), strict=True))
    return tuple(found.get(i) for i in range(len(saved)))


def _versions_kernel(op: Op, dispatched: Callable[..., Any]) -> Callable[..., Any]:
    """Counts a new version of each input that the entry writes to, so that autograd finds a saved one that changed."""

    def kernel(keyset, *args):
        with torch._C._AutoDispatchBelowADInplaceOrView():
            results = dispatched.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        for slot, t in zip(op.inputs, args, strict=False):
            if slot in op.mutates:
                torch.autograd.graph.increment_version(t)
        return results

    return kernel


@contextlib.contextmanager
def _other_levels():
    """An autograd.Function handles one level of torch.func. Its forward and jvp run the lower levels, for which
    gradients and tangents must be recorded."""
    if not torch._C._are_functorch_transforms_active():
        yield
        return
    allowed = torch._C._functorch.get_single_level_autograd_function_allowed()
    torch._C._functorch.set_single_level_autograd_function_allowed(True)
    try:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            yield
    finally:
        torch._C._functorch.set_single_level_autograd_function_allowed(allowed)


def _has_tangents(inputs: Tensors) -> bool:
    if forward_ad._current_level < 0:
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in inputs)


def _autocast_kernel(op: Op, dispatched: Callable[..., Any], device: str, split) -> Callable[..., Any]:
    key = getattr(torch._C.DispatchKey, f"Autocast{device}")
    keys = torch._C.DispatchKeySet(key)

    def kernel(*args):
        inputs, attrs, names = split(args)
        cast, attrs, back = _autocast(op, attrs, device.lower(), inputs)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            results = _results(dispatched(*cast, *attrs, *mask(op, names)))
        if back is None:
            return _packed(results)
        n = len(op.outputs)
        return _packed([*(y.to(back) for y in results[:n]), *results[n:]])

    return kernel


def _autocast(op: Op, attrs: tuple[Any, ...], device: str, inputs: Tensors):
    """The inputs as autocast casts them, the attributes, and the dtype to cast the results to, or None."""
    if op.autocast is Autocast.WIDE_LOSS:
        given = dict(zip(op.attrs, attrs, strict=True))
        if given["dtype"] is None and inputs[0].is_floating_point() and inputs[0].element_size() == 2:
            given["dtype"] = "float32"
        return inputs, tuple(given.values()), None
    if op.autocast is Autocast.IF_REFUSED:
        with contextlib.suppress(TypeError):
            _infer(op, attrs, inputs)
            return inputs, attrs, None
    floating = [t for t in inputs if t is not None and t.is_floating_point()]
    dtype, back = torch.get_autocast_dtype(device) if op.autocast is Autocast.LOWER else None, None
    if op.autocast is Autocast.FLOAT32_ON_CUDA and device == "cuda":
        dtype = torch.float32
    if dtype is None:
        dtype = _widest(floating)
        back = _widest([t for slot, t in zip(op.inputs, inputs, strict=True) if slot in op.vmappable])
        back = None if back == dtype else back
    casts = {id(t) for t in floating if t.dtype not in (dtype, torch.float64)}
    return [_cast(t, dtype) if id(t) in casts else t for t in inputs], attrs, back


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors))


def _batch(op: Op, size: int, dims: Sequence[int | None], inputs: Tensors, wanted: Sequence[str], run):
    """The batching rule: one call if every slot concerned may have another leading axis, else one for each example."""
    batched = {slot for slot, dim in zip(op.inputs, dims, strict=True) if dim is not None}
    ndims = [None if t is None else t.dim() - (dim is not None) for t, dim in zip(inputs, dims, strict=True)]
    pairs = list(zip(inputs, dims, strict=True))
    if op.takes_batch({*batched, *wanted}, ndims):
        moved = [
            t if t is None or slot not in op.vmappable
            else t.movedim(dim, 0) if dim is not None
            else t.expand(size, *t.shape)
            for slot, (t, dim) in zip(op.inputs, pairs, strict=True)
        ]  # fmt: skip
        results = run(*moved)
    elif size:
        examples = [run(*(t if dim is None else t.select(dim, i) for t, dim in pairs)) for i in range(size)]
        results = tuple(None if r[0] is None else torch.stack(r) for r in zip(*examples, strict=True))
    else:  # the shapes of an example, with a batch of 0
        example = run(*(t if dim is None else t.sum(dim, dtype=t.dtype) for t, dim in pairs))
        results = tuple(None if r is None else r[None][:0] for r in example)
    return results, tuple(None if r is None else 0 for r in results)


# ----------------------------------------------------------------------------------------------------- public functions

_is_compiling = torch.compiler.is_dynamo_compiling
_gate = torch_call.gate() if _READS_TENSORS else None
_cast = torch_autocast.caster() if _READS_TENSORS else Tensor.to
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def functions(library: Library, module: str = __name__) -> dict[str, Callable[..., Any]]:
    """The functions of a library's operators, which it registers as ``torch.ops.<library>``, once in a process.
    ``module``: where they are found, for pickle."""
    _register_once(library.ops.values())
    return {name: _public(op, module) for name, op in library.ops.items()}


def of(library: Library) -> Namespace:
    """The functions of a library's operators as a module, each made, and registered as ``torch.ops.<library>.<op>``,
    when it is first asked for: those that are defined later too."""
    made = _namespaces.get(library)
    if made is None and _is_compiling():
        raise RuntimeError("aotops.frontends.torch.of is called first in a compiled function, expected before it")
    return made or _namespace_of(library)


_namespaces: dict[Library, Namespace] = {}  # which torch.compile reads


def _namespace_of(library: Library) -> Namespace:
    def make(op: Op, module: str) -> dict[str, Callable[..., Any]]:
        _register_once([op])
        return {op.name: _public(op, module)}

    return _namespaces.setdefault(library, Namespace(library, "torch", make))


def _public(op: Op, module: str) -> Callable[..., Any]:
    disp = dispatched[op]
    first, second = op.inputs[0], op.inputs[1] if len(op.inputs) > 1 else ""
    torchs_names = {"input": first, "other": second} if "input" not in op.inputs else {}
    composed = torch_arguments.COMPOSED.get(op.name) if op.library is BUILTIN else None
    extra, _ = torch_call.EXTRA.get(op.name, ("", "")) if composed else ("", "")  # None here, or composed
    has_out, most = torch_call.has_out(op), len(signature(op.bind).parameters)

    def sort(args, kwargs):
        """The inputs and attributes. ``input`` and ``other``, torch's names of the first two inputs, are accepted."""
        if extra and len(args) > most and args[most] is None:
            args = args[:most]
        inputs, attrs = op.bind(*args, **{torchs_names.get(n, n): v for n, v in kwargs.items() if n != extra})
        if op.foreign is not None:
            return _with_numbers(inputs), attrs
        number, tensor = inputs[:2] if op.broadcast else (None, None)
        if not (isinstance(number, (int, float)) and isinstance(tensor, Tensor)):
            return inputs, attrs
        # torch.add accepts a number first; without alpha the sum commutes, and the number is not rounded
        return op.bind(tensor, number) if attrs[0] == 1 else ((tensor.new_full((), number), tensor), attrs)

    def compose(args, kwargs):
        """NotImplemented for a call that the kernel serves, or refuses."""
        if composed is None or any(map(_odd_kind, (*args, *kwargs.values()))):
            return NotImplemented
        return composed(function, *args, **{torchs_names.get(name, name): value for name, value in kwargs.items()})

    def general(*args, **kwargs):
        out = kwargs.pop("out", None) if has_out else None
        if out is not None:
            _check_unrecorded(op, out, (*args, *kwargs.values()))
        if (result := compose(args, kwargs)) is not NotImplemented:
            return result if out is None else _copied(op, out, result)
        if out is not None:
            return _into(op, out, general, sort, args, kwargs)
        return _general(op, disp, *sort(args, kwargs))

    def bind(*attrs):
        if not _is_worth_binding(op, attrs):
            return None
        named = dict.fromkeys(op.inputs) | dict(zip(op.public_attrs, attrs, strict=True))
        return _eager(op, op.canonical(op.bind(**named)[1])).differentiable

    in_c = _READS_TENSORS and not op.mutates
    plain = torch_call.public(op, bind, general) if in_c else general

    @functools.wraps(op.bind)
    def function(*args, **kwargs):
        if _is_compiling():
            out = kwargs.pop("out", None) if has_out else None
            if out is not None:
                _check_unrecorded(op, out, (*args, *kwargs.values()))
                return _copied(op, out, function(*args, **kwargs))
            if (result := compose(args, kwargs)) is not NotImplemented:
                return result
            return _dispatch(op, disp, *sort(args, kwargs))
        return plain(*args, **kwargs)

    function.__module__ = module
    function.__code__ = function.__code__.replace(co_name=op.name)  # torch.compile limits recompilations of a code
    if extra or has_out:
        own = signature(op.bind)
        more = [Parameter(extra, Parameter.POSITIONAL_OR_KEYWORD, default=None)] if extra else []
        more += [Parameter("out", Parameter.KEYWORD_ONLY, default=None)] if has_out else []
        function.__signature__ = own.replace(parameters=[*own.parameters.values(), *more])  # type: ignore[attr-defined]
    if in_c:
        torch_call.install_vectorcall(function, plain)
    return function


def _into(op: Op, out: Tensor, function: Callable[..., Tensor], sort, args, kwargs) -> Tensor:
    """Writes the result of a call that is not composed to ``out``: the entry does, or a result of its own is copied."""
    if (
        _gate is not None
        and _gate(out)
        and out.is_contiguous()
        and out.is_inference() == torch.is_inference_mode_enabled()
    ):
        try:
            inputs, attrs = sort(args, kwargs)
        except (TypeError, ValueError):  # wrong arguments
            return _copied(op, out, function(*args, **kwargs))
        if _writes_directly(op, out, inputs, attrs):
            with _RecordFunctionFast(f"{op.library.name}::{op.name}", [t for t in inputs if t is not None]):
                _run(op, inputs, op.canonical(attrs), op.outputs, {op.outputs[0]: out})
            if not out.is_inference():
                torch.autograd.graph.increment_version(out)
            return out
    return _copied(op, out, function(*args, **kwargs))


def _writes_directly(op: Op, out: Tensor, inputs: Tensors, attrs: tuple[Any, ...]) -> bool:
    """Whether the entry accepts these inputs, and ``out`` as the tensor that it writes to."""
    given = [t for t in inputs if t is not None]
    if op.alias or op.foreign is not None or not all(isinstance(t, Tensor) for t in given) or not _gate(*given):
        return False
    if not given or (op.autocast and torch.is_autocast_enabled(out.device.type)):
        return False
    if any(not t.is_contiguous() or t.device != out.device for t in given):
        return False
    if any(t.shape != given[0].shape for t in given) if op.broadcast else False:
        return False
    try:
        spec = infer(op, op.canonical(attrs), tuple(map(_spec, inputs)), out.device.type)[op.outputs[0]]
    except (TypeError, ValueError):
        return False
    if spec != _spec(out):
        return False
    same = [op.elementwise and t.data_ptr() == out.data_ptr() and t.shape == out.shape for t in given]
    return all(one or _disjoint(t, out) for t, one in zip(given, same, strict=True))


def _disjoint(a: Tensor, b: Tensor) -> bool:
    """Of contiguous tensors."""
    start, other = a.data_ptr(), b.data_ptr()
    return start + a.numel() * a.itemsize <= other or other + b.numel() * b.itemsize <= start


def _check_unrecorded(op: Op, out: Any, arguments: Iterable[Any]) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"{op.name}: out is {out!r:.40}, expected a torch.Tensor")
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (out, *arguments)):
        raise RuntimeError(f"{op.name}: out is given and an argument requires a gradient, expected a call without out")
    if not _is_compiling():
        _check_memory(op, out)


def _check_memory(op: Op, out: Tensor) -> None:
    """torch's own copy_ writes to a storage that was freed or made smaller."""
    if not torch._C._has_storage(out) or not out.numel():
        return
    last = out.storage_offset() + sum((n - 1) * step for n, step in zip(out.shape, out.stride(), strict=True))
    wanted, found = (last + 1) * out.itemsize, out.untyped_storage().nbytes()
    if found < wanted:
        raise RuntimeError(f"{op.name}: out has a storage of {found} bytes, expected at least {wanted} for its shape")


def _copied(op: Op, out: Tensor, y: Tensor) -> Tensor:
    """``out`` with the values of y. As torch's, an ``out`` without elements takes y's shape."""
    for what, found, expected in (("dtype", out.dtype, y.dtype), ("device", out.device, y.device)):
        if found != expected:
            error = TypeError if what == "dtype" else ValueError
            raise error(f"{op.name}: out has {what} {found}, expected {expected}".replace("torch.", ""))
    if any(n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"{op.name}: out has elements that share memory, expected none")
    if out.shape != y.shape and not out.numel():
        out.resize_(y.shape)
    if out.shape != y.shape:
        raise ValueError(f"{op.name}: out has shape {tuple(out.shape)}, expected {tuple(y.shape)}")
    return out.copy_(y)


def _with_numbers(inputs: Sequence[Any]) -> Tensors:
    """Python's numbers as tensors."""
    if not any(type(value) in NUMBERS for value in inputs):
        return inputs
    device = next((value.device for value in inputs if isinstance(value, Tensor)), None)
    dtypes = [NUMBERS.get(type(value)) for value in inputs]
    return [
        torch.tensor(value, dtype=_DTYPES[dtype], device=device) if dtype else value
        for value, dtype in zip(inputs, dtypes, strict=True)
    ]


def _general(op: Op, disp: Callable[..., Any], inputs: Tensors, attrs: tuple[Any, ...]):
    """A call that is not plain, or that the builtin refused. Raises for arguments that the operator does not accept."""
    _check_tensors(op, inputs)
    if not _symbolic(attrs):
        attrs = op.canonical(attrs)
    if op.broadcast and _all_given(inputs):
        check_broadcast(op.name, op.inputs, [_spec(t) for t in inputs])
    strided = op.elementwise and not all(t is None or t.is_contiguous() for t in inputs)
    if strided or op.mutates or _gate is None or not _gate(*inputs):
        return _dispatch(op, disp, inputs, attrs)
    # a backward by the dispatcher overwrites nothing, which matters where tensors are large
    if inputs[0] is not None and inputs[0].numel() < KEEP_RESIDUALS_FROM and not _is_worth_binding(op, attrs):
        try:
            return _dispatch(op, disp, inputs, attrs)
        except Exception:  # the entry refuses the call: _run_eager says why
            pass
    return _run_eager(op, inputs, attrs)


def _run_eager(op: Op, inputs: Tensors, attrs: tuple[Attr, ...]):
    """A plain call that the builtin refused, after casting, broadcasting and copying to contiguous tensors."""
    back = None
    if op.autocast and torch.is_autocast_enabled(inputs[0].device.type):
        inputs, attrs, back = _autocast(op, attrs, inputs[0].device.type, inputs)
    inputs, attrs = op.absorb_transposed_views(inputs, attrs, Tensor.is_contiguous)
    if op.broadcast and _all_given(inputs):
        inputs = torch.broadcast_tensors(*inputs)
    infer(op, attrs, tuple(map(_spec, inputs)), inputs[0].device.type)
    _check_devices(op, inputs)
    with _RecordFunctionFast(f"{op.library.name}::{op.name}", [t for t in inputs if t is not None]):
        results = _eager(op, attrs)(*(None if t is None else _plain(t) for t in inputs))
    return results if back is None else _public_outputs(op, [y.to(back) for y in _results(results)])


def _dispatch(op: Op, disp: Callable[..., Any], inputs: Tensors, attrs: tuple[Any, ...]):
    if op.broadcast and _all_given(inputs):
        inputs = torch.broadcast_tensors(*inputs)
    return _public_outputs(op, _results(disp(*inputs, *attrs)))


def _all_given(inputs: Tensors) -> bool:
    return all(t is not None for t in inputs)


def _check_tensors(op: Op, inputs: Tensors) -> None:
    for slot, t in zip(op.inputs, inputs, strict=True):
        if t is None and slot in op.optional:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op.name}: {slot} is {t!r:.40}, expected a torch.Tensor")
        if kind := _odd_kind(t):
            raise TypeError(f"{op.name}: {slot} is {kind}, expected a strided tensor")
        if _functorch.is_batchedtensor(t) and _functorch.maybe_get_level(t) > (_functorch.maybe_current_level() or 0):
            raise RuntimeError(f"{op.name}: {slot} is a tensor of a vmap that has ended, expected one from outside")


def _odd_kind(t: Any) -> str:
    """The kind of a tensor that no kernel and no composition takes, or nothing."""
    if not isinstance(t, Tensor):
        return ""
    if t.is_nested or t.is_quantized:
        return "a nested tensor" if t.is_nested else "a quantized tensor"
    return "" if t.layout == torch.strided else f"a tensor of layout {t.layout}"


globals().update(functions(BUILTIN))


def _channels_last(conv2d: Callable[..., Any]) -> Callable[..., Any]:
    """Passes channels_last tensors as NHWC views, and returns such a view."""

    def is_channels_last(t: Tensor) -> bool:
        # is_contiguous(memory_format=...) fails inside vmap
        return not t.is_contiguous() and t.movedim(1, 3).is_contiguous()

    def absorb_layout(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, layout="NCHW", allow_tf32=False):
        rest = bias, stride, padding, dilation, groups
        images = all(isinstance(t, Tensor) and t.dim() == 4 for t in (x, weight))
        if layout == "NCHW" and images and (is_channels_last(x) or is_channels_last(weight)):
            y = conv2d(x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1), *rest, "NHWC", allow_tf32)
            return y.permute(0, 3, 1, 2)
        return conv2d(x, weight, *rest, layout, allow_tf32)

    def into(out, *args, **kwargs):
        _check_unrecorded(OPS["conv2d"], out, (*args, *kwargs.values()))
        return _copied(OPS["conv2d"], out, absorb_layout(*args, **kwargs))

    @functools.wraps(conv2d)
    def function(*args, **kwargs):
        if "input" in kwargs:  # torch's name of x
            kwargs["x"] = kwargs.pop("input")
        out = kwargs.pop("out", None)
        return absorb_layout(*args, **kwargs) if out is None else into(out, *args, **kwargs)

    return function


conv2d = _channels_last(conv2d)  # type: ignore[name-defined] # noqa: F821


# -------------------------------------------------------------------------------------------------------------- modules


class _Offset:
    """``weight_offset`` of a norm's module: what is added to its weight, whose initial value is 1 - weight_offset. If
    there is no weight (elementwise_affine=False), it has no effect: the module computes what a new one with a weight
    does."""

    weight_offset = 0.0

    def __init__(self, *args: Any, weight_offset: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight_offset = float(weight_offset)
        if weight_offset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        if self.weight_offset and self.weight is not None:  # type: ignore[attr-defined]
            torch.nn.init.constant_(self.weight, 1 - self.weight_offset)  # type: ignore[attr-defined]

    def _offset(self) -> float:
        return self.weight_offset if self.weight is not None else 0.0  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return super().extra_repr() + offset  # type: ignore[misc]


class LayerNorm(_Offset, torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` on the library's kernel: the same arguments, parameters and state, and the keyword
    ``weight_offset``, which is added to the weight; the initial weight is 1 - weight_offset. Parameters in float32
    serve inputs of 16 bits."""

    def forward(self, input: Tensor) -> Tensor:
        affine = self.weight, self.bias, self.eps, self._offset()
        return layer_norm(input, self.normalized_shape, *affine)  # type: ignore[name-defined] # noqa: F821


class RMSNorm(_Offset, torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` on the library's kernel: the same arguments, parameters and state, and the keyword
    ``weight_offset``, which is added to the weight; the initial weight is 1 - weight_offset. Parameters in float32
    serve inputs of 16 bits."""

    def forward(self, input: Tensor) -> Tensor:
        affine = self.weight, self.eps, self._offset()
        return rms_norm(input, self.normalized_shape, *affine)  # type: ignore[name-defined] # noqa: F821


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` on the library's kernel: the same arguments, parameters and state, and an activation that is
    applied in the same kernel: None, "relu", "gelu", "gelu_tanh" or "silu"."""

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, activation=None):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.activation)  # type: ignore[name-defined] # noqa: F821

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", activation={self.activation!r}" if self.activation else "")


class GELU(torch.nn.GELU):
    """``torch.nn.GELU`` on the library's kernel: the same argument."""

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, self.approximate)  # type: ignore[name-defined] # noqa: F821


class Softmax(torch.nn.Softmax):
    """``torch.nn.Softmax`` on the library's kernel: the same argument."""

    def forward(self, input: Tensor) -> Tensor:
        if self.dim is None:  # torch warns, and chooses an axis
            return super().forward(input)
        return softmax(input, self.dim)  # type: ignore[name-defined] # noqa: F821


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` on the library's kernel: the same arguments."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        options = self.ignore_index, self.reduction, self.label_smoothing
        weight = {} if self.weight is None else {"weight": self.weight}
        return cross_entropy(input, target, *options, **weight)  # type: ignore[name-defined] # noqa: F821


class LLTM(torch.nn.Module):
    """The cell of PyTorch's tutorial "Custom C++ and CUDA Extensions" on the library's kernel: the same arguments and
    parameters, and device and dtype. ``forward(input, (old_h, old_cell))`` returns new_h and new_cell.

    ``bias`` is (1, 3 * state_size), as in the code that comes with the tutorial. A state_dict whose bias is
    (3 * state_size,), as in the tutorial's text, is loaded too.
    """

    def __init__(self, input_features: int, state_size: int, device=None, dtype=None) -> None:
        super().__init__()
        self.input_features, self.state_size = input_features, state_size
        gates, features = 3 * state_size, state_size + input_features
        self.weights = torch.nn.Parameter(torch.empty(gates, features, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(1, gates, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.state_size**-0.5
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return lltm(input, self.weights, self.bias, *state)  # type: ignore[name-defined] # noqa: F821

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        bias = state_dict.get(f"{prefix}bias")
        if isinstance(bias, Tensor) and bias.shape == (3 * self.state_size,):
            state_dict[f"{prefix}bias"] = bias[None]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"input_features={self.input_features}, state_size={self.state_size}"


class Conv2d(torch.nn.Conv2d):
    """``torch.nn.Conv2d`` on the library's kernel: the same arguments, parameters and state; channels_last tensors stay
    so, and TF32 is used if ``torch.backends.cudnn.allow_tf32`` is set. With another padding_mode than zeros it calls
    torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        if self.padding_mode != "zeros":
            return super().forward(input)
        options = self.stride, self.padding, self.dilation, self.groups
        return conv2d(input, self.weight, self.bias, *options, allow_tf32=torch.backends.cudnn.allow_tf32)
