"""PyTorch: whatever a torch user does to an operator of torch's own."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from contexts import recorded  # noqa: E402
from torch.func import grad, jacrev, vjp, vmap  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch_schema import maskable  # noqa: E402
from aotops.ops import OPS  # noqa: E402
from aotops.testing.cases import CASES, row_samples  # noqa: E402
from aotops.testing.frameworks import race  # noqa: E402

FUNCTIONS = {
    "add": (lambda x, w, b: ours.add(x, x * w), lambda x, w, b: x + x * w),
    "gelu": (lambda x, w, b: ours.gelu(x * w), lambda x, w, b: F.gelu(x * w)),
    "gelu_tanh": (lambda x, w, b: ours.gelu(x + b, "tanh"), lambda x, w, b: F.gelu(x + b, approximate="tanh")),
    "layer_norm": (lambda x, w, b: ours.layer_norm(x, 6, w, b), lambda x, w, b: F.layer_norm(x, (6,), w, b)),
    "layer_norm_weight": (lambda x, w, b: ours.layer_norm(x, 6, w), lambda x, w, b: F.layer_norm(x, (6,), w)),
    "layer_norm_bias": (lambda x, w, b: ours.layer_norm(x, 6, None, b), lambda x, w, b: F.layer_norm(x, (6,), None, b)),
    "layer_norm_plain": (lambda x, w, b: ours.layer_norm(x, (6,)), lambda x, w, b: F.layer_norm(x, (6,))),
}


def _both(results):
    """Of two results, one that needs both."""
    y, h = results
    return y * 2 + h.sin()


def _added(norm):
    """What add_<norm> is, with torch's own."""
    return lambda x, r, *args: (norm(x + r, *args), x + r)


_ADD_LAYER_NORM, _ADD_RMS_NORM = _added(F.layer_norm), _added(F.rms_norm)
FUNCTIONS |= {
    "rms_norm": (lambda x, w, b: ours.rms_norm(x + b, 6, w, 0.1), lambda x, w, b: F.rms_norm(x + b, (6,), w, 0.1)),
    "rms_norm_plain": (lambda x, w, b: ours.rms_norm(x, (6,)), lambda x, w, b: F.rms_norm(x, (6,))),
    "add_layer_norm": (
        lambda x, w, b: _both(ours.add_layer_norm(x, x * b, 6, w, b)),
        lambda x, w, b: _both(_ADD_LAYER_NORM(x, x * b, (6,), w, b)),
    ),
    "add_layer_norm_y": (
        lambda x, w, b: ours.add_layer_norm(x, x * b, 6, w)[0],
        lambda x, w, b: _ADD_LAYER_NORM(x, x * b, (6,), w)[0],
    ),
    "add_rms_norm": (
        lambda x, w, b: _both(ours.add_rms_norm(x, x * b, 6, w)),
        lambda x, w, b: _both(_ADD_RMS_NORM(x, x * b, (6,), w)),
    ),
    "add_rms_norm_h": (
        lambda x, w, b: ours.add_rms_norm(x * w, x * b, 6)[1],
        lambda x, w, b: _ADD_RMS_NORM(x * w, x * b, (6,))[1],
    ),
    "linear": (
        lambda x, w, b: ours.linear(x + b, w.outer(b), w),
        lambda x, w, b: F.linear(x + b, w.outer(b), w),
    ),
    "linear_gelu": (
        lambda x, w, b: ours.linear(x + b, w.outer(b), w, "gelu"),
        lambda x, w, b: F.gelu(F.linear(x + b, w.outer(b), w)),
    ),
    "linear_silu": (
        lambda x, w, b: ours.linear(x + b, w.outer(w), None, "silu"),
        lambda x, w, b: F.silu(F.linear(x + b, w.outer(w))),
    ),
    "matmul": (
        lambda x, w, b: ours.matmul(ours.matmul(x * w, (x + b).mT), x),
        lambda x, w, b: (x * w) @ (x + b).mT @ x,
    ),
    "matmul_broadcast": (
        lambda x, w, b: ours.matmul(x[None] * w, w.outer(b))[0] + ours.matmul(x, torch.stack([w.outer(w)] * 2)).sum(0),
        lambda x, w, b: x * w @ w.outer(b) + 2 * x @ w.outer(w),
    ),
    "swiglu": (lambda x, w, b: ours.swiglu(x * w, x + b), lambda x, w, b: F.silu(x * w) * (x + b)),
    "softmax": (lambda x, w, b: ours.softmax(x * w + b), lambda x, w, b: torch.softmax(x * w + b, -1)),
    "softmax_dim": (lambda x, w, b: ours.softmax(x * w + b, -2), lambda x, w, b: torch.softmax(x * w + b, -2)),
}


lltm_as_written = CASES["lltm"].in_torch(torch, "lltm")


def _lltm_arguments(x, w, b):
    return x, torch.outer(torch.cat([w, b, w]), torch.cat([b, w])), torch.cat([b, w, b])[None], x * w, x - b


FUNCTIONS |= {
    "lltm": (
        lambda x, w, b: _both(ours.lltm(*_lltm_arguments(x, w, b))),
        lambda x, w, b: _both(lltm_as_written(*_lltm_arguments(x, w, b))),
    ),
    "lltm_cell": (
        lambda x, w, b: ours.lltm(*_lltm_arguments(x, w, b))[1],
        lambda x, w, b: lltm_as_written(*_lltm_arguments(x, w, b))[1],
    ),
}
EACH = pytest.mark.parametrize("name", FUNCTIONS)
CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
ON = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.fixture
def xwb():
    return tensors("cpu")


def tensors(where="cpu", dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 6), (6,), (6,)
    made = (torch.randn(s, generator=generator, dtype=torch.float64).to(where, dtype) for s in shapes)
    return tuple(t.requires_grad_(requires_grad) for t in made)


# ---------------------------------------------------------------------------------------------------- custom operators


BACKWARDS = {op.backward.name: op for op in OPS.values() if op.backward}
DISPATCHED = [op.name for op in ours.registered.dispatched]
DIFFERENTIATED_BY_TORCH = {name for name, op in OPS.items() if not op.backward.has_kernel}
"""Their backward has no kernel: a derivative of it is torch's own."""


def samples(name, where):
    """Arguments of torch.ops.aotops.<name>: of the samples of the operator's row, its inputs, or those of its backward,
    residuals kept and not, and all gradients wanted or every second one."""
    op = BACKWARDS.get(name) or OPS[name]
    row = CASES[op.name]
    for case in (*row_samples(op.name).values(), *row.opcheck):
        arrays = case.random(np.random.default_rng(0))
        inputs = {slot: None if x is None else torch.as_tensor(x, device=where) for slot, x in arrays.items()}
        if name == op.name:
            for t in inputs.values():
                if t is not None and t.is_floating_point():
                    t.requires_grad_()
        given, attrs = op.bind(**inputs, **case.attrs)
        attrs = [list(value) if isinstance(value, tuple) else value for value in op.canonical(attrs)]
        if name == op.name:
            yield *given, *attrs
            continue
        results = getattr(torch.ops.aotops, op.name)(*given, *attrs)
        results = results if isinstance(results, (tuple, list)) else (results,)
        known = op.with_aliases(dict(zip((*op.inputs, *op.results), (*given, *results), strict=True)))
        known |= {f"d{y}": torch.randn_like(known[y]) for y in op.outputs}
        for absent in ((), op.residuals) if op.residuals else ((),):
            yield *(None if slot in absent else known[slot] for slot in op.backward.inputs), *attrs
    if name != op.name and (some := maskable(op.backward)):
        yield *(known[slot] for slot in op.backward.inputs), *attrs, [i % 2 == 1 for i in range(len(some))]


