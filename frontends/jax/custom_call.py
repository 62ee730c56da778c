"""The custom call of XLA that an operator is: how XLA is told of it, its operands, results and attributes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import jax

from aotops.extra import encode
from aotops.infer import UNKNOWN_DIM, infer, infer_symbolic
from aotops.library import Library, load
from aotops.op import Op
from aotops.ops import BUILTIN
from aotops.spec import TensorSpec, shape_text

from .private import InconclusiveDimensionOperation, as_varying, ffi, is_symbolic_dim, varying_axes
from .sharding import Array, Attrs, Names, mesh_of, partitioned

TARGET, SCRATCH_TARGET = "aotops", "aotops_scratch"
"""The names of the custom calls. The second is used only in exported programs, for operators that need a workspace
whose size depends on a symbolic dimension."""


def register(library: Library = BUILTIN) -> None:
    """Makes a library's operators known to XLA. The functions here do so when first called; a process that calls none
    of them, and runs a program loaded by ``jax.export``, has to do so itself.

    Raises:
        LibraryError: the library is missing, does not load, or is of another version.
    """
    _register_targets()
    library.registered  # noqa: B018  for the handler, which looks it up by name


@cache
def _register_targets() -> None:
    # Not at import: a registration that XLA refuses disables the whole backend.
    lib = load()
    ffi.register_ffi_target(TARGET, ffi.pycapsule(lib.aot_xla_cpu), platform="cpu")
    ffi.register_ffi_target(SCRATCH_TARGET, ffi.pycapsule(lib.aot_xla_cpu), platform="cpu")
    # Without CUDA entries too: the handler's error is clearer than XLA's.
    ffi.register_ffi_target(TARGET, ffi.pycapsule(lib.aot_xla_cuda), platform="CUDA")
    ffi.register_ffi_target(SCRATCH_TARGET, ffi.pycapsule(lib.aot_xla_cuda_scratch), platform="CUDA")


def custom_call(op: Op, attrs: Attrs, wanted: Names, *inputs: Array | None) -> tuple[Array, ...]:
    """The wanted results of an operator's entry; XLA may partition the call."""
    specs = tuple(None if x is None else TensorSpec(x.shape, x.dtype.name) for x in inputs)
    if any(is_symbolic_dim(dim) for spec in specs if spec for dim in spec.shape):
        return _custom_call(op, attrs, wanted, _symbolic_specs(op, attrs, specs), *inputs)
    infer(op, attrs, specs)  # the library's errors, before those of the statement of axes
    if op.dims is None and not op.elementwise:
        _warn_of_mesh(op, inputs)
    return partitioned(_on_each_platform, op, attrs, wanted, *inputs)


def _on_each_platform(op: Op, attrs: Attrs, wanted: Names, *inputs: Array | None) -> tuple[Array, ...]:
    specs = tuple(None if x is None else TensorSpec(x.shape, x.dtype.name) for x in inputs)
    cpu, cuda = (infer(op, attrs, specs, device) for device in ("cpu", "cuda"))
    calls = [partial(_custom_call, op, attrs, wanted, found) for found in (cpu, cuda)]
    if cpu == cuda:
        return calls[0](*inputs)
    return jax.lax.platform_dependent(*inputs, cpu=calls[0], cuda=calls[1])  # workspaces differ


