"""The operators on DTensors, in four processes: ``python sharded.py RESULTS`` runs every check in each of them, and
writes the errors, by check. tests/torch/test_sharding.py reads them.

A result, or a gradient, of a sharded call is that of the same call on whole tensors.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sharded_cases import SHARED, head, linear, norm, qkv, rope
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from aotops.frontends import torch as ours
from aotops.ops import OPS
from aotops.sharding import Axis, sharding
from aotops.testing import Case

WORLD = 4
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


# ----------------------------------------------------------------------------------------------------- every operator


def _conv2d(channels: int, bias: bool = False, layout: str = "NCHW", groups: int = 1, x: int = 4, **attrs: Any) -> Case:
    images, weight = (x, channels, 5, 6), (8, channels // groups, 3, 3)
    if layout == "NHWC":
        images, weight = (x, 5, 6, channels), (8, 3, 3, channels // groups)
    shapes: dict[str, Any] = {"x": images, "weight": weight, "bias": (8,) if bias else None}
    return Case(shapes, {"layout": layout, "groups": groups, **attrs})


def _cross_entropy(reduction: str, weight: bool = False, **attrs: Any) -> Case:
    shapes = {"x": (10, 7), "target": (10,), "weight": (7,) if weight else None}
    constants = ("weight",) if weight else ()
    return Case(shapes, {"reduction": reduction, **attrs}, classes={"target": 7}, constants=constants)


CASES: dict[str, list[Case]] = SHARED | {
    "add": [
        Case({"a": (8, 6), "b": (8, 6)}, {"alpha": -0.5}),
        Case({"a": (6, 8), "b": (8,)}),
        Case({"a": (8, 6)}, {"b": 2.0}),
    ],
    "rope": [
        rope((4, 6, 8, 4), (6, 2)),
        rope((4, 8, 6, 6), (9, 2), layout="BHSD", rotary_dim=4),
        rope((4, 6, 8, 4), (9, 2), (4, 6), interleaved=True),
        rope((4, 6, 8, 4), (4, 6, 4)),
    ],
    "qkv_rope": [
        qkv((4, 6, 16), (6, 2)),
        qkv((4, 6, 24), (9, 2), (4, 6), layout="BHSD", rotary_dim=4, grouped=True),
        qkv((4, 6, 16), None, layout="BHSD"),
    ],
    "qkv_attention": [
        Case({"qkv": (4, 6, 16), "lengths": None}, {"heads": 2, "kv_heads": 1, "causal": True}),
        Case({"qkv": (2, 4, 6, 18), "lengths": (4,)}, {"heads": 3}, classes={"lengths": 7}),
    ],
    "softmax": [Case({"x": (8, 6)}), Case({"x": (4, 6, 5)}, {"dim": 1})],
    "layer_norm": [
        norm((4, 8, 6), 1, "weight", "bias"),
        norm((8, 2, 3), 2, "weight"),
        norm((8, 2, 3), 2, "bias"),
        norm((6, 4), 1),
    ],
    "rms_norm": [norm((4, 8, 6), 1, "weight", "bias"), norm((6, 4), 1, "weight"), norm((6, 4), 1, eps=0.1)],
    "add_layer_norm": [norm((4, 8, 6), 1, "weight", "bias", rows=("x", "residual"))],
    "add_rms_norm": [
        norm((4, 8, 6), 1, "weight", rows=("x", "residual")),
        norm((6, 4), 1, "weight", "bias", rows=("x", "residual")),
    ],
    "linear": [
        linear((4, 6, 8), 12),
        linear((8, 6), 12, True),
        linear((8, 6), 12, True, activation="relu"),
        linear((8, 6), 12, activation="gelu"),
    ],
    "matmul": [
        Case({"a": (8, 6), "b": (6, 10)}),
        Case({"a": (2, 4, 8, 6), "b": (4, 5, 6)}, {"transpose_b": True}),
        Case({"a": (4, 1, 8, 6), "b": (5, 8, 4)}, {"transpose_a": True}),
    ],
    "conv2d": [
        _conv2d(8),
        _conv2d(8, True, padding=1),
        _conv2d(4, True, groups=4, stride=2),
        _conv2d(8, True, "NHWC"),
    ],
    "cross_entropy": [
        _cross_entropy("mean"),
        _cross_entropy("mean", label_smoothing=0.2, ignore_index=3),
        _cross_entropy("sum", ignore_index=3),
        _cross_entropy("none", label_smoothing=0.2),
        _cross_entropy("mean", True, label_smoothing=0.2, ignore_index=3, z_loss=0.1, softcap=2.0),
        _cross_entropy("none", True, z_loss=0.1),
        Case({"x": (7,), "target": ()}, classes={"target": 7}),
    ],
    "linear_cross_entropy": [
        head((4, 6, 8), 12, "mean", True, label_smoothing=0.2, ignore_index=3),
        head((4, 6, 8), 12, "mean", weights=True, softcap=2.0),
        head((8, 6), 12, "sum", True, z_loss=0.1),
        head((8, 6), 12, "none"),
    ],
    "linear_cross_entropy_lse": [
        head((4, 6, 8), 12, "mean", True, ignore_index=3, softcap=2.0),
        head((8, 6), 12, "sum", True, z_loss=0.1),
        head((8, 6), 12, "none"),
    ],
    "cross_entropy_lse": [
        _cross_entropy("mean", ignore_index=3),
        _cross_entropy("mean", True, softcap=2.0),
        _cross_entropy("sum", z_loss=0.1),
    ],
}
Layout = Mapping[str, Sequence[Any]]
"""The placements of inputs over the axes of a mesh; Replicate of others."""


def tensors_of(name: str, case: Case) -> dict[str, Tensor]:
    """The inputs of a call that are given, in float64."""
    arrays = case.random(np.random.default_rng(7))
    return {slot: torch.tensor(array) for slot, array in arrays.items() if array is not None}


def place(t: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> Any:
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    if any(isinstance(p, Partial) for p in placements):
        parts = WORLD if mesh.ndim == 1 else 2
        replicas = [Replicate() if isinstance(p, Partial) else p for p in placements]
        return DTensor.from_local(distribute_tensor(t / parts, mesh, replicas).to_local(), mesh, placements)
    return distribute_tensor(t, mesh, placements, src_data_rank=None)


def assert_same(got: Any, whole: Tensor, where: str, close: float = 1e-11) -> None:
    torch.testing.assert_close(got.full_tensor(), whole, rtol=close, atol=close, msg=lambda text: f"{where}: {text}")


class Call:
    """A case, on whole tensors and on sharded ones."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.case, self.op = name, case, OPS[name]
        self.tensors = tensors_of(name, case)
        named = {slot: self.tensors.get(slot) for slot in case.shapes}
        inputs, attrs = self.op.bind(**named, **case.attrs)
        shapes = torch.broadcast_shapes(*case.given.values()) if self.op.broadcast else None
        found = sharding(
            self.op, self.op.canonical(attrs), [shapes or t.shape if isinstance(t, Tensor) else None for t in inputs]
        )
        assert found is not None
        self.axes = found.axes
        self.results, self.gradients = self.run(self.tensors, None)

    def run(self, tensors: Mapping[str, Any], mesh: DeviceMesh | None) -> tuple[list[Any], dict[str, Any]]:
        leaves = self.leaves(tensors)
        results = self.forward(leaves)
        return results, self.backward(leaves, results, mesh)

    def leaves(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        fixed = self.op.constants
        given = self.op.has_gradient
        return {
            s: t.detach().requires_grad_(given and t.is_floating_point() and s not in fixed) for s, t in tensors.items()
        }

    def forward(self, leaves: Mapping[str, Any]) -> list[Any]:
        absent = {slot: None for slot in self.case.shapes if slot not in leaves}
        y = getattr(ours, self.name)(**leaves, **absent, **self.case.attrs)
        return list(y) if isinstance(y, tuple) else [y]

    def backward(self, leaves: Mapping[str, Any], results: list[Any], mesh: DeviceMesh | None) -> dict[str, Any]:
        wanted = {slot: t for slot, t in leaves.items() if t.requires_grad}
        results = [y for y in results if y.requires_grad]
        if not results:
            return {}
        found = torch.autograd.grad(results, list(wanted.values()), [self.dy(y, mesh) for y in results])
        return dict(zip(wanted, found, strict=True))

    @staticmethod
    def dy(y: Any, mesh: DeviceMesh | None) -> Any:
        from torch.distributed.tensor import Partial, Replicate

        whole = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))
        if mesh is None:
            return whole
        return place(whole, mesh, [Replicate() if isinstance(p, Partial) else p for p in y.placements])

    def sharded(self, mesh: DeviceMesh, layout: Layout) -> dict[str, Any]:
        from torch.distributed.tensor import Replicate

        whole = [Replicate()] * mesh.ndim
        return {slot: place(t, mesh, layout.get(slot, whole)) for slot, t in self.tensors.items()}

    def compare(self, mesh: DeviceMesh, layout: Layout) -> None:
        results, gradients = self.run(self.sharded(mesh, layout), mesh)
        self.assert_same(results, gradients, layout)

    def assert_same(self, results: list[Any], gradients: Mapping[str, Any], layout: Layout) -> None:
        where = f"{self.name} {self.case} of {dict(layout)}"
        pairs = [(f"y{i}", y, whole) for i, (y, whole) in enumerate(zip(results, self.results, strict=True))]
        pairs += [(f"d{slot}", dx, self.gradients[slot]) for slot, dx in gradients.items()]
        for what, got, whole in pairs:
            assert_same(got, whole, f"{where}: {what}")

    def layout(self, *axes: Axis) -> Layout:
        """Each of these axes of the call over an axis of the mesh."""
        from torch.distributed.tensor import Replicate, Shard

        def placement(slot: str, axis: Axis):
            at = axis.positions.get(slot)
            if at is None:
                return Replicate()
            at -= (
                max(len(t.shape) for t in self.tensors.values()) - self.tensors[slot].dim() if self.op.broadcast else 0
            )
            return Shard(at) if at >= 0 else Replicate()

        return {slot: [placement(slot, axis) for axis in axes] for slot in self.tensors}


