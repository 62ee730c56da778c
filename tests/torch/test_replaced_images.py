"""replace in networks of images: convolutions, batch norms, and their ReLUs and residuals."""

from __future__ import annotations

import copy
import io

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import known_images, replaced_calls, replaced_classes, replaced_images  # noqa: E402
from aotops.frontends.torch.tensors import READS_TENSORS  # noqa: E402

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]
ON = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])


@pytest.fixture(autouse=True)
def forgotten():
    """Dynamo counts what it has compiled of one code, which all modules of a form share."""
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A module of a form: the attributes of all, by the names that the references have."""

    def __init__(self, channels=8, act=nn.ReLU, gate=False, path=False, shortcut=False):
        super().__init__()
        for i in ("", "_2", "_3"):
            self.add_module(f"CONV{i}", nn.Conv2d(channels, channels, 3, padding=1, bias=False))
            self.add_module(f"NORM{i}", nn.BatchNorm2d(channels))
            self.add_module(f"ACT{i}", act())
        self.DROPOUT, self.BLUR = nn.Identity(), nn.Identity()
        self.GATE = nn.Conv2d(channels, channels, 1) if gate else None
        self.PATH = nn.Dropout(0.5) if path else None
        self.SHORTCUT = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)) if shortcut else None


def block(reference, **options):
    return lambda: type("Net", (Block,), {"forward": reference})(**options)


class Activated(nn.BatchNorm2d):
    """As timm's."""

    def __init__(self, act, drop=nn.Identity):
        super().__init__(8)
        self.DROPOUT, self.ACT = drop(), act()

    forward = known_images._timm_batch_norm


BLOCKS = {
    "torchvision's basic block": block(known_images._torchvision_basic),
    "a shortcut": block(known_images._torchvision_basic, shortcut=True),
    "torchvision's bottleneck": block(known_images._torchvision_bottleneck, shortcut=True),
    "timm's basic block": block(known_images._timm_basic),
    "timm's bottleneck": block(known_images._timm_bottleneck, shortcut=True),
    "a gate": block(known_images._timm_bottleneck, gate=True),
    "a path": block(known_images._timm_basic, path=True, shortcut=True),
    "another activation": block(known_images._torchvision_basic, act=nn.SiLU),
}
MODULES = BLOCKS | {
    "timm's norm and ReLU": lambda: Activated(lambda: nn.ReLU(inplace=True)),
    "timm's norm and SiLU": lambda: Activated(lambda: nn.SiLU(inplace=True)),
    "timm's norm and Hardswish": lambda: Activated(nn.Hardswish),
    "timm's norm and Tanh": lambda: Activated(nn.Tanh),
    "timm's norm and dropout": lambda: Activated(nn.ReLU, lambda: nn.Dropout(0.5)),
    "in turn": lambda: nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.ReLU()
    ),
    "BatchNorm2d": lambda: nn.BatchNorm2d(8),
    "no momentum": lambda: nn.BatchNorm2d(8, momentum=None),
    "no statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "not affine": lambda: nn.BatchNorm2d(8, affine=False),
}
EVERY = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def pair(make, where="cpu", dtype=torch.float64):
    torch.manual_seed(0)
    theirs = make().to(where, dtype).train()
    for p in theirs.parameters():
        nn.init.normal_(p)
    mine = copy.deepcopy(theirs)
    assert ours.replace(mine).rows[0].operator == "batch_norm"
    return theirs, mine


def run(module, x):
    """The result, the gradients, and the buffers after it."""
    return run_as(module, module, x)


def run_as(call, module, x):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    torch.manual_seed(2)
    y = call(x)
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y)
    grads = torch.autograd.grad(y, leaves, dy, allow_unused=True) if y.requires_grad else ()
    return y.detach(), *grads, *(b.clone() for b in module.buffers())


