"""Long runs: attention's bits behind a kernel that still writes what it reads, and 10^3 steps of a model.

Bits: a repetition fills the memory of a packed projection with NaN, computes the projection into it, runs attention's
forward, does the same with the gradient of the result, and runs the backward. Results that differ in a bit from those
of the first are counted on the device. It is repeated in a CUDA graph, whose kernels follow one another at once, and on
a stream whose queue is full, which a waiting kernel holds back.

Training: GPT-2 of benchmarks.models in bfloat16, each step on a text of its own. A curve has the means of the losses of
50 steps each; how far ours is from torch.compile's stands beside them. The implementations train at the same time.

    python -m benchmarks.long_runs                                   # all, into results/long_runs_h200.json
    python -m benchmarks.long_runs --repeats 100 --steps 50 --json -
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import aotops
from aotops.bench.sources import of_kernel

from .models.__main__ import run
from .models.spec import Spec

RESULT = Path(__file__).parent / "results" / "long_runs_h200.json"
REPEATS, STEPS, WINDOW = 10_000, 1_000, 50
IMPLS = ("torch.compile", "aotops.compile")
PARTS = ("bits", "training")
QUEUED = 50  # repetitions on a stream behind one kernel that waits
WAIT = 20_000_000  # clock cycles, of about 0.6 ns

Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------- bits


class Call(NamedTuple):
    operator: str
    head_dim: int
    length: int
    heads: int
    batch: int


CALLS = (Call("qkv_attention", 64, 1024, 12, 4), Call("attention", 128, 2048, 8, 2))


class Repetition:
    """Causal attention behind its projection; ``wrong`` is how many repetitions had other bits than the first."""

    def __init__(self, call: Call) -> None:
        import torch

        from aotops.frontends import torch as ours

        def drawn(*shape: int) -> Any:
            return torch.randn(shape, device="cuda", generator=generator).bfloat16()

        self.ours, self.call = ours, call
        generator = torch.Generator("cuda").manual_seed(0)
        width, rows = call.heads * call.head_dim, (call.batch, call.length)
        self.x = drawn(*rows, width)
        self.weights = [drawn(n * width, width) * width**-0.5 for n in (3, 1)]
        self.qkv, self.dy = (torch.empty(*rows, n * width, device="cuda", dtype=torch.bfloat16) for n in (3, 1))
        self.wrong = torch.zeros((), device="cuda", dtype=torch.int64)
        self.expected = [x.clone() for x in self.results()]

    def __call__(self) -> None:
        import torch

        same = [(a.view(torch.int16) == b.view(torch.int16)).all() for a, b in zip(self.results(), self.expected)]  # noqa: B905
        self.wrong += ~torch.stack(same).all()

    def results(self) -> tuple[Any, Any]:
        """y and the gradient of the projection."""
        import torch

        self._project(self.qkv, self.weights[0])
        leaf = self.qkv.detach().requires_grad_()
        y = self._attend(leaf)
        self._project(self.dy, self.weights[1])
        return y, torch.autograd.grad(y, leaf, self.dy)[0]

    def _project(self, into: Any, weight: Any) -> None:
        into.fill_(float("nan"))
        self.ours.linear(self.x, weight, out=into)

    def _attend(self, qkv: Any) -> Any:
        if self.call.operator == "qkv_attention":
            return self.ours.qkv_attention(qkv, self.call.heads, causal=True)
        q, k, v = qkv.unflatten(-1, (3, self.call.heads, -1)).unbind(2)
        return self.ours.attention(q, k, v, causal=True).flatten(2)


def bits(call: Call, repeats: int) -> list[Row]:
    """The rows of a call: in a graph and on a stream."""
    import torch

    repetition, rows = Repetition(call), []
    for how, issue in (("graph", in_a_graph), ("stream", on_a_stream)):
        repetition.wrong.zero_()
        began = time.perf_counter()
        issue(repetition, repeats)
        torch.cuda.synchronize()
        row = {**call._asdict(), "how": how, "repeats": repeats, "wrong": int(repetition.wrong)}
        rows.append(row | {"seconds": round(time.perf_counter() - began, 1)})
        print(rows[-1], flush=True)
    return rows


def in_a_graph(repetition: Callable[[], None], repeats: int) -> None:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repetition()
    for _ in range(repeats):
        graph.replay()


def on_a_stream(repetition: Callable[[], None], repeats: int) -> None:
    import torch

    for i in range(repeats):
        if i % QUEUED == 0:
            torch.cuda._sleep(WAIT)
        repetition()


# ------------------------------------------------------------------------------------------------------------ training


def training(steps: int, caches: Path) -> list[Row]:
    """A row for each implementation, of a process of its own."""
    rows = []
    specs = [Spec("gpt2", impl, "bfloat16", timed=steps - 10) for impl in IMPLS]
    with ThreadPoolExecutor(len(specs)) as pool:
        for impl, answer in zip(IMPLS, pool.map(lambda spec: run(spec, caches), specs), strict=True):
            if answer is None:
                sys.exit(f"long_runs: {impl} failed")
            row = answer["row"]
            losses = row["losses"][:steps]
            curve = [round(mean(losses[i : i + WINDOW]), 4) for i in range(0, len(losses), WINDOW)]
            rows.append({"model": "gpt2", "impl": impl, "steps": len(losses), "loss": row["loss"]})
            rows[-1] |= {"finite": all(loss == loss and abs(loss) < 100 for loss in losses), "curve": curve}
            print(rows[-1], flush=True)
    return rows


def apart(rows: list[Row]) -> float:
    """The largest difference of a mean between the curves of torch.compile and ours."""
    return round(max(abs(a - b) for a, b in zip(*(row["curve"] for row in rows), strict=True)), 4)


# --------------------------------------------------------------------------------------------------------- what it says


def head() -> dict[str, Any]:
    import torch

    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.long_runs", *sys.argv[1:]]),
        "versions": {"aotops": aotops.__version__, "python": platform.python_version(), "torch": torch.__version__},
        "sources": {op: of_kernel(op) for op in ("attention", "qkv_attention")},
    }


def save(parts: dict[str, Any], file: Path) -> None:
    """A row a line, for diff. A part that was not run is null: rows of another run have another date and sources."""
    whole = head() | {part: parts.get(part) for part in (*PARTS, "apart")}
    lines = [
        f"{json.dumps(key)}: "
        + ("[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if isinstance(value, list) else json.dumps(value))
        for key, value in whole.items()
    ]
    file.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; default: both")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--json", default=str(RESULT), metavar="FILE", help="- for none; default: %(default)s")
    parser.add_argument("--caches", type=Path, metavar="FOLDER", help="of compiled code; default: a new one")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {}
    if "bits" in (args.parts or PARTS):
        found["bits"] = [row for call in CALLS for row in bits(call, args.repeats)]
    if "training" in (args.parts or PARTS):
        with tempfile.TemporaryDirectory() as temporary:
            found["training"] = training(args.steps, args.caches or Path(temporary))
        found["apart"] = apart(found["training"])
        print("apart", found["apart"], flush=True)
    if args.json != "-":
        save(found, Path(args.json))
    if any(row["wrong"] for row in found.get("bits", ())) or not all(
        row["finite"] for row in found.get("training", ())
    ):
        sys.exit("long_runs: wrong")


if __name__ == "__main__":
    main()