@ON
@pytest.mark.parametrize("name", DISPATCHED)
def test_opcheck(name, where):
    for args in samples(name, where):
        torch.library.opcheck(getattr(torch.ops.aotops, name).default, args)


def test_every_kernel_is_a_custom_operator():
    kernels = {op.name for o in OPS.values() for op in (o, o.backward) if op is not None and op.has_kernel}
    assert set(DISPATCHED) == kernels


@ON
@EACH
def test_gradcheck(name, where):
    assert torch.autograd.gradcheck(FUNCTIONS[name][0], tensors(where))


# ------------------------------------------------------------------------------------------------------ as torch's own


@ON
@EACH
def test_as_torch(name, where):
    function, reference = FUNCTIONS[name]
    for kwargs in ({}, {"requires_grad": False}):
        args = tensors(where, **kwargs)
        close(function(*args), reference(*args))


@EACH
@pytest.mark.parametrize("wanted", range(1, 8))
def test_gradients_of_some_inputs(name, wanted):
    """Any of the inputs may want a gradient; the others get none."""
    function, reference = FUNCTIONS[name]
    results = []
    for f in (function, reference):
        args = [t.detach().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate(tensors())]
        y = f(*args)
        if y.requires_grad:
            y.square().sum().backward()
        results.append([y.requires_grad, *(t.grad for t in args)])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        close(a, b)


@EACH
def test_gradient_through_a_non_leaf(name, xwb):
    function, reference = FUNCTIONS[name]
    a, b = (
        torch.autograd.grad((f(xwb[0].exp().mT.contiguous().mT, *xwb[1:]) ** 2).sum(), xwb[0])
        for f in (function, reference)
    )
    close(a, b)


@EACH
def test_gradient_that_is_not_contiguous(name, xwb):
    function, reference = FUNCTIONS[name]
    dy = torch.randn(6, 4, dtype=torch.float64).mT
    for given in (dy, torch.ones((), dtype=torch.float64).expand(4, 6)):
        a, b = (torch.autograd.grad(f(*xwb), xwb[0], given) for f in (function, reference))
        close(a, b)


@ON
@pytest.mark.parametrize(("of_h", "of_cell"), [(torch.sum, torch.sum), (torch.sum, torch.std), (torch.std, torch.sum)])
def test_lltm_of_a_sum(of_h, of_cell, where):
    """The gradient of a sum is one number, which the kernels take as it lies."""
    results = []
    for f in (ours.lltm, lltm_as_written):
        args = tensors(where)
        h, cell = f(*_lltm_arguments(*args))
        results.append(torch.autograd.grad(of_h(h) - 2 * of_cell(cell), args))
    for a, b in zip(*results, strict=True):
        close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
def test_lltm_of_a_large_state():
    """Enough tiles for a device: float32 multiplies in another kernel then."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (3333, 908), (3300, 2008), (3300,), (3333, 1100), (3333, 1100)
    args = [torch.randn(s, generator=generator, device="cuda") * 0.03 for s in shapes]
    results = []
    for f, dtype in ((ours.lltm, torch.float32), (lltm_as_written, torch.float64)):
        given = [t.to(dtype).requires_grad_() for t in args]
        with torch.no_grad():
            alone = f(*given)
        results.append([*alone, *f(*given), *torch.autograd.grad([y.square().sum() for y in f(*given)], given)])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@EACH
def test_modes_without_gradient(name, xwb, mode):
    function, reference = FUNCTIONS[name]
    with mode():
        y = function(*xwb)
        assert not y.requires_grad
        assert y.is_inference() == (mode is torch.inference_mode)
        close(y, reference(*xwb))


@EACH
def test_inference_tensors_outside_their_mode(name):
    """Made in inference mode, used outside: for values, as torch's own."""
    function, reference = FUNCTIONS[name]
    with torch.inference_mode():
        args = tensors(requires_grad=False)
    close(function(*args), reference(*args))


def test_saved_tensors_are_not_kept_beyond_the_graph(xwb):
    x = xwb[0].detach().clone().requires_grad_()
    alive = weakref.ref(x)
    y = ours.layer_norm(x, 6, *xwb[1:])
    y.sum().backward()
    del x, y
    gc.collect()
    assert alive() is None


