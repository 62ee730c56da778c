"""Formulas in NumPy, in float64: of an operator against its reference, of a backward against finite differences."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from aotops import formula
from aotops.frontends import numpy as F
from aotops.ops import OPS
from aotops.testing.cases import CASES, trial

MATHEMATICS = SimpleNamespace(
    ops=F,
    narrow=False,
    wide=lambda x: x,
    like=lambda x, model: x.astype(model.dtype),
    unsigned=lambda x: x.astype(np.int64) % 2**32,
    xor=np.bitwise_xor,
    epsilon=lambda x: np.finfo(x.dtype).eps,
    exp=np.exp,
    expm1=np.expm1,
    tanh=np.tanh,
    erfc=lambda x: np.vectorize(math.erfc, otypes=[float])(x),
    sigmoid=lambda x: np.exp(-np.logaddexp(0, -x)),
    rsqrt=lambda x: 1 / np.sqrt(x),
    log_softmax=lambda x, axis: x - x.max(axis, keepdims=True) - _log_sum_exp(x - x.max(axis, keepdims=True), axis),
    logsumexp=lambda x, axis: (x.max(axis, keepdims=True) + _log_sum_exp(x - x.max(axis, keepdims=True), axis)).squeeze(
        axis
    ),
    argmax=np.argmax,
    where=np.where,
    zeros=np.zeros_like,
    arange=lambda n, model: np.arange(n, dtype=model.dtype),
    sum=lambda x, axes, keepdims=False: x.sum(axes, keepdims=keepdims) if axes else x,
    mean=lambda x, axes: x.mean(axes, keepdims=True),
    any=lambda x, axis: x.any(axis),
    count=lambda x, model: np.asarray(x.sum(), model.dtype),
    concatenate=lambda arrays: np.concatenate(arrays, -1),
    take=lambda x, rows: x[rows],
    scatter_sum=lambda x, rows, n: _scatter_sum(x, rows, n),
    reshape=np.reshape,
    swapaxes=np.swapaxes,
    matrix=lambda x: x.reshape(math.prod(x.shape[:-1]), x.shape[-1]),
)


def _log_sum_exp(x, axis):
    return np.log(np.exp(x).sum(axis, keepdims=True))


def _scatter_sum(x, rows, n):
    sums = np.zeros((n, *x.shape[1:]))
    np.add.at(sums, rows, x)
    return sums


def _run(op, attrs):
    """An operator on inputs by name, as the derivatives of products need it."""

    def run(one, named, wanted):
        if one is op:
            return {op.outputs[0]: getattr(F, op.name)(**named, **dict(zip(op.public_attrs, attrs, strict=True)))}
        function, dy = getattr(F, one.name), one.inputs[0]
        given = {slot: named.get(slot) for slot in op.inputs}
        found = function(named[dy], **given, **dict(zip(op.public_attrs, attrs, strict=True)))
        return {
            f"d{slot}": d for slot, d in zip(op.inputs, found, strict=True) if d is not None and f"d{slot}" in wanted
        }

    return run


SMALL = 2000
FORMULAS = [name for name, op in OPS.items() if op.formula]
PRODUCTS = [name for name, op in OPS.items() if op.bilinear]


def _trials(name):
    """Trials of cases that are small and not empty."""
    for i, case in enumerate(CASES[name].cases):
        sizes = [math.prod(shape) for shape in case.given.values()]
        if min(sizes) > 0 and max(sizes) < SMALL:
            yield trial(name, i, "float64")


def _bound(op, one):
    return op.bind(**one.inputs, **one.case.attrs)


def test_every_gradient_has_a_derivative():
    for op in OPS.values():
        if op.backward is not None and op.backward.has_kernel:
            assert (op.formula and op.backward.formula) or op.bilinear, f"{op.name} states no derivative"


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_gives_what_the_operator_gives(name):
    op = OPS[name]
    for one in _trials(name):
        inputs, attrs = _bound(op, one)
        if not formula.is_bilinear(op, op.canonical(attrs)):
            one.assert_values(formula.compose(MATHEMATICS, op, op.canonical(attrs), inputs))


@pytest.mark.parametrize("name", [name for name in FORMULAS if OPS[name].backward.has_kernel])
def test_the_formula_of_a_backward_gives_the_gradients(name):
    op = OPS[name]
    for one in _trials(name):
        inputs, attrs = _bound(op, one)
        attrs = op.canonical(attrs)
        if formula.is_bilinear(op, attrs):
            continue
        given = dict(zip(op.inputs, inputs, strict=True))
        given |= zip((f"d{y}" for y in op.outputs), one.output_gradients, strict=True)
        given |= zip(op.outputs, one.expected, strict=True)
        found = formula.compose(MATHEMATICS, op.backward, attrs, [given.get(slot) for slot in op.backward.inputs])
        named = op.backward.with_aliases(dict(zip(op.backward.composed, found, strict=True)))
        one.assert_gradients({slot: named.get(f"d{slot}") for slot in op.inputs if given[slot] is not None})


@pytest.mark.parametrize("name", PRODUCTS)
def test_derivatives_of_products(name):
    """The tangents of a product and of its backward against differences along a direction, which are exact for a
    function of the second degree up to rounding; and the gradient of the backward against its tangents."""
    op, random = OPS[name], np.random.default_rng(0)
    for one in _trials(name):
        inputs, attrs = _bound(op, one)
        attrs = op.canonical(attrs)
        if not formula.is_bilinear(op, attrs):
            continue
        run, named = _run(op, attrs), {s: x for s, x in zip(op.inputs, inputs, strict=True) if x is not None}
        for slots in ((slot,) for slot in named), (tuple(named),):
            for moved in slots:
                t = {slot: random.normal(size=named[slot].shape) for slot in moved}
                _check_products(op, run, named, t, one.output_gradients[0], random)


def _check_products(op, run, named, t, dy, random):
    def shifted(values, by, h):
        return {slot: x + h * by[slot] if slot in by else x for slot, x in values.items()}

    def slope(one, values, by):
        after, before = (run(one, shifted(values, by, h), one.outputs) for h in (0.5, -0.5))
        return {name: after[name] - before[name] for name in after}

    (y,) = op.outputs
    np.testing.assert_allclose(
        formula.bilinear_tangent(MATHEMATICS, run, op, named, t), slope(op, named, t)[y], rtol=1e-9, atol=1e-9
    )
    whole, by = named | {f"d{y}": dy}, t | {f"d{y}": random.normal(size=dy.shape)}
    for chosen in (by, t, {f"d{y}": by[f"d{y}"]}):
        expected = slope(op.backward, whole, chosen)
        for wanted in ((name,) for name in expected), (tuple(expected),):
            for some in wanted:
                found = formula.backward_tangents(MATHEMATICS, run, op, whole, chosen, some)
                assert set(found) <= set(some)
                for name in some:
                    value = expected[name]
                    np.testing.assert_allclose(found.get(name, 0 * value), value, rtol=1e-9, atol=1e-9)
    # <cotangents, tangents of the outputs> = <gradients, tangents of the inputs>
    expected = slope(op.backward, whole, by)
    for names in ((name,) for name in expected), (tuple(expected),):
        for some in names:
            cotangents = {name: random.normal(size=expected[name].shape) for name in some}
            found = formula.backward_cotangents(MATHEMATICS, run, op, whole, cotangents, whole)
            for slot in found:
                alone = formula.backward_cotangents(MATHEMATICS, run, op, whole, cotangents, {slot})
                np.testing.assert_array_equal(alone.pop(slot), found[slot])
                assert not alone
            left = sum(np.vdot(cotangents[name], expected[name]) for name in some)
            right = sum(np.vdot(found[slot], by[slot]) for slot in found if slot in by)
            np.testing.assert_allclose(right, left, rtol=1e-9, atol=1e-9)
