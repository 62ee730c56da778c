"""Sharding strategies of the operators for DTensor: a part of the torch frontend.

They follow from ``Op.dims``: an axis that may be split is ``Shard`` in each tensor that has it. Outputs that are sums
over it are ``Partial``, and so are inputs that are added to such a sum once. Everything else is ``Replicate``. DTensor
redistributes inputs that have other placements, as it does for torch's own operators. An operator that states nothing
is computed on replicated tensors.

A rule of its own:

- ``cross_entropy`` of split rows reduced to their mean, and of split classes, is composed of local results and
  reductions over the mesh.

The strategies are registered once torch.distributed.tensor has been imported, which this frontend does not import.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aotops.op import Op
from aotops.ops import OPS
from aotops.ops.cross_entropy import divides_slope, keeps_slope
from aotops.sharding import Axis, sharding

from .imports import after_import
from .torch_mathematics import wide_dtype
from .torch_schema import maskable, wanted

_CROSS_ENTROPY = OPS["cross_entropy"]


def register(operators: Iterable[tuple[Op, Any]]) -> None:
    """Registers the strategies of operators, each with its ``OpOverload``: now, or once DTensor is imported."""
    pairs = tuple((op, overload) for op, overload in operators if not op.mutates)
    after_import("torch.distributed.tensor", partial(_register, pairs))


def _register(operators: Sequence[tuple[Op, Any]]) -> None:
    try:
        _register_with_dtensor(operators)
    except Exception as error:  # DTensor must work: without the strategies it refuses what it does not know
        warnings.warn(f"aotops: DTensor of torch {torch.__version__} took no strategies: {error!r}", stacklevel=2)


def _register_with_dtensor(operators: Sequence[tuple[Op, Any]]) -> None:
    try:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # before torch 2.5
        return
    dispatcher = DTensor._op_dispatcher
    for op, overload in operators:
        register_sharding(overload)(partial(_strategies, op))
        # Every argument decides on the strategy. By itself register_sharding would have DTensor look up a kept one by
        # tensors, and by attributes from the first integer on.
        lists = any(kind.endswith("[]") for kind in op.attrs.values()) or bool(maskable(op))
        dispatcher.sharding_propagator.op_to_schema_info[overload] = RuntimeSchemaInfo(0, needs_pytree=lists)
        if op in _COMPOSED:
            dispatcher._custom_op_handlers[overload] = _COMPOSED[op]


# ---------------------------------------------------------------------------------------------------------- strategies

Placements = list[Any]
Strategy = tuple[Placements, Placements]
"""The placements of results and of arguments over one axis of the mesh; None of an argument that is not a tensor."""


def _strategies(op: Op, *args: Any) -> list[Strategy]:
    """Each way to split a call, whose tensors are specs."""
    n, end = len(op.inputs), len(op.inputs) + len(op.attrs)
    attrs = tuple(tuple(a) if isinstance(a, list) else a for a in args[n:end])
    names, others = wanted(op, args[end:]), len(args) - n
    shapes = [None if spec is None else tuple(spec.shape) for spec in args[:n]]
    found = sharding(op, attrs, shapes)
    axes = found.axes if found else ()
    given = {slot for slot, shape in zip(op.inputs, shapes, strict=True) if shape is not None}
    strategies = [_strategy(op, given, names, None), *(_strategy(op, given, names, axis) for axis in axes)]
    return [(outputs, inputs + [None] * others) for outputs, inputs in strategies]


def _strategy(op: Op, given: Container[str], names: Container[str], axis: Axis | None) -> Strategy:
    """The placements of all tensors if ``axis`` is split. ``given``: the inputs that are not None; ``names``: the
    results that are wanted."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def placement(slot: str):
        if axis is None:
            return Replicate()
        if slot in axis.positions:
            return Shard(axis.positions[slot])
        return Partial() if slot in axis.partial | axis.added else Replicate()

    inputs = [placement(slot) if slot in given else None for slot in op.inputs]
    return [placement(slot) if slot in names else None for slot in op.results], inputs


# ------------------------------------------------------------------------------------------------------- cross_entropy