@EACH
def test_an_input_changed_before_backward_is_noticed(name):
    """Autograd's version counter: no gradient of numbers that have been overwritten. add saves nothing."""
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    z = x * 2
    y = ours.gelu(z) if name.startswith("gelu") else ours.layer_norm(z, 6)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_second_backward_is_refused(xwb):
    y = ours.gelu(xwb[0])
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@EACH
def test_double_backward(name, xwb):
    """Also that of a constant incoming gradient."""
    for of in (torch.square, torch.clone):
        firsts = [torch.autograd.grad(of(f(*xwb)).sum(), xwb[0], create_graph=True)[0] for f in FUNCTIONS[name]]
        second = [torch.autograd.grad((g**2).sum() + xwb[0].sum() + xwb[1].sum(), xwb[:2]) for g in firsts]
        for x, y in zip(*second, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


NEEDS_GATE = pytest.mark.skipif(
    ours.tensors.is_plain is None, reason="this torch has no gate: all calls are dispatched"
)


@ON
@NEEDS_GATE
def test_a_plain_backward_is_a_call_in_c(where, monkeypatch):
    """It computes only the gradients that are wanted. On CUDA it runs on a thread of autograd's own."""
    fallen_back = []
    monkeypatch.setattr(ours.eager, "run_backward", lambda op, *args: fallen_back.append(op.name))
    x = torch.randn(3, 4, 6, 6, device=where, requires_grad=True)
    weight = torch.randn(5, 4, 3, 3, device=where, requires_grad=True)
    eps = torch.rand(()).item()  # attributes that are bound here first, to the function above
    padding = (7, 11)
    for y in (ours.layer_norm(x, 6, None, None, eps), ours.conv2d(x, weight, None, padding=padding)):
        y.backward(torch.ones_like(y))
    assert fallen_back == []
    assert x.grad.shape == x.shape


@NEEDS_GATE
def test_exclusions_of_keys_that_plain_tensors_do_not_have():
    """They change no call: torch 2.11 excludes Named in a backward on CUDA."""
    x, keys = torch.ones(3), torch._C.DispatchKey
    for key, plain in ((keys.Functionalize, True), (keys.AutogradCPU, False)):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            assert ours.tensors.is_plain(x) is plain
            close(ours.gelu(x), F.gelu(x))


@EACH
def test_second_order_transforms(name):
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    for of in (torch.square, torch.sin):
        pairs = [(f, of) for f in FUNCTIONS[name]]
        found = [grad(lambda x, f=f, of=of: grad(lambda x: of(f(x, w, w)).sum())(x).sin().sum())(x) for f, of in pairs]
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@EACH
def test_checkpoint(name, xwb):
    from torch.utils.checkpoint import checkpoint

    function, reference = FUNCTIONS[name]
    (a,) = torch.autograd.grad(checkpoint(function, *xwb, use_reentrant=False).square().sum(), xwb[0])
    (b,) = torch.autograd.grad(reference(*xwb).square().sum(), xwb[0])
    close(a, b)


def test_broadcast_as_torch():
    for a, b in (((3, 1), (1, 4)), ((), (2, 3)), ((2, 1, 3), (0, 3)), ((4,), (4,))):
        results = []
        for f in (ours.add, torch.add):
            x, y = (torch.ones(s, dtype=torch.float64, requires_grad=True) for s in (a, b))
            z = f(x, y)
            (z * torch.arange(z.numel(), dtype=torch.float64).reshape(z.shape)).sum().backward()
            results.append((z, x.grad, y.grad))
        for ours_, theirs in zip(*results, strict=True):
            close(ours_, theirs)


NUMBERS = (2, -0.7, True, np.float64(0.3), 1e300, torch.inf, torch.nan)


@ON
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_add_of_a_number_as_torch(dtype, where):
    """On either side; strided, empty and compiled too. A number is not rounded to the dtype before it is added."""
    x = torch.randn(3, 4, dtype=dtype, device=where)
    functions = ours.add, torch.compile(ours.add, backend="eager", fullgraph=True)
    for value in NUMBERS:
        for alpha in (1, 0.5, -3):
            for t in (x, x.T, x[:, ::2], x[:0]):
                y = ours.add(t, value, alpha=alpha)
                expected = (t.double() + alpha * float(value)).to(dtype)
                torch.testing.assert_close(y, expected, equal_nan=True)
                assert y.stride() == torch.add(t, value, alpha=alpha).stride()
        if value != 1e300:  # which torch's own of float16 refuses to add to
            # torch rounds a first number to the dtype on some devices
            torch.testing.assert_close(ours.add(value, x), (float(value) + x.double()).to(dtype), equal_nan=True)
            torch.testing.assert_close(
                ours.add(value, x, alpha=2), torch.add(x, value / 2) * 2, atol=0.01, rtol=0.01, equal_nan=True
            )
    for f in functions:
        torch.testing.assert_close(f(x, 0.25, alpha=2), x + 0.5)
    if dtype.itemsize == 2:
        tenth = torch.tensor(0.1, dtype=dtype, device=where)
        exact = (-tenth.double() + 0.1).to(dtype)  # what rounding 0.1 loses
        assert exact != 0
        torch.testing.assert_close(ours.add(-tenth, 0.1), exact, rtol=0.01, atol=1e-12)


def test_add_refuses_what_is_no_number():
    x = torch.ones(3, requires_grad=True)
    half = torch.tensor(0.5)
    close(ours.add(x, x, alpha=half), 1.5 * x)
    with pytest.raises(TypeError, match=r"add: alpha is tensor\(0.5.*\), expected a number"):
        ours.add(x, x, alpha=half.requires_grad_())  # the gradient would be lost
    for other in ("1", None, [1.0], np.ones(3), 1j):
        with pytest.raises(TypeError, match=r"^add: b is "):
            ours.add(x, other)
    with pytest.raises(ValueError, match=r"^add: b_number is too large a number"):
        ours.add(x, 10**5000)
    with pytest.raises(TypeError, match=r"^add: a is 2, expected a torch\.Tensor"):
        ours.add(2, 3)


def test_numbers_that_are_one_key_are_one_number():
    """0.0 and -0.0, 1 and True are one to a cache: what a call gives does not depend on which was first."""
    negative = torch.tensor([-0.0])
    for value in (0.0, -0.0, 0, False, 0.0):
        assert not ours.add(negative, value).signbit()
    for value in (1, True, 1.0):
        assert ours.add(negative, value) == 1
    with pytest.raises(TypeError, match="alpha is True"):
        ours.add(negative, negative, alpha=True)


@pytest.mark.parametrize("alpha", [1, 0.3, 0, torch.nan])
def test_add_with_alpha_is_differentiated_as_torchs(alpha):
    """Broadcast, one side alone, twice, by torch.func, compiled, and in 16 bits."""
    args = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 1), (4,))]

    def of(f):
        return lambda a, b: f(f(a * a, b.exp(), alpha=alpha), 0.3, alpha=2).pow(3).sum()

    def differentiated(f):
        first = torch.autograd.grad(f(*args), args, create_graph=True)
        yield from first
        yield from torch.autograd.grad(sum(g.square().sum() for g in first), args)
        yield from (torch.autograd.grad(f(*args), a)[0] for a in args)
        yield from torch.func.jacrev(torch.func.grad(f, (0, 1)), (0, 1))(*args)[1]
        yield vmap(lambda a: torch.func.grad(f, 1)(a, args[1]))(args[0])

    for mine, theirs in zip(differentiated(of(ours.add)), differentiated(of(torch.add)), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    compiled = torch.compile(of(ours.add), backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(*(torch.autograd.grad(f(*args), args) for f in (compiled, of(torch.add))), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    half = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    grads = [torch.autograd.grad(f(half.detach(), half, alpha=alpha), half, half)[0] for f in (ours.add, torch.add)]
    assert grads[0].dtype == torch.bfloat16
    torch.testing.assert_close(*grads, equal_nan=True)


@ON
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@EACH
def test_odd_numbers_as_torch(name, dtype, where):
    """Infinities, NaNs, the largest and the smallest numbers go where torch's own operator lets them go."""
    function, reference = FUNCTIONS[name]
    info = torch.finfo(dtype)
    odd = [torch.inf, -torch.inf, torch.nan, info.max, -info.max, info.tiny, info.smallest_normal / 4, -0.0]
    rows = [[v, 0.5, -1.0, 2.0, 0.25, 1.5] for v in odd]
    x = torch.tensor(rows, dtype=dtype, device=where)
    w, b = torch.ones(6, dtype=dtype, device=where), torch.zeros(6, dtype=dtype, device=where)
    # in float64 on the CPU: torch's float32 gelu(inf) is NaN on some processors, its CUDA rms_norm of a row with an
    # infinity is NaN throughout, where the formula has 0
    got = function(x, w, b).cpu()
    expected = reference(x.double().cpu(), w.double().cpu(), b.double().cpu()).to(dtype)
    if "norm" in name or "lltm" in name:  # squares and sums of info.max overflow, in one way or another
        rest = [i for i, v in enumerate(odd) if abs(v) != info.max]
        got, expected = got[rest], expected[rest]
    tolerance = {
        "rtol": 8 * info.eps,
        "atol": 64 * max(info.eps / 64, 2.0**-24 if dtype != torch.float64 else info.eps),
    }
    torch.testing.assert_close(got, expected, equal_nan=True, **tolerance)


# --------------------------------------------------------------------------------------------------------- transforms


@EACH
def test_func_grad_and_vjp(name):
    function, reference = FUNCTIONS[name]
    args = tensors(requires_grad=False)

    def of(f):
        return grad(lambda *a: f(*a).square().sum(), argnums=(0, 1, 2))(*args)

    for a, b in zip(of(function), of(reference), strict=True):
        close(a, b)
    dy = torch.randn(4, 6, dtype=torch.float64)
    for a, b in zip(vjp(function, *args)[1](dy), vjp(reference, *args)[1](dy), strict=True):
        close(a, b)


@pytest.mark.parametrize(
    "dims", [(0, None, None), (1, None, None), (0, 0, None), (0, None, 0), (None, 0, 0), (-1, 0, 0)], ids=str
)
@EACH
def test_vmap(name, dims):
    function, reference = FUNCTIONS[name]
    base = tensors(requires_grad=False)
    args = [t if d is None else torch.stack([t, t * 2, t - 1], d) for t, d in zip(base, dims, strict=True)]
    close(vmap(function, dims)(*args), vmap(reference, dims)(*args))

    def of(f):
        return vmap(grad(lambda *a: f(*a).square().sum(), argnums=(0, 1, 2)), dims)

    for a, b in zip(of(function)(*args), of(reference)(*args), strict=True):
        close(a, b)


@EACH
def test_vmap_twice_and_per_sample_gradients(name):
    function, reference = FUNCTIONS[name]
    x, w, b = tensors(requires_grad=False)
    xs = torch.stack([torch.stack([x, x + 1]), torch.stack([x * 3, x - 2]), torch.stack([x, -x])])
    close(vmap(vmap(function, (0, None, None)), (0, None, None))(xs, w, b), reference(xs, w, b))

    def of(f):
        return vmap(grad(lambda w, x: f(x, w, b).square().sum()), (None, 0))(w, xs[:, 0])

    close(of(function), of(reference))


@EACH
def test_jacrev(name):
    function, reference = FUNCTIONS[name]
    x, w, b = tensors(requires_grad=False)
    close(jacrev(function)(x, w, b), jacrev(reference)(x, w, b))


def _fresh_compiler():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
@EACH
def test_compile(name, xwb, dynamic):
    function, reference = FUNCTIONS[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (4, 3, 7):
        args = (torch.randn(rows, 6, dtype=torch.float64, requires_grad=True), *xwb[1:])
        results = []
        for f in (compiled, reference):
            y = f(*args)
            results.append((y, *torch.autograd.grad(y.square().sum(), args, materialize_grads=True)))
        for a, e in zip(*results, strict=True):
            close(a, e)


def test_compile_makes_one_graph_for_all_sizes():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(lambda x: ours.layer_norm(ours.gelu(x), x.shape[-1:]), backend=counter, dynamic=True)
    for rows in (3, 4, 5, 9):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(compiled(x), F.layer_norm(F.gelu(x), (6,)))
    assert counter.frame_count == 1


def test_inductor():
    """The default compiler, where it has a C++ compiler to use."""
    import shutil

    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    x, w, b = tensors(dtype=torch.float32)
    compiled = torch.compile(lambda x, w, b: ours.layer_norm(ours.gelu(x) * 2, 6, w, b).sum(), fullgraph=True)
    expected = F.layer_norm(F.gelu(x) * 2, (6,), w, b).sum()
    got = compiled(x, w, b)
    torch.testing.assert_close(got, expected)
    for a, e in zip(torch.autograd.grad(got, (x, w, b)), torch.autograd.grad(expected, (x, w, b)), strict=True):
        torch.testing.assert_close(a, e)


@EACH
def test_export(name):
    function, reference = FUNCTIONS[name]

    class Model(torch.nn.Module):
        def forward(self, x, w, b):
            return function(x, w, b)

    args = tensors(requires_grad=False)
    program = torch.export.export(Model(), args, dynamic_shapes=({0: torch.export.Dim("rows")}, None, None))
    assert "aotops" in str(program.graph)
    more = (torch.randn(9, 6, dtype=torch.float64), *args[1:])
    close(program.module()(*more), reference(*more))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    close(torch.export.load(buffer).module()(*more), reference(*more))


@EACH
def test_fake_and_meta_tensors(name):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    function = FUNCTIONS[name][0]
    args = tensors()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in args]
        y = function(*fake)
        assert isinstance(y, FakeTensor)
        assert (y.shape, y.dtype, y.device.type) == ((4, 6), torch.float64, "cpu")
        y.sum().backward()
    y = function(*(t.detach().to("meta").requires_grad_() for t in args))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (4, 6), torch.float64)
    y.sum().backward()


def test_errors_of_fake_tensors_are_the_same():
    with pytest.raises(ValueError, match=r"layer_norm: x has shape \(2, 3\), expected its trailing axes"):
        ours.layer_norm(torch.empty(2, 3, device="meta"), 4)


def test_export_with_a_dynamic_normalized_axis():
    class Model(torch.nn.Module):
        def forward(self, x, w):
            return ours.layer_norm(x, x.shape[-1:], w) + ours.rms_norm(x, (x.shape[-1],))

    axis = torch.export.Dim("axis")
    program = torch.export.export(Model(), (torch.randn(3, 16), torch.randn(16)), dynamic_shapes=({1: axis}, {0: axis}))
    x, w = torch.randn(3, 20), torch.randn(20)
    torch.testing.assert_close(program.module()(x, w), F.layer_norm(x, (20,), w) + F.rms_norm(x, (20,)))


@EACH
def test_make_fx(name):
    from torch.fx.experimental.proxy_tensor import make_fx

    function, reference = FUNCTIONS[name]
    args = tensors(requires_grad=False)
    graph = make_fx(function)(*args)
    assert "aotops" in graph.code
    close(graph(*(t + 1 for t in args)), reference(*(t + 1 for t in args)))


# --------------------------------------------------------------------------------------- subclasses, modes and autocast


def test_torchs_names_of_arguments():
    """The first two inputs by the names that torch gives them, eagerly and compiled; modules too."""
    x, w = torch.randn(2, 4), torch.randn(3, 4)
    image, kernel, target = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), torch.tensor([1, 2])
    calls = {
        "add": ({"input": x, "other": x, "alpha": 2}, 3 * x),
        "matmul": ({"input": x, "other": w.T}, x @ w.T),
        "gelu": ({"input": x, "approximate": "tanh"}, F.gelu(x, approximate="tanh")),
        "softmax": ({"input": x, "dim": 0}, x.softmax(0)),
        "layer_norm": ({"input": x, "normalized_shape": 4}, F.layer_norm(x, (4,))),
        "linear": ({"input": x, "weight": w}, F.linear(x, w)),
        "conv2d": ({"input": image, "weight": kernel}, F.conv2d(image, kernel)),
        "cross_entropy": ({"input": x, "target": target}, F.cross_entropy(x, target)),
    }
    for name, (arguments, expected) in calls.items():
        function = getattr(ours, name)
        for f in (function, torch.compile(function, backend="eager", fullgraph=True)):
            torch.testing.assert_close(f(**arguments), expected)
    assert ours.Linear(4, 4)(input=x).shape == (2, 4)
    with pytest.raises(TypeError, match=r"cross_entropy: ignore_index is tensor\(.*\), expected an integer"):
        ours.cross_entropy(x, target, torch.ones(4))  # the place of torch's weight


class Logged(torch.Tensor):
    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@EACH
def test_tensor_subclass(name):
    function, reference = FUNCTIONS[name]
    args = tensors(requires_grad=False)
    y = function(args[0].as_subclass(Logged), *args[1:])
    assert type(y) is Logged
    assert any("aotops" in str(f) for f in Logged.seen)
    close(y.as_subclass(torch.Tensor), reference(*args))


@EACH
def test_wrapper_subclass(name):
    """A tensor without memory of its own: its address must not be read."""
    from torch.testing._internal.two_tensor import TwoTensor

    function, reference = FUNCTIONS[name]
    args = tensors(requires_grad=False)
    y = function(TwoTensor(args[0], args[0] + 1), *args[1:])
    close(y.a, reference(*args))
    close(y.b, reference(args[0] + 1, *args[1:]))


@EACH
def test_dispatch_mode_sees_the_operator(name):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    args = tensors(requires_grad=False)
    with Mode():
        y = FUNCTIONS[name][0](*args)
    assert any("aotops" in f for f in seen)
    close(y, FUNCTIONS[name][1](*args))


@ON
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(low, where):
    """A norm takes what others left in a lower precision beside a weight in float32, and its result has x's dtype, as
    torch's on the CPU. gelu and add take what they get."""
    x, w, b = tensors(where, torch.float32, requires_grad=False)
    casts = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")  # torch 2.11 did not yet
    rms_norm = F.rms_norm if casts or where == "cpu" else lambda x, *args: F.rms_norm(x.float(), *args)
    with torch.autocast(where, low):
        for ours_, theirs in (
            (ours.layer_norm(x.to(low), 6, w, b), F.layer_norm(x.to(low), (6,), w, b).to(low)),
            (ours.rms_norm(x.to(low), 6, w), rms_norm(x.to(low), (6,), w).to(low)),
            (ours.layer_norm(x, 6, w.to(low)), F.layer_norm(x, (6,), w.to(low).float())),
            (ours.softmax(x.to(low)), F.softmax(x.to(low), -1)),
            (ours.gelu(x.to(low)), F.gelu(x.to(low))),
            (ours.layer_norm(x.double(), 6), F.layer_norm(x.double(), (6,))),
            (ours.linear(x, w.outer(b), w), F.linear(x, w.outer(b), w)),
            (ours.matmul(x, x.mT), x @ x.mT),
        ):
            assert ours_.dtype == theirs.dtype
            torch.testing.assert_close(ours_, theirs)
        with torch.autocast(where, enabled=False), pytest.raises(TypeError, match="layer_norm: weight has dtype"):
            ours.layer_norm(x, 6, w.to(low))


def test_autocast_gradients():
    results = []
    for f in (ours.layer_norm, F.layer_norm):
        x, w, b = tensors(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            f(x @ torch.ones(6, 6), (6,), w, b).square().sum().backward()
        results.append((x.grad, w.grad, b.grad))
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-2, atol=1e-2)  # the product is bfloat16's


def test_transposed_views_are_not_copied(monkeypatch):
    """The call takes the matrix itself, and says that it lies transposed."""
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    plain = ours.tensors.plain_tensor
    monkeypatch.setattr(
        ours.eager, "plain_tensor", lambda t: plain(t) if t.is_contiguous() else pytest.fail("a copy was made")
    )
    close(ours.matmul(x.mT, x), x.mT @ x)
    close(ours.matmul(x, x.mT), x @ x.mT)
    close(ours.matmul(x, x, transpose_b=True), x @ x.mT)
    close(ours.matmul(x.mT, x.mT, transpose_b=True), x.mT @ x)


@pytest.mark.skipif(not ours.tensors.READS_TENSORS, reason="this torch has no gate: its calls are served in Python")
def test_transposed_views_are_sorted_out_in_c(monkeypatch):
    monkeypatch.setattr(ours.public, "_general", lambda op, *_: pytest.fail("served in Python"))
    x, w = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for f, g in (
        (ours.matmul(x, w.T), x @ w.T),
        (ours.matmul(x.T, w, transpose_b=False), x.T @ w),
        (ours.matmul(x.T, w.T, transpose_a=True), x @ w.T),
        (ours.matmul(a=x, b=w[:1].T.expand(4, 3)[:, :1]), x @ w[:1].T),  # one column is contiguous as it is
    ):
        close(f, g)
        close(torch.autograd.grad(f.square().sum(), (x, w)), torch.autograd.grad(g.square().sum(), (x, w)))
    monkeypatch.undo()
    with pytest.raises(TypeError, match=r"matmul: transpose_b is 1\.5, expected True or False"):
        ours.matmul(x, w.T, transpose_b=1.5)


def test_lazily_conjugated_and_negated_views():
    """A view that only says that it is negated: its memory has the other sign."""
    x = torch.randn(6, dtype=torch.complex128)
    negated = x.conj().imag
    assert negated.is_neg()
    close(ours.gelu(negated), F.gelu(negated.clone()))
    close(ours.add(negated, x.real), negated + x.real)
    z = x.conj().imag.requires_grad_(False).clone().requires_grad_()
    ours.gelu(z).backward(negated)
    assert torch.isfinite(z.grad).all()
    e = z.detach().requires_grad_()
    F.gelu(e).backward(negated)
    close(z.grad, e.grad)


NEGATED = {
    "one element": lambda: torch.randn(1, dtype=torch.complex128).conj().imag,
    "0-dim": lambda: torch.randn((), dtype=torch.complex128).conj().imag,
}


@pytest.mark.parametrize("make", NEGATED.values(), ids=NEGATED)
def test_negated_views_that_are_contiguous(make):
    """Nothing but is_neg() tells them from a plain tensor. With more elements such a view has a stride of 2."""
    x = make()
    assert x.is_contiguous()
    assert x.is_neg()
    close(ours.gelu(x), F.gelu(x.clone()))
    close(ours.add(x, x), 2 * x.clone())


def test_sparse_and_quantized_tensors_are_refused():
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
        ours.gelu(torch.eye(3).to_sparse())
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
        ours.gelu(torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8))


