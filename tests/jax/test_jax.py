"""JAX: under whatever transformation, alone and nested."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

from aotops.frontends import jax as ours  # noqa: E402
from aotops.frontends.jax import private  # noqa: E402
from aotops.frontends.jax.public import function_of  # noqa: E402
from aotops.ops import OPS  # noqa: E402
from aotops.testing.cases import CASES, first_case, inputs  # noqa: E402
from aotops.testing.frameworks import race  # noqa: E402


def test_private_names_stand_in_one_file():
    """JAX as it is pinned has them all."""
    assert private.LACKS == ()
    sources = {file.name: file.read_text() for file in Path(private.__file__).parent.glob("*.py")}
    assert [name for name, source in sources.items() if "jax._src" in source] == ["private.py"]


def _layer_norm(x, w=None, b=None):
    y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return y * (1 if w is None else w) + (0 if b is None else b)


FUNCTIONS = {
    "add": (lambda x, w, b: ours.add(x, x * w), lambda x, w, b: x + x * w),
    "add_broadcast": (lambda x, w, b: ours.add(x, w), lambda x, w, b: x + w),
    "gelu": (lambda x, w, b: ours.gelu(x * w), lambda x, w, b: jax.nn.gelu(x * w, approximate=False)),
    "gelu_tanh": (lambda x, w, b: ours.gelu(x + b, "tanh"), lambda x, w, b: jax.nn.gelu(x + b, approximate=True)),
    "layer_norm": (lambda x, w, b: ours.layer_norm(x, 6, w, b), _layer_norm),
    "layer_norm_weight": (lambda x, w, b: ours.layer_norm(x, 6, w), lambda x, w, b: _layer_norm(x, w)),
    "layer_norm_bias": (lambda x, w, b: ours.layer_norm(x, 6, bias=b), lambda x, w, b: _layer_norm(x, None, b)),
    "layer_norm_plain": (lambda x, w, b: ours.layer_norm(x, (6,)), lambda x, w, b: _layer_norm(x)),
}


def _rms_norm(x, w=None, eps=2.0**-52):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 if w is None else w)


def _both(results):
    """One array that depends on both results."""
    y, h = results
    return y * 2 + jnp.sin(h)


FUNCTIONS |= {
    "rms_norm": (lambda x, w, b: ours.rms_norm(x + b, 6, w, 0.1), lambda x, w, b: _rms_norm(x + b, w, 0.1)),
    "rms_norm_bias": (lambda x, w, b: ours.rms_norm(x, 6, w, bias=b), lambda x, w, b: _rms_norm(x, w) + b),
    "rms_norm_plain": (lambda x, w, b: ours.rms_norm(x, (6,)), lambda x, w, b: _rms_norm(x)),
    "add_layer_norm": (
        lambda x, w, b: _both(ours.add_layer_norm(x, x * b, 6, w, b)),
        lambda x, w, b: _both((_layer_norm(x + x * b, w, b), x + x * b)),
    ),
    "add_rms_norm": (
        lambda x, w, b: _both(ours.add_rms_norm(x, x * b, 6, w)),
        lambda x, w, b: _both((_rms_norm(x + x * b, w), x + x * b)),
    ),
    "add_rms_norm_bias": (
        lambda x, w, b: _both(ours.add_rms_norm(x, x * b, 6, w, bias=b)),
        lambda x, w, b: _both((_rms_norm(x + x * b, w) + b, x + x * b)),
    ),
    "add_rms_norm_y": (
        lambda x, w, b: ours.add_rms_norm(x, x * b, 6)[0],
        lambda x, w, b: _rms_norm(x + x * b),
    ),
    "add_layer_norm_h": (
        lambda x, w, b: ours.add_layer_norm(x * w, x * b, 6)[1],
        lambda x, w, b: x * w + x * b,
    ),
    "swiglu": (lambda x, w, b: ours.swiglu(x * w, x + b), lambda x, w, b: jax.nn.silu(x * w) * (x + b)),
    "softmax": (lambda x, w, b: ours.softmax(x * w + b), lambda x, w, b: jax.nn.softmax(x * w + b)),
    "softmax_dim": (lambda x, w, b: ours.softmax(x * w + b, -2), lambda x, w, b: jax.nn.softmax(x * w + b, -2)),
}


_TABLES = jnp.outer(jnp.arange(4.0), jnp.ones(3)), jnp.outer(jnp.arange(1.0, 5.0), jnp.arange(3.0))


def _table(x, w):
    return jnp.outer(jax.lax.iota(jnp.float64, x.shape[0]), w)


def _positions(x):
    return jax.lax.iota(jnp.int32, x.shape[0]) * 2 % 4


def _rope(x, cos, sin):
    a, b = x[:, :3], x[:, 3:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _interleaved_rope(x, cos, sin):
    a, b = x[:, ::2], x[:, 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)


FUNCTIONS |= {
    "rope": (
        lambda x, w, b: ours.rope(x[:, None], _table(x, w[:3]), _table(x, b[3:]))[:, 0],
        lambda x, w, b: _rope(x, _table(x, w[:3]), _table(x, b[3:])),
    ),
    "rope_of_x": (
        lambda x, w, b: ours.rope((x * w + b)[None], *_TABLES, True, _positions(x), "BHSD")[0],
        lambda x, w, b: _interleaved_rope(x * w + b, *(t[_positions(x)] for t in _TABLES)),
    ),
}


# The tables grow with the rows: the sine of large angles would magnify the rounding of these.
def _qkv_rope(x, w, b):
    y, tables = x * w + b, (_table(x, w[:3]), _table(x, b[3:]))
    return jnp.sin(_rope(y, *tables) / 64) + 2 * _rope(2 * y, *tables) - 3 * y


def _ours_qkv_rope(x, w, b):
    y = x * w + b
    q, k, v = ours.qkv_rope(jnp.concatenate([y, 2 * y, 3 * y], -1), _table(x, w[:3]), _table(x, b[3:]), 1)
    return (jnp.sin(q / 64) + 2 * k - v)[:, 0]


FUNCTIONS |= {"qkv_rope": (_ours_qkv_rope, _qkv_rope)}


def _attention(x, w, b):
    s = x @ (x * w + b).T * 6**-0.5
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones_like(s)), s, -jnp.inf), -1) @ (x * b - w)


FUNCTIONS |= {
    "attention": (
        lambda x, w, b: ours.attention(x[:, None], (x * w + b)[:, None], (x * b - w)[:, None], causal=True)[:, 0],
        _attention,
    ),
    "attention_of_two_heads": (
        lambda x, w, b: ours.attention(
            jnp.stack([x, x], -2), (x * w + b)[:, None], (x * b - w)[:, None], causal=True, layout="BSHD"
        ).mean(-2),
        _attention,
    ),
}


def _qkv_attention(x, w, b):
    parts = jnp.concatenate([x, x * w + b, x * b - w], -1)
    return ours.qkv_attention(parts, 1, causal=True)


FUNCTIONS |= {"qkv_attention": (_qkv_attention, _attention)}


def _lltm(input, weights, bias, old_h, old_cell):
    i, o, c = jnp.split(jnp.concatenate([old_h, input], -1) @ weights.T + bias.reshape(-1), 3, -1)
    new_cell = old_cell + jax.nn.elu(c) * jax.nn.sigmoid(i)
    return jnp.tanh(new_cell) * jax.nn.sigmoid(o), new_cell


def _lltm_arguments(x, w, b):
    columns = jnp.concatenate([b, w])
    return x, jnp.outer(jnp.concatenate([w, columns]), columns), jnp.concatenate([columns, b])[None], x * w, x - b


FUNCTIONS |= {
    "lltm": (
        lambda x, w, b: _both(ours.lltm(*_lltm_arguments(x, w, b))),
        lambda x, w, b: _both(_lltm(*_lltm_arguments(x, w, b))),
    ),
    "lltm_h": (
        lambda x, w, b: ours.lltm(*_lltm_arguments(x, w, b))[0],
        lambda x, w, b: _lltm(*_lltm_arguments(x, w, b))[0],
    ),
}
EACH = pytest.mark.parametrize("name", FUNCTIONS)


def arrays():
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.normal(size=s)) for s in ((4, 6), (6,), (6,)))


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11), a, b)


def loss(function):
    return lambda *args: (function(*args) ** 2).sum()


@EACH
def test_eager_and_jit(name):
    function, reference = FUNCTIONS[name]
    close(function(*arrays()), reference(*arrays()))
    close(jax.jit(function)(*arrays()), reference(*arrays()))


@EACH
def test_grad(name):
    function, reference = FUNCTIONS[name]
    expected = jax.grad(loss(reference), (0, 1, 2))(*arrays())
    close(jax.grad(loss(function), (0, 1, 2))(*arrays()), expected)
    close(jax.jit(jax.grad(loss(function), (0, 1, 2)))(*arrays()), expected)
    close(jax.value_and_grad(jax.jit(loss(function)))(*arrays()), (loss(reference)(*arrays()), expected[0]))


AXES = [(0, None, None), (1, None, None), (0, 0, 0), (0, 0, None), (None, 0, 0), (-1, None, 0)]


@pytest.mark.parametrize("axes", AXES, ids=str)
@EACH
def test_vmap(name, axes):
    """Values, and gradients of each example: weights that are shared, and weights that are not."""
    function, reference = FUNCTIONS[name]
    args = [t if a is None else jnp.stack([t, 2 * t, t - 1], a) for t, a in zip(arrays(), axes, strict=True)]
    close(jax.vmap(function, axes)(*args), jax.vmap(reference, axes)(*args))
    each = [jax.vmap(jax.grad(loss(f), (0, 1, 2)), axes)(*args) for f in (function, reference)]
    close(*each)
    total = [jax.grad(loss(jax.vmap(f, axes)), (0, 1, 2))(*args) for f in (function, reference)]
    close(*total)


@EACH
def test_vmap_twice(name):
    function, reference = FUNCTIONS[name]
    x, w, b = arrays()
    xs = jnp.stack([jnp.stack([x, x + 1]), jnp.stack([x * 2, -x]), jnp.stack([x, x - 3])])
    twice = [jax.vmap(jax.vmap(f, (0, None, None)), (0, None, None))(xs, w, b) for f in (function, reference)]
    close(*twice)
    ws = jnp.stack([w, -w])
    apart = [jax.vmap(jax.vmap(f, (None, 0, None)), (0, None, None))(xs[:, 0], ws, b) for f in (function, reference)]
    close(*apart)


@EACH
def test_jacrev(name):
    function, reference = FUNCTIONS[name]
    close(jax.jacrev(function, (0, 1))(*arrays()), jax.jacrev(reference, (0, 1))(*arrays()))


def _convolution(x, w, b):
    return x.reshape(2, 2, 6)[:, :, :, None] * w[:3], jnp.outer(b, w).reshape(2, 2, 3, 3)[..., :2]


PRODUCTS = {
    "matmul": (lambda x, w, b: ours.matmul(x * w, x + b, transpose_b=True), lambda x, w, b: (x * w) @ (x + b).T),
    "linear": (lambda x, w, b: ours.linear(x, jnp.outer(w, b), b), lambda x, w, b: x @ jnp.outer(b, w) + b),
    "linear_gelu": (
        lambda x, w, b: ours.linear(x, jnp.outer(w, b), b, "gelu"),
        lambda x, w, b: jax.nn.gelu(x @ jnp.outer(b, w) + b, approximate=False),
    ),
    "conv2d": (
        lambda x, w, b: ours.conv2d(*_convolution(x, w, b), b[:2], padding=1),
        lambda x, w, b: (
            jax.lax.conv_general_dilated(*_convolution(x, w, b), (1, 1), ((1, 1), (1, 1))) + b[:2, None, None]
        ),
    ),
    "cross_entropy": (
        lambda x, w, b: ours.cross_entropy(x * w, jnp.array([1, -100, 0, 2]), label_smoothing=0.1),
        lambda x, w, b: _cross_entropy(x * w),
    ),
}


def _cross_entropy(x):
    log_p, target, counts = jax.nn.log_softmax(x), jnp.array([1, 0, 0, 2]), jnp.array([1, 0, 1, 1])
    losses = 0.9 * jnp.take_along_axis(log_p, target[:, None], -1)[:, 0] + 0.1 * log_p.mean(-1)
    return -(losses * counts).sum() / 3


def _derivatives(function):
    """Derivatives of first and second order along one direction, in each combination of modes."""

    def derivatives(*args):
        along = tuple(map(jnp.cos, args))
        gradient = jax.grad(loss(function), (0, 1, 2))

        def slope(*args):
            return jax.jvp(loss(function), args, along)[1]

        return {
            "forward": jax.jvp(function, args, along),
            "linearize": jax.linearize(function, *args)[1](*along),
            "forward over forward": jax.jvp(slope, args, along)[1],
            "forward over reverse": jax.jvp(gradient, args, along)[1],
            "reverse over forward": jax.grad(slope, (0, 1, 2))(*args),
            "reverse over reverse": jax.grad(
                lambda *args: sum(map(jnp.vdot, gradient(*args), along)), (0, 1, 2)
            )(*args),
        }  # fmt: skip

    return derivatives


@pytest.mark.parametrize("name", ["gelu", "layer_norm", "add_rms_norm", "swiglu", "softmax", *PRODUCTS])
def test_derivatives_of_any_mode_of_a_batch(name):
    """x and b are mapped, w is shared."""
    x, w, b = arrays()
    batch = (jnp.stack([x, 2 * x, x - 1]), w, jnp.stack([b, b + 1, -b], 1))
    derivatives = map(_derivatives, {**FUNCTIONS, **PRODUCTS}[name])
    close(*(jax.jit(jax.vmap(f, (0, None, 1)))(*batch) for f in derivatives))


_A, _B, _IMAGES = jnp.arange(12.0).reshape(3, 4), jnp.cos(jnp.arange(20.0)).reshape(4, 5), jnp.ones((1, 2, 4, 4))
LINEAR = {
    "add": (lambda a: ours.add(a, a), _A),
    "add alpha": (lambda a: ours.add(_A, a, alpha=3), _A),
    "add broadcast": (lambda a: ours.add(jnp.zeros((3, 4)), a), _A[0]),
    "matmul a": (lambda a: ours.matmul(a, _B), _A),
    "matmul b": (lambda b: ours.matmul(_A, b), _B),
    "linear x": (lambda x: ours.linear(x, _B.T), _A),
    "linear weight": (lambda w: ours.linear(_A, w), _B.T),
    "linear bias": (lambda b: ours.linear(jnp.zeros((3, 4)), _B.T, b), _B[0]),
    "conv2d x": (lambda x: ours.conv2d(x, jnp.cos(jnp.arange(24.0)).reshape(3, 2, 2, 2)), _IMAGES),
    "rope x": (lambda x: ours.rope(x, _A[:, :2], _B[:3, :2]), _A[None, :, None]),
    "qkv_rope qkv": (lambda x: ours.qkv_rope(x, _A[:, :2], _B[:3, :2], 1)[1], jnp.tile(_A, (1, 1, 3))),
}


@pytest.mark.parametrize("name", LINEAR)
def test_transpose_of_a_linear_operator(name):
    """Alone, and in the tangent of a rule of others."""
    function, x = LINEAR[name]
    dy = jnp.sin(jnp.arange(float(function(x).size))).reshape(function(x).shape)
    expected = jax.vjp(function, x)[1](dy)
    close(jax.linear_transpose(function, x)(dy), expected)
    twice = jax.linear_transpose(jax.vmap(function), jnp.stack([x, x]))(jnp.stack([dy, -dy]))
    close(twice, jax.tree.map(lambda t: jnp.stack([t, -t]), expected))

    @jax.custom_jvp
    def others(x):
        return function(x)

    others.defjvp(lambda primals, tangents: (function(*primals), function(*tangents) - function(0 * x)))
    close(jax.vjp(jax.jit(others), x)[1](dy), expected)


def test_what_is_not_linear_has_no_transpose():
    for name, function, slots in (
        ("gelu", ours.gelu, "x"),
        ("matmul", lambda x: ours.matmul(x, x.T), "a and b"),
        ("linear", lambda x: ours.linear(x, x, activation="relu"), "x and weight"),
        ("layer_norm", lambda x: ours.layer_norm(x, 4), "x"),
    ):
        with pytest.raises(NotImplementedError, match=f"{name} has no transpose: it is not linear in {slots}"):
            jax.linear_transpose(function, _A)(function(_A))


def test_a_program_of_a_tangent_alone():
    """Nothing but the tangent of a gradient is left of it, which JAX lowers without asking for devices."""
    a, b = jnp.ones((2, 3)), jnp.ones((3, 2))
    assert not jax.jit(jax.hessian(lambda a: ours.matmul(a, b).sum()))(a).any()


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.has_gradient])
def test_second_order_of_an_operator(name):
    """By finite differences, for each floating input, in each combination of modes."""
    index = first_case(name)
    given = {slot: None if x is None else jnp.asarray(x) for slot, x in inputs(name, index, "float64").items()}
    floating = {s: x for s, x in given.items() if x is not None and jnp.issubdtype(x.dtype, jnp.floating)}
    attrs = CASES[name].cases[index].attrs

    @jax.jit
    def function(floating):
        results = getattr(ours, name)(**{**given, **floating}, **attrs)
        return [y for y in jax.tree.leaves(results) if jnp.issubdtype(y.dtype, jnp.floating)]

    check_grads(function, (floating,), order=2, modes=["fwd", "rev"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["layer_norm", "matmul", "cross_entropy"])
def test_second_order_of_control_flow(name):
    """scan and checkpoint in reverse mode, twice; while_loop in forward mode."""

    def second(f):
        def total(x, w, b):
            def step(x, scale):
                x = x * scale + 0.1 * jnp.sin(jax.checkpoint(f)(x, w, b)).sum()
                return x, x.sum()

            return jax.lax.scan(step, x, jnp.array([1.0, 0.5]))[1].sum()

        def loop(x):
            return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, x * f(s[1], w, b).mean()), (0, x))[1]

        x, w, b = arrays()
        twice = jax.grad(lambda x: (jax.grad(total)(x, w, b) ** 2).sum())(x)
        return twice, jax.jvp(jax.grad(total, 1), (x, w, b), (x, b, w))[1], jax.jvp(loop, (x,), (x,))

    close(*(jax.jit(second, static_argnums=0)(f) for f in {**FUNCTIONS, **PRODUCTS}[name]))


def test_hessians_without_jit():
    function, reference = FUNCTIONS["softmax"]
    close(*(jax.hessian(loss(f))(*arrays()) for f in (function, reference)))
    close(*(jax.jacfwd(f, (0, 1))(*arrays()) for f in (function, reference)))


def test_sixteen_bits_have_derivatives_of_their_dtype():
    x, w, b = (a.astype(jnp.bfloat16) for a in arrays())

    def function(x):
        return ours.linear(ours.layer_norm(ours.gelu(x), 6, w, b), jnp.outer(w, w), b, "silu").sum()

    for derivative in (jax.grad(function), lambda x: jax.jvp(jax.grad(function), (x,), (x,))[1]):
        assert derivative(x).dtype == jnp.bfloat16
    assert jax.jvp(function, (x,), (x,))[1].dtype == jnp.bfloat16


def test_what_states_no_derivative_says_so_by_name():
    op = OPS["gelu"]
    gelu = function_of(replace(op, backward=replace(op.backward, formula=None)), __name__)
    x = arrays()[0]
    close(jax.grad(loss(gelu))(x), jax.grad(loss(ours.gelu))(x))
    for derivative in (lambda f: jax.jvp(f, (x,), (x,)), lambda f: jax.jit(jax.jacfwd(f))(x)):
        with pytest.raises(TypeError, match=r"^gelu has no derivative in forward mode"):
            derivative(gelu)
    with pytest.raises(NotImplementedError, match=r"^gelu_backward has no gradient"):
        jax.grad(lambda x: jax.grad(loss(gelu))(x).sum())(x)
    none = function_of(replace(op, backward=None, formula=None), __name__)
    with pytest.raises(NotImplementedError, match=r"^gelu has no gradient"):
        jax.grad(loss(none))(x)


def test_integers_have_gradients_of_float0():
    x, target = arrays()[0], jnp.array([1, 5, 0, 2])
    nothing = np.zeros(target.shape, jax.dtypes.float0)
    dx, dtarget = jax.grad(ours.cross_entropy, (0, 1), allow_int=True)(x, target)
    assert (dtarget.dtype, dtarget.shape) == (jax.dtypes.float0, target.shape)
    moved = jax.jvp(ours.cross_entropy, (x, target), (x, nothing))[1]
    close(moved, jnp.vdot(dx, x))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_add_is_differentiated_in_any_mode_and_order(jit):
    x, w, _ = arrays()
    pairs = [(jit(ours.add), jnp.add), (jit(jax.vmap(ours.add, (0, None))), jax.vmap(jnp.add, (0, None)))]
    for function, reference in pairs:
        close(*(jax.jvp(f, (x, w), (w + x, x[0])) for f in (function, reference)))
        close(*(jax.jvp(lambda x, f=f: f(x, w), (x,), (w + x,)) for f in (function, reference)))
        close(*(jax.vmap(lambda t, f=f: jax.jvp(f, (x, w), (t, w))[1])(x[:, None] * x) for f in (function, reference)))
        cubes = [lambda x, f=f: (f(x * x, w) ** 3).sum() for f in (function, reference)]
        close(*(jax.hessian(c)(x) for c in cubes))
        close(*(jax.grad(lambda x, c=c: jax.grad(lambda x: jax.grad(c)(x).sum())(x).sum())(x) for c in cubes))
    check_grads(ours.add, (x, w), order=3)


def test_add_with_alpha_and_a_number_is_differentiated_in_any_mode_and_order():
    x, w, _ = arrays()

    def mine(x, w):
        return ours.add(ours.add(x * x, w, 0.1), 0.7, -3) ** 3

    def theirs(x, w):
        return (x * x + 0.1 * w - 3 * 0.7) ** 3

    for pair in ((mine, theirs), [jax.vmap(f, (0, None)) for f in (mine, theirs)]):
        close(*(jax.jit(f)(x, w) for f in pair))
        close(*(jax.jit(lambda *a, f=f: jax.jvp(f, (x, w), a))(w + x, x[0]) for f in pair))
        close(*(jax.jit(jax.hessian(lambda *a, f=f: f(*a).sum(), (0, 1)))(x, w) for f in pair))
    check_grads(jax.jit(mine), (x, w), order=2)
    close(*(jax.grad(lambda w, f=f: f(x, w).sum())(w) for f in (mine, theirs)))  # each operator alone
    half = jnp.ones(3, jnp.bfloat16)
    dy = jax.vjp(lambda b: ours.add(half, b, 0.1), half)[1](half)[0]
    assert dy.dtype == jnp.bfloat16
    close(dy, jnp.bfloat16(0.1) * half)
    with pytest.raises(TypeError, match=r"^add: alpha is .* traced, expected a constant"):
        jax.jit(ours.add)(x, x, 2.0)
    close(jax.jit(ours.add)(x, 2.0), x + 2)  # a traced number is an array


@EACH
def test_control_flow(name):
    function, reference = FUNCTIONS[name]
    x, w, b = arrays()

    def run(f):
        def step(carry, row):
            y = jax.lax.cond(row > 1, lambda: f(carry, w, b), lambda: carry * 0.5)
            return y, y.sum()

        return lambda x: jax.lax.scan(step, x, jnp.arange(4))

    close(run(function)(x), run(reference)(x))
    grads = [jax.grad(lambda x, f=f: (run(f)(x)[0] ** 2).sum())(x) for f in (function, reference)]
    close(*grads)
    remat = [jax.grad(lambda x, f=f: (jax.checkpoint(f)(x, w, b) ** 2).sum())(x) for f in (function, reference)]
    close(*remat)


def test_vmap_of_examples_without_axes():
    """softmax of a number is 1, whichever axis it is asked for: vmap's is not among them."""
    xs, ones = jnp.array([1.0, 2.0, 3.0]), jnp.ones(3)
    close(jax.vmap(lambda v: ours.softmax(v, 0))(xs), ones)
    close(jax.vmap(jax.grad(lambda v: ours.softmax(v, 0)))(xs), 0 * ones)


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.array, jnp.array], ids=["int64", "int32", "numpy", "jax"])
def test_an_axis_that_is_another_kind_of_integer(integer):
    x, _, _ = arrays()
    for dim in (0, 1, -1):
        close(ours.softmax(x, integer(dim)), jax.nn.softmax(x, dim))
    close(jax.vmap(lambda v: ours.softmax(v, integer(0)))(x), jax.nn.softmax(x, 1))


