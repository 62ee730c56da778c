"""Calls in the code that Inductor writes: they are the dispatcher's, without its way."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import cached, compiled, registered, tensors  # noqa: E402
from aotops.library import LibraryError  # noqa: E402

pytestmark = pytest.mark.skipif(not tensors.READS_TENSORS, reason="before torch 2.10 they are the dispatcher's")
BY_NAME = {op.name: op for op in registered.in_c if op.library.name == "aotops"}


def test_an_unknown_operator_is_named():
    with pytest.raises(LibraryError, match="compiled code calls aotops::no_such, which is not registered"):
        compiled.bound("aotops", "no_such", (), ("y",))


@pytest.mark.parametrize(("attrs", "wanted"), [((), ("y",)), ((-1, 0), ("y",)), ((-1,), ("z",))])
def test_code_for_another_version_is_refused(attrs, wanted):
    """Inductor's cache does not know the version of the library."""
    with pytest.raises(LibraryError, match=r"aotops::softmax as another .* attributes \('dim',\), results \('y',\)"):
        compiled.bound("aotops", "softmax", attrs, wanted)
    with pytest.raises(TypeError, match="softmax: dim is 'a', expected an integer"):
        compiled.bound("aotops", "softmax", ("a",), ("y",))


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


def _torchs(x):
    return torch.softmax(x, -1)


def _squares(function):
    return lambda x: function(x).square().sum()


TRANSFORMS = {
    "vmap": torch.vmap,
    "grad": lambda f: torch.func.grad(_squares(f)),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "negated": lambda f: lambda x: f(torch._neg_view(x)),
    "empty": lambda f: lambda x: f(x[:0]),
    "parameter": lambda f: lambda x: f(torch.nn.Parameter(x)).detach(),
    "inference": torch.inference_mode(),
    "no_grad": torch.no_grad(),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_call_means_what_the_dispatchers_does(name, is_compiled):
    """Transforms, modes and views mean the same to what is bound, and to compiled code that ran before without them."""
    torch._dynamo.reset()  # which gives up after eight kinds of arguments
    x, run = torch.randn(3, 4, 6), compiled.bound("aotops", "softmax", (-1,), ("y",))
    if is_compiled:
        run = torch.compile(lambda x: ours.softmax(x))
        torch.testing.assert_close(run(x), _torchs(x))
    torch.testing.assert_close(TRANSFORMS[name](run)(x), TRANSFORMS[name](_torchs)(x))


GRAPHS = {
    "a kernel": (torch._neg_view, lambda x: ours.softmax(x)),
    "a decomposed operator": (torch._neg_view, lambda x: ours.gelu(x)),
    "a view": (lambda x: torch.complex(x, -x).conj().imag, lambda x: ours.softmax(x[:, 1:].transpose(0, 1))),
    "negated again": (lambda x: torch._neg_view(x.mT), lambda x: ours.softmax(torch._neg_view(x))),
}


@pytest.mark.parametrize(("negated", "function"), GRAPHS.values(), ids=GRAPHS)
def test_an_input_is_read_with_its_sign(negated, function):
    from torch._inductor import config

    torch._dynamo.reset()
    x = negated(torch.randn(5, 3, 6)).detach().requires_grad_()
    assert x.is_neg()
    with config.patch(force_disable_caches=True):
        results = [(y, *torch.autograd.grad(y.square().sum(), x)) for y in (torch.compile(function)(x), function(x))]
    torch._dynamo.reset()
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


WRITES = {
    "all": lambda x: x.mul_(0.5),
    "clamped": lambda x: x.clamp_(-0.1, 0.3),
    "negated": lambda x: x.neg_(),
    "some": lambda x: x[1:].mul_(0.5),
    "a transpose, after all": lambda x: (x.mul_(0.5), x.mT.add_(1)),
    "broadcast": lambda x: x.copy_(x[0].exp()),
    "a constant": lambda x: x.fill_(2.0),
    "read before and after": lambda x: (x.exp() + x.add_(1)).sum() + x,
    "a kernel": lambda x: x.copy_(ours.softmax(x)),
}
SIGNED = {
    "all": torch._neg_view,
    "an imaginary part": lambda x: torch.complex(x, -x).conj().imag,
    "a transpose": lambda x: torch._neg_view(x[1:].mT),
}


@pytest.mark.parametrize(
    ("made", "write"), [*(("an imaginary part", write) for write in WRITES), ("all", "some"), ("a transpose", "some")]
)
def test_an_input_is_written_with_its_sign(made, write):
    from torch._inductor import config

    torch._dynamo.reset()
    memory = torch.randn(5, 4, 4, dtype=torch.float64)
    x, expected = (SIGNED[made](memory.clone()) for _ in range(2))
    assert x.is_neg()
    with config.patch(force_disable_caches=True), torch.no_grad():
        got, result = torch.compile(WRITES[write])(x), WRITES[write](expected)
    torch._dynamo.reset()
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(got, result)


def test_a_leaf_is_written_with_its_sign():
    """In a graph that has a backward."""
    from torch._inductor import config

    def function(x, weight):
        with torch.no_grad():
            x.mul_(0.5)
        return ours.softmax(x * weight) * x

    torch._dynamo.reset()
    memory, weight = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64, requires_grad=True)
    x, expected = (torch._neg_view(memory.clone()).requires_grad_() for _ in range(2))
    with config.patch(force_disable_caches=True):
        got, result = torch.compile(function)(x, weight), function(expected, weight)
        gradients = [torch.autograd.grad(y.square().sum(), (t, weight)) for y, t in ((got, x), (result, expected))]
    torch._dynamo.reset()
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(got, result)
    torch.testing.assert_close(*gradients)