def test_functorch_and_autograd_hooks(xwb):
    seen = []
    xwb[1].register_hook(lambda g: seen.append(g.clone()))
    ours.layer_norm(*xwb[:1], 6, *xwb[1:]).sum().backward()
    assert len(seen) == 1
    close(seen[0], xwb[1].grad)


def test_saved_tensor_hooks(xwb):
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        y = ours.layer_norm(xwb[0], 6, *xwb[1:])
    y.sum().backward()
    assert packed


def test_anomaly_mode(xwb):
    with torch.autograd.detect_anomaly(check_nan=True):
        ours.layer_norm(xwb[0], 6, *xwb[1:]).sum().backward()


def test_parallel_backward_threads(xwb):
    """Autograd runs a GPU's backward on another thread, and users run several of the CPU's."""
    expected = torch.autograd.grad(F.layer_norm(xwb[0], (6,), *xwb[1:]).square().sum(), xwb)

    def work(i):
        wrong = 0
        for _ in range(50):
            got = torch.autograd.grad(ours.layer_norm(xwb[0], 6, *xwb[1:]).square().sum(), xwb)
            wrong += not all(torch.allclose(a, b) for a, b in zip(got, expected, strict=True))
        return wrong

    assert race(work) == 0


# -------------------------------------------------------------------------------------------------- how a call is made


