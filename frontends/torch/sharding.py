"""Sharding strategies of the operators for DTensor.

They follow from ``Op.dims``: an axis that may be split is ``Shard`` in each tensor that has it. Outputs that are sums
over it are ``Partial``, and so are inputs that are added to such a sum once. Everything else is ``Replicate``. DTensor
redistributes inputs that have other placements, as it does for torch's own operators. An operator that states nothing
is computed on replicated tensors.

Where an operator has ``Op.parts``, more axes are split: the call is composed of local results and reductions over the
mesh.

The strategies are registered once torch.distributed.tensor has been imported, which this frontend does not import.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aotops.formula import compose_part
from aotops.op import Op
from aotops.sharding import Axis, sharding

from ..imports import after_import
from ..torch_schema import maskable, splitter
from . import private
from .mathematics import Mathematics
from .tensors import results_of


def register(operators: Iterable[tuple[Op, Op, Any]]) -> None:
    """Registers the strategies of operators: now, or once DTensor is imported.

    Args:
        operators: each with the operator itself, or the one whose backward it is, and its ``OpOverload``.
    """
    triples = tuple((op, forward, overload) for op, forward, overload in operators if not op.mutates)
    after_import(private.DTENSOR, partial(_register, triples))


def _register(operators: Sequence[tuple[Op, Op, Any]]) -> None:
    try:
        from torch.distributed.tensor.experimental import register_sharding

        dispatcher, schema_info = private.dtensor_dispatcher()
        for op, forward, overload in operators:
            register_sharding(overload)(partial(_strategies, op))
            # Every argument decides on the strategy. By itself register_sharding would have DTensor look up a kept one
            # by tensors, and by attributes from the first integer on.
            lists = any(kind.endswith("[]") for kind in op.attrs.values()) or bool(maskable(op))
            dispatcher.sharding_propagator.op_to_schema_info[overload] = schema_info(0, needs_pytree=lists)
            if op.parts is not None:
                dispatcher._custom_op_handlers[overload] = partial(_of_parts, op, forward)
    except ImportError:  # before torch 2.5
        return
    except Exception as error:  # DTensor must work: without the strategies it refuses what it does not know
        warnings.warn(f"aotops: DTensor of torch {torch.__version__} took no strategies: {error!r}", stacklevel=2)


# ---------------------------------------------------------------------------------------------------------- strategies

Placements = list[Any]
Strategy = tuple[Placements, Placements]
"""The placements of results and of arguments over one axis of the mesh; None of an argument that is not a tensor."""


def _strategies(op: Op, *args: Any) -> list[Strategy]:
    """Each way to split a call, whose tensors are specs."""
    specs, attrs, names = splitter(op)(args)
    shapes = [None if spec is None else tuple(spec.shape) for spec in specs]
    found = sharding(op, attrs, shapes)
    axes = found.axes if found else ()
    given = {slot for slot, shape in zip(op.inputs, shapes, strict=True) if shape is not None}
    strategies = [_strategy(op, given, names, None), *(_strategy(op, given, names, axis) for axis in axes)]
    return [(outputs, inputs + [None] * (len(args) - len(specs))) for outputs, inputs in strategies]


def _strategy(op: Op, given: Container[str], names: Container[str], axis: Axis | None) -> Strategy:
    """The placements of all tensors if ``axis`` is split. ``given``: the inputs that are not None; ``names``: the
    results that are wanted."""
    inputs = [_placement(slot, axis) if slot in given else None for slot in op.inputs]
    return [_placement(slot, axis) if slot in names else None for slot in op.results], inputs


def _placement(slot: str, axis: Axis | None) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if axis is None:
        return Replicate()
    if slot in axis.positions:
        return Shard(axis.positions[slot])
    return Partial() if slot in axis.partial | axis.added else Replicate()


# --------------------------------------------------------------------------------------------------------------- parts


class _Part(Mathematics):
    """``aotops.formula.PartMathematics`` of torch. ``axes``: by axis of the mesh, the axis of the call that is split
    over it, or None."""

    log = torch.log

    def __init__(self, mesh: Any, axes: Sequence[Axis | None], run: Callable[..., Any]) -> None:
        super().__init__(None)
        self._mesh, self._axes, self.run = mesh, axes, run

    def _over(self, name: str) -> list[int]:
        return [i for i, axis in enumerate(self._axes) if axis is not None and axis.name == name]

    @staticmethod
    def max(x: Tensor) -> Tensor:
        return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)

    def is_split(self, axis: str) -> bool:
        return bool(self._over(axis))

    def length(self, axis: str) -> Any:
        return next(each.size for each in self._axes if each is not None and each.name == axis)

    def offset(self, axis: str, length: Any) -> Any:
        """Parts are those of torch.chunk. DTensor computes this with tensors, of which torch.compile does not have the
        values."""
        offset, size, coordinates = 0, self.length(axis), self._mesh.get_coordinate()
        for i in self._over(axis):
            each = -(-size // self._mesh.size(i))
            begin = min(each * coordinates[i], size)
            offset, size = offset + begin, min(each, size - begin)
        return offset

    def reduce(self, x: Tensor, how: str, axis: str) -> Tensor:
        for i in self._over(axis):
            x = private.all_reduce(x, how, (self._mesh, i))
        return x

    @staticmethod
    def is_known(x: Tensor) -> bool:
        return x.device.type == "cpu" and not torch.compiler.is_compiling() and type(x) is Tensor and not x.is_meta


def _of_parts(op: Op, forward: Op, overload: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """The results of a call whose axes may be split as the largest tensor is, of those that are split."""
    from torch.distributed.tensor import DTensor, Shard

    tensors, attrs, _ = splitter(op)(args)
    inputs, rest = dict(zip(op.inputs, tensors, strict=True)), args[len(tensors) + len(attrs) :]
    _check_distributed(op, inputs)
    wholes = results_of(_on_meta(overload, *args))
    stated = sharding(op, attrs, [None if t is None else tuple(t.shape) for t in inputs.values()], composed=True)
    assert stated is not None
    replaced = {} if op is forward else forward.replaced(attrs)
    replaced = {slot: other for slot, other in replaced.items() if inputs[other] is not None}

    def size(slot: str) -> tuple[bool, int]:
        return any(type(p) is Shard for p in inputs[slot].placements), inputs[slot].numel()

    lead = max((slot for slot in inputs if inputs[slot] is not None and slot not in replaced), key=size)
    mesh, placements = inputs[lead].device_mesh, inputs[lead].placements
    axes = [stated.axis(lead, p.dim % inputs[lead].dim()) if type(p) is Shard else None for p in placements]

    def local(slot: str) -> Tensor | None:
        t = inputs[slot]
        if t is None or slot in replaced:
            return None if t is None else local(replaced[slot])
        # below autograd, whose node would detach it
        return t.detach().redistribute(mesh, [_placement(slot, axis) for axis in axes]).to_local()

    with torch.no_grad():
        parts = {slot: local(slot) for slot in op.inputs}

        def run(**named: Any) -> Any:
            given = dict(zip(op.attrs, attrs, strict=True)) | parts | named
            return overload(*(given[name] for name in (*op.inputs, *op.attrs)), *rest)

        if any(axis is not None and axis.composed for axis in axes):
            results = tuple(compose_part(_Part(mesh, axes, run), op, attrs, list(parts.values())))
        else:
            results = results_of(run())
        found = [
            part if part is None else DTensor.from_local(
                part.to(whole.dtype).contiguous(), mesh, [_placement(y, axis) for axis in axes],
                run_check=False, shape=whole.shape, stride=whole.stride(),
            )
            for y, part, whole in zip(op.results, results, wholes, strict=True)
        ]  # fmt: skip
    return found[0] if len(found) == 1 else tuple(found)


def _check_distributed(op: Op, inputs: Mapping[str, Any]) -> None:
    from torch.distributed.tensor import DTensor

    for slot, t in inputs.items():
        if t is not None and not isinstance(t, DTensor):
            raise TypeError(
                f"{op.name}: {slot} is a torch.Tensor, expected a DTensor, as others are: DTensor.from_local(...) and "
                f"distribute_tensor(...) make one"
            )


def _on_meta(overload: Any, *args: Any) -> Any:
    """The specs of the whole results. Raises for arguments that the operator does not accept."""
    whole = (torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a for a in args)
    return overload(*whole)
