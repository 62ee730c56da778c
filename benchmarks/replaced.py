"""A training step of transformers' models on a GPU: as they are, with ``replace``, and with Liger's kernels if they are
installed; each eager and compiled.

A step is forward, backward and torch's fused AdamW, in bfloat16. Every row runs in a process of its own, because Liger
changes transformers for the whole process, and prints the median of its steps, the peak of memory, and the loss of the
last step, which the same batch gives in each row up to rounding. No weights are downloaded.

    python -m benchmarks.replaced llama --json FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from importlib import import_module, util
from pathlib import Path
from typing import Any, NamedTuple

WARM_UP = 5


class Model(NamedTuple):
    classes: str
    batch: int
    tokens: int
    size: dict[str, Any]


_DECODER = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
MODELS = {
    "llama": Model("Llama ForCausalLM", 8, 2048, _DECODER),
    "qwen": Model("Qwen3 ForCausalLM", 8, 1024, _DECODER | {"vocab_size": 151936, "hidden_size": 1024}),
    "gpt2": Model("GPT2 LMHeadModel", 16, 1024, dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)),
    "bert": Model(
        "Bert ForMaskedLM", 64, 512, dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    ),
}
"""The sizes of GPT-2 124M and BERT-base are the defaults of their configurations."""
IMPLS = ("transformers", "aotops", "liger")


def model_of(name: str, impl: str) -> Any:
    import torch
    import transformers

    family, head = MODELS[name].classes.split()
    config = getattr(transformers, f"{family}Config")(**MODELS[name].size, attn_implementation="sdpa")
    config.use_cache = False
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = getattr(transformers, family + head)(config)
    torch.set_default_dtype(torch.float32)
    if impl == "aotops":
        from aotops.frontends import torch as F

        print(F.replace(model), file=sys.stderr)
    elif impl == "liger":
        patch = import_module("liger_kernel.transformers.monkey_patch")
        if model.config.model_type not in patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise SystemExit(f"liger: no kernels for {model.config.model_type}")
        patch._apply_liger_kernel_to_instance(model)
    return model.train()


def measure(name: str, impl: str, compiled: bool, steps: int) -> dict[str, Any]:
    import torch

    batch, tokens = MODELS[name].batch, MODELS[name].tokens
    model = model_of(name, impl)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    text = torch.randint(0, model.config.vocab_size, (batch, tokens), device="cuda")
    call = torch.compile(model) if compiled else model

    def step() -> Any:
        loss = call(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    began = time.perf_counter()
    first = float(step())
    first_s = time.perf_counter() - began
    for _ in range(WARM_UP):
        step()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        loss = step()
        mark.record()
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return {
        "model": name,
        "impl": impl,
        "compiled": compiled,
        "ms": round(ms, 2),
        "tokens_per_s": round(batch * tokens / ms * 1e3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_step_s": round(first_s, 1),
        "first_loss": round(first, 4),
        "loss": round(float(loss), 4),
        "device": torch.cuda.get_device_name(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--impls", default=",".join(IMPLS), help="default: %(default)s")
    parser.add_argument("--eager", action="store_true", help="without the compiled rows")
    parser.add_argument("--steps", type=int, default=10, help="timed steps; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    models, impls = args.models or [*MODELS], args.impls.split(",")
    if unknown := [name for name in models if name not in MODELS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(MODELS)}")
    if unknown := [name for name in impls if name not in IMPLS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(IMPLS)}")
    if args.row:
        print(json.dumps(measure(models[0], impls[0], not args.eager, args.steps)))
        return
    if not util.find_spec("liger_kernel"):
        impls = [impl for impl in impls if impl != "liger"]
    rows = []
    for name in models:
        for options in ["--eager"], *([] if args.eager else [[]]):
            for impl in impls:
                rows += row_of(name, impl, [*options, "--steps", str(args.steps)])
                if args.json:
                    args.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def row_of(name: str, impl: str, options: list[str]) -> list[dict[str, Any]]:
    """The row, printed; none, and the end of what went wrong, if its process failed."""
    command = [sys.executable, "-m", "benchmarks.replaced", name, "--row", "--impls", impl, *options]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    if done.returncode:
        print(f"{name} {impl}: failed\n{done.stderr[-1500:]}", flush=True)
        return []
    row = json.loads(done.stdout.splitlines()[-1])
    kind = "compiled" if row["compiled"] else "eager"
    print(
        f"{name:6} {impl:12} {kind:8} {row['ms']:8.2f} ms {row['peak_gib']:7.2f} GiB  "
        f"first {row['first_step_s']:5.1f} s  loss {row['first_loss']} to {row['loss']}",
        flush=True,
    )
    return [row]


if __name__ == "__main__":
    main()