def test_arguments_are_python_s():
    """By position, by name, left out: as ``inspect.signature`` tells, with Python's own errors."""
    x, w, b = tensors()
    expected = F.layer_norm(x, (6,), w, b, 0.1)
    for y in (
        ours.layer_norm(x, 6, w, b, 0.1),
        ours.layer_norm(eps=0.1, bias=b, weight=w, normalized_shape=[6], x=x),
        ours.layer_norm(x, bias=b, normalized_shape=(6,), weight=w, eps=0.1),
        ours.layer_norm(*(x, 6), **{"weight": w, "bias": b, "eps": 0.1}),
    ):
        close(y, expected)
    close(ours.layer_norm(x, 6, bias=b), F.layer_norm(x, (6,), None, b))
    for wrong in (
        lambda f: f(),
        lambda f: f(x),
        lambda f: f(x, 6, w, b, 0.1, 0.0, 1),
        lambda f: f(x, 6, x=x),
        lambda f: f(x, 6, size=3),
    ):
        said = []
        for f in (ours.layer_norm, OPS["layer_norm"].bind):
            with pytest.raises(TypeError) as error:
                wrong(f)
            said.append(str(error.value))
        assert said[0] == said[1]


def test_functions_are_python_s():
    import inspect

    for name, op in OPS.items():
        function = getattr(ours, name)
        assert inspect.isfunction(function)
        own = inspect.signature(op.bind).parameters
        parameters = inspect.signature(function).parameters
        assert [*parameters.values()][: len(own)] == [*own.values()]
        assert {*parameters} - {*own} <= {"out", "dtype", "weight"}
        assert function.__doc__ == op.bind.__doc__
        assert function.__name__ == name


