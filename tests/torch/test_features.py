"""Uses of an operator besides calling it: ``out``, checkpoints, modes, counters, copies, layouts."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle

import pytest

torch = pytest.importorskip("torch")

from aotops.frontends import torch as ours  # noqa: E402
from aotops.op import Autocast  # noqa: E402
from aotops.ops import OPS  # noqa: E402

F = torch.nn.functional


def images(n, channels, side, format=torch.contiguous_format):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, channels, side, side, generator=generator).to(memory_format=format)


X, Z, W, B = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((4, 6), (4, 6), (6,), (6,)))
CALLS = {
    "add": lambda **o: ours.add(X, Z, 2, **o),
    "add of broadcast shapes": lambda **o: ours.add(X, W, **o),
    "add of two dtypes": lambda **o: ours.add(X.double(), Z, **o),
    "gelu": lambda **o: ours.gelu(X, **o),
    "softmax": lambda **o: ours.softmax(X, 0, **o),
    "layer_norm": lambda **o: ours.layer_norm(X, 6, W, B, **o),
    "rms_norm": lambda **o: ours.rms_norm(X, 6, W, **o),
    "swiglu": lambda **o: ours.swiglu(X, Z, **o),
    "matmul": lambda **o: ours.matmul(X, Z.mT, **o),
    "matmul with a vector": lambda **o: ours.matmul(X, W, **o),
    "linear": lambda **o: ours.linear(X, Z, **o),
    "cross_entropy": lambda **o: ours.cross_entropy(X, torch.tensor([1, 0, 5, 2]), **o),
    "conv2d": lambda **o: ours.conv2d(images(2, 3, 5), images(4, 3, 3), padding=1, **o),
    "conv2d, channels_last": lambda **o: ours.conv2d(
        images(2, 3, 5, torch.channels_last), images(4, 3, 3, torch.channels_last), **o
    ),
}


# ----------------------------------------------------------------------------------------------------------------- out


@pytest.mark.parametrize("name", CALLS)
def test_out(name):
    """Contiguous, strided, without elements: it has the result, and is the same object."""
    call = CALLS[name]
    y = call()
    for out in (torch.empty_like(y), torch.empty(y.shape[::-1], dtype=y.dtype).permute(list(range(y.dim()))[::-1])):
        version = out._version
        out.fill_(7) if out.dim() else None
        assert call(out=out) is out
        assert torch.equal(out, y)
        assert out._version > version
    none = torch.empty(0, dtype=y.dtype)
    assert torch.equal(call(out=none), y)
    assert none.shape == y.shape
    assert torch.equal(call(out=None), y)


def test_out_that_overlaps_inputs():
    """Elementwise operators may write to an input; whatever else shares memory is right too."""
    for function in (lambda a, **o: ours.add(a, a, **o), ours.gelu, lambda a, **o: ours.softmax(a, 0, **o)):
        for part in (slice(0, 4), slice(1, 5)):
            memory = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
            expected = function(memory[:4].clone())
            assert torch.equal(function(memory[:4], out=memory[part]), expected)
    a = torch.randn(5, 5, generator=torch.Generator().manual_seed(3))
    expected = a @ a
    torch.testing.assert_close(ours.matmul(a, a, out=a), expected)


def test_out_is_refused():
    y = X.clone().requires_grad_()
    refused = [
        (RuntimeError, "gelu: out is given and an argument requires a gradient", lambda: ours.gelu(y, out=X.clone())),
        (RuntimeError, "requires a gradient", lambda: ours.gelu(X, out=y)),
        (ValueError, r"gelu: out has shape \(6,\), expected \(4, 6\)", lambda: ours.gelu(X, out=torch.empty(6))),
        (TypeError, "gelu: out has dtype float64, expected float32", lambda: ours.gelu(X, out=X.double())),
        (ValueError, "gelu: out has device meta, expected cpu", lambda: ours.gelu(X, out=X.to("meta"))),
        (ValueError, "share memory", lambda: ours.gelu(X, out=torch.empty(6).expand(4, 6))),
        (TypeError, "gelu: out is 3, expected a torch.Tensor", lambda: ours.gelu(X, out=3)),
        (TypeError, "out", lambda: ours.add_layer_norm(X, Z, 6, out=X.clone())),
        (ValueError, "add: ", lambda: ours.add(X, W[:4], out=X.clone())),
    ]
    for error, text, call in refused:
        with pytest.raises(error, match=text):
            call()
    with torch.no_grad():
        assert torch.equal(ours.gelu(y, out=X.clone()), ours.gelu(X))


def test_out_that_a_graph_saved_is_noticed():
    saved = X.clone()
    y = ours.add(saved * W.requires_grad_(), Z)
    with torch.no_grad():
        ours.gelu(X, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    W.requires_grad_(False)


def test_out_in_a_graph_of_torch_compile():
    compiled = torch.compile(lambda x, out: ours.softmax(x, 0, out=out), backend="aot_eager", fullgraph=True)
    out = torch.empty_like(X)
    compiled(X, out)
    assert torch.equal(out, ours.softmax(X, 0))


# ----------------------------------------------------------------------------------------- checkpoints, modes, counters


def block(x):
    return ours.softmax(ours.gelu(ours.layer_norm(ours.linear(x, square()), 6, W, B)), -1)


def square():
    return torch.eye(6) + W


def gradient(function):
    x = X.clone().requires_grad_()
    function(x).square().sum().backward()
    return x.grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    run = functools.partial(torch.utils.checkpoint.checkpoint, block, use_reentrant=reentrant)
    assert torch.equal(gradient(run), gradient(block))


@pytest.mark.parametrize("kept", ["layer_norm", "gelu", "softmax", "linear"])
def test_selective_checkpoint(kept):
    """A result that the policy saves is not computed again; others are."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context, operator, *args, **kwargs):
        saves = operator is getattr(torch.ops.aotops, kept).default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    x = X.clone().requires_grad_()
    y = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    with Calls() as mode:
        y.square().sum().backward()
    forward = [name for name in mode.seen if "aotops" in name and "backward" not in name]
    computed = {f"aotops.{name}.default" for name in ("layer_norm", "gelu", "softmax", "linear") if name != kept}
    assert set(forward) == computed
    assert len(forward) == 3
    assert torch.equal(x.grad, gradient(block))


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Functions(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_modes_inside_modes():
    with Calls() as outer, Functions() as functions, Calls() as inner:
        assert torch.equal(gradient(block), gradient(block))
    for mode in (outer, functions, inner):
        assert "aotops.softmax.default" in mode.seen
    assert "aotops.softmax_backward.default" in outer.seen


def test_fake_tensors_among_modes():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for modes in ((Calls, FakeTensorMode), (FakeTensorMode, Calls), (Functions, FakeTensorMode, Calls)):
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            x = torch.empty(4, 6, requires_grad=True)
            y = ours.softmax(ours.gelu(x), -1)
            y.sum().backward()
        assert {type(y), type(x.grad)} == {FakeTensor}
        assert y.shape == x.grad.shape == (4, 6)


PRODUCTS = {
    "matmul": (lambda a, b: ours.matmul(a, b), torch.matmul, (4, 6), (6, 5)),
    "matmul of a transposed view": (lambda a, b: ours.matmul(a, b.mT), lambda a, b: a @ b.mT, (4, 6), (5, 6)),
    "batched matmul": (lambda a, b: ours.matmul(a, b), torch.matmul, (2, 4, 6), (2, 6, 5)),
    "linear": (ours.linear, F.linear, (4, 6), (5, 6)),
    "linear, gelu": (lambda x, w: ours.linear(x, w, None, "gelu"), F.linear, (4, 6), (5, 6)),
    "conv2d": (ours.conv2d, F.conv2d, (2, 3, 8, 8), (4, 3, 3, 3)),
}


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_those_that_torch_counts(name, wanted):
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for function in PRODUCTS[name][:2]:
        inputs = [torch.randn(s, requires_grad=need) for s, need in zip(PRODUCTS[name][2:], wanted, strict=True)]
        with FlopCounterMode(display=False) as counter:
            function(*inputs).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# ------------------------------------------------------------------------------------------------------------- compile


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        ours.Conv2d(3, 4, 3), torch.nn.Flatten(2), ours.Linear(9, 6, activation="gelu"), ours.LayerNorm(6),
        torch.nn.Flatten(1), ours.Linear(24, 5), ours.Softmax(-1),
    )  # fmt: skip