def test_what_an_attribute_may_be_does_not_depend_on_what_was_called_before():
    """To a cache 1, 1.0 and True are one."""
    x, _, _ = arrays()
    image, weight = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 2, 2))
    for _ in range(2):
        ours.softmax(x, 1)
        ours.conv2d(image, weight, stride=1)
        for value in (1.0, True, 1 + 0j):
            with pytest.raises(TypeError, match=r"^softmax: dim is "):
                ours.softmax(x, value)
            with pytest.raises(TypeError, match=r"^conv2d: stride is "):
                ours.conv2d(image, weight, stride=value)


def test_attributes_are_constants():
    x, _, _ = arrays()
    traced = {
        "softmax": lambda n: ours.softmax(x, n),
        "layer_norm": lambda n: ours.layer_norm(x, n),
        "rms_norm": lambda n: ours.rms_norm(x, 6, eps=n),
    }
    for name, function in traced.items():
        with pytest.raises(TypeError, match=rf"^{name}: \w+ is .*, which is traced, expected a constant"):
            jax.jit(function)(1)


def test_masked_arrays():
    with pytest.raises(TypeError, match=r"^add: b is a MaskedArray"):
        ours.add(np.ones(2), np.ma.masked_array(np.ones(2), [True, False]))


@pytest.mark.parametrize("name", OPS)
def test_functions_are_pickled(name):
    function = getattr(ours, name)
    assert pickle.loads(pickle.dumps(function)) is function


