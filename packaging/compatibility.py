"""Installs a wheel of aotops beside each version of each framework, for each interpreter, in an environment that exists
for that run alone, and runs the core of the table there (compatibility_cell.py). Results are kept in
compatibility.json, from which docs/compatibility.md is written.

    python packaging/compatibility.py run dist/aotops-*.whl [--only torch 2.4 3.11] PYTHON ...
    python packaging/compatibility.py write

A PYTHON is the path of an interpreter. A run replaces the cells that it runs and leaves the others.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "compatibility.json"
DOCUMENT = HERE.parent / "docs/compatibility.md"

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.13t", "3.14t")
NEWEST = "newest"
VERSIONS = {
    "numpy": ("1.26", "2.0", NEWEST),
    "torch": ("2.4", "2.6", "2.8", "2.10", NEWEST),
    "jax": ("0.4.36", "0.6", "0.8", NEWEST),
    "mindspore": ("2.7.0", "2.7.2", "2.8", "2.9", NEWEST),
}
"""The oldest of each is the one that pyproject.toml admits, or an earlier one that pip installs."""
TITLES = {"numpy": "NumPy", "torch": "PyTorch", "jax": "JAX", "mindspore": "MindSpore"}
COMMON_PYTHON = "3.11"
"""For which every version of PyTorch above has a wheel. An environment of PyTorch has 7 GB, so that the older versions
run on this one alone."""
LIMIT = 1800


class Cell(NamedTuple):
    framework: str
    wanted: str
    python: str

    @property
    def is_asked_for(self) -> bool:
        return self.framework != "torch" or NEWEST in self.wanted or self.python == COMMON_PYTHON


def cells() -> Iterator[Cell]:
    """Newest versions first, which matter most."""
    for framework, versions in VERSIONS.items():
        for wanted in reversed(versions):
            for python in PYTHONS:
                if (cell := Cell(framework, wanted, python)).is_asked_for:
                    yield cell


# ----------------------------------------------------------------------------------------------------------------- runs


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=LIMIT, **options)


def interpreters(paths: list[str]) -> dict[str, str]:
    """By "3.13" and "3.13t"."""
    program = "import sys; print('%d.%d' % sys.version_info[:2] + ('t' if 't' in sys.abiflags else ''))"
    return {run(path, "-c", program, check=True).stdout.strip(): path for path in paths}


def check_pip(pythons: Iterable[str]) -> None:
    """Older ones install wheels of other builds for a free-threaded interpreter, which crash."""
    version = run(sys.executable, "-m", "pip", "--version", check=True).stdout.split()[1]
    if any(python.endswith("t") for python in pythons) and tuple(map(int, version.split(".")[:2])) < (24, 1):
        raise SystemExit(f"compatibility: pip is {version}, expected 24.1 or newer for a free-threaded interpreter")


def run_cell(cell: Cell, interpreter: str, wheel: Path) -> dict[str, Any]:
    """The findings: versions, the number of checks, those that failed; or why nothing ran."""
    with tempfile.TemporaryDirectory(prefix="compatibility-") as folder:
        inside = Path(folder, "venv/bin/python")
        run(interpreter, "-m", "venv", "--without-pip", inside.parents[1], check=True)
        if reason := install(inside, cell, wheel):
            return {"reason": reason}
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("AOTOPS_", "PYTHON"))}
        environment |= {"OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "ignore"}
        try:
            done = run(inside, HERE / "compatibility_cell.py", cell.framework, cwd=folder, env=environment)
        except subprocess.TimeoutExpired:
            return {"failed": [f"no end after {LIMIT} s"]}
    if done.returncode:
        return {"failed": [f"exit status {done.returncode}: {last_line(done.stderr)}"]}
    found = json.loads(done.stdout.splitlines()[-1])
    version = found["versions"][cell.framework]
    if cell.wanted != NEWEST and not f"{version}.".startswith(f"{cell.wanted}."):
        raise AssertionError(f"{cell}: pip installed {version}")
    return found


def install(inside: Path, cell: Cell, wheel: Path) -> str | None:
    """Why it could not be installed, or None."""
    options = ("--quiet", "--no-cache-dir", "--no-compile", "--only-binary", ":all:")
    pip = (sys.executable, "-m", "pip", "--python", inside, "install", *options)
    version = "" if cell.wanted == NEWEST else f"=={cell.wanted}.*"
    wanted = (f"aotops[{cell.framework}] @ {wheel.resolve().as_uri()}", f"{cell.framework}{version}", "numpy")
    done = run(*pip, *wanted, "ml_dtypes")  # NumPy's bfloat16
    if done.returncode and "ml_dtypes" in done.stderr:
        done = run(*pip, *wanted)
    if not done.returncode:
        return None
    missing = re.search(r"No matching distribution found for (\S+)", done.stderr)
    return f"pip finds no wheel of {missing[1]}" if missing else last_line(done.stderr)


def last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "")[:300]


# -------------------------------------------------------------------------------------------------------------- results


def results() -> dict[Cell, dict[str, Any]]:
    if not RESULTS.exists():
        return {}
    return {Cell(**found.pop("cell")): found for found in json.loads(RESULTS.read_text())}


def keep(cell: Cell, found: dict[str, Any]) -> None:
    everything = results() | {cell: {"date": datetime.date.today().isoformat()} | found}
    ordered = [{"cell": c._asdict()} | everything[c] for c in cells() if c in everything]
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


def state(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run"
    if "reason" in found:
        return "no wheel" if "no wheel" in found["reason"] else "not installed"
    if "refused" in found:
        return "refuses"
    return "fails" if found["failed"] else "works"


# ------------------------------------------------------------------------------------------------------------- document

HEAD = """# Compatibility

