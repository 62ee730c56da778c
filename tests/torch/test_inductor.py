"""PyTorch's Inductor: it knows every operator before it meets one, and compiles a deep chain of them in good time.

Inductor is let take no operator that it was not told of (``implicit_fallbacks``). On any torch, that is an error where
it would otherwise write the operator's arguments down, which before torch 2.13 takes time without bound.
"""

from __future__ import annotations

import copy
import time

import pytest

torch = pytest.importorskip("torch")

pytest.importorskip("torch._inductor.lowering")  # with which the operators' decompositions are registered

import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import inductor, padding  # noqa: E402
from aotops.ops import OPS  # noqa: E402

from .test_packed_heads import split, unbound  # noqa: E402

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
    """The arguments that Inductor writes, without a cache of what it has compiled before."""
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
        inductor.register(
            [inductor.Operator(GELU, GELU, ours.registered.dispatched[GELU], None)], ours.gradients.composed
        )


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


# ----------------------------------------------------------------------------------------------------------- decomposed


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Products and reductions are decomposed on the CPU too, and in any dtype."""
    import torch._inductor.lowering
    from torch._inductor.utils import fresh_inductor_cache

    monkeypatch.setattr(inductor, "_fuses", lambda x: True)
    torch._dynamo.reset()
    with fresh_inductor_cache():
        yield
    torch._dynamo.reset()


def _draw(*shape):
    return torch.randn(shape)


def _statistics(x):
    return x.mean((0, 2)), x.var((0, 2), correction=0)


CALLS = {
    "gelu": lambda: (_draw(3, 5), "none"),
    "gelu tanh": lambda: (_draw(3, 5), "tanh"),
    "gelu_backward": lambda: (_draw(3, 5), _draw(3, 5), "none"),
    "gelu_backward tanh": lambda: (_draw(3, 5), _draw(3, 5), "tanh"),
    "swiglu": lambda: (_draw(3, 5), _draw(3, 5)),
    "swiglu_backward": lambda: (_draw(3, 5), _draw(3, 5), _draw(3, 5)),
    "rope": lambda: (_draw(2, 3, 4, 6), _draw(5, 3), _draw(5, 3), None, False, "BSHD", None),
    "rope interleaved": lambda: (
        *(_draw(2, 4, 3, 7), _draw(5, 2), _draw(5, 2), torch.tensor([4, 0, 2]), True, "BHSD", 4),
    ),
    "rope_backward": lambda: (
        *(_draw(2, 3, 4, 6), None, _draw(2, 3, 6), _draw(2, 3, 6), None, False, "BSHD", None, [True, False, False]),
    ),
    "add": lambda: (_draw(3, 5), _draw(3, 5), 2.0, None),
    "batch_norm": lambda: (_draw(3, 5, 4), _draw(5), _draw(5), 0.1, 1, "hardswish"),
    "batch_norm of last channels": lambda: (_draw(3, 4, 5), None, _draw(5), 0.1, -1, None),
    "batch_norm without others": lambda: (_draw(5), _draw(5), None, 0.1, 0, "relu"),
    "batch_norm_backward": lambda: (
        *(_draw(3, 5, 4), _draw(5), _draw(5), x := _draw(3, 5, 4), _draw(5), _draw(5)),
        *(*_statistics(x), 0.1, 1, "silu"),
    ),
    "batch_norm_backward of a weight": lambda: (
        *(_draw(3, 5, 4), None, _draw(5), x := _draw(3, 5, 4), None, None),
        *(*_statistics(x), 0.1, 1, None, [False, True, False]),
    ),
    "add of a number": lambda: (_draw(3, 5), None, 2.0, 3.0),
    "linear": lambda: (_draw(2, 3, 5), _draw(4, 5), _draw(4), None, False),
    "linear of a vector": lambda: (_draw(5), _draw(4, 5), None, "silu", False),
    "linear gelu": lambda: (_draw(2, 3, 5), _draw(4, 5), _draw(4), "gelu", False),
    "linear_backward": lambda: (_draw(2, 3, 4), _draw(2, 3, 5), _draw(4, 5), None, None, None, False),
    "linear_backward relu": lambda: (_draw(2, 3, 4), _draw(2, 3, 5), _draw(4, 5), _draw(4), None, "relu", False),
    "linear_backward gelu": lambda: (
        *(_draw(3, 4), _draw(3, 5), _draw(4, 5), _draw(4), _draw(3, 4), "gelu_tanh", False, [True, False, True]),
    ),
    "matmul": lambda: (_draw(2, 3, 4), _draw(2, 4, 5), False, False, False),
    "matmul transposed": lambda: (_draw(2, 4, 3), _draw(5, 4), True, True, False),
    "matmul_backward": lambda: (_draw(2, 3, 5), _draw(2, 3, 4), _draw(2, 4, 5), False, False, False),
    "matmul_backward transposed": lambda: (_draw(3, 5), _draw(4, 3), _draw(5, 4), True, True, False, [False, True]),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_decomposition_is_the_operator(as_on_a_gpu, case):
    from torch._inductor.decomposition import select_decomp_table

    torch.manual_seed(0)
    operator, args = getattr(torch.ops.aotops, case.partition(" ")[0]).default, CALLS[case]()
    got, expected = select_decomp_table()[operator](*args), operator(*args)
    for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, expected)), strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # float32, a few terms in another order


_NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", _NARROW, ids=str)
def test_a_decomposed_gelu_of_16_bits_is_rounded_once(dtype):
    """Every number is tried. A value is off by half a unit in the last place, a slope by one of its larger term.
    torch's value, of 1 + erf, errs by 250 units in bfloat16."""
    from torch._inductor.decomposition import select_decomp_table

    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    x = x[x.abs() < 60]
    wide = x.double()
    distribution, density = torch.special.erfc(wide * -(0.5**0.5)) / 2, torch.exp(wide**2 / -2) / (2 * torch.pi) ** 0.5
    value, slope = wide * distribution, distribution + wide * density
    table, gelu, gelu_backward = select_decomp_table(), torch.ops.aotops.gelu, torch.ops.aotops.gelu_backward
    found = table[gelu.default](x, "none"), table[gelu_backward.default](torch.ones_like(x), x, "none")
    sizes = value.abs(), torch.maximum(distribution, (wide * density).abs())
    for got, exact, size, bar in zip(found, (value, slope), sizes, (0.51, 1.01), strict=True):
        info = torch.finfo(dtype)
        unit = info.eps * 2 ** torch.floor(torch.log2(size.clamp(info.tiny)))
        assert got.dtype == dtype
        assert ((got.double() - exact).abs() / unit).max() <= bar