def test_compiled_by_itself():
    """A call that needs no frame has one where the compiler wants to see it."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    x = torch.randn(4, 6, requires_grad=True)
    compiled = torch.compile(ours.gelu, backend=counter, fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), F.gelu(x))
    assert counter.frame_count == 1


def test_attributes_in_turn(xwb):
    """Each set of attributes has its own builtin; equal ones share it, whatever they are written as."""
    x, w, b = xwb
    for _ in range(3):
        for eps in (1e-5, 0.1, 1):
            for shape in (6, (6,), [6], x.shape[-1:]):
                close(ours.layer_norm(x, shape, w, b, eps), F.layer_norm(x, (6,), w, b, eps))
        for dim in (0, -1, 1, -2):
            close(ours.softmax(x, dim), F.softmax(x, dim))
            close(ours.softmax(x[0], 0), F.softmax(x[0], 0))


@ON
def test_shapes_and_dtypes_in_turn(where):
    """Results that are not like an input are of the shape and dtype of this call, and not of the one before."""
    for _ in range(2):
        for rows, dtype in ((3, torch.float32), (5, torch.float64), (5, torch.float32), (0, torch.float64)):
            x, target = scores(where, dtype, rows)
            for kind in ({"reduction": "none"}, {"reduction": "sum"}):
                y, expected = ours.cross_entropy(x, target, **kind), F.cross_entropy(x, target, **kind)
                torch.testing.assert_close(y, expected)
                dx, expected = (torch.autograd.grad(loss.sum(), x)[0] for loss in (y, expected))
                torch.testing.assert_close(dx, expected)


@ON
def test_weights_of_two_axes(where):
    """Their gradients have a model of their own where there is no weight to be like."""
    x = torch.randn(5, 4, 6, device=where, dtype=torch.float64, requires_grad=True)
    w, b = (torch.randn(4, 6, device=where, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for weight in (w, None):
        wanted = (x, b) if weight is None else (x, w, b)
        y, expected = ours.layer_norm(x, (4, 6), weight, b), F.layer_norm(x, (4, 6), weight, b)
        close(y, expected)
        for a, e in zip(*(torch.autograd.grad(z.square().sum(), wanted) for z in (y, expected)), strict=True):
            assert a.is_contiguous()
            close(a, e)


@EACH
def test_a_call_leaves_nothing_behind(name, xwb):
    """Neither references to its arguments nor memory, forward and backward, and also where it is refused."""
    import sys

    function = FUNCTIONS[name][0]
    dy = torch.randn(4, 6, dtype=torch.float64)
    kept = (*xwb, dy)

    def step():
        torch.autograd.grad(function(*xwb), xwb[0], dy, allow_unused=True)
        with torch.no_grad():
            function(*xwb)
        with pytest.raises((TypeError, ValueError)):
            function(*(t.int() for t in xwb))

    step()
    gc.collect()
    before = [sys.getrefcount(t) for t in kept], len(gc.get_objects())
    for _ in range(20):
        step()
    gc.collect()
    assert [sys.getrefcount(t) for t in kept] == before[0]
    assert len(gc.get_objects()) - before[1] < 20


# ------------------------------------------------------------------------------------------------------------- modules

LAYER_NORMS = [
    ((6,), {}),
    ((6,), {"eps": 0.1}),
    (([4, 6],), {}),
    ((6,), {"elementwise_affine": False}),
    ((6,), {"bias": False, "dtype": torch.float64}),
    ((6, 1e-3, True, True, "cpu", torch.bfloat16), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), LAYER_NORMS, ids=str)
def test_layer_norm_module_is_torchs(args, kwargs):
    assert issubclass(ours.LayerNorm, torch.nn.LayerNorm)
    check_module(ours.LayerNorm, torch.nn.LayerNorm, args, kwargs)


def check_module(kind, its, args, kwargs):
    torch.manual_seed(0)
    theirs, mine = its(*args, **kwargs), kind(*args, **kwargs)
    assert [n for n, _ in mine.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
    mine.load_state_dict(theirs.state_dict())
    again = its(*args, **kwargs)
    again.load_state_dict(mine.state_dict())
    dtype = next((p.dtype for p in theirs.parameters()), torch.float32)
    x = torch.randn(3, 4, 6, dtype=dtype, requires_grad=True)
    torch.testing.assert_close(mine(x), theirs(x))
    torch.testing.assert_close(again(x), theirs(x))
    gradients = []
    for module in (mine, theirs):
        module(x).square().sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    # the sum of 12 rows, in bfloat16 of a dy that is itself bfloat16
    kwargs = {"rtol": 0.02, "atol": 0.1} if dtype == torch.bfloat16 else {}
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, **kwargs)
    assert repr(mine) == repr(theirs)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_module(bias):
    check_module(ours.Linear, torch.nn.Linear, (6, 5), {"bias": bias})
    module = ours.Linear(6, 5, bias, dtype=torch.float64, activation="silu")
    x = torch.randn(4, 6, dtype=torch.float64)
    close(module(x), F.silu(F.linear(x, module.weight, module.bias)))
    assert repr(module) == f"Linear(in_features=6, out_features=5, bias={bias}, activation='silu')"


RMS_NORMS = [
    ((6,), {}),
    ((6,), {"eps": 0.1}),
    (([4, 6],), {}),
    ((6,), {"elementwise_affine": False}),
    ((6,), {"dtype": torch.float64}),
    ((6, 1e-3, True, "cpu", torch.bfloat16), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), RMS_NORMS, ids=str)
def test_rms_norm_module_is_torchs(args, kwargs):
    assert issubclass(ours.RMSNorm, torch.nn.RMSNorm)
    check_module(ours.RMSNorm, torch.nn.RMSNorm, args, kwargs)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_module_is_torchs(approximate):
    theirs, mine = torch.nn.GELU(approximate), ours.GELU(approximate=approximate)
    x = torch.randn(3, 5)
    torch.testing.assert_close(mine(x), theirs(x))
    assert repr(mine) == repr(theirs)
    assert mine.state_dict() == theirs.state_dict() == {}


class LltmAsWritten(torch.nn.Module):
    def __init__(self, input_features, state_size):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.empty(3 * state_size, input_features + state_size))
        self.bias = torch.nn.Parameter(torch.empty(1, 3 * state_size))

    def forward(self, input, state):
        return lltm_as_written(input, self.weights, self.bias, *state)


def test_lltm_module_is_the_tutorials():
    torch.manual_seed(0)
    theirs, mine = LltmAsWritten(32, 128), ours.LLTM(32, 128)
    assert all(0.9 < p.abs().max() * 128**0.5 <= 1 for p in mine.parameters())
    theirs.load_state_dict(mine.state_dict())
    x, h, c = (torch.randn(16, n, requires_grad=True) for n in (32, 128, 128))
    gradients = []
    for module in (mine, theirs):
        new_h, new_cell = module(x, (h, c))
        given = [x, h, c, *module.parameters()]
        gradients.append((new_h, new_cell, *torch.autograd.grad(new_h.sin().sum() + new_cell.square().sum(), given)))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert repr(mine) == "LLTM(input_features=32, state_size=128)"
    assert ours.LLTM(3, 5, dtype=torch.float64).bias.dtype == torch.float64


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("shape", [(384,), (1, 384)], ids=str)
def test_lltm_module_loads_the_tutorials_state(shape, assign):
    """Alone and within another module. Its bias is (3 * state,) in the tutorial's text, (1, 3 * state) in its code."""
    theirs, mine = LltmAsWritten(32, 128), torch.nn.Sequential(torch.nn.GELU(), ours.LLTM(32, 128))
    theirs.weights, theirs.bias = (torch.nn.Parameter(torch.randn(s)) for s in ((384, 160), shape))
    state = theirs.state_dict()
    mine[1].load_state_dict(state, assign=assign)
    mine.load_state_dict({f"1.{name}": value for name, value in state.items()}, assign=assign)
    assert state["bias"].shape == shape
    assert {name: p.shape for name, p in mine[1].named_parameters()} == {"weights": (384, 160), "bias": (1, 384)}
    x, h, c = (torch.randn(16, n) for n in (32, 128, 128))
    for a, b in zip(mine[1](x, (h, c)), theirs(x, (h, c)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(383,), (2, 192), (384, 1)], ids=str)
def test_lltm_module_refuses_another_bias(shape):
    state = ours.LLTM(32, 128).state_dict() | {"bias": torch.zeros(shape)}
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        ours.LLTM(32, 128).load_state_dict(state)


