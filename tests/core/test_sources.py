"""Sources: comments and docstrings are sentences with a subject, and the imports of a frontend run one way."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("aotops", "benchmarks", "cuda_src", "examples", "frontends", "packaging", "tests")
NO_SUBJECT = re.compile(r"(What|Of|That|Those|The same)\b(?! (is|are)\b)")


def files(*suffixes: str) -> list[Path]:
    found = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in suffixes)
    return sorted(file for file in found if not {"build", "__pycache__"} & set(file.relative_to(ROOT).parts))


def of_python(text: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring, also of an assignment, and of each block of comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    before = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line.lstrip().startswith("#")
            if not (alone and before == token.start[0] - 1):
                yield token.start[0], token.string.lstrip("#: ")
            before = token.start[0] if alone else 0


def of_cpp(text: str) -> Iterator[tuple[int, str]]:
    before = 0
    for i, line in enumerate(text.splitlines(), 1):
        found = re.search(r"(?<![:\"'])(?://+|/\*+)\s*(.*)", line)
        alone = bool(re.match(r"\s*//", line))
        if found and not (alone and before == i - 1):
            yield i, found[1]
        before = i if alone else 0


@pytest.mark.parametrize(("suffixes", "read"), [((".py",), of_python), ((".h", ".c", ".cpp", ".cu", ".cuh"), of_cpp)])
def test_a_comment_is_a_sentence_with_a_subject(suffixes, read):
    wrong = []
    for file in files(*suffixes):
        name, lines = file.relative_to(ROOT).as_posix(), read(file.read_text())
        wrong += [f"{name}:{line}: {text[:60]!r}" for line, text in lines if NO_SUBJECT.match(text.strip())]
    assert not wrong, "\n".join(wrong)


def test_comments_are_found():
    text = '"""Of x."""\nx = 1  # What\n# That\n# Those\n"""The same."""\n'
    assert [found for _, found in sorted(of_python(text))] == ["Of x.", "What", "That", "The same."]
    assert [found for _, found in of_cpp('int x;  // Of\n// That\n// Those\nf("http://Of");\n')] == ["Of", "That"]


ORDERS = re.findall(r"^\| `(frontends/\w+)/` \| (`.*`) \|$", (ROOT / "docs" / "design.md").read_text(), re.M)


@pytest.mark.parametrize(("folder", "order"), ORDERS, ids=[folder for folder, _ in ORDERS])
def test_the_files_of_a_frontend_import_one_way(folder, order):
    """The order is that of docs/design.md."""
    names = re.findall(r"`(\w+)`", order)
    assert len(names) > 5
    for i, name in enumerate(names):
        text = (ROOT / folder / f"{name}.py").read_text()
        imported = {
            node.module or alias.name
            for node in ast.walk(ast.parse(text))
            for alias in getattr(node, "names", ())
            if isinstance(node, ast.ImportFrom) and node.level == 1
        }
        assert not imported & set(names[i:]), f"{folder}/{name}.py imports {imported & set(names[i:])}"
