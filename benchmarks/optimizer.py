"""AdamW's step beside torch's fused one: ``python -m benchmarks.optimizer``, on a GPU.

The parameters are those of GPT-2 (124 million). ``us`` is the device's time of a step, the median of ten; ``of_copy``
is the rate at which a step moves what it must read and write, over that of a copy of 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results/adamw_h200.json"

WIDTH, LAYERS, TOKENS, POSITIONS = 768, 12, 50257, 1024
LAYER = (
    (WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,),
    (WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,),
)  # fmt: skip
SHAPES = ((TOKENS, WIDTH), (POSITIONS, WIDTH), *(LAYER * LAYERS), (WIDTH,), (WIDTH,))

# dtype of the parameters, options of ours, bytes of an element: parameter, gradient, moments and copy; those that are
# written count twice
KINDS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("float32", {}, 2 * 4 + 4 + 2 * 2 * 4),
    ("bfloat16", {}, 2 * 2 + 2 + 2 * 2 * 2),
    ("bfloat16", {"state_dtype": "float32"}, 2 * 2 + 2 + 2 * 2 * 4),
    ("bfloat16", {"master_weights": True}, 2 + 2 + 2 * 2 * 4 + 2 * 4),
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULT, help="Default: %(default)s")
    options = parser.parse_args(argv)
    import torch

    from aotops import __version__

    copied = torch.empty(2**28, device="cuda")
    to = torch.empty_like(copied)
    copy_rate = 2 * 4 * copied.numel() / microseconds(lambda: to.copy_(copied)) / 1e3
    record = {
        "command": "python -m benchmarks.optimizer",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"aotops": __version__, "torch": torch.__version__},
        "copy_gb_per_s": round(copy_rate),
        "rows": [row(*kind, copy_rate) for kind in KINDS],
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n")


def row(dtype: str, given: dict[str, Any], size: int, copy_rate: float) -> dict[str, Any]:
    import torch

    from aotops.frontends import torch as F

    parameters = [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for shape in SHAPES]
    for p in parameters:
        p.grad = torch.randn_like(p)
    options = {name: getattr(torch, value) if name == "state_dtype" else value for name, value in given.items()}
    found = {
        "dtype": dtype,
        **given,
        "us": round(microseconds(F.AdamW(parameters, 1e-4, **options).step), 1),
        "torch_fused_us": round(microseconds(torch.optim.AdamW(parameters, 1e-4, fused=True).step), 1),
    }
    found["of_copy"] = round(size * sum(p.numel() for p in parameters) / found["us"] / 1e3 / copy_rate, 3)
    print(found, flush=True)
    return found


def microseconds(f: Callable[[], Any], calls: int = 10) -> float:
    """The device's time of a call, without that of the host: all calls are issued behind a long kernel."""
    import torch

    for _ in range(3):
        f()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    for mark in marks[:-1]:
        mark.record()
        f()
    marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) * 1e3


if __name__ == "__main__":
    main()
