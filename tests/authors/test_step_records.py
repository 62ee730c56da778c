"""benchmarks.replaced and benchmarks.optimizer: the committed records have the rows that the documents name."""

from __future__ import annotations

import json
from itertools import pairwise

from benchmarks import optimizer, replaced


def test_the_steps_of_each_replaced_model_stand_beside_those_of_transformers():
    record = json.loads(replaced.RESULTS.read_text())
    times = {(row["model"], row["impl"], row["mode"]): row["ms"] for row in record["rows"]}
    assert len(times) == len(record["rows"])
    models = {model for model, _, _ in times}
    assert {"llama", "qwen", "gpt2", "bert"} <= models <= set(replaced.MODELS)
    for model, impl, mode in times:
        assert impl in replaced.IMPLS
        assert mode in replaced.MODES
        assert times[model, "aotops", mode] < times[model, "transformers", mode]
    for row in record["rows"]:
        assert all(after <= before for before, after in pairwise(row["losses"])), row["model"]


def test_the_record_of_adamw_has_every_kind_of_state():
    record = json.loads(optimizer.RESULT.read_text())
    kinds = [(dtype, options) for dtype, options, _ in optimizer.KINDS]
    measured = {"us", "torch_fused_us", "of_copy"}
    found = [(row["dtype"], {k: v for k, v in row.items() if k not in {"dtype", *measured}}) for row in record["rows"]]
    assert found == kinds
    assert all(row["of_copy"] >= 0.9 for row in record["rows"])