@EACH
def test_custom_call_is_in_the_program(name):
    """The compiled program has the library's kernel, and no formula."""
    assert ours.TARGET in jax.jit(FUNCTIONS[name][0]).lower(*arrays()).as_text()


def test_a_gradient_nobody_wants_is_not_computed():
    """x and the weight only: XLA is asked for no dbias. With no gradient of a parameter there is no workspace."""
    x, w, b = arrays()
    text = jax.jit(jax.grad(lambda x: loss(ours.gelu)(x))).lower(x).as_text()
    assert text.count(ours.TARGET) == 2
    function = jax.jit(lambda x: ours.layer_norm(x, 6, w, b))
    assert function.lower(x).as_text().count(ours.TARGET) == 1


@EACH
def test_shape_evaluation_and_abstract_shapes(name):
    function = FUNCTIONS[name][0]
    shape = jax.eval_shape(function, *arrays())
    assert (shape.shape, shape.dtype) == ((4, 6), jnp.float64)


@EACH
def test_export(name):
    """A program saved here runs where the custom call is registered; its number of rows is still open."""
    from jax import export

    function, reference = FUNCTIONS[name]
    x, w, b = arrays()
    (rows,) = export.symbolic_shape("rows")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in (ours.TARGET, ours.SCRATCH_TARGET)]
    for first in (x.shape, (rows, 6)):
        specs = [jax.ShapeDtypeStruct(s, jnp.float64) for s in (first, (6,), (6,))]
        loaded = export.export(jax.jit(function), disabled_checks=checks)(*specs)
        if find_spec("flatbuffers"):  # what JAX serializes with
            loaded = export.deserialize(loaded.serialize())
        close(loaded.call(x, w, b), reference(x, w, b))
    close(loaded.call(x[:3], w, b), reference(x[:3], w, b))