def test_tensors_without_values_and_subclasses_are_the_dispatchers():
    run, x = compiled.bound("aotops", "softmax", (-1,), ("y",)), torch.randn(4, 6)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    for given in (fake, x.to("meta"), x.as_subclass(_Subclass)):
        got, expected = run(given), torch.ops.aotops.softmax(given, -1)
        assert (type(got), got.shape, got.device) == (type(expected), expected.shape, expected.device)
    targets = [node.target for node in make_fx(run)(x).graph.nodes]
    assert torch.ops.aotops.softmax.default in targets


class _Subclass(torch.Tensor):
    pass


def test_results_die_with_their_last_use():
    x = torch.randn(4, 6)
    one = compiled.bound("aotops", "softmax", (-1,), ("y",))(x)
    two = compiled.bound("aotops", "add_rms_norm", ((6,), 1e-5, 0.0), BY_NAME["add_rms_norm"].results)(x, x, None, None)
    alive = [weakref.ref(t) for t in (one, *two) if t is not None]
    del one, two
    assert [ref() for ref in alive] == [None] * len(alive)


def test_threads_bind_and_call_at_once():
    compiled.bound.cache_clear()
    inputs = [torch.randn(3, n) for n in range(1, 40)]

    def work(_):
        return [compiled.bound("aotops", "softmax", (-1,), ("y",))(x) for x in inputs]

    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(work, range(8)):
            for got, x in zip(results, inputs, strict=True):
                torch.testing.assert_close(got, _torchs(x))


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


def test_a_backward_of_every_input_is_bound():
    """torch then adds by name that all results are wanted."""
    x, weight, bias = (t.requires_grad_() for t in (torch.randn(4, 6), torch.randn(6), torch.randn(6)))

    def gradients(norm):
        return torch.autograd.grad(norm(x, 6, weight, bias).square().sum(), (x, weight, bias))

    got, code = _code_of(gradients, torch.compile(ours.layer_norm))
    for one, other in zip(got, gradients(ours.layer_norm), strict=True):
        torch.testing.assert_close(one, other)
    assert "torch.ops.aotops.layer_norm_backward.default(" not in code
    assert code.count("aotops_0_layer_norm_backward(") == 1


@pytest.mark.parametrize("without", ["fallback", "imports", "tensors"])
def test_a_torch_that_is_not_as_it_was(monkeypatch, without):
    """The code calls the dispatcher then."""
    if without == "fallback":
        monkeypatch.setattr(compiled, "_fallback_of", lambda result: None)
    elif without == "imports":
        monkeypatch.setattr(compiled, "_IMPORT", "no_such_method")
    else:
        monkeypatch.setattr(compiled, "READS_TENSORS", False)
        compiled.bound.cache_clear()
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(3, 3, 3, 3)
    got, code = _code_of(torch.compile(_thrice), x, weight)
    compiled.bound.cache_clear()
    torch.testing.assert_close(got, _thrice(x, weight), rtol=1e-4, atol=1e-4)
    assert ("aotops_bound" in code) is (without == "tensors")