COMMUNICATES = {"cross_entropy", "cross_entropy_lse"}
"""Their rules reduce over the mesh."""


def without_communication(call: Call, mesh: DeviceMesh, layout: Layout) -> None:
    """The forward and the backward, of tensors that are split as the operator states, communicate nothing."""
    from torch.distributed.tensor.debug import CommDebugMode

    leaves = call.leaves(call.sharded(mesh, layout))
    with CommDebugMode() as forward:
        results = call.forward(leaves)
    recorded = [y for y in results if y.requires_grad]
    dys = [call.dy(y, mesh) for y in recorded]
    wanted = {slot: t for slot, t in leaves.items() if t.requires_grad}
    with CommDebugMode() as backward:
        gradients = torch.autograd.grad(recorded, list(wanted.values()), dys) if recorded else ()
    for mode in (forward, backward):
        assert not mode.get_total_counts(), f"{call.name} {call.case} of {layout}: {dict(mode.get_comm_counts())}"
    call.assert_same(results, dict(zip(wanted, gradients, strict=True)), layout)


def _operator_check(name: str) -> Callable[[], None]:
    def run() -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard

        mesh = init_device_mesh("cpu", (WORLD,))
        for case in CASES[name]:
            call = Call(name, case)
            call.compare(mesh, {})
            for axis in call.axes:  # as it is stated
                if axis.size >= WORLD:
                    without_communication(call, mesh, call.layout(axis))
            for slot, t in call.tensors.items():  # one input alone, which is redistributed or not
                for dim in range(t.dim()):
                    call.compare(mesh, {slot: [Shard(dim)]})
                if t.is_floating_point():
                    call.compare(mesh, {slot: [Partial()]})
        grid = init_device_mesh("cpu", (2, 2))
        call = Call(name, CASES[name][0])
        for first, second in itertools.combinations_with_replacement(call.axes, 2):
            if min(first.size, second.size) >= WORLD:
                without_communication(call, grid, call.layout(first, second))
        call.compare(
            grid, {slot: [Replicate(), Partial()] for slot, t in call.tensors.items() if t.is_floating_point()}
        )

    return run


