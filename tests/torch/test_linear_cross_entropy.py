"""linear_cross_entropy beside torch's linear and cross_entropy: what is computed when, what is kept, and memory."""

from __future__ import annotations

import copy
from functools import partial

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.infer import infer  # noqa: E402
from aotops.ops import OPS  # noqa: E402

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
ON = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
PLAIN = pytest.mark.skipif(not ours.tensors.READS_TENSORS, reason="this torch has no path of plain calls")
OP = OPS["linear_cross_entropy"]


def head(rows=6, classes=5, width=4, where="cpu", dtype=torch.float64, bias=True):
    """x, weight, target and bias."""
    generator = torch.Generator().manual_seed(2)
    shapes = (rows, width), (classes, width), (classes,)
    x, weight, b = (torch.randn(s, generator=generator, dtype=torch.float64).to(where, dtype) for s in shapes)
    target = torch.randint(0, classes, (rows,), generator=generator).to(where)
    return x.requires_grad_(), weight.requires_grad_(), target, b.requires_grad_() if bias else None


def theirs(x, weight, target, bias=None, **options):
    return F.cross_entropy(F.linear(x, weight, bias), target, **options)


def close(a, b, tolerance=1e-11):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def gradients(f, inputs, dy=None, **options):
    y = f(*inputs, **options)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    return y, torch.autograd.grad(y, wanted, dy)


# ---------------------------------------------------------------------------------------------- what is made, and when


def residuals_of(inputs, **options):
    """The residuals that a recorded call saves for its backward: those that are not None."""
    y = ours.linear_cross_entropy(*inputs, **options)
    saved = y.grad_fn.saved_tensors
    return {slot for slot, t in zip(OP.saved, saved, strict=True) if slot in OP.residuals and t is not None}


@PLAIN
@ON
def test_gradients_that_are_not_wanted_are_not_made(where):
    for frozen in ((), (0,), (1,), (3,), (0, 3), (1, 3)):
        inputs = list(head(where=where))
        for i in frozen:
            inputs[i] = inputs[i].detach()
        expected = {f"{slot}_slope" for slot, i in (("x", 0), ("weight", 1), ("bias", 3)) if i not in frozen}
        assert residuals_of(inputs) == expected
        (y, found), (other, wanted) = gradients(ours.linear_cross_entropy, inputs), gradients(theirs, inputs)
        close((y, found), (other, wanted))


@ON
def test_nothing_is_made_where_no_gradient_is_recorded(where):
    """The operator itself makes what it is asked for: by default, no slope."""
    x, weight, target, bias = (None if t is None else t.detach() for t in head(where=where))
    operator = torch.ops.aotops.linear_cross_entropy
    attrs = (-100, "mean", 0.0, None, 0.0, 0.0, False)
    y, *slopes = operator(x, weight, target, bias, None, *attrs)
    assert slopes == [None] * 3
    other, x_slope, weight_slope, bias_slope = operator(x, weight, target, bias, None, *attrs, [True, False, True])
    assert weight_slope is None
    assert torch.equal(y, other)
    _, (dx, _, dbias) = gradients(theirs, [x.requires_grad_(), weight.requires_grad_(), target, bias.requires_grad_()])
    close(x_slope, dx)
    close(bias_slope[:5], dbias)
    assert not bias_slope[5:].any()


@ON
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_compiled_call_makes_what_its_graph_wants(where, reduction):
    inputs = head(where=where)
    compiled = torch.compile(
        partial(ours.linear_cross_entropy, reduction=reduction), backend="aot_eager", fullgraph=True
    )
    dy = torch.randn_like(theirs(*inputs, reduction=reduction))
    found, expected = (gradients(f, inputs, dy, **o) for f, o in ((compiled, {}), (theirs, {"reduction": reduction})))
    close(found, expected)
    inputs = [inputs[0], inputs[1].detach(), inputs[2], None]  # a frozen head
    close(*(gradients(f, inputs, dy, **o) for f, o in ((compiled, {}), (theirs, {"reduction": reduction}))))


