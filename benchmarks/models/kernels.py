"""The kernels of a training step, by class and by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

CLASSES = {
    "attention": r"flash|fmha|attention|sdpa|dot_do_o|convert_dq",  # the last two are helpers of cuDNN's
    "optimizer": r"multi_tensor_apply|adam",
    "triton": r"^triton_",
    "products": r"gemm|nvjet|cutlass|cublas|split_?k",
    "aotops": r"\baot::",
    "other": r"",
}
"""The first expression that is found in a kernel's name gives its class. Products are of both libraries."""

LISTED = 25


def class_of(kernel: str) -> str:
    return next(name for name, found in CLASSES.items() if re.search(found, kernel, re.IGNORECASE))


def profile(steps: Callable[[], Any], count: int) -> dict[str, Any]:
    """Milliseconds of a step: those in which a kernel runs, the kernels' own in all and by class, and of the kernels
    that take the most, with their number. A kernel that is started before the one before it has ended waits within its
    own time, so the sum of these may be longer than the step."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        steps()
        torch.cuda.synchronize()
    on_gpu = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in on_gpu)
    found = [(event.key, event.self_device_time_total / 1e3, event.count) for event in profiler.key_averages()]
    found = sorted((row for row in found if row[1] > 0), key=lambda row: -row[1])
    classes = dict.fromkeys(CLASSES, 0.0)
    for name, ms, _ in found:
        classes[class_of(name)] += ms / count
    return {
        "busy_ms": round(covered(spans) / 1e3 / count, 3),
        "total_ms": round(sum(classes.values()), 3),
        "classes_ms": {name: round(ms, 3) for name, ms in classes.items()},
        "top": [[name[:160], round(ms / count, 4), round(n / count, 2)] for name, ms, n in found[:LISTED]],
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of what these spans, in the order of their starts, cover together."""
    length, reached = 0.0, float("-inf")
    for start, end in spans:
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
