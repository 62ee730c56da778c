"""Linear with accumulate_into_main_grad: the gradient of the weight is added to weight.main_grad in the product."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402

ACTIVATIONS = {
    None: lambda t: t,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def layer(*args, main_grad=0.0, **kwargs):
    torch.manual_seed(0)
    made = ours.Linear(*args, accumulate_into_main_grad=True, **kwargs)
    accumulate = torch.promote_types(made.weight.dtype, torch.float32)
    made.weight.main_grad = torch.full_like(made.weight, main_grad, dtype=accumulate, requires_grad=False)
    return made


def gradient(module, *batches):
    """The weight's gradient in float64, as torch computes it."""
    weight = module.weight.detach().double().requires_grad_()
    bias = None if module.bias is None else module.bias.detach().double()
    for x, dy in batches:
        z = torch.nn.functional.linear(x.detach().double(), weight, bias)
        ACTIVATIONS[module.activation](z).backward(dy.double())
    return weight.grad


def batch(module, *rows, requires_grad=False):
    x = torch.randn(*rows, module.in_features, dtype=module.weight.dtype, requires_grad=requires_grad)
    return x, torch.randn(*rows, module.out_features, dtype=module.weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 6, 4), (40, 50, 9000), (130, 70, 300), (3, 2, 0)], ids=str)