def test_a_graph_without_gradients_has_no_slopes():
    from torch._dynamo.testing import AotEagerAndRecordGraphs

    recorded = AotEagerAndRecordGraphs()
    inputs = [t if t is None else t.detach() for t in head()]
    torch.compile(ours.linear_cross_entropy, backend=recorded, fullgraph=True)(*inputs)
    (graph,) = recorded.fw_graphs
    (call,) = (node for node in graph.graph.nodes if node.target is torch.ops.aotops.linear_cross_entropy.default)
    assert [None if t is None else t.shape for t in call.meta["val"]] == [(), None, None, None]


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("rows", "width", "classes"), [(16384, 768, 50304), (16384, 768, 50257), (1 << 20, 512, 32000)]
)
def test_the_workspace_is_a_fraction_of_the_logits(kind, rows, width, classes):
    """By what the library infers, without the memory."""
    from aotops.spec import TensorSpec

    specs = [TensorSpec((rows, width), "bfloat16"), TensorSpec((classes, width), "bfloat16")]
    specs += [TensorSpec((rows,), "int64"), None, None]
    attrs = OP.canonical(OP.bind(*specs[:4])[1])
    found = infer(OP, attrs, tuple(specs), kind)
    (scratch,) = found["workspace"].shape
    assert 4 * scratch < (900 << 20 if kind == "cuda" else 280 << 20)
    whole = [TensorSpec((), "bfloat16"), *specs, *(found[y] for y in OP.residuals)]
    backward = infer(OP.backward, attrs, tuple(whole), kind)
    assert backward["workspace"].shape == (1,)


# ----------------------------------------------------------------------------------------------------------------- rows


@ON
@pytest.mark.parametrize("rows", [511, 512, 513, 1024, 1025, 1537])
def test_rows_about_the_ends_of_chunks(where, rows):
    """A chunk on the CPU has 512 rows of so many classes."""
    inputs = head(rows, 1027, 3, where)
    inputs[2][::5] = -100
    for reduction in ("mean", "none"):
        dy = torch.randn_like(theirs(*inputs, reduction=reduction))
        close(*(gradients(f, inputs, dy, reduction=reduction) for f in (ours.linear_cross_entropy, theirs)))


@ON
@pytest.mark.parametrize("classes", [4095, 4097, 5000, 5001])
def test_many_classes(where, classes):
    """On a GPU the lines of logits of 4097 and 5001 are longer than the slopes of weight and bias."""
    inputs = head(3, classes, 4, where)
    for mine, its in zip(*(gradients(f, inputs) for f in (ours.linear_cross_entropy, theirs)), strict=True):
        close(mine, its)


def test_export_with_any_number_of_classes():
    class Model(torch.nn.Module):
        def forward(self, x, weight, target, bias):
            return ours.linear_cross_entropy(x, weight, target, bias)

    classes = torch.export.Dim("classes", min=2)
    shapes = None, {0: classes}, None, {0: classes}
    program = torch.export.export(Model(), tuple(t.detach() for t in head()), dynamic_shapes=shapes).module()
    for count in (2, 8, 4096, 5000, 5001):
        inputs = [t.detach() for t in head(classes=count)]
        close(program(*inputs), theirs(*inputs))


@ON
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_ignored_rows_have_no_gradient(where, dtype):
    """Where all are, the mean is NaN, and its gradients are 0; so they are of the ignored rows if dy is infinite."""
    inputs = head(where=where, dtype=dtype)
    inputs[2][:] = -100
    y, found = gradients(ours.linear_cross_entropy, inputs)
    assert y.isnan()
    assert not any(each.any() for each in found)
    inputs[2][1] = 2
    _, (dx, *_) = gradients(ours.linear_cross_entropy, inputs, torch.tensor(float("inf"), device=where, dtype=dtype))
    assert not dx[0].any()
    assert not dx[2:].any()


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.01}], ids=str)
def test_ignored_rows_that_are_infinite_have_no_gradient(where, dtype, options):
    """The rows of so many logits end with 31 elements of padding, which must be 0 in the slope."""
    x, *others = head(7, 4097, 16, where, dtype)
    with torch.no_grad():
        x[::2] = float("inf")
    others[1][::2] = -100
    y, (dx, *_) = gradients(partial(ours.linear_cross_entropy, **options), (x, *others))
    assert y.isfinite()
    assert not dx[::2].any()
    assert dx[1::2].isfinite().all()