CHECKS |= {name: _operator_check(name) for name in CASES}


# --------------------------------------------------------------------------------------------------- rules of their own


def _cross_entropy_layouts() -> Iterator[tuple[int, list[Any], list[Any]]]:
    """The axes of the mesh, and the placements of x and of the target."""
    from torch.distributed.tensor import Replicate, Shard

    rows, classes, whole = Shard(0), Shard(1), Replicate()
    yield from ((1, [x], [t]) for x in (rows, classes, whole) for t in (rows, whole))
    for x in itertools.product((rows, classes, whole), repeat=2):
        yield 2, list(x), [whole, whole]
    yield 2, [rows, classes], [rows, whole]


@check
def cross_entropy_of_split_rows_and_classes() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    meshes = {1: init_device_mesh("cpu", (WORLD,)), 2: init_device_mesh("cpu", (2, 2))}
    for case in CASES["cross_entropy"][:-1]:
        call = Call("cross_entropy", case)
        for ndim, x, target in _cross_entropy_layouts():
            with CommDebugMode() as mode:
                call.compare(meshes[ndim], {"x": x, "target": target})
            gathers = [str(op) for op in mode.get_comm_counts() if "all_to_all" in str(op)]
            assert not gathers, gathers


@check
def cross_entropy_communicates_sums_alone() -> None:
    """No logits: one reduction of numerator and count; of split classes, the maximum and the sums, again in the
    backward of "none", which keeps no slope."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (WORLD,))
    x, target = torch.randn(8, 12), torch.randint(0, 12, (8,), generator=torch.Generator().manual_seed(0))
    for placement, reduction, dtype, forward, backward in (
        (Shard(0), "mean", "float32", 1, 0), (Shard(0), "mean", "float16", 1, 1),
        (Shard(0), "sum", "float32", 0, 0), (Shard(0), "none", "float32", 0, 0),
        (Shard(1), "mean", "float32", 2, 0), (Shard(1), "sum", "float32", 2, 0), (Shard(1), "none", "float32", 2, 2),
    ):  # fmt: skip
        leaf = distribute_tensor(x.to(getattr(torch, dtype)), mesh, [placement]).requires_grad_()
        rows = placement if placement == Shard(0) else Replicate()
        labels = distribute_tensor(target, mesh, [rows])
        with CommDebugMode() as mode:
            loss = ours.cross_entropy(leaf, labels, reduction=reduction)
        assert mode.get_total_counts() == forward, (placement, reduction, mode.get_comm_counts())
        dy = Call.dy(loss, mesh)
        with CommDebugMode() as mode:
            (dx,) = torch.autograd.grad(loss, leaf, dy)
        assert mode.get_total_counts() == backward, (placement, reduction, mode.get_comm_counts())
        assert dx.placements == (placement,)


@check
def cross_entropy_of_extreme_rows() -> None:
    """Rows that are all ignored, in one part or in all; 16 bits, whose sums overflow; classes of -inf."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    x = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    masked = x.clone()
    masked[:, 3:6] = -torch.inf  # the second part of the classes
    labels = torch.tensor([1, 2, 7, 0, 11, 9, 1, 2])
    first, every = labels.clone(), torch.full_like(labels, -100)
    first[:2] = -100
    large = (x * 100 + 20000).to(torch.float16)
    for logits, target in ((x, first), (x, every), (masked, labels), (large, labels)):
        for placement in (Shard(0), Shard(1)):
            rows = [Shard(0) if placement == Shard(0) else Replicate()]
            leaf = place(logits, mesh, [placement]).requires_grad_()
            whole = logits.clone().requires_grad_()
            found = ours.cross_entropy(leaf, place(target, mesh, rows))
            expected = ours.cross_entropy(whole, target)
            found.backward()
            expected.backward()
            close = {"equal_nan": True, "rtol": 2e-3, "atol": 2e-3} if logits is large else {"equal_nan": True}
            torch.testing.assert_close(found.full_tensor(), expected, **close)
            torch.testing.assert_close(leaf.grad.full_tensor(), whole.grad, **close)


