"""Training steps of transformers' models: as they are, with ``replace``, and with Liger's kernels if those are there.

A step is forward, backward and torch's fused AdamW, in bfloat16, with weights at random, in eager mode and under
torch.compile. A row has the median of the steps, the peak of memory, and the loss of each step, which are those of the
other rows up to rounding. aotops_head replaces the head and its loss by linear_cross_entropy too, as Liger does, and
aotops_all attention as well. Each model has a process of its own, in which Liger is last, because it changes
transformers for the process.

    python -m benchmarks.replaced                                          # all, into results/replaced_h200.json
    python -m benchmarks.replaced llama gpt2 --modes eager --impls transformers,aotops --json -
    python -m benchmarks.replaced --page                                   # the table of docs/replace.md, of the record
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module, metadata, util
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from aotops.bench.turns import Turns

IMPLS = ("transformers", "aotops", "aotops_head", "aotops_all", "liger")
ALSO = {"aotops_head": ("linear_cross_entropy",), "aotops_all": ("linear_cross_entropy", "attention")}
MODES = ("eager", "compiled")
WARM_UP = 4
STEPS = 10
RESULTS = Path(__file__).parent / "results" / "replaced_h200.json"
PAGE = Path(__file__).parents[1] / "docs" / "replace.md"
SECTION = re.compile(r"(<!-- replaced: steps -->\n).*?(<!-- end -->)", re.DOTALL)
TITLES = {"llama": "Llama", "qwen": "Qwen", "gpt2": "GPT-2", "bert": "BERT", "vit": "ViT"}
LABELS = {
    "transformers": "transformers", "aotops": "`replace`", "aotops_head": '`also="linear_cross_entropy"`',
    "aotops_all": "attention too", "liger": "Liger",
}  # fmt: skip

Row = dict[str, Any]


class Model(NamedTuple):
    family: str
    head: str
    batch: int
    tokens: int
    """0: images."""
    size: dict[str, Any]


_DECODER = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 97,
    "num_key_value_heads": 1, "head_dim": 16, "n_embd": 32, "n_layer": 2, "n_head": 2,
    "image_size": 32, "patch_size": 16,
}  # fmt: skip
_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": Model("Llama", "ForCausalLM", 8, 2048, _DECODER),
    "qwen": Model("Qwen3", "ForCausalLM", 8, 2048, _DECODER | {"hidden_size": 1024, "vocab_size": 151936}),
    "gpt2": Model("GPT2", "LMHeadModel", 16, 1024, _GPT2),  # 124M, as its configuration is
    "bert": Model("Bert", "ForMaskedLM", 64, 512, _BERT),  # BERT-base
    "vit": Model("ViT", "ForImageClassification", 128, 0, {"num_labels": 1000}),  # ViT-B/16
}
ORDER = {"model": tuple(MODELS), "impl": IMPLS, "mode": MODES}


# -------------------------------------------------------------------------------------------------------- measurements


def rows(name: str, impls: Iterable[str], modes: Iterable[str], steps: int, tiny: bool, turns: Turns) -> Iterator[Row]:
    """Measured in this process."""
    import torch

    for impl in sorted(impls, key=IMPLS.index):
        for mode in sorted(modes, key=MODES.index):
            turns.prepare()
            model = build(name, impl, tiny)
            if model is None:
                print(f"{name}: {impl} has no kernels for it", flush=True)
                break
            row = {"model": name, "impl": impl, "mode": mode} | measure(model, name, mode, steps, tiny, turns)
            print(line(row), flush=True)
            yield row
            del model
            gc.collect()
            torch._dynamo.reset()
            torch.cuda.empty_cache()


def build(name: str, impl: str, tiny: bool) -> Any:
    """The model; None if the implementation has no kernels for it."""
    import torch
    import transformers

    from aotops.frontends import torch as F

    family, head, _, tokens, size = MODELS[name]
    if impl == "aotops_head" and not head.endswith(("CausalLM", "LMHeadModel")):
        return None
    config = getattr(transformers, f"{family}Config")(**size | (_TINY if tiny else {}))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = getattr(transformers, family + head)(config).bfloat16().train()
    if tokens:
        model.config.use_cache = False
    if impl.startswith("aotops"):
        F.replace(model, also=ALSO.get(impl, ()))
    if impl == "liger":
        patches = import_module("liger_kernel.transformers.monkey_patch")
        if config.model_type not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
            return None
        patches._apply_liger_kernel_to_instance(model)
    return model


def measure(model: Any, name: str, mode: str, steps: int, tiny: bool, turns: Turns) -> Row:
    import torch

    from .models.torch_train import Clock

    inputs = batch_of(model, name, tiny)
    clock = Clock(model.device.type)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    call = torch.compile(model) if mode == "compiled" else model
    losses = []

    def step(inputs: dict[str, Any]) -> None:
        loss = call(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    began = time.perf_counter()
    step(inputs)
    clock.synchronize()
    first = time.perf_counter() - began
    clock.give_back()
    with turns:
        for _ in range(WARM_UP):
            step(inputs)
        clock.synchronize()
        clock.reset_peak()
        times = clock.times(step, [inputs] * steps)
    return {
        **times,
        "peak_gib": clock.peak_gib(),
        "first_step_s": round(first, 1),
        "losses": [round(float(loss), 4) for loss in losses],
    }


def batch_of(model: Any, name: str, tiny: bool) -> dict[str, Any]:
    import torch

    _, _, batch, tokens, _ = MODELS[name]
    batch, tokens = (2, min(tokens, 16)) if tiny else (batch, tokens)
    config, on = model.config, {"device": model.device}
    if tokens:
        text = torch.randint(0, config.vocab_size, (batch, tokens), **on)
        return {"input_ids": text, "labels": text}
    size = batch, config.num_channels, config.image_size, config.image_size
    return {
        "pixel_values": torch.randn(size, dtype=torch.bfloat16, **on),
        "labels": torch.randint(0, config.num_labels, (batch,), **on),
    }


# --------------------------------------------------------------------------------------------------------- what it says


def line(row: Row) -> str:
    losses = row["losses"]
    return (
        f"{row['model']:6} {row['impl']:12} {row['mode']:8} {row['ms']:9.2f} ms {row['peak_gib'] or 0:7.2f} GiB  "
        f"first {row['first_step_s']:5.1f} s  loss {losses[0]} to {losses[-1]}"
    )


def differences(found: list[Row]) -> list[tuple[Row, float | None, float | None, float | None]]:
    """Each row; its time over that of the model as it is, in the same mode; the largest difference of its losses from
    those of the model in eager mode; and that between two runs of the model as it is, eager and compiled."""
    own = {(row["model"], row["mode"]): row for row in found if row["impl"] == "transformers"}
    results = []
    for row in found:
        same, eager = own.get((row["model"], row["mode"])), own.get((row["model"], "eager"))
        runs = [each["losses"] for (model, _), each in own.items() if model == row["model"]]
        spread = max((_apart(a, b) for a, b in combinations(runs, 2)), default=None)
        ratio = round(row["ms"] / same["ms"], 3) if same else None
        results.append((row, ratio, _apart(row["losses"], eager["losses"]) if eager else None, spread))
    return results


def _apart(a: list[float], b: list[float]) -> float:
    return round(max(abs(x - y) for x, y in zip(a, b, strict=True)), 4)


def page(text: str, record: dict[str, Any]) -> str:
    """The page with the table of a record: ms, and GiB at the peak."""
    found = {
        (row["model"], row["impl"], row["mode"]): f"{row['ms']:.1f}, {row['peak_gib']:.1f}" for row in record["rows"]
    }
    lines = [f"| | {' | '.join(TITLES.values())} |", "|---|" + "--:|" * len(TITLES)]
    for mode in MODES:
        for impl in IMPLS:
            cells = [found.get((model, impl, mode), "") for model in TITLES]
            if any(cells):
                lines.append(f"| {LABELS[impl]}, {mode} | {' | '.join(cells)} |")
    lines += ["", measured(record)]
    return SECTION.sub(lambda section: section[1] + "\n".join(lines) + "\n" + section[2], text)


def measured(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    dates = sorted({row.get("date", record["date"]) for row in record["rows"]})
    return f"{record['device']}, {versions}, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}."


def environment(command: str, packages: Iterable[str]) -> dict[str, Any]:
    import torch

    from .models.torch_train import device

    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": device(),
        "cuda": torch.version.cuda,
        "versions": {name: metadata.version(name) for name in packages if util.find_spec(name)},
    }


def add(file: Path, head: dict[str, Any], found: list[Row], order: Mapping[str, Sequence[str]]) -> None:
    """Writes the rows, in place of those of the same names, each with its day. ``order``: by key, the names in their
    order."""
    before = json.loads(file.read_text()) if file.exists() else head | {"rows": []}
    if before["device"] != head["device"]:
        raise ValueError(f"{file.name}: these are of two devices: {before['device']} and {head['device']}")
    dated = [{"date": of["date"]} | row for of, rows in ((before, before["rows"]), (head, found)) for row in rows]
    rows = {tuple(order[key].index(row[key]) for key in order): row for row in dated}
    lines = ",\n  ".join(json.dumps(rows[place]) for place in sorted(rows))
    file.write_text(json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n  ' + lines + "\n ]\n}\n")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--impls", help=f"of {', '.join(IMPLS)}, with commas; default: all that are installed")
    parser.add_argument("--modes", default=",".join(MODES), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps; default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this program, on a CPU too")
    parser.add_argument("--page", action="store_true", help="measure nothing: write the table of docs/replace.md")
    parser.add_argument("--turns", metavar="FILE", help="others run beside it, but for timed steps, which lock FILE")
    parser.add_argument("--json", default=str(RESULTS), metavar="FILE", help="adds the rows to it; - for none")
    args = parser.parse_args(argv)
    args.models = args.models or [*MODELS]
    installed = [impl for impl in IMPLS if impl != "liger" or util.find_spec("liger_kernel")]
    args.impls, args.modes = args.impls.split(",") if args.impls else installed, args.modes.split(",")
    for given, allowed in ((args.models, MODELS), (args.impls, IMPLS), (args.modes, MODES)):
        if unknown := [name for name in given if name not in allowed]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(allowed)}")
    return args


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.page:
        PAGE.write_text(page(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    if len(args.models) > 1:
        given = [word for word in argv if word not in args.models]
        root = Path(__file__).parents[1]
        failed = [
            name
            for name in args.models
            if subprocess.run([sys.executable, "-m", "benchmarks.replaced", name, *given], cwd=root).returncode
        ]
        sys.exit(f"replaced: {', '.join(failed)} failed" if failed else 0)
    found = []
    for row in rows(args.models[0], args.impls, args.modes, args.steps, args.tiny, Turns(args.turns)):
        found.append(row)
        if args.json != "-":  # after each row, for a run that is cut off
            packages = "torch", "transformers", "triton", "liger_kernel"
            add(Path(args.json), environment("python -m benchmarks.replaced", packages), [row], ORDER)
    for row, ratio, apart, spread in differences(found):
        what = f"{row['model']:6} {row['impl']:12} {row['mode']:8}"
        print(f"{what} {ratio} of its time; losses {apart} apart, spread {spread}")


if __name__ == "__main__":
    main()
