"""Every operator in every context (contexts.py): as torch's own, or an error that names it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from contexts import CONTEXTS, FOR_VARIANTS, OPERATORS, VARIANTS, check, leaves, total  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.testing import cases  # noqa: E402
from aotops.testing.cases import CASES, DTYPES  # noqa: E402

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]
ON = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
EACH_CASE = [
    pytest.param(name, i, id=f"{name}-{case}") for name, row in CASES.items() for i, case in enumerate(row.cases)
]
PAIRS = [
    pytest.param(context, name, id=f"{context.name}-{name}", marks=gpu if context.gpu else [])
    for context in CONTEXTS.values()
    for name in context.operators()
] + [
    pytest.param(CONTEXTS[context], name, id=f"{context}-{name}")
    for context in FOR_VARIANTS
    for name in VARIANTS
    if name not in CONTEXTS[context].without
]


@pytest.mark.parametrize(("context", "name"), PAIRS)
def test_as_torch(context, name):
    check(context, name, "cuda" if context.gpu else "cpu")


def test_logits_may_change_after_cross_entropy():
    """Its gradient is kept, and they are not needed for it."""
    x, target = OPERATORS["cross_entropy"].tensors()
    found = []
    for f in (ours.cross_entropy, F.cross_entropy):
        leaf = x.clone().requires_grad_()
        logits = leaf * 2
        y = f(logits, target)
        with torch.no_grad():
            logits.zero_()
        found.append(torch.autograd.grad(y, leaf)[0])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_profiler_sees_every_call(name, recorded):
    operator = OPERATORS[name]
    args = leaves(operator.tensors(), lambda i: recorded)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = operator.ours(*args)
        if recorded:
            total(y if isinstance(y, tuple) else [y]).backward()
    seen = {event.key for event in profile.key_averages()}
    assert f"aotops::{operator.name}" in seen
    if recorded:  # its own operator, or the node of the graph
        node = f"{operator.name.replace('_', '')}backward"
        assert any(node in key.lower().replace("_", "") for key in seen)


@ON
@pytest.mark.parametrize(("name", "i"), EACH_CASE)
def test_a_recorded_result_has_the_same_bits(where, name, i):
    """Residuals that are kept for a backward do not change the results."""

    def bits(wanted, dtype):
        dtypes = cases.dtypes(name, i, dtype)
        inputs = {
            slot: None
            if x is None
            else torch.tensor(x, dtype=getattr(torch, cases.dtype_of(x, dtypes.get(slot, dtype))), device=where)
            for slot, x in cases.inputs(name, i, dtype).items()
        }
        for slot, t in inputs.items():
            if t is not None and t.is_floating_point() and slot in wanted:
                t.requires_grad_()
        y = getattr(ours, name)(**inputs, **CASES[name].cases[i].attrs)
        results = y if isinstance(y, tuple) else (y,)
        assert all(t.requires_grad == bool(wanted) for t in results[:1])
        flat = (t.detach().reshape(-1).clone(memory_format=torch.contiguous_format) for t in results)
        return [t.view(torch.uint8) for t in flat]

    case = CASES[name].cases[i]
    slots = [slot for slot in case.given if slot not in (*case.classes, *case.constants, *case.dtypes)]
    for dtype in DTYPES:
        plain = bits((), dtype)
        for wanted in (slots, slots[:1], slots[-1:]):
            for a, b in zip(bits(wanted, dtype), plain, strict=True):
                assert torch.equal(a, b), f"{dtype}, a gradient of {', '.join(wanted)}"


def test_a_tensor_for_an_attribute_is_read_at_each_call():
    x = torch.randn(3, 8, dtype=torch.float64)
    eps, dim = torch.tensor(1e-5, dtype=torch.float64), torch.tensor(0)
    for value, axis in ((1e-5, 0), (10.0, 1), (0.1, 0)):
        eps.fill_(value)
        dim.fill_(axis)
        torch.testing.assert_close(ours.layer_norm(x, 8, None, None, eps), F.layer_norm(x, (8,), None, None, value))
        torch.testing.assert_close(ours.softmax(x, dim), F.softmax(x, axis))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_arrays_are_no_tensors(mode):
    """Also where the NumPy frontend has taught the library to read them."""
    import numpy as np

    from aotops.frontends import numpy

    assert numpy
    x = torch.ones(2, 3, dtype=torch.float64)
    with mode():
        for function, slot in ((ours.add, "b"), (ours.swiglu, "up"), (ours.matmul, "b")):
            with pytest.raises(TypeError, match=rf"{function.__name__}: {slot} is "):
                function(x, np.ones((2, 3)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, ZeroDivisionError])
def test_an_exception_of_a_saved_tensors_hook_is_the_callers(error):
    calls = []

    def unpack(t):
        calls.append(t)
        raise error("of the hook")

    x = torch.ones(2, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = ours.gelu(x)
    with pytest.raises(error, match="of the hook"):
        y.sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_saves_public_functions(name, tmp_path):
    function = getattr(ours, OPERATORS[name].name)
    torch.save(function, tmp_path / "function.pt")
    assert torch.load(tmp_path / "function.pt", weights_only=False) is function
