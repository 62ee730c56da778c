"""Code that the documents show under a path is that of the file; a program shown with its output prints it.

The files of adding_an_op.md are not in the tree: test_adding_an_op.py builds them."""

import re
from pathlib import Path

import pytest

from aotops.testing.frameworks import requested

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```(?:python|cpp)\n(?:#|//) (\S+)\n(.*?)```", re.S)
PROGRAM = re.compile(r"```python\n(import .*?)```\n\n```\n(.*?)```", re.S)
SHOWN = [
    pytest.param(path, part, id=f"{document.name}-{i}")
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if document.name != "adding_an_op.md"
    for i, (path, block) in enumerate(BLOCK.findall(document.read_text()))
    for part in re.split(r"^ *\.\.\.\n", block, flags=re.M)
    if part.strip()
]


@pytest.mark.parametrize(("path", "code"), SHOWN)
def test_code_in_a_document_is_that_of_the_file(path, code):
    assert code.strip("\n") in (ROOT / path).read_text()


@pytest.mark.skipif(
    "torch" not in requested(), reason="torch, which the README's first program uses, is not under test"
)
def test_first_program_of_the_readme_prints_what_is_shown(python):
    ((program, output),) = PROGRAM.findall((ROOT / "README.md").read_text())
    assert python(program) == output