@ON
def test_no_rows(where):
    x, weight, target, bias = head(0, where=where)
    for reduction in ("sum", "none"):
        y, found = gradients(partial(ours.linear_cross_entropy, reduction=reduction), (x, weight, target, bias),
                             torch.ones(() if reduction == "sum" else (0,), dtype=x.dtype, device=where))  # fmt: skip
        assert y.shape == (() if reduction == "sum" else (0,))
        assert not any(each.any() for each in found)


def test_a_class_that_there_is_not_is_named():
    x, weight, target, bias = head()
    target[3] = 5
    with pytest.raises(ValueError, match=r"linear_cross_entropy: target\[3\] is 5, expected 0 to 4"):
        ours.linear_cross_entropy(x, weight, target, bias)


# ----------------------------------------------------------------------------------------------------------- precision


@ON
def test_the_gradient_of_weight_is_summed_in_float32(where):
    """4096 equal terms of a frequent class: a sum in float16 would overflow, and one in bfloat16 stop growing."""
    rows, classes = 4096, 700
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.full((rows, 2), 20.0, dtype=dtype, device=where)
        weight = torch.zeros(classes, 2, dtype=dtype, device=where, requires_grad=True)
        target = torch.zeros(rows, dtype=torch.int64, device=where)
        ours.linear_cross_entropy(x, weight, target).backward()
        exact = torch.full((classes, 2), 20 / classes, dtype=torch.float64)
        exact[0] -= 20
        torch.testing.assert_close(weight.grad.double().cpu(), exact, rtol=0.01, atol=0)


@ON
def test_a_large_scale_of_the_loss_saves_small_gradients(where):
    """In float16 the mean divides in the backward: its quotient would be subnormal without the scale."""
    x, weight, target, bias = head(1000, 40, 3, where, torch.float16)
    scale = 2.0**14
    loss = ours.linear_cross_entropy(x, weight * 1e-3, target, bias, dtype="float32")
    (dx,) = torch.autograd.grad(loss, x, torch.tensor(scale, device=where))
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    rounded = (wide[1] * 1e-3).half().double()
    (expected,) = torch.autograd.grad(theirs(wide[0], rounded, target, wide[2]) * scale, wide[0])
    torch.testing.assert_close(dx.double(), expected, rtol=0.02, atol=1e-5)


@ON
def test_autocast_lowers_the_factors_and_widens_the_loss(where):
    x, weight, target, bias = head(40, 30, 8, where, torch.float32)
    class_weight = torch.rand(30, device=where) + 0.5
    with torch.autocast(where, torch.bfloat16):
        y = ours.linear_cross_entropy(x, weight, target, bias, class_weight=class_weight)
        other = F.cross_entropy(F.linear(x, weight, bias).float(), target, class_weight)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, other, rtol=1e-3, atol=1e-3)
    (a, b), (c, d) = torch.autograd.grad(y, [x, weight]), torch.autograd.grad(other, [x, weight])
    torch.testing.assert_close((a, b), (c, d), rtol=0.05, atol=2e-3)


# ------------------------------------------------------------------------------------------------------------- orders


@ON
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_order(where, reduction):
    x, weight, target, bias = head(where=where)
    f = partial(ours.linear_cross_entropy, target=target, reduction=reduction, label_smoothing=0.1, z_loss=0.01)
    assert torch.autograd.gradgradcheck(lambda x, w, b: f(x, w, bias=b), (x, weight, bias))


@ON
def test_class_weights_may_have_a_gradient(where):
    """By a composition, which makes the logits."""
    x, weight, target, bias = head(where=where)
    class_weight = (torch.rand(5, dtype=x.dtype, device=where) + 0.5).requires_grad_()
    found = gradients(lambda *t: ours.linear_cross_entropy(t[0], t[1], target, t[2], class_weight=t[3]),
                      (x, weight, bias, class_weight))  # fmt: skip
    logits = F.linear(x, weight, bias)
    losses = -torch.log_softmax(logits, -1)[torch.arange(6, device=where), target] * class_weight[target]
    y = losses.sum() / class_weight[target].sum()
    close(found, (y, torch.autograd.grad(y, [x, weight, bias, class_weight])))


