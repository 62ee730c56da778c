"""How XLA partitions a call over several devices: what the definition states of its axes (aotops/sharding.py), as a
rule of Shardy and as GSPMD's callbacks.

XLA's partitioner asks once for each call of a compiled program, with the shardings that it has found for operands and
results. The call is then lowered again, for the shapes that one device has, and partial sums are added over the axes
of the mesh along which they lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from aotops.formula import compose_part
from aotops.op import Attr, Op
from aotops.sharding import Sharding, sharding

from .mathematics import Mathematics
from .private import typeof

Array = Any  # jax.Array, or what jit accepts as one
Attrs = tuple[Attr, ...]
Names = tuple[str, ...]
Split = Mapping[str, tuple[str, ...]]
"""For the name of each axis that is split: the axes of the mesh over which it is."""
Launch = Callable[..., tuple[Array, ...]]
"""A function of an operator, its attributes, the names of the wanted results, and the inputs."""


def partitioned(launch: Launch, op: Op, attrs: Attrs, wanted: Names, *inputs: Array | None) -> tuple[Array, ...]:
    """``launch(op, attrs, wanted, *inputs)``, which XLA may partition."""
    stated = _stated(op, attrs, inputs)
    mesh = mesh_of(inputs)
    if not stated.axes or bool(getattr(mesh, "manual_axes", ())):
        return launch(op, attrs, wanted, *inputs)
    call = PartitionedCall(launch, op, attrs, wanted, _given(op, inputs), stated)
    arrays = [x for x in inputs if x is not None]
    if not _is_explicit(mesh):
        return call.bind(*arrays)
    split = _split(stated, mesh, dict(zip(call.given, map(typeof, arrays), strict=True)))
    specs = [tuple(x.spec for x in _shardings(stated, mesh, slots, split)) for slots in (call.given, wanted)]
    names = frozenset(mesh.explicit_axes)
    part = jax.shard_map(
        partial(call.part, split), mesh=mesh, in_specs=specs[0], out_specs=specs[1], axis_names=names, check_vma=False
    )
    return part(*arrays)


def aligned(op: Op, attrs: Attrs, inputs: Sequence[Array | None]) -> Sequence[Array | None]:
    """The inputs; where JAX's types tell their shardings (explicit mode), sharded as the call splits them, so that each
    gradient has the type of its input."""
    mesh = mesh_of(inputs)
    if not _is_explicit(mesh) or mesh.manual_axes:
        return inputs
    stated, given = _stated(op, attrs, inputs), _given(op, inputs)
    arrays = [x for x in inputs if x is not None]
    split = _split(stated, mesh, dict(zip(given, map(typeof, arrays), strict=True)))
    moved = dict(zip(given, map(jax.sharding.reshard, arrays, _shardings(stated, mesh, given, split)), strict=True))
    return [moved.get(slot) for slot in op.inputs]


def mesh_of(arrays: Iterable[Array | None]) -> Any:
    """The mesh that JAX's types tell; None if they tell none."""
    return _mesh(typeof(x) for x in arrays if x is not None)


def _is_explicit(mesh: Any) -> bool:
    """Whether JAX's types tell how arrays are sharded: explicit mode, which JAX before 0.7 does not have whole."""
    return bool(getattr(mesh, "explicit_axes", ())) and hasattr(jax.sharding, "reshard")


def _mesh(types: Iterable[Any]) -> Any:
    meshes = (getattr(getattr(t, "sharding", None), "mesh", None) for t in types)
    return next((mesh for mesh in meshes if mesh is not None and not mesh.empty), None)


# ----------------------------------------------------------------------------------------------------------------- axes


def _given(op: Op, inputs: Sequence[Array | None]) -> Names:
    return tuple(slot for slot, x in zip(op.inputs, inputs, strict=True) if x is not None)


def _stated(op: Op, attrs: Attrs, inputs: Sequence[Array | None]) -> Sharding:
    stated = sharding(op, attrs, [None if x is None else x.shape for x in inputs], composed=True)
    return stated or Sharding({}, ())


