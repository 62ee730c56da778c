"""Times of operators of tests/programs/triton_package beside Triton's own launch of the same kernel, configuration and
tensors: on the device, from replays of a CUDA graph, and of the caller's thread. It needs a GPU, torch and Triton; the
package is built first: ``aotops build tests/programs/triton_package --arch native``.

    python tests/programs/triton_times.py
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("triton_package")))

import torch
from tritons import kernels, library

from aotops.frontends import torch as frontend

F = frontend.of(library)
WARM_UP, REPEATS, CALLS = 5, 31, 20


def device_times(*calls) -> list[float]:
    """Microseconds of each call, the median of replays of a graph of CALLS; the graphs take turns."""
    graphs = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(CALLS):
                call()

    def replay(graph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / CALLS

    return _medians(graphs, replay)


def host_times(*calls) -> list[float]:
    """Microseconds of the caller's thread for each call."""

    def issue(call) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - began) * 1e6 / CALLS

    return _medians(calls, issue)


def _medians(subjects, clock) -> list[float]:
    times = [[clock(each) for each in subjects] for _ in range(REPEATS + WARM_UP)]
    return [statistics.median(column) for column in zip(*times[WARM_UP:], strict=True)]


def rows():
    for n in (1 << 12, 1 << 24):
        x, y, out = (torch.randn(n, device="cuda") for _ in range(3))
        block = {"BLOCK": 1024} if n >= 65536 else {"BLOCK": 256, "num_warps": 2}
        grid = (-(-n // block["BLOCK"]),)
        yield (
            f"vector_add {n}",
            lambda x=x, y=y: F.vector_add(x, y),
            lambda x=x, y=y, out=out, n=n, grid=grid, block=block: kernels.add_kernel[grid](x, y, out, n, **block),
        )
    x = torch.randn(4096, 1024, device="cuda")
    y = torch.empty_like(x)
    yield (
        "row_softmax 4096x1024",
        lambda: F.row_softmax(x),
        lambda: kernels.softmax_kernel[(4096,)](y, x, 1024, 1024, BLOCK=1024, num_warps=4),
    )
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.float16) for _ in range(2))
    c = torch.empty_like(a)
    block = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    if torch.cuda.get_device_capability() not in ((9, 0), (10, 0)):
        block = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 4}
    grid = (4096 // block["BLOCK_M"], 4096 // block["BLOCK_N"])
    sizes = (4096, 4096, 4096, 4096, 1, 4096, 1, 4096, 1)
    yield (
        "product 4096",
        lambda: F.product(a, b),
        lambda: kernels.product_kernel[grid](a, b, c, *sizes, **block),
    )
    q, k, v = (torch.randn(4, 16, 2048, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    o = torch.empty_like(q)
    options = {"CAUSAL": True, "D": 64, "BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    yield (
        "attend 4x16x2048x64",
        lambda: F.attend(q, k, v, causal=True),
        lambda: kernels.attention_kernel[(32, 64)](q, k, v, o, 2048, 0.125, **options),
    )


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us: aotops, Triton, quotient")
    with torch.no_grad():
        for name, ours, theirs in rows():
            for what, clock in (("device", device_times), ("host", host_times)):
                a, b = clock(ours, theirs)
                print(f"{name:24} {what:7} {a:9.2f} {b:9.2f} {a / b:7.3f}")
