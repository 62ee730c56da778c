"""The checker finds faults: kernels that are each wrong in one way (faulty.cpp), and the smallest case of each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from aotops.elf import Elf
from aotops.testing import Case, Report, Row, check
from aotops.testing.audit import audited
from aotops.testing.checker import CHECKS
from aotops.testing.frameworks import requested
from aotops.testing.report import FAIL, UNAVAILABLE, Failure, Item
from aotops.testing.trial import ml_dtypes

HERE = Path(__file__).parent
PACKAGE = '''
from pathlib import Path

from aotops import Library, operator
from aotops.testing import Case, Row

FAULTS = """correct wrong_for_odd_sizes wrong_gradient last_unwritten writes_past_the_end reads_before_the_start
counts_calls shares_scratch swallows_nan writes_its_input wrong_if_misaligned""".split()


def square(x):
    return x * x


def _of(name):
    def gradient(dy, x):
        return (dy, x), ()

    def forward(x):
        return (x,), ()

    gradient.__name__, forward.__name__ = f"{name}_backward", name
    backward = operator(inputs=("dy", "x"), outputs=("dx",), same_spec_as={"dx": "x"})(gradient)
    return operator(inputs=("x",), outputs=("y",), same_spec_as={"y": "x"}, backward=backward)(forward)


library = Library("faulty", map(_of, FAULTS), Path(__file__).with_name("libfaulty.so"), cases="faulty")
SHAPES = (), (1,), (2, 0), (7,), (4, 6), (9, 13)
CASES = {name: Row(square, tuple(Case({"x": shape}) for shape in SHAPES)) for name in FAULTS}
'''


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A package whose kernels are compiled by g++."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty.py").write_text(PACKAGE)
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-z,defs"]
    subprocess.run(["g++", *flags, HERE / "faulty.cpp", "-o", folder / "libfaulty.so"], check=True)
    sys.path.insert(0, str(folder))
    yield import_module("faulty")
    sys.path.remove(str(folder))
    del sys.modules["faulty"]


def checked(faulty, name: str, **arguments) -> Report:
    return check(faulty.library.ops[name], frameworks=arguments.pop("frameworks", ["numpy"]), **arguments)


def test_a_built_in_operator_passes():
    """In every framework under test."""
    report = check("swiglu", frameworks=requested(), quick=True)
    assert report.ok, report.render()


def test_a_correct_operator_passes(faulty):
    """faulty.cpp has no InferShape, which MindSpore asks for."""
    frameworks = [name for name in requested() if name != "mindspore"]
    report = checked(faulty, "correct", frameworks=frameworks, quick=True)
    assert report.ok, report.render()
    assert report.exit_code == 0
    refused = {item.where: item.detail for item in report.items if item.check == "dtypes"}
    assert set(refused) == {"float16", "bfloat16"}
    assert "refused: faulty: x has another dtype" in refused["float16"]


FOUND = {
    # by operator: the check that finds it, the smallest case, and words of the message
    "wrong_for_odd_sizes": ("values", "x (5,)", "1 of 5 elements are wrong; at (4,)"),
    "wrong_gradient": ("gradients", "x ()", "dx along () is"),
    "last_unwritten": ("outputs written", "x (5,)", "last_unwritten does not write 1 of 5 elements of y"),
    "writes_past_the_end": ("bounds", "x (5,)", "writes_past_the_end writes past the end of y"),
    "reads_before_the_start": ("bounds", "x ()", "reads_before_the_start_backward reads before the start of x"),
    "counts_calls": ("same bits", "x ", "y of call 2 differs from that of call 1"),
    "shares_scratch": ("threads", "x ", "calls from 4 threads differ from the same call alone"),
    "swallows_nan": ("NaN and infinity", "x ", "= nan, y: 1 of"),
    "writes_its_input": ("inputs unchanged", "x ()", "writes_its_input writes to its input x"),
    "wrong_if_misaligned": ("layouts", "x ", "shifted: 1 of"),
}


def test_every_fault_is_looked_for(faulty):
    assert {"correct", *FOUND} == set(faulty.FAULTS)


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_is_found(faulty, name):
    expected, case, words = FOUND[name]
    report = checked(faulty, name)
    assert report.failures, report.render()
    first = report.failures[0]
    assert first.check == expected, report.render()
    assert first.failure.case.startswith(case), report.render()
    assert words in first.failure.message
    assert not report.ok
    if expected == "bounds":  # what follows might end this process
        assert (report.items[-1].check, report.items[-1].status) == ("other checks", UNAVAILABLE)


def test_the_line_reproduces_the_failure(faulty, python):
    report = checked(faulty, "wrong_for_odd_sizes", only=["values"], dtypes=["float64"], seed=3)
    failure = report.failures[0].failure
    assert failure.line == (
        "from faulty import library; from aotops.testing import Case, check; print(check(library.ops"
        "['wrong_for_odd_sizes'], cases=[Case({'x': (5,)})], dtypes=['float64'], only=['values'], "
        "frameworks=['numpy'], devices=['cpu'], seed=3).render())"
    )
    folders = [str(Path(faulty.__file__).parent), os.environ.get("PYTHONPATH", "")]
    said = python(failure.line, PYTHONPATH=os.pathsep.join(filter(None, folders)))
    assert failure.message in said
    assert {"at", "got", "expected", "allowed"} == set(failure.facts)


def test_a_reference_and_shapes_are_enough(faulty):
    op = faulty.library.ops["correct"]
    for cases in (None, [(3,), (4, 5)], [{"x": (3,)}], [Case({"x": (2, 3)})]):
        assert check(op, lambda x: x**2, cases=cases, frameworks=["numpy"], only=["values", "gradients"]).ok
    wrong = check(op, lambda x: x**3, cases=[(3,)], frameworks=["numpy"], only=["values"])
    assert wrong.failures[0].failure.case == "x ()"


@pytest.mark.skipif("torch" not in requested(), reason="torch is not under test")
def test_torchs_own_checks_find_a_wrong_gradient(faulty):
    report = checked(faulty, "wrong_gradient", frameworks=["torch"], only=["opcheck", "gradcheck"])
    assert [item.check for item in report.failures] == ["gradcheck"], report.render()
    assert "Jacobian mismatch" in report.failures[0].failure.message


@pytest.mark.parametrize("name", ["gelu", "cross_entropy"])
def test_built_in_operators_by_name(name):
    """cross_entropy has an input of integers."""
    report = check(name, frameworks=["numpy"], quick=True)
    assert report.ok, report.render()


# ----------------------------------------------------------------------------------------------------------- the report


def test_the_report_as_text_and_json(faulty, monkeypatch):
    report = checked(faulty, "wrong_gradient", only=["values", "gradients"])
    monkeypatch.setenv("COLUMNS", "1000")
    text = report.render(color=False)
    assert "\nvalues            numpy cpu  pass  6 cases in float32, float64\n" in text
    assert "gradients, numpy cpu: dx along () is" in text
    assert "\n  smallest case: x (), float32\n" in text
    assert "1 passed, 1 failed, 3 not available in " in text
    data = json.loads(report.to_json())
    assert (data["op"], data["ok"]) == ("wrong_gradient", False)
    *_, values, gradients = data["items"]
    assert (values["check"], values["status"]) == ("values", "pass")
    assert (gradients["check"], gradients["status"]) == ("gradients", "fail")
    assert gradients["failure"]["case"] == "x ()"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert report.render() == text
    assert "\x1b[" in report.render(color=True)


def test_a_report_fits_a_narrow_terminal(monkeypatch):
    items = [
        Item("values", "torch cpu", "pass", "22 cases in float16, bfloat16, float32, float64"),
        Item("shapes", "empty, torch cpu", "pass", "12 cases in float16, bfloat16, float32, float64"),
        Item("library", "versions", "pass", "it needs GLIBC 2.34, GLIBCXX 3.4.29, CXXABI 1.3.9 or later"),
        Item("devices", "cuda", UNAVAILABLE, "no framework that is tested has a cuda device here"),
    ]
    assert [*CHECKS] == [name for name in CHECKS if len(name) <= len("NaN and infinity")]
    monkeypatch.setenv("COLUMNS", "70")
    lines = Report("op", "lib.so", items, 1.0).render(color=False).splitlines()
    assert max(map(len, lines)) <= 70
    assert lines[1:3] == [
        "values            torch cpu         pass  22 cases in all dtypes",
        "shapes            empty, torch cpu  pass  12 cases in all dtypes",
    ]
    assert lines[4] == "    it needs GLIBC 2.34, GLIBCXX 3.4.29, CXXABI 1.3.9 or later"
    assert len(lines) == 8
    monkeypatch.delenv("COLUMNS")
    assert len(Report("op", "lib.so", items, 1.0).render(color=False).splitlines()) == 6


def test_a_report_of_nothing_is_not_ok():
    assert not Report("op", "file", []).ok
    assert not Report("op", "file", [Item("values", "", FAIL, failure=Failure(""))]).ok


def test_what_is_asked_for_and_absent_fails(faulty):
    absent = next(name for name in ("mindspore", "torch", "jax", "cupy") if not _installed(name))
    report = checked(faulty, "correct", frameworks=["numpy", absent], only=["values"])
    assert [item.failure.message for item in report.failures] == [f"{absent} is not installed"]
    refused = checked(faulty, "correct", dtypes=["float16", "float32"], only=["values"])
    assert "refused: faulty: x has another dtype" in refused.failures[0].failure.message
    no_entry = checked(faulty, "correct", devices=["cuda"], only=["values"])
    assert "has no cuda entry (aot_correct_cuda)" in no_entry.failures[0].failure.message


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def test_arguments_that_mean_nothing(faulty):
    op = faulty.library.ops["correct"]
    for argument in ("frameworks", "dtypes", "devices", "only"):
        with pytest.raises(ValueError, match=f"check: {argument} has 'other', expected some of"):
            check(op, **{argument: ["other"]})
    with pytest.raises(ValueError, match=r"correct: a case is \(\(3,\), \(3,\)\), expected shapes for x"):
        check(op, cases=[((3,), (3,))])


# ---------------------------------------------------------------------------------------------------------- the library


def audit_of(folder, source: str, *flags: str) -> dict[str, Item]:
    (folder / "a.cpp").write_text(source)
    subprocess.run(["g++", "-shared", "-fPIC", *flags, folder / "a.cpp", "-o", folder / "a.so"], check=True)
    return {item.where: item for item in audited(folder / "a.so")}


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
def test_the_audit_of_a_library(tmp_path):
    source = """
