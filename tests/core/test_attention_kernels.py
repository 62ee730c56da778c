"""attention on a GPU, by each choice of the kernels (AOTOPS_ATTENTION)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]

MODES = """
import itertools
import os

import torch

from aotops.frontends import torch as ours

torch.manual_seed(0)


def heads_first(x, layout):
    return x.double() if layout == "BHSD" else x.double().transpose(1, 2)


def exact(q, k, v, lengths, causal, window, layout, softcap=0, ends=None, mask=None, bias=None):
    q, k, v = (heads_first(x, layout) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    n, m = q.shape[2], k.shape[2]
    distance = torch.arange(m, device="cuda") - (torch.arange(n, device="cuda")[:, None] + m - n)
    left, right = window or (-1, -1)
    seen = torch.ones(n, m, dtype=torch.bool, device="cuda")
    if left >= 0:
        seen &= distance >= -left
    if causal or right >= 0:
        seen &= distance <= (0 if causal else right)
    if lengths is not None:
        seen = seen & (torch.arange(m, device="cuda") < lengths[:, None, None, None])
    if ends is not None:
        at = torch.arange(n, device="cuda")
        sequence = torch.searchsorted(ends, at, right=True)
        seen = seen & (sequence[:, None] == sequence) & ((at >= ends[0]) & (at < ends[-1]))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        seen = seen & mask
    if bias is not None:
        scores, seen = scores + bias, seen & (bias != -float("inf"))
    scores = (softcap * torch.tanh(scores / softcap) if softcap else scores).masked_fill(~seen, -1e30)
    y = (torch.softmax(scores, -1) * seen) @ v
    return y if layout == "BHSD" else y.transpose(1, 2)


# A mask or a bias (of the call's dtype, or a wide one). Axes that are "1" are broadcast. A mask of tiles has whole ones
# that see everything. One that is moved begins at no multiple of 16 bytes.
def added_of(b, h, n, m, kind, axes, dtype):
    shape = [size if axis != "1" else 1 for axis, size in zip(axes, (b, h, n, m))]
    if kind == "tiles":
        return {"mask": (torch.arange(m, device="cuda") < m // 2) | (torch.rand(shape, device="cuda") < 0.7)}
    if kind in ("mask", "moved"):
        x = torch.rand(shape, device="cuda") < 0.7
    else:
        x = torch.randn(shape, device="cuda").to(torch.float32 if kind == "wide" else dtype)
    x[..., 3::7] = hidden = False if x.dtype == torch.bool else -float("inf")
    if axes[2] != "1":
        x[..., 5, :] = hidden  # a query that sees nothing
    if kind == "moved":
        x = torch.cat([~x.flatten()[:5], x.flatten()])[5:].view(shape)
    return {"mask" if x.dtype == torch.bool else "bias": x}


# Steps of which "wrong" counts the results with other bits: in a queue behind a kernel that waits, and in a graph.
def repeat(step, wrong, *which):
    torch.cuda._sleep(10_000_000)  # the steps are queued behind it
    for _ in range(50):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(), step()
    for _ in range(50):
        graph.replay()
    assert wrong.item() == 0, (*which, wrong.item())


# batch, heads, kv_heads, queries, keys, head_dim, that of v, causal, window, layout, lengths, softcap, cu_seqlens, what
# is added to scores and along which axes
CALLS = [
    (1, 1, 1, 64, 64, 64, 64, False, None, "BSHD", None),
    (2, 3, 3, 200, 200, 64, 64, False, None, "BSHD", None),
    (2, 4, 2, 333, 517, 128, 128, True, None, "BSHD", None),
    (1, 4, 1, 1000, 1000, 128, 128, True, None, "BSHD", None),
    (2, 2, 2, 512, 512, 64, 64, False, None, "BHSD", [100, 512]),
    (2, 2, 1, 300, 700, 96, 80, False, (50, 20), "BSHD", [700, 333]),
    (2, 2, 2, 700, 300, 40, 64, True, None, "BHSD", None),
    (1, 2, 2, 513, 1025, 128, 64, True, (128, 0), "BSHD", None),
    (2, 8, 2, 130, 130, 72, 128, False, None, "BSHD", [0, 65]),
    (3, 5, 5, 1, 900, 64, 64, True, None, "BSHD", [1, 450, 900]),
    (2, 70, 70, 300, 300, 64, 64, True, None, "BSHD", None),  # more tiles than multiprocessors
    (3, 50, 25, 260, 390, 128, 128, False, None, "BHSD", None),
    (1, 2, 2, 4096, 4096, 64, 64, True, (700, 0), "BSHD", None),
    # dq is summed over many tiles of keys, in turns, and by more blocks than there are multiprocessors
    (1, 20, 20, 2048, 2048, 128, 128, False, None, "BSHD", None),
    (2, 20, 5, 1030, 2100, 64, 64, True, None, "BHSD", [2100, 1400]),
    (1, 12, 4, 2048, 2048, 128, 128, True, (256, 0), "BSHD", None),
    (2, 4, 4, 1030, 515, 80, 128, False, (300, -1), "BSHD", None),  # the last queries see no key
    (3, 2, 2, 900, 700, 128, 128, True, None, "BSHD", [466, 0, 700]),
    (2, 4, 2, 300, 300, 128, 128, True, None, "BSHD", None, 5.0),
    (1, 3, 3, 200, 400, 64, 64, False, None, "BHSD", [333], 2.0),
    (2, 4, 2, 1500, 1500, 128, 128, True, None, "BSHD", None, 0, [0, 1, 77, 77, 640, 900, 1300]),
    (1, 8, 8, 700, 700, 64, 64, False, None, "BHSD", None, 0, [3, 129, 700]),
    (1, 2, 1, 1000, 1000, 72, 96, True, (200, 0), "BSHD", None, 4.0, [0, 500, 1000]),
    (3, 40, 40, 520, 520, 64, 64, True, None, "BSHD", [520, 0, 200], 0, [0, 128, 256, 520]),  # sections of heads
    (27, 6, 3, 600, 600, 128, 128, True, None, "BSHD", None),  # sections of 41 and 40 groups
    # head sizes that have kernels of their own in a forward
    (2, 4, 2, 333, 517, 96, 96, True, None, "BSHD", [517, 200]),
    (1, 70, 70, 300, 300, 80, 96, True, None, "BHSD", None),
    (1, 6, 3, 700, 700, 192, 128, True, None, "BHSD", None),
    (2, 35, 5, 200, 450, 136, 72, False, (100, 30), "BSHD", [450, 77]),
    (2, 40, 20, 390, 390, 256, 256, True, None, "BSHD", [390, 333]),
    (1, 2, 1, 100, 333, 160, 200, False, None, "BHSD", None),
    (1, 4, 2, 700, 700, 256, 200, True, None, "BSHD", None, 3.0, [0, 130, 700]),
    (2, 4, 2, 200, 333, 160, 256, False, None, "BHSD", None, 0, None, "bias", "bhqk"),
    (20, 16, 8, 260, 260, 128, 128, True, None, "BSHD", None),  # sections of two rounds
    # a head_dim of 64 and many keys
    (2, 2, 1, 300, 2300, 64, 64, False, None, "BSHD", [2300, 2055]),
    (1, 3, 3, 450, 2500, 64, 40, True, None, "BHSD", None),
    # masks and biases; queries and keys end within a tile
    (2, 3, 3, 200, 200, 64, 64, False, None, "BSHD", None, 0, None, "mask", "b1qk"),
    (2, 4, 2, 333, 521, 128, 128, True, None, "BSHD", None, 0, None, "mask", "bhqk"),
    (2, 2, 2, 512, 512, 64, 64, False, None, "BHSD", [100, 512], 0, None, "mask", "b11k"),
    (2, 2, 1, 300, 700, 96, 80, False, (50, 20), "BSHD", [700, 333], 0, None, "mask", "11qk"),
    (2, 50, 25, 260, 390, 128, 128, False, None, "BHSD", None, 0, None, "mask", "b1qk"),
    (3, 4, 2, 333, 521, 128, 128, True, None, "BSHD", None, 0, None, "mask", "b11k"),
    (2, 3, 3, 1030, 777, 64, 64, True, None, "BHSD", [777, 300], 0, None, "mask", "b1qk"),
    (2, 4, 4, 384, 512, 128, 128, False, None, "BSHD", None, 0, None, "mask", "b1qk"),  # rows of whole 16 bytes
    (2, 3, 3, 200, 200, 64, 64, False, None, "BSHD", None, 0, None, "moved", "b1qk"),
    (2, 4, 2, 65, 143, 128, 128, False, None, "BSHD", None, 0, None, "moved", "bhqk"),
    (2, 4, 2, 100, 30, 64, 64, False, None, "BSHD", None, 0, None, "moved", "b11k"),
    (1, 3, 3, 530, 1040, 64, 64, True, None, "BSHD", None, 0, None, "tiles", "b1qk"),
    (2, 4, 2, 300, 901, 128, 128, False, None, "BHSD", None, 0, None, "tiles", "b11k"),
    (2, 4, 1, 333, 518, 64, 64, False, None, "BHSD", None, 0, None, "bias", "1hqk"),
    (2, 4, 2, 333, 520, 128, 128, True, None, "BSHD", [520, 77], 0, None, "bias", "bhqk"),
    (2, 2, 2, 700, 300, 40, 64, True, None, "BHSD", None, 0, None, "bias", "1h1k"),
    (2, 4, 2, 100, 517, 128, 128, True, None, "BSHD", None, 0, None, "bias", "1hqk"),  # of words of no two keys
    (2, 4, 2, 333, 517, 128, 128, False, None, "BSHD", None, 0, None, "wide", "bhqk"),
    (2, 35, 5, 1030, 390, 64, 64, False, (300, -1), "BHSD", None, 0, None, "wide", "1h1k"),
]
# The choice is between kernels of 16 bits. There p and ds are rounded, and the results. In float32 a product of TF32
# alone would have an error of 2e-4.
BOUNDS = {dtype: 2 * torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16)}
if os.environ["AOTOPS_ATTENTION"] == "auto":
    BOUNDS[torch.float32] = 2e-5
for dtype, bound in BOUNDS.items():
    for b, h, kv, n, m, d, e, causal, window, layout, lengths, *more in CALLS:
        softcap, ends, *added = [*more, *(0, None)[len(more) :]]
        added = added_of(b, h, n, m, *added, dtype) if added else {}
        sizes = [(b, n, h, d), (b, m, kv, d), (b, m, kv, e), (b, n, h, e)]
        if layout == "BHSD":
            sizes = [(b, heads, seq, dim) for b, seq, heads, dim in sizes]
        q, k, v, dy = (torch.randn(size, device="cuda").to(dtype) for size in sizes)
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        lengths = None if lengths is None else torch.tensor(lengths, device="cuda")
        ends = None if ends is None else torch.tensor(ends, device="cuda")
        right = exact(*wide, lengths, causal, window, layout, softcap, ends, **added)
        right = [right.detach(), *torch.autograd.grad(right, wide, dy.double())]
        if lengths is not None:  # what is not there is not read
            for i, length in enumerate(lengths.tolist()):
                for x in (k, v):
                    (x[i, :, length:] if layout == "BHSD" else x[i, length:]).fill_(float("nan"))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        attributes = dict(causal=causal, window=window, layout=layout, softcap=softcap, cu_seqlens=ends, **added)
        results = []
        for _ in range(2):
            y = ours.attention(*leaves, lengths, **attributes)
            results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
        for one, other in zip(*results):
            assert torch.equal(one, other)
        # without dq, by another kernel on Hopper
        only = torch.autograd.grad(ours.attention(*leaves, lengths, **attributes), leaves[1:], dy)
        for one, of in [*zip(results[0], right), *zip(only, right[2:])]:
            error = (one.double() - of).norm() / (of.norm() + 1e-30)
            assert error <= bound, (dtype, b, h, kv, n, m, d, e, causal, window, float(error))

    # Scores of -200, and keys that end within a tile: of what is behind them, a row of zeros, exp(0 - lse) is infinite.
    q, k, v, dy = (torch.randn(1, n, 2, 64, device="cuda").to(dtype) for n in (77, 333, 333, 77))
    q[..., 0], k[..., 0] = 40, -40
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    right = exact(*wide, None, False, None, "BSHD")
    right = [right.detach(), *torch.autograd.grad(right, wide, dy.double())]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for bias in (None, torch.zeros(2, 1, 333, device="cuda", dtype=dtype)):
        y = ours.attention(*leaves, bias=bias)
        for name, one, of in zip("yqkv", [y.detach(), *torch.autograd.grad(y, leaves, dy)], right):
            if name == "q":  # ds has a sum of 0, so 40 times ds has only what rounding leaves
                assert one.isfinite().all(), (dtype, bias is None)
                one, of = one[..., 1:], of[..., 1:]
            error = (one.double() - of).norm() / of.norm()
            assert error <= max(bound, 1e-3), (dtype, bias is None, name, float(error))

    # A key that no query sees may be anything. Of queries that are absent from a tile there is stale memory.
    hidden = [("mask", "bhqk", 320), ("mask", "b1qk", 331), ("mask", "b11k", 331), ("bias", "bhqk", 320)]
    for kind, axes, m in [*hidden, ("wide", "bhqk", 320)]:
        for d in (64, 128):
            leaves = [torch.randn(2, n, 3, d, device="cuda").to(dtype) for n in (200, m, m)]
            added = added_of(2, 3, 200, m, kind, axes, dtype)
            leaves[1][:, 3::7] = float("nan")
            leaves = [x.requires_grad_() for x in leaves]
            y = ours.attention(*leaves, **added)
            for one in [y, *torch.autograd.grad(y, leaves[1:], torch.randn_like(y))]:
                assert one.isfinite().all(), (dtype, kind, axes, d)
# A kernel that starts while those before it write what it reads would find NaN, and empty sequences.
for d, ends in ((64, None), (128, None), (256, None), (64, [0, 300, 1024]), (128, [0, 300, 1024])):
    written = [torch.randn(4, 1024, 16, d, device="cuda").bfloat16() for _ in range(3)]
    read, ends = [x.clone() for x in written], None if ends is None else torch.tensor(ends, device="cuda")
    of_read = None if ends is None else ends.clone()
    expected, wrong = ours.attention(*read, causal=True, cu_seqlens=of_read), torch.zeros((), device="cuda")

    def step():
        if ends is not None:
            of_read.zero_(), of_read.add_(ends)
        for to, x in zip(read, written):
            to.fill_(float("nan")), torch.mul(x, 1, out=to)
        y = ours.attention(*read, causal=True, cu_seqlens=of_read)
        wrong.add_((y.view(torch.int16) != expected.view(torch.int16)).any())

    repeat(step, wrong, d, ends)
# So would one of a backward, by the kernels of all three gradients and by those without dq.
for d, kind, all_three in itertools.product((64, 128), (None, "mask", "bias"), (True, False)):
    written = [torch.randn(4, 512, 8, d, device="cuda").bfloat16() for _ in range(4)]
    added = added_of(4, 8, 512, 512, kind, "b1qk", torch.bfloat16) if kind else {}
    *leaves, dy = [x.clone() for x in written]
    leaves, of_read = [x.requires_grad_() for x in leaves], {name: x.clone() for name, x in added.items()}
    wanted, wrong = leaves if all_three else leaves[1:], torch.zeros((), device="cuda")
    expected = torch.autograd.grad(ours.attention(*leaves, causal=True, **of_read), wanted, dy)

    def step():
        y = ours.attention(*leaves, causal=True, **of_read)
        for to, x in zip([*leaves, dy], written):
            to.data.fill_(float("nan")), torch.mul(x, 1, out=to.data)
        for name, x in added.items():
            of_read[name].data.fill_(0), of_read[name].data.copy_(x)
        for one, of in zip(torch.autograd.grad(y, wanted, dy), expected):
            wrong.add_((one.view(torch.int16) != of.view(torch.int16)).any())

    repeat(step, wrong, d, kind, all_three)
# A thread of torch's may still let go of a graph, which aborts while the interpreter ends (pytorch issue 190489).
os._exit(0)
"""


def run(mode: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "AOTOPS_ATTENTION": mode}
    return subprocess.run(
        [sys.executable, "-c", MODES], env=env, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("mode", ["auto", "general"])
def test_the_choice_of_the_kernels(mode):
    """Values and gradients beside float64, and the same bits again."""
    result = run(mode)
    assert result.returncode == 0, result.stderr[-2000:]


def kernels_of(step: Callable[[], Any]) -> tuple[set[str], Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = step()
        torch.cuda.synchronize()
    names = {event.name() for event in profile.profiler.kineto_results.events()}
    if not names:
        pytest.skip("the profiler finds nothing")
    found = {word for name in names for word in re.findall(r"attention_\w*kernel", name)}
    assert found, f"no kernel of attention is among {names}"
    return found, result


# What is added, its dtype, axes, the dtype of q, the keys, and whether the kernels are Hopper's.
TAKEN = [
    (None, None, "bfloat16", 320, True),
    (None, None, "float16", 331, True),
    ("bool", "b11k", "bfloat16", 320, True),
    ("bool", "b1qk", "bfloat16", 320, True),
    ("bool", "bhqk", "bfloat16", 331, True),
    ("bool", "b1qk", "float16", 320, False),
    ("bfloat16", "1hqk", "bfloat16", 320, True),
    ("bfloat16", "1h1k", "bfloat16", 320, True),
    ("bfloat16", "1hqk", "bfloat16", 331, False),
    ("float32", "1hqk", "bfloat16", 320, False),
    ("float16", "1hqk", "float16", 320, False),
]


@pytest.mark.parametrize(
    ("added", "axes", "of_q", "keys", "hopper", "dim"),
    [*((*row, dim) for row in TAKEN for dim in (64, 128)), *((*row, dim) for row in TAKEN[:2] for dim in (192, 256))],
)
def test_which_kernels_a_call_takes(added, axes, of_q, keys, hopper, dim):
    if torch.cuda.get_device_capability() != (9, 0) or "AOTOPS_ATTENTION" in os.environ:
        pytest.skip("the GPU is not of compute capability 9.0, or the kernels are chosen")
    from aotops.frontends import torch as ours

    leaves = [torch.randn(2, n, 3, dim, device="cuda", dtype=getattr(torch, of_q)) for n in (200, keys, keys)]
    leaves = [x.requires_grad_() for x in leaves]
    more = {}
    if added:
        shape = [1 if axis == "1" else size for axis, size in zip(axes, (2, 3, 200, keys), strict=True)]
        x = torch.ones(shape, device="cuda", dtype=getattr(torch, added))
        more = {"mask" if added == "bool" else "bias": x}
    forward, y = kernels_of(lambda: ours.attention(*leaves, **more))
    backward, _ = kernels_of(lambda: torch.autograd.grad(y, leaves, torch.ones_like(y)))
    for found in (forward, backward):
        assert bool(found & {f"attention_{name}_kernel" for name in ("wgmma", "one_pass", "wide")}) == hopper, found


# Queries, keys, heads that share one of keys, head_dim, and whether the kernels of few keys take the call.
FEW = [(1, 1, 4, 128, True), (8, 8, 4, 64, True), (32, 7, 1, 20, True), (8, 9, 1, 64, False), (9, 8, 4, 64, False),
       (4, 4, 1, 160, False), (4, 4, 1, 6, False)]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("queries", "keys", "group", "dim", "few"), FEW)
def test_calls_of_few_keys_have_kernels_of_their_own(queries, keys, group, dim, few, dtype):
    if "AOTOPS_ATTENTION" in os.environ:
        pytest.skip("the kernels are chosen")
    from aotops.frontends import torch as ours

    sizes = ((queries, 2 * group), (keys, 2), (keys, 2))
    leaves = [torch.randn(3, *size, dim, device="cuda", dtype=getattr(torch, dtype)) for size in sizes]
    leaves = [x.requires_grad_() for x in leaves]
    forward, y = kernels_of(lambda: ours.attention(*leaves))
    backward, _ = kernels_of(lambda: torch.autograd.grad(y, leaves, torch.ones_like(y)))
    assert (forward == {"attention_few_kernel"}) == few, forward
    assert (backward == {"attention_few_backward_kernel"}) == few, backward


# head_dim, that of v, elements that q begins after a multiple of 16 bytes, dropout, and whether TF32's kernels take the
# forward and the backward.
FLOAT = [
    (64, 64, 0, 0, True, True),
    (16, 100, 0, 0, True, True),
    (128, 96, 0, 0, True, True),
    (132, 64, 0, 0, True, True),  # the backward on Hopper
    (256, 256, 0, 0, True, True),
    (64, 64, 0, 0.5, True, False),
    (256, 64, 0, 0.5, False, False),
    (64, 12, 0, 0, False, False),
    (66, 64, 0, 0, False, False),
    (260, 64, 0, 0, False, False),
    (64, 64, 1, 0, False, False),
]


@pytest.mark.parametrize(("dim", "v_dim", "offset", "dropout", "forward", "backward"), FLOAT)
def test_which_kernels_a_call_in_float32_takes(dim, v_dim, offset, dropout, forward, backward):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the GPU has no TF32")
    from aotops.frontends import torch as ours

    q = torch.randn(2 * 70 * 3 * dim + offset, device="cuda")[offset:].view(2, 70, 3, dim)
    leaves = [q, *(torch.randn(2, 90, 3, size, device="cuda") for size in (dim, v_dim))]
    leaves = [x.requires_grad_() for x in leaves]
    more = {"seed": torch.tensor([3, 5], device="cuda"), "dropout": dropout} if dropout else {}
    found, y = kernels_of(lambda: ours.attention(*leaves, **more))
    hopper, most = torch.cuda.get_device_capability()[0] == 9, max(dim, v_dim)
    of_y, of_wgmma_y = {"attention_float_y_kernel"}, {"attention_float_wgmma_y_kernel"}
    right = of_wgmma_y if hopper and most <= 128 else of_y
    assert found & (of_y | of_wgmma_y) == (right if forward else set()), found
    found, _ = kernels_of(lambda: torch.autograd.grad(y, leaves, torch.ones_like(y)))
    of_two = {"attention_float_dq_kernel", "attention_float_dkv_kernel"}
    of_wgmma, of_pass = {"attention_float_wgmma_kernel"}, {"attention_float_pass_kernel"}
    right = (of_wgmma if 64 < most <= 128 else of_pass) if hopper else of_two if most <= 128 else set()
    assert found & (of_two | of_wgmma | of_pass) == (right if backward else set()), found


@pytest.mark.parametrize("dim", [64, 128])
def test_which_kernels_a_call_with_dropout_takes(dim):
    """The forward has one on Hopper, the backward one of mma.sync; with a softcap both are those of masks."""
    if torch.cuda.get_device_capability() != (9, 0) or "AOTOPS_ATTENTION" in os.environ:
        pytest.skip("the GPU is not of compute capability 9.0, or the kernels are chosen")
    from aotops.frontends import torch as ours

    leaves = [torch.randn(2, n, 3, dim, device="cuda", dtype=torch.bfloat16) for n in (200, 331, 331)]
    leaves = [x.requires_grad_() for x in leaves]
    seed = torch.tensor([3, 4], device="cuda")
    for softcap, wanted, first, second in [
        (0.0, leaves, "attention_wgmma_kernel", "attention_pairs_kernel"),
        (0.0, leaves[1:], "attention_wgmma_kernel", "attention_pairs_kernel"),
        (5.0, leaves, "attention_y_kernel", "attention_pass_kernel"),
    ]:
        forward, y = kernels_of(lambda: ours.attention(*leaves, seed=seed, dropout=0.2, softcap=softcap))  # noqa: B023
        backward, _ = kernels_of(lambda: torch.autograd.grad(y, wanted, torch.ones_like(y)))  # noqa: B023
        assert first in forward
        assert second in backward


@pytest.mark.parametrize("seen", [100, 70, 60])
def test_tiles_of_keys_that_two_blocks_have_are_right(seen):
    """On Hopper those of the last round of blocks, where all queries see all keys: a tile for each head here."""
    from aotops.frontends import torch as ours

    heads = torch.cuda.get_device_properties(0).multi_processor_count + 8
    leaves = [torch.randn(1, n, heads, 128, device="cuda", dtype=torch.bfloat16) for n in (520, 100, 100)]
    q, k, v = (x.requires_grad_() for x in leaves)
    dy = torch.randn_like(q)
    y = ours.attention(q, k, v, lengths=torch.tensor([seen], device="cuda"))
    found = [torch.autograd.grad(y, (q, k, v), dy, retain_graph=True) for _ in range(20)]
    assert all(torch.equal(x, first) for results in found for x, first in zip(results, found[0], strict=True))
    wide = [
        x.detach()[:, :n].transpose(1, 2).double().requires_grad_()
        for x, n in zip(leaves, (520, seen, seen), strict=True)
    ]
    scores = wide[0] @ wide[1].transpose(-1, -2) * 128**-0.5
    exact = torch.autograd.grad(torch.softmax(scores, -1) @ wide[2], wide, dy.transpose(1, 2).double())
    for x, right in zip(found[0], exact, strict=True):
        x, rest = x.transpose(1, 2).double().split([right.shape[2], x.shape[1] - right.shape[2]], 2)
        assert (x - right).square().mean().sqrt() < 1e-2 * right.square().mean().sqrt()
        assert not rest.any()


def test_an_unknown_choice_is_named():
    assert "attention: AOTOPS_ATTENTION is 'fast', expected 'auto' or 'general'" in run("fast").stderr
