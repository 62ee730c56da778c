"""attention on a GPU beside torch's: TFLOP/s over the length, `python -m benchmarks.attention`.

Forward and backward in bfloat16, of 16 heads of 64 or 128, causal or not, with as many examples as make 16384 tokens.
Peers are torch's scaled_dot_product_attention by cuDNN and by FlashAttention 2, which are compiled into torch. In a
round each implementation is called for `--seconds`; the median of three rounds counts. Operations are those that the
mask leaves: 4 for each pair and element of a head forward, 10 backward. Writes a file and the picture beside it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

RESULT = Path(__file__).parent / "results/attention_h200.json"
TOKENS, HEADS, ROUNDS = 16384, 16, 3
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--json", type=Path, default=RESULT, help="Default: %(default)s")
    options = parser.parse_args()
    import torch

    from aotops import __version__

    found = list(rows(options.lengths, options.seconds))
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.attention", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"aotops": __version__, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()},
        "rows": found,
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    draw(found, options.json.with_suffix(".png"), record["device"])


def rows(lengths: list[int], seconds: float) -> Iterator[Row]:
    for dim in (64, 128):
        for causal in (False, True):
            for length in lengths:
                row: Row = {"head_dim": dim, "causal": causal, "length": length, "batch": TOKENS // length}
                row |= measured(row["batch"], length, dim, causal, seconds)
                rates = "  ".join(f"{name} {row[name][0]:4.0f} {row[name][1]:4.0f}" for name in IMPLEMENTATIONS)
                print(f"head_dim {dim:3} {'causal' if causal else 'full':6} {length:5}  {rates}", flush=True)
                yield row


IMPLEMENTATIONS = ("aotops", "cudnn", "flash")


def measured(batch: int, length: int, dim: int, causal: bool, seconds: float) -> dict[str, tuple[int, int]]:
    """TFLOP/s forward and backward of each implementation."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from aotops.frontends import torch as ours

    made = [torch.randn(batch, length, HEADS, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v = (x.requires_grad_() for x in made[:3])

    def by(backend: Any) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                heads_first = (x.transpose(1, 2) for x in (q, k, v))
                return scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

        return call

    calls = {
        "aotops": lambda: ours.attention(q, k, v, causal=causal),
        "cudnn": by(SDPBackend.CUDNN_ATTENTION),
        "flash": by(SDPBackend.FLASH_ATTENTION),
    }
    steps: dict[str, tuple[Callable[[], Any], ...]] = {}
    for name, call in calls.items():
        y = call()

        def backward(y: Any = y) -> Any:
            return torch.autograd.grad(y, (q, k, v), made[3], retain_graph=True)

        steps[name] = torch.no_grad()(call), backward
    times = {name: ([], []) for name in steps}  # type: ignore[var-annotated]
    for _ in range(ROUNDS):
        for name, pair in steps.items():
            for step, into in zip(pair, times[name], strict=True):
                into.append(milliseconds(step, seconds))
    work = 4 * batch * HEADS * length**2 * dim / (2 if causal else 1) / 1e9
    return {name: (round(work / median(a)), round(2.5 * work / median(b))) for name, (a, b) in times.items()}


def milliseconds(step: Callable[[], Any], seconds: float) -> float:
    """The time of a step, between events: of as many as take so long."""
    from torch.cuda import Event

    def timed(n: int) -> float:
        begin, end = Event(enable_timing=True), Event(enable_timing=True)
        begin.record()
        for _ in range(n):
            step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / n

    return timed(max(3, int(1000 * seconds / timed(3))))


def draw(found: list[Row], to: Path, device: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(14, 6), sharey=True, layout="constrained")
    for i, name in enumerate(("forward", "backward")):
        for j, (dim, causal) in enumerate((dim, causal) for dim in (64, 128) for causal in (False, True)):
            axis = axes[i][j]
            own = [row for row in found if (row["head_dim"], row["causal"]) == (dim, causal)]
            for of in IMPLEMENTATIONS:
                axis.plot([str(row["length"]) for row in own], [row[of][i] for row in own], marker="o", label=of)
            axis.set_title(f"{name}, head_dim {dim}{', causal' if causal else ''}", fontsize=10)
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    axes[0][0].set_ylim(bottom=0)
    figure.supylabel("TFLOP/s")
    figure.supxlabel(f"length, bfloat16, 16 heads, 16384 tokens, {device}")
    figure.savefig(to, dpi=100)


if __name__ == "__main__":
    main()