@pytest.mark.parametrize("dtype", [*_NARROW, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("call", ["gelu", "gelu_backward", "linear gelu"])
def test_erfc_is_computed_where_its_digits_are_kept(as_on_a_gpu, call, dtype):
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    operator = getattr(torch.ops.aotops, call.partition(" ")[0]).default
    args = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in CALLS[call]()]
    nodes = make_fx(lambda: operator(*args), select_decomp_table())().graph.nodes
    assert any("erfc" in str(node.target) for node in nodes) == (dtype not in _NARROW)


def test_every_elementwise_operator_is_decomposed():
    from torch._inductor import lowering

    elementwise = [
        one for op in OPS.values() for one in (op, op.backward) if one and one.elementwise and one.has_kernel
    ]
    assert elementwise
    assert {ours.registered.dispatched[one] for one in elementwise} <= lowering.decompositions.keys()


def test_products_are_torchs_in_16_bits_on_a_gpu_alone():
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def targets(device, dtype):
        with FakeTensorMode():
            x, weight = (torch.empty(n, 8, device=device, dtype=dtype) for n in (6, 16))
            graph = make_fx(lambda *t: ours.linear(*t, None, "gelu"), select_decomp_table())(x, weight).graph
        return {node.target for node in graph.nodes}

    import torch._inductor.lowering

    kernel, product = torch.ops.aotops.linear.default, torch.ops.aten.mm.default
    assert targets("cuda", torch.bfloat16) & {kernel, product} == {product}
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.bfloat16)):
        assert targets(device, dtype) & {kernel, product} == {kernel}


def test_an_activation_is_computed_again_in_the_backward(as_on_a_gpu, monkeypatch):
    """The fused kernel writes the activation and what it is of; the second alone is kept."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table

    graphs = []

    def compiler(module, _):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def backend(module, inputs):
        partition = {"partition_fn": min_cut_rematerialization_partition, "decompositions": select_decomp_table()}
        return aot_module_simplified(module, inputs, fw_compiler=compiler, bw_compiler=compiler, **partition)

    def mlp(x, up, bias, down):
        return ours.linear(ours.linear(x, up, bias, "gelu_tanh"), down)

    monkeypatch.setattr(inductor, "_has_fused_kernel", lambda *_: True)
    torch.manual_seed(0)
    inputs = [(_draw(*shape) / 4).requires_grad_() for shape in ((2, 3, 8), (32, 8), (32,), (8, 32))]
    results = [
        [y := f(*inputs), *torch.autograd.grad(y.sum(), inputs)] for f in (torch.compile(mlp, backend=backend), mlp)
    ]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    forward, backward = graphs
    (fused,) = (node for node in forward.nodes if node.target is torch.ops.aotops.linear.default)
    kept = {node.name for node in backward.nodes if node.op == "placeholder"}
    activated, before = sorted(fused.users, key=lambda node: node.args[1])
    assert before.name in kept
    assert activated.name not in kept


# ----------------------------------------------------------------------------------------------------------- reductions


def _normalized(x, weight, bias, axis=1):
    y, mean, var = ours.batch_norm(torch.sin(x), weight, bias, 0.1, axis)
    return torch.relu(y), mean, var


def _y_alone(x, *rest):
    return _normalized(x, *rest)[:1]


def _statistics_alone(x, *rest):
    return _normalized(x, *rest)[1:]


def _constants(x, weight, bias):
    return _normalized(x.detach(), weight, bias)


def _of_a_view(x, weight, bias):
    return _normalized(x.transpose(2, 3)[..., ::2], weight, bias)


def _last(x, weight, bias):
    return _normalized(x.movedim(1, -1), weight, bias, -1)


def _without_weight(x, weight, bias):
    return _normalized(x, None, bias.to(x.dtype))


def _viewed(x, weight, bias):
    """The result as a contiguous one alone can be viewed."""
    y, *statistics = _of_a_view(x, weight, bias)
    return y.view(-1), *statistics


NORMS = {
    f.__name__.strip("_"): f
    for f in (_normalized, _y_alone, _statistics_alone, _constants, _of_a_view, _last, _without_weight, _viewed)
}


def _gradients(function, leaves):
    results = function(*leaves)
    torch.manual_seed(1)
    terms = [(y.float() * torch.randn(y.shape)).sum() for y in results]
    return [*results, *torch.autograd.grad(sum(terms), leaves, allow_unused=True)]


def _image_leaves(dtype, of_weights, last):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4, 6).to(dtype, memory_format=torch.channels_last if last else torch.contiguous_format)
    return [x.requires_grad_(), *(torch.randn(5).to(of_weights).requires_grad_() for _ in range(2))]


def _assert_same(found, expected):
    for got, other in zip(found, expected, strict=True):
        assert (got is None) == (other is None)
        if other is not None:
            assert (got.dtype, got.stride()) == (other.dtype, other.stride())
            torch.testing.assert_close(got, other)


@pytest.mark.parametrize(("last", "dynamic"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str)
def test_a_batch_norm_is_torchs_reductions(as_on_a_gpu, case, dtypes, last, dynamic):
    """Results, strides and gradients are the kernels', and there is no kernel."""
    function, called = NORMS[case], []

    def look(graph):
        called.extend(node for node in graph.nodes if str(node.target).startswith("aotops."))

    leaves = _image_leaves(*dtypes, last)
    found = _gradients(_keeping(function, lambda inputs: None, look, dynamic), leaves)
    _assert_same(found, _gradients(function, leaves))
    assert not called


