"""Calls in the code that Inductor writes: they are the dispatcher's, without its way."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import compiled, registered, tensors  # noqa: E402
from aotops.library import LibraryError  # noqa: E402

pytestmark = pytest.mark.skipif(not tensors.READS_TENSORS, reason="before torch 2.10 they are the dispatcher's")
BY_NAME = {op.name: op for op in registered.in_c if op.library.name == "aotops"}


def test_an_unknown_operator_is_named():
    with pytest.raises(LibraryError, match="compiled code calls aotops::no_such, which is not registered"):
        compiled.bound("aotops", "no_such", (), ("y",))


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_what_is_not_plain_is_left_to_the_dispatcher():
    run, x = compiled.bound("aotops", "softmax", (-1,), ("y",)), torch.randn(4, 6)
    expected = torch.softmax(x.t(), -1)
    torch.testing.assert_close(run(x.t()), expected)
    with _Seen() as seen:
        run(x)
    assert seen.names == ["aotops::softmax"]
    with torch.profiler.profile() as profile:
        run(x)
    assert "aotops::softmax" in [event.name for event in profile.events()]
    with pytest.raises(TypeError, match="softmax: x has dtype int64"):
        run(x.long())


def _code_of(function, *inputs):
    from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

    torch._dynamo.reset()
    with fresh_inductor_cache():
        result, codes = run_and_get_code(function, *inputs)
    torch._dynamo.reset()
    return result, "\n".join(codes)


def test_the_code_binds_an_operator_once():
    x, weight = (t.requires_grad_() for t in (torch.randn(2, 3, 5, 5), torch.randn(3, 3, 3, 3)))

    def gradients(of):
        return torch.autograd.grad(of(x, weight).square().sum(), (x, weight))

    expected = gradients(_thrice)
    got, code = _code_of(gradients, torch.compile(_thrice))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # tanh is Inductor's
    assert "torch.ops.aotops.conv2d.default(" not in code
    for name in ("conv2d", "conv2d_backward"):
        assert code.count(f"= aotops_bound('aotops', '{name}',") == 1
        assert code.count(f"aotops_0_{name}(") == 3


def _thrice(x, weight):
    for _ in range(3):
        x = ours.conv2d(torch.tanh(x), weight, None, 1, 1)
    return x


def test_attributes_that_are_symbolic_are_the_dispatchers():
    """A stride that changes is an argument of the code."""
    function = torch.compile(lambda x, weight, stride: ours.conv2d(x, weight, None, stride), dynamic=True)
    x, weight = torch.randn(1, 2, 9, 9), torch.randn(3, 2, 2, 2)
    for stride in (1, 2, 3, 4):
        expected = torch.nn.functional.conv2d(x, weight, None, stride)
        torch.testing.assert_close(function(x, weight, stride), expected)


def test_parts_of_a_graph_have_the_names_of_the_whole():
    @torch.compile
    def function(x):
        x = ours.softmax(x)
        return torch.cond(x[0, 0] > 0, lambda x: ours.softmax(x) * 2, lambda x: ours.rms_norm(x, (8,)) * 2, (x,))

    x = torch.randn(4, 8)
    with torch.no_grad():
        got, code = _code_of(function, x)
    torch.testing.assert_close(got, torch.softmax(torch.softmax(x, -1), -1) * 2)
    assert code.count("import bound as aotops_bound") == 1


def test_prototypes_have_no_memory():
    """A CUDA graph's pool must hold no tensors but the graph's."""
    made = tensors.prototypes(BY_NAME["softmax"], (-1,), torch.randn(3, 4))
    assert all(t is None or t.untyped_storage().nbytes() == 0 for t in made)
