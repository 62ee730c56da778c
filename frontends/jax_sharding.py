"""How XLA partitions a call over several devices: what the definition states of its axes (aotops/sharding.py), as a
rule of Shardy and as GSPMD's callbacks.

XLA's partitioner asks once for each call of a compiled program, with the shardings that it has found for operands and
results. The call is then lowered again, for the shapes that one device has, and partial sums are added over the axes
of the mesh along which they lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from aotops.op import Attr, Op
from aotops.ops import OPS
from aotops.sharding import Sharding, sharding
from aotops.spec import accumulate_dtype

Array = Any  # jax.Array, or what jit accepts as one
Attrs = tuple[Attr, ...]
Names = tuple[str, ...]
Launch = Callable[..., tuple[Array, ...]]
"""A function of an operator, its attributes, the names of the wanted results, and the inputs."""


def partitioned(launch: Launch, op: Op, attrs: Attrs, wanted: Names, *inputs: Array | None) -> tuple[Array, ...]:
    """``launch(op, attrs, wanted, *inputs)``, which XLA may partition. JAX lowers it to the call itself for one device
    and in shard_map."""
    shapes = [None if x is None else x.shape for x in inputs]
    mean = _MEANS.get(op) if _attr(op, attrs, "reduction") == "mean" and None not in shapes else None
    stated = sharding(op, _with(op, attrs, reduction="sum") if mean else attrs, shapes)
    if stated is None or not stated.axes:
        return launch(op, attrs, wanted, *inputs)
    given = tuple(slot for slot, x in zip(op.inputs, inputs, strict=True) if x is not None)
    call = _Call(launch, mean, op, attrs, wanted, given, stated)
    function = custom_partitioning(call)
    function.def_partition(call.partition, infer_sharding_from_operands=call.infer, **_supported(call.rule()))
    return function(*(x for x in inputs if x is not None))


def _attr(op: Op, attrs: Attrs, name: str) -> Attr:
    return dict(zip(op.attrs, attrs, strict=True)).get(name)


def _with(op: Op, attrs: Attrs, **other: Attr) -> Attrs:
    return tuple((dict(zip(op.attrs, attrs, strict=True)) | other).values())


def _supported(rule: dict[str, Any]) -> dict[str, Any]:
    """What this JAX takes of a rule: before 0.4.37 there is none, and before 0.7 it does not tell kinds of axes."""
    parameters = signature(custom_partitioning.def_partition).parameters
    return {key: value for key, value in rule.items() if key in parameters}


class _Call(NamedTuple):
    """A call with inputs that are all given, and how it may be split."""

    launch: Launch
    mean: Callable[..., tuple[Array, ...]] | None
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

    # ------------------------------------------------------------------------------------------------------- callbacks

    def rule(self) -> dict[str, Any]:
        """In Shardy's notation, with another name for each axis that is whole."""
        names = {axis.name: f"a{i}" for i, axis in enumerate(self.stated.axes)}
        whole: list[str] = []

        def factors(slot: str) -> str:
            found = []
            for name in self.stated.slots[slot]:
                if name not in names:
                    whole.append(f"w{len(whole)}")
                found.append(names.get(name) or whole[-1])
            return " ".join(found)

        operands, results = (", ".join(map(factors, slots)) for slots in (self.given, self.wanted))
        kept = {name for slot in self.wanted for name in self.stated.slots[slot]}
        return {
            "sharding_rule": f"{operands} -> {results}",
            "reduction_factors": tuple(factor for name, factor in names.items() if name not in kept),
            "need_replication_factors": tuple(whole),
        }

    def infer(self, mesh, operands, results) -> tuple[Any, ...]:
        """GSPMD's, before Shardy: the shardings of the results of operands that are sharded so."""
        return self.shardings(mesh, self.wanted, self.split(mesh, dict(zip(self.given, operands, strict=True))))

    def partition(self, mesh, operands, results):
        """The call on one device's parts, with the shardings of its results and operands."""
        slots = dict(zip(self.given, operands, strict=True)) | dict(zip(self.wanted, results, strict=True))
        split = self.split(mesh, slots)

        def part(*arrays: Array) -> tuple[Array, ...]:
            return self.part(split, arrays)

        return mesh, part, self.shardings(mesh, self.wanted, split), self.shardings(mesh, self.given, split)

    # ------------------------------------------------------------------------------------------------------------ parts

    def split(self, mesh, tensors: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """Over which axes of the mesh each axis is split, so that most elements stay where they are. Only into equal
        parts: a call that is padded would compute other statistics and sums."""
        wishes: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for slot, tensor in tensors.items():
            for position, over in enumerate(_mesh_axes(tensor.sharding)):
                axis = self.stated.axis(slot, position)
                if axis and over:
                    wishes[axis.name, over] += prod(tensor.shape)
        sizes = {axis.name: axis.size for axis in self.stated.axes}
        split: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        for (name, over), _ in wishes.most_common():
            free = tuple(axis for axis in over if axis not in taken)
            if name not in split and free and sizes[name] % prod(mesh.shape[axis] for axis in free) == 0:
                split[name] = free
                taken.update(free)
        return split

    def shardings(self, mesh, slots: Names, split: Mapping[str, tuple[str, ...]]) -> tuple[Any, ...]:
        if mesh.empty:  # of a program with several meshes JAX tells none
            return tuple(SingleDeviceSharding(jax.local_devices()[0]) for _ in slots)
        specs = (PartitionSpec(*map(split.get, self.stated.slots[slot])) for slot in slots)
        return tuple(NamedSharding(mesh, spec) for spec in specs)

    def part(self, split: Mapping[str, tuple[str, ...]], arrays: Sequence[Array]) -> tuple[Array, ...]:
        if self.mean and split:
            return self.mean(self, split, self.inputs(arrays))
        results = self(*arrays)
        return tuple(_sum(y, self.summed_over(slot, split)) for slot, y in zip(self.wanted, results, strict=True))

    def summed_over(self, slot: str, split: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """The axes of the mesh along which a result's partial sums lie."""
        return tuple(over for axis in self.stated.axes if slot in axis.partial for over in split.get(axis.name, ()))


def _mesh_axes(sharding: Any) -> Iterator[tuple[str, ...]]:
    """For each axis of a tensor the axes of the mesh over which it is sharded."""
    for over in getattr(sharding, "spec", None) or ():
        yield (over,) if isinstance(over, str) else over if isinstance(over, tuple) else ()


def _sum(x: Array, over: tuple[str, ...]) -> Array:
    return jax.lax.psum(x, over) if over else x


# ---------------------------------------------------------------------------------------------------------------- means
# The mean of a part of the rows is no part of the mean: the number of rows that count differs.


def _cross_entropy(call: _Call, split: Mapping[str, tuple[str, ...]], inputs: Sequence[Array]) -> tuple[Array, ...]:
    x, target = inputs
    each = _with(call.op, call.attrs, reduction="none")
    results = dict(zip(call.wanted, call.launch(call.op, each, call.wanted, *inputs), strict=True))
    if "y" in results:
        dtype = accumulate_dtype(x.dtype.name)
        mine = jnp.stack([results["y"].astype(dtype).sum(), _count(call, target).astype(dtype)])
        total, count = _sum(mine, split["n"])
        results["y"] = (total / count).astype(x.dtype)
    return tuple(results.values())


def _cross_entropy_backward(call: _Call, split: Mapping[str, tuple[str, ...]], inputs: Sequence[Array]):
    """The slope does not know the reduction."""
    dy, x, target, slope = inputs
    dtype = accumulate_dtype(x.dtype.name)
    factor = dy.astype(dtype) / _sum(_count(call, target), split["n"]).astype(dtype)
    counts = (target != _attr(call.op, call.attrs, "ignore_index"))[:, None]
    return (jnp.where(counts, slope.astype(dtype) * factor, 0).astype(x.dtype),)


def _count(call: _Call, target: Array) -> Array:
    return (target != _attr(call.op, call.attrs, "ignore_index")).sum()


_MEANS = {OPS["cross_entropy"]: _cross_entropy, OPS["cross_entropy"].backward: _cross_entropy_backward}
