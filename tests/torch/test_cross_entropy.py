"""cross_entropy beside torch's: kinds, ignored rows, classes out of range."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.testing.cases.cross_entropy import in_torch  # noqa: E402

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
ON = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


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


def test_numbers_that_are_tensors_where_class_weights_learn():
    x, target = scores()
    weight = torch.linspace(0.5, 2, 6, dtype=torch.float64, requires_grad=True)
    as_tensors = {"label_smoothing": torch.tensor(0.2), "z_loss": torch.tensor(0.5), "softcap": torch.tensor(2)}
    as_numbers = {key: float(value) for key, value in as_tensors.items()}
    for loss in (ours.cross_entropy, ours.cross_entropy_lse):
        y, expected = (loss(x, target, weight=weight, **numbers) for numbers in (as_tensors, as_numbers))
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


@ON
@pytest.mark.parametrize("integer", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cross_entropy_as_torch(kind, integer, where):
    x, target = scores(where)
    y, expected = ours.cross_entropy(x, target.to(integer), **kind), F.cross_entropy(x, target, **kind)
    close(y, expected)
    dy = torch.randn(y.shape, dtype=y.dtype, device=where)
    close(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy))


EXTRAS = [{"weight": True}, {"z_loss": 0.01}, {"softcap": 2.0}, {"weight": True, "z_loss": 0.01, "softcap": 2.0}]


def composed(x, target, weight=None, z_loss=0.0, softcap=0.0, reduction="mean", ignore_index=-100, **options):
    """The loss, in float64, and the logarithms of sums."""
    x = softcap * torch.tanh(x.double() / softcap) if softcap else x.double()
    weight = None if weight is None else weight.double()
    options |= {"ignore_index": ignore_index}
    lse, counts = torch.logsumexp(x, -1), target != ignore_index
    losses = F.cross_entropy(x, target, weight, reduction="none", **options) + z_loss * lse**2 * counts
    if reduction == "none":
        return losses, lse
    divisor = counts.sum() if weight is None else weight[target[counts]].sum()
    return losses.sum() / (divisor if reduction == "mean" else 1), lse


def weighed(extras, where, classes=6, dtype=torch.float64):
    weight = torch.linspace(0.5, 2, classes, dtype=dtype, device=where)
    return {key: weight if key == "weight" else value for key, value in extras.items()}


@ON
@pytest.mark.parametrize("extras", EXTRAS, ids=lambda extras: "-".join(extras))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_extras_beside_their_formula(kind, extras, where):
    x, target = scores(where)
    kind = kind | weighed(extras, where)
    y, (expected, lse) = ours.cross_entropy(x, target, **kind), composed(x, target, **kind)
    close(y, expected)
    dy, dlse = torch.randn_like(y), torch.randn_like(lse)
    close(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, x, dy, retain_graph=True)[0])
    *results, predictions = ours.cross_entropy_lse(x, target, **kind)
    close(results, [expected, lse])
    assert torch.equal(predictions, x.argmax(-1))
    close(torch.autograd.grad(results, x, (dy, dlse)), torch.autograd.grad((expected, lse), x, (dy, dlse)))


@ON
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("extras", EXTRAS, ids=lambda extras: "-".join(extras))
@pytest.mark.parametrize("classes", [6, 33, 1000, 4097, 20001, 50257, 70000, 140001])
def test_extras_of_rows_of_any_length(classes, extras, dtype, where):
    """One for each kernel that the length chooses, of rows that begin at a boundary and of others."""
    if where == "cpu" and classes > 20001:
        pytest.skip("the CPU has one loop")
    x, target = scores(where, dtype, rows=3, classes=classes)
    target[1] = -100
    for smoothing in (0.0, 0.1):
        kind = weighed(extras, where, classes, torch.float32) | {"label_smoothing": smoothing}
        expected, lse = composed(x, target, **kind)
        y, own, predictions = ours.cross_entropy_lse(x, target, dtype=torch.float32, **kind)
        torch.testing.assert_close(y.double(), expected, rtol=3e-5, atol=1e-6)
        torch.testing.assert_close(own.double(), lse, rtol=3e-6, atol=1e-5)
        assert torch.equal(predictions, x.argmax(-1))
        grads = torch.tensor([0.5]).to(y), torch.tensor([0.25, -0.5, 1.0], device=where)
        exact = torch.autograd.grad((expected, lse), x, (grads[0][0].double(), grads[1].double()))[0]
        (dx,) = torch.autograd.grad((y, own), x, (grads[0][0], grads[1]))
        near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6 * exact.abs().max().item() + 1e-7}
        torch.testing.assert_close(dx, exact, **near)
        expected, _ = composed(x, target, **kind)
        exact, dx = (torch.autograd.grad(loss, x)[0] for loss in (expected, ours.cross_entropy(x, target, **kind)))
        torch.testing.assert_close(dx, exact, **near)


@ON
def test_predictions_as_argmax(where):
    """The first of equal numbers; NaN before all; a row of -inf alone."""
    inf, nan = float("inf"), float("nan")
    rows = [[1, 3, 3, 2], [nan, 5, nan, 1], [0, 5, nan, nan], [-inf] * 4, [-inf, -inf, -1, -inf], [inf, 1, inf, 0]]
    for columns in (4, 9, 200, 700, 1001, 20000, 40000):
        x = torch.full((len(rows) + 3, columns), -inf)
        x[: len(rows), -4:] = torch.tensor(rows)
        x[-3:] = 0  # equal numbers in each thread
        x[-2, columns // 2], x[-1, columns // 3 :: 2] = nan, nan
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            given, target = x.to(where, dtype), torch.zeros(len(x), dtype=torch.int32, device=where)
            predictions = ours.cross_entropy_lse(given, target)[2]
            assert predictions.dtype == torch.int32
            assert torch.equal(predictions.long(), given.argmax(-1))


@ON
def test_lse_of_ignored_rows_has_a_gradient(where):
    x, target = scores(where)
    target[:4] = -100
    y, lse, _ = ours.cross_entropy_lse(x, target, z_loss=0.1)
    close(torch.autograd.grad(lse.sum(), x, retain_graph=True)[0], torch.softmax(x, -1))
    assert not torch.autograd.grad(y, x)[0][:4].any()


@ON
@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy_lse"])
def test_weights_that_are_learned_and_of_any_dtype(name, where):
    x, target = scores(where)
    weight = torch.linspace(0.5, 2, 6, dtype=torch.float64, device=where).requires_grad_()
    results = getattr(ours, name)(x, target, weight=weight, label_smoothing=0.1, z_loss=0.1, softcap=2.0)
    y = results[0] if name == "cross_entropy_lse" else results
    expected = in_torch(torch, x, target, weight=weight, label_smoothing=0.1, z_loss=0.1, softcap=2.0)
    close(y, expected)
    close(torch.autograd.grad(y, (x, weight)), torch.autograd.grad(expected, (x, weight)))
    half = getattr(ours, name)(x.float(), target, weight=weight.detach().half())
    y = half[0] if name == "cross_entropy_lse" else half
    torch.testing.assert_close(y, F.cross_entropy(x.float(), target, weight.detach().half().float()))


def test_a_weight_that_requires_a_gradient_is_refused_by_the_kernel():
    x, target = scores()
    y = torch.ops.aotops.cross_entropy(x, target, torch.ones(6).double().requires_grad_(), -100, "mean", 0, None, 0, 0)
    with pytest.raises(NotImplementedError, match="cross_entropy: weight requires a gradient, expected a constant"):
        y[0].backward()


def test_extras_of_other_targets():
    """Probabilities, and logits of shape (N, C, d)."""
    x = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)
    flat = x.movedim(1, -1).reshape(-1, 6)
    target = torch.randint(6, (3, 4))
    extras = weighed({"weight": True, "z_loss": 0.1, "softcap": 2.0}, "cpu")
    close(ours.cross_entropy(x, target, **extras), composed(flat, target.flatten(), **extras)[0])
    shares = F.one_hot(target, 6).movedim(-1, 1).double()
    expected = composed(flat, target.flatten(), reduction="sum", **extras)[0] / 12
    close(ours.cross_entropy(x, shares, **extras), expected)
    for name in ("z_loss", "softcap"):
        with pytest.raises(ValueError, match=f"cross_entropy: {name} is -1.0, expected a finite number"):
            ours.cross_entropy(x, shares, **{name: -1.0})


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
        assert ours.cross_entropy(x.detach(), target, reduction="none").isnan().nonzero().tolist() == [[3]]


@ON
@pytest.mark.parametrize("integer", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("classes", [8, 64, 100, 128, 136, 256, 512, 768, 1024])
def test_the_loss_alone_of_short_rows_at_each_class(classes, dtype, integer, where):
    """Rows of a warp or less, whose number is odd, in kernels of their own."""
    rows, ignored = 2 * classes + 35, 17
    x = scores(where, dtype, rows, classes)[0].detach()
    target = (torch.arange(rows, device=where) * 7 % classes).to(integer)
    target[ignored], x[ignored, 1] = -100, float("nan")
    target[3], x[3, 2:] = 1, -float("inf")
    error = max(4 * torch.finfo(dtype).eps, 1e-5 if dtype == torch.bfloat16 else 0)
    for reduction in ("sum", "none"):
        y = ours.cross_entropy(x, target, reduction=reduction)
        expected = F.cross_entropy(x.double(), target.long(), reduction=reduction)
        torch.testing.assert_close(y.double(), expected, rtol=error, atol=error)


@ON
@pytest.mark.parametrize("integer", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("rows", [16385, 140003])
def test_the_mean_of_many_rows(rows, integer, where):
    """Their number is divided by, which several blocks count; classes at 16-byte boundaries and not."""
    x, target = scores(where, torch.float32, rows + 1, 8)
    target[::3] = -100
    for first in (0, 1):
        expected = F.cross_entropy(x[first:], target[first:])
        y = ours.cross_entropy(x[first:], target.to(integer)[first:])
        torch.testing.assert_close(y, expected)
        dx, of_expected = (torch.autograd.grad(loss, x)[0] for loss in (y, expected))
        torch.testing.assert_close(dx, of_expected, rtol=1e-5, atol=1e-10)


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