def _split(stated: Sharding, mesh: Any, tensors: Mapping[str, Any]) -> Split:
    """How to split the axes so that most elements stay where they are. Parts are equal: padding would change sums.

    Args:
        tensors: by slot, objects with a shape and a sharding.
    """
    wishes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for axis in stated.axes:
        for slot, at in axis.positions.items():
            if slot in tensors and (over := _mesh_axes(tensors[slot].sharding, at)):
                wishes[axis.name, over] += prod(tensors[slot].shape)
    sizes = {axis.name: axis.size for axis in stated.axes}
    split: dict[str, tuple[str, ...]] = {}
    for (name, over), _ in wishes.most_common():
        is_free = name not in split and not set(over) & {axis for taken in split.values() for axis in taken}
        if is_free and sizes[name] and sizes[name] % prod(mesh.shape[axis] for axis in over) == 0:
            split[name] = over
    return split


def _mesh_axes(sharding: Any, position: int) -> tuple[str, ...]:
    """The axes of the mesh over which an axis of a tensor is sharded."""
    spec = getattr(sharding, "spec", None) or ()
    over = spec[position] if position < len(spec) else None
    return (over,) if isinstance(over, str) else over if isinstance(over, tuple) else ()


def _shardings(stated: Sharding, mesh: Any, slots: Names, split: Split) -> tuple[Any, ...]:
    return tuple(_sharding(stated, mesh, slot, split) for slot in slots)


def _sharding(stated: Sharding, mesh: Any, slot: str, split: Split) -> Any:
    if mesh.empty:
        return SingleDeviceSharding(jax.local_devices()[0])  # each device has all
    over = {axis.positions[slot]: split.get(axis.name) for axis in stated.axes if slot in axis.positions}
    return NamedSharding(mesh, PartitionSpec(*(over.get(i) for i in range(max(over, default=-1) + 1))))


# ----------------------------------------------------------------------------------------------------------------- call


@dataclass(frozen=True, eq=False)
class PartitionedCall:
    """A call of an operator, as a function of the inputs that there are."""

    launch: Launch
    op: Op
    attrs: Attrs
    wanted: Names
    given: Names
    stated: Sharding

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        return self.launch(self.op, self.attrs, self.wanted, *self.inputs(arrays))

    def inputs(self, arrays: Sequence[Array]) -> list[Array | None]:
        named = dict(zip(self.given, arrays, strict=True))
        return [named.get(slot) for slot in self.op.inputs]

    def bind(self, *arrays: Array) -> tuple[Array, ...]:
        function = custom_partitioning(lambda *arrays: self(*arrays))
        function.def_partition(self.partition, infer_sharding_from_operands=self.infer, **_supported(self.rule()))
        return tuple(_partitioned_p.bind(*arrays, call=self, jaxpr=jax.make_jaxpr(function)(*arrays)))

    def rule(self) -> dict[str, Any]:
        """In Shardy's notation, with another name for each axis that is whole."""
        names = {axis.name: f"a{i}" for i, axis in enumerate(self.stated.axes)}
        whole: list[str] = []

        def factors(slot: str) -> str:
            found = []
            for name in self.stated.slots[slot]:
                if name not in names:
                    whole.append(f"w{len(whole)}")
                found.append(names[name] if name in names else whole[-1])
            return " ".join(found)

        operands, results = (", ".join(map(factors, slots)) for slots in (self.given, self.wanted))
        kept = {name for slot in self.wanted for name in self.stated.slots[slot]}
        return {
            "sharding_rule": f"{operands} -> {results}",
            "reduction_factors": tuple(factor for name, factor in names.items() if name not in kept),
            "need_replication_factors": tuple(whole),
        }

    def infer(self, mesh, operands, results) -> tuple[Any, ...]:
        """GSPMD's, which JAX has before Shardy: the shardings of the results for those of the operands."""
        split = _split(self.stated, mesh, dict(zip(self.given, operands, strict=True)))
        return _shardings(self.stated, mesh, self.wanted, split)

    def partition(self, mesh, operands, results):
        """One device's part of the call, and the shardings of results and operands that it is for."""
        tensors = dict(zip(self.given, operands, strict=True)) | dict(zip(self.wanted, results, strict=True))
        split = _split(self.stated, mesh, tensors)
        shardings = [_shardings(self.stated, mesh, slots, split) for slots in (self.wanted, self.given)]
        return mesh, partial(self.part, split), *shardings

    def part(self, split: Split, *arrays: Array) -> tuple[Array, ...]:
        inputs = self.inputs(arrays)
        axes = [(axis, split[axis.name]) for axis in self.stated.axes if axis.name in split]
        for i, slot in enumerate(self.op.inputs):
            if over := _joined(over for axis, over in axes if slot in axis.added):
                inputs[i] = jnp.where(jax.lax.axis_index(over) == 0, inputs[i], 0)
        if any(axis.composed for axis, _ in axes):
            every = compose_part(_Part(self, split, inputs), self.op, self.attrs, inputs)
            found = tuple(dict(zip(self.op.results, every, strict=True))[slot] for slot in self.wanted)
        else:
            found = self.launch(self.op, self.attrs, self.wanted, *inputs)
        partial_over = [_joined(over for axis, over in axes if slot in axis.partial) for slot in self.wanted]
        return tuple(jax.lax.psum(y, over) if over else y for y, over in zip(found, partial_over, strict=True))


