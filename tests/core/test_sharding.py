"""Definitions state how calls are split (``Op.dims``): it is right, on the cases of the table, and that a wrong
statement is found."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from aotops.infer import infer
from aotops.op import Op, operator
from aotops.ops import OPS
from aotops.sharding import Axis, sharding
from aotops.spec import TensorSpec
from aotops.testing.calls import EntryCall, calls_of, numbers, raw, run_on_cpu
from aotops.testing.cases import CASES, trial

BACKWARDS = {op.backward.name: op.backward for op in OPS.values() if op.backward}
OF = {op.backward.name: op for op in OPS.values() if op.backward} | OPS
ALL = {**OPS, **BACKWARDS}
KERNELS = [name for name, op in ALL.items() if op.has_kernel]
SMALL = 5000
"""Elements of an input of the cases that are split."""


@cache
def calls(name: str) -> tuple[EntryCall, ...]:
    """Every small case of the table, in float64, with all inputs in it; and of a backward without residuals."""
    return tuple(_calls(name))


def _calls(name: str) -> Iterator[EntryCall]:
    for i, case in enumerate(CASES[OF[name].name].cases):
        broadcast = OF[name].broadcast and len(set(case.given.values())) > 1  # by the frontend
        if max(map(math.prod, case.given.values())) <= SMALL and not broadcast:
            for one in calls_of(OF[name], trial(OF[name].name, i, "float64"), "cpu"):
                if one.op.name == name:
                    yield one
                    if kept := set(OF[name].residuals) & one.op.optional & set(one.given):
                        specs = {**one.specs} | dict.fromkeys(kept)
                        scratch = infer(one.op, one.attrs, tuple(specs[slot] for slot in one.op.inputs))
                        yield replace(one, specs=specs | {slot: scratch[slot] for slot in one.op.workspace})


def values(one: EntryCall) -> dict[str, np.ndarray]:
    """The numbers in each slot after the call."""
    held = run_on_cpu(one, 0)
    return {slot: numbers(held[slot], spec) for slot, spec in one.given.items() if slot not in one.op.workspace}


@cache
def wholes(name: str) -> tuple[dict[str, np.ndarray], ...]:
    """The numbers after each of ``calls``."""
    return tuple(map(values, calls(name)))


def shapes(one: EntryCall) -> list[tuple[int, ...] | None]:
    return [spec and spec.shape for spec in map(one.specs.get, one.op.inputs)]


def part_of(one: EntryCall, whole: Mapping[str, np.ndarray], axis: Axis, part: slice) -> dict[str, np.ndarray]:
    """The results of the call on a part of each input that has the axis. The first part has what is added once."""
    inputs = {slot: whole[slot] for slot in one.op.inputs if slot in whole}
    inputs |= {slot: np.zeros_like(inputs[slot]) for slot in axis.added if part.start}
    for slot, at in axis.positions.items():
        if slot in inputs:
            inputs[slot] = inputs[slot][(slice(None),) * at + (part,)]
    specs = {slot: TensorSpec(inputs[slot].shape, one.given[slot].dtype) if slot in inputs else None
             for slot in one.op.inputs}  # fmt: skip
    found = infer(one.op, one.attrs, tuple(specs.values()))
    specs |= {slot: found[slot] if one.specs[slot] else None for slot in one.op.entry_outputs}
    data = {slot: raw(array, one.given[slot].dtype) for slot, array in inputs.items()}
    return values(EntryCall(one.op, one.attrs, specs, data))


def check_axis(one: EntryCall, whole: Mapping[str, np.ndarray], axis: Axis) -> None:
    """The results on two parts make up the results on the whole."""
    half = axis.size // 2
    parts = [part_of(one, whole, axis, part) for part in (slice(half), slice(half, None))]
    for y in one.op.results:
        if y not in whole:
            continue
        first, second = (part[y] for part in parts)
        if y in axis.positions:
            pairs = [(np.concatenate([first, second], axis.positions[y]), whole[y])]
        elif y in axis.partial:
            pairs = [(first + second, whole[y])]
        else:
            pairs = [(first, whole[y]), (second, whole[y])]
        for got, expected in pairs:
            assert got.shape == expected.shape, f"{one.op.name}: {y} over {axis.name}"
            np.testing.assert_allclose(got, expected, 1e-9, 1e-9, err_msg=f"{one.op.name}: {y} over {axis.name}")


def check(op: Op, name: str) -> set[str]:
    """Splits each case along each axis that ``op`` states. Returns the names of these axes."""
    checked = set()
    for one, whole in zip(calls(name), wholes(name), strict=True):
        stated = sharding(op, one.attrs, shapes(one))
        assert stated is not None
        for slot, names in stated.slots.items():
            assert slot not in whole or len(names) == whole[slot].ndim
        for axis in stated.axes:
            if axis.size > 1:
                check_axis(one, whole, axis)
                checked.add(axis.name)
    return checked


@pytest.mark.parametrize("name", KERNELS)
def test_results_on_parts_make_up_the_result(name):
    assert check(ALL[name], name) & {"...1", "n", "c"}


# ------------------------------------------------------------------------------------------------- wrong statements


def changed(op: Op, change) -> Op:
    """The operator with another statement."""
    stated = op.dims or (lambda call: dict.fromkeys((*op.inputs, *op.results), "..."))
    return replace(op, dims=lambda call: {slot: change(slot, axes) for slot, axes in stated(call).items()})


def whole_axes(name: str) -> list[str]:
    """The axes that are stated to be whole, with more than one element somewhere."""
    found = set()
    for one in calls(name):
        stated, given = sharding(ALL[name], one.attrs, shapes(one)), one.given
        for slot in ALL[name].inputs:
            pairs = zip(stated.slots.get(slot, ()), given[slot].shape if slot in given else (), strict=True)
            found |= {axis for axis, size in pairs if axis.isupper() and size > 1}
    return sorted(found)


WHOLE = [(name, axis) for name in KERNELS for axis in whole_axes(name)]
PARTIAL = [
    (name, axis.name, y)
    for name in KERNELS
    for axis, y in sorted(
        {(axis.name, y): (axis, y) for one in calls(name) for axis in sharding(ALL[name], one.attrs, shapes(one)).axes
         for y in axis.partial if not axis.name.startswith("...")}.values(), key=lambda pair: (pair[0].name, pair[1])
    )
]  # fmt: skip


def refuted(op: Op, name: str) -> bool:
    try:
        check(op, name)
    except (AssertionError, ValueError, TypeError):
        return True
    return False


@pytest.mark.parametrize(("name", "axis"), WHOLE)
def test_an_axis_is_whole_because_it_has_to_be(name, axis):
    lower = changed(ALL[name], lambda slot, axes: re.sub(rf"\b{axis}\b", axis.lower(), axes))
    assert refuted(lower, name)


@pytest.mark.parametrize(("name", "axis", "y"), PARTIAL)
def test_a_partial_sum_is_not_the_result(name, axis, y):
    same = changed(ALL[name], lambda slot, axes: f"{axes} ({axis})" if slot == y else axes)
    assert refuted(same, name)


@pytest.mark.parametrize("name", ["linear_backward", "conv2d_backward"])
def test_a_whole_result_is_no_partial_sum(name):
    summed = changed(ALL[name], lambda slot, axes: axes.partition(" (")[0])
    assert refuted(summed, name)


# ---------------------------------------------------------------------------------------------- beside other fields


@pytest.mark.parametrize("name", ALL)
def test_independent_leading_axes_are_those_that_vmap_adds(name):
    op, tried = ALL[name], 0
    for one in calls(name) if op.has_kernel else ():
        given = shapes(one)
        if all(shape is None or len(shape) >= op.min_rank for shape in given):
            assert with_leading_axes(op, one.attrs, given) == op.vmappable
            tried += 1
    assert tried or not op.has_kernel
    if not op.has_kernel:
        assert with_leading_axes(op, (1.0, None), [(2, 3)]) == op.vmappable


def with_leading_axes(op: Op, attrs, shapes) -> set[str]:
    """The slots and aliases that are stated to have more leading axes."""
    stated = op.dims(op.call(attrs, shapes)) if op.dims else dict.fromkeys((*op.inputs, *op.results), "...")
    return set(op.with_aliases({slot: None for slot, axes in stated.items() if "..." in axes.split()}))


# ------------------------------------------------------------------------------------------------------------- parsing


def stated(name: str, *shapes, **attrs):
    """The inputs that are not told, and attributes, are None."""
    op = ALL[name]
    absent = [None] * (len(op.inputs) - len(shapes))
    return sharding(op, tuple(attrs.get(attr) for attr in op.attrs), [*shapes, *absent])


def test_leading_axes_are_aligned_and_broadcast():
    found = stated("matmul_backward", (7, 2, 3, 4, 5), (2, 1, 4, 6), (7, 1, 3, 6, 5))
    by_name = {axis.name: axis for axis in found.axes}
    assert set(by_name) == {"...1", "...2", "...3", "m", "n", "k"}
    assert by_name["...1"].positions == {"dy": 2, "b": 2, "db": 2}
    assert by_name["...2"].positions == {"dy": 1, "a": 0, "da": 0}
    assert by_name["...3"].positions == {"dy": 0, "b": 0, "db": 0}
    assert [by_name[f"...{i}"].partial for i in (1, 2, 3)] == [{"da"}, {"db"}, {"da"}]
    assert found.slots["a"] == ("...2", "1", "m", "k")
    assert found.axis("a", 1) is None
    assert found.axis("a", 2) is by_name["m"]


def test_a_product_with_an_epilogue_is_not_summed_in_parts():
    assert stated("linear", (4, 6), (5, 6)).axis("x", 1).partial == {"y"}
    assert stated("linear", (4, 6), (5, 6)).axis("x", 1).added == set()
    assert stated("linear", (4, 6), (5, 6), (5,)).axis("x", 1).added == {"bias"}
    assert stated("linear", (4, 6), (5, 6), (5,)).axis("weight", 0).added == set()
    assert stated("linear", (4, 6), (5, 6), activation="relu").axis("x", 1) is None
    assert stated("linear", (4, 6), (5, 6), (5,), activation="relu").slots["pre_activation"] == ("...1", "o")


def test_a_mean_is_not_split():
    for name, loss in (("cross_entropy", ()), ("cross_entropy_backward", ((),))):
        assert not stated(name, *loss, (4, 6), (4,), reduction="mean").axes
        assert stated(name, *loss, (4, 6), (4,), reduction="sum").axis("x", 0).size == 4


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"^linear: i of weight has size 7, expected 6"):
        stated("linear", (4, 6), (5, 7))
    with pytest.raises(ValueError, match=r"^linear: weight has shape \(5,\), expected the axes o i"):
        stated("linear", (4, 6), (5,))


def test_a_statement_that_does_not_fit_the_operator_is_named():
    missing = replace(OPS["gelu"], dims=lambda call: {"x": "..."})
    odd = changed(OPS["gelu"], lambda slot, axes: "... q" if slot == "y" else "... r")
    twice = changed(OPS["gelu"], lambda slot, axes: "r r")
    for op, message in ((missing, "gelu: dims names x.*: y is not"), (odd, "gelu: dims of y has q"), (twice, "'r r'")):
        with pytest.raises(TypeError, match=message):
            sharding(op, ("none",), [(2, 3)])


def test_an_operator_that_states_nothing_is_not_split():
    assert sharding(replace(OPS["softmax"], dims=None), (-1,), [(2, 3)]) is None


def test_inputs_without_axes_are_not_split():
    """An operator of rows may take a tensor without axes, as one of one element: there is nothing to split."""
    spec = {"inputs": ("x",), "outputs": ("y",), "same_spec_as": {"y": "x"}}
    op = operator(dims=lambda call: dict.fromkeys("xy", "... N"), **spec)(_takes_x)
    none = sharding(op, (), [()])
    assert (none.slots, none.axes) == ({"x": (), "y": ()}, ())
    assert [axis.size for axis in sharding(op, (), [(3, 4)]).axes] == [3]


def _takes_x(x):
    return (x,), ()