@torch.compiler.allow_in_graph
def _tracked(running, x, weight, bias):
    y, mean, var = ours.batch_norm(x, weight, bias)
    for statistics, new in zip(running, (mean, var), strict=True):
        statistics.lerp_(new.detach(), 0.1)
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_batch_norm_is_no_kernel_in_the_code(as_on_a_gpu, dtype):
    """Beside its neighbours, with running statistics, and in a function that Dynamo leaves to AOTAutograd: so it leaves
    one in the place of torch.nn.functional's."""
    from torch._inductor.utils import run_and_get_code

    leaves = _image_leaves(dtype, dtype, True)
    buffers = [(torch.zeros(5), torch.ones(5)) for _ in range(2)]

    def function(running):
        return lambda x, *parameters: (torch.relu(_tracked(running, x * 2, *parameters)),)

    expected = _gradients(function(buffers[0]), leaves)
    found, code = run_and_get_code(_gradients, torch.compile(function(buffers[1]), fullgraph=True), leaves)
    _assert_same((*found, *buffers[1]), (*expected, *buffers[0]))
    assert len(code) == 2
    assert "aotops" not in "".join(code)


def test_a_batch_norm_is_a_kernel_elsewhere():
    """On a CPU, in float32, and where there may be no elements, of which torch's mean is NaN."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def kernels(device, dtype, *shape):
        with FakeTensorMode():
            x = torch.empty(shape, device=device, dtype=dtype)

            def both(x):  # no gradient is recorded: for a GPU, torch without CUDA aborts
                y, mean, var = torch.ops.aotops.batch_norm(x, None, None, 0.1, 1, None)
                return torch.ops.aotops.batch_norm_backward(y, None, var, x, None, None, mean, var, 0.1, 1, None)

            graph = make_fx(both, select_decomp_table())(x).graph
        return len([node for node in graph.nodes if str(node.target).startswith("aotops.")])

    import torch._inductor.lowering

    assert kernels("cuda", torch.bfloat16, 3, 5) == 0
    assert kernels("cpu", torch.bfloat16, 3, 5) == kernels("cuda", torch.float32, 3, 5) == 2
    assert kernels("cuda", torch.float16, 0, 5) == 2


def test_a_batch_norm_of_rows_that_depend_on_data(as_on_a_gpu):
    from torch._dynamo import config

    def chosen(x, mask):
        return ours.batch_norm(x[mask], None, None, 0.1)

    x = torch.randn(6, 5)
    with config.patch(capture_dynamic_output_shape_ops=True):
        compiled = _keeping(chosen, lambda inputs: None)
        for mask in (x[:, 0] > 0, x[:, 0] > 100):
            _assert_same(compiled(x, mask), chosen(x, mask))


def test_a_batch_norm_that_does_not_fit_is_refused(as_on_a_gpu):
    from torch._inductor.decomposition import select_decomp_table

    decomposed = select_decomp_table()[torch.ops.aotops.batch_norm.default]
    with pytest.raises(ValueError, match=r"batch_norm: bias has shape \(1, 5\), expected \(5,\)"):
        decomposed(_draw(3, 5), None, _draw(1, 5), 0.1, 1, None)


def test_second_derivatives_of_a_batch_norm(as_on_a_gpu):
    def gradient(x, weight):
        def slopes(x):
            return torch.func.grad(lambda x: ours.batch_norm(x, weight, None, 0.1)[0].sin().sum())(x)

        return torch.func.grad(lambda x: slopes(x).square().sum())(x)

    x, weight = _draw(3, 5), _draw(5)
    torch.testing.assert_close(_keeping(gradient, lambda inputs: None)(x, weight), gradient(x, weight))


# ---------------------------------------------------------------------------------------------------------------- kept


def _keeping(function, on_backward, on_each=lambda graph: None, dynamic=None):
    """``function``, compiled by Inductor's passes of the whole graph and its partition, and run by torch.
    ``on_backward`` takes the inputs of the backward's graph, ``on_each`` both graphs."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    def partition(module, inputs, **kwargs):
        remove_noop_ops(module.graph)
        for one in (joint_graph.early_patterns, *joint_graph.pass_patterns):
            one.apply(module.graph)
        module.graph.lint()
        module.recompile()
        return min_cut_rematerialization_partition(module, inputs, **kwargs)

    def forward(module, _):
        on_each(module.graph)
        return make_boxed_func(module.forward)

    def backward(module, _):
        on_each(module.graph)
        on_backward([node for node in module.graph.nodes if node.op == "placeholder" and "tangents" not in node.name])
        return make_boxed_func(module.forward)

    def backend(module, inputs):
        tools = {"partition_fn": partition, "decompositions": select_decomp_table()}
        return aot_module_simplified(module, inputs, fw_compiler=forward, bw_compiler=backward, **tools)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def _kept(convolution, x):
    """The gradients of a block with norms and ReLUs around a convolution, and what its backward keeps of activations:
    bytes for each dtype."""
    torch.manual_seed(0)
    layers = [convolution(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
    model = torch.nn.Sequential(convolution(8, 8, 1), *layers, *layers, convolution(8, 4, 1))
    model = model.to(x.device, memory_format=torch.channels_last)
    kept = {}

    def count(nodes):
        for value in (node.meta.get("val") for node in nodes):
            if value.numel() >= x.numel() // 2:
                kept[value.dtype] = kept.get(value.dtype, 0) + value.nbytes

    y = _keeping(model, count)(x)
    return torch.autograd.grad(y.square().sum(), list(model.parameters())), kept


def test_as_much_is_kept_around_a_convolution_as_around_torchs():
    """In channels_last the kernel reads a permuted view. No mask of where a ReLU is 0 is kept beside it."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last)
    (mine, kept), (torchs, kept_of_torch) = (_kept(one, x) for one in (ours.Conv2d, torch.nn.Conv2d))
    for got, expected in zip(mine, torchs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)  # sums of 512 in another order, through norms
    assert kept == kept_of_torch
    assert {*kept} == {torch.float32}


def _split_as_a_matrix(qkv, heads, kv_heads):
    """The parts of a matrix of all rows."""
    dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    parts = qkv.flatten(0, -2).split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    return tuple(part.view(*qkv.shape[:-1], -1, dim).transpose(-3, -2) for part in parts)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.3}], ids=str)
@pytest.mark.parametrize(
    ("parts_of", "lead", "heads", "kv_heads"),
    [
        (unbound, (2,), 3, 3),
        (unbound, (2, 3), 3, 3),
        (split, (2,), 4, 4),
        (split, (2,), 4, 2),
        (split, (2,), 1, 1),
    ],
)
def test_parts_of_a_projection_are_read_where_they_are(parts_of, lead, heads, kv_heads, options):
    """No graph has a copy of them, nor of their gradients. Where not all parts are used alike, the gradients of those
    that are not have their place."""

    def block(x, weight, attend=ours.scaled_dot_product_attention):
        parts = parts_of(x @ weight, heads, kv_heads)
        y = attend(*parts, **options, enable_gqa=heads != kv_heads).transpose(-3, -2).flatten(-2)
        return y.sin()

    def twice(x, weight, attend=ours.scaled_dot_product_attention):
        q, k, v = parts_of(x @ weight, heads, kv_heads)
        return block(x, weight, attend).sum() + (v.sin() if heads == kv_heads else q.cos()).sum() + k.square().sum()

    torch.manual_seed(0)
    x = torch.randn(*lead, 5, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, (heads + 2 * kv_heads) * 8, dtype=torch.float64, requires_grad=True)
    for function in (block, twice):
        seen = []
        compiled = _keeping(function, lambda kept: None, lambda graph: seen.extend(n.target for n in graph.nodes))  # noqa: B023
        found, expected = (
            torch.autograd.grad(y.sum(), (x, weight))
            for y in (compiled(x, weight), function(x, weight, torch.nn.functional.scaled_dot_product_attention))
        )
        torch.testing.assert_close(found, expected)
        packed = torch.ops.aotops.qkv_attention, torch.ops.aotops.qkv_attention_backward
        assert [seen.count(each.default) for each in packed] == [1, 1]
        assert torch.ops.aotops.attention.default not in seen
        assert function is twice or not {torch.ops.aten.clone.default, torch.ops.aten.cat.default} & {*seen}


def test_the_gradient_of_a_part_beside_an_input_of_the_graph():
    def beside(x, weight, other):
        q, k, v = split(x @ weight, 2, 2)
        dq = torch.func.grad(lambda q: ours.scaled_dot_product_attention(q, k, v).square().sum())(q)
        return torch.cat([dq.transpose(1, 2).flatten(2), other], -1)

    torch.manual_seed(0)
    tensors = torch.randn(2, 5, 7), torch.randn(7, 48), torch.randn(2, 5, 3, requires_grad=True)
    torch.testing.assert_close(_keeping(beside, lambda kept: None)(*tensors), beside(*tensors))


@pytest.mark.parametrize("change", ["order", "mask", "another", "heads"])
def test_other_tensors_are_no_parts_of_a_projection(change):
    def block(x, weight, attend=ours.scaled_dot_product_attention):
        q, k, v = split(x @ weight, 2, 2)
        if change == "order":
            q, k = k, q
        elif change == "another":
            v = v * 2
        elif change == "heads":
            q, k, v = (part[:, :1] for part in (q, k, v))
        return attend(q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool) if change == "mask" else None).sum()

    torch.manual_seed(0)
    seen = []
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 7), (7, 48)))
    compiled = _keeping(block, lambda kept: None, lambda graph: seen.extend(node.target for node in graph.nodes))
    found, expected = (
        torch.autograd.grad(y, (x, weight))
        for y in (compiled(x, weight), block(x, weight, torch.nn.functional.scaled_dot_product_attention))
    )
    torch.testing.assert_close(found, expected)
    assert torch.ops.aotops.qkv_attention.default not in seen


def _gated(x, gate, up):
    return ours.swiglu(ours.linear(x, gate), ours.linear(x, up))


def _of_halves(x, gate, up):
    return ours.swiglu(*ours.linear(x, torch.cat((gate, up))).chunk(2, -1))


def _checkpointed(x, gate, up):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(ours.swiglu, ours.linear(x, gate), ours.linear(x, up), use_reentrant=False)


HIDDEN = {
    "swiglu": (_gated, True, 2),
    "halves": (_of_halves, True, 2),
    "gelu": (lambda x, gate, up: ours.gelu(ours.linear(x, gate)), True, 1),
    "gelu tanh": (lambda x, gate, up: ours.gelu(ours.linear(x, gate), "tanh"), True, 1),
    "constant": (_gated, False, 1),
    "gate alone": (lambda x, gate, up: ours.swiglu(ours.linear(x, gate), ours.linear(x, up).detach()), True, 2),
    "checkpoint": (_checkpointed, True, 2),
}
"""Hidden units of an MLP; whether what they are made of needs a gradient; how many times their size is kept."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_units_are_computed_again_in_the_backward(as_on_a_gpu, case, dtype):
    """Where the kernel of their gradients reads all that they are made of, they are not kept."""
    hidden, needs_gradient, expected = HIDDEN[case]
    kept = []

    def mlp(x, gate, up, down):
        return ours.linear(hidden(x, gate, up), down)

    def count(nodes):
        kept.extend(n for n in (node.meta["val"].numel() / (6 * 32) for node in nodes) if n.is_integer())

    torch.manual_seed(0)
    leaves = [(_draw(*shape) / 2).to(dtype) for shape in ((6, 8), (32, 8), (32, 8), (8, 32))]
    wanted = [t.requires_grad_() for t in leaves[0 if needs_gradient else 3 :]]
    results = [
        torch.autograd.grad(f(*leaves).float().square().sum(), wanted, allow_unused=True)
        for f in (_keeping(mlp, count), mlp)
    ]
    for got, other in zip(*results, strict=True):
        assert (got is None) == (other is None)
        if other is not None:
            # three products of up to 32 terms; in 16 bits, each is rounded
            tolerance = 1e-5 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(got, other, rtol=tolerance, atol=tolerance)
    assert sum(kept) == expected


def _convolution(*args):
    """With its norm: torch's, which ``ours.BatchNorm2d`` calls where it is compiled for a GPU."""
    return torch.nn.Sequential(ours.Conv2d(*args, bias=False), torch.nn.BatchNorm2d(args[1]))


class _Images(torch.nn.Module):
    """A network of images: a block with a residual and a ReLU, of which ``read`` makes what is classified."""

    def __init__(self, read=lambda y, after: y.mean((2, 3)), relu=F.relu, residual=True):
        super().__init__()
        self.read, self.relu, self.residual = read, relu, residual
        self.first, self.second = _convolution(3, 8, 3), _convolution(8, 8, 1)
        self.after, self.head = _convolution(8, 8, 1), torch.nn.Linear(8, 4)

    def forward(self, x):
        y = F.relu(self.first(x))
        y = self.relu(self.second(y) + (y if self.residual else 0))
        return self.head(self.read(y, self.after))


RELUS = {
    "mean": (_Images(), 1),
    "pooled": (_Images(lambda y, _: F.adaptive_avg_pool2d(y, 1).flatten(1)), 1),
    "sum": (_Images(lambda y, _: y.sum((2, 3)) / 64), 1),
    "no residual": (_Images(residual=False), 1),
    "a view in place": (_Images(relu=lambda y: F.relu((y.movedim(1, -1) * 2).movedim(-1, 1), inplace=True)), 1),
    "twice": (_Images(lambda y, _: y.mean((2, 3)) + y.amax((2, 3))), 0),
    "squares": (_Images(lambda y, _: y.square().mean((2, 3))), 0),
    "not last": (_Images(lambda y, after: y.mean((2, 3)) + after(y.detach()).mean((2, 3))), 0),
    "hardswish": (_Images(relu=F.hardswish), 0),
    "silu": (_Images(relu=F.silu), 0),
}
"""Networks, and of how many ReLUs a mask is kept."""


def _masks(kept):
    def on_backward(nodes):
        kept.extend(n for n in nodes if getattr(n.meta["val"], "dtype", None) == torch.bool)  # sizes have none

    return on_backward


@pytest.mark.parametrize(
    ("case", "precision", "dynamic"),
    [(case, torch.float32, False) for case in RELUS] + [("mean", torch.float64, False), ("mean", torch.float32, True)],
    ids=str,
)
def test_a_mask_is_kept_of_the_last_relu(case, precision, dynamic):
    """Where the backward reads nothing else of it: computed again, the ReLU makes the gradient one that is written."""
    torch.manual_seed(0)
    network, expected = RELUS[case]
    network = copy.deepcopy(network).to(precision, memory_format=torch.channels_last)
    x = torch.randn(4, 3, 10, 10, dtype=precision).to(memory_format=torch.channels_last)
    kept = []

    def gradients(call):
        return torch.autograd.grad(call(x).square().sum(), list(network.parameters()), allow_unused=True)

    results = [gradients(call) for call in (_keeping(network, _masks(kept), dynamic=dynamic), network)]
    assert len(kept) == expected
    for got, other in zip(*results, strict=True):
        assert (got is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-4)


def test_no_mask_is_kept_of_a_relu_that_a_checkpoint_computes_again():
    from torch.utils.checkpoint import checkpoint

    network, kept = _Images().to(memory_format=torch.channels_last), []

    def checkpointed(x):
        return checkpoint(network, x, use_reentrant=False)

    _keeping(checkpointed, _masks(kept))(torch.randn(4, 3, 10, 10)).sum().backward()
    assert not kept


# -------------------------------------------------------------------------------------------------------------- unread


@pytest.mark.parametrize(("first", "rows"), [(0, 8), (0, 5), (3, 5)])
def test_a_table_is_computed_once(formatted, first, rows):
    """A table of cosines and one of sines, by the code of forward and backward together, however many read them; and
    the rows that are read, where they are some of a table."""
    from torch._inductor.utils import run_and_get_code

    def turned(x, y, frequencies):
        angles = torch.arange(8)[:, None] * frequencies
        cos, sin = (t.to(x.dtype)[first : first + rows] for t in (angles.cos(), angles.sin()))
        x, y = (ours.rope(t, cos, sin) for t in (x, y))
        return ours.rope(x * 2, cos, sin) * y.sum(2, keepdim=True)

    def losses(call):
        torch.manual_seed(0)
        given = [torch.randn(2, rows, n, 8, requires_grad=True) for n in (4, 2)]
        result = call(*given, torch.rand(4))
        return result, *torch.autograd.grad(result.square().sum(), given)

    expected = losses(turned)
    found, code = run_and_get_code(losses, torch.compile(turned))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    if not first:
        assert "\n".join(code).count("cos(") <= 2  # the forward's, and the backward's


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("read", [(True, False), (False, True), (True, True)], ids=str)
def test_nothing_is_computed_for_a_sum_that_nobody_reads(name, read):
    """In the graph of the backward no zeros stand for its gradient."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    function = getattr(ours, name)
    leaves = [t.requires_grad_() for t in (_draw(3, 5), _draw(3, 5), _draw(5))]
    graphs = []

    def used(x, residual, weight):
        y, h = function(x, residual, 5, weight)
        return sum(t.square().sum() for t, is_read in zip((y, h), read, strict=True) if is_read)

    def compiler(module, _):
        from functorch.compile import make_boxed_func

        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    from torch._dynamo.backends.common import aot_autograd

    results = [
        torch.autograd.grad(f(*leaves), leaves)
        for f in (torch.compile(used, backend=aot_autograd(fw_compiler=compiler), fullgraph=True), used)
    ]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    backward = getattr(torch.ops.aotops, f"{name}_backward").default
    (call,) = (node for node in graphs[1].nodes if node.target is backward)
    assert (call.args[1] is None) == (not read[1])
    zeros = {torch.ops.aten.zeros.default, torch.ops.aten.new_zeros.default, torch.ops.aten.full.default}
    assert len([node for node in graphs[1].nodes if node.target in zeros]) == (not read[0])


# ----------------------------------------------------------------------------------------------------- written in place


def _language_model(h, weight, target, also=None):
    logits = ours.linear(h, weight).flatten(0, 1)
    loss = ours.cross_entropy(logits, target)
    return loss if also is None else loss + also(logits)


def _code_of_a_step(model, *inputs):
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(model, fullgraph=True)

    def step():
        loss = compiled(*inputs)
        return loss, *torch.autograd.grad(loss, inputs[:2])

    results, code = run_and_get_code(step)
    return results, "".join(code).count(".overwriting(")


def _tokens():
    torch.manual_seed(0)
    return torch.randn(2, 3, 8, requires_grad=True), torch.randn(13, 8, requires_grad=True), torch.randint(13, (6,))


def _assert_torchs(results, inputs, also=None):
    h, weight, target = inputs
    logits = F.linear(h, weight).flatten(0, 1)
    loss = F.cross_entropy(logits, target) + (also(logits) if also else 0)
    for got, expected in zip(results, (loss, *torch.autograd.grad(loss, (h, weight))), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_cross_entropy_writes_over_the_logits(as_on_a_gpu):
    """The residual over the logits, and dx over the residual: one tensor of that size in a step."""
    inputs = _tokens()
    results, in_place = _code_of_a_step(_language_model, *inputs)
    assert in_place == 2
    _assert_torchs(results, inputs)


def test_logits_that_are_used_again_are_kept(as_on_a_gpu):
    inputs, also = _tokens(), torch.logsumexp
    results, in_place = _code_of_a_step(lambda *t: _language_model(*t, lambda x: also(x, (0, 1))), *inputs)
    assert in_place == 1  # dx over the residual
    _assert_torchs(results, inputs, lambda x: also(x, (0, 1)))


# -------------------------------------------------------------------------------------------------------------- padded


@pytest.fixture
def lines_of_8(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(padding, "LINE", 8)
    monkeypatch.setattr(padding, "FROM", 8)


def _head(h, weight, target, bias=None, also=None, **options):
    logits = ours.linear(h, weight, bias).flatten(0, 1)
    loss = ours.cross_entropy(logits, target, **options).sum()
    return loss if also is None else loss + also(logits)


def _products_of_a_step(model, leaves, *inputs):
    """The loss and the gradients of the leaves, by the graphs that Inductor would lower; of each product the sizes; and
    the copies of matrices of a column or a row for each class, but the weight."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import early_patterns

    sizes, copies, aten = [], [], torch.ops.aten

    def partition(module, inputs, **kwargs):
        early_patterns.apply(module.graph)
        module.graph.lint()
        module.recompile()
        return min_cut_rematerialization_partition(module, inputs, **kwargs)

    def compiler(module, _):
        for node in module.graph.nodes:
            if node.target in (aten.mm.default, aten.addmm.default):
                a, b = (arg.meta["val"].shape for arg in node.args[-2:])
                sizes.append((*a, b[1]))
            if node.target in (aten.constant_pad_nd.default, aten.clone.default, aten.cat.default):
                shape = node.meta["val"].shape
                copies.extend([node] * (len(shape) > 1 and shape != (16, 8)))  # the padded weight is small
        return make_boxed_func(module.forward)

    def backend(module, inputs):
        tools = {"partition_fn": partition, "decompositions": select_decomp_table()}
        return aot_module_simplified(module, inputs, fw_compiler=compiler, bw_compiler=compiler, **tools)

    loss = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return (loss, *torch.autograd.grad(loss, leaves)), sizes, copies


def _head_inputs(bias):
    torch.manual_seed(0)
    leaves = [_draw(2, 3, 8), _draw(13, 8), *([_draw(13)] if bias else [])]
    leaves = [t.requires_grad_() for t in leaves]
    return leaves, torch.randint(13, (6,))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 3}], ids=str)
