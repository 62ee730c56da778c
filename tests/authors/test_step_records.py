"""benchmarks.replaced, optimizer and long_runs: the committed records have the rows that the documents name."""

from __future__ import annotations

import json
from itertools import pairwise

from benchmarks import long_runs, optimizer, replaced


def test_the_steps_of_each_replaced_model_stand_beside_those_of_transformers():
    record = json.loads(replaced.RESULTS.read_text())
    times = {(row["model"], row["impl"], row["mode"]): row["ms"] for row in record["rows"]}
    assert len(times) == len(record["rows"])
    models = {model for model, _, _ in times}
    assert {"llama", "qwen", "gpt2", "bert"} <= models <= set(replaced.MODELS)
    for model, impl, mode in times:
        assert impl in replaced.IMPLS
        assert mode in replaced.MODES
        assert (model, "transformers", mode) in times
        assert mode == "compiled" or times[model, "aotops", mode] < times[model, "transformers", mode]
    for row in record["rows"]:
        assert all(after <= before for before, after in pairwise(row["losses"])), row["model"]


def test_the_page_has_the_table_of_the_record():
    text = replaced.PAGE.read_text()
    assert replaced.page(text, json.loads(replaced.RESULTS.read_text())) == text


def test_the_record_of_adamw_has_every_kind_of_state():
    record = json.loads(optimizer.RESULT.read_text())
    kinds = [(dtype, options) for dtype, options, _ in optimizer.KINDS]
    measured = {"us", "torch_fused_us", "of_copy"}
    found = [(row["dtype"], {k: v for k, v in row.items() if k not in {"dtype", *measured}}) for row in record["rows"]]
    assert found == kinds
    assert all(row["of_copy"] >= 0.9 for row in record["rows"])


def test_the_record_of_long_runs():
    """All that were repeated had the first's bits, and ours ends at torch.compile's loss. What rounding makes of a
    curve in between is not known: no two runs of torch are recorded."""
    record = json.loads(long_runs.RESULT.read_text())
    calls = [(call.operator, how) for call in long_runs.CALLS for how in ("graph", "stream")]
    assert [(row["operator"], row["how"]) for row in record["bits"]] == calls
    assert all(row["repeats"] >= 10_000 and row["wrong"] == 0 for row in record["bits"])
    assert [row["impl"] for row in record["training"]] == list(long_runs.IMPLS)
    assert all(row["finite"] and row["steps"] >= 1000 for row in record["training"])
    assert all(row["curve"][-1] < row["curve"][0] - 1 for row in record["training"])
    assert record["apart"] == long_runs.apart(record["training"])
    theirs, ours = (row["curve"][-1] for row in record["training"])
    assert abs(ours - theirs) <= 0.05