def test_torchs_dtype_of_the_loss():
    inputs = [t if t is None else t.detach() for t in head(dtype=torch.float32)]
    narrow = inputs[0].half(), inputs[1].half(), inputs[2]
    assert ours.linear_cross_entropy(*narrow, dtype=torch.float32).dtype == torch.float32
    assert [y.dtype for y in ours.linear_cross_entropy_lse(*narrow, dtype=torch.float32)] == [torch.float32] * 2


# ------------------------------------------------------------------------------------------------- logarithms of sums


def theirs_lse(x, weight, target, bias=None):
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits, target), logits.logsumexp(-1)


@PLAIN
@ON
def test_a_loss_alone_uses_the_gradients_of_the_forward(where):
    """No zeros stand for the gradient of lse, for which the backward would make the logits again."""
    inputs = head(where=where)
    y, lse = ours.linear_cross_entropy_lse(*inputs)
    with torch.profiler.profile() as profile:
        found = torch.autograd.grad(y, [inputs[0], inputs[1], inputs[3]], retain_graph=True)
    assert not any("zeros" in event.name for event in profile.events())
    other, other_lse = theirs_lse(*inputs)
    close((y, lse), (other, other_lse))
    close(found, torch.autograd.grad(other, [inputs[0], inputs[1], inputs[3]], retain_graph=True))
    both = torch.autograd.grad(y + (lse**2).sum(), [inputs[0], inputs[1], inputs[3]])
    close(both, torch.autograd.grad(other + (other_lse**2).sum(), [inputs[0], inputs[1], inputs[3]]))


@ON
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_weights_of_the_logarithms_operator_may_have_a_gradient(where, reduction):
    """By a composition, which makes the logits."""
    x, weight, target, bias = head(where=where)
    class_weight = (torch.rand(5, dtype=x.dtype, device=where) + 0.5).requires_grad_()
    options = {"class_weight": class_weight, "reduction": reduction}
    y, lse = ours.linear_cross_entropy_lse(x, weight, target, bias, **options)
    close(y, ours.linear_cross_entropy(x, weight, target, bias, **options))
    close(lse, F.linear(x, weight, bias).logsumexp(-1))
    wanted = x, weight, bias, class_weight
    found = torch.autograd.grad((y + lse).sum(), wanted)
    other, logits = ours.linear_cross_entropy(x, weight, target, bias, **options), F.linear(x, weight, bias)
    close(found, torch.autograd.grad((other + logits.logsumexp(-1)).sum(), wanted))


@ON
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [300, 3000])  # one chunk, and on the CPU several
def test_the_gradient_of_weight_may_be_written_over_its_slope(where, dtype, rows):
    """weight has more than 1 MiB, and classes that need no padding. Where dy is not 1, its product is written."""
    x, weight, target, bias = head(rows, 4096, 160, where, dtype)
    x = (0.1 * x).detach().requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    for scale in (1.0, 2.0):
        loss = ours.linear_cross_entropy(x, weight, target, bias, dtype="float32", reduction="mean")
        found = torch.autograd.grad(loss * scale, [x, weight, bias])
        expected = torch.autograd.grad(theirs(wide[0], wide[1], target, wide[2]) * scale, wide)
        for a, b in zip(found, expected, strict=True):
            assert (a.double() - b).norm() < 0.02 * b.norm()


# -------------------------------------------------------------------------------------------------------------- module


@ON
def test_the_module_is_a_head_and_its_loss(where):
    options = {"ignore_index": 3, "label_smoothing": 0.1, "z_loss": 0.01, "weight": torch.rand(5)}
    module = ours.LinearCrossEntropyLoss(4, 5, **options, device=where)
    plain = torch.nn.Linear(4, 5, device=where)
    module.load_state_dict(plain.state_dict(), strict=False)
    x, _, target, _ = head(where=where, dtype=torch.float32)
    close(module(x, target), ours.cross_entropy(plain(x), target, ignore_index=3, label_smoothing=0.1, z_loss=0.01,
                                                weight=options["weight"].to(where)), 1e-6)  # fmt: skip
    close(module.logits(x), plain(x), 1e-6)
    other = copy.deepcopy(module)
    assert torch.equal(other(x, target), module(x, target))
    assert "ignore_index=3" in repr(module)
    tied = torch.nn.Embedding(5, 4, device=where)
    module.weight = tied.weight
    module(x, target).backward()
    assert tied.weight.grad is not None
