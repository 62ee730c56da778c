"""The norms with tensors of two dtypes: what the table's tolerances, those of the narrower one, do not show."""

from __future__ import annotations

import numpy as np
import pytest

from aotops.infer import infer
from aotops.ops import OPS
from aotops.spec import TensorSpec
from aotops.testing.frameworks import requested
from aotops.testing.tolerances import PRECISION, STEPS

NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
SHAPE, LINES = (2, 5, 3, 8), (3, 8)
EPS, OFFSET = 1e-5, 1.0


def needs(frontend: str) -> None:
    if frontend not in requested():
        pytest.skip(f"{frontend} is not under test")


# --------------------------------------------------------------------------------------------------------------- torch


def arguments(name, low, seed=0, dtype=None):
    """x in ``low``, all else in float32; or all in another dtype. By input."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def made(shape, own):
        t = torch.randn(shape, generator=generator).to(own)
        return (t if dtype is None else t.to(dtype)).requires_grad_()

    op = OPS[name]
    shapes = {"x": (SHAPE, low), "residual": (SHAPE, torch.float32)}
    return {slot: made(*shapes.get(slot, (LINES, torch.float32))) for slot in op.inputs}


def called(name, inputs):
    from aotops.frontends import torch as ours

    y = getattr(ours, name)(normalized_shape=8, eps=EPS, weight_offset=OFFSET, **inputs)
    return y if isinstance(y, tuple) else (y,)


def reference(name, inputs):
    """In the inputs' dtype, by torch."""
    import torch

    x, weight = inputs["x"], inputs["weight"] + OFFSET
    h = x + inputs["residual"] if "residual" in inputs else x
    centred = h - h.mean(-1, keepdim=True) if "layer" in name else h
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS) * weight
    y = y + inputs["bias"] if "bias" in inputs else y
    return (y, h) if "residual" in inputs else (y,)


def assert_near(got, expected):
    """Within what a result of got's dtype may be off (tolerances.py)."""
    own = PRECISION[str(got.dtype).removeprefix("torch.")]
    largest = max(1.0, expected.abs().max().item())
    limit = own.result * expected.abs() + STEPS * PRECISION["float32"].work * largest
    assert ((got.double() - expected).abs() <= limit).all()


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NORMS)
def test_results_and_gradients_have_the_digits_of_their_dtypes(name, low):
    needs("torch")
    import torch

    low = getattr(torch, low)
    inputs = arguments(name, low)
    exact = arguments(name, low, dtype=torch.float64)
    exact = {slot: inputs[slot].detach().double().requires_grad_() for slot in exact}
    ys, expected = called(name, inputs), reference(name, exact)
    assert [y.dtype for y in ys] == [low, torch.float32][: len(ys)]
    dys = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(9)).to(y.dtype) for y in ys]
    found = torch.autograd.grad(ys, list(inputs.values()), dys)
    wanted = torch.autograd.grad(expected, list(exact.values()), [dy.double() for dy in dys])
    for got, want in zip((*ys, *found), (*expected, *wanted), strict=True):
        assert_near(got.detach(), want.detach())
    for t, gradient in zip(inputs.values(), found, strict=True):
        assert (gradient.dtype, gradient.shape) == (t.dtype, t.shape)
        once = torch.autograd.grad(called(name, inputs), t, dys)[0]  # its kernel writes no other
        assert torch.equal(once, gradient)


def test_a_gradient_that_two_inputs_share_is_written_once():
    needs("torch")
    import torch

    for low in (torch.float32, torch.bfloat16):
        inputs = arguments("add_rms_norm", low)
        x, residual, *_ = inputs.values()
        dx, dresidual = torch.autograd.grad(called("add_rms_norm", inputs)[0].sum(), (x, residual))
        assert (dx.data_ptr() == dresidual.data_ptr()) == (low == torch.float32)


@pytest.mark.parametrize("name", NORMS)
def test_second_order(name):
    needs("torch")
    import torch

    inputs = arguments(name, torch.float16)
    exact = {slot: t.detach().double().requires_grad_() for slot, t in inputs.items()}

    def penalty(f, given):
        total = sum(y.double().square().sum() for y in f(name, given))
        first = torch.autograd.grad(total, list(given.values()), create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), list(given.values()))

    for (slot, t), got, want in zip(inputs.items(), penalty(called, inputs), penalty(reference, exact), strict=True):
        assert got.dtype == t.dtype
        # the first gradient, of float16, is what is differentiated further
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2 * want.abs().max().item(), msg=slot)