#include <cmath>
extern "C" { double elsewhere(double); void *PyList_New(long); double f(double x) { return elsewhere(std::exp(x)); }
void *g() { return PyList_New(0); } }
"""
    bad = audit_of(tmp_path, source, "-Wl,-rpath,/opt/mine:$ORIGIN", "-Wl,-z,execstack")
    undefined = ", ".join(s.name for s in Elf(tmp_path / "a.so").symbols if s.name in ("elsewhere", "PyList_New"))
    failed = {where: item.failure.message for where, item in bad.items() if item.status == FAIL}
    assert failed == {
        "frameworks": "it needs PyList_New of a framework or Python",
        "symbols": f"no library that it needs defines {undefined}: link with -z defs, which tells",
        "search path": "RPATH or RUNPATH has /opt/mine, expected none, or $ORIGIN: no other machine has it",
        "stack": "the stack would be executable: link with -z noexecstack",
    }
    good = audit_of(tmp_path, '#include <cmath>\nextern "C" double f(double x) { return std::exp(x); }')
    assert not [item for item in good.values() if item.status == FAIL]
    assert "GLIBC 2." in good["versions"].detail
    (tmp_path / "text.so").write_text("no library")
    assert [item.failure.message for item in audited(tmp_path / "text.so")] == [
        f"{tmp_path / 'text.so'} is not a 64-bit little-endian ELF file"
    ]


def test_the_built_in_library_passes_its_audit():
    from aotops import library

    assert [item for item in audited(library.path()) if item.status == FAIL] == []


def test_a_row_needs_a_reference_alone():
    assert Row(abs).cases == ()
    assert repr(Case({"x": (3,)}, {"eps": 0.1}, mean=2.0)) == "Case({'x': (3,)}, {'eps': 0.1}, mean=2.0)"


# ------------------------------------------------------------------------------------------------------------- the page


@pytest.mark.skipif(ml_dtypes is None, reason="the page shows bfloat16, which NumPy has by ml_dtypes")
def test_the_programs_of_the_page_print_what_is_shown(capsys):
    page = (HERE.parent / "docs" / "checking.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(programs) == 2
    names: dict = {}
    for program in programs:
        exec(program, names)
    (shown,) = re.findall(r"```\n(swiglu in .*?)```", page, re.S)
    printed = capsys.readouterr().out
    for text in (names["report"].library, "aotops/libaotops.so"):
        printed = printed.replace(text, "FILE")
    assert _settled(printed) == _settled(shown.replace("aotops/libaotops.so", "FILE"))


def _settled(text: str) -> str:
    """Without what depends on the machine: versions and seconds."""
    return re.sub(r"(it needs GLIBC).*|( in )[\d.]+ s", r"\1\2", text).strip()
