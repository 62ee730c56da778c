"""docs/adding_an_op.md adds an operator by new files and one command: here they are added to a copy of the tree, which
is built and tested, beside a product that is split, counted and fused as those of the tree are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"```(?:python|cpp)\n(?:#|//) (\S+)\n(.*?)```", re.S)
PAGE = dict(FILE.findall((ROOT / "docs" / "adding_an_op.md").read_text()))
PLACES = {
    "blend.py": "aotops/ops/blend.py",
    "blend.h": "cuda_src/operators/blend.h",
    "blend.cpp": "cuda_src/operators/blend.cpp",
    "row.py": "tests/cases/blend.py",
    "as_a_product.py": "tests/test_product.py",
}
PRODUCT = {place: (ROOT / "tests" / "product" / name).read_text() for name, place in PLACES.items()}
"""A third bilinear operator with a bias, and the test that no frontend need know it by name."""
NAMES = sorted({Path(path).stem for path in PAGE} | {"blend"})
WHOLE = ("test_core", "test_stubs", "test_sharding", "test_product")
"""All their tests are run; of the others those of the new operators."""
TABLES = (*WHOLE, "test_formulas", "test_errors")


def _copy(to: Path) -> None:
    """As a wheel lays it out, with the frontends and the table in the package."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for source, target in (("aotops", "aotops"), ("frontends", "aotops/frontends"), ("cuda_src", "cuda_src")):
        shutil.copytree(ROOT / source, to / target, ignore=ignored)
    shutil.copytree(ROOT / "tests", to / "tests", ignore=ignored)
    (to / "aotops/testing/cases").symlink_to(to / "tests/cases")
    (to / "frontends").symlink_to(to / "aotops/frontends")
    for name in ("benchmarks", "packaging"):
        shutil.copytree(ROOT / name, to / name, ignore=ignored)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy2(ROOT / name, to)
    # PYTHONPATH before whatever finds the checkout's own package
    (to / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path.sort(key=lambda finder: not isinstance(finder, type))\n"
    )


def _copy_objects(to: Path) -> None:
    """The CPU's objects of this checkout, as old as they are, so that make compiles what is new alone."""
    build = ROOT / "build"
    for file in (*build.glob("*.[od]"), *build.glob("[cho]*/**/*.[od]"), build / "flags"):
        if ".cu." not in file.name:
            (to / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, to / file.relative_to(ROOT))


def _run(command: list[str], where: Path) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTEST", "AOTOPS_LIB"))}
    path = os.pathsep.join(filter(None, [str(where), os.environ.get("PYTHONPATH")]))
    environment = inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def test_operators_are_added_by_their_files(tmp_path):
    if not (shutil.which("make") and shutil.which("g++")):
        pytest.skip("make or g++ is not installed")
    assert {Path(path).parent.name for path in PAGE} == {"ops", "operators", "cases"}
    _copy(tmp_path)
    _copy_objects(tmp_path)
    for path, text in (PAGE | PRODUCT).items():
        assert not (tmp_path / path).exists(), f"{path} is in the tree"
        (tmp_path / path).write_text(text)

    # one instruction set, and not the library of an author's package: a new operator changes neither
    built = _run(["make", "aotops/libaotops.so", "-j2", "NVCC=", "ISAS=baseline"], tmp_path)
    assert all(f"cuda_src/operators/{name}.cpp" in built for name in NAMES)
    stubs = _run([sys.executable, "-m", "aotops", "stubs", "aotops"], tmp_path)
    assert len(stubs.split()) == 5, stubs

    frontends = "numpy,torch" if find_spec("torch") else "numpy"
    checked = _run([sys.executable, "-m", "aotops", "check", *NAMES, "--quick", "--frameworks", frontends], tmp_path)
    assert all(f"{name} in {tmp_path}" in checked for name in NAMES)

    files = [*tmp_path.glob("tests/**/test_*.py")]
    chosen = [str(file) for file in files if file.stem in TABLES]
    assert len(chosen) == len(TABLES), chosen
    tests = f"({' or '.join([*WHOLE, *NAMES])}) and not type_checker"  # which expects the tree's layout
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=x.xml"]
    _run([*command, "-m", "not hypothesis", "-k", tests, *chosen], tmp_path)
    passed = Counter(
        case.get("classname").rpartition(".")[2]
        for case in ElementTree.parse(tmp_path / "x.xml").iter("testcase")
        if not len(case)
    )
    assert set(passed) == set(TABLES), passed