@check
def a_class_that_there_is_not_is_refused() -> None:
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for odd in (12, -1):
        target = place(torch.tensor([0, odd]), mesh, [Replicate()])
        raises(ValueError, f"{odd}", ours.cross_entropy, place(torch.randn(2, 12), mesh, [Shard(1)]), target)


def raises(error: type[Exception], text: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=re.escape(text)):
        function(*args, **kwargs)


@check
def second_order_is_that_of_whole_tensors() -> None:
    """The gradient of a gradient, which frontends compose."""
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for name, cases in CASES.items():
        if not OPS[name].has_gradient:
            continue
        for case in cases[:2]:
            call = Call(name, case)
            layouts = [call.layout(axis) for axis in call.axes if axis.size >= WORLD][:1]
            if name in COMMUNICATES:
                layouts = [{"x": [Shard(0)], "target": [Shard(0)]}, {"x": [Shard(1)]}]
            expected = _second_order(call, call.tensors)
            for layout in layouts:
                for slot, gradient in _second_order(call, call.sharded(mesh, layout)).items():
                    assert_same(gradient, expected[slot], f"{name} {case} of {layout}: {slot}", 1e-9)


def _second_order(call: Call, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The gradient of the sum of squares of the gradients of the sum of squares of the results."""
    leaves = call.leaves(tensors)
    wanted = {slot: t for slot, t in leaves.items() if t.requires_grad}
    first = torch.autograd.grad(_squares(call.forward(leaves)), list(wanted.values()), create_graph=True)
    second = torch.autograd.grad(_squares(first), list(wanted.values()))
    return dict(zip(wanted, second, strict=True))


def _squares(values: Iterable[Any]) -> Any:
    return sum(value.square().sum() for value in values if value.requires_grad)


@check
def gradients_of_some_inputs() -> None:
    """The others, the first too, are not computed, and have no placement."""
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for name, case in (("linear", linear((8, 12), 4, True)), ("conv2d", _conv2d(8, True, padding=1))):
        call = Call(name, case)
        for constants in (["x"], ["weight"], ["x", "weight"], ["x", "bias"]):
            leaves = call.sharded(mesh, {"x": [Shard(0)]})
            leaves = {slot: t.detach().requires_grad_(slot not in constants) for slot, t in leaves.items()}
            for slot, gradient in call.backward(leaves, call.forward(leaves), mesh).items():
                assert_same(gradient, call.gradients[slot], f"{name} without {constants}: {slot}")


@check
def row_parallel_linear_gathers_nothing() -> None:
    """With a bias, which is added once."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (WORLD,))
    for name, case, dim in (("linear", linear((8, 12), 5, True), 1), ("conv2d", _conv2d(8, True, padding=1), 1)):
        call = Call(name, case)
        layout = {"x": [Shard(dim)], "weight": [Shard(dim)], "bias": [Replicate()]}
        with CommDebugMode() as mode:
            (y,) = call.forward(call.sharded(mesh, layout))
        assert y.placements == (Partial(),)
        assert not mode.get_total_counts(), mode.get_comm_counts()
        without_communication(call, mesh, layout)


@check
def attributes_and_absent_inputs_decide() -> None:
    """Calls whose tensors are alike are not confused: DTensor keeps the strategy of a call."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    layout = {"x": [Shard(1)], "weight": [Shard(1)]}
    calls = [Call("linear", linear((8, 12), 8, activation=activation)) for activation in (None, "relu", "silu", None)]
    placements = [call.forward(call.sharded(mesh, layout))[0].placements for call in calls]
    assert placements[0] == placements[3] == (Partial(),)
    assert placements[1] == placements[2] != (Partial(),)
    for call in calls:
        call.compare(mesh, layout)
    for dim in (0, 1, 2, 0):
        case = Case({"x": (4, 4, 4)}, {"dim": dim})
        Call("softmax", case).compare(mesh, {"x": [Shard(dim)]})
        Call("softmax", case).compare(mesh, {"x": [Shard(1)]})
    for parameters in (("weight",), ("bias",), ("weight", "bias"), ()):
        call = Call("layer_norm", norm((8, 4), 1, *parameters))
        call.compare(mesh, {"x": [Shard(0)], "weight": [Replicate()], "bias": [Replicate()]})


@check
def a_plain_tensor_beside_dtensors_is_refused() -> None:
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    x = place(torch.randn(8, 6), mesh, [Shard(0)])
    raises(TypeError, "cross_entropy: target is a torch.Tensor", ours.cross_entropy, x, torch.zeros(8, dtype=int))
    raises(RuntimeError, "got mixed torch.Tensor and DTensor", ours.linear, x, torch.randn(3, 6))


@check
def an_error_names_the_operator() -> None:
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    x, weight = place(torch.randn(8, 6), mesh, [Shard(0)]), place(torch.randn(3, 5), mesh, [Shard(0)])
    raises(Exception, "linear: weight has shape (3, 5)", ours.linear, x, weight)
    raises(Exception, "cross_entropy: reduction is 'most'", ours.cross_entropy, x, place(
        torch.zeros(8, dtype=int), mesh, [Shard(0)]), reduction="most")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- modules


class Block(nn.Module):
    """The feed-forward part of a transformer, with either norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up = ours.LayerNorm(width), ours.Linear(width, 4 * width, activation="gelu")
        self.down, self.last = ours.Linear(4 * width, width), ours.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), ours.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


