"""Modules: the arguments, parameters and state of torch.nn's."""

from __future__ import annotations

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.testing.cases import CASES  # noqa: E402

lltm_as_written = CASES["lltm"].in_torch(torch, "lltm")


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize(
    ("name", "args", "shape"),
    [("Linear", (5, 4), (3, 5)), ("LayerNorm", (5,), (3, 5)), ("Conv2d", (5, 4, 1), (2, 5, 3, 3))],
)
def test_what_a_module_has_is_read_where_torch_reads_it(name, args, shape):
    """A pruned weight is an attribute, and one of the instance is found before a parameter."""
    x, said = torch.randn(shape, dtype=torch.float64), []
    for where in (torch.nn, ours):
        module = getattr(where, name)(*args, dtype=x.dtype)
        torch.nn.init.ones_(module.weight)
        prune.custom_from_mask(module, "weight", torch.arange(module.weight.numel()).view_as(module.weight) % 2)
        vars(module)["bias"] = torch.full_like(module.bias, 3.0)
        said.append(module(x))
    close(said[1], said[0])


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
