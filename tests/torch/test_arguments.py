"""Arguments of torch's functions that kernels do not take: values, gradients and errors beside torch's own."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b"), list(itertools.permutations(["float16", "bfloat16", "float32", "float64", "int64"], 2))
)
def test_add_promotes_dtypes(a, b):
    x, y = (torch.arange(6).reshape(2, 3).to(getattr(torch, d)) for d in (a, b))
    for second in (y, y[0], y[0, 1]) if x.is_floating_point() else (y, y[0]):  # 0-dim: an integer decides nothing
        same(
            ours.add(x, second, alpha=2), torch.add(x, second, alpha=2)
        ) if x.is_floating_point() or second.dim() else None
    found, expected = [], []
    for add, into in ((ours.add, found), (torch.add, expected)):
        given = [t.clone().requires_grad_(t.is_floating_point()) for t in (x, y)]
        add(*given).sum().backward()
        into += [t.grad for t in given if t.grad is not None]
    for g, e in zip(found, expected, strict=True):
        same(g, e)


def test_add_of_integers_is_refused():
    with pytest.raises(TypeError, match="add: a has dtype int64, expected float16"):
        ours.add(torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int32))


@pytest.mark.parametrize("shapes", [((4, 6), (6,)), ((4,), (4, 6)), ((6,), (6,)), ((6,), (3, 6, 2)), ((3, 2, 6), (6,))])
def test_matmul_of_vectors(shapes):
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    ys = [f(*tensors) for f in (ours.matmul, torch.matmul)]
    same(*ys)
    for a, b in zip(*(torch.autograd.grad(y.sin().sum(), tensors) for y in ys), strict=True):
        same(a, b)
    assert torch.compile(ours.matmul, backend="aot_eager", fullgraph=True)(*tensors).shape == ys[0].shape


def test_matmul_of_a_vector_that_does_not_fit():
    with pytest.raises(ValueError, match=r"matmul: b has shape \(4, 6\)"):
        ours.matmul(torch.ones(6), torch.ones(4, 6))
    with pytest.raises(ValueError, match="matmul: a has shape"):
        ours.matmul(torch.ones(6), torch.ones(6, 2), transpose_a=True)


def test_softmax_converts_to_a_dtype():
    for x in (torch.randn(3, 4, dtype=torch.float16), torch.arange(6)):
        for dtype in (torch.float32, torch.float64, None) if x.is_floating_point() else (torch.float32,):
            y = ours.softmax(x, -1, dtype=dtype)
            assert y.dtype == (dtype or x.dtype)
            same(y, F.softmax(x, -1, dtype=dtype))
    with pytest.raises(TypeError, match=r"softmax: dtype is torch\.int32, expected a floating dtype"):
        ours.softmax(x, -1, dtype=torch.int32)


@pytest.mark.parametrize("dilation", [1, 2, (2, 1), [1]])
@pytest.mark.parametrize("kernel", [(3, 5), (2, 3), (4, 2)])
def test_conv2d_keeps_the_size(kernel, dilation):
    x, weight = torch.randn(2, 3, 7, 8), torch.randn(5, 3, *kernel)
    expected = F.conv2d(x, weight, padding="same", dilation=dilation)
    same(ours.conv2d(x, weight, padding="same", dilation=dilation), expected)
    last = [t.permute(0, 2, 3, 1).contiguous() for t in (x, weight)]
    dilation = dilation if isinstance(dilation, (int, tuple)) else dilation[0]
    y = ours.conv2d(*last, padding="same", dilation=dilation, layout="NHWC")
    same(y.permute(0, 3, 1, 2), expected)


def test_paddings_of_conv2d_by_name():
    x, weight = torch.randn(2, 3, 7, 8), torch.randn(5, 3, 3, 3)
    same(ours.conv2d(x, weight, padding="valid", stride=(2,)), F.conv2d(x, weight, padding="valid", stride=(2,)))
    with pytest.raises(ValueError, match="conv2d: padding is 'same', expected numbers with a stride of 2"):
        ours.conv2d(x, weight, padding="same", stride=2)
    with pytest.raises(TypeError, match="conv2d: padding is"):
        ours.conv2d(x, weight, padding="full")


@pytest.mark.parametrize("shape", [(6,), (4, 6), (3, 6, 5), (2, 6, 3, 2), (0, 6, 2)])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_of_weights_and_probabilities(shape, reduction):
    axis = min(1, len(shape) - 1)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    classes = torch.randint(0, 6, (*shape[:axis], *shape[axis + 1 :]))
    if classes.numel() > 1:
        classes.view(-1)[1] = -100
    probabilities = torch.randn(shape, dtype=torch.float64).softmax(axis)
    weights = torch.rand(6, dtype=torch.float64)
    for smoothing, weight, target in itertools.product((0.0, 0.2), (None, weights), (classes, probabilities)):
        options = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
        ys = [f(x, target, **options) for f in (ours.cross_entropy, F.cross_entropy)]
        torch.testing.assert_close(*ys, equal_nan=True)
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in ys]
        torch.testing.assert_close(*grads, equal_nan=True)
        module = ours.CrossEntropyLoss(weight, reduction=reduction, label_smoothing=smoothing)
        torch.testing.assert_close(module(x, target), ys[1], equal_nan=True)


def test_cross_entropy_of_weights_in_16_bits_and_compiled():
    x, target, weight = torch.randn(4, 6, dtype=torch.bfloat16), torch.tensor([1, 2, 0, 5]), torch.rand(6)
    loss = torch.compile(ours.cross_entropy, backend="aot_eager", fullgraph=True)(x, target, weight=weight)
    assert loss.dtype == torch.bfloat16
    torch.testing.assert_close(loss, F.cross_entropy(x.float(), target, weight=weight).bfloat16(), rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.cross_entropy(x, target, weight=weight).dtype == torch.float32


def test_what_cross_entropy_refuses():
    x, target = torch.randn(4, 6, 2), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"cross_entropy: weight has shape \(3,\), expected \(6,\)"):
        ours.cross_entropy(x, target, weight=torch.ones(3))
    with pytest.raises(ValueError, match=r"cross_entropy: target has shape \(4, 3\), expected \(4, 2\)"):
        ours.cross_entropy(x, target.new_zeros(4, 3))
    with pytest.raises(ValueError, match="cross_entropy: target\\[0\\] is 6"):
        ours.cross_entropy(x, target + 6, weight=torch.ones(6))
    with pytest.raises(ValueError, match="ignore_index is 2, expected none: target has probabilities"):
        ours.cross_entropy(x, x.softmax(1), ignore_index=2)
    with pytest.raises(ValueError, match="reduction is 'max'"):
        ours.cross_entropy(x, target, reduction="max")


def _into(function, *args, **kwargs):
    """The result in ``out``, which is that of the call without it."""
    y = function(*args, **kwargs)
    out = torch.full_like(y, 7)
    assert function(*args, **kwargs, out=out) is out
    same(out, y)
    return out


@pytest.mark.parametrize("shape", [(4, 5), (5,), (4, 5, 3), (2, 5, 3, 2)])
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_into_out(shape, kind, weighted):
    axis = min(1, len(shape) - 1)
    x, weight = torch.randn(shape), torch.rand(5) if weighted else None
    target = torch.randint(0, 5, shape[:axis] + shape[axis + 1 :])
    target = torch.softmax(torch.randn(shape), axis) if kind == "probabilities" else target
    for reduction, smoothing in itertools.product(("none", "mean", "sum"), (0.0, 0.1)):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        expected = F.cross_entropy(x, target, weight=weight, **options)
        same(_into(ours.cross_entropy, x, target, weight=weight, **options), expected)
        same(_into(ours.cross_entropy, x, target, -100, reduction, smoothing, None, weight), expected)


def test_other_composed_calls_into_out():
    x = torch.randn(4, 6)
    same(_into(ours.softmax, x.half(), -1, dtype=torch.float32), F.softmax(x.half(), -1, dtype=torch.float32))
    same(_into(ours.softmax, x, -1, torch.float64), F.softmax(x, -1, dtype=torch.float64))
    with pytest.raises(TypeError, match="softmax: out has dtype float32, expected float64"):
        ours.softmax(x, -1, dtype=torch.float64, out=torch.empty_like(x))
    same(_into(ours.add, x, x.double(), alpha=2), torch.add(x, x.double(), alpha=2))
    same(_into(ours.matmul, x, x[0]), x @ x[0])
    image, weight = torch.randn(2, 3, 7, 8), torch.randn(5, 3, 2, 3)
    same(_into(ours.conv2d, image, weight, padding="same"), F.conv2d(image, weight, padding="same"))
    weight, target = torch.rand(6, requires_grad=True), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="cross_entropy: out is given and an argument requires a gradient"):
        ours.cross_entropy(x, target, weight=weight, out=torch.empty(()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_class_weights_of_16_bits(dtype, smoothing, reduction):
    """Weights and losses are summed in float32. Each element of a row's gradient is rounded once: it lies within half a
    unit in the last place, and 5 % of that for the arithmetic in float32. A sum's or a mean's is rounded twice, as the
    kept slope and as its product with dy. float16 holds numbers up to 65,504."""
    rows = 70000 if reduction == "mean" else 50
    x, target = torch.randn(rows, 3, dtype=dtype), torch.randint(3, (rows,))
    weight = torch.tensor([2.0, 1.375, 2.5], dtype=dtype)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    dy = torch.rand(rows, dtype=dtype) if reduction == "none" else torch.tensor(0.75, dtype=dtype)
    if reduction == "mean":
        dy = dy * 1024  # as a scaled loss, so that a gradient of a mean of many is no subnormal

    def of(function, kind):
        leaf = x.to(kind, copy=True).requires_grad_()
        y = function(leaf, target, weight=weight.to(kind), **options)
        return y.detach().double(), torch.autograd.grad(y, leaf, dy.to(kind))[0].double()

    (y, dx), (exact, gradient) = of(ours.cross_entropy, dtype), of(F.cross_entropy, torch.float64)
    torch.testing.assert_close(y, exact, rtol=1.05 * torch.finfo(dtype).eps / 2, atol=1e-5)
    rounded = gradient.to(dtype)
    ulp = (torch.nextafter(rounded.abs(), torch.full_like(rounded, torch.inf)) - rounded.abs()).double()
    bar = 0.525 * ulp if reduction == "none" else 0.525 * ulp + 0.525 * torch.finfo(dtype).eps * gradient.abs()
    assert ((dx - gradient).abs() <= bar + 1e-9).all()


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"weight": torch.rand(5) + 0.5}]
)
def test_cross_entropy_takes_targets_of_uint8(options):
    x, target = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 4, 2, 1], dtype=torch.uint8)
    found, expected = ours.cross_entropy(x, target, **options), F.cross_entropy(x, target.long(), **options)
    same(found, expected)
    same(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)))
    compiled = torch.compile(ours.cross_entropy, backend="aot_eager", fullgraph=True)
    same(compiled(x, target, **options), expected)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("size_average", [None, False, True])
@pytest.mark.parametrize("reduce", [None, False, True])
def test_cross_entropy_takes_the_former_names_of_reductions(size_average, reduce):
    x, target = torch.randn(4, 5), torch.tensor([0, 4, 2, 1])
    for more in ({}, {"weight": torch.rand(5) + 0.5, "ignore_index": 2}):
        options = {"size_average": size_average, "reduce": reduce, **more}
        same(ours.cross_entropy(x, target, **options), F.cross_entropy(x, target, **options))