def assert_alike(theirs, mine, x, tolerance=1e-6):
    for a, b in zip(run(mine, x), run(theirs, x), strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def images(where="cpu", dtype=torch.float64, n=3, last=False):
    torch.manual_seed(1)
    x = torch.randn(n, 8, 5, 6, dtype=torch.float64).to(where, dtype)
    return x.contiguous(memory_format=torch.channels_last) if last else x


@ON
@EVERY
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_results_gradients_and_statistics(make, last, where):
    """In training, and after it."""
    theirs, mine = pair(make, where)
    theirs, mine = (m.to(memory_format=torch.channels_last) if last else m for m in (theirs, mine))
    for n in (3, 2):
        assert_alike(theirs, mine, images(where, n=n, last=last))
    assert_alike(theirs.eval(), mine.eval(), images(where, last=last))
    with torch.no_grad():
        torch.testing.assert_close(mine.train()(images(where)), theirs.train()(images(where)))


def nodes(y):
    found, left = [], [y.grad_fn]
    while left:
        node = left.pop()
        found.append(node.name())
        left += [each for each, _ in node.next_functions if each is not None]
    return found


@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_a_norm_and_what_follows_are_one_operator(make):
    """But for a gate or a path before a sum, and a sum before another activation than a ReLU."""
    theirs, mine = pair(make)
    left = not isinstance(theirs.ACT, nn.ReLU) or theirs.GATE is not None or theirs.PATH is not None
    before, after = (nodes(module(images(n=2))) for module in (theirs, mine))
    activation = "ReluBackward0" if "ReluBackward0" in before else "SiluBackward0"
    assert before.count(activation) > 1
    assert after.count(activation) == after.count("AddBackward0") == left
    assert after.count("BatchNormReluBackward") == (not left)
    assert after.count("NativeBatchNormBackward0") == 0
    assert before.count("NativeBatchNormBackward0") == after.count("BatchNormBackward") + (not left)


@pytest.mark.parametrize("make", [*BLOCKS.values(), MODULES["in turn"], MODULES["timm's norm and ReLU"]])
def test_hooks_and_children_that_are_exchanged(make):
    theirs, mine = pair(make)
    called = []
    for name, _ in theirs.named_modules():
        for module in (theirs, mine):
            child = module.get_submodule(name)
            handle = child.register_forward_hook(lambda module, args, y, name=name: called.append(name) or y * 0.5)
            child.HANDLE = handle
    assert_alike(theirs, mine, images(), 1e-5)
    assert sorted(called[: len(called) // 2]) == sorted(called[len(called) // 2 :])
    for name, child in list(theirs.named_modules()):
        child.HANDLE.remove(), mine.get_submodule(name).HANDLE.remove()
    for name, child in list(theirs.named_modules()):
        for module in (theirs, mine):
            if name and isinstance(child, nn.ReLU):
                module.set_submodule(name, nn.Tanh())
            if name and isinstance(child, nn.BatchNorm2d):
                module.set_submodule(name, nn.GroupNorm(2, 8, dtype=torch.float64))
    assert_alike(theirs, mine, images(), 1e-5)


@EVERY
def test_copies_files_and_the_way_back(make):
    theirs, mine = pair(make)
    if type(theirs).__module__ == "torch.nn.modules.container":
        file = io.BytesIO()
        torch.save(mine, file)
        file.seek(0)
        assert_alike(copy.deepcopy(theirs), torch.load(file, weights_only=False), images())
    assert_alike(copy.deepcopy(theirs), copy.deepcopy(mine), images())
    ours.restore(mine)
    assert [type(m) for m in mine.modules()] == [type(m) for m in theirs.modules()]


@EVERY
def test_wrong_calls_are_errors_of_the_originals_type(make):
    theirs, mine = pair(make)
    integers, pixel = images(dtype=torch.int64), images()[:1, :, :1, :1]
    for x in (torch.ones(3, 8, 5, dtype=torch.float64), integers, images()[:, :4], pixel):
        found = []
        for module in (theirs, mine):
            try:
                found.append(module(x))
            except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                found.append(error)
        assert isinstance(found[0], Exception) is isinstance(found[1], Exception)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "no momentum"])  # torch does not compile that
def test_compiled_code_is_the_originals(name):
    theirs, mine = pair(MODULES[name])
    x, graphs = images(), []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    for module in (theirs, mine):
        torch._dynamo.reset()
        torch.manual_seed(0)
        torch.compile(module, backend=keep, fullgraph=True)(x)
    assert not any("aotops" in target for target in graphs[1])
    torch.testing.assert_close(list(mine.buffers()), list(theirs.buffers()))


@pytest.mark.parametrize("name", ["BatchNorm2d", "timm's norm and SiLU", "torchvision's basic block", "in turn"])
def test_compiled_for_a_gpu_in_16_bits_norms_are_the_librarys(name, monkeypatch):
    """Torch's compiler makes reductions of them. What follows is torch's."""
    theirs, mine = pair(MODULES[name])
    monkeypatch.setattr(replaced_images, "fuses", lambda x: True)
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(mine, backend=keep, fullgraph=True)
    expected = run(theirs, images())
    for a, b in zip(run_as(compiled, mine, images()), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in mine.modules())
    is_block = isinstance(mine, Block)
    found = [target for target in graphs[0] if target.startswith("aotops")]
    assert found == ["aotops.batch_norm.default"] * (2 if is_block else norms)


@pytest.mark.parametrize("then", [nn.Identity, nn.SiLU])
def test_transforms(then):
    """Without running statistics, which no transform lets a batch norm write to."""
    theirs = nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False), then()).double()
    mine = copy.deepcopy(theirs)
    ours.replace(mine)
    parameters = {name: p.detach() for name, p in theirs.named_parameters()}
    x, t = torch.randn(2, 3, 4, 5, 5, dtype=torch.float64)
    samples = x[:, None].expand(3, 2, 4, 5, 5)

    def loss(module, p, x):
        return torch.func.functional_call(module, p, x).pow(3).sum()

    for transform in (
        lambda m: torch.func.jvp(m, (x,), (t,))[1],
        lambda m: torch.func.vmap(m)(samples),
        lambda m: torch.func.hessian(lambda x: m(x).pow(3).sum())(x[:1, :, :2, :2]),
        lambda m: torch.func.vmap(torch.func.grad(lambda p, x: loss(m, p, x)), (None, 0))(parameters, samples),
        lambda m: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False),
        lambda m: torch.export.export(m, (x,)).module()(x),
    ):
        torch.testing.assert_close(transform(mine), transform(theirs), rtol=1e-6, atol=1e-8)