@pytest.mark.parametrize("name", NORMS)
def test_vmap_forward_mode_and_fake_tensors(name):
    needs("torch")
    import torch

    inputs = {slot: t.detach() for slot, t in arguments(name, torch.bfloat16).items()}
    rows = [slot for slot in inputs if slot in ("x", "residual")]
    stacked = {slot: torch.stack([t, 2 * t]) if slot in rows else t for slot, t in inputs.items()}
    axes = ({slot: 0 if slot in rows else None for slot in inputs},)
    each = torch.vmap(lambda given: called(name, given), axes)(stacked)
    for got, want in zip(each, called(name, stacked), strict=True):
        assert torch.equal(got, want)
    _, tangents = torch.func.jvp(lambda given: called(name, given), (inputs,), (inputs,))
    exact = {slot: t.double() for slot, t in inputs.items()}
    _, wanted = torch.func.jvp(lambda given: reference(name, given), (exact,), (exact,))
    for got, want in zip(tangents, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
    tests = ("test_schema", "test_faketensor")
    attrs = ([8], EPS, OFFSET)
    torch.library.opcheck(getattr(torch.ops.aotops, name), (*inputs.values(), *attrs), test_utils=tests)


def test_autocast_casts_nothing_that_a_norm_takes(monkeypatch):
    needs("torch")
    import torch

    from aotops.frontends import torch as ours

    inputs = arguments("add_layer_norm", torch.bfloat16)
    plain = called("add_layer_norm", inputs)
    with torch.autocast("cpu", torch.bfloat16):
        dispatched = torch.ops.aotops.add_layer_norm(*inputs.values(), [8], EPS, OFFSET)
        low = ours.rms_norm(inputs["residual"], 8, inputs["weight"][0].bfloat16())  # refused as it is
        if ours.tensors.READS_TENSORS:
            monkeypatch.setattr(ours.public, "_general", lambda op, *_: pytest.fail("served in Python"))
        within = called("add_layer_norm", inputs)
    for y, one, other in zip(plain, within, dispatched, strict=False):
        assert y.dtype == one.dtype == other.dtype
        assert torch.equal(y, one)
        assert torch.equal(y, other)
    assert low.dtype == torch.float32


def test_modules_have_a_weight_offset():
    needs("torch")
    import torch

    from aotops.frontends import torch as ours

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    for module in (ours.RMSNorm, ours.LayerNorm):
        plain, shifted = module(8), module(8, weight_offset=1.0)
        assert not shifted.weight.any()
        assert plain(x).dtype == torch.bfloat16
        assert torch.equal(plain(x), shifted(x))
        assert set(plain.state_dict()) == set(shifted.state_dict())
        assert "weight_offset=1.0" in repr(shifted)
        assert "weight_offset" not in repr(plain)
        assert torch.equal(torch.nn.Module.type(shifted, torch.bfloat16)(x), plain(x))
        bare = module(8, elementwise_affine=False, weight_offset=1.0)  # as a new one with a weight
        assert torch.equal(bare(x), shifted(x))


# ----------------------------------------------------------------------------------------------------------------- JAX


@pytest.mark.parametrize("name", NORMS)
def test_jax_derivatives(name):
    """A gradient of a gradient under jit, and vmap, of tensors of two dtypes."""
    needs("jax")
    import jax
    import jax.numpy as jnp

    from aotops.frontends import jax as ours

    op, random = OPS[name], np.random.default_rng(0)
    shapes = {"x": (SHAPE, "bfloat16"), "residual": (SHAPE, "float32")}
    inputs = {s: jnp.asarray(random.normal(size=shapes.get(s, (LINES,))[0]), shapes.get(s, (0, "float32"))[1])
              for s in op.inputs}  # fmt: skip

    def run(inputs):
        y = getattr(ours, name)(normalized_shape=8, eps=EPS, weight_offset=OFFSET, **inputs)
        return y if isinstance(y, (tuple, list)) else (y,)

    def total(inputs):
        return sum((y.astype("float32") ** 2).sum() for y in run(inputs))

    def penalty(inputs):
        return sum((g.astype("float32") ** 2).sum() for g in jax.grad(total)(inputs).values())

    found = jax.jit(jax.grad(penalty))(inputs)
    wide = {slot: x.astype("float32") for slot, x in inputs.items()}
    for slot, want in jax.jit(jax.grad(penalty))(wide).items():
        assert found[slot].dtype == inputs[slot].dtype
        np.testing.assert_allclose(found[slot].astype("float32"), want, 5e-2, 5e-2 * np.abs(want).max(), err_msg=slot)
    rows = {slot: 0 if slot in shapes else None for slot in inputs}
    stacked = {slot: jnp.stack([x, 2 * x]) if slot in shapes else x for slot, x in inputs.items()}
    for got, want in zip(jax.vmap(run, (rows,))(stacked), run(stacked), strict=True):
        assert got.dtype == want.dtype
        assert (got == want).all()


# ----------------------------------------------------------------------------------------------------------- MindSpore


def total_of(module):
    def total(x):
        return module(x).sum()

    return total


@pytest.mark.parametrize("mode", ["PyNative", "graph"])
def test_mindspore_modules_leave_their_parameters_wide(mode):
    needs("mindspore")
    import mindspore as ms

    from aotops.frontends import mindspore as ours

    ms.set_context(mode=ms.PYNATIVE_MODE if mode == "PyNative" else ms.GRAPH_MODE)
    x = ms.Tensor(np.random.default_rng(0).normal(size=(4, 8)), ms.float16)
    plain, shifted = ours.RMSNorm(8, 1e-6), ours.RMSNorm(8, 1e-6, weight_offset=1.0)
    assert not shifted.weight.asnumpy().any()
    np.testing.assert_array_equal(plain(x).asnumpy(), shifted(x).asnumpy())
    for module in (shifted, ours.LayerNorm((8,))):
        parameters = module.trainable_params()
        y, (dx, gradients) = ms.value_and_grad(total_of(module), 0, parameters)(x)
        assert (y.dtype, dx.dtype) == (ms.float16, ms.float16)
        assert [g.dtype for g in gradients] == [ms.float32] * len(parameters)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "dtypes", "words"),
    [
        ("rms_norm", ("float32", "bfloat16", None), "rms_norm: weight has dtype bfloat16, expected float32"),
        ("rms_norm", ("bfloat16", "float16", None), "rms_norm: weight has dtype float16, expected bfloat16 or float32"),
        ("layer_norm", ("float16", "float32", "float16"), "layer_norm: bias has dtype float16, expected float32"),
        ("layer_norm", ("float16", None, "float32"), "has dtype float32, expected float16 where there is no weight"),
        ("rms_norm", ("bfloat16", "float32", "bfloat16"), "rms_norm: bias has dtype bfloat16, expected float32"),
        ("rms_norm", ("float16", None, "float32"), "has dtype float32, expected float16 where there is no weight"),
        ("add_rms_norm", ("float32", "float16", None, None), "residual has dtype float16, expected float32"),
        ("add_rms_norm", ("float16", "float64", None, None), "residual has dtype float64, expected float16 or float32"),
    ],
)  # fmt: skip
def test_dtypes_that_are_refused(name, dtypes, words):
    shapes = [(4, 8) if slot in ("x", "residual") else (8,) for slot in OPS[name].inputs]
    specs = tuple(d and TensorSpec(shape, d) for shape, d in zip(shapes, dtypes, strict=True))
    with pytest.raises(TypeError, match=f"{words}$"):
        infer(OPS[name], ((8,), EPS, 0.0), specs)


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        (("float64", "float32"), "dy has dtype float64, expected float16, bfloat16 or float32"),
        (("float32", "float16"), "dy has dtype float32, expected float16"),
    ],
)
def test_dtypes_that_a_backward_refuses(dtypes, words):
    backward = OPS["add_rms_norm"].backward
    dy, h = (TensorSpec((4, 8), dtype) for dtype in dtypes)
    with pytest.raises(TypeError, match=f"add_rms_norm_backward: {words}$"):
        infer(backward, ((8,), EPS, 0.0), (dy, h, h, None, None))