def test_modules_are_copied_pickled_moved_and_scripted_away():
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), ours.LayerNorm(6), ours.GELU("tanh")).double()
    x = torch.randn(2, 6, dtype=torch.float64)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.train().eval()):
        close(other(x), model(x))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    close(torch.load(buffer, weights_only=False)(x), model(x))
    half = copy.deepcopy(model).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(compiled(x), model(x))


def trained(norm, activation, steps, noise=0.0):
    """The losses of some steps, and the parameters after them; the first ones are off by ``noise``, relative."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), norm(8), activation(), torch.nn.Linear(8, 1)).double()
    x, target = torch.randn(16, 5, dtype=torch.float64), torch.randn(16, 1, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + noise * torch.randn_like(p))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), [p.detach() for p in model.parameters()]


def test_a_module_trains_as_torchs():
    losses, _ = trained(ours.LayerNorm, ours.GELU, 50)
    assert losses[-1] < 0.5 * losses[0]
    # Steps magnify a rounding, by as much as torch's own training moves where its parameters are off at the start. Of
    # that 1e-9 stands for all the roundings of a few steps, some 1e-14, and still is far below what a wrong gradient
    # makes.
    mine, theirs, moved = (trained(*m) for m in (
        (ours.LayerNorm, ours.GELU, 5),
        (torch.nn.LayerNorm, torch.nn.GELU, 5),
        (torch.nn.LayerNorm, torch.nn.GELU, 5, 1e-9),
    ))  # fmt: skip
    for a, b, c in zip((mine[0], *mine[1]), (theirs[0], *theirs[1]), (moved[0], *moved[1]), strict=True):
        assert (a - b).abs().max() <= (b - c).abs().max()


# ------------------------------------------------------------------------------------------------------ cross_entropy

KINDS = [
    {},
    {"reduction": "none"},
    {"reduction": "sum", "ignore_index": 5},
    {"label_smoothing": 0.1, "ignore_index": 2},
    {"reduction": "none", "label_smoothing": 0.3},
]


def scores(where="cpu", dtype=torch.float64, rows=7, classes=6):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, classes, generator=generator, dtype=torch.float64).to(where, dtype).requires_grad_()
    return x, torch.randint(0, classes, (rows,), generator=generator).to(where)


@ON
@pytest.mark.parametrize("integer", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cross_entropy_as_torch(kind, integer, where):
    x, target = scores(where)
    y, expected = ours.cross_entropy(x, target.to(integer), **kind), F.cross_entropy(x, target, **kind)
    close(y, expected)
    dy = torch.randn(y.shape, dtype=y.dtype, device=where)
    close(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy))


@ON
@pytest.mark.parametrize("columns", [6, 1 << 18])
def test_cross_entropy_of_ignored_rows_has_no_gradient(columns, where):
    """The mean of no rows is NaN; its gradient is 0, as torch's."""
    for targets in ([-100, -100, -100], [-100, 1, -100]):
        results = []
        for f in (ours.cross_entropy, F.cross_entropy):
            x = torch.ones(3, columns, device=where, requires_grad=True)
            f(x, torch.tensor(targets, device=where)).backward()
            results.append(x.grad)
        torch.testing.assert_close(*results)


@ON
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cross_entropy_transformed_and_compiled(kind, where):
    x, target = scores(where)

    def of(f):
        def loss(x, t):
            return f(x, t, **kind).sum()

        singly = torch.func.vmap(torch.func.grad(loss))(x.detach()[:, None], target[:, None])
        return torch.func.grad(loss)(x.detach(), target), torch.nan_to_num(singly)

    for a, b in zip(of(ours.cross_entropy), of(F.cross_entropy), strict=True):
        close(a, b)
    compiled = torch.compile(lambda x, t: ours.cross_entropy(x, t, **kind), backend="aot_eager", fullgraph=True)
    results = [(y, torch.autograd.grad(y.sum(), x)) for y in (compiled(x, target), F.cross_entropy(x, target, **kind))]
    close(*results)


@ON
def test_cross_entropy_of_no_rows_and_of_none_that_count(where):
    x, target = scores(where, rows=0)
    assert ours.cross_entropy(x, target).isnan()
    assert ours.cross_entropy(x, target, reduction="sum") == 0
    x, target = scores(where)
    assert ours.cross_entropy(x, torch.full_like(target, -100)).isnan()


def test_cross_entropy_refuses_a_class_that_there_is_not():
    x, target = scores()
    for wrong in (6, -1, 1 << 40):
        target[3] = wrong
        said = rf"cross_entropy: target\[3\] is {wrong}, expected 0 to 5, or ignore_index, which is -100"
        with pytest.raises(ValueError, match=said):
            ours.cross_entropy(x, target)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("classes", [6, 8, 4096, 40000, 65536])
def test_cross_entropy_of_a_class_that_there_is_not_is_nan_on_a_gpu(classes):
    x, target = scores("cuda", torch.float32, classes=classes)
    for wrong in (classes, -1, 1 << 40):
        target[3] = wrong
        y = ours.cross_entropy(x, target, reduction="none")
        assert y.isnan().nonzero().tolist() == [[3]]
        dx = torch.autograd.grad(y.sum(), x)[0]
        assert dx.isnan().any(-1).nonzero().tolist() == [[3]]


# -------------------------------------------------------------------------------------------------------------- conv2d


