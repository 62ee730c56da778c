"""linear_cross_entropy in JAX's programs: what a program makes, and derivatives of any order."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from aotops.frontends import jax as ours  # noqa: E402

jax.config.update("jax_enable_x64", True)


def head(rows=6, classes=5, width=4):
    draw = np.random.default_rng(2)
    x, weight, bias = (jnp.asarray(draw.standard_normal(s)) for s in ((rows, width), (classes, width), (classes,)))
    return x, weight, jnp.asarray(draw.integers(0, classes, rows)), bias


def theirs(x, weight, target, bias):
    log_p = jax.nn.log_softmax(x @ weight.T + bias)
    return -jnp.take_along_axis(log_p, target[:, None], 1).mean()


def results_of(jaxpr) -> list[tuple[str, ...]]:
    """The results that the operator's calls in a program are asked for, in its order."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "aotops":
            found.append((equation.params["call"].op.name, *equation.params["call"].wanted))
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if hasattr(value, "jaxpr") and equation.primitive.name != "aotops":
                found += results_of(value.jaxpr)
    return found


def test_a_program_makes_the_gradients_that_it_wants():
    x, weight, target, bias = head()
    loss = lambda x, weight, bias: ours.linear_cross_entropy(x, weight, target, bias)  # noqa: E731

    def wanted(function):
        return results_of(jax.make_jaxpr(function)(x, weight, bias).jaxpr)

    name = "linear_cross_entropy"
    assert wanted(loss) == [(name, "y")]
    assert wanted(jax.grad(loss)) == [(name, "y", "x_slope"), (f"{name}_backward", "dx")]
    assert wanted(jax.grad(loss, (1, 2))) == [
        (name, "y", "weight_slope", "bias_slope"),
        (f"{name}_backward", "dweight", "dbias"),
    ]


@pytest.mark.parametrize("argnums", [(0,), (1,), (0, 1, 3)], ids=str)
def test_gradients_under_jit(argnums):
    arguments = head()
    value, gradients = jax.jit(jax.value_and_grad(ours.linear_cross_entropy, argnums))(*arguments)
    expected, others = jax.value_and_grad(theirs, argnums)(*arguments)
    np.testing.assert_allclose(value, expected, 1e-12)
    for a, b in zip(gradients, others, strict=True):
        np.testing.assert_allclose(a, b, 1e-11, 1e-13)


def test_second_order_and_forward_mode():
    x, weight, target, bias = head(3, 4, 2)
    of = lambda f: lambda x: f(x, weight, target, bias)  # noqa: E731
    for transform in (jax.hessian, jax.jacfwd, lambda f: jax.jacrev(jax.grad(f))):
        found, expected = (jax.jit(transform(of(f)))(x) for f in (ours.linear_cross_entropy, theirs))
        np.testing.assert_allclose(found, expected, 1e-10, 1e-12)


def test_class_weights_have_a_gradient():
    """By the formula."""
    x, weight, target, bias = head()
    classes = jnp.linspace(0.5, 1.5, 5)

    def composed(classes):
        log_p = jax.nn.log_softmax(x @ weight.T + bias)
        losses = -jnp.take_along_axis(log_p, target[:, None], 1)[:, 0] * classes[target]
        return losses.sum() / classes[target].sum()

    found = jax.grad(lambda c: ours.linear_cross_entropy(x, weight, target, bias, class_weight=c))(classes)
    np.testing.assert_allclose(found, jax.grad(composed)(classes), 1e-11, 1e-13)


def test_chunks_in_bfloat16():
    x, weight, target, bias = head(1100, 4099, 8)
    x, weight = (0.1 * t for t in (x, weight))
    narrow = [t.astype(jnp.bfloat16) for t in (x, weight, bias)]
    loss = lambda x, weight, bias: ours.linear_cross_entropy(x, weight, target, bias, dtype="float32")  # noqa: E731
    value, found = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*narrow)
    exact = [t.astype(jnp.float64) for t in narrow]
    expected, others = jax.value_and_grad(theirs, (0, 1, 3))(exact[0], exact[1], target, exact[2])
    np.testing.assert_allclose(value, expected, 1e-3)
    for a, b in zip(found, others, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float64), b, 0.05, 0.02 * float(jnp.abs(b).max()))