def _exported(function, shapes, constraints=()):
    """Exported for axes that are named, and called on arrays of these lengths."""
    from jax import export

    scope = export.SymbolicScope(constraints)
    specs = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), jnp.float64) for s in shapes]
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in (ours.TARGET, ours.SCRATCH_TARGET)]
    return export.export(jax.jit(function), disabled_checks=checks)(*specs).call


@EACH
def test_export_of_gradients(name):
    """Workspaces whose sizes depend on the number of rows are allocated when the program runs."""
    function, reference = FUNCTIONS[name]
    ours_, theirs = (jax.grad(loss(f), (0, 1, 2)) for f in (function, reference))
    exported = _exported(ours_, ("rows, 6", "6", "6"))
    for rows in (1, 4, 700):
        x, w, b = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, 6))), *arrays()[1:]
        for mine, its in zip(exported(x, w, b), theirs(x, w, b), strict=True):
            close(mine, its)


def test_export_of_second_order():
    """A product of the Hessian and a vector, of any number of rows."""
    product = (
        lambda x, w, f=f: jax.jvp(jax.grad(loss(lambda x: f(x, w, w))), (x,), (x,))[1] for f in PRODUCTS["linear_gelu"]
    )
    ours_, theirs = product
    exported = _exported(ours_, ("rows, 6", "6"))
    for rows in (1, 9):
        x, w = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, 6))), arrays()[1]
        close(exported(x, w), theirs(x, w))


