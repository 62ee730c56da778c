"""Derivatives of the second order and in forward mode, in float64, against differences and among each other."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad, gradcheck, gradgradcheck  # noqa: E402

from aotops import formula  # noqa: E402
from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import private  # noqa: E402
from aotops.frontends.torch.mathematics import Mathematics  # noqa: E402
from aotops.ops import OPS  # noqa: E402

INTEGERS = torch.tensor([1, 0, 2])
WEIGHT = torch.tensor([0.5, 1.5, 1.0, 2.0], dtype=torch.float64)

# By name: the function, and the shapes of its tensors.
CALLS = {
    "add": (lambda a, b: ours.add(a, b, alpha=2.0), (3, 4), (4,)),
    "add a number": (lambda a: ours.add(a, 1.5), (3, 4)),
    "gelu": (ours.gelu, (3, 4)),
    "gelu tanh": (lambda x: ours.gelu(x, "tanh"), (3, 4)),
    "swiglu": (ours.swiglu, (3, 4), (3, 4)),
    "rope": (ours.rope, (2, 3, 2, 4), (3, 2), (3, 2)),
    "rope of x": (lambda x: ours.rope(x, INTEGERS[:, None].double(), INTEGERS[:, None].double(), True), (3, 2, 2)),
    "rope with positions": (
        lambda x, cos, sin: ours.rope(x, cos, sin, positions=INTEGERS[None], layout="BHSD", rotary_dim=2),
        *((2, 2, 3, 3), (4, 2), (4, 2)),
    ),
    "qkv_rope": (lambda x, c, s: ours.qkv_rope(x, c, s, 2, 1, True, layout="BHSD"), (2, 3, 16), (3, 2), (3, 2)),
    "qkv_rope in groups": (
        lambda x, c, s: ours.qkv_rope(x, c, s, 4, 2, positions=INTEGERS[None], rotary_dim=2, grouped=True),
        *((2, 3, 24), (4, 2), (4, 2)),
    ),
    "qkv_rope without tables": (lambda x: ours.qkv_rope(x, None, None, 2), (3, 18)),
    "qkv_rope whose keys alone are read": (lambda x, c: ours.qkv_rope(x, c, c, 2, grouped=True)[1], (3, 12), (3, 1)),
    "attention": (
        lambda q, k, v: ours.attention(q, k, v, causal=True, softcap=2.0),
        *((2, 3, 2, 3), (2, 4, 1, 3), (2, 4, 1, 2)),
    ),
    "attention of lengths": (
        lambda q, k, v: ours.attention(q, k, v, INTEGERS, window=(1, 2), scale=0.7, layout="BHSD"),
        *((3, 2, 4, 2), (3, 2, 3, 2), (3, 2, 3, 1)),
    ),
    "attention of a bias and sinks": (
        lambda q, k, v, b, s: ours.attention(q, k, v, None, INTEGERS > 0, b, s, causal=True, softcap=2.0),
        *((2, 2, 2, 2), (2, 3, 1, 2), (2, 3, 1, 2), (2, 1, 3), (2,)),
    ),
    "attention of sequences": (
        lambda q, k, v, b: ours.attention(q, k, v, bias=b, cu_seqlens=INTEGERS.sort()[0]),
        *((3, 2, 2), (3, 1, 2), (3, 1, 2), (2, 3, 1)),
    ),
    "attention of two packings": (
        lambda q, k, v, b: ours.attention(
            q, k, v, bias=b, cu_seqlens=torch.tensor([0, 1, 3]), cu_seqlens_k=torch.tensor([0, 2, 5]), causal=True
        ),
        *((3, 2, 2), (5, 1, 2), (5, 1, 2), (2, 3, 5)),
    ),
    "attention with dropout": (
        lambda q, k, v, b: ours.attention(q, k, v, bias=b, seed=INTEGERS[:2], dropout=0.4, softcap=2.0),
        *((2, 3, 2, 3), (2, 4, 1, 3), (2, 4, 1, 2), (3, 4)),
    ),
    "attention of one tensor": (lambda x: ours.attention(x, x, x, window=(0, 1)), (3, 2, 2)),
    "qkv_attention": (lambda x: ours.qkv_attention(x, 2, 1, causal=True, softcap=2.0), (2, 3, 8)),
    "qkv_attention of lengths": (lambda x: ours.qkv_attention(x, 1, lengths=INTEGERS, window=(1, 0)), (3, 3, 6)),
    "softmax": (lambda x: ours.softmax(x, 0), (3, 4)),
    "layer_norm": (lambda x, w, b: ours.layer_norm(x, (4,), w, b), (3, 4), (4,), (4,)),
    "layer_norm of two axes": (lambda x: ours.layer_norm(x, (2, 4)), (3, 2, 4)),
    "batch_norm": (lambda x, w, b: ours.batch_norm(x, w, b, 0.1), (3, 4), (4,), (4,)),
    "batch_norm and SiLU": (lambda x, w, b: ours.batch_norm(x, w, b, 0.1, activation="silu"), (3, 4), (4,), (4,)),
    "batch_norm and Hardswish": (lambda x: ours.batch_norm(x, None, None, 0.1, 1, "hardswish")[0], (3, 2, 2)),
    "batch_norm of images": (lambda x: ours.batch_norm(x, eps=0.1, axis=-1), (2, 2, 3)),
    "batch_norm whose statistics are unread": (lambda x, w: ours.batch_norm(x, w, eps=0.1)[0], (3, 2, 2), (2,)),
    "batch_norm_relu": (
        lambda x, w, b, r: ours.batch_norm_relu(x, w, b, r, 0.1),
        (3, 4),
        (4,),
        (4,),
        (3, 4),
    ),
    "batch_norm_relu alone": (lambda x: ours.batch_norm_relu(x, eps=0.1), (3, 4)),
    "rms_norm": (lambda x, w: ours.rms_norm(x, (4,), w), (2, 3, 4), (4,)),
    "rms_norm with a bias": (lambda x, w, b: ours.rms_norm(x, (4,), w, bias=b), (2, 3, 4), (4,), (4,)),
    "add_layer_norm": (lambda x, r, w, b: ours.add_layer_norm(x, r, (4,), w, b), (3, 4), (3, 4), (4,), (4,)),
    "add_rms_norm": (lambda x, r, w: ours.add_rms_norm(x, r, (4,), w), (3, 4), (3, 4), (4,)),
    "add_rms_norm with a bias": (
        lambda x, r, w, b: ours.add_rms_norm(x, r, (4,), w, bias=b),
        (3, 4),
        (3, 4),
        (4,),
        (4,),
    ),
    "add_layer_norm whose sum is unread": (lambda x, r, w: ours.add_layer_norm(x, r, 4, w)[0], (3, 4), (3, 4), (4,)),
    "add_rms_norm whose sum is unread": (lambda x, r, w: ours.add_rms_norm(x, r, 4, w)[0], (3, 4), (3, 4), (4,)),
    "add_rms_norm whose norm is unread": (lambda x, r, w: ours.add_rms_norm(x, r, 4, w)[1], (3, 4), (3, 4), (4,)),
    "cross_entropy": (lambda x: ours.cross_entropy(x, INTEGERS), (3, 4)),
    "cross_entropy of rows": (
        lambda x: ours.cross_entropy(x, INTEGERS, reduction="none", label_smoothing=0.2, ignore_index=0),
        (3, 4),
    ),
    "cross_entropy with extras": (
        lambda x: ours.cross_entropy(x, INTEGERS, -100, "mean", 0.2, None, WEIGHT, z_loss=0.1, softcap=2.0),
        (3, 4),
    ),
    "cross_entropy of a learned weight": (lambda x, w: ours.cross_entropy(x, INTEGERS, weight=w**2 + 1), (3, 4), (4,)),
    "cross_entropy_lse": (lambda x: ours.cross_entropy_lse(x, INTEGERS, ignore_index=0)[:2], (3, 4)),
    "cross_entropy_lse with extras": (
        lambda x: ours.cross_entropy_lse(x, INTEGERS, -100, "none", 0.2, None, WEIGHT, 0.1, 2.0)[:2],
        (3, 4),
    ),
    "linear_cross_entropy": (
        lambda x, w, b: ours.linear_cross_entropy(x, w, INTEGERS, b, label_smoothing=0.2, z_loss=0.1, softcap=2.0),
        *((3, 2), (4, 2), (4,)),
    ),
    "linear_cross_entropy of rows": (
        lambda x, w: ours.linear_cross_entropy(x, w, INTEGERS, None, 0, "none", class_weight=WEIGHT),
        *((3, 2), (4, 2)),
    ),
    "linear_cross_entropy_lse": (
        lambda x, w, b: ours.linear_cross_entropy_lse(x, w, INTEGERS, b, label_smoothing=0.2, z_loss=0.1, softcap=2.0),
        *((3, 2), (4, 2), (4,)),
    ),
    "linear_cross_entropy_lse whose lse is unread": (
        lambda x, w: ours.linear_cross_entropy_lse(x, w, INTEGERS)[0],
        *((3, 2), (4, 2)),
    ),
    "linear_cross_entropy_lse whose loss is unread": (
        lambda x, w: ours.linear_cross_entropy_lse(x, w, INTEGERS, None, 0, "none", class_weight=WEIGHT)[1],
        *((3, 2), (4, 2)),
    ),
    "matmul": (ours.matmul, (2, 3, 4), (4, 2)),
    "matmul transposed": (lambda a, b: ours.matmul(a, b, transpose_b=True), (2, 3, 4), (2, 2, 4)),
    "linear": (ours.linear, (2, 3, 4), (5, 4), (5,)),
    "linear without bias": (ours.linear, (3, 4), (5, 4)),
    "linear gelu": (lambda x, w, b: ours.linear(x, w, b, "gelu"), (3, 4), (2, 4), (2,)),
    "linear relu": (lambda x, w, b: ours.linear(x, w, b, "relu"), (3, 4), (2, 4), (2,)),
    "linear silu": (lambda x, w, b: ours.linear(x, w, b, "silu"), (3, 4), (2, 4), (2,)),
    "linear gelu_tanh": (lambda x, w, b: ours.linear(x, w, b, "gelu_tanh"), (3, 4), (2, 4), (2,)),
    "conv2d": (lambda x, w, b: ours.conv2d(x, w, b, stride=2, padding=1), (2, 2, 3, 3), (3, 2, 2, 2), (3,)),
    "conv2d in groups": (lambda x, w: ours.conv2d(x, w, groups=2), (2, 2, 3, 3), (2, 1, 2, 2)),
    "lltm": (ours.lltm, (3, 2), (6, 4), (1, 6), (3, 2), (3, 2)),
}


@pytest.fixture(params=CALLS)
def call(request):
    function, *shapes = CALLS[request.param]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    return function, tuple(tensors)


def test_every_operator_is_called():
    differentiable = {name for name, op in OPS.items() if op.has_gradient}
    assert {name.split()[0] for name in CALLS} == differentiable


def test_first_order(call):
    """Both modes, plain and batched."""
    assert gradcheck(*call, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)


def test_second_order(call):
    """Reverse over reverse, and forward over reverse."""
    assert gradgradcheck(*call, check_fwd_over_rev=True, check_batched_grad=True)


def test_compositions_of_transforms(call):
    function, tensors = call
    every = tuple(range(len(tensors)))

    def scalar(*args):
        ys = function(*args)
        ys = (ys,) if isinstance(ys, torch.Tensor) else ys
        return sum((y.sin() * torch.arange(1, y.numel() + 1).reshape(y.shape)).sum() for y in ys)

    expected = torch.autograd.functional.hessian(scalar, tensors)
    modes = torch.func.jacfwd, torch.func.jacrev
    for outer in modes:
        for inner in modes:
            found = outer(inner(scalar, every), every)(*tensors)
            for a, b in zip(sum(found, ()), sum(expected, ()), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_third_order():
    x = torch.linspace(-2, 2, 5, dtype=torch.float64)

    def third(f):
        first = torch.func.grad(lambda x: f(x).sum())
        second = torch.func.grad(lambda x: first(x).sum())
        return torch.func.grad(lambda x: second(x).sum())(x)

    torch.testing.assert_close(third(ours.gelu), third(torch.nn.functional.gelu), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_derivatives(dtype):
    """A formula computes in float32, and its results have the dtype of the operator's."""
    x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    w = torch.randn(4, dtype=dtype, requires_grad=True)
    found, expected = [], []
    for norm, into in ((ours.rms_norm, found), (torch.nn.functional.rms_norm, expected)):
        into += torch.autograd.grad(norm(x, (4,), w).square().sum(), (x, w), create_graph=True)
        into += torch.autograd.grad(sum(g.square().sum() for g in into), (x, w))
        with forward_ad.dual_level():
            into += forward_ad.unpack_dual(norm(forward_ad.make_dual(x.detach(), w.detach().expand(3, 4)), (4,), w))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.5 if dtype != torch.float32 else 1e-4)


