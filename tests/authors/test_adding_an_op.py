"""docs/adding_an_op.md adds an operator by new files alone: here they are added to a copy of the tree, which is built
and tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
from adding_an_op import FILES, NAME, ROOT

WHOLE = ("core.test_core", "authors.test_stubs")
"""All their tests are run; of the others those of the new operator."""
CORE = ("core.test_core", "core.test_frontends", "core.test_errors", "core.test_formulas")
TORCH = (
    "authors.test_bench", "torch.test_operators", "torch.test_calls", "torch.test_differential", "torch.test_contexts",
)  # fmt: skip


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


def _copy_objects(to: Path) -> str:
    """The CPU's objects of this checkout, as old as they are, so that make compiles what is new alone. Returns the
    instruction sets that they are for."""
    build = ROOT / "build"
    for file in (*build.glob("*.[od]"), *build.glob("[cho]*/**/*.[od]"), build / "flags"):
        if ".cu." not in file.name:
            (to / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, to / file.relative_to(ROOT))
    isas = [isa for isa in ("baseline", "avx2", "avx512") if (build / "operators" / f"gelu.{isa}.o").exists()]
    return " ".join(isas) or "baseline"


def _run(command: list[str], where: Path) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTEST", "AOTOPS_LIB"))}
    path = os.pathsep.join(filter(None, [str(where), os.environ.get("PYTHONPATH")]))
    environment = inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def test_an_operator_is_added_by_its_files(tmp_path):
    if not (shutil.which("make") and shutil.which("g++")):
        pytest.skip("make or g++ is not installed")
    assert {Path(path).parent.name for path in FILES} == {"ops", "operators", "cases"}
    _copy(tmp_path)
    isas = _copy_objects(tmp_path)
    for path, text in FILES.items():
        assert not (tmp_path / path).exists(), f"{path} is in the tree"
        (tmp_path / path).write_text(text)

    built = _run(["make", "lib", "JOBS=2", "NVCC=", f"ISAS={isas}"], tmp_path)
    assert f"cuda_src/operators/{NAME}.cpp" in built
    stubs = list((tmp_path / "aotops/frontends").rglob("*.pyi"))
    assert len(stubs) == 5
    assert all(f"def {NAME}(" in stub.read_text() for stub in stubs)

    with_torch = "torch" in os.environ.get("AOTOPS_TEST_FRONTENDS", "torch") and find_spec("torch")
    modules = [*CORE, *(TORCH if with_torch else ())]
    files = [f"tests/{module.replace('.', '/')}.py" for module in dict.fromkeys([*WHOLE, *modules])]
    whole = [module.rpartition(".")[2] for module in WHOLE]
    chosen = f"({' or '.join([*whole, NAME])}) and not type_checker"  # which expects the tree's layout
    _run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=x.xml", "-k", chosen, *files],
        tmp_path,
    )
    passed = Counter()
    for case in ElementTree.parse(tmp_path / "x.xml").iter("testcase"):
        if not len(case) and (NAME in case.get("name") or case.get("classname").endswith(WHOLE)):
            passed[case.get("classname").removeprefix("tests.")] += 1
    assert set(passed) == {*WHOLE, *modules}, passed