def test_shapes_that_are_symbolic_are_bound():
    function = torch.compile(_thrice, dynamic=True)
    for n in (4, 5, 7):
        x, weight = torch.randn(n, 3, n, n + 1), torch.randn(3, 3, 3, 3)
        torch.testing.assert_close(function(x, weight), _thrice(x, weight), rtol=1e-4, atol=1e-4)
    _, code = _code_of(torch.compile(_thrice, dynamic=True), x, weight)
    assert code.count("aotops_0_conv2d(") == 3


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_has_been_traced(inside):
    """The backward runs inside of it, or outside."""
    x, weight = (t.requires_grad_() for t in (torch.randn(2, 3, 5, 5), torch.randn(3, 3, 3, 3)))

    def gradients(function):
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x, weight)
            if inside:
                return y, *torch.autograd.grad(y.float().square().sum(), (x, weight))
        return y, *torch.autograd.grad(y.float().square().sum(), (x, weight))

    for got, expected in zip(gradients(torch.compile(_thrice)), gradients(_thrice), strict=True):
        assert got.dtype == expected.dtype
        assert (got - expected).norm() < 0.02 * expected.norm()


def test_a_compiled_autograd():
    x, weight = (t.requires_grad_() for t in (torch.randn(2, 3, 5, 5), torch.randn(3, 3, 3, 3)))
    expected = torch.autograd.grad(_thrice(x, weight).square().sum(), (x, weight))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="inductor")):
        torch.compile(_thrice)(x, weight).square().sum().backward()
    for t, gradient in zip((x, weight), expected, strict=True):
        torch.testing.assert_close(t.grad, gradient, rtol=1e-4, atol=1e-4)


def test_an_exported_program_compiles():
    class Model(torch.nn.Module):
        def forward(self, x, weight):
            return _thrice(x, weight)

    x, weight = torch.randn(2, 3, 5, 5), torch.randn(3, 3, 3, 3)
    program = torch.export.export(Model(), (x, weight)).module()
    got, code = _code_of(torch.compile(program), x, weight)
    torch.testing.assert_close(got, _thrice(x, weight), rtol=1e-4, atol=1e-4)
    assert code.count("aotops_0_conv2d(") == 3


WARM = """
import torch
from aotops.frontends import torch as ours
from torch._dynamo.utils import counters
torch.manual_seed(0)
x, weight = torch.randn(2, 3, 5, 5), torch.randn(3, 3, 3, 3, requires_grad=True)
y = torch.compile(lambda x, w: ours.conv2d(torch.tanh(x), w, None, 1, 1))(x, weight)
y.square().sum().backward()
hits = sum(n for key, n in {**counters["inductor"], **counters["aot_autograd"]}.items() if key.endswith("cache_hit"))
print(y.double().sum().item(), weight.grad.double().sum().item(), hits > 0)
"""


def test_a_process_that_finds_the_code_in_the_cache(python, tmp_path):
    """The names in it are bound as it is loaded, with nothing traced."""
    cold, warm = (python(WARM, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split() for _ in range(2))
    assert cold[:2] == warm[:2]
    assert (cold[2], warm[2]) == ("False", "True")


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


CACHED = """
import torch
from torch._dynamo.utils import counters
from aotops.frontends import torch as ours
from aotops.frontends.torch import cached
cached._of_package = {version}
torch.compile(lambda x: ours.softmax(x))(torch.ones(3, 5))
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""


def test_cached_code_is_that_of_the_version(python, tmp_path, monkeypatch):
    """The caches on disk are asked for the code of this version alone: autograd's, and that of graphs, which is asked
    where autograd's has none."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", raising=False)

    def hits(version="cached._of_package"):
        return python(CACHED.format(version=version)).split()

    assert hits() == ["0", "0"]
    assert int(hits()[0]) > 0
    assert hits("lambda: 'another'") == ["0", "0"]


def test_the_key_of_cached_code_has_all_sources():
    assert {"signs.py", "cached.py", "imports.py", "torch_schema.py", "op.py", "softmax.py"} <= {
        file.name for file in cached._sources()
    }