def test_the_products_of_a_head_are_padded_and_nothing_is_copied(lines_of_8, bias, options):
    """13 classes are 16: of the logits, their gradient, and the gradient of the weight."""
    leaves, target = _head_inputs(bias)
    target[2] = 3

    def head(h, weight, target, *bias):
        return _head(h, weight, target, *bias, **options)

    found, sizes, copies = _products_of_a_step(head, leaves, *leaves[:2], target, *leaves[2:])
    logits = F.linear(leaves[0], *leaves[1:]).flatten(0, 1)
    loss = F.cross_entropy(logits, target, **options)
    for got, expected in zip(found, (loss, *torch.autograd.grad(loss, leaves)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert sorted(sizes) == sorted([(6, 8, 16), (6, 16, 8), (16, 6, 8)])
    assert not copies


def test_a_padded_product_of_any_number_of_rows(lines_of_8):
    leaves, target = _head_inputs(False)
    torch._dynamo.mark_dynamic(leaves[0], 1)
    torch._dynamo.mark_dynamic(target, 0)
    found, sizes, copies = _products_of_a_step(_head, leaves, *leaves, target)
    _assert_torchs(found, (*leaves, target))
    assert len([size for size in sizes if 16 in size]) == 3
    assert any(isinstance(n, torch.SymInt) for n in sizes[0])
    assert not copies


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"reduction": "none"},
        {"ignore_index": 13},
        {"also": lambda x: x.square().mean()},
        {"also": lambda x: x[0, 0]},
    ],
    ids=["label_smoothing", "none", "ignore_index", "read again", "one is read again"],
)
def test_what_more_classes_would_change_is_not_padded(lines_of_8, options):
    leaves, target = _head_inputs(False)
    expected = _head(*leaves, target, **options)
    found, sizes, _ = _products_of_a_step(lambda *t: _head(*t, **options), leaves, *leaves, target)
    for got, other in zip(found, (expected, *torch.autograd.grad(expected, leaves)), strict=True):
        torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-6)
    assert not any(16 in size for size in sizes)


