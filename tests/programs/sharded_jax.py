"""The operators on four CPU devices: ``python sharded_jax.py RESULTS`` runs every check and writes what went wrong.
tests/jax/test_sharding.py reads them.

A result, or a gradient, of a sharded call is that of the same call on one device, and what moves between devices is
what the compiled program says.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_cases import SHARED, head, linear, norm, qkv, rope

from aotops.frontends import jax as ours
from aotops.frontends.jax.public import function_of
from aotops.frontends.jax.sharding import _stated
from aotops.ops import OPS
from aotops.testing import Case

CHECKS: dict[str, Callable[[], None]] = {}
GATHERS = re.compile(r" (all-gather|all-to-all|collective-permute)(?:-start)?\(")


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def mesh_of(**axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))


def put(x: Any, mesh: Mesh, *spec: Any) -> Any:
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def compare(got: Any, expected: Any, what: str = "", rtol: float = 1e-11) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol, rtol, err_msg=what)


def run(function: Callable, sharded: Sequence[Any], rtol: float = 1e-11) -> str:
    """The program for these arguments, whose results are those of the same on one device."""
    jitted = jax.jit(function)
    compiled = jitted.lower(*sharded).compile()
    compare(compiled(*sharded), jitted(*jax.tree.map(np.asarray, sharded)), rtol=rtol)
    return compiled.as_text()


def reduced(program: str) -> list[tuple[int, ...]]:
    """The shapes of the arrays that are summed over devices, each once."""
    found = []
    for line in program.splitlines():
        if " all-reduce(" in line or " all-reduce-start(" in line:
            result = line.partition(" all-reduce")[0].partition(" = ")[2]
            found += [tuple(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\w+\[([\d,]*)\]", result)]
    return sorted(found)


# ----------------------------------------------------------------------------------------------------- every operator


def _conv2d(channels: int, groups: int = 1, **attrs: Any) -> Case:
    shapes = {"x": (4, channels, 5, 6), "weight": (8, channels // groups, 3, 3), "bias": (8,)}
    return Case(shapes, {"groups": groups, **attrs})


def _cross_entropy(reduction: str, weight: bool = False, **attrs: Any) -> Case:
    shapes = {"x": (12, 8), "target": (12,), "weight": (8,) if weight else None}
    constants = ("weight",) if weight else ()
    return Case(shapes, {"reduction": reduction, **attrs}, classes={"target": 8}, constants=constants)


CASES: dict[str, list[Case]] = SHARED | {
    "add": [Case({"a": (8, 6), "b": (8, 6)}, {"alpha": -0.5}), Case({"a": (8, 6), "b": (6,)})],
    "rope": [rope((4, 8, 8, 4), (8, 2)), rope((4, 8, 8, 4), (9, 2), (4, 8), layout="BHSD")],
    "qkv_rope": [qkv((4, 8, 16), (8, 2)), qkv((4, 8, 16), (9, 2), (4, 8), layout="BHSD"), qkv((4, 8, 16), None)],
    "qkv_attention": [
        Case({"qkv": (4, 8, 16), "lengths": None}, {"heads": 2, "kv_heads": 1, "causal": True}),
        Case({"qkv": (2, 4, 8, 24), "lengths": (4,)}, {"heads": 2}, classes={"lengths": 9}),
    ],
    "softmax": [Case({"x": (4, 6, 8)}, {"dim": 1})],
    "layer_norm": [norm((4, 8, 6), 1, "weight", "bias"), norm((8, 2, 3), 2, "bias")],
    "rms_norm": [norm((8, 6), 1, "weight", "bias"), norm((8, 4), 1, eps=0.1)],
    "add_layer_norm": [norm((4, 6), 1, "weight", "bias", rows=("x", "residual"))],
    "add_rms_norm": [norm((4, 6), 1, "weight", "bias", rows=("x", "residual"))],
    "linear": [linear((4, 6, 8), 12), linear((8, 4), 12, True), linear((8, 6), 12, True, activation="gelu")],
    "matmul": [
        Case({"a": (8, 4), "b": (4, 12)}),
        Case({"a": (4, 1, 8, 6), "b": (4, 8, 4)}, {"transpose_a": True}),
    ],
    "conv2d": [_conv2d(4, padding=1), _conv2d(4, groups=4, stride=2)],
    "cross_entropy": [
        _cross_entropy("mean", label_smoothing=0.2, ignore_index=3),
        _cross_entropy("sum", ignore_index=3),
        _cross_entropy("none", label_smoothing=0.2),
        _cross_entropy("mean", True, label_smoothing=0.2, ignore_index=3, z_loss=0.1, softcap=2.0),
        Case({"x": (8,), "target": ()}, classes={"target": 8}),
    ],
    "linear_cross_entropy": [
        head((4, 8, 6), 12, "mean", True, label_smoothing=0.2, ignore_index=3),
        head((4, 8, 6), 12, "mean", weights=True, softcap=2.0),
        head((8, 6), 12, "sum", True, z_loss=0.1),
        head((8, 6), 12, "none"),
    ],
    "linear_cross_entropy_lse": [
        head((4, 8, 6), 12, "mean", True, ignore_index=3, softcap=2.0),
        head((8, 6), 12, "sum", True, z_loss=0.1),
        head((8, 6), 12, "none"),
    ],
    "cross_entropy_lse": [_cross_entropy("mean", True, ignore_index=3, softcap=2.0), _cross_entropy("none")],
}  # fmt: skip


def results_and_gradients(name: str, case: Case) -> tuple[Callable, dict[str, np.ndarray]]:
    """A function of the call's arrays, and the arrays."""
    arrays = {slot: x for slot, x in case.random(np.random.default_rng(7)).items() if x is not None}
    absent = {slot: None for slot in case.shapes if slot not in arrays}
    floating = [slot for slot, x in arrays.items() if x.dtype.kind == "f" and slot not in case.constants]

    def values(given: Mapping[str, Any]):
        return getattr(ours, name)(**given, **absent, **case.attrs), ()

    def function(given: Mapping[str, Any]):
        def call(*values):
            return getattr(ours, name)(**{**given, **dict(zip(floating, values, strict=True))}, **absent, **case.attrs)

        results, pull = jax.vjp(call, *(given[slot] for slot in floating))
        return results, pull(jax.tree.map(slope, results))

    def slope(y):
        if not jnp.issubdtype(y.dtype, jnp.floating):
            return np.zeros(y.shape, jax.dtypes.float0)
        return jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)

    return function if OPS[name].has_gradient else values, arrays


