"""blend, of which no frontend knows: that it is split, counted and fused as a product. A part of
test_adding_an_op.py."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

from types import SimpleNamespace

import numpy as np
import pytest

from aotops.bench.cases import works
from aotops.ops import OPS

X, W, B = (np.random.default_rng(0).standard_normal(shape).astype("float32") for shape in ((8, 12), (4, 12), (4,)))
OP = OPS["blend"]
FLOPS = 2 * 8 * 4 * 12


def test_the_benchmark_counts_it():
    (work,) = works(["blend"])
    assert (work.flops("forward", (8, 4, 12)), work.flops("backward", (8, 4, 12))) == (FLOPS, 2 * FLOPS)


def test_torch_counts_it():
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from aotops.frontends import torch as ours

    for needed in ((True, True), (True, False)):
        x, w = (torch.tensor(t, requires_grad=need) for t, need in zip((X, W), needed, strict=True))
        with FlopCounterMode(display=False) as counter:
            ours.blend(x, w, torch.tensor(B), 2.0).sum().backward()
        assert counter.get_total_flops() == (1 + sum(needed)) * FLOPS


def test_inductor_decomposes_it(monkeypatch):
    torch = pytest.importorskip("torch")
    from torch._inductor import lowering
    from torch._inductor.decomposition import select_decomp_table

    from aotops.frontends import torch as ours
    from aotops.frontends.torch import inductor

    assert ours.blend
    assert lowering
    x, w, b = map(torch.tensor, (X, W, B))
    for name, args in (("blend", (x, w, b, 2.0)), ("blend_backward", (torch.ones(8, 4), x, w, 2.0))):
        operator = getattr(torch.ops.aotops, name).default
        decomposition = select_decomp_table()[operator]
        assert decomposition(*args) is NotImplemented  # on a CPU
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(inductor, "_fuses", lambda x: True)
            torch.testing.assert_close(decomposition(*args), operator(*args), rtol=1e-5, atol=1e-5)


def test_dtensor_splits_its_sum():
    pytest.importorskip("torch.distributed.tensor")
    from torch.distributed.tensor import Partial, Shard

    from aotops.frontends.torch.sharding import _strategies

    specs = [SimpleNamespace(shape=t.shape) for t in (X, W, B)]
    assert ([Partial()], [Shard(1), Shard(1), Partial(), None]) in _strategies(OP, *specs, 2.0)


def test_xla_partitions_its_sum():
    jax = pytest.importorskip("jax")
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from aotops.frontends import jax as ours

    mesh = Mesh(np.array(jax.devices("cpu")), ("d",))
    x, w = (jax.device_put(t, NamedSharding(mesh, PartitionSpec(None, "d"))) for t in (X, W))
    call = jax.jit(lambda x, w, b: ours.blend(x, w, b, 2.0)).lower(x, w, B).compile()
    assert "all-gather" not in call.as_text()
    np.testing.assert_allclose(call(x, w, B), 2 * X @ W.T + B, 1e-5, 1e-5)
