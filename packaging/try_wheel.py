"""Installs a wheel of aotops in clean environments, one for each interpreter, and runs the tests of the table's core
there: without a compiler's help, and without this tree, of which only the tests are copied.

    python packaging/try_wheel.py dist/aotops-*.whl python3.10 python3.12 python3.13 [--torch python3.12]

Each has NumPy alone; that of --torch has torch too. The output is a line for each.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("core/test_core.py", "arrays/test_numpy.py", "core/test_frontends.py")


def pinned(name: str) -> str:
    """A requirement as pyproject.toml pins it."""
    (found,) = re.findall(rf'"({name}==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    return found


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **options)


def clean_environment() -> dict[str, str]:
    """Without variables that would let the tests find another aotops, or a compiler."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AOTOPS_", "PYTHON"))}
    return kept | {"CXX": "/nonexistent", "CC": "/nonexistent", "OMP_NUM_THREADS": "2"}


def try_in(python: str, wheel: Path, folder: Path, frontends: list[str]) -> bool:
    """Whether the tests pass in a new environment of an interpreter."""
    print(f"{python}, {' and '.join(frontends)}: ", end="", flush=True)
    done = run(python, "-m", "venv", folder / "venv")
    inside = folder / "venv/bin/python"
    wanted = [f"aotops[{','.join(frontends)}] @ {wheel.resolve().as_uri()}", *map(pinned, ("pytest", "hypothesis"))]
    if "torch" in frontends:
        wanted.append(pinned("torch"))
    if not done.returncode:
        done = run(inside, "-m", "pip", "install", "--quiet", *wanted)
    if done.returncode:
        print(f"FAILED to install\n{done.stderr}")
        return False
    tree = folder / "tree"
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    files = [f"tests/{name}" for name in TESTS]
    environment = clean_environment() | {"AOTOPS_TEST_FRONTENDS": ",".join(frontends)}
    command = (inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *files)
    done = run(*command, cwd=tree, env=environment)
    version = run(inside, "-c", "import sys, numpy; print(sys.version.split()[0], 'numpy', numpy.__version__)").stdout
    print(version.strip(), "|", done.stdout.strip().splitlines()[-1])
    if done.returncode:
        print(done.stdout[-6000:] + done.stderr[-2000:])
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("python", nargs="+")
    parser.add_argument("--torch", metavar="PYTHON", action="append", default=[])
    given = parser.parse_args()
    tries = [(python, ["numpy"]) for python in given.python] + [(python, ["numpy", "torch"]) for python in given.torch]
    passed = []
    for python, frontends in tries:
        with tempfile.TemporaryDirectory() as folder:
            passed.append(try_in(python, given.wheel, Path(folder), frontends))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