def _operator_check(name: str) -> Callable[[], None]:
    def operator() -> None:
        op, mesh = OPS[name], mesh_of(d=4)
        for case in CASES[name]:
            function, arrays = results_and_gradients(name, case)
            expected = jax.jit(function)(arrays)
            inputs, attrs = op.bind(**{slot: arrays.get(slot) for slot in case.shapes}, **case.attrs)
            whole = [x if x is None or not op.broadcast else np.broadcast_to(x, (8, 6)) for x in inputs]
            axes = [axis for axis in _stated(op, op.canonical(attrs), whole).axes if axis.size % 4 == 0]
            for axis in axes:
                sharded = {slot: split(x, axis, slot, op.broadcast, mesh) for slot, x in arrays.items()}
                compiled = jax.jit(function).lower(sharded).compile()
                where = f"{name} {case} over {axis.name}"
                compare(compiled(sharded), expected, where)
                assert not (found := GATHERS.findall(compiled.as_text())), f"{where}: {found}"
            assert axes, f"{name} {case}"

    return operator


def split(x: np.ndarray, axis: Any, slot: str, is_broadcast: bool, mesh: Mesh) -> Any:
    """An array whose axis, if it has it, is sharded."""
    at = axis.positions.get(slot)
    if at is None or (is_broadcast and (at := at - (2 - x.ndim)) < 0):
        return put(x, mesh)
    return put(x, mesh, *[None] * at, "d")


CHECKS |= {name: _operator_check(name) for name in CASES}


# -------------------------------------------------------------------------------------------------------------- models


def loss_of(weights: Mapping[str, Any], x: Any, target: Any) -> Any:
    h = ours.layer_norm(x, x.shape[-1], weights["gamma"], weights["beta"])
    h = ours.gelu(ours.linear(h, weights["w1"], weights["b1"]))
    return ours.cross_entropy(ours.linear(h, weights["w2"], weights["b2"]), target)


