"""PyTorch's Inductor: it knows every operator before it meets one, and compiles a deep chain of them in good time.

Inductor is let take no operator that it was not told of (``implicit_fallbacks``). On any torch, that is an error where
it would otherwise write the operator's arguments down, which before torch 2.13 takes time without bound.
"""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends import torch_inductor  # noqa: E402
from aotops.ops import OPS  # noqa: E402

WIDTH, BLOCKS = 8, 12
GELU = OPS["gelu"]
NAMES = [one.name for op in OPS.values() for one in (op, op.backward) if one is not None and one.has_kernel]
UNKNOWN = """
import sys
def unknown():
    from torch._inductor import lowering
    ops = [getattr(torch.ops.aotops, name).default for name in {names}]
    return [str(op) for op in ops if op not in lowering.lowerings or op not in lowering.fallbacks]
"""


@pytest.fixture
def formatted(monkeypatch):
    """What Inductor writes the arguments of, and none of what it has compiled before."""
    from torch._inductor import config, exc

    written: list[str] = []
    monkeypatch.setattr(exc.OperatorIssue, "operator_str", lambda target, *_: written.append(str(target)) or "")
    with config.patch(implicit_fallbacks=False, force_disable_caches=True, compile_threads=1):
        yield written
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------------------- known


@pytest.mark.parametrize("environment", [{}, {"CI": "1"}], ids=["", "CI"])
def test_imported_after_the_frontend(python, environment):
    """Nothing of Inductor is imported by the frontend, and who imports it finds every operator, where it also checks
    what is registered (CI). Its module has the loader that it would have had."""
    program = UNKNOWN.format(names=NAMES) + (
        "from aotops.frontends import torch as ours; import torch\n"
        "print('torch._inductor' in sys.modules or 'torch._inductor.lowering' in sys.modules)\n"
        "from torch._inductor import lowering, config\n"
        "print(unknown(), type(lowering.__loader__) is type(config.__loader__) is type(lowering.__spec__.loader))"
    )
    assert python(program, **environment).split() == ["False", "[]", "True"]


def test_imported_before_the_frontend(python):
    program = UNKNOWN.format(names=NAMES) + (
        "import torch, torch._inductor.lowering\n"
        "from aotops.frontends import torch as ours\n"
        "print(unknown())"
    )  # fmt: skip
    assert python(program).split() == ["[]"]


def test_inductor_comes_up_without_make_fallback(monkeypatch):
    """A torch whose Inductor is not as it was is none the worse for us."""
    from torch._inductor import lowering

    def make_fallback(op):
        raise AssertionError("not reached")

    monkeypatch.setattr(lowering, "make_fallback", make_fallback)
    monkeypatch.setattr("sys.meta_path", [])
    with pytest.warns(UserWarning, match=f"Inductor {torch.__version__.partition('+')[0]}.* took no operators: TypeE"):
        torch_inductor.register([torch_inductor.Operator(GELU, GELU, ours.dispatched[GELU], None)], ours._composed)


# ------------------------------------------------------------------------------------------------------------- compiled


def _parameters(blocks: int):
    """For each block a norm's weight and bias, and the weights of two products."""
    shapes = (WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)
    return [[(torch.randn(s) / 4).requires_grad_() for s in shapes] for _ in range(blocks)]


def _ours(x, h, weight, bias, up, down):
    y, h = ours.add_layer_norm(x, h, WIDTH, weight, bias)
    return ours.add(ours.linear(ours.linear(y, up, None, "gelu"), down), y), h


def _torchs(x, h, weight, bias, up, down):
    h = x + h
    y = F.layer_norm(h, (WIDTH,), weight, bias)
    return F.linear(F.gelu(F.linear(y, up)), down) + y, h


def _chain(block):
    """Transformer-like: both results of a block go twice into the next."""

    def chain(x, parameters):
        h = x
        for each in parameters:
            x, h = block(x, h, *each)
        return x, h

    return chain


def _forward_and_backward(chain, x, parameters):
    x = x.detach().requires_grad_()
    results = chain(x, parameters)
    grads = [torch.full_like(y, 0.5) for y in results]
    return [*results, *torch.autograd.grad(results, [x, *(p for each in parameters for p in each)], grads)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_chain_is_right(formatted, dynamic):
    """From the source to the compiled library, forward and backward. x is a transposed view, which no kernel takes."""
    parameters, (mine, torchs) = _parameters(2), map(_chain, (_ours, _torchs))
    compiled = torch.compile(mine, fullgraph=True, dynamic=dynamic)
    for rows in (5, 3) if dynamic else (5,):
        x = torch.randn(WIDTH, rows).mT
        results = [_forward_and_backward(f, x, parameters) for f in (compiled, mine, torchs)]
        for got, eager, expected in zip(*results, strict=True):
            # GELU is decomposed, and evaluated by Inductor's functions: float32, two blocks deep
            torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-6)
            # float32, sums of up to 32 terms in another order, two blocks deep
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not formatted


def _host_seconds(block, parameters, x) -> float:
    """This process's own: a machine under load takes longer by the clock."""
    torch._dynamo.reset()
    compiled = torch.compile(_chain(block), fullgraph=True)
    start = time.process_time()
    _forward_and_backward(compiled, x, parameters)
    return time.process_time() - start


def test_a_chain_compiles_as_fast_as_torchs(formatted, monkeypatch):
    """A time, since the fault was one: it doubled with each operator. The C++ compiler, which torch's operators need
    more of, is left out. Ours take a third of what torch's own do, and may take twice as much."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    x = torch.randn(5, WIDTH)
    for block in (_ours, _torchs):
        _host_seconds(block, _parameters(1), x)  # what is imported and built once
    mine, torchs = (_host_seconds(block, _parameters(BLOCKS), x) for block in (_ours, _torchs))
    assert mine < 2 * torchs, f"{mine:.1f} s, and {torchs:.1f} s of torch's own"
    assert not formatted


def test_operators_called_by_name(formatted):
    """As an exported graph calls them, without the public functions. The strides of inputs, here of a transposed, a
    sliced and a repeated one, decide on those of a result: these are eager torch's."""
    gelu, add = torch.ops.aotops.gelu.default, torch.ops.aotops.add.default

    def function(x):
        y = gelu((x + 1).mT, "none")
        return y, add(y, x[:1].mT.expand(-1, 5), 1.0, None), add(y[:, ::2], (x * 2).mT[:, ::2], 1.0, None)

    x = torch.randn(5, WIDTH)
    for got, expected in zip(torch.compile(function, fullgraph=True)(x), function(x), strict=True):
        torch.testing.assert_close(got, expected, check_stride=True)
    assert not formatted