def test_another_batch_size_does_not_recompile():
    net = model()
    torch._dynamo.reset()
    compiled = torch.compile(net, dynamic=True, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (4, 7, 16):
            y = compiled(images(n, 3, 5))
            y.sum().backward()
    assert y.shape == (16, 5)


def test_inductor_takes_each_operator_explicitly():
    import torch._inductor.config as config
    from torch._inductor.lowering import lowerings

    assert all(operator in lowerings for operator in ours.registered.dispatched.values())
    with config.patch(implicit_fallbacks=False):
        compiled = torch.compile(lambda x: ours.softmax(ours.gelu(x), 0), fullgraph=True)
        torch.testing.assert_close(compiled(X), ours.softmax(ours.gelu(X), 0))


def test_schemas_have_tags():
    for operator in ours.registered.dispatched.values():
        assert torch.Tag.pt2_compliant_tag in operator.tags
        assert {torch.Tag.needs_fixed_stride_order, getattr(torch.Tag, "needs_exact_strides", None)} & {*operator.tags}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_cuda_graphs_of_torch_compile():
    """mode="reduce-overhead": a recorded graph gives what the calls give, also for new values."""
    net = model().cuda()
    compiled = torch.compile(net, mode="reduce-overhead", fullgraph=True)
    for i in range(4):
        x = (images(4, 3, 5) + i).cuda()
        net.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x)
        y.square().sum().backward()
        gradients = [p.grad.clone() for p in net.parameters()]
        y = y.clone()
        net.zero_grad(set_to_none=True)
        expected = net(x)
        expected.square().sum().backward()
        torch.testing.assert_close(y, expected)
        for a, p in zip(gradients, net.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad)


