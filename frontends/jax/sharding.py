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

from aotops.op import Attr, Op
from aotops.ops import OPS
from aotops.ops.cross_entropy import divides_slope, keeps_slope
from aotops.sharding import Axis, Sharding, sharding
from aotops.spec import accumulate_dtype

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
    """What may be split: what the definition states, and what is composed of parts here."""
    shapes = [None if x is None else x.shape for x in inputs]
    if op in _CROSS_ENTROPY and None not in shapes:
        return _rows_and_classes(op, attrs, shapes)
    stated = sharding(op, attrs, shapes)
    if stated is None:
        return Sharding({}, ())
    added_once = _ADDED_ONCE.get(op)
    if added_once in _given(op, inputs):
        shapes[op.inputs.index(added_once)] = None
        product = sharding(op, attrs, shapes)
        assert product is not None
        summed = tuple(axis for axis in product.axes if axis.is_summed)
        return Sharding({**stated.slots, **product.slots}, stated.axes + summed)
    return stated


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
        if split and self.op in _CROSS_ENTROPY and len(self.given) == len(self.op.inputs):
            return _CROSS_ENTROPY[self.op](self, split, *inputs)
        if (slot := _ADDED_ONCE.get(self.op)) in self.given and (over := self.summed_over("y", split)):
            i = self.op.inputs.index(slot)
            inputs[i] = jnp.where(jax.lax.axis_index(over) == 0, inputs[i], 0)
        results = zip(self.wanted, self.launch(self.op, self.attrs, self.wanted, *inputs), strict=True)
        return tuple(_sum(y, self.summed_over(slot, split)) for slot, y in results)

    def summed_over(self, slot: str, split: Split) -> tuple[str, ...]:
        """The axes of the mesh along which partial sums of a result lie."""
        return tuple(over for axis in self.stated.axes if slot in axis.partial for over in split.get(axis.name, ()))


def _supported(rule: Mapping[str, Any]) -> dict[str, Any]:
    """What this JAX takes of a rule: the first versions with one do not tell kinds of axes."""
    parameters = signature(custom_partitioning.def_partition).parameters
    return {key: value for key, value in rule.items() if key in parameters}


def _sum(x: Array, over: tuple[str, ...]) -> Array:
    return jax.lax.psum(x, over) if over else x


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


# -------------------------------------------------------------------------------------------------------- compositions

_ADDED_ONCE = {OPS[name]: "bias" for name in ("linear", "conv2d")}
"""Inputs that are added to a sum: if it is split, to one of its parts."""


def _rows_and_classes(op: Op, attrs: Attrs, shapes: Sequence[Any]) -> Sharding:
    """Of cross_entropy, whose entries take all classes, and for a mean all rows."""
    named = dict(zip(op.attrs, attrs, strict=True))
    rows = sharding(
        op, tuple((named | {"reduction": "sum"} if named["reduction"] == "mean" else named).values()), shapes
    )
    assert rows is not None
    like_x = [slot for slot, names in rows.slots.items() if names[-1:] == ("C",)]
    positions = {slot: len(rows.slots[slot]) - 1 for slot in like_x}
    slots = {slot: (*names[:-1], "c") if slot in positions else names for slot, names in rows.slots.items()}
    size = shapes[op.inputs.index("x")][-1]
    return Sharding(slots, (*rows.axes, Axis("c", size, positions, frozenset())))


def _cross_entropy(call: PartitionedCall, split: Split, x: Array, target: Array) -> tuple[Array, ...]:
    wide, counted = _wide(x), _counted(call, target)
    reduction, over = _attr(call, "reduction"), split.get("n", ())
    if "c" in split:
        losses, slope = _over_classes(call, split["c"], wide, target, counted)
        slope = slope if keeps_slope(reduction) else slope[..., :0]
    else:
        here = _with(call.op, call.attrs, reduction="sum" if reduction == "mean" else reduction, dtype=wide.dtype.name)
        losses, slope = call.launch(call.op, here, ("y", "slope"), x, target)
    if reduction != "none":
        total = jnp.stack([losses.astype(wide.dtype).sum(), counted.sum().astype(wide.dtype)])
        total, count = _sum(total, over)
        losses = total / count if reduction == "mean" else total
        if divides_slope(reduction, x.dtype.name):
            slope = jnp.where(counted[..., None], _wide(slope) / count, 0)  # the count may be 0
    found = {"y": losses.astype(_attr(call, "dtype") or x.dtype), "slope": slope.astype(x.dtype)}
    return tuple(found[slot] for slot in call.wanted)


def _over_classes(
    call: PartitionedCall, over: tuple[str, ...], x: Array, target: Array, counted: Array
) -> tuple[Array, Array]:
    """The losses of the rows and this part of their slope, of a part of the classes. Two reductions: of the largest
    elements, and of the sums. A class that there is not has a loss and a slope of NaN, as on a GPU."""
    smoothing, part = _attr(call, "label_smoothing"), x.shape[-1]
    classes = jax.lax.psum(1, over) * part
    shifted = x - jax.lax.pmax(x.max(-1), over)[..., None]
    powers = jnp.exp(shifted)
    here = jnp.arange(part) + jax.lax.axis_index(over) * part == target[..., None]
    sums = jnp.stack([powers.sum(-1), jnp.where(here, shifted, 0).sum(-1), shifted.sum(-1)])
    total, hit, every = jax.lax.psum(sums, over)
    losses = jnp.log(total) - (1 - smoothing) * hit - (smoothing / classes * every if smoothing else 0)
    slope = powers / total[..., None] - smoothing / classes - (1 - smoothing) * here
    odd = (target < 0) | (target >= classes)

    def by_row(values, counted, odd):
        return jnp.where(counted, jnp.where(odd, jnp.nan, values), 0)

    return by_row(losses, counted, odd), by_row(slope, counted[..., None], odd[..., None])


def _cross_entropy_backward(call: PartitionedCall, split: Split, dy: Array, x: Array, target: Array, slope: Array):
    factor, counted, reduction = _wide(dy), _counted(call, target), _attr(call, "reduction")
    if not keeps_slope(reduction):
        if "c" not in split:
            return call.launch(call.op, call.attrs, call.wanted, dy, x, target, slope)
        _, slope = _over_classes(call, split["c"], _wide(x), target, counted)
    if reduction == "mean" and not divides_slope(reduction, x.dtype.name):
        factor = factor / _sum(counted.sum(), split.get("n", ())).astype(factor.dtype)
    # 0 for an ignored row, also if dy is not finite or the count is 0
    return (jnp.where(counted[..., None], _wide(slope) * factor[..., None], 0).astype(x.dtype),)


def _wide(x: Array) -> Array:
    return x.astype(accumulate_dtype(x.dtype.name))


def _counted(call: PartitionedCall, target: Array) -> Array:
    return target != _attr(call, "ignore_index")


def _attr(call: PartitionedCall, name: str) -> Any:
    return dict(zip(call.op.attrs, call.attrs, strict=True))[name]


def _with(op: Op, attrs: Attrs, **other: Attr) -> Attrs:
    return tuple((dict(zip(op.attrs, attrs, strict=True)) | other).values())


_CROSS_ENTROPY = {OPS["cross_entropy"]: _cross_entropy, OPS["cross_entropy"].backward: _cross_entropy_backward}