class _Split(NamedTuple):
    """How the rows and classes of x are split over the mesh."""

    mesh: Any
    placements: tuple[Any, ...]
    rows: tuple[int, ...]
    """The axes of the mesh over which rows are split."""
    classes: tuple[int, ...]
    offset: int
    """The first class of this part."""

    @classmethod
    def of(cls, x: Any) -> _Split:
        """Of a tensor whose placements other than splits are replaced by replicas."""
        from torch.distributed.tensor import Replicate, Shard

        placements = tuple(p if type(p) is Shard else Replicate() for p in x.placements)
        last = x.dim() - 1
        dims = [p.dim % x.dim() if isinstance(p, Shard) else None for p in placements]
        classes = tuple(i for i, dim in enumerate(dims) if dim == last)
        rows = tuple(i for i, dim in enumerate(dims) if dim is not None and dim != last)
        return cls(x.device_mesh, placements, rows, classes, _offset(x.shape[last], x.device_mesh, classes))

    def of_rows(self, split: Any) -> tuple[Any, ...]:
        """The placements of one number for each row, or of their sum: ``split`` where rows are."""
        from torch.distributed.tensor import Replicate

        return tuple(split if i in self.rows else Replicate() for i in range(self.mesh.ndim))

    def local(self, t: Any, placements: Sequence[Any]) -> Tensor:
        """This part of a DTensor, redistributed if it has other placements."""
        return t.detach().redistribute(self.mesh, placements).to_local()  # below autograd, whose node would detach it

    def whole(self, part: Tensor, placements: Sequence[Any], like: Tensor) -> Any:
        """The DTensor of the shape of ``like``, a meta tensor, that has this part here."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part.contiguous(), self.mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def reduced(self, part: Tensor, how: str, dims: Sequence[int]) -> Tensor:
        from torch.distributed._functional_collectives import all_reduce

        for dim in dims:
            part = all_reduce(part, how, (self.mesh, dim))
        return part


def _offset(size: Any, mesh: Any, dims: Sequence[int]) -> Any:
    """Where this part of an axis begins that is split over these axes of the mesh: in parts as of torch.chunk. DTensor
    computes it with tensors, which torch.compile does not have the values of."""
    offset, coordinates = 0, mesh.get_coordinate()
    for dim in dims:
        each = -(-size // mesh.size(dim))
        begin = min(each * coordinates[dim], size)
        offset, size = offset + begin, min(each, size - begin)
    return offset


def _check_distributed(op: Op, inputs: Sequence[Any]) -> None:
    from torch.distributed.tensor import DTensor

    for slot, t in zip(op.inputs, inputs, strict=True):
        if t is not None and not isinstance(t, DTensor):
            raise TypeError(
                f"{op.name}: {slot} is a torch.Tensor, expected a DTensor, as others are: DTensor.from_local(...) and "
                f"distribute_tensor(...) make one"
            )


def _on_meta(overload: Any, *args: Any) -> Any:
    """The specs of the whole results. Raises for arguments that the operator does not accept."""
    whole = (torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a for a in args)
    return overload(*whole)


def _cross_entropy(overload: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, Any]:
    """The loss and the slope, whose placements are x's."""
    from torch.distributed.tensor import Partial, Shard

    x, target, ignore_index, reduction, smoothing, dtype = args
    _check_distributed(_CROSS_ENTROPY, (x, target))
    y, slope = _on_meta(overload, *args)
    with torch.no_grad():
        split = _Split.of(x)
        one, classes = split.local(x, split.placements), split.local(target, split.of_rows(Shard(0)))
        attrs = ignore_index, reduction, smoothing, dtype
        if not split.classes and (reduction != "mean" or not split.rows):
            loss, part = overload(one, classes, *attrs)
            placements = split.of_rows(Shard(0) if reduction == "none" else Partial())
            return split.whole(loss, placements, y), split.whole(part, split.placements, slope)
        if split.classes:
            losses, part = _over_classes(split, overload, one, classes, attrs, x.shape[-1])
            part = part if keeps_slope(reduction) else part[..., :0]
        else:
            losses, part = overload(one, classes, ignore_index, "sum", smoothing, _name(wide_dtype(x.dtype)))
        placements = split.of_rows(Shard(0))
        if reduction != "none":
            losses, placements, count = _total(split, losses, classes, ignore_index, reduction)
        if divides_slope(reduction, _name(x.dtype)):
            part = torch.where((classes != ignore_index)[..., None], part / count, 0)  # the count may be 0
        return split.whole(losses.to(y.dtype), placements, y), split.whole(part.to(x.dtype), split.placements, slope)


