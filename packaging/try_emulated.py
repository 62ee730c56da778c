"""Runs the core of the table (compatibility_cell.py) from a wheel for another machine: in Debian's CPython for it, with
NumPy's wheel, under qemu-user. apt downloads the interpreter, pip the wheels; nothing is installed on this system.

    python packaging/try_emulated.py dist/aotops-*_aarch64.whl FOLDER

FOLDER keeps the interpreter. It needs Debian's qemu-user.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEBIAN = {"aarch64": "arm64"}
"""Debian's name of a machine."""
PACKAGES = ("python3", "libgomp1", "libstdc++6")
OLDEST_GLIBC, NEWEST_GLIBC = 17, 28
"""The minor versions in the tags of wheels that pip may take: those of manylinux from 2.17 on."""


def run(*command: object, **options: Any) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def interpreter(machine: str, folder: Path) -> Path:
    """Debian's CPython for a machine, unpacked in a folder."""
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        for package in download(DEBIAN[machine], folder / "apt"):
            run("dpkg-deb", "--extract", package, folder)
        if not (folder / "lib").exists():  # as Debian's base-files has it
            (folder / "lib").symlink_to("usr/lib")
        shutil.rmtree(folder / "apt")
        (folder / "ready").touch()
    (found,) = (file for file in folder.glob("usr/bin/python3.*") if re.fullmatch(r"python3\.\d+", file.name))
    return found


def download(architecture: str, state: Path) -> list[Path]:
    """The files of packages and of those that they depend on, by apt with a state of its own."""
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
    }
    apt = ("apt-get", "--yes", *(f"--option={name}={value}" for name, value in settings.items()))
    run(*apt, "update")
    run(*apt, "install", "--download-only", *PACKAGES)
    return sorted(state.glob("cache/archives/*.deb"))


def install(wheel: Path, machine: str, python: str, target: Path) -> None:
    """pip judges the tag of the wheel as it would on that machine."""
    shutil.rmtree(target, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)]
    options = ("--quiet", "--disable-pip-version-check", "--only-binary", ":all:", "--target", target)
    version = ("--implementation", "cp", "--python-version", python)
    wanted = (f"aotops[numpy] @ {wheel.resolve().as_uri()}", "ml_dtypes")
    run(sys.executable, "-m", "pip", "install", *options, *platforms, *version, *wanted)


def main() -> int:
    wheel, folder = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    machine = next(name for name in DEBIAN if wheel.stem.endswith(f"_{name}"))
    python = interpreter(machine, folder / "root")
    install(wheel, machine, python.name.removeprefix("python"), folder / "site")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AOTOPS_", "PYTHON"))}
    environment |= {"OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(folder / "site")}
    command = (f"qemu-{machine}", "-L", folder / "root", python, HERE / "compatibility_cell.py", "numpy")
    found = json.loads(run(*command, cwd=folder, env=environment).splitlines()[-1])
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    failed = found["failed"] + ([f"refused: {found['refused']}"] if "refused" in found else [])
    print(f"{machine}, CPython {found['python']}, {versions}: {found['checks']} checks, {len(failed)} failed")
    print(*failed, sep="\n", end="\n" * bool(failed))
    return 1 if failed or not found["checks"] else 0


if __name__ == "__main__":
    sys.exit(main())