def _custom_call(
    op: Op, attrs: Attrs, wanted: Names, specs: Mapping[str, TensorSpec], *inputs: Array | None
) -> tuple[Array, ...]:
    """``specs``: of all results; the handler allocates a workspace that they lack."""
    written = [s for s in op.entry_outputs if s in wanted or s in op.workspace or not op.is_optional(s)]
    present = [x is not None for x in inputs] + [s in written for s in op.entry_outputs]
    results = [s for s in written if s in specs]
    for slot in results:
        check_x64(op, slot, specs[slot].dtype)
    types = [jax.ShapeDtypeStruct(specs[s].shape, specs[s].dtype) for s in results]
    entry = op.entry if op.foreign or op.library is BUILTIN else f"{op.library.name}/{op.entry}"
    texts = {"entry": entry, "attrs": encode(op, attrs, present)}
    if results != written:
        texts["scratch"] = ",".join(op.workspace)
    target = TARGET if results == written else SCRATCH_TARGET
    aliases: dict[str, Any] = {}
    if op.mutates:  # the entry writes to the memory of a further result, where XLA puts the input
        places = {op.inputs.index(slot): len(types) + i for i, slot in enumerate(op.mutates)}
        types += [jax.ShapeDtypeStruct(inputs[i].shape, inputs[i].dtype) for i in places]  # type: ignore[union-attr]
        aliases["input_output_aliases"], texts["aliased"] = places, str(len(places))
        results = [*results, *op.mutates]
    call = ffi.ffi_call(target, types, **aliases)
    outputs = call(*(x for x in inputs if x is not None), **texts)
    named = dict(zip(results, vary(outputs, varying(inputs)), strict=True))
    return tuple(named[s] for s in wanted)


def _symbolic_specs(op: Op, attrs: Attrs, specs: Sequence[TensorSpec | None]) -> dict[str, TensorSpec]:
    found = infer_symbolic(op, attrs, specs, lambda dim: UNKNOWN_DIM if is_symbolic_dim(dim) else dim)
    try:
        # XLA removes a call with empty results, so that an invalid shape would not be found at run time.
        fits = all(dim >= 1 for spec in found.values() for dim in spec.shape if is_symbolic_dim(dim))
    except InconclusiveDimensionOperation as error:
        what = str(error).partition("\n")[0].removesuffix(".")
        raise ValueError(f"{op.name}: {what}: give jax.export.symbolic_shape a constraint that decides it") from error
    if not fits:
        shapes = " and ".join(shape_text(spec.shape) for spec in specs if spec)
        raise ValueError(f"{op.name}: shapes {shapes} do not fit")
    return found


def check_x64(op: Op, slot: str, dtype: str) -> None:
    """Without 64 bits JAX would use half as many."""
    if jax.dtypes.canonicalize_dtype(dtype).name != dtype:
        raise TypeError(f"{op.name}: {slot} has dtype {dtype}, which JAX has with jax_enable_x64 alone")


# ------------------------------------------------------------------------------------------------------ several devices

_warned = False


class ShardingWarning(UserWarning):
    """Each of several devices computes the whole result."""


def _warn_of_mesh(op: Op, inputs: Sequence[Array | None]) -> None:
    """Warns, once in a process, that XLA gathers inputs that several devices share."""
    global _warned
    mesh = mesh_of(inputs)
    manual = getattr(mesh, "manual_axes", ())  # in shard_map each part is an array
    n = 1 if mesh is None else prod(size for axis, size in mesh.shape.items() if axis not in manual)
    if _warned or n == 1:
        return
    _warned = True
    text = f"{op.name}: its definition has no dims: each of {n} devices gathers the inputs and computes all of the"
    warnings.warn(f"{text} result; in jax.shard_map each does its part", ShardingWarning, stacklevel=2)


# ------------------------------------------------------------------------------------------------------------ shard_map
# With check_vma, shard_map tracks the mesh axes along which each array varies. The inputs of a custom call must agree;
# JAX then sums a gradient over the axes along which its input does not vary.


def varying(arrays: Iterable[Array | None]) -> frozenset[str]:
    """The mesh axes along which any of some arrays varies."""
    return frozenset().union(*(varying_axes(x) for x in arrays if x is not None))


def vary(arrays: Sequence[Array | None], axes: frozenset[str]) -> list[Array | None]:
    """The arrays, each varying along these mesh axes at least."""
    more = [x is not None and tuple(axes - varying([x])) for x in arrays]
    return [as_varying(x, new) if new else x for x, new in zip(arrays, more, strict=True)]