def test_a_class_that_there_is_not_is_none_of_the_padding(lines_of_8):
    leaves, target = _head_inputs(False)
    target[1] = 14
    with pytest.raises(ValueError, match="cross_entropy: target"):
        _products_of_a_step(_head, leaves, *leaves, target)


def test_padded_logits_are_written_over(lines_of_8):
    inputs = _tokens()
    results, in_place = _code_of_a_step(_language_model, *inputs)
    assert in_place == 2
    _assert_torchs(results, inputs)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"label_smoothing": 0.1}], ids=str)
def test_logits_may_be_changed_after_a_compiled_loss(backend, options):
    x, target = torch.randn(6, 11, requires_grad=True), torch.arange(6)

    def both(loss):
        logits = x * 1
        y = loss(logits, target, **options).sum()
        return y + logits.mul_(2).sum()

    if options.get("reduction") == "none":  # its backward reads the logits: as every operator that saves its input
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            both(ours.cross_entropy).backward()
        return
    expected = torch.autograd.grad(both(torch.nn.functional.cross_entropy), x)[0]
    y = torch.compile(lambda: both(ours.cross_entropy), backend=backend, fullgraph=True)()
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], expected)


def test_a_graph_that_is_kept_is_not_written_over(as_on_a_gpu):
    """Although code that writes over saved tensors is in Inductor's cache, which does not know for what it was made."""
    from torch._functorch import config

    def loss(inputs):
        torch._dynamo.reset()
        return torch.compile(_language_model)(*inputs)

    inputs = _tokens()
    torch.autograd.grad(loss(inputs), inputs[:2])
    with pytest.raises(RuntimeError, match="retain_graph"):  # torch's own error, or the operator's
        torch.autograd.grad(loss(inputs), inputs[:2], retain_graph=True)
    with config.patch(donated_buffer=False):
        kept = loss(inputs)
        first = torch.autograd.grad(kept, inputs[:2], torch.tensor(3.0), retain_graph=True)
        again = torch.autograd.grad(kept, inputs[:2], torch.tensor(3.0))
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_is_written_in_place_refuses_a_graph_that_is_kept():
    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, dy):
            operator = torch.ops.aotops.cross_entropy_backward.overwriting
            operator(dy, torch.zeros(2, dtype=torch.int64), None, slope, -100, "mean", 0.0, None, 0.0, 0.0)
            return slope

    slope = torch.ones(2, 3)
    loss = Compiled.apply(torch.ones(2, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"cross_entropy_backward: compiled code writes over slope, .* not kept"):
        torch.autograd.backward(loss, torch.tensor(5.0), retain_graph=True)
    assert slope.eq(1).all()
    torch.autograd.backward(loss, torch.tensor(5.0))
    assert slope.eq(5).all()


# ----------------------------------------------------------------------------------------------------------- contiguous


def _transposed(x, weight):
    return ours.layer_norm(x.transpose(1, 2), 5, weight)


def _sliced(x, weight):
    return ours.softmax(x[:, :, ::2], 1)


def _read_twice(x, weight):
    y = x.transpose(1, 2)
    return ours.layer_norm(y, 5, weight) + ours.layer_norm(y, 5)


def _expanded(x, weight):
    return ours.layer_norm(weight.expand(4, 5), 5)


STRIDED = {"transposed": _transposed, "sliced": _sliced, "read twice": _read_twice, "expanded": _expanded}
"""Calls with an input that is not contiguous."""


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", STRIDED)
def test_a_copy_that_a_kernel_needs_is_in_the_graph_once(case, dynamic):
    """Forward and backward read the same one."""
    function = STRIDED[case]
    torch.manual_seed(0)
    leaves = [torch.randn(2, 5, 6, requires_grad=True), torch.randn(5, requires_grad=True)]
    strided, copies = [], []

    def look(graph):
        for node in graph.nodes:
            if str(node.target).startswith("aotops."):
                values = [a.meta["val"] for a in node.args if isinstance(a, torch.fx.Node)]
                strided.extend(t for t in values if not t.is_contiguous())
            elif node.target is torch.ops.aten.clone.default:
                copies.append(node)

    results = [
        [y := f(*leaves), *torch.autograd.grad(y.sin().sum(), leaves, allow_unused=True)]
        for f in (_keeping(function, lambda inputs: None, look, dynamic), function)
    ]
    for got, other in zip(*results, strict=True):
        assert (got is None) == (other is None)
        if other is not None:
            assert got.stride() == other.stride()
            torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-6)
    assert not strided
    assert len(copies) == 1


def test_sizes_that_depend_on_data_are_not_compared():
    """Whether a view of them is contiguous is not known: the call copies it."""
    from torch._dynamo import config
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def chosen(x, mask):
        return ours.softmax(x[mask].t(), 1)

    x = torch.randn(6, 5)
    backend = aot_autograd(fw_compiler=lambda module, _: module, decompositions=select_decomp_table())
    with config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(chosen, backend=backend, fullgraph=True)(x, x[:, 0] > 0)
    torch.testing.assert_close(got, chosen(x, x[:, 0] > 0))