def test_export_of_attention_of_any_batch_and_lengths():
    def call(q, k, v, bias):
        return ours.attention(q, k, v, bias=bias, causal=True, softcap=3.0)

    gradients = jax.grad(lambda *args: jnp.sin(call(*args)).sum(), (0, 1, 2, 3))
    shapes = ("b, n, 4, 8", "b, m, 2, 8", "b, m, 2, 6", "4, 1, m")
    exported = [_exported(f, shapes) for f in (call, gradients)]
    for batch, queries, keys in ((1, 1, 1), (2, 5, 7), (3, 140, 131)):
        random = np.random.default_rng(batch)
        sizes = ((batch, queries, 4, 8), (batch, keys, 2, 8), (batch, keys, 2, 6), (4, 1, keys))
        args = [random.normal(size=shape) for shape in sizes]
        jax.tree.map(close, [f(*args) for f in exported], [f(*args) for f in (call, gradients)])


def test_export_of_a_product_whose_gradient_needs_a_workspace():
    """b is broadcast over the batch, and its gradient summed over it."""

    def product(a, b):
        return ours.matmul(a, b, transpose_a=True).sum()

    gradients = _exported(jax.grad(product, (0, 1)), ("n, k, m", "k, o"))
    random = np.random.default_rng(0)
    for n, k, m, o in ((1, 3, 2, 5), (4, 70, 3, 2)):
        a, b = random.normal(size=(n, k, m)), random.normal(size=(k, o))
        da, db = gradients(a, b)
        close(da, jnp.broadcast_to(b.sum(1)[None, :, None], a.shape))
        close(db, jnp.broadcast_to(a.sum((0, 2))[:, None], b.shape))


