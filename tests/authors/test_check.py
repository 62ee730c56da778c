"""The checker finds faults: kernels that are each wrong in one way (faulty.cpp), and the smallest case of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from aotops.elf import Elf
from aotops.testing import Case, Report, Row, check
from aotops.testing.audit import audited
from aotops.testing.checker import CHECKS
from aotops.testing.frameworks import requested
from aotops.testing.report import FAIL, PASS, UNAVAILABLE, Failure, Item
from aotops.testing.subject import importable

PROGRAMS = Path(__file__).parents[1] / "programs"
PACKAGE = '''
from pathlib import Path

from aotops import Library, TensorSpec, load, operator
from aotops.testing import Case, Row

FAULTS = """correct wrong_for_odd_sizes wrong_gradient last_unwritten writes_past_the_end reads_before_the_start
counts_calls shares_scratch swallows_nan writes_its_input wrong_if_misaligned swallows_nan_of_its_gradient
swallows_nan_in_its_gradient shares_a_number shares_an_array locks_an_array wrong_if_output_misaligned
wrong_if_gradient_misaligned restores_its_input leaks counts_in_ints wrong_for_four_axes wrong_formula""".split()


def square(x):
    return x * x


def _not_square(m, x):
    return m.wide(x) * 3


def _of(name):
    def gradient(dy, x):
        return (dy, x), ()

    def forward(x):
        return (x,), ()

    gradient.__name__, forward.__name__ = f"{name}_backward", name
    backward = operator(inputs=("dy", "x"), outputs=("dx",), same_spec_as={"dx": "x"})(gradient)
    formula = _not_square if name == "wrong_formula" else None
    spec = {"inputs": ("x",), "outputs": ("y",), "same_spec_as": {"y": "x"}}
    return operator(backward=backward, formula=formula, **spec)(forward)


def _refuses():
    def refuses(x):
        return (x,), ()

    return operator(inputs=("x",), outputs=("y",), same_spec_as={"y": "x"})(refuses)


FILE = Path(__file__).with_name("libfaulty.so")
library = Library("faulty", [*map(_of, FAULTS), _refuses()], FILE, cases="faulty")
loaded = load(FILE, name="loaded")
SHAPES = (), (1,), (2, 0), (7,), (4, 6), (9, 13)
CASES = {name: Row(square, tuple(Case({"x": shape}) for shape in SHAPES)) for name in (*FAULTS, "refuses")}


def hosted(name):
    """The kernels as operators that aotops hosts: it knows nothing of what they accept."""
    if f"its_{name}" not in loaded.ops:
        gradient = {"inputs": ("dy", "x"), "outputs": ("dx",), "same_spec_as": {"dx": "x"}}
        backward = loaded.op(f"its_{name}_backward", cpu=f"aot_{name}_backward_cpu", workspace=False, **gradient)
        slots = {"inputs": ("x",), "outputs": ("y",), "same_spec_as": {"y": "x"}}
        loaded.op(f"its_{name}", cpu=f"aot_{name}_cpu", workspace=False, backward=backward, **slots)
    return loaded.ops[f"its_{name}"]


def with_bools():
    """squares_and_signs and its gradient."""
    gradient = {"inputs": ("dy", "x"), "outputs": ("dx",), "same_spec_as": {"dx": "x"}}
    backward = loaded.op("signs_backward", cpu="aot_correct_backward_cpu", workspace=False, **gradient)
    return loaded.op(
        "squares_and_signs", inputs=("x",), outputs=("y", "positive"), cpu="squares_and_signs", workspace=False,
        infer=lambda x: (x, TensorSpec(x.shape, "bool")), backward=backward,
    )


def take():
    return loaded.op(
        "take", inputs=("table", "index"), outputs=("y",), cpu="take", workspace=False,
        infer=lambda table, index: TensorSpec(index.shape, table.dtype),
    )
'''


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A package whose kernels are compiled by g++."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty.py").write_text(PACKAGE)
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-z,defs"]
    subprocess.run(["g++", *flags, PROGRAMS / "faulty.cpp", "-o", folder / "libfaulty.so"], check=True)
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
    "shares_scratch": ("threads", "x ", "y of a call that another interrupts differs from the same call alone"),
    "swallows_nan": ("NaN and infinity", "x ", "= nan, y: 1 of"),
    "writes_its_input": ("inputs unchanged", "x ()", "writes_its_input writes to its input x"),
    "wrong_if_misaligned": ("alignment", "x ()", "y with x 4 bytes past a multiple of 64"),
    "swallows_nan_of_its_gradient": ("NaN and infinity", "x ()", "with dy[] = nan, dx is"),
    "swallows_nan_in_its_gradient": ("NaN and infinity", "x ()", "with x[] = nan, dx is"),
    "shares_a_number": ("threads", "x ()", "y of a call that another interrupts differs"),
    "shares_an_array": ("threads", "x ()", "dx of a call that another interrupts differs"),
    "wrong_if_output_misaligned": ("alignment", "x ()", "y with y 4 bytes past a multiple of 64"),
    "wrong_if_gradient_misaligned": ("alignment", "x ()", "dx with dx 8 bytes past a multiple of 64"),
    "restores_its_input": ("inputs unchanged", "x ()", "restores_its_input writes to its input x"),
    "leaks": ("leaks", "x ()", "leaks keeps 32 bytes of memory in each call"),
    "counts_in_ints": ("shapes", "x ", "with 2**31 elements, the first rows of y are not those of a small call"),
    "wrong_for_four_axes": ("shapes", "x (1, 1, 1, 1)", "1 of 1 elements are wrong"),
}
RIGHT = {"correct", "locks_an_array", "wrong_formula"}
"""The kernels that have no fault."""


def test_every_fault_is_looked_for(faulty):
    assert {*RIGHT, *FOUND} == set(faulty.FAULTS)


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_is_found(faulty, name):
    expected, case, words = FOUND[name]
    only = {"only": ["shapes"], "huge": True} if name == "counts_in_ints" else {}
    report = checked(faulty, name, quick=True, **only)
    assert report.failures, report.render()
    first = report.failures[0]
    assert first.check == expected, report.render()
    assert first.failure.case.startswith(case), report.render()
    assert words in first.failure.message
    assert not report.ok
    if expected == "bounds":  # what follows might end this process
        assert (report.items[-1].check, report.items[-1].status) == ("other checks", UNAVAILABLE)


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_of_a_hosted_operator_is_found(faulty, name):
    """With a reference and one case: the others are derived from it."""
    check_name, *_ = FOUND[name]
    report = check(
        faulty.hosted(name), faulty.square, cases=[(9, 13)], frameworks=["numpy"], only=[check_name], quick=True,
        dtypes=["float32"], huge=name == "counts_in_ints",
    )  # fmt: skip
    assert [item.check for item in report.failures][:1] == [check_name], report.render()


@pytest.mark.parametrize("name", sorted(RIGHT - {"wrong_formula"}))
def test_a_hosted_kernel_without_a_fault_passes(faulty, monkeypatch, name):
    """Copies of 2**24 elements stand for those of 2**31, which take a minute."""
    monkeypatch.setattr("aotops.testing.inputs.MOST", 1 << 24)
    report = check(faulty.hosted(name), faulty.square, cases=[(4, 6)], frameworks=["numpy"], huge=True)
    assert report.ok, report.render()
    states = {(item.check, item.where): item for item in report.items}
    for dtype in ("float16", "bfloat16"):
        assert states["dtypes", dtype].status == UNAVAILABLE
        assert "refused: faulty: no kernel for this dtype" in states["dtypes", dtype].detail
    for kind in ("empty, numpy cpu", "0-dim, numpy cpu", "4-d, numpy cpu", "huge, numpy cpu", "2**31 elements, cpu"):
        assert states["shapes", kind].status == PASS, kind


def test_an_operator_that_refuses_every_dtype_fails(faulty):
    slots = {"inputs": ("x",), "outputs": ("y",), "same_spec_as": {"y": "x"}}
    hosted = faulty.loaded.op("refuses_too", cpu="aot_refuses_cpu", workspace=False, **slots)
    for op in (faulty.library.ops["refuses"], hosted):
        report = check(op, faulty.square, frameworks=["numpy"], quick=True)
        assert [item.failure.message for item in report.failures] == [f"{op.name} refuses every dtype that is tried"]
        refused = {item.where: item.detail for item in report.items if item.check == "dtypes"}
        assert "refused: faulty: this kernel takes nothing" in refused["float32"]


def test_outputs_that_are_not_floating_are_compared_and_have_no_gradient(faulty):
    """In every framework under test, and with every check."""

    def squares_and_signs(x):
        return x * x, x > 0

    frameworks = [name for name in requested() if name != "mindspore"]  # which asks for an InferShape
    op = faulty.with_bools()
    report = check(op, squares_and_signs, cases=[(4, 6), (7,)], frameworks=frameworks, dtypes=["float32"])
    assert report.ok, report.render()
    assert "gradients" in {item.check for item in report.items}
    wrong = check(op, lambda x: (x * x, x >= -0.5), cases=[(4, 6)], frameworks=frameworks, only=["values"], quick=True)
    assert len(wrong.failures) == len(frameworks)
    assert "False, expected True" in wrong.failures[0].failure.message


def test_derived_cases_keep_indices_in_range(faulty):
    """The reference takes any index, and another element than the kernel where one is out of range."""

    def take(table, index):
        return table[np.minimum(index, len(table) - 1)] if len(table) else np.zeros(index.shape)

    cases = [Case({"table": (5,), "index": (12,)}, classes={"index": 5})]
    report = check(faulty.take(), take, cases=cases, frameworks=["numpy"], only=["shapes"], dtypes=["float32"])
    assert report.ok, report.render()
    tried = {item.where: item for item in report.items if item.check == "shapes"}
    assert tried["odd, numpy cpu"].detail.startswith("9 cases")


def test_no_warning_of_a_module_that_is_looked_through(faulty):
    if "torch" not in requested():
        pytest.skip("torch is not under test")
    import_module("torch.distributed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importable(faulty.hosted("correct"))[1] == "loaded.ops['its_correct']"


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
    said = "the gradient, wrong_gradient_backward, does not agree with finite differences of the kernel"
    assert said in report.failures[0].failure.message


@pytest.mark.skipif("torch" not in requested(), reason="torch is not under test")
def test_gradcheck_names_the_formula_that_is_wrong(faulty):
    report = checked(faulty, "wrong_formula", frameworks=["torch"], only=["gradcheck"])
    message = report.failures[0].failure.message
    assert "wrong_formula: the kernel and the formula of wrong_formula, _not_square (" in message
    assert "faulty.py:" in message
    assert "the kernel's gradient agrees with finite differences of the kernel, the formula's" in message


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
        f"{tmp_path / 'text.so'} does not load: file too short: it has 10 bytes"
    ]


def test_the_built_in_library_passes_its_audit():
    from aotops import library

    assert [item for item in audited(library.path()) if item.status == FAIL] == []


def test_a_row_needs_a_reference_alone():
    assert Row(abs).cases == ()
    assert repr(Case({"x": (3,)}, {"eps": 0.1}, mean=2.0)) == "Case({'x': (3,)}, {'eps': 0.1}, mean=2.0)"