def test_frozen_and_mixed():
    """Parameters without a gradient, and, on a CPU, tensors of 16 bits, which are the original's."""
    theirs, mine = pair(MODULES["in turn"])
    for module in (theirs, mine):
        module[1].requires_grad_(False)
    assert_alike(theirs, mine, images())
    for dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(mine.to(dtype)(images(dtype=dtype)), theirs.to(dtype)(images(dtype=dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        assert mine.float()(images(dtype=torch.float32)).dtype is theirs.float()(images(dtype=torch.float32)).dtype


def test_a_residual_that_is_not_like_x_is_added_apart():
    """A sum in place broadcasts and converts the residual."""
    theirs, mine = pair(BLOCKS["a shortcut"])
    for module in (theirs, mine):
        module.SHORTCUT = nn.AdaptiveAvgPool2d(1)
    assert_alike(theirs, mine, images())
    for module in (theirs, mine):
        module.SHORTCUT = type("Narrow", (nn.Module,), {"forward": lambda self, x: x.float()})()
    assert_alike(theirs, mine, images())


class Backwards(nn.Sequential):
    def __iter__(self):
        return iter(reversed([*self._modules.values()]))


def test_what_is_left():
    def rows(module, **options):
        return {(row.module, row.operator, row.reason) for row in ours.replace(module, **options)}

    assert rows(nn.Sequential(nn.BatchNorm2d(8), nn.Tanh())) == {
        ("BatchNorm2d", "batch_norm", ""),
        ("Tanh", None, "no operator has its forward"),
    }
    assert rows(nn.SyncBatchNorm(8)) == {("SyncBatchNorm", None, "no operator has its forward")}
    assert rows(nn.BatchNorm2d(8), without="batch_norm") == {("BatchNorm2d", None, "not selected")}
    backwards = Backwards(nn.BatchNorm2d(8), nn.ReLU())
    assert ("Backwards", "batch_norm", "") not in rows(backwards, without="add_norm")
    assert backwards(images(dtype=torch.float32)).amin() < 0
    others = Block()
    others.NORM_2 = nn.GroupNorm(2, 8)
    others.__class__ = type("Net", (Block,), {"forward": known_images._torchvision_basic})
    assert ("Net", "batch_norm", "") not in rows(others)


# -------------------------------------------------------------------------------------------------------- convolutions

CONVOLUTIONS = {
    "3 x 3": ((8, 16, 3), {"padding": 1}),
    "1 x 1": ((8, 16, 1), {"bias": False}),
    "strided": ((8, 16, 3), {"stride": 2, "dilation": (1, 2)}),
    "groups": ((8, 16, 3), {"groups": 4}),
    "depthwise": ((8, 8, 5), {"padding": 2, "groups": 8}),
    "same": ((8, 16, 3), {"padding": "same"}),
    "same, an even kernel": ((8, 16, 2), {"padding": "same"}),
}


def convolutions(name, where, dtype, last):
    sizes, options = CONVOLUTIONS[name]
    torch.manual_seed(0)
    theirs = nn.Conv2d(*sizes, **options).to(where, dtype)
    theirs = theirs.to(memory_format=torch.channels_last) if last else theirs
    mine = copy.deepcopy(theirs)
    assert ours.replace(mine).rows[0].operator == "conv2d"
    return theirs, mine


def test_which_convolutions_of_many_channels_pay():
    """As test_which_convolutions_of_many_channels_are_served, where C leaves a call to Python."""
    x, weight = torch.randn(2, 16, 5, 5), torch.randn(16, 16, 3, 3)
    last = {"memory_format": torch.channels_last}
    assert replaced_images._pays(x, weight)
    assert not replaced_images._pays(x.bfloat16(), weight.bfloat16())
    assert replaced_images._pays(x.to(torch.bfloat16, **last), weight.bfloat16())
    assert replaced_images._pays(x.bfloat16(), weight.to(torch.bfloat16, **last))
    with torch.autocast("cpu", torch.bfloat16):
        assert not replaced_images._pays(x.to(**last), weight)


@pytest.mark.gpu
@gpu[1]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_on_a_gpu(name, last, dtype):
    theirs, mine = convolutions(name, "cuda", dtype, last)
    exact = copy.deepcopy(theirs).cpu().double()
    x = images("cuda", dtype, last=last)
    assert "Conv2DBackward" in nodes(mine(x.detach().requires_grad_()))[-6:] or "even" in name
    for a, b, c in zip(run(mine, x), run(theirs, x), run(exact, x.cpu().double()), strict=True):
        assert a.dtype is b.dtype
        apart, its = ((t.cpu().double() - c).norm() for t in (a, b))
        assert apart <= 2 * its + 2**-10 * c.norm()  # TF32, for a few channels of which torch takes float32
    if dtype is torch.float32:
        with torch.backends.cudnn.flags(allow_tf32=False):
            assert (mine(x).cpu().double() - exact(x.cpu().double())).abs().max() < 1e-4
    with torch.autocast("cuda", torch.bfloat16):
        assert mine.float()(x.float()).dtype is theirs.float()(x.float()).dtype is torch.bfloat16


@ON
def test_convolutions_that_are_the_originals(where, monkeypatch):
    """On a CPU; of one pixel, of float64, with other padding, and of images without a batch."""
    monkeypatch.setattr(ours.functional, "conv2d", lambda *_, **__: pytest.fail("served"))
    theirs, mine = convolutions("1 x 1", where, torch.float32, False)
    x = images(where, torch.float32)
    for given in (x if where == "cpu" else x[:, :, :1, :1], x[0]):
        y = mine(given)
        assert y.grad_fn.name() == theirs(given).grad_fn.name()
        torch.testing.assert_close(y, theirs(given), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(mine.double()(x.double()), theirs.double()(x.double()))
    mine.float().padding_mode = "circular"
    assert mine(x).grad_fn.name() != "Conv2DBackward"


def test_a_convolution_that_pads_otherwise_is_left():
    row = ours.replace(nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")).rows[0]
    assert (row.operator, row.reason) == (None, "its padding_mode is 'circular', expected 'zeros'")


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The device of the structs."""
    make = replaced_calls.call_of

    def made(*args):
        call = make(*args)
        call.struct.device = 1
        return call

    monkeypatch.setattr(replaced_classes, "_MADE", {})
    monkeypatch.setattr(replaced_calls, "call_of", made)


@pytest.mark.skipif(not READS_TENSORS, reason="this torch has no plain calls")
def test_which_convolutions_of_many_channels_are_served(on_the_cpu):
    """Groups, 32 bits and channels_last are served in training, under autocast groups alone."""
    x = torch.randn(2, 16, 5, 5)
    for groups in (1, 4, 16):
        module = nn.Conv2d(16, 16, 3, groups=groups)
        ours.replace(module)
        for dtype, last in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            form = {"dtype": dtype, "memory_format": torch.channels_last if last else torch.contiguous_format}
            given = x.to(**form)
            module.to(**form)
            is_served = nodes(module(given))[0] == "Conv2DBackward"
            assert is_served is (groups > 1 or dtype is torch.float32 or last)
            with torch.autocast("cpu", torch.bfloat16):
                is_served = nodes(module(given))[0] == "Conv2DBackward"
            assert is_served is (groups > 1)
            assert nodes(module.eval()(given))[0] != "Conv2DBackward"
            module.train()


@pytest.mark.skipif(not READS_TENSORS, reason="this torch has no plain calls")
@pytest.mark.parametrize("name", ["3 x 3", "1 x 1", "strided", "groups", "depthwise"])
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_a_plain_call_is_served_in_c(name, last, on_the_cpu, monkeypatch):
    theirs, mine = convolutions(name, "cpu", torch.float32, last)
    monkeypatch.setattr(ours.functional, "conv2d", lambda *_, **__: pytest.fail("served in Python"))
    x = images("cpu", torch.float32, last=last)
    mine(x)
    for a, b in zip(run(mine, x), run(theirs, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert nodes(mine(x))[0] == "Conv2DBackward"
    for given in (x, x.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            y = mine(given)
        assert (y.dtype, nodes(y)[0]) == (torch.bfloat16, "Conv2DBackward")
        torch.testing.assert_close(y.float(), theirs(given.float()), rtol=0.03, atol=0.03)
    with pytest.raises(RuntimeError):  # the original's
        mine(x.bfloat16())
