"""Runs the commands of docs/your_own_operator.md in an empty folder, with the wheel that is given, and writes what they
print to docs/transcript.md.

    python tests/walkthrough.py dist/aotops-*.whl
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = re.compile(r"^(?:## (.*?)\n|```sh\n(.*?)```)", re.S | re.M)
NOISE = re.compile(r"^WARNING: Location .*\n", re.M)  # pip's, of indexes of this machine
FOLDER = "/tmp/empty"  # in the place of the folder's own name


def main(wheel: str) -> None:
    page = (ROOT / "docs" / "your_own_operator.md").read_text()
    wheel = str(Path(wheel).resolve())
    text, total, before = [], 0.0, ""
    with tempfile.TemporaryDirectory() as folder:
        for title, commands in COMMANDS.findall(page):
            if title:
                text.append(f"## {title}")
                continue
            started = time.perf_counter()
            printed, before = run(before, commands, folder, wheel)
            seconds = time.perf_counter() - started
            total += seconds
            shown = NOISE.sub("", printed).replace(folder, FOLDER).replace(wheel, Path(wheel).name).rstrip()
            text.append(f"```sh\n{commands}```\n\n{seconds:.0f} s\n" + (f"\n```\n{shown}\n```" if shown else ""))
    head = (
        "# Transcript\n\nThe commands of [From zero to a wheel](your_own_operator.md), in an empty folder, on a CPU:\n"
        f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {date.today()}. "
        f"All together took {total:.0f} s.\n`python tests/walkthrough.py {Path(wheel).name}` made this page."
    )
    (ROOT / "docs" / "transcript.md").write_text("\n\n".join([head, *text]) + "\n")
    print(f"{total:.0f} s")


def run(before: str, commands: str, folder: str, wheel: str) -> tuple[str, str]:
    """Runs commands where those before them ended. Returns what they print, and how to get to where they end."""
    state = f"{folder}/.state"
    script = f"set -e\n{before}\n{commands}\n{{ echo \"cd '$PWD'\"; echo \"export PATH='$PATH'\"; }} >{state}\n"
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG") or k.startswith("PIP_")}
    environment = kept | {"AOTOPS": wheel, "NO_COLOR": "1", "COLUMNS": "110"}
    # without deactivate, which the shell of the commands before defined
    script = script.replace("deactivate\n", "true\n")
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{commands}\n{done.stdout}\nexit code {done.returncode}")
    return done.stdout, Path(state).read_text()


def processor() -> str:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main(sys.argv[1])