STEP = jax.value_and_grad(loss_of)


def task() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights, and rows of which one device ignores more than others."""
    shapes = {"gamma": (16,), "beta": (16,), "w1": (32, 16), "b1": (32,), "w2": (12, 32), "b2": (12,)}
    weights = {name: random(*shape, seed=i).astype("float32") for i, (name, shape) in enumerate(shapes.items())}
    target = np.arange(24) % 12
    target[[0, 1, 2, 7]] = -100
    return weights, random(24, 16, seed=9).astype("float32"), target


@check
def a_batch_sharded_step_sums_each_gradient_once() -> None:
    weights, x, target = task()
    mesh = mesh_of(d=4)
    whole = {name: put(w, mesh) for name, w in weights.items()}
    program = run(STEP, (whole, put(x, mesh, "d"), put(target, mesh, "d")), rtol=2e-5)
    assert not (found := GATHERS.findall(program)), found
    loss_and_count = (2,)
    assert reduced(program) == sorted([loss_and_count, *(w.shape for w in weights.values())]), reduced(program)


@check
def column_and_row_parallel_products_gather_nothing() -> None:
    mesh = mesh_of(d=2, m=2)
    w1, b1, w2, b2, x = random(12, 16), random(12), random(16, 12), random(16), random(8, 16)

    def loss(w1, b1, w2, b2, x):
        return (ours.linear(ours.linear(x, w1, b1, "gelu"), w2, b2) ** 2).sum()

    sharded = put(w1, mesh, "m"), put(b1, mesh, "m"), put(w2, mesh, None, "m"), put(b2, mesh), put(x, mesh, "d")
    program = run(jax.value_and_grad(loss, (0, 1, 2, 3, 4)), sharded)
    assert not (found := GATHERS.findall(program)), found


@check
def shardings_in_types() -> None:
    """JAX's explicit mode: the types of results and gradients tell how they are sharded."""
    if not hasattr(jax.sharding, "reshard"):
        return  # an older JAX
    weights, x, target = task()
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=kinds)
    specs = {"gamma": (), "beta": (), "w1": ("m",), "b1": ("m",), "w2": (None, "m"), "b2": ()}
    sharded = {name: put(w, mesh, *specs[name]) for name, w in weights.items()}
    types = []

    def step(weights, x, target):
        h = ours.linear(x, weights["w1"], weights["b1"])
        types.append(str(jax.typeof(h)))
        return STEP(weights, x, target)

    arguments = sharded, put(x, mesh, "d"), put(target, mesh, "d")
    assert not GATHERS.findall(run(step, arguments, rtol=2e-5))
    assert types[0] == "float32[24@d,32@m]", types
    with jax.set_mesh(mesh):
        run(step, arguments, rtol=2e-5)
    conflict = put(x, mesh, "d", "m"), put(weights["w1"], mesh, "d", "m")  # one of them has to move
    run(jax.value_and_grad(lambda x, w: (ours.linear(x, w) ** 2).sum(), (0, 1)), conflict, rtol=2e-5)


# ----------------------------------------------------------------------------------------------------- rules and limits


@check
def parts_that_are_not_equal() -> None:
    """Six rows on four devices: not split."""
    x = put(random(8, 16), mesh_of(d=4), "d")
    run(jax.value_and_grad(lambda x: (ours.rms_norm(x[:6] * 2, 16) ** 3).sum()), (x,))
    run(jax.value_and_grad(lambda x: ours.cross_entropy(x[:6] * 2, jnp.array([1, 2, -100, -100, 3, 3]))), (x,))


@check
def axes_that_are_whole() -> None:
    """They are gathered; the others stay split."""
    x = put(random(8, 16), mesh_of(d=2, m=2), "d", "m")
    program = run(lambda x: ours.softmax(x), (x,))
    assert GATHERS.findall(program) == ["all-gather"]
    assert "f64[4,16]" in program


@check
def one_function_of_several_shardings() -> None:
    mesh = mesh_of(d=2, m=2)
    a, b, w = put(random(8, 16), mesh, "d"), put(random(8, 16), mesh, "m"), random(16, 16)
    run(lambda a, b, w: ours.linear(a, w) + 2 * ours.linear(ours.linear(b, w), w), (a, b, put(w, mesh, None, "m")))


