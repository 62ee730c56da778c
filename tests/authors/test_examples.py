"""The measuring scripts of examples/: they run on the CPU, and the documents have the tables of the recorded figures.

Each script checks the results of what it times, and fails if one is wrong.
"""

import json
import runpy
from importlib import import_module
from pathlib import Path

import pytest

from aotops.testing.frameworks import requested

ROOT = Path(__file__).parents[2]
RECORDED = [
    ("lltm", "tutorial_lltm", "tutorial_tables"),
    ("lltm", "tutorial_lltm_large", "tutorial_tables"),
    ("loops", "tutorial_loops", "tutorial_tables"),
    ("custom_model", "tutorial_custom_model", "tutorial_tables"),
    ("optimization_study", "tutorial_access", "tutorial_tables"),
    ("optimization_study", "tutorial_matmul", "tutorial_tables"),
    ("optimization_study", "optimization_study", "optimization_study"),
]
MEASURED = {
    "loops": ([], {"Python", "C++", "CPU"}),
    "custom_model": (["--batch", "8", "--features", "16"], {"torch", "aotops"}),
    "lltm": (["--implementations", "Python,aotops"], {"Python", "aotops"}),
}

pytestmark = pytest.mark.skipif("torch" not in requested(), reason="torch, which the scripts use, is not under test")


@pytest.fixture(autouse=True)
def _as_scripts(monkeypatch):
    """A script finds the modules beside it."""
    monkeypatch.syspath_prepend(ROOT / "examples")


@pytest.mark.parametrize(("script", "results", "document"), RECORDED, ids=[results for _, results, _ in RECORDED])
def test_a_document_has_the_tables_of_the_recorded_figures(script, results, document):
    result = json.loads((ROOT / "benchmarks" / "results" / f"{results}.json").read_text())
    text = (ROOT / "docs" / f"{document}.md").read_text()
    written = import_module(script).texts(result)
    assert len(written) >= 2
    for name, table in written.items():
        assert f"<!-- figures {name} -->\n{table}\n<!-- end -->" in text, f"run {script}.py with --from and --markdown"


@pytest.mark.parametrize("script", MEASURED)
def test_a_script_measures_every_implementation_on_the_cpu(script, tmp_path, monkeypatch):
    options, implementations = MEASURED[script]
    figures, path = tmp_path / "figures.json", ROOT / "examples" / f"{script}.py"
    monkeypatch.setattr("sys.argv", [str(path), "--quick", "--devices", "cpu", *options, "--json", str(figures)])
    runpy.run_path(str(path), run_name="__main__")
    result = json.loads(figures.read_text())
    assert {row["impl"] for row in result["rows"]} == implementations
    assert all(value > 0 for row in result["rows"] for key, value in row.items() if key.endswith("us"))
    assert set(result) >= {"device", "date", "command", "versions"}


def test_a_table_replaces_what_is_between_its_markers_alone(tmp_path):
    document = tmp_path / "document.md"
    document.write_text("a\n<!-- figures x -->\nold\n<!-- end -->\nb\n<!-- figures y -->\nother\n<!-- end -->\n")
    fill_in = import_module("tables").fill_in
    fill_in(document, "x", "new")
    assert document.read_text() == (
        "a\n<!-- figures x -->\nnew\n<!-- end -->\nb\n<!-- figures y -->\nother\n<!-- end -->\n"
    )
    with pytest.raises(SystemExit, match="0 places are marked <!-- figures z -->, expected 1"):
        fill_in(document, "z", "new")