def test_microbatches_are_summed_in_the_accumulate_dtype(dtype, shape):
    """More exactly than a gradient that was rounded to 16 bits could be."""
    out, into, rows = shape
    module = layer(into, out, dtype=dtype, main_grad=1.0)
    batches = [batch(module, rows) for _ in range(3)]
    for x, dy in batches:
        module(x).backward(dy)
    assert module.weight.grad is None
    assert module.weight.main_grad.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    found, expected = module.weight.main_grad.double() - 1, gradient(module, *batches)
    wide = torch.finfo(module.weight.main_grad.dtype).eps
    torch.testing.assert_close(found, expected, rtol=0, atol=200 * wide * (1 + rows**0.5))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_other_gradient_need_be_wanted(activation):
    module = layer(6, 5, bias=False, activation=activation)
    x, dy = batch(module, 4)
    module(x).backward(dy)
    torch.testing.assert_close(module.weight.main_grad.double(), gradient(module, (x, dy)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_other_gradients_are_as_without_it(activation, bias):
    module = layer(6, 5, bias=bias, activation=activation, dtype=torch.float64)
    plain = ours.Linear(6, 5, bias=bias, activation=activation, dtype=torch.float64)
    plain.load_state_dict(module.state_dict())
    x, dy = batch(module, 2, 4, requires_grad=True)
    found = []
    for each in (module, plain):
        each(x).backward(dy)
        found.append((x.grad, each.bias.grad if bias else None))
        x.grad = None
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(module.weight.main_grad, plain.weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.weight.main_grad, gradient(module, (x, dy)), rtol=1e-12, atol=1e-12)


def test_the_bits_are_the_same_twice():
    found = []
    for _ in range(2):
        module = layer(64, 48, dtype=torch.bfloat16, activation="gelu")
        for _ in range(2):
            x, dy = batch(module, 700)
            module(x).backward(dy)
        found.append(module.weight.main_grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("zeros", [False, True])
def test_megatrons_hook_runs(zeros):
    """Its hook, of the node that accumulates, drops the gradient that autograd got."""
    module, seen = layer(6, 5), []
    weight = module.weight
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zeros

    def hook(p):
        seen.append((p.grad_added_to_main_grad, p.grad.shape, p.grad.dtype))
        if not p.grad_added_to_main_grad or p.zero_out_wgrad:
            p.main_grad.add_(p.grad)
        p.grad = None

    weight.register_post_accumulate_grad_hook(hook)
    x, dy = batch(module, 4)
    module(x).backward(dy)
    assert seen == [(True, weight.shape, weight.dtype)]
    torch.testing.assert_close(weight.main_grad.double(), gradient(module, (x, dy)), rtol=1e-5, atol=1e-5)


def test_a_weight_without_main_grad_has_an_ordinary_gradient():
    module = layer(6, 5)
    x, dy = batch(module, 4)
    for absent in (lambda: setattr(module.weight, "main_grad", None), lambda: delattr(module.weight, "main_grad")):
        absent()
        module.weight.grad = None
        module(x).backward(dy)
        torch.testing.assert_close(module.weight.grad.double(), gradient(module, (x, dy)), rtol=1e-5, atol=1e-5)


def test_a_layer_that_was_not_asked_leaves_main_grad():
    module = ours.Linear(6, 5)
    module.weight.main_grad = torch.zeros(5, 6)
    module(torch.randn(4, 6)).sum().backward()
    assert not module.weight.main_grad.any()
    assert module.weight.grad.any()


def test_a_frozen_weight_is_left():
    module = layer(6, 5)
    module.weight.requires_grad_(False)
    x, dy = batch(module, 4, requires_grad=True)
    module(x).backward(dy)
    assert not module.weight.main_grad.any()
    assert module.weight.grad is None
    torch.testing.assert_close(x.grad, dy @ module.weight)
    module.weight.requires_grad_()
    y = module(x)
    module.weight.requires_grad_(False)  # between forward and backward: the graph knows the weight as it was
    y.backward(dy)
    torch.testing.assert_close(module.weight.main_grad.double(), gradient(module, (x, dy)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_autograd_grad_returns_gradients_and_leaves_main_grad(activation):
    module = layer(6, 5, activation=activation, dtype=torch.float64)
    x, dy = batch(module, 4, requires_grad=True)
    expected = gradient(module, (x, dy))
    (dx,) = torch.autograd.grad(module(x), x, dy)
    x_alone = x.detach().requires_grad_()
    z = torch.nn.functional.linear(x_alone, module.weight.detach(), module.bias.detach())
    torch.testing.assert_close(dx, torch.autograd.grad(ACTIVATIONS[activation](z), x_alone, dy)[0])
    for inputs in (module.weight, [x, module.weight, module.bias]):
        found = torch.autograd.grad(module(x), inputs, dy)
        torch.testing.assert_close(found[0 if inputs is module.weight else 1], expected, rtol=1e-12, atol=1e-12)
    assert not module.weight.main_grad.any()
    # a second derivative, of what autograd.grad returned
    (first,) = torch.autograd.grad(module(x).square().sum(), module.weight, create_graph=True)
    second = torch.autograd.grad(first.sin().sum(), x)[0]
    weight, bias = module.weight.detach().requires_grad_(), module.bias.detach()
    z = ACTIVATIONS[activation](torch.nn.functional.linear(x, weight, bias))
    (first,) = torch.autograd.grad(z.square().sum(), weight, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first.sin().sum(), x)[0], rtol=1e-9, atol=1e-9)
    assert not module.weight.main_grad.any()


def test_backward_of_chosen_inputs():
    module = layer(6, 5)
    x, dy = batch(module, 4, requires_grad=True)
    y = module(x)
    y.backward(dy, inputs=[x], retain_graph=True)
    assert x.grad is not None
    assert not module.weight.main_grad.any()
    y.backward(dy, inputs=[module.weight], retain_graph=True)
    y.backward(dy)
    torch.testing.assert_close(module.weight.main_grad.double(), 2 * gradient(module, (x, dy)), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_create_graph_is_refused():
    module = layer(6, 5)
    x, dy = batch(module, 4)
    with pytest.raises(NotImplementedError, match=r"Linear: create_graph is True, expected False: .*main_grad"):
        module(x).backward(dy, create_graph=True)
    assert not module.weight.main_grad.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_adds_once(reentrant):
    module = layer(6, 5, activation="gelu")
    x, dy = batch(module, 4, requires_grad=True)
    checkpoint(lambda x: module(x).clone(), x, use_reentrant=reentrant).backward(dy)
    torch.testing.assert_close(module.weight.main_grad.double(), gradient(module, (x, dy)), rtol=1e-5, atol=1e-5)


def test_saved_tensors_may_be_packed():
    module = layer(6, 5, activation="silu")
    x, dy = batch(module, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = module(x)
    y.backward(dy)
    torch.testing.assert_close(module.weight.main_grad.double(), gradient(module, (x, dy)), rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_used_twice():
    module = layer(6, 6)
    x = torch.randn(4, 6)
    module(module(x)).square().sum().backward()
    weight = module.weight.detach().double().requires_grad_()
    twice = torch.nn.functional.linear
    bias = module.bias.detach().double()
    twice(twice(x.double(), weight, bias), weight, bias).square().sum().backward()
    torch.testing.assert_close(module.weight.main_grad.double(), weight.grad, rtol=1e-5, atol=1e-5)


def test_a_compiled_function_breaks_its_graph_there():
    module = layer(6, 5)
    x = torch.randn(4, 6)
    compiled = torch.compile(lambda x: module(x.sin()).cos().sum(), backend="aot_eager")
    for _ in range(2):
        compiled(x).backward()
    weight = module.weight.detach().requires_grad_()
    torch.nn.functional.linear(x.sin(), weight, module.bias.detach()).cos().sum().backward()
    torch.testing.assert_close(module.weight.main_grad, 2 * weight.grad)
    torch._dynamo.reset()
    whole = torch.compile(lambda x: module(x).sum(), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="linear"):
        whole(x)
    del module.weight.main_grad
    torch._dynamo.reset()
    whole(x).backward()
    assert module.weight.grad is not None


def test_autocast_adds_what_is_not_rounded():
    module = layer(64, 48)
    x, dy = torch.randn(500, 64), torch.randn(500, 48).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    expected = dy.double().T @ x.bfloat16().double()
    torch.testing.assert_close(module.weight.main_grad.double(), expected, rtol=0, atol=1e-4)
    assert module.weight.grad is None
    assert module.bias.grad.dtype == torch.float32


def test_functional_calls_with_other_parameters():
    module = layer(6, 5)
    x = torch.randn(4, 6)
    others = {name: p.detach().clone() for name, p in module.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    found = torch.func.grad(loss)(others)
    assert not module.weight.main_grad.any()
    weight = module.weight.detach().requires_grad_()
    torch.nn.functional.linear(x, weight, module.bias.detach()).square().sum().backward()
    torch.testing.assert_close(found["weight"], weight.grad)


def test_a_strided_main_grad():
    module = layer(6, 5)
    module.weight.main_grad = torch.zeros(6, 5).t()
    x, dy = batch(module, 4)
    module(x).backward(dy)
    torch.testing.assert_close(module.weight.main_grad.double(), gradient(module, (x, dy)), rtol=1e-5, atol=1e-5)


def test_what_saved_main_grad_finds_that_it_changed():
    module = layer(6, 5)
    doubled = (torch.ones((), requires_grad=True) * module.weight.main_grad).sum()
    module(torch.randn(4, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        doubled.backward()


REFUSED = [
    ("a number", lambda w: 0.0, TypeError, "main_grad is 0.0, expected the torch.Tensor of the forward"),
    ("bfloat16", lambda w: w.detach().bfloat16(), TypeError, "main_grad has dtype bfloat16, expected float32"),
    ("float64", lambda w: w.detach().double(), TypeError, "main_grad has dtype float64, expected float32"),
    ("a shape", lambda w: torch.zeros(6, 5), ValueError, r"main_grad has shape \(6, 5\), expected \(5, 6\)"),
    ("a device", lambda w: torch.zeros(5, 6, device="meta"), ValueError, "main_grad is on meta, expected cpu"),
    ("recorded", lambda w: torch.zeros(5, 6, requires_grad=True), ValueError, "main_grad requires a gradient"),
]


@pytest.mark.parametrize(("_", "made", "error", "text"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_another_main_grad_is_refused(_, made, error, text):
    module = layer(6, 5)
    module.weight.main_grad = made(module.weight)
    with pytest.raises(error, match=f"Linear: weight.{text}"):
        module(torch.randn(4, 6)).sum().backward()
    assert module.weight.grad is None


def test_a_main_grad_that_is_gone_is_refused():
    module = layer(6, 5)
    y = module(torch.randn(4, 6))
    del module.weight.main_grad
    with pytest.raises(TypeError, match=r"Linear: weight.main_grad is None, expected the torch.Tensor of the forward"):
        y.sum().backward()


def test_inputs_of_two_dtypes_are_refused_as_without_it():
    module = layer(6, 5)
    with pytest.raises(TypeError, match="linear: weight has dtype float32, expected float64"):
        module(torch.randn(4, 6, dtype=torch.float64))


def test_flops_are_counted():
    module = layer(6, 5)
    x, dy = batch(module, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(x).backward(dy)
    assert counter.get_total_flops() == 3 * 2 * 4 * 6 * 5
    with FlopCounterMode(display=False) as counter:
        module(x.detach()).backward(dy)
    assert counter.get_total_flops() == 2 * 2 * 4 * 6 * 5


def test_the_argument_is_kept_and_shown():
    module = layer(6, 5, activation="gelu")
    text = "Linear(in_features=6, out_features=5, bias=True, activation='gelu', accumulate_into_main_grad=True)"
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(each) == text
    assert "accumulate" not in repr(ours.Linear(6, 5))


def test_the_operator_states_what_it_writes():
    function = torch.ops.aotops.linear_accumulate
    assert str(function.default._schema).startswith(
        "aotops::linear_accumulate(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? pre_activation, "
        "Tensor(a!) dweight, str? activation, bool allow_tf32"
    )
    dy, x, weight = torch.randn(4, 5), torch.randn(4, 6), torch.randn(5, 6)
    torch.library.opcheck(function, (dy, x, weight, None, None, torch.zeros(5, 6), None, False))
    with pytest.raises(ValueError, match=r"linear_accumulate: dweight has shape \(6, 5\), expected \(5, 6\)"):
        function(dy, x, weight, None, None, torch.zeros(6, 5), None, False)
    with pytest.raises(TypeError, match=r"linear_accumulate: dweight has dtype float64, expected float32"):
        function(dy, x, weight, None, None, torch.zeros(5, 6, dtype=torch.float64), None, False)


class Stream:
    """Notes whom it waits for."""

    device = "cuda:0"

    def __init__(self, name, waits):
        self.name, self.waits = name, waits

    def wait_stream(self, other):
        self.waits.append((self.name, other.name))


def test_streams_wait_for_each_other_and_the_caller_for_all(monkeypatch):
    """A GPU's are stood for: the node of each product runs on the stream of its forward."""
    waits = []
    a, b, caller = (Stream(name, waits) for name in ("a", "b", "caller"))
    current = [caller]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, stream):
            ctx.weight, ctx.stream = weight, stream
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            current[0] = ctx.stream
            ours.accumulation._wait_for_others(ctx.weight)
            current[0] = caller
            return dy, None, None

    first, second = (torch.zeros(1, requires_grad=True) for _ in range(2))
    for _ in range(2):  # nothing is left over from a backward
        x = torch.ones((), requires_grad=True)
        y = Product.apply(Product.apply(Product.apply(x, first, a), second, caller), first, b)
        y.backward()
        assert waits == [("a", "b"), ("caller", "a")]
        waits.clear()
        assert not ours.accumulation._STREAMS
