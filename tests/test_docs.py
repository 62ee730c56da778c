"""What the documents show. Code under a path is that of the file. All other Python of a page is one program, which runs
and prints what is shown below its parts.

The files of adding_an_op.md are not in the tree: test_adding_an_op.py builds them. What checking.md shows depends on
the machine: test_check.py compares it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aotops.testing.frameworks import FRONTENDS, requested

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXCERPT = re.compile(r"```(?:python|cpp)\n(?:#|//) (\S+)\n(.*?)```", re.S)
PART = re.compile(r"```python\n(?!# \S+\n)(.*?)```(?:\n\n```\n(.*?)```)?", re.S)
IMPORT = re.compile(r"^(?:import|from) (\w+)|aotops\.frontends import (\w+)", re.M)
END = "-- end of a part --"

EXCERPTS = [
    pytest.param(path, part, id=f"{page.name}-{i}")
    for page in PAGES
    if page.name != "adding_an_op.md"
    for i, (path, block) in enumerate(EXCERPT.findall(page.read_text()))
    for part in re.split(r"^ *\.\.\.\n", block, flags=re.M)
    if part.strip()
]


def programs():
    """Of each page whose frameworks are under test: the parts of its program, each with what it prints."""
    for page in PAGES:
        if page.name == "checking.md":
            continue
        parts = PART.findall(page.read_text())
        imported = {name for code, _ in parts for names in IMPORT.findall(code) for name in names}
        frameworks = imported.intersection(FRONTENDS)
        if parts and frameworks.issubset(requested()):
            marks = [pytest.mark.gpu] if "cupy" in frameworks else []
            yield pytest.param(parts, id=page.relative_to(ROOT).as_posix(), marks=marks)


@pytest.mark.parametrize(("path", "code"), EXCERPTS)
def test_code_in_a_document_is_that_of_the_file(path, code):
    assert code.strip("\n") in (ROOT / path).read_text()


@pytest.mark.parametrize("parts", list(programs()))
def test_a_page_prints_what_it_shows(parts, python, tmp_path):
    program = tmp_path / "page.py"  # MindSpore compiles functions from their file
    program.write_text("".join(f"{code}\nprint({END!r})\n" for code, _ in parts))
    printed = python(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')").split(f"{END}\n")
    assert printed == [*(shown for _, shown in parts), ""]