def test_a_level_that_a_graph_enters_is_known():
    def function(x):
        return ours.softmax(x, -1) * ours.gelu(x) + x

    x = torch.randn(3, 4, dtype=torch.float64)
    step = 1e-6
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.func.jvp(function, (x,), (x.cos(),)), backend="eager", fullgraph=True)
    y, tangent = compiled(x)
    torch.testing.assert_close(y, function(x))
    difference = (function(x + step * x.cos()) - function(x - step * x.cos())) / (2 * step)
    torch.testing.assert_close(tangent, difference, rtol=1e-7, atol=1e-7)
    assert private.forward_level() == private.NO_LEVEL


def test_logits_that_changed_are_refused_in_a_second_order():
    """Their gradient is kept, but its derivative is of the logits."""
    leaf = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    logits = leaf * 2
    y = ours.cross_entropy(logits, INTEGERS)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="cross_entropy: x was changed in place after the forward"):
        torch.autograd.grad(y, leaf, create_graph=True)


def test_an_out_of_range_class_is_not_computed():
    """The residual is computed by the kernel, which raises, on a CPU; the formula gives NaN."""
    x, target = torch.randn(3, 4), torch.tensor([0, 4, 1])
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"target\[1\] is 4"):
        ours.cross_entropy(forward_ad.make_dual(x, x), target)
    op = ours.OPS["cross_entropy"]
    inputs, attrs = op.bind(x, target, reduction="none", label_smoothing=0.1)
    losses = formula.compose(Mathematics(None), op, attrs, inputs)
    assert losses[0].isnan().tolist() == [False, True, False]
