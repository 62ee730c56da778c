"""What pip builds of the tree: the tag of a wheel, what is in it, and an editable install. Without a network, by the
environment's setuptools."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from aotops.testing.frameworks import requested

pytestmark = pytest.mark.skipif(
    "torch" not in requested(), reason="packaging is tested once, in torch's environment: torch requires setuptools"
)

ROOT = Path(__file__).parents[1]
TAG = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
LIBRARY = b"stands for the library"


@pytest.fixture
def tree(tmp_path):
    """A copy of what is packaged, with a file in the place of the library."""
    copy = tmp_path / "tree"
    for folder in ("aotops", "frontends"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    (copy / "aotops/libaotops.so").write_bytes(LIBRARY)
    return copy


def run(*arguments, cwd) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_is_for_this_platform_and_any_python(tree, tmp_path):
    stale = tree / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/aotops/stale.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")  # as an earlier build leaves a module that the tree no longer has
    run(
        "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist", tree, cwd=tree
    )
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith(f"-{TAG}.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        (metadata,) = (name for name in files if name.endswith(".dist-info/WHEEL"))
        assert {f"Tag: {TAG}", "Root-Is-Purelib: false"} <= set(archive.read(metadata).decode().splitlines())
        assert archive.read("aotops/libaotops.so") == LIBRARY
    sources = {path.relative_to(tree) for folder in ("aotops", "frontends") for path in (tree / folder).rglob("*.py")}
    inside = {("aotops" / path if path.parts[0] == "frontends" else path).as_posix() for path in sources}
    assert {name for name in files if name.endswith(".py")} == inside


def test_editable_install_imports_the_tree(tree, tmp_path):
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    run("-c", build, cwd=tree)
    (wheel,) = tmp_path.glob(f"aotops-*-{TAG}.whl")
    run("-m", "pip", "install", "--no-index", "--no-deps", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    # -S: without this environment's own aotops
    program = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n" + (
        "import aotops, aotops.frontends as frontends; print(aotops.__file__, frontends.__file__)"
    )
    assert run("-S", "-c", program, cwd=tmp_path).split() == [
        str(tree / "aotops/__init__.py"),
        str(tree / "frontends/__init__.py"),
    ]
