"""docs/compatibility.md: it is what was run, and what was run has what the package promises. What free-threaded builds
of CPython are given."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from aotops import call
from aotops.testing.frameworks import requested

pytestmark = pytest.mark.skipif("torch" not in requested(), reason="tested once, in torch's environment")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("compatibility", ROOT / "packaging/compatibility.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_document_is_of_the_results(tool):
    """`python packaging/compatibility.py write` writes it."""
    assert tool.DOCUMENT.read_text() == tool.document(tool.results())


def test_the_oldest_versions_that_are_promised_work(tool):
    extras = dict(re.findall(r'^(\w+) = \["\w+>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M))
    results = tool.results()
    for framework in ("torch", "jax", "mindspore"):
        cell = tool.Cell(framework, tool.VERSIONS[framework][0], tool.COMMON_PYTHON)
        found = results[cell]
        assert f"{found['versions'][framework]}.".startswith(f"{extras[framework]}."), cell
        # MindSpore 2.7 has no kernel on the CPU for zeros in bfloat16, which its own gradients need
        failed = [f for f in found["failed"] if framework != "mindspore" or not re.search("bfloat16 .*Zeros", f)]
        assert not failed, cell
        assert found["checks"] > 50, cell


def test_results_have_checks_and_dates(tool):
    for cell, found in tool.results().items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]), cell
        assert cell in set(tool.cells())
        if tool.state(found) == "works":
            assert found["checks"] > 50, cell


def test_states(tool):
    cell = tool.Cell("torch", "2.4", "3.11")
    found = {"date": "2026-11-22", "versions": {"torch": "2.4.1+cpu"}, "failed": []}
    for more, text in (
        ({}, "2.4.1: works, 2026-11-22"),
        ({"failed": ["gelu: wrong"], "checks": 55}, "2.4.1: 1 of 55 fail (1), 2026-11-22"),
        ({"versions": {}, "failed": ["exit status -11"]}, "fails (1), 2026-11-22"),
        ({"refused": "no GIL"}, "2.4.1: refuses (1), 2026-11-22"),
        ({"versions": {}, "reason": "pip finds no wheel of torch==2.4.*"}, "no wheel, 2026-11-22"),
    ):
        assert tool.entry(cell, found | more, {}) == text
    assert tool.entry(cell, None, {}) == "not run"
    text = tool.document({cell: found | {"failed": ["gelu: wrong"]}})
    assert "| 2.4.1: fails (1), 2026-11-22 |" in text
    assert "\n1. gelu: wrong\n" in text


@pytest.mark.parametrize(("has_gil", "expected"), [(True, "tensors"), (False, "addresses")])
def test_objects_are_not_read_in_c_without_the_gil(monkeypatch, has_gil, expected):
    monkeypatch.delenv("AOTOPS_CALL_PATH", raising=False)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: has_gil, raising=False)
    assert call.call_path.__wrapped__() == expected
