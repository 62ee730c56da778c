"""Runs the commands of docs/your_own_operator.md in an empty folder, with the wheel of this checkout, and writes what
they print to docs/transcript.md:

    python tests/programs/walkthrough.py

What pip would download comes from the environment that runs this. test_docs.py runs it too, and compares.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from datetime import date
from pathlib import Path

import installed

TRANSCRIPT = installed.ROOT / "docs" / "transcript.md"
PAGE = installed.ROOT / "docs" / "your_own_operator.md"
COMMANDS = re.compile(r"^(?:## (.*?)\n|```sh\n(.*?)```)", re.S | re.M)
EDITED = re.compile(r"^sed -i '[^']*' (.*)$", re.M)
BUSY = re.compile(r"^warning: the machine was busy:[^\n]*\n[^\n]+\n", re.M)  # of this machine at this moment
FOLDER = "/tmp/empty"  # in the place of the folder's own name


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        TRANSCRIPT.write_text(transcript(Path(folder)))


def transcript(folder: Path) -> str:
    """The page of the commands and what they print. `folder` keeps the wheel; the commands run in a new one.

    Raises:
        AssertionError: a command fails, or an edit by sed finds nothing to edit.
    """
    wheel = installed.wheel(folder)
    with tempfile.TemporaryDirectory() as empty:
        session = Session(empty, wheel, _commands_with_packages(folder))
        parts = [(title, commands, commands and session.run(commands)) for title, commands in _blocks()]
    text, total, heading = [], 0.0, []
    for title, commands, done in parts:
        if title:
            heading = [f"## {title}"]  # of a section without commands, nothing
            continue
        printed, seconds = done
        total += seconds
        shown = BUSY.sub("", printed).replace(empty, FOLDER).replace(str(wheel), wheel.name).rstrip()
        text, heading = text + heading, []
        text += [f"```sh\n{commands}```", f"{seconds:.0f} s", *([f"```\n{shown}\n```"] if shown else [])]
    return "\n\n".join([_head(wheel, total), *text]) + "\n"


def _blocks() -> list[tuple[str, str]]:
    return COMMANDS.findall(PAGE.read_text())


def _head(wheel: Path, total: float) -> str:
    version = wheel.name.split("-")[1]
    return (
        "# Transcript\n\nThe commands of [From zero to a wheel](your_own_operator.md), in an empty folder, on a CPU:\n"
        f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, aotops {version}, "
        f"{date.today()}.\nAll together took {total:.0f} s, without downloads: pip found the frameworks here. "
        "There is no nvcc and no GPU.\n`python tests/programs/walkthrough.py` makes this page, and a test compares it."
    )


class Session:
    """A shell in an empty folder. It has no nvcc and no GPU, so that it prints the same on every machine."""

    def __init__(self, folder: str, wheel: Path, commands: Path):
        self.folder, self.state = folder, ""
        path = os.pathsep.join([str(commands), os.environ["PATH"]])
        own = {"AOTOPS": str(wheel), "PATH": path, "NVCC": "", "CUDA_VISIBLE_DEVICES": "", "LC_ALL": "C.UTF-8"}
        self.environment = installed.environment() | own

    def run(self, commands: str) -> tuple[str, float]:
        """The output of commands that go on where those before them ended, and their seconds."""
        state = f"{self.folder}/.state"
        # deactivate is a function of the shell of the commands before
        script = commands.replace("deactivate\n", 'PATH="${PATH#*:}"\n')
        script = f"set -e\n{self.state}\n{script}\n{{ echo \"cd '$PWD'\"; echo \"export PATH='$PATH'\"; }} >{state}\n"
        before, started = self._edited(commands), time.perf_counter()
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = time.perf_counter() - started
        assert done.returncode == 0, f"{commands}\n{done.stdout}\nexit code {done.returncode}"
        self.state = Path(state).read_text()
        for command, files in self._edited(commands).items():
            unchanged = [name for name, text in files.items() if before.get(command, {}).get(name) == text]
            assert not unchanged, f"{command}\nfinds nothing in {', '.join(unchanged)}"
        return done.stdout, seconds

    def _edited(self, commands: str) -> dict[str, dict[str, str]]:
        """The text of each file that a command of sed names."""
        return {found[0]: {name: self._read(name) for name in found[1].split()} for found in EDITED.finditer(commands)}

    def _read(self, name: str) -> str:
        (file,) = Path(self.folder).glob(f"*/{name}")
        return file.read_text()


def _commands_with_packages(folder: Path) -> Path:
    """A folder with a `python3` whose new environments have the packages of this one."""
    file = folder / "commands" / "python3"
    file.parent.mkdir(exist_ok=True)
    # The setuptools that a new environment has before Python 3.12 are older than torch's.
    file.write_text(
        f'''#!/bin/sh
"{sys.executable}" "$@" || exit
[ "$1 $2" = "-m venv" ] || exit 0
cd "$3/lib/python{sysconfig.get_python_version()}/site-packages" || exit
rm -rf setuptools* pkg_resources _distutils_hack distutils-precedence.pth
echo "{installed.others(folder)}" >others.pth
'''
    )
    file.chmod(0o755)
    return file.parent


def _processor() -> str:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0] if names else platform.machine()


def settled(text: str) -> list[str]:
    """The lines of a transcript, without what depends on the machine: its name, by which that line wraps, compilers,
    what a GPU adds, times and rates, and that it was busy."""
    text = re.sub(r"(?ms)^warning: the machine was busy.*?\n(?=\n)", "", text[text.index("```sh") :])
    text = re.sub(r"(?ms)^[^\n]*; a copy moves.*?\n(?=\n)", "#\n", text)
    lines = text.splitlines()
    lines = [re.sub(r"\d[\d,]*\.\d+x?|\b\d+ (s|threads)\b", "#", " ".join(line.split())) for line in lines]
    lines = [re.sub(r"it needs GLIBC.*|linux_\w+", "#", line) for line in lines]
    return [line for line in lines if line and not re.search(r"\bcuda\b|: compiling |^\w+ passed", line)]


if __name__ == "__main__":
    main()