def convolved(function, x, weight, bias, dy, *args, **kwargs):
    """y, and the gradients of x, the weight and the bias."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves, *args, **kwargs)
    return y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))


@ON
def test_conv2d_keeps_channels_last(where):
    """Without a copy: the kernel reads the very memory, and so the result and the gradients lie as x does."""
    last = torch.channels_last
    x = torch.randn(2, 6, 5, 7, device=where).to(memory_format=last)
    weight, bias = torch.randn(8, 6, 3, 3, device=where), torch.randn(8, device=where)
    dy = torch.randn(2, 8, 5, 7, device=where)
    for w in (weight, weight.to(memory_format=last)):
        results = convolved(ours.conv2d, x, w, bias, dy, padding=1)
        plain = convolved(ours.conv2d, x.contiguous(), weight, bias, dy, padding=1)
        for t, expected in zip(results[:2], plain[:2], strict=True):
            assert t.is_contiguous(memory_format=last)
            torch.testing.assert_close(t, expected)
    assert results[2].is_contiguous(memory_format=last)
    weights_alone = ours.conv2d(x.contiguous(), weight.to(memory_format=last), bias, padding=1)
    assert weights_alone.is_contiguous(memory_format=last)
    torch.testing.assert_close(weights_alone, results[0])


@ON
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": (1, 2), "bias": False},
        {"groups": 2, "dilation": 2, "padding": 2},
        {"padding": "same"},
        {"padding": "valid"},
        {"padding": 1, "padding_mode": "reflect"},
    ],
    ids=str,
)
def test_conv2d_module(where, options):
    theirs = torch.nn.Conv2d(4, 6, 3, **options).to(where, torch.float64)
    mine = ours.Conv2d(4, 6, 3, **options).to(where, torch.float64)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 9, 8, device=where, dtype=torch.float64)
    y = mine(x)
    close(y, theirs(x))
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, mine.parameters(), dy)
    for a, b in zip(gradients, torch.autograd.grad(theirs(x), theirs.parameters(), dy), strict=True):
        close(a, b)
    close(torch.compile(mine, fullgraph=True, backend="aot_eager")(x), y)
    close(mine(x[0]), theirs(x[0]))


@ON
def test_conv2d_gradients(where):
    for layout, x, w in (("NCHW", (2, 4, 5, 6), (6, 2, 3, 2)), ("NHWC", (2, 5, 6, 4), (6, 3, 2, 2))):
        tensors = [torch.randn(s, device=where, dtype=torch.float64, requires_grad=True) for s in (x, w, (6,))]
        function = functools.partial(ours.conv2d, stride=(2, 1), padding=1, dilation=(1, 2), groups=2, layout=layout)
        assert torch.autograd.gradcheck(function, tensors)


# What the products on tensor cores must be tried on: the shape of x, outputs, kernel, and the rest.
CONVOLUTIONS = [
    ((8, 64, 28, 28), 64, (3, 3), {"padding": 1}),
    ((8, 256, 28, 28), 64, (1, 1), {}),
    ((4, 128, 14, 15), 200, (3, 3), {"padding": 1}),
    ((32, 512, 7, 7), 512, (3, 3), {"padding": 1}),  # few tiles: slices
    ((4, 64, 28, 27), 128, (3, 3), {"stride": 2, "padding": 1}),
    ((4, 40, 29, 30), 72, (5, 3), {"stride": (1, 2), "padding": (0, 3)}),
    ((4, 128, 28, 27), 128, (1, 1), {"stride": 2}),  # dx has pixels that no product is for
    ((4, 64, 30, 30), 64, (3, 3), {"dilation": 3, "padding": 2}),
    ((4, 64, 30, 30), 80, (3, 2), {"dilation": 2, "stride": 2, "padding": 9}),
    ((4, 35, 40, 30), 51, (3, 3), {"padding": 4}),  # channels that are no whole vectors
    ((2, 3, 112, 112), 64, (7, 7), {"stride": 2, "padding": 3}),
    ((4, 64, 30, 30), 64, (3, 3), {"groups": 4, "padding": 1}),
]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, "tf32"], ids=str)
@pytest.mark.parametrize(("shape", "outputs", "kernel", "options"), CONVOLUTIONS, ids=str)
def test_conv2d_on_tensor_cores(shape, outputs, kernel, options, dtype, format):
    """Of small integers, of which all sums are exact in float32 and every operand in each dtype: equal to the last bit
    before the result is rounded."""
    kwargs = dict(options, allow_tf32=dtype == "tf32")
    dtype = torch.float32 if dtype == "tf32" else dtype
    random = torch.Generator("cuda").manual_seed(0)

    def integers(*size):
        t = torch.randint(-3, 4, size, generator=random, device="cuda", dtype=torch.float64)
        return t.to(memory_format=format) if t.dim() == 4 else t

    x, bias = integers(*shape), integers(outputs)
    weight = integers(outputs, shape[1] // options.get("groups", 1), *kernel)
    dy = integers(*F.conv2d(x, weight, bias, **options).shape)
    expected = convolved(F.conv2d, x, weight, bias, dy, **options)
    results = convolved(ours.conv2d, x.to(dtype), weight.to(dtype), bias.to(dtype), dy.to(dtype), **kwargs)
    for t, exact in zip(results, expected, strict=True):
        assert torch.equal(t, exact.to(dtype))


# ----------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
class TestGpu:
    def test_first_thing_in_a_thread(self):
        """conv2d encodes tensor maps, for which the driver wants a context. Where memory is at hand, nothing before has
        given the thread one."""
        x = torch.randn(8, 16, 16, 128, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(128, 3, 3, 128, device="cuda", dtype=torch.bfloat16)

        def run():
            return ours.conv2d(x, weight, padding=1, layout="NHWC")

        expected = run()
        run()
        with ThreadPoolExecutor(1) as thread:
            assert torch.equal(thread.submit(run).result(), expected)

    @EACH
    def test_side_stream(self, name):
        """Work is queued where torch says: behind a long kernel of the side stream, and not on the default stream."""
        function, reference = FUNCTIONS[name]
        args = tensors("cuda", requires_grad=False)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x = torch.zeros_like(args[0])
            torch.cuda._sleep(50_000_000)
            x.copy_(args[0])
            y = function(x, *args[1:])
        side.synchronize()
        close(y, reference(*args))

    @EACH
    def test_side_stream_backward(self, name):
        function, reference = FUNCTIONS[name]
        args = tensors("cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            got = torch.autograd.grad(function(*args).square().sum(), args[0])
        torch.cuda.current_stream().wait_stream(side)
        close(got, torch.autograd.grad(reference(*args).square().sum(), args[0]))

    @EACH
    def test_cuda_graph(self, name):
        """Forward and backward, recorded once and replayed on other numbers."""
        function, reference = FUNCTIONS[name]
        static = tensors("cuda")

        def step():
            y = function(*static)
            return y, torch.autograd.grad(y.square().sum(), static[0])[0]

        graph, (y, dx) = recorded(step)
        for k in (1.5, -2.0):  # numbers whose sums do not cancel, unlike some that are drawn
            with torch.no_grad():
                for t, start in zip(static, tensors("cuda", requires_grad=False), strict=True):
                    t.copy_(start * k)
            graph.replay()
            # fresh leaves: the gradient of `static` would be accumulated on the stream of the recording, unsynchronized
            leaves = [t.detach().clone().requires_grad_() for t in static]
            expected = reference(*leaves)
            close(y, expected)
            close(dx, torch.autograd.grad(expected.square().sum(), leaves[0])[0])

    @EACH
    def test_another_device_than_the_current(self, name):
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        function, reference = FUNCTIONS[name]
        args = tensors("cuda:1")
        assert torch.cuda.current_device() == 0
        y = function(*args)
        assert y.device == args[0].device
        close(y, reference(*args))
        close(torch.autograd.grad(y.sum(), args[0]), torch.autograd.grad(reference(*args).sum(), args[0]))
        assert torch.cuda.current_device() == 0

    @pytest.mark.parametrize("transpose_b", [False, True])
    @pytest.mark.parametrize("transpose_a", [False, True])
    @pytest.mark.parametrize(("batch", "m", "k", "n"), [(1, 2048, 72, 2048), (4, 1024, 64, 1024), (1, 2047, 65, 2049)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_large_products(self, dtype, batch, m, k, n, transpose_a, transpose_b):
        """Large tiles: small integers, of which every sum is exact but for the rounding of the result."""
        random = torch.Generator("cuda").manual_seed(0)
        shapes = (batch, k, m) if transpose_a else (batch, m, k), (batch, n, k) if transpose_b else (batch, k, n)
        a, b = (torch.randint(-3, 4, s, generator=random, device="cuda", dtype=torch.float64) for s in shapes)
        expected = (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)
        assert torch.equal(ours.matmul(a.to(dtype), b.to(dtype), transpose_a, transpose_b), expected.to(dtype))

    def test_large_linear(self):
        """Large tiles, with what goes into the activation kept and not."""
        random = torch.Generator("cuda").manual_seed(0)
        shapes = (2048, 64), (2048, 64), (2048,)
        x, weight, bias = (torch.randint(-8, 9, s, generator=random, device="cuda").double() / 16 for s in shapes)
        z = F.linear(x, weight, bias)
        half = [t.bfloat16().requires_grad_() for t in (x, weight, bias)]
        for args in half, [t.detach() for t in half]:
            torch.testing.assert_close(ours.linear(*args, "gelu").double(), F.gelu(z), rtol=2**-6, atol=2**-8)

    def test_many_elements(self):
        """More than 2^31 elements: indices do not wrap."""
        free, _ = torch.cuda.mem_get_info()
        n = (1 << 31) + 4096
        if free < 5 * 2 * n:
            pytest.skip("the GPU has too little memory")
        x = torch.zeros(n // 4096, 4096, dtype=torch.float16, device="cuda")
        x[-1] = torch.arange(4096, device="cuda") % 7
        for y, expected in (
            (ours.gelu(x), F.gelu(x[-1])),
            (ours.add(x, x), 2 * x[-1]),
            (ours.layer_norm(x, 4096), F.layer_norm(x[-1], (4096,))),
        ):
            torch.testing.assert_close(y[-1], expected)
            torch.testing.assert_close(y[0], torch.zeros_like(y[0]))
            del y
