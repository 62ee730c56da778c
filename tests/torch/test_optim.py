"""AdamW: torch's arguments, state and values."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch.nn import Parameter  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402

SHAPES = ((7,), (33, 65), (), (0, 3), (5, 1, 4))
OPTIONS = (
    {},
    {"amsgrad": True},
    {"maximize": True, "lr": 1e-2},
    {"weight_decay": 0.3, "betas": (0.0, 0.5), "eps": 1e-3},
    {"lr": torch.tensor(0.01, dtype=torch.float64), "weight_decay": 0},
    {"foreach": True},
)
CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
on_each_device = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6}
"""The error of a parameter of up to 4, after five steps."""


def parameters(dtype=torch.float32, shapes=SHAPES, where="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).bfloat16().to(where, dtype)) for shape in shapes]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(1 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.device, p.dtype)


def trained(kind, dtype=torch.float32, steps=5, shapes=SHAPES, where="cpu", **options):
    params = parameters(dtype, shapes, where)
    optimizer = kind(params, **options)
    run(optimizer, params, steps)
    return params, optimizer


def run(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step()


def close(mine, theirs, tolerance=2e-6):
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.detach().double().cpu(), b.detach().double().cpu(), rtol=0, atol=tolerance)


@on_each_device
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_steps_are_torchs_in_float64(dtype, options, where):
    expected, _ = trained(torch.optim.AdamW, torch.float64, **{**options, "foreach": False})
    close(trained(ours.AdamW, dtype, where=where, **options)[0], expected, TOLERANCE[dtype])


@on_each_device
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_in_16_bits_is_the_exact_one_rounded(dtype, options, where):
    params, mine = trained(ours.AdamW, dtype, steps=2, where=where, **options)
    exact = [Parameter(p.detach().double()) for p in params]
    theirs = torch.optim.AdamW(exact, **{**options, "foreach": False})
    state = copy.deepcopy(mine.state_dict())
    state["param_groups"] = theirs.state_dict()["param_groups"]
    theirs.load_state_dict(state)
    for optimizer, each in ((mine, params), (theirs, exact)):
        run(optimizer, each, 1, first=2)
    half_a_unit = {"rtol": 0.505 * torch.finfo(dtype).eps, "atol": 0.505 * torch.finfo(dtype).smallest_normal / 256}
    for a, b in zip(params, exact, strict=True):
        torch.testing.assert_close(a.double(), b, **half_a_unit)
        for key in mine.state[a]:
            torch.testing.assert_close(mine.state[a][key].double(), theirs.state[b][key].double(), **half_a_unit)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_master_weights_are_steps_in_float32(dtype, amsgrad, where):
    expected, theirs = trained(torch.optim.AdamW, torch.float64, amsgrad=amsgrad)
    options = {"state_dtype": torch.float32, "master_weights": True}
    params, mine = trained(ours.AdamW, dtype, amsgrad=amsgrad, where=where, **options)
    masters = [mine.state[p]["master_param"] for p in params]
    close(masters, expected)
    for p, master, other in zip(params, masters, expected, strict=True):
        assert torch.equal(p, master.to(dtype))
        close([mine.state[p]["exp_avg"]], [theirs.state[other]["exp_avg"]])
        assert mine.state[p]["exp_avg_sq"].dtype == torch.float32


@on_each_device
def test_state_in_bfloat16(where):
    expected, theirs = trained(torch.optim.AdamW, torch.float64, steps=1)
    params, mine = trained(ours.AdamW, steps=1, state_dtype=torch.bfloat16, where=where)
    close(params, expected)
    for p, other in zip(params, expected, strict=True):
        assert torch.equal(mine.state[p]["exp_avg"].cpu(), theirs.state[other]["exp_avg"].bfloat16())


@on_each_device
def test_more_tensors_than_a_launch_takes_and_larger_than_a_task(where):
    shapes = ((3,),) * 200 + ((70_001,), (2, 40_000))
    expected, _ = trained(torch.optim.AdamW, torch.float64, shapes=shapes, steps=2)
    close(trained(ours.AdamW, shapes=shapes, steps=2, where=where)[0], expected)


def test_results_are_the_same_on_any_number_of_threads():
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(trained(ours.AdamW, shapes=((100_003,),), steps=2)[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*(params[0] for params in results))


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}], ids=str)
def test_state_dicts_load_both_ways(options):
    expected, _ = trained(torch.optim.AdamW, torch.float64, steps=6, **options)
    for first, second in ((ours.AdamW, torch.optim.AdamW), (torch.optim.AdamW, ours.AdamW), (ours.AdamW, ours.AdamW)):
        params, optimizer = trained(first, steps=3, **options)
        again = second(params, lr=7.0, **options)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run(again, params, 3, first=3)
        close(params, expected)


def test_a_loaded_state_keeps_its_dtype():
    options = {"state_dtype": torch.float32, "master_weights": True}
    expected, whole = trained(ours.AdamW, torch.bfloat16, steps=6, **options)
    params, optimizer = trained(ours.AdamW, torch.bfloat16, steps=3, **options)
    again = ours.AdamW(params, **options)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(again, params, 3, first=3)
    for p, other in zip(params, expected, strict=True):
        assert torch.equal(p, other)
        assert torch.equal(again.state[p]["master_param"], whole.state[other]["master_param"])
    theirs = torch.optim.AdamW(params, fused=True)
    set_gradients(params, 0)
    theirs.step()
    again.load_state_dict(theirs.state_dict())
    assert {again.state[p]["exp_avg"].dtype for p in params} == {torch.float32}
    run(again, params, 1)


def test_is_pickled_and_copied():
    params, optimizer = trained(ours.AdamW, steps=3)
    for other in (pickle.loads(pickle.dumps((params, optimizer))), copy.deepcopy((params, optimizer))):
        run(other[1], other[0], 1, first=3)
        expected, _ = trained(ours.AdamW, steps=4)
        assert all(torch.equal(a, b) for a, b in zip(other[0], expected, strict=True))


@pytest.mark.parametrize("unscaled", [False, True])
def test_grad_scaler(unscaled):
    results = []
    for kind, options in ((torch.optim.AdamW, {"fused": True}), (ours.AdamW, {})):
        params = parameters()
        optimizer, scaler = kind(params, **options), torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            scaler.scale(torch.ones(()))
            set_gradients(params, step)
            for p in params:
                p.grad *= 8
            if step == 2:
                params[1].grad[3] = torch.inf
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            if step == 2:
                scaler._scale.fill_(16.0)  # update() halves it
            scaler.update()
        states = [optimizer.state[p] for p in params]
        assert [float(state["step"]) for state in states] == [3.0] * len(params)
        results.append([*params, *(p.grad for p in params), *(state["exp_avg"] for state in states)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_found_infinity_changes_nothing():
    params, optimizer = trained(ours.AdamW, steps=2, amsgrad=True)
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    set_gradients(params, 9)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(2.0)
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    after = params, optimizer.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_groups_gradients_that_come_and_go_and_a_closure():
    results = []
    for kind in (torch.optim.AdamW, ours.AdamW):
        params = parameters()
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.5, "amsgrad": True}]
        optimizer = kind(groups, lr=0.01)
        for step in range(6):
            set_gradients(params, step)
            params[step % 3].grad = None
            if step == 3:
                added = Parameter(torch.ones(3))
                optimizer.add_param_group({"params": added, "maximize": True})
            if step > 3:
                added.grad = torch.ones(3)
            optimizer.param_groups[0]["lr"] *= 0.9

            def closure():
                assert torch.is_grad_enabled()
                return 5.0

            assert optimizer.step(closure) == 5.0
        results.append([*params, added])
    close(*results)


def test_parameters_and_states_that_are_replaced():
    """A kept plan notices each change."""
    results = []
    for kind in (torch.optim.AdamW, ours.AdamW):
        params = parameters()
        optimizer = kind(params)
        run(optimizer, params, 2)
        params[0].data = torch.ones(7)
        run(optimizer, params, 1)
        optimizer.state[params[1]]["exp_avg"] = torch.ones(33, 65)
        run(optimizer, params, 1)
        optimizer.state[params[2]] = {key: value.clone() for key, value in optimizer.state[params[2]].items()}
        run(optimizer, params, 1)
        del optimizer.state[params[1]]
        run(optimizer, params, 1)
        params[1].data = params[1].data.t().contiguous().t()
        run(optimizer, params, 1)
        optimizer.param_groups[0]["params"] = params[:3]
        run(optimizer, params, 1)
        results.append(params)
    close(*results)


def strided(t):
    return torch.stack([t, t], -1)[..., 0]


LAYOUTS = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "strided": strided,
    "channels_last": lambda t: t[None, None].contiguous(memory_format=torch.channels_last),
    "complex": lambda t: torch.complex(t, t.flip(0)),
    "misaligned": lambda t: torch.cat([t.flatten(), t.flatten()[:1]])[1:].reshape(t.shape),
}


@on_each_device
@pytest.mark.parametrize("grad_layout", [None, "transposed", "strided"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_layouts(layout, grad_layout, amsgrad, where):
    results = []
    for kind in (torch.optim.AdamW, ours.AdamW):
        p = Parameter(LAYOUTS[layout](parameters(shapes=((33, 65),), where=where)[0].detach()))
        optimizer = kind([p], amsgrad=amsgrad)
        for step in range(3):
            p.grad = torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(step)).to(where)
            if grad_layout:
                p.grad = LAYOUTS[grad_layout](p.grad)
            optimizer.step()
        assert optimizer.state[p]["exp_avg"].shape == p.shape
        results.append([torch.view_as_real(p) if p.is_complex() else p])
    close(*results)


def test_a_plan_of_channels_last_parameters_is_kept():
    """Unless a gradient, or a loaded state, has its elements in another order."""
    results = []
    for kind in (torch.optim.AdamW, ours.AdamW):
        shapes = (4, 3, 3, 5), (4, 3, 1, 1), (7,)
        params = [Parameter(p.detach().to(memory_format=torch.channels_last)) for p in parameters(shapes=shapes[:2])]
        params += parameters(shapes=shapes[2:])
        optimizer, plans = kind(params), []
        for order in (torch.channels_last, torch.channels_last, torch.contiguous_format, torch.channels_last):
            for p in params:
                p.grad = torch.sin(p.detach() * 3)
            params[0].grad = params[0].grad.contiguous(memory_format=order)
            optimizer.step()
            plans.append(getattr(optimizer, "_plans", {}).get(0))
        params[0].grad = params[0].grad.contiguous(memory_format=torch.channels_last)
        optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].contiguous()
        optimizer.step()
        results.append(params)
    assert plans[0] is plans[1]
    assert plans[2] is not plans[1]
    assert [plan.is_kept for plan in plans] == [True, True, False, True]
    close(*results)


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=gpu)])
def test_a_graph_repeats_steps(where):
    lr, other = (torch.tensor(0.01, device=where) for _ in range(2))
    params, optimizer = trained(ours.AdamW, steps=1, where=where, lr=lr, capturable=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
        lr.mul_(0.5)
    expected, eager = trained(ours.AdamW, steps=1, where=where, lr=other)
    for _ in range(3):
        eager.step()
        other.mul_(0.5)
    assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))
    assert float(optimizer.state[params[0]]["step"]) == 4
    with pytest.raises(RuntimeError, match="capturable is False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        eager.step()


@pytest.mark.parametrize("first", [torch.positive, torch._neg_view, lambda t: t.mT.contiguous().mT])
@pytest.mark.parametrize("then", [torch.positive, torch._neg_view, strided])
def test_gradients_that_mean_something_else(first, then):
    """Negated ones, and those in another order, from the first step on and after a plan was made."""
    results = []
    for kind in (torch.optim.AdamW, ours.AdamW):
        p = Parameter(torch.ones(3, 5))
        optimizer = kind([p])
        for change in (first, first, then, first):
            p.grad = change(torch.arange(15.0).view(3, 5))
            optimizer.step()
        results.append([p])
    close(*results)


def test_versions_count_the_step():
    p = Parameter(torch.ones(3))
    square = p.square().sum()
    p.grad = torch.ones(3)
    ours.AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_beside_a_compiled_model():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    for net, parts, kind in ((compiled, model, ours.AdamW), (other, other, torch.optim.AdamW)):
        optimizer = kind(parts.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
    close([*model.parameters()], [*other.parameters()])


def test_a_compiled_step():
    params = parameters(shapes=((4,),))
    optimizer = ours.AdamW(params)
    step = torch.compile(optimizer.step, backend="eager")
    for i in range(2):
        set_gradients(params, i)
        step()
    close(params, trained(torch.optim.AdamW, shapes=((4,),), steps=2)[0])


REFUSED = {
    "both": (lambda p: ours.AdamW(p, fused=True, foreach=True), RuntimeError, "fused and foreach are True"),
    "derivative": (lambda p: ours.AdamW(p, differentiable=True), NotImplementedError, "differentiable is True"),
    "of a group": (
        lambda p: ours.AdamW([{"params": p, "differentiable": True}]), NotImplementedError, "differentiable is True",
    ),
    "dtype": (lambda p: ours.AdamW(p, state_dtype=torch.float16), TypeError, "state_dtype is torch.float16"),
    "lr": (lambda p: ours.AdamW(p, lr=-1), ValueError, "Invalid learning rate: -1"),
    "none": (lambda p: ours.AdamW([]), ValueError, "empty parameter list"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_arguments(case):
    make, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        make(parameters())


def sparse(p, optimizer):
    p.grad = torch.ones(3).to_sparse()


def other_shape(p, optimizer):
    optimizer.state[p]["exp_avg"] = torch.ones(2)


def other_dtype(p, optimizer):
    optimizer.state[p]["exp_avg_sq"] = torch.ones(3, dtype=torch.float64)


def other_step(p, optimizer):
    optimizer.state[p]["step"] = torch.ones((), dtype=torch.float64)


def integers(p, optimizer):
    optimizer.param_groups[0]["params"][0] = q = Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
    q.grad = torch.ones(3, dtype=torch.int32)


def on_meta(p, optimizer):
    optimizer.param_groups[0]["params"][0] = q = Parameter(torch.ones(3, device="meta"))
    q.grad = torch.ones(3, device="meta")


def freed(p, optimizer):
    optimizer.state[p]["exp_avg"].untyped_storage().resize_(0)


WRONG = {
    sparse: (RuntimeError, "layout torch.sparse_coo"),
    other_shape: (ValueError, r"exp_avg of a parameter in float32 on cpu has shape \(2,\), expected \(3,\)"),
    other_dtype: (TypeError, "exp_avg_sq of a parameter in float32 on cpu has dtype float64, expected float32"),
    other_step: (TypeError, "step of a parameter in float32 on cpu has dtype float64, expected float32"),
    integers: (TypeError, "int32"),
    on_meta: (NotImplementedError, "a parameter is on meta"),
    freed: (RuntimeError, "no memory"),
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_refuses_tensors(change):
    p = Parameter(torch.ones(3))
    optimizer = ours.AdamW([p])
    p.grad = torch.ones(3)
    optimizer.step()
    change(p, optimizer)
    error, text = WRONG[change]
    with pytest.raises(error, match=text):
        optimizer.step()
    assert torch.isfinite(p).all()


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from aotops.frontends.torch import AdamW

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
generator = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(*shape, generator=generator)


def of(local, placement=Shard(0)):
    return DTensor.from_local(local, mesh, [placement], run_check=False)


for options in ({}, {"amsgrad": True}, {"state_dtype": torch.bfloat16}):
    local = draw(4, 6)
    plain = torch.nn.Parameter(local.clone())
    parameter = torch.nn.Parameter(of(local))
    optimizers = AdamW([plain], **options), AdamW([parameter], **options)
    for _ in range(3):
        plain.grad = draw(4, 6)
        parameter.grad = of(plain.grad.clone())
        for optimizer in optimizers:
            optimizer.step()
    state = optimizers[1].state[parameter]
    assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].shape == (8, 6)
    assert torch.equal(parameter.to_local(), plain)
    again = AdamW([parameter], **options)
    again.load_state_dict(optimizers[1].state_dict())
    plain.grad = draw(4, 6)
    parameter.grad = of(plain.grad.clone())
    again.step()
    optimizers[0].step()
    assert torch.equal(parameter.to_local(), plain)
half = torch.nn.Parameter(of(draw(4, 6).bfloat16()))
half.grad = of(draw(4, 6).bfloat16())
optimizer = AdamW([half], master_weights=True, state_dtype=torch.float32)
optimizer.step()
assert optimizer.state[half]["master_param"].dtype == torch.float32
optimizer.state[half]["exp_avg"] = torch.zeros(8, 6)
try:
    optimizer.step()
except TypeError as error:
    print(error)
"""


def test_a_dtensor_is_updated_shard_by_shard(python):
    pytest.importorskip("torch.distributed.tensor")
    assert "expected its gradient and state in the same placements" in python(SHARDED)
