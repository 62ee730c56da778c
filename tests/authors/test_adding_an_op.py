"""docs/adding_an_op.md adds an operator by new files alone: here they are added to a copy of the tree, which
is built and tested, beside a product that is split, counted and fused as those of the tree are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
from adding_an_op import FILES, ROOT

PLACES = {
    "blend.py": "aotops/ops/blend.py",
    "blend.h": "cuda_src/operators/blend.h",
    "blend.cpp": "cuda_src/operators/blend.cpp",
    "row.py": "tests/cases/blend.py",
    "as_a_product.py": "tests/core/test_product.py",
}
PRODUCT = {place: (ROOT / "tests/programs/product" / name).read_text() for name, place in PLACES.items()}
"""A third bilinear operator with a bias, and the test that no frontend need know it by name."""
NAMES = sorted({Path(path).stem for path in FILES} | {"blend"})
WHOLE = ("core/test_core", "authors/test_stubs", "core/test_sharding", "core/test_product")
"""All their tests are run; of the others those of the new operators."""
TABLES = (*WHOLE, "core/test_formulas", "core/test_errors")


def _copy(to: Path) -> None:
    """As a wheel lays it out, with the frontends and the table in the package."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.pyi")
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
    assert {Path(path).parent.name for path in FILES} == {"ops", "operators", "cases"}
    _copy(tmp_path)
    _copy_objects(tmp_path)
    for path, text in (FILES | PRODUCT).items():
        assert not (tmp_path / path).exists(), f"{path} is in the tree"
        (tmp_path / path).write_text(text)

    # one instruction set, and not the library of an author's package: a new operator changes neither
    built = _run(["make", "aotops/libaotops.so", "frontends/numpy.pyi", "-j2", "NVCC=", "ISAS=baseline"], tmp_path)
    assert all(f"operators/{name}.baseline.o" in built for name in NAMES)
    stubs = list((tmp_path / "aotops/frontends").rglob("*.pyi"))
    assert len(stubs) == 5
    assert all(f"def {name}(" in stub.read_text() for stub in stubs for name in NAMES)

    frontends = "numpy,torch" if find_spec("torch") else "numpy"
    checked = _run([sys.executable, "-m", "aotops", "check", *NAMES, "--quick", "--frameworks", frontends], tmp_path)
    assert all(f"{name} in {tmp_path}" in checked for name in NAMES)

    names = [path.rpartition("/")[2] for path in WHOLE]
    tests = f"({' or '.join([*names, *NAMES])}) and not type_checker"  # which expects the tree's layout
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=x.xml"]
    _run([*command, "-m", "not hypothesis", "-k", tests, *(f"tests/{path}.py" for path in TABLES)], tmp_path)
    passed = {
        "/".join(case.get("classname").split(".")[-2:])
        for case in ElementTree.parse(tmp_path / "x.xml").iter("testcase")
        if not len(case)
    }
    assert passed == set(TABLES), passed