@check
def transforms() -> None:
    mesh = mesh_of(d=4)
    x, w = put(random(8, 3, 16), mesh, "d"), random(12, 16)
    run(jax.vmap(lambda x: ours.linear(x, w), spmd_axis_name="d"), (x,))
    run(jax.vmap(jax.grad(lambda x: (ours.layer_norm(x, 16) ** 2).sum())), (x,))
    run(jax.vmap(lambda x: ours.cross_entropy(x, jnp.array([1, 2, 3]))), (x,))

    def scanned(x):
        step = jax.checkpoint(lambda x, _: (ours.gelu(ours.layer_norm(x, 16)), None))
        return jax.lax.scan(step, x, None, length=3)[0].sum()

    assert not GATHERS.findall(run(jax.grad(scanned), (x,)))
    donated = put(random(8, 16), mesh, "d")
    expected = 2 * np.asarray(ours.gelu(np.asarray(donated)))
    compare(jax.jit(lambda x: 2 * ours.gelu(x), donate_argnums=0)(donated), expected)
    assert donated.is_deleted()
    assert ours.gelu(put(random(8, 16), mesh, "d")).sharding.spec[0] == "d"


@check
def a_class_that_there_is_not() -> None:
    """Where classes are split no entry sees the target: NaN, as on a GPU."""
    mesh = mesh_of(d=4)
    losses, slope = jax.jit(jax.value_and_grad(lambda x: ours.cross_entropy(x, jnp.array([8, 1]), reduction="sum")))(
        put(random(2, 8), mesh, None, "d")
    )
    assert np.isnan(losses)
    assert np.isnan(slope).all(1).tolist() == [True, False]


@check
def exports() -> None:
    """They carry no partitioning, which JAX cannot write."""
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in (ours.TARGET, ours.SCRATCH_TARGET)]
    sharded = put(random(8, 16), mesh_of(d=4), "d")
    for x in (np.asarray(sharded), sharded):
        program = export.export(jax.jit(ours.softmax), disabled_checks=checks)(x)
        assert "CustomSPMDPartitioning" not in program.mlir_module()
        compare(jax.jit(program.call)(x), ours.softmax(np.asarray(x)))


@check
def one_device() -> None:
    """The call itself."""
    lowered = jax.jit(jax.grad(loss_of)).lower(*task())
    assert "CustomSPMDPartitioning" not in lowered.as_text()


@check
def shard_map() -> None:
    """The call itself: each part is a whole call."""
    mesh, x = mesh_of(d=4), random(8, 16)
    mapped = getattr(jax, "shard_map", None)
    if mapped is None:
        from jax.experimental.shard_map import shard_map

        def mapped(function, **kwargs):
            return shard_map(function, check_rep=False, **kwargs)

    function = jax.jit(mapped(lambda x: ours.layer_norm(x, 16), mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    program = function.lower(put(x, mesh, "d")).compile().as_text()
    assert not GATHERS.findall(program)
    compare(function(put(x, mesh, "d")), ours.layer_norm(x, 16))


@check
def a_warning_where_every_device_computes_all() -> None:
    """Once in a process; not of an operator that states its axes, or of one device."""
    x = random(8, 16)
    sharded = put(x, mesh_of(d=4), "d")
    silent = function_of(replace(OPS["softmax"], dims=None), "silent")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silent(x)
        ours.softmax(sharded)
        compare(silent(sharded), ours.softmax(x))
        silent(2 * sharded)
        jax.jit(lambda x: silent(2 * x))(sharded)
    found = [str(w.message).split(":")[0] for w in caught if w.category is ours.ShardingWarning]
    assert found == (["softmax"] if hasattr(jax, "typeof") else [])


def main(path: str) -> None:
    jax.config.update("jax_enable_x64", True)
    errors = {}
    for name, function in CHECKS.items():
        try:
            function()
            errors[name] = ""
        except Exception:
            errors[name] = traceback.format_exc()
    with open(path, "w") as file:
        json.dump(errors, file)


if __name__ == "__main__":
    main(sys.argv[1])