# ------------------------------------------------------------------------------------------------- copies and layouts


def test_modules_and_functions_are_copied_and_pickled():
    net = torch.nn.Sequential(
        model(), ours.RMSNorm(5), ours.GELU("tanh"), ours.CrossEntropyLoss(label_smoothing=0.1), ours.LLTM(4, 4)
    )
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(buffer, weights_only=False)):
        assert [type(m) for m in other.modules()] == [type(m) for m in net.modules()]
        assert str(other) == str(net)
        x = images(2, 3, 5)
        assert torch.equal(other[0](x), net[0](x))
    for name in OPS:
        function = getattr(ours, name)
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is function


def test_state_is_torchs_both_ways():
    made = {
        "LayerNorm": (6,), "RMSNorm": (6,), "Linear": (6, 3), "Conv2d": (3, 4, 3), "GELU": (), "Softmax": (-1,),
        "CrossEntropyLoss": (W,),
    }  # fmt: skip
    for name, args in made.items():
        mine, theirs = getattr(ours, name)(*args), getattr(torch.nn, name)(*args)
        for parameter in theirs.parameters():
            torch.nn.init.uniform_(parameter)
        mine.load_state_dict(theirs.state_dict())
        for key, value in theirs.state_dict().items():
            assert torch.equal(mine.state_dict()[key], value)
        theirs.load_state_dict(mine.state_dict())


def test_channels_last_in_and_out():
    """Results have the strides of torch's."""
    x, weight = images(2, 8, 5, torch.channels_last), images(4, 8, 3, torch.channels_last)
    for mine, theirs in (
        (ours.conv2d(x, weight), F.conv2d(x, weight)),
        (ours.gelu(x), F.gelu(x)),
        (ours.add(x, x), x + x),
        (ours.softmax(x, 1), F.softmax(x, 1)),
        (ours.linear(x, torch.eye(5)), F.linear(x, torch.eye(5))),
    ):
        torch.testing.assert_close(mine, theirs, check_stride=True)


def test_autocast_lists_are_torchs():
    """An operator is cast on a device where torch's own is, except norms, which take float32 beside 16 bits."""
    names = {
        "add": "add.Tensor", "gelu": "gelu", "softmax": "softmax.int", "matmul": "matmul",
        "linear": "linear", "conv2d": "conv2d", "cross_entropy": "nll_loss", "swiglu": "silu",
    }  # fmt: skip
    for name, torchs in names.items():
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        cast = {device for device in ("cpu", "cuda") if has_kernel(f"aten::{torchs}", f"Autocast{device.upper()}")}
        how = OPS[name].autocast
        on_both = how not in (None, Autocast.FLOAT32_ON_CUDA)
        assert cast == ({"cpu", "cuda"} if on_both else {"cuda"} if how else set()), name
