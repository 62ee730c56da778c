"""Code that the documents show under a path is that file's, word for word.

The files of adding_an_op.md are not in the tree: test_adding_an_op.py builds them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```(?:python|cpp)\n(?:#|//) (\S+)\n(.*?)```", re.S)
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
