"""Images in channels_last: a plain call records one node, and its results are those of views with the channels last."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch.tensors import READS_TENSORS  # noqa: E402

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
ON = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
plain_calls = pytest.mark.skipif(not READS_TENSORS, reason="this torch has no plain calls")


def last(*shape, where="cpu", dtype=torch.float32):
    return torch.randn(shape, device=where).to(dtype).contiguous(memory_format=torch.channels_last)


def views(*tensors):
    return [None if t is None else t.movedim(1, -1) for t in tensors]


def conv2d(x, weight, bias, viewed):
    if not viewed:
        return ours.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
    return ours.conv2d(*views(x, weight), bias, padding=weight.shape[-1] // 2, layout="NHWC").movedim(-1, 1)


def batch_norm(x, weight, bias, viewed):
    if not viewed:
        return ours.batch_norm(x, weight, bias)
    y, mean, var = ours.batch_norm(*views(x), weight, bias, axis=-1)
    return y.movedim(-1, 1), mean, var


def batch_norm_relu(x, weight, bias, residual, viewed):
    if not viewed:
        return ours.batch_norm_relu(x, weight, bias, residual)
    y, mean, var = ours.batch_norm_relu(*views(x), weight, bias, *views(residual), axis=-1)
    return y.movedim(-1, 1), mean, var


def inputs_of(case, where, dtype=torch.float32, size=(2, 8, 5, 6)):
    x, channels = last(*size, where=where, dtype=dtype), size[1]
    vectors = [torch.randn(channels, device=where).to(dtype) for _ in range(2)]
    if case == "conv 3x3":
        return conv2d, [x, last(8, channels, 3, 3, where=where, dtype=dtype), None]
    if case == "conv 1x1":
        weight = last(8, channels, 1, 1, where=where, dtype=dtype)
        return conv2d, [x, weight, torch.randn(8, device=where).to(dtype)]
    if case == "batch_norm":
        return batch_norm, [x, *vectors]
    if case == "batch_norm, no weight":
        return batch_norm, [x, None, None]
    residual = None if case == "batch_norm_relu" else last(*size, where=where, dtype=dtype)
    return batch_norm_relu, [x, *vectors, residual]


CASES = [
    "conv 3x3", "conv 1x1", "batch_norm", "batch_norm, no weight", "batch_norm_relu", "batch_norm_relu, residual"
]  # fmt: skip
EACH = pytest.mark.parametrize("case", CASES)


def differentiated(function, inputs, make_dys, viewed):
    """The results and gradients of a call."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    results = function(*leaves, viewed)
    results = results if isinstance(results, tuple) else (results,)
    dys = make_dys(results)
    read = [(y, dy) for y, dy in zip(results, dys, strict=True) if dy is not None]
    given = [t for t in leaves if t is not None]
    grads = torch.autograd.grad([y for y, _ in read], given, [dy for _, dy in read], allow_unused=True)
    return [*results, *grads]


def assert_same(ones, others):
    for one, other in zip(ones, others, strict=True):
        if other is None:
            assert one is None
            continue
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@ON
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(2, 8, 5, 6), (3, 8, 1, 1), (2, 1, 4, 4), (0, 8, 4, 4), (1, 8, 1, 3)])
def test_results_are_those_of_views(where, case, dtype, size):
    function, inputs = inputs_of(case, where, dtype, size)
    seed = [torch.randn_like(t) for t in (inputs[0], inputs[0][:, :1])]

    def of_y(results):
        y = results[0]
        return (seed[0] if y.shape == seed[0].shape else seed[1].expand_as(y).clone(), *(None for _ in results[1:]))

    found, expected = (differentiated(function, inputs, of_y, viewed) for viewed in (False, True))
    if any(not t.is_contiguous() for t in inputs if t is not None):
        return assert_same(found, expected)
    for one, other in zip(found, expected, strict=True):  # with another layout, and sums in another order
        if other is not None:
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@ON
@EACH
@pytest.mark.parametrize("layout", ["contiguous", "expanded", "strided", "all outputs", "statistics alone"])
def test_any_gradient_is_taken(where, case, layout):
    function, inputs = inputs_of(case, where)
    if "batch_norm" not in case and layout in ("all outputs", "statistics alone"):
        pytest.skip("conv2d has one result")
    dy = torch.randn(2, 8, 5, 6, device=where)
    strided = torch.randn(2, 8, 5, 12, device=where)[..., ::2]
    made = {"contiguous": dy, "expanded": dy[:, :, :1, :1].expand_as(dy), "strided": strided, "all outputs": dy}
    made["statistics alone"] = None
    stats = [torch.randn(8, device=where) if layout in ("all outputs", "statistics alone") else None] * 2
    dys = lambda results: (made[layout], *stats[: len(results) - 1])  # noqa: E731
    assert_same(*(differentiated(function, inputs, dys, viewed) for viewed in (False, True)))


