"""cross_entropy beside torch's: kinds, ignored rows, classes out of range."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402

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
