"""aotops new: the package of each template builds, has the values of its reference, and gradients, as it is."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from aotops import new
from aotops.build import build
from aotops.ops import OPS
from aotops.testing import check
from aotops.testing.frameworks import requested

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"```(?:python|cpp)\n(?:#|//) (\S+)\n(.*?)```", re.S)
SMALL = 100
"""Elements of the inputs whose gradients are tried."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(scope="module", params=[each for each in new.TEMPLATES if each != "triton"])  # test_triton.py
def package(request, tmp_path_factory):
    """The library and the row of an operator tried_<template>, built for one instruction set, without nvcc."""
    name = f"tried_{request.param}"
    folder = tmp_path_factory.mktemp(name)
    new.create(name, request.param, folder)
    table = folder / "pyproject.toml"
    table.write_text(
        table.read_text().replace("[tool.aotops]\n", '[tool.aotops]\nisas = ["baseline"]\nflags = ["-O1"]\n')
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aotops.toolchain.nvcc", lambda: None)
        build(folder)
        patch.syspath_prepend(str(folder))
        yield SimpleNamespace(
            op=importlib.import_module(name).library.ops[name],
            row=importlib.import_module(f"{name}.cases").CASES[name],
            frontend=lambda framework: importlib.import_module(f"{name}.frontends.{framework}"),
        )


@pytest.mark.parametrize("place", ["file", "link", "file/below"])
def test_a_place_that_cannot_be_a_folder(tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match=rf"new: .*{place.partition('/')[0]}.* cannot be written to: "):
        new.create("somewhere", directory=tmp_path / place)


def _inputs(package):
    random = np.random.default_rng(5)
    return [(case, case.random(random)) for case in package.row.cases]


def test_values_are_those_of_the_reference(package):
    function = getattr(package.frontend("numpy"), package.op.name)
    for case, arrays in _inputs(package):
        got = function(*(x.astype("float32") for x in arrays.values()), **case.attrs)
        (expected,) = package.row.results(arrays, case.attrs, "float32")
        assert got.dtype == "float32"
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * max(1, np.abs(expected).max(initial=0)))


def test_gradients_are_those_of_the_formula(package):
    if "torch" not in requested():
        pytest.skip("torch is not under test")
    torch = pytest.importorskip("torch")
    function = getattr(package.frontend("torch"), package.op.name)
    tried = 0
    for case, arrays in _inputs(package):
        if all(0 < x.size <= SMALL for x in arrays.values()):
            tensors = [torch.tensor(x, requires_grad=True) for x in arrays.values()]
            assert torch.autograd.gradcheck(lambda *x, case=case: function(*x, **case.attrs), tensors)
            tried += 1
    assert tried > 2


def test_every_check_passes(package):
    """As it is written, in every framework under test: what --quick leaves out too."""
    report = check(package.op, frameworks=requested())
    assert report.ok, report.render()


def test_what_is_refused_is_told(package):
    function = getattr(package.frontend("numpy"), package.op.name)
    for bad in package.row.bad:
        arrays = [np.zeros(*x) if isinstance(x, tuple) else x for x in bad.arrays.values()]
        with pytest.raises(bad.error) as raised:
            function(*arrays, **bad.attrs)
        assert all(word in str(raised.value) for word in (package.op.name, *bad.words)), raised.value


def test_another_dtype_has_entries(package):
    function = getattr(package.frontend("numpy"), package.op.name)
    case, arrays = _inputs(package)[0]
    for dtype in ("float16", "float64"):
        got = function(*(x.astype(dtype) for x in arrays.values()), **case.attrs)
        (expected,) = package.row.results(
            {k: x.astype(dtype).astype("float64") for k, x in arrays.items()}, case.attrs, dtype
        )
        np.testing.assert_allclose(got, expected, rtol=2e-3 if dtype == "float16" else 1e-12)


PACKAGE = """
from pathlib import Path

import numpy as np

from aotops import Library, operator
from aotops.testing import Case, Row


@operator(inputs=("dy", "x"), outputs=("dx",), same_spec_as={"dx": "x"})
def largest_backward(dy, x):
    return (dy, x), ()


rows = dict.fromkeys(("y", "place", "positive"), lambda call: call.x[:1])


@operator(inputs=("x",), outputs=("y", "place", "positive"), shapes=rows, backward=largest_backward)
def largest(x):
    return (x,), ()


def reference(x):
    if x.ndim != 2:
        raise ValueError
    return x.max(1), x.argmax(1), x.max(1) > 0


library = Library("integers", [largest], Path(__file__).with_name("libintegers.so"), cases="integers")
CASES = {"largest": Row(reference, (Case({"x": (4, 6)}), Case({"x": (3, 1)}), Case({"x": (0, 2)})))}
"""


def test_an_operator_of_aot_h_may_have_outputs_of_integers_and_bools(tmp_path, monkeypatch):
    """In every framework under test, with its gradient. Its kernel refuses the dtypes of 16 bits."""
    (tmp_path / "integers.py").write_text(PACKAGE)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "integers"\n[tool.aotops]\nlibrary = "libintegers.so"\nsources = ["*.cpp"]\n'
        'isas = ["baseline"]\nflags = ["-O1"]\n'
    )
    shutil.copy(ROOT / "tests" / "programs" / "largest.cpp", tmp_path)
    build(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    report = check(importlib.import_module("integers").library.ops["largest"], frameworks=requested())
    assert report.ok, report.render()
    refused = {item.where: item.detail for item in report.items if item.check == "dtypes"}
    assert "largest: x has dtype float16, expected float32 or float64" in refused["float16"]
    tried = {item.where for item in report.items if item.check == "gradients"}
    assert len(tried) >= len(requested())


def test_in_a_checkout_it_is_the_operator_of_the_documentation(tmp_path):
    for mark in ("cuda_src/aot.h", "aotops/ops/__init__.py", "tests/cases/__init__.py"):
        (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / mark).touch()
    written = new.create("scale", "elementwise", tmp_path / "scale")
    documented = dict(FILE.findall((ROOT / "docs" / "adding_an_op.md").read_text()))
    assert {str(file.relative_to(tmp_path)) for file in written} == set(documented)
    for path, text in documented.items():
        text = text.replace("\nfrom ._row import", "from aotops.testing import")
        assert (tmp_path / path).read_text() == text, path


def test_names_are_replaced_everywhere(tmp_path):
    old = re.compile(r"(?<![a-z])(scale|normalize|sum_?squares|multiply|swish)(?![a-z=])", re.I)
    for template in new.TEMPLATES:
        for file in new.create("renamed", template, tmp_path / template):
            left = old.findall(f"{file.relative_to(tmp_path / template)} {file.read_text()}")
            assert not left, (file, left)


@pytest.mark.parametrize("name", ["", "2x", "Scale", "a-b", "class", "x_backward", "torch", "aotops", "a__b", *OPS])
def test_a_name_that_is_taken_or_no_modules_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=re.escape(f"new: name is {name!r}")):
        new.create(name, "row", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_no_file_is_overwritten(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ValueError, match=r"README\.md exists"):
        new.create("mine", "row", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_another_template_is_refused(tmp_path):
    with pytest.raises(ValueError, match="template is 'matrix', expected elementwise, row, reduction, product, triton"):
        new.create("mine", "matrix", tmp_path)