def model() -> Model:
    torch.manual_seed(5)
    return Model().double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(WORLD, 4, 8, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 12, (WORLD, 4), generator=generator)


def loss_of(logits: Any, target: Any) -> Any:
    return ours.cross_entropy(logits.flatten(0, 1), target.flatten())


def gradients_of_one_process() -> tuple[Tensor, dict[str, Tensor]]:
    one = model()
    x, target = batch()
    loss = loss_of(one(x), target)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in one.named_parameters()}


def assert_gradients(parallel: nn.Module, expected: Mapping[str, Tensor], prefix: str = "") -> None:
    from torch.distributed.tensor import DTensor

    for name, parameter in parallel.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(whole, expected[name.removeprefix(prefix)], msg=lambda text, n=name: f"{n}: {text}")


def in_parallel() -> nn.Module:
    """Tensor and sequence parallel, and the classes of the loss split."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )  # fmt: skip

    mesh = init_device_mesh("cpu", (WORLD,))
    plan = {
        "block": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
        "block.norm": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=Shard(1)),
        "block.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "block.last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model(), mesh, plan)


def _tensor_parallel(compiled: bool) -> None:
    from torch.distributed.tensor import Replicate

    expected, gradients = gradients_of_one_process()
    parallel = in_parallel()
    mesh = next(parallel.parameters()).device_mesh
    x, target = batch()
    step = lambda x, target: loss_of(parallel(x), target)  # noqa: E731
    run = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    loss = run(x, place(target, mesh, [Replicate()]))
    loss.backward()
    assert_same(loss, expected, "loss")
    assert_gradients(parallel, gradients)


@check
def tensor_parallel_plans_train_the_same() -> None:
    _tensor_parallel(compiled=False)


@check
def a_compiled_plan_trains_the_same() -> None:
    _tensor_parallel(compiled=True)


@check
def fsdp_and_ddp_train_the_same() -> None:
    from torch.distributed.fsdp import fully_shard

    expected, gradients = gradients_of_one_process()
    x, target = (t[dist.get_rank() : dist.get_rank() + 1] for t in batch())
    fully = model()
    fully_shard(fully.block)
    fully_shard(fully)
    for parallel in (fully, nn.parallel.DistributedDataParallel(model())):
        loss = loss_of(parallel(x), target)
        loss.backward()
        total = loss.detach() / WORLD
        dist.all_reduce(total)
        torch.testing.assert_close(total, expected)
        assert_gradients(parallel, gradients, "module.")


# --------------------------------------------------------------------------------------------------------- processes


def in_one_process(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=300)
    )
    found: dict[str, str] = {}
    for name, function in CHECKS.items():
        error = ""
        try:
            function()
        except Exception:  # of any kind: it is reported
            error = traceback.format_exc()
        errors: list[Any] = [None] * WORLD
        dist.all_gather_object(errors, error)
        found[name] = next(filter(None, errors), "")
        if rank == 0:
            with open(results, "w") as file:
                json.dump(found, file)
    dist.destroy_process_group()


def main(results: str, *names: str) -> int:
    """Imports once, and forks."""
    import torch.distributed.tensor.parallel  # noqa: F401

    for name in set(CHECKS) - set(names or CHECKS):
        del CHECKS[name]
    store = tempfile.mktemp()
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                in_one_process(rank, store, results)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