def test_export_of_a_loss_of_any_number_of_classes():
    target = jnp.array([0, 1, 1])

    def call(x, weight, bias):
        return ours.linear_cross_entropy(x, weight, target, bias)

    def theirs(x, weight, bias):
        return -jax.nn.log_softmax(x @ weight.T + bias)[jnp.arange(3), target].mean()

    exported = [_exported(f, ("3, 4", "c, 4", "c")) for f in (call, jax.grad(call, (0, 1, 2)))]
    for classes in (2, 8, 4096, 5001):
        random = np.random.default_rng(classes)
        args = [random.normal(size=shape) for shape in ((3, 4), (classes, 4), classes)]
        jax.tree.map(close, [f(*args) for f in exported], [f(*args) for f in (theirs, jax.grad(theirs, (0, 1, 2)))])


CONVOLUTIONS = {
    "image": (("n, 3, h, w", "4, 3, 3, 2"), ("h >= 3", "w >= 2"), {}),
    "image_and_kernel": (("n, c, h, w", "o, c, k, l"), ("h >= k", "w >= l"), {}),
    "padded": (("n, 3, h, w", "4, 3, 3, 2"), (), {"padding": 1}),
    "strided": (("3, h, w", "4, 3, 3, 2"), ("h >= 3", "w >= 2"), {"stride": (2, 3)}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_export_of_convolutions_of_images_of_any_size(name):
    """Where the shapes' constraints say that the kernel fits: value and gradients."""
    shapes, constraints, attrs = CONVOLUTIONS[name]

    def function(x, w):
        return ours.conv2d(x, w, **attrs)

    gradients = jax.grad(loss(function), (0, 1))
    forward, backward = (_exported(f, shapes, constraints) for f in (function, gradients))
    random = np.random.default_rng(0)
    for image in ((2, 3, 9, 8), (1, 3, 3, 2), (5, 3, 40, 17)):
        x, w = random.normal(size=image if "n" in shapes[0] else image[1:]), random.normal(size=(4, 3, 3, 2))
        close(forward(x, w), function(x, w))
        close(backward(x, w), gradients(x, w))


def test_export_of_what_may_not_fit():
    with pytest.raises(ValueError, match=r"^conv2d: .*'h - 2' >= '1' is inconclusive: .* constraint"):
        _exported(ours.conv2d, ("n, 3, h, w", "4, 3, 3, 3"))


NORMS = [name for name, op in OPS.items() if "normalized_shape" in op.attrs]


@pytest.mark.parametrize("name", NORMS)
def test_export_of_a_norm_over_an_axis_of_unknown_length(name):
    function = getattr(ours, name)

    def norm(x):
        return function(x, x, x.shape[-1]) if "residual" in OPS[name].inputs else function(x, x.shape[-1])

    with pytest.raises(TypeError, match=rf"^{name}: normalized_shape is \(d,\), which is symbolic"):
        _exported(norm, ("n, d",))


def test_devices_and_shard_map(python):
    """Over several devices: sharded by rows, with and without shard_map."""
    program = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from aotops.frontends import jax as ours
assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()), ("rows",))
x = jnp.arange(48.0).reshape(8, 6) ** 1.5
w, b = jnp.linspace(0, 1, 6), jnp.ones(6)
def loss(x, w, b):
    return (ours.gelu(ours.layer_norm(x, 6, w, b)) ** 2).sum()