def _joined(meshes: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(name for names in meshes for name in names)


def _supported(rule: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a rule that this JAX takes: the first versions with one do not tell kinds of axes."""
    parameters = signature(custom_partitioning.def_partition).parameters
    return {key: value for key, value in rule.items() if key in parameters}


# JAX cannot export a custom_partitioning, nor lower it where it does not tell the devices, and says so only then.

_partitioned_p = Primitive("aotops_partitioned")
_partitioned_p.multiple_results = True


@_partitioned_p.def_impl
def _evaluate(*arrays, call, jaxpr):
    return call(*arrays)


@_partitioned_p.def_abstract_eval
def _types(*types, call, jaxpr):
    mesh = _mesh(types)
    if mesh is None or not hasattr(jax, "typeof"):
        return jaxpr.out_avals
    # As JAX's own: the inner trace forgets the mesh, and then the types of a value and its tangent differ.
    return [t.update(sharding=NamedSharding(mesh, PartitionSpec(*(None for _ in t.shape)))) for t in jaxpr.out_avals]


def _lower(ctx, *values, call, jaxpr):
    is_exported = getattr(getattr(ctx.module_context, "lowering_parameters", None), "for_export", False)
    unknown = getattr(ctx.module_context.axis_context, "device_assignment", ()) is None
    lowered = call if is_exported or unknown else jaxpr_as_fun(jaxpr)
    return mlir.lower_fun(lowered, multiple_results=True)(ctx, *values)


mlir.register_lowering(_partitioned_p, _lower)


# --------------------------------------------------------------------------------------------------------------- parts


class _Part(Mathematics):
    """``aotops.formula.PartMathematics`` of JAX."""

    log = staticmethod(jnp.log)

    def __init__(self, call: PartitionedCall, split: Split, inputs: Sequence[Array | None]) -> None:
        super().__init__(None)
        self._call, self._split, self._inputs = call, split, inputs

    def max(self, x: Array) -> Array:
        return x.max(-1)

    def is_split(self, axis: str) -> bool:
        return axis in self._split

    def length(self, axis: str) -> int:
        return next(each.size for each in self._call.stated.axes if each.name == axis)

    def offset(self, axis: str, length: int) -> Array:
        return jax.lax.axis_index(self._split[axis]) * length

    def reduce(self, x: Array, how: str, axis: str) -> Array:
        reduction = jax.lax.psum if how == "sum" else jax.lax.pmax
        return reduction(x, self._split[axis]) if self.is_split(axis) else x

    def is_known(self, x: Array) -> bool:
        return False

    def run(self, **named: Any) -> tuple[Array, ...]:
        op = self._call.op
        given = dict(zip((*op.inputs, *op.attrs), (*self._inputs, *self._call.attrs), strict=True)) | named
        inputs, attrs = ([given[name] for name in names] for names in (op.inputs, op.attrs))
        absent = {f"d{slot}" for slot in op.inputs if given[slot] is None}  # nobody wants their gradients
        wanted = tuple(slot for slot in op.results if slot not in absent)
        found = dict(zip(wanted, self._call.launch(op, tuple(attrs), wanted, *inputs), strict=True))
        return tuple(found.get(slot) for slot in op.results)
