"""Training steps of transformers' models: as they are, with ``replace``, and with Liger's kernels if those are there.

A step is forward, backward and torch's fused AdamW, in bfloat16, with weights at random. A row has the median of the
steps, the peak of memory, and the first and the last loss, which are those of the other rows up to rounding. Each model
has a process of its own, in which Liger is last, because it changes transformers for the process.

    python -m benchmarks.replaced llama gpt2 --also linear_cross_entropy --json FILE
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from importlib import import_module, util
from pathlib import Path
from typing import Any, NamedTuple

IMPLS = ("transformers", "aotops", "liger")
WARM_UP = 4


class Model(NamedTuple):
    family: str
    head: str
    batch: int
    tokens: int
    size: dict[str, Any]


_DECODER = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 97,
    "num_key_value_heads": 1, "head_dim": 16, "n_embd": 32, "n_layer": 2, "n_head": 2,
}  # fmt: skip
_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": Model("Llama", "ForCausalLM", 8, 2048, _DECODER),
    "qwen": Model("Qwen3", "ForCausalLM", 8, 2048, _DECODER | {"hidden_size": 1024, "vocab_size": 151936}),
    "gpt2": Model("GPT2", "LMHeadModel", 16, 1024, _GPT2),  # 124M, as its configuration is
    "bert": Model("Bert", "ForMaskedLM", 64, 512, _BERT),  # BERT-base
}


def rows(
    name: str,
    impls: list[str],
    compiled: bool,
    steps: int,
    tiny: bool,
    without: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Measured in this process."""
    import torch

    found = []
    for impl in sorted(impls, key=IMPLS.index):
        model = build(name, impl, tiny, without, also)
        if model is None:
            print(f"{name}: {impl} has no kernels for it", flush=True)
            continue
        row = {"model": name, "impl": impl, "compiled": compiled, "without": without, "also": also} | measure(
            model, name, compiled, steps, tiny
        )
        losses = " to ".join(map(str, row["losses"]))
        print(
            f"{name:6} {impl:12} {'compiled' if compiled else 'eager':8} {row['ms']:9.2f} ms "
            f"{row['peak_gib'] or 0:7.2f} GiB  first {row['first_step_s']:5.1f} s  loss {losses}",
            flush=True,
        )
        found.append(row)
        del model
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return found


def build(name: str, impl: str, tiny: bool, without: tuple[str, ...], also: tuple[str, ...]) -> Any:
    """The model; None if Liger has no kernels for it."""
    import torch
    import transformers

    from aotops.frontends import torch as F

    family, head, _, _, size = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**size | (_TINY if tiny else {}))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = getattr(transformers, family + head)(config).bfloat16()
    model.config.use_cache = False
    if impl == "aotops":
        F.replace(model, without=without, also=also)
    if impl == "liger":
        patches = import_module("liger_kernel.transformers.monkey_patch")
        if config.model_type not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
            return None
        patches._apply_liger_kernel_to_instance(model)
    return model


def measure(model: Any, name: str, compiled: bool, steps: int, tiny: bool) -> dict[str, Any]:
    import torch

    from .models.torch_train import Clock, device

    batch, tokens = (2, 16) if tiny else (MODELS[name].batch, MODELS[name].tokens)
    clock = Clock(model.device.type)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    text = torch.randint(0, model.config.vocab_size, (batch, tokens), device=model.device)
    call = torch.compile(model) if compiled else model
    losses = []

    def step(text: Any) -> None:
        loss = call(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    began = time.perf_counter()
    step(text)
    clock.synchronize()
    first = time.perf_counter() - began
    for _ in range(WARM_UP):
        step(text)
    clock.synchronize()
    clock.reset_peak()
    times = clock.times(step, [text] * steps)
    return {
        **times,
        "tokens_per_s": round(batch * tokens / times["ms"] * 1e3),
        "peak_gib": clock.peak_gib(),
        "first_step_s": round(first, 1),
        "losses": [round(float(loss), 4) for loss in (losses[0], losses[-1])],
        "device": device(),
        "versions": {module.__name__: module.__version__ for module in map(import_module, ("torch", "transformers"))},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--impls", help="default: all that are installed")
    parser.add_argument("--compiled", action="store_true", help="under torch.compile")
    parser.add_argument("--steps", type=int, default=10, help="timed steps; default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this program, on a CPU too")
    parser.add_argument("--without", action="append", default=[], metavar="KIND", help="of replace")
    parser.add_argument("--also", action="append", default=[], metavar="KIND", help="of replace")
    parser.add_argument("--json", type=Path, metavar="FILE", help="adds the rows to this file")
    args = parser.parse_args(argv)
    args.models = args.models or [*MODELS]
    installed = [impl for impl in IMPLS if impl != "liger" or util.find_spec("liger_kernel")]
    args.impls = args.impls.split(",") if args.impls else installed
    for given, allowed in ((args.models, MODELS), (args.impls, IMPLS)):
        if unknown := [name for name in given if name not in allowed]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(allowed)}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if len(args.models) > 1:
        given = [word for word in (sys.argv[1:] if argv is None else argv) if word not in args.models]
        root = Path(__file__).parents[1]
        failed = [
            name
            for name in args.models
            if subprocess.run([sys.executable, "-m", "benchmarks.replaced", name, *given], cwd=root).returncode
        ]
        sys.exit(f"replaced: {', '.join(failed)} failed" if failed else 0)
    (name,) = args.models
    found = rows(name, args.impls, args.compiled, args.steps, args.tiny, tuple(args.without), tuple(args.also))
    if args.json:
        before = json.loads(args.json.read_text()) if args.json.exists() else []
        args.json.write_text("[\n" + ",\n".join(map(json.dumps, before + found)) + "\n]\n")


if __name__ == "__main__":
    main()