One wheel, of one binary, in environments that pip makes. `make compatibility` runs the core of the table in each: every
operator's first case, values and gradients, in float32 and in bfloat16 (float16 where NumPy has no `ml_dtypes`), calls
from four threads, and transforms of the framework: `torch.compile`, `opcheck` and `gradgradcheck`; `jit`, `grad`,
`vmap` and second order; MindSpore in both modes. A cell has the version that pip chose, what came of it, and its date.
The runs are on x86-64 Linux, on the CPU. A "t" marks free-threaded builds of CPython, where `addresses` is the call
path. "No wheel": pip finds none of that version for that interpreter. "Not run": `make compatibility` would run it, and
has not yet. An environment of PyTorch has 7 GB, so that its older versions are for one interpreter alone.

[The wheel for aarch64](building.md#wheels-for-arm) runs the same for NumPy under qemu (`make aarch64`). Its CUDA code
is linked and audited, and has not run.

This page is written by `packaging/compatibility.py`.
"""


def document(found: dict[Cell, dict[str, Any]]) -> str:
    parts = [HEAD]
    for framework, versions in VERSIONS.items():
        pythons = [p for p in PYTHONS if any(Cell(framework, v, p).is_asked_for for v in versions)]
        parts.append(f"## {TITLES[framework]}\n")
        rows = [["", *(f"CPython {p}" for p in pythons)], ["---"] * (len(pythons) + 1)]
        notes: dict[str, int] = {}
        for wanted in versions:
            row = [f"`{wanted}`" if wanted == NEWEST else wanted]
            for python in pythons:
                cell = Cell(framework, wanted, python)
                row.append(entry(cell, found.get(cell), notes) if cell.is_asked_for else "")
            rows.append(row)
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n")
        parts += [f"{number}. {note}" for note, number in notes.items()] + [""] * bool(notes)
    return "\n".join(parts).rstrip() + "\n"


def entry(cell: Cell, found: dict[str, Any] | None, notes: dict[str, int]) -> str:
    """Notes are numbered as they come."""
    what = state(found)
    if found is None:
        return what
    version = found.get("versions", {}).get(cell.framework, "").partition("+")[0]
    if what == "fails" and "checks" in found:
        what = f"{len(found['failed'])} of {found['checks']} fail"
    why = found.get("reason") or found.get("refused") or "; ".join(found.get("failed", ()))
    note = f" ({notes.setdefault(why, len(notes) + 1)})" if why and what != "no wheel" else ""
    return f"{version}{': ' * bool(version)}{what}{note}, {found['date']}"


# ------------------------------------------------------------------------------------------------------------ arguments


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="runs cells, then writes the document")
    runs.add_argument("wheel", type=Path)
    runs.add_argument("pythons", nargs="+", metavar="PYTHON")
    runs.add_argument("--only", nargs="+", default=[], metavar="WORD", help="words of the cells to run: torch 2.4 3.11")
    commands.add_parser("write", help="writes the document")
    given = parser.parse_args()
    failed = 0
    if given.command == "run":
        there = interpreters(given.pythons)
        check_pip(there)
        for cell in cells():
            if cell.python in there and set(given.only) <= set(cell):
                found = run_cell(cell, there[cell.python], given.wheel)
                keep(cell, found)
                failed += state(found) == "fails"
                print(*cell, state(found), *found.get("failed", ()), sep="  ", flush=True)
    DOCUMENT.write_text(document(results()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