expected = jax.grad(loss, (0, 1, 2))(x, w, b)
sharded = jax.device_put(x, NamedSharding(mesh, P("rows")))
got = jax.jit(jax.grad(loss, (0, 1, 2)))(sharded, w, b)
try:
    shard_map = jax.shard_map
except AttributeError:
    from jax.experimental.shard_map import shard_map
def local(x, w, b):
    return jax.lax.psum(loss(x, w, b), "rows")
total = shard_map(local, mesh=mesh, in_specs=(P("rows"), P(), P()), out_specs=P())
mapped = jax.grad(total, (0, 1, 2))(sharded, w, b)
for a, c, e in zip(got, mapped, expected):
    np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(c, e, rtol=1e-4, atol=1e-5)
expected = jax.jvp(jax.grad(loss, (0, 1, 2)), (x, w, b), (x, b, w))[1]
mapped = jax.jvp(jax.grad(total, (0, 1, 2)), (sharded, w, b), (sharded, b, w))[1]
twice = jax.grad(lambda x: (jax.grad(total)(x, w, b) ** 2).sum())(sharded)
for c, e in zip((*mapped, twice), (*expected, jax.grad(lambda x: (jax.grad(loss)(x, w, b) ** 2).sum())(x))):
    np.testing.assert_allclose(c, e, rtol=1e-3, atol=1e-3)
parts = jax.pmap(jax.grad(loss), in_axes=(0, None, None))(x.reshape(4, 2, 6), w, b)
np.testing.assert_allclose(parts.reshape(8, 6), jax.grad(loss)(x, w, b), rtol=1e-4, atol=1e-5)
print("agree")
"""
    said = python(program, XLA_FLAGS="--xla_force_host_platform_device_count=4", JAX_PLATFORMS="cpu")
    assert said.split()[-1] == "agree"


def test_without_x64(python):
    """JAX's default: float32, and no float64 anywhere."""
    program = """
import jax, jax.numpy as jnp
from aotops.frontends import jax as ours
x = jnp.arange(12.0).reshape(3, 4)
y, dx = jax.value_and_grad(lambda x: (ours.layer_norm(x, 4, jnp.ones(4)) * x).sum())(x)
print(y.dtype, dx.dtype, "f64" in jax.jit(ours.gelu).lower(x).as_text())
"""
    assert python(program).split()[-3:] == ["float32", "float32", "False"]


def test_importing_the_frontend_leaves_jax_alone(python):
    """The custom call is registered when it is first wanted: a refused one takes JAX down."""
    program = """
from aotops.frontends import jax as ours
import jax, jax.numpy as jnp
print(float(jnp.ones(3).sum()))
"""
    assert python(program, AOTOPS_LIBRARY="/nowhere/libaotops.so").split()[-1] == "3.0"