@plain_calls
@pytest.mark.parametrize("profiled", [False, True])
@ON
@EACH
def test_one_node_is_recorded(where, case, profiled):
    """In a profile too, which is of what runs without it."""
    function, inputs = inputs_of(case, where)
    leaves = [None if t is None else t.requires_grad_() for t in inputs]
    with torch.profiler.profile() if profiled else contextlib.nullcontext():
        results = function(*leaves, False)
    y = results[0] if isinstance(results, tuple) else results
    assert y.is_contiguous(memory_format=torch.channels_last)
    nodes = [node for node, _ in y.grad_fn.next_functions if node is not None]
    assert [node.variable for node in nodes] == [t for t in leaves if t is not None]


@plain_calls
@ON
@pytest.mark.parametrize("case", ["batch_norm", "batch_norm_relu"])
def test_statistics_that_nobody_reads_have_no_zeros(where, case):
    function, inputs = inputs_of(case, where)
    y = function(*(None if t is None else t.requires_grad_() for t in inputs), False)[0]
    dy = torch.randn_like(y)
    with torch.profiler.profile() as profile:
        y.backward(dy)
    assert not [event.name for event in profile.events() if "zero" in event.name or "fill" in event.name]


@EACH
def test_derivatives_of_gradients(case):
    function, inputs = inputs_of(case, "cpu", torch.float64, (2, 3, 3, 2))
    if "conv" in case:
        inputs[1] = inputs[1][:, :3].contiguous(memory_format=torch.channels_last)
    leaves = [t.requires_grad_() for t in inputs if t is not None]

    def call(*given):
        rest = iter(given)
        return function(*(None if t is None else next(rest) for t in inputs), False)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_a_saved_tensor_that_changed_is_an_error():
    x, weight = last(2, 3, 4, 4), last(3, 3, 3, 3).requires_grad_()
    y = ours.conv2d(x, weight, padding=1)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@EACH
def test_hooks_and_checkpoints(case):
    function, inputs = inputs_of(case, "cpu")
    leaves = [None if t is None else t.requires_grad_() for t in inputs]
    given = [t for t in leaves if t is not None]
    first = lambda results: results[0] if isinstance(results, tuple) else results  # noqa: E731
    run = lambda *args: first(function(*args, False))  # noqa: E731
    expected = torch.autograd.grad(run(*leaves).square().sum(), given)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        y = run(*leaves)
    assert packed
    assert_same(torch.autograd.grad(y.square().sum(), given), expected)
    y = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False)
    assert_same(torch.autograd.grad(y.square().sum(), given), expected)


@ON
@EACH
def test_transforms(where, case):
    function, inputs = inputs_of(case, where, torch.float32, (3, 8, 4, 4))
    x, *others = inputs

    def loss(x):
        results = function(x, *others, False)
        return (results[0] if isinstance(results, tuple) else results).square().sum()

    leaf = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    stacked = torch.stack([x, 2 * x]).movedim(2, -1).contiguous().movedim(-1, 2)
    if case != "batch_norm_relu, residual":
        each = torch.stack([torch.func.grad(loss)(t) for t in stacked])
        torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(stacked), each)


@ON
@pytest.mark.parametrize("where_bias", [False, True])
def test_conv2d_under_autocast(where, where_bias):
    x, weight = last(2, 8, 5, 6, where=where).requires_grad_(), last(8, 8, 3, 3, where=where).requires_grad_()
    bias = torch.randn(8, device=where, requires_grad=True) if where_bias else None
    given = [t for t in (x, weight, bias) if t is not None]
    with torch.autocast(where, torch.bfloat16):
        y = ours.conv2d(x, weight, bias, padding=1)
    narrow = [None if t is None else t.bfloat16() for t in (x, weight, bias)]
    expected = ours.conv2d(*narrow, padding=1)
    dy = torch.randn_like(y)
    assert_same([y, *torch.autograd.grad(y, given, dy)], [expected, *torch.autograd.grad(expected, given, dy)])


# -------------------------------------------------------------------------------------------------- running statistics


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("running", [None, torch.float32], ids=str)
@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
def test_running_statistics_are_torchs(where, dtype, running, momentum):
    theirs = torch.nn.BatchNorm2d(300, momentum=momentum).to(where, torch.float64)
    mine = ours.BatchNorm2d(300, momentum=momentum).to(where, dtype)
    if running is not None and dtype != torch.float64:
        mine.running_mean, mine.running_var = mine.running_mean.to(running), mine.running_var.to(running)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(mine.running_var.dtype, 1e-5)
    for scale in (1, 3):
        x = (scale * torch.randn(4, 300, 5, 3, device=where)).to(dtype)
        theirs(x.double()), mine(x.contiguous(memory_format=torch.channels_last))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        found, expected = getattr(mine, name), getattr(theirs, name)
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=tolerance, atol=tolerance)


