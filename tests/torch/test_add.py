"""add beside torch's: broadcasting, numbers on either side, and alpha."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.func import vmap  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
ON = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_broadcast_as_torch():
    for a, b in (((3, 1), (1, 4)), ((), (2, 3)), ((2, 1, 3), (0, 3)), ((4,), (4,))):
        results = []
        for f in (ours.add, torch.add):
            x, y = (torch.ones(s, dtype=torch.float64, requires_grad=True) for s in (a, b))
            z = f(x, y)
            (z * torch.arange(z.numel(), dtype=torch.float64).reshape(z.shape)).sum().backward()
            results.append((z, x.grad, y.grad))
        for ours_, theirs in zip(*results, strict=True):
            close(ours_, theirs)


NUMBERS = (2, -0.7, True, np.float64(0.3), 1e300, torch.inf, torch.nan)


@ON
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_add_of_a_number_as_torch(dtype, where):
    """On either side; strided, empty and compiled too. A number is not rounded to the dtype before it is added."""
    x = torch.randn(3, 4, dtype=dtype, device=where)
    functions = ours.add, torch.compile(ours.add, backend="eager", fullgraph=True)
    for value in NUMBERS:
        for alpha in (1, 0.5, -3):
            for t in (x, x.T, x[:, ::2], x[:0]):
                y = ours.add(t, value, alpha=alpha)
                expected = (t.double() + alpha * float(value)).to(dtype)
                torch.testing.assert_close(y, expected, equal_nan=True)
                assert y.stride() == torch.add(t, value, alpha=alpha).stride()
        if value != 1e300:  # which torch's own of float16 refuses to add to
            # torch rounds a first number to the dtype on some devices
            torch.testing.assert_close(ours.add(value, x), (float(value) + x.double()).to(dtype), equal_nan=True)
            torch.testing.assert_close(
                ours.add(value, x, alpha=2), torch.add(x, value / 2) * 2, atol=0.01, rtol=0.01, equal_nan=True
            )
    for f in functions:
        torch.testing.assert_close(f(x, 0.25, alpha=2), x + 0.5)
    if dtype.itemsize == 2:
        tenth = torch.tensor(0.1, dtype=dtype, device=where)
        exact = (-tenth.double() + 0.1).to(dtype)  # what rounding 0.1 loses
        assert exact != 0
        torch.testing.assert_close(ours.add(-tenth, 0.1), exact, rtol=0.01, atol=1e-12)


def test_add_refuses_what_is_no_number():
    x = torch.ones(3, requires_grad=True)
    half = torch.tensor(0.5)
    close(ours.add(x, x, alpha=half), 1.5 * x)
    with pytest.raises(TypeError, match=r"add: alpha is tensor\(0.5.*\), expected a number"):
        ours.add(x, x, alpha=half.requires_grad_())  # the gradient would be lost
    for other in ("1", None, [1.0], np.ones(3), 1j):
        with pytest.raises(TypeError, match=r"^add: b is "):
            ours.add(x, other)
    with pytest.raises(ValueError, match=r"^add: b_number is too large a number"):
        ours.add(x, 10**5000)
    with pytest.raises(TypeError, match=r"^add: a is 2, expected a torch\.Tensor"):
        ours.add(2, 3)


def test_numbers_that_are_one_key_are_one_number():
    """0.0 and -0.0, 1 and True are one to a cache: what a call gives does not depend on which was first."""
    negative = torch.tensor([-0.0])
    for value in (0.0, -0.0, 0, False, 0.0):
        assert not ours.add(negative, value).signbit()
    for value in (1, True, 1.0):
        assert ours.add(negative, value) == 1
    with pytest.raises(TypeError, match="alpha is True"):
        ours.add(negative, negative, alpha=True)


@pytest.mark.parametrize("alpha", [1, 0.3, 0, torch.nan])
def test_add_with_alpha_is_differentiated_as_torchs(alpha):
    """Broadcast, one side alone, twice, by torch.func, compiled, and in 16 bits."""
    args = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 1), (4,))]

    def of(f):
        return lambda a, b: f(f(a * a, b.exp(), alpha=alpha), 0.3, alpha=2).pow(3).sum()

    def differentiated(f):
        first = torch.autograd.grad(f(*args), args, create_graph=True)
        yield from first
        yield from torch.autograd.grad(sum(g.square().sum() for g in first), args)
        yield from (torch.autograd.grad(f(*args), a)[0] for a in args)
        yield from torch.func.jacrev(torch.func.grad(f, (0, 1)), (0, 1))(*args)[1]
        yield vmap(lambda a: torch.func.grad(f, 1)(a, args[1]))(args[0])

    for mine, theirs in zip(differentiated(of(ours.add)), differentiated(of(torch.add)), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    compiled = torch.compile(of(ours.add), backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(*(torch.autograd.grad(f(*args), args) for f in (compiled, of(torch.add))), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    half = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    grads = [torch.autograd.grad(f(half.detach(), half, alpha=alpha), half, half)[0] for f in (ours.add, torch.add)]
    assert grads[0].dtype == torch.bfloat16
    torch.testing.assert_close(*grads, equal_nan=True)
