"""benchmarks/models: GPT-2 has the same losses in every framework; what is reported of the rows."""

import json
from importlib import import_module

import pytest

from aotops.bench import report as bench_report
from aotops.bench.sources import of_kernel
from aotops.testing.frameworks import requested
from benchmarks.models import report
from benchmarks.models.spec import IMPLS, OPERATORS, Spec

LOSSES = [5.35485, 5.33801, 5.35546, 5.35077]
"""Losses of the first steps of the tiny model, in float32."""

TRIED = [
    (name, impl)
    for name in IMPLS
    if name in requested()
    for impl in IMPLS[name]
    if impl in ("torch", "jax", "aotops", "aotops.attention")  # MindSpore takes ten seconds to compile its own
]


@pytest.mark.parametrize(("name", "impl"), TRIED)
def test_losses_are_the_same_in_every_framework(name, impl):
    train = import_module(f"benchmarks.models.{name}_train")
    row = train.measure(Spec("gpt2", impl, "float32", timed=2, tiny=True, framework=name))
    assert row["losses"] == pytest.approx(LOSSES, abs=1e-4)
    assert row["loss"] == pytest.approx(5.352438, abs=1e-4)
    assert min(row[key] for key in ("ms", "wall_ms", "host_ms", "tokens_per_s")) > 0


@pytest.mark.skipif("torch" not in requested(), reason="torch is not under test")
@pytest.mark.parametrize("impl", ["torch", "aotops"])
def test_a_head_in_one_operator_has_the_same_losses(impl):
    row = import_module("benchmarks.models.torch_train").measure(
        Spec("gpt2_head", impl, "float32", timed=2, tiny=True, framework="torch")
    )
    assert row["losses"] == pytest.approx(LOSSES, abs=1e-4)


def row(impl, losses, framework="torch", **more):
    default = {"model": "gpt2", "precision": "bfloat16", "deterministic": False, "tiny": False}
    times = {"ms": 30.0, "tokens_per_s": 500_000, "peak_gib": 7.0, "loss": losses[-1]}
    return default | times | {"framework": framework, "impl": impl, "losses": losses} | more


KERNELS = {"classes_ms": {"products": 9.5}, "total_ms": 26}
ROWS = [
    row("aotops", [5.0, 3.0], "jax", ms=28.0),
    row(
        "aotops.compile", [5.0, 4.5], ms=27.0, same_bits=True, kernels={"classes_ms": {"products": 9.5}, "total_ms": 26}
    ),
    row("torch.compile", [5.0, 4.0], first_step_s=40.0),
    row("torch", [5.0, 4.0], losses_again=[5.0, 4.25], same_bits=False),
    row("torch", [5.5, 4.0], deterministic=True),
    row("mindspore", [5.0, 4.0], "mindspore", tiny=True, precision="float32", peak_gib=None),
    row("aotops", [5.0, 4.125], "mindspore", tiny=True, precision="float32", peak_gib=None),
]
RESULT = {"device": "a GPU", "date": "2026-11-22T00:00:00", "versions": {"aotops": "1"}, "rows": ROWS}


def test_spreads():
    found = [(row["framework"], row["impl"], row["tiny"], *of_row) for row, *of_row in report.spreads(ROWS)]
    assert found == [
        ("torch", "torch", False, None, 0.5),
        ("torch", "torch", False, None, 0.5),
        ("torch", "torch.compile", False, 0.0, 0.5),
        ("torch", "aotops.compile", False, 0.5, 0.5),
        ("jax", "aotops", False, 1.0, 0.5),
        ("mindspore", "mindspore", True, None, None),
        ("mindspore", "aotops", True, 0.125, None),
    ]


def test_report(tmp_path):
    file = tmp_path / report.RESULT
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(RESULT))
    (tmp_path / "docs").mkdir()
    for page in report.PAGES:
        (tmp_path / page).write_text((report.ROOT / page).read_text())
    report.main(["--root", str(tmp_path)])
    models, readme = ((tmp_path / page).read_text() for page in report.PAGES)
    assert "| GPT-2 124M | bfloat16 | torch | aotops.compile | 27.00 | 0.900 | 500,000 | 7.00 |  | 4.5000 |" in models
    assert "| GPT-2 124M | bfloat16 | torch | aotops.compile |  | 0.5000 | 0.5000 | yes |" in models
    assert "| GPT-2 124M | bfloat16 | aotops.compile | 9.50 | 26.00 |" in models
    assert "GPT-2 124M 27.0 ms (torch's operators: 30.0)" in readme
    assert (models, readme) == tuple(report.pages(tmp_path, RESULT).values())  # a second time changes nothing
    assert sorted(path.name for path in (tmp_path / report.PLOTS).iterdir()) == ["losses.png", "steps.png"]


def test_a_row_is_marked_if_a_kernel_has_changed():
    measured = {op: of_kernel(op) for op in OPERATORS["gpt2"]}
    new = row("aotops", [5.0, 3.0], ms=28.0, sources=measured)
    assert "\\*" not in report.steps(RESULT | {"rows": [new]})
    old = row("aotops.compile", [5.0, 3.0], ms=28.0, sources=measured | {"linear": "of the past"})
    text = report.steps(RESULT | {"rows": [new, old]})
    assert "| torch | aotops | 28.00 |" in text
    assert "| torch | aotops.compile \\* | 28.00 |" in text
    told = "Measured before the last change of the kernels of linear."
    assert text.endswith(f"\\* {told}")
    theirs = row("torch.compile", [5.0, 3.0], ms=30.0)
    assert told in " ".join(report.readme(RESULT | {"rows": [theirs, old]}).split())
    unnamed = row("aotops", [5.0, 3.0], ms=28.0, sources=measured | {"linear": "of the past"})
    of_now = row("aotops.compile", [5.0, 3.0], ms=28.0, sources=measured)
    assert "Measured before" not in report.readme(RESULT | {"rows": [theirs, unnamed, of_now]})


def test_pages_are_those_of_the_result():
    expected = report.pages(report.ROOT, report.load(report.ROOT))
    for page, text in expected.items():
        assert (report.ROOT / page).read_text() == text, f"{page}: run python -m benchmarks.models.report"


def test_plots_are_those_of_the_result():
    image = pytest.importorskip("PIL.Image")
    result = report.load(report.ROOT)
    digest = bench_report.digest(report.timed(result["rows"]))
    for name in ("steps", "losses"):
        found = image.open(report.ROOT / report.PLOTS / f"{name}.png").text.get("Record")
        assert found == digest, f"{name}.png: run python -m benchmarks.models.report"