@ON
def test_running_statistics_count_versions(where):
    """A backward is told that what it saved has changed."""
    mine = ours.BatchNorm2d(4).to(where)
    before = [b._version for b in mine.buffers()]
    x = torch.randn(2, 4, 3, 3, device=where, requires_grad=True)
    y = mine.eval()(x)
    mine.train()(x)
    assert all(b._version > v for b, v in zip(mine.buffers(), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_running_statistics_that_cannot_be_written():
    """The error is that of torch's batch norm, but for channels that share memory, to which that one writes."""
    x = torch.randn(2, 4, 3, 3)

    def refused(cls):
        module = cls(4)
        module.running_mean.requires_grad_()
        with pytest.raises(RuntimeError, match=r"requires_grad|requires grad") as error:
            module(x)
        return str(error.value)

    assert refused(ours.BatchNorm2d) == refused(torch.nn.BatchNorm2d)
    with torch.inference_mode():
        frozen = ours.BatchNorm2d(4, affine=False)
    with pytest.raises(RuntimeError, match="inference tensor"), torch.no_grad():
        frozen(x)
    shared = ours.BatchNorm2d(4)
    shared.running_var = torch.ones(4).as_strided((4,), (0,))
    with pytest.raises(RuntimeError, match="single memory location"):
        shared(x)


# ------------------------------------------------------------------------------------------------------------ compiled


class _Mixed(torch.nn.Module):
    """Operators of ours between convolutions of torch's."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (torch.nn.Conv2d(3, 6, 3, padding=1), torch.nn.Conv2d(4, 5, 3, padding=1))
        self.weight, self.bias = torch.nn.Parameter(torch.randn(4, 6, 3, 3)), torch.nn.Parameter(torch.randn(4))
        self.scale, self.shift = (torch.nn.Parameter(torch.randn(6)) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        y, mean, var = ours.batch_norm_relu(x, self.scale, self.shift, x)
        z = ours.conv2d(y, self.weight, self.bias, 2, 1)
        return self.last(ours.batch_norm(z, self.bias)[0]), z.flatten(1), mean, var


@pytest.mark.parametrize("dynamic", [False, True])
def test_images_that_inductor_lays_out_are_not_copied(dynamic):
    """But where shapes are symbolic."""
    from torch._inductor import config, lowering
    from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

    torch.manual_seed(0)
    model, x = _Mixed(), torch.randn(2, 3, 7, 8)

    def step(run):
        y, *others = run(x)
        parameters = list(model.parameters())
        return y, *others, *torch.autograd.grad(y.square().mean() + others[0].sin().sum(), parameters)

    expected = step(model)
    torch._dynamo.reset()
    with config.patch(force_layout_optimization=True), fresh_inductor_cache():
        got, codes = run_and_get_code(step, torch.compile(model, dynamic=dynamic))
    torch._dynamo.reset()
    assert [t.stride() for t in got[:4]] == [t.stride() for t in expected[:4]]  # gradients have torch's strides
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    code = "\n".join(codes)
    if READS_TENSORS and hasattr(lowering, "constrain_to_fake_tensors"):  # from torch 2.7 on
        for name in ("conv2d", "conv2d_backward"):
            assert f"'{name}', ((2, 2), (1, 1), (1, 1), 1, '{'NCHW' if dynamic else 'NHWC'}'," in code
        axis = 1 if dynamic else -1
        for name in ("batch_norm", "batch_norm_backward"):
            assert f"'{name}', (1e-05, {axis}, None)" in code
        for name in ("batch_norm_relu", "batch_norm_relu_backward"):
            assert f"'{name}', (1e-05, {axis})" in code


class _Normed(torch.nn.Module):
    """A convolution of a group norm's results, which on a GPU are NCHW."""

    def __init__(self, convolution):
        super().__init__()
        self.first, self.last = (convolution(8, 8, 3, padding=1) for _ in range(2))
        self.weight = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        x = self.first(x)
        normed = torch.nn.functional.group_norm(x.contiguous(), 2, self.weight)
        return x + self.last(torch.nn.functional.silu(normed))


def test_no_copy_around_a_kernel_is_hidden_from_inductor():
    """Images are written as the kernel reads them, in as many loops as around torch's convolution."""
    from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

    x, loops, found = last(2, 8, 5, 6), {}, {}
    for name, convolution in (("torch", torch.nn.Conv2d), ("ours", ours.Conv2d)):
        torch.manual_seed(0)
        model = _Normed(convolution).to(memory_format=torch.channels_last)
        loss = lambda x, model=model: model(x).square().mean()  # noqa: E731
        gradients = lambda run, model=model: torch.autograd.grad(run(x), list(model.parameters()))  # noqa: E731
        torch._dynamo.reset()
        compiled = torch.compile(loss)
        with fresh_inductor_cache():
            found[name], codes = run_and_get_code(gradients, compiled)
        loops[name] = [line for code in codes for line in code.splitlines() if line.strip().startswith("cpp_fused")]
        for got, expected in zip(found[name], gradients(loss), strict=True):
            assert got.stride() == expected.stride()
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with torch.profiler.profile() as profile:
        gradients(compiled)
    torch._dynamo.reset()
    assert not [event.name for event in profile.events() if event.name == "aten::copy_"]
    assert 0 < len(loops["ours"]) <= len(loops["torch"])