def test_python_numbers_and_numpy_arrays():
    """As jax.numpy takes them, weakly typed."""
    x = jnp.ones(3, jnp.float32)
    close(ours.add(x, np.ones(3, np.float32)), x + 1)
    assert ours.gelu(np.ones(3, np.float32)).dtype == jnp.float32


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy(reduction):
    """A target is an integer: it is mapped, traced and closed over, and has no gradient."""
    x, target = arrays()[0], jnp.array([1, 5, 0, 2])

    def reference(x, target):
        losses = -jnp.take_along_axis(jax.nn.log_softmax(x), target[..., None], -1)[..., 0]
        return losses if reduction == "none" else getattr(losses, reduction)()

    def function(x, target):
        return ours.cross_entropy(x, target, reduction=reduction)

    xs, targets = jnp.stack([x, 2 * x, x - 1]), jnp.stack([target, target[::-1], target])
    grads = [jax.grad(loss(f)) for f in (function, reference)]
    close(*(f(x, target) for f in (function, reference)))
    close(*(jax.jit(g)(x, target) for g in grads))
    close(*(jax.vmap(g)(xs, targets) for g in grads))
    close(*(jax.vmap(g, (0, None))(xs, target) for g in grads))
    close(*(jax.vmap(g, (None, 0))(x, targets) for g in grads))
    close(*(jax.vmap(g)(xs, targets.astype(jnp.int32)) for g in grads))


def test_donated_inputs():
    x, w, b = arrays()
    expected = _layer_norm(x, w, b)
    given = x + 0
    close(jax.jit(lambda x: ours.layer_norm(x, 6, w, b), donate_argnums=0)(given), expected)
    assert given.is_deleted()


def _calls(function, *args):
    """How often each entry is called by the program."""
    return Counter(re.findall(r'entry = "aot_(\w+)"', jax.jit(function).lower(*args).compile().as_text()))


def _operators(jaxpr):
    """The operators of a program, before XLA, which on the CPU merges what checkpoint computes again."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "aotops":
            yield equation.params["call"].op.name
        else:
            for value in equation.params.values():
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    yield from _operators(getattr(value, "jaxpr", value))


def test_checkpoint_policies_know_outputs_by_name():
    """A saved residual is not computed again for the gradient."""
    x, w, b = arrays()

    def gradient(*names):
        def block(x, w, b):
            return jnp.sin(ours.gelu(ours.layer_norm(x, 6, w, b))).sum()

        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return jax.grad(jax.checkpoint(block, policy=policy), (0, 1, 2))

    expected = gradient()(x, w, b)
    for names, norms, gelus in (
        ((), 2, 2),
        (("aotops.layer_norm",), 1, 2),
        (("aotops.layer_norm", "aotops.gelu"), 1, 1),
    ):
        calls = Counter(_operators(jax.make_jaxpr(gradient(*names))(x, w, b).jaxpr))
        assert (calls["layer_norm"], calls["gelu"]) == (norms, gelus), names
        assert calls["layer_norm_backward"] == calls["gelu_backward"] == 1
        close(gradient(*names)(x, w, b), expected)


def test_gradients_are_computed_by_kernels_and_no_others_than_asked_for():
    """A frozen layer has no dweight, and in forward mode products are products of ours."""
    x, w, b = arrays()
    weight = jnp.outer(w, b)

    def block(x):
        return ours.linear(ours.layer_norm(x, 6, w, b), weight, b).sum()

    assert _calls(jax.grad(block), x) == {"layer_norm": 1, "linear_backward": 1, "layer_norm_backward": 1}
    (dx,) = re.findall(r"custom_call @aotops.*linear_backward.*-> (.*)", jax.jit(jax.grad(block)).lower(x).as_text())
    assert "tensor<6x6xf64>" not in dx
    assert _calls(lambda x: jax.jvp(lambda x: ours.linear(x, weight), (x,), (x,)), x) == {"linear": 2}


def test_threads():
    """Several threads dispatch at once."""
    x, w, b = arrays()
    function = jax.jit(lambda x: ours.layer_norm(ours.gelu(x), 6, w, b))
    expected = _layer_norm(jax.nn.gelu(x, approximate=False), w, b)

    def work(i):
        return sum(not np.allclose(function(x), expected) for _ in range(100))

    assert race(work) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_devices_of_one_process(name):
    if not any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("jax finds no GPU")
    function = jax.jit(FUNCTIONS[name][0])
    here = function(*jax.device_put(arrays(), jax.devices("cpu")[0]))
    there = function(*jax.device_put(arrays(), jax.devices("gpu")[0]))
    close(np.asarray(here), np.asarray(there))


def test_lltm_module():
    cell = ours.LLTM(32, 128)
    parameters = cell.init(jax.random.key(0))
    assert {name: p.shape for name, p in parameters.items()} == {"weights": (384, 160), "bias": (1, 384)}
    assert all(0.9 < abs(p).max() * 128**0.5 <= 1 for p in parameters.values())
    random = np.random.default_rng(0)
    x, h, c = (jnp.asarray(random.normal(size=(16, n)), jnp.float32) for n in (32, 128, 128))
    expected = _lltm(x, parameters["weights"], parameters["bias"], h, c)
    got = jax.jit(cell.apply)(parameters, x, (h, c))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


@pytest.mark.parametrize("environment", [{}, {"AOTOPS_THREADS": "own"}], ids=["openmp", "own"])
def test_subnormal_numbers_are_kept(python, environment):
    """XLA's thread flushes them to zero, and so would the threads that the first call starts, in all later calls."""
    program = (
        "import numpy as np, jax\n"
        "from aotops.frontends import jax as ours, numpy as arrays\n"
        "x = np.full(1 << 20, 1e-39, np.float32)\n"
        "print((np.asarray(jax.jit(ours.add)(x, x)) == x + x).all(), (arrays.add(x, x) == x + x).all())"
    )
    assert python(program, OMP_NUM_THREADS="2", JAX_PLATFORMS="cpu", **environment).split() == ["True", "True"]
