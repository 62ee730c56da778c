"""The operators of torch's dispatcher: opcheck, compile and export."""

from __future__ import annotations

import io

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from contexts import OPERATORS  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import compiled, tensors  # noqa: E402
from aotops.frontends.torch_schema import maskable, splitter  # noqa: E402
from aotops.ops import OPS  # noqa: E402
from aotops.testing.cases import CASES, row_samples  # noqa: E402

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
ON = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])


BACKWARDS = {op.backward.name: op for op in OPS.values() if op.backward}


DISPATCHED = [op.name for op in ours.registered.dispatched if not op.mutates]  # test_accumulation.py tries that one


def samples(name, where):
    """Arguments of torch.ops.aotops.<name>: of the samples of the operator's row, its inputs, or those of its backward,
    residuals kept and not, and all gradients wanted or every second one."""
    op = BACKWARDS.get(name) or OPS[name]
    row = CASES[op.name]
    for case in (*row_samples(op.name).values(), *row.opcheck):
        arrays = case.random(np.random.default_rng(0))
        inputs = {slot: None if x is None else torch.as_tensor(x, device=where) for slot, x in arrays.items()}
        if name == op.name:
            for slot, t in inputs.items():
                if op.has_gradient and t is not None and t.is_floating_point() and slot not in op.constants:
                    t.requires_grad_()
        given, attrs = op.bind(**inputs, **case.attrs)
        attrs = [list(value) if isinstance(value, tuple) else value for value in op.canonical(attrs)]
        if name == op.name:
            yield *given, *attrs
            continue
        results = getattr(torch.ops.aotops, op.name)(*given, *attrs)
        results = results if isinstance(results, (tuple, list)) else (results,)
        known = op.with_aliases(dict(zip((*op.inputs, *op.results), (*given, *results), strict=True)))
        known |= {f"d{y}": torch.randn_like(known[y]) for y in op.outputs if known[y].is_floating_point()}
        for absent in ((), op.residuals) if op.residuals else ((),):
            yield *(None if slot in absent else known[slot] for slot in op.backward.inputs), *attrs
    if name != op.name and (some := maskable(op.backward)):
        yield *(known[slot] for slot in op.backward.inputs), *attrs, [i % 2 == 1 for i in range(len(some))]


@ON
@pytest.mark.parametrize("name", DISPATCHED)
def test_opcheck(name, where):
    for args in samples(name, where):
        torch.library.opcheck(getattr(torch.ops.aotops, name).default, args)


@ON
@pytest.mark.parametrize("name", sorted(op.name for op in ours.registered.in_c if op.name in DISPATCHED))
def test_a_bound_call_has_the_bits_of_the_dispatchers(name, where):
    """In the code that Inductor writes."""
    op = BACKWARDS.get(name) or OPS[name]
    op = op.backward if name in BACKWARDS else op
    for args in samples(name, where):
        given, attrs, wanted = splitter(op)(args)
        with torch.no_grad():
            expected = tensors.results_of(getattr(torch.ops.aotops, name)(*args))
            got = tensors.results_of(compiled.bound("aotops", name, op.canonical(attrs), wanted)(*given))
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
                assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_every_kernel_is_a_custom_operator():
    kernels = {op.name for o in OPS.values() for op in (o, o.backward) if op is not None and op.has_kernel}
    assert set(DISPATCHED) == kernels


def test_compile_makes_one_graph_for_all_sizes():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(lambda x: ours.layer_norm(ours.gelu(x), x.shape[-1:]), backend=counter, dynamic=True)
    for rows in (3, 4, 5, 9):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(compiled(x), F.layer_norm(F.gelu(x), (6,)))
    assert counter.frame_count == 1


def test_compiled_by_itself():
    """A call that needs no frame has one where the compiler wants to see it."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    x = torch.randn(4, 6, requires_grad=True)
    compiled = torch.compile(ours.gelu, backend=counter, fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), F.gelu(x))
    assert counter.frame_count == 1


def test_errors_of_fake_tensors_are_the_same():
    with pytest.raises(ValueError, match=r"layer_norm: x has shape \(2, 3\), expected its trailing axes"):
        ours.layer_norm(torch.empty(2, 3, device="meta"), 4)


def test_export_with_a_dynamic_normalized_axis():
    class Model(torch.nn.Module):
        def forward(self, x, w):
            return ours.layer_norm(x, x.shape[-1:], w) + ours.rms_norm(x, (x.shape[-1],))

    axis = torch.export.Dim("axis")
    program = torch.export.export(Model(), (torch.randn(3, 16), torch.randn(16)), dynamic_shapes=({1: axis}, {0: axis}))
    x, w = torch.randn(3, 20), torch.randn(20)
    torch.testing.assert_close(program.module()(x, w), F.layer_norm(x, (20,), w) + F.rms_norm(x, (20,)))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_trace_has_the_operator(name):
    """Not what it is composed of."""
    operator = OPERATORS[name]
    assert f"aotops.{operator.name}" in make_fx(lambda *args: operator.ours(*args))(*operator.tensors()).code


def test_export_with_dynamic_rows():
    """Several operators in one program, saved and loaded."""

    class Model(torch.nn.Module):
        def forward(self, x, weight, bias):
            norms = ours.layer_norm(x, 6, weight, bias) + ours.layer_norm(x, 6, None, bias) + ours.rms_norm(x, 6)
            norm, h = ours.add_rms_norm(x, norms, 6, weight)
            y = ours.linear(norm, weight.outer(bias), bias, "gelu") + ours.swiglu(ours.gelu(h), x) + ours.softmax(h)
            return ours.matmul(ours.matmul(y, x.mT), x) + ours.add(y, 0.5, alpha=2)

    args = torch.randn(4, 6), torch.randn(6), torch.randn(6)
    program = torch.export.export(Model(), args, dynamic_shapes=({0: torch.export.Dim("rows")}, None, None))
    assert str(program.graph).count("aotops.") >= 11
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    more = torch.randn(9, 6), *args[1:]
    for exported in (program, torch.export.load(buffer)):
        torch.testing.assert_close(exported.module()(*more), Model()(*more))
