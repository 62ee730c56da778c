"""An environment that has the wheel of this checkout, and none of its sources: what the documents show runs there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("aotops", "__editable__")  # the editable installation of this checkout


def wheel(folder: Path) -> Path:
    """The wheel of this checkout, of the library that is built, in this folder; made if it is not there. It is not
    compressed, which would take as long as the rest."""
    with _locked(folder):
        if not (found := [*folder.glob("*.whl")]):
            options = folder / "setup.cfg"
            options.write_text(
                f"[build]\nbuild_base = {folder / 'build'}\n[egg_info]\negg_base = {folder}\n"
                f"[bdist_wheel]\ndist_dir = {folder}\ncompression = stored\n"
            )
            run(sys.executable, "setup.py", "-q", "bdist_wheel", cwd=ROOT, DIST_EXTRA_CONFIG=str(options))
            shutil.rmtree(folder / "build")
            found = [*folder.glob("*.whl")]
    return found[0]


def others(folder: Path) -> Path:
    """A folder of links to all other packages of this environment, for a .pth file: an environment then has them
    without a download, and no way to this checkout."""
    links = folder / "others"
    with _locked(folder):
        if not links.exists():
            links.mkdir()
            folders = [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
            packages = {found.name: found for path in reversed(folders) for found in path.iterdir()}
            for name, found in packages.items():
                if not name.startswith(OURS):
                    (links / name).symlink_to(found)
    return links


def interpreter(folder: Path) -> Path:
    """The interpreter of an environment in this folder with the wheel and all other packages; made if not there."""
    file, packages = wheel(folder), others(folder)
    python = folder / "venv" / "bin" / "python"
    with _locked(folder):
        if not python.exists():
            run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
            (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
            (site / "others.pth").write_text(f"{packages}\n")
            pip = (sys.executable, "-m", "pip", "--python", python)
            run(*pip, "install", "-q", "--no-deps", file, cwd=folder)
    where = run(python, "-c", "import aotops; print(aotops.__file__)", cwd=folder)
    assert Path(where.strip()).is_relative_to(folder), f"the checkout's package is imported: {where}"
    return python


def environment() -> dict[str, str]:
    """The environment of this process, without variables that lead to this checkout or to a network, and on the CPU in
    JAX, which would take a GPU by itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AOTOPS_", "PYTHON", "PYTEST"))}
    pip = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return kept | pip | {"NO_COLOR": "1", "COLUMNS": "110", "JAX_PLATFORMS": "cpu"}


def run(*command: object, cwd: Path, **more: str) -> str:
    """The output of a command in this environment, with these variables too.

    Raises:
        AssertionError: it fails, with its output.
    """
    environ = environment() | more
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environ, capture_output=True, text=True)
    said = f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}\nexit code {done.returncode}"
    assert done.returncode == 0, said
    return done.stdout


@contextmanager
def _locked(folder: Path):
    """One process at a time: those of pytest-xdist share the folder."""
    with open(folder / "lock", "w") as file:
        flock(file, LOCK_EX)
        yield