def _total(split: _Split, losses: Tensor, target: Tensor, ignore_index: int, reduction: str):
    """The sum, or the mean over the rows not ignored, of the losses of all parts; its placements; and the count of
    these rows, or None."""
    from torch.distributed.tensor import Partial, Replicate

    total = losses.sum(dtype=wide_dtype(losses.dtype))
    if reduction == "sum":
        return total, split.of_rows(Partial()), None
    count = (target != ignore_index).sum(dtype=total.dtype)
    total, count = split.reduced(torch.stack([total, count]), "sum", split.rows).unbind()
    return total / count, split.of_rows(Replicate()), count


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _over_classes(split: _Split, overload: Any, x: Tensor, target: Tensor, attrs: Sequence[Any], classes: int):
    """The losses of the rows, and this part of their slope, undivided and in the dtype of sums, of a part of the
    classes. Two reductions: of the largest elements, and of the sums."""
    ignore_index, _, smoothing, _ = attrs
    counted = target != ignore_index
    odd = counted & ((target < 0) | (target >= classes))
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and _has_memory(odd) and odd.any():
        overload(x.new_zeros(1, classes), target[odd][:1].contiguous(), *attrs)  # raises
    wide = x.to(wide_dtype(x.dtype))
    top = wide.amax(-1) if x.shape[-1] else wide.new_full(target.shape, -torch.inf)
    shifted = wide - split.reduced(top, "max", split.classes)[..., None]
    exponentials = shifted.exp()
    here = torch.arange(split.offset, split.offset + x.shape[-1], device=x.device) == target[..., None]
    here = here & counted[..., None]
    parts = [exponentials.sum(-1), torch.where(here, shifted, 0).sum(-1)]
    parts += [shifted.sum(-1)] if smoothing else []
    total, hit, *every = split.reduced(torch.stack(parts), "sum", split.classes).unbind()
    losses = total.log() - (1 - smoothing) * hit - (smoothing / classes * every[0] if smoothing else 0)
    slope = exponentials / total[..., None] - smoothing / classes - (1 - smoothing) * here.to(wide.dtype)
    return _by_row(losses, counted, odd), _by_row(slope, counted[..., None], odd[..., None])


def _by_row(values: Tensor, counted: Tensor, odd: Tensor) -> Tensor:
    """0 for an ignored row, NaN for one of a class that there is not."""
    return torch.where(odd, torch.nan, torch.where(counted, values, 0))


def _has_memory(t: Tensor) -> bool:
    return type(t) is Tensor and not t.is_meta


def _cross_entropy_backward(overload: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """dx, whose placements are the slope's."""
    from torch.distributed.tensor import Replicate, Shard

    dy, x, target, slope, ignore_index, reduction, smoothing, dtype = args
    backward = _CROSS_ENTROPY.backward
    assert backward is not None
    _check_distributed(backward, (dy, x, target, slope))
    dx = _on_meta(overload, *args)
    with torch.no_grad():
        forward = torch.ops.aotops.cross_entropy.default
        if not keeps_slope(reduction):
            slope = x
        elif slope is None:
            _, slope = _cross_entropy(forward, (x, target, ignore_index, reduction, smoothing, dtype), {})
        split = _Split.of(slope)
        part, classes = split.local(slope, split.placements), split.local(target, split.of_rows(Shard(0)))
        given = split.local(dy, split.of_rows(Shard(0) if reduction == "none" else Replicate()))
        if not keeps_slope(reduction):
            if not split.classes:
                local = overload(given, part, classes, None, ignore_index, reduction, smoothing, dtype)
                return split.whole(local, split.placements, dx)
            attrs = ignore_index, reduction, smoothing, dtype
            _, part = _over_classes(split, forward, part, classes, attrs, x.shape[-1])
        divide = reduction == "mean" and not divides_slope(reduction, _name(x.dtype))
        if not split.classes and not (divide and split.rows):
            local = overload(given, part, classes, part, ignore_index, reduction, smoothing, dtype)
            return split.whole(local, split.placements, dx)
        counted = classes != ignore_index
        factor = given.to(wide_dtype(part.dtype))
        if divide:
            factor = factor / split.reduced(counted.sum(dtype=factor.dtype), "sum", split.rows)
        # 0 for an ignored row, also if dy is not finite or the count is 0
        scaled = part * torch.where(counted, factor, 0)[..., None]
        return split.whole(scaled.to(x.dtype), split.placements, dx)


_COMPOSED: dict[Op, Callable[..., Any]] = {_CROSS_ENTROPY: _cross_entropy}
if _CROSS_ENTROPY.backward is not None:
    _COMPOSED[_CROSS_ENTROPY.backward] = _cross_entropy_backward
