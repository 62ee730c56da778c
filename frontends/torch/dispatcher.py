"""Operators of torch's dispatcher, ``torch.ops.<library>.<op>``: schemas, kernels, fake kernels and batching rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from aotops.library import ERRORS, Library, LibraryError, check, load
from aotops.op import Op
from aotops.ops import BUILTIN
from aotops.spec import check_devices

from ..torch_schema import attributes, mask, overwriting_schema, schema, splitter, written
from . import cached, flops, inductor, overwrite, private, sharding, signs
from .autocast import autocast_kernel
from .autograd import autograd_kernel
from .gradients import composed
from .registered import dispatched, in_c
from .tensors import (
    READS_TENSORS,
    Tensors,
    common_strides,
    empty_arguments,
    inferred,
    packed,
    results_of,
    run,
    spec_of,
    specs_of,
)

# The strides of results depend on those of inputs; opcheck passes.
_TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order), torch.Tag.pt2_compliant_tag)


@functools.cache  # which keeps the namespace: it is unregistered when it is deleted
def _namespace(library: Library) -> torch.library.Library:
    try:
        namespace = torch.library.Library(library.name, "FRAGMENT" if library is BUILTIN else "DEF")
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the library's name is {library.name!r}, which torch.ops has already") from error
    if library is BUILTIN:
        signs.register(namespace)
        cached.register()
    return namespace


def register(ops: Iterable[Op]) -> None:
    """Registers operators and their backwards that are not registered yet."""
    pairs = [(one, op) for op in ops for one in (op.backward, op) if one and one.has_kernel and one not in dispatched]
    pairs = list(dict(pairs).items())  # the backward of several operators once
    for one, forward in pairs:
        dispatched[one] = _register_one(_namespace(one.library), one, forward)
    told = [inductor.Operator(one, f, dispatched[one], _register_overwriting(one, f)) for one, f in pairs]
    inductor.register(told, composed)
    triples = [(one, forward, dispatched[one]) for one, forward in pairs]
    sharding.register(triples)
    flops.register(triples)


def _register_one(namespace: torch.library.Library, op: Op, forward: Op) -> Callable[..., Any]:
    """``torch.ops.<library>.<op>``: returns every output and residual. ``forward``: the operator itself, or the one
    whose backward it is."""
    split, name = splitter(op), f"{namespace.ns}::{op.name}"
    if _define(namespace, op):
        in_c.add(op)
    dispatched = getattr(getattr(torch.ops, namespace.ns), op.name).default

    def kernel(*args):
        inputs, attrs, names = split(args)
        return packed(run(op, inputs, op.canonical(attrs), names))

    def fake(*args):
        inputs, attrs, names = split(args)
        specs = specs_of(op, attrs, inputs)
        check_devices(op.name, op.inputs, inputs)
        strides, device = op.elementwise and common_strides(inputs), inputs[0].device

        def empty(spec):
            arguments = empty_arguments(spec)
            if strides:
                return torch.empty_strided(**arguments, stride=strides, device=device)
            return torch.empty(**arguments, device=device)

        return packed([empty(specs[y]) if y in names else None for y in op.results])

    def vmap(info, dims, *args):
        if op.mutates:
            raise NotImplementedError(f"{op.name}: vmap of an operator that writes to its inputs is not supported")
        inputs, attrs, names = split(args)
        run = lambda *t: results_of(dispatched(*t, *attrs, *mask(op, names)))  # noqa: E731
        _check_example(op, attrs, dims, inputs)
        results, out_dims = _batch(op, info.batch_size, dims[: len(inputs)], inputs, names, run)
        return packed(results), packed(out_dims)

    for device in ("CPU", "CUDA"):
        if op not in in_c:
            namespace.impl(op.name, kernel, device)
        if op.autocast:
            namespace.impl(op.name, autocast_kernel(op, dispatched, device), f"Autocast{device}")
    torch.library.register_fake(name, fake, lib=namespace)
    if hasattr(torch.library, "register_vmap"):  # torch 2.5; before, vmap calls the operator for each example
        torch.library.register_vmap(name, vmap, lib=namespace)
    namespace.impl(op.name, autograd_kernel(op, forward, dispatched), "Autograd", with_keyset=True)
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
    if private.has_kernel(name):
        found = str(private.get_schema(name, ""))
        if found != f"{namespace.ns}::{wanted}":
            raise LibraryError(f"{name} is registered as {found}, expected {wanted}: by another version of the library")
        return True
    namespace.define(wanted, tags=_TAGS)
    if op.foreign is not None or not READS_TENSORS or not op.library.registered:
        return False
    told = (op.library.name, wanted, written(op))
    status = load().aot_torch_implement(*(text.encode() for text in told), op.elementwise)
    if ERRORS.get(status) is not NotImplementedError:  # this torch has no such functions, or they take no such argument
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
        return given, [given[instead.get(slot, slot)] for slot in op.inputs], attributes(args[len(taken) :])

    def kernel(*args):
        if op is not forward and overwrite.keeps_graph():
            raise RuntimeError(
                f"{op.name}: compiled code writes over {', '.join(op.overwrites.values())}, expected a graph that is "
                f"not kept: for retain_graph=True, set torch._functorch.config.donated_buffer = False"
            )
        given, inputs, attrs = named(args)
        over = {y: given[slot] for y, slot in op.overwrites.items() if y not in op.residuals or op.replaced(attrs)}
        results = dict(zip(op.results, run(op, inputs, op.canonical(attrs), op.results, over), strict=True))
        return packed([results[y] for y in returned])

    def fake(*args):
        _, inputs, attrs = named(args)
        specs, device = specs_of(op, attrs, inputs), inputs[0].device
        return packed([torch.empty(**empty_arguments(specs[y]), device=device) for y in returned])

    torch.library.register_fake(f"{namespace.ns}::{name}", fake, lib=namespace)
    for device in ("CPU", "CUDA"):
        namespace.impl(name, kernel, device)
    return getattr(getattr(torch.ops, namespace.ns), op.name).overwriting


def _versions_kernel(op: Op, dispatched: Any) -> Callable[..., Any]:
    """Counts a new version of each input that the entry writes to, so that autograd finds a saved one that changed."""

    def kernel(keyset, *args):
        with private.BelowVersions():
            results = dispatched.redispatch(keyset & private.after_versions, *args)
        for slot, t in zip(op.inputs, args, strict=False):
            if slot in op.mutates:
                torch.autograd.graph.increment_version(t)
        return results

    return kernel


def _check_example(op: Op, attrs: Sequence[Any], dims: Sequence[int | None], inputs: Tensors) -> None:
    """The axis of a batch must not stand for one that an example lacks."""
    specs = [spec_of(t) for t in inputs]
    for i, dim in enumerate(dims[: len(inputs)]):
        if (spec := specs[i]) is not None and dim is not None:
            specs[i] = spec._replace(shape=(*spec.shape[:dim], *spec.shape[dim + 1 :]))
    inferred(op, tuple(attrs), tuple(specs), inputs[0].device.type)


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
