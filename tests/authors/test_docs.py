"""The documents show what runs. Code under a path is that of the file. All other Python of a page, and the commands of
its shell, run in an empty folder with the wheel of this checkout, and print what is shown below them.

A block of code with a title is written to the file of that name. If a page is about several frameworks, each has a
program: the blocks that import it, after those that import none. A command that is not run is marked in the page, with
the reason.

The files of adding_an_op.md are not in the tree: test_adding_an_op.py builds them.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path

import installed
import pytest
import walkthrough

from aotops.call import MOST_OPTIONAL, MOST_SLOTS
from aotops.op import Op
from aotops.ops import OPS
from aotops.testing.dtypes import ml_dtypes
from aotops.testing.frameworks import FRONTENDS, requested

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXCERPT = re.compile(r"```(?:python|cpp)\n(?:#|//) (\S+)\n(.*?)```", re.S)
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>.*?) -->\n)?"
    r"```(?P<language>python|cpp|sh)(?: title=\"(?P<title>.*?)\")?\n(?P<code>.*?)```(?:\n\n```\n(?P<shown>.*?)\n?```)?",
    re.S,
)
IMPORT = re.compile(r"^(?:import|from) (\w+)|aotops\.frontends import (\w+)", re.M)
END = "-- end of a part --"
# Pages whose commands something else runs.
ELSEWHERE = {
    "your_own_operator.md": "the walkthrough, below",
    "transcript.md": "made by the walkthrough",
    "adding_an_op.md": "test_adding_an_op.py",
}
# How often a page says why its commands are not run.
NOT_RUN = {
    "it is for the start of an interactive shell": 1,
    "it needs an H200": 10,
    "it makes the wheel that the tests of the documents install": 1,
    "CI runs these commands, or a test of the packaging": 1,
    "From zero to a wheel runs these commands": 1,
    "it needs two devices": 2,
    "it needs transformers": 2,
    "it needs a GPU and transformers": 1,
    "test_cpp.py runs it": 2,
    "test_tvm_ffi.py runs it": 1,
    "test_triton.py runs it": 1,
    "hosting_tvm_ffi.md runs it": 1,
    "it needs CuTe DSL": 3,
    "it needs a cross compiler": 1,
    "a test of the models trains the tiny ones": 1,
}

EXCERPTS = [
    pytest.param(path, part, id=f"{page.name}-{i}")
    for page in PAGES
    if page.name != "adding_an_op.md"
    for i, (path, block) in enumerate(EXCERPT.findall(page.read_text()))
    for part in re.split(r"^ *\.\.\.\n", block, flags=re.M)
    if part.strip()
]


@dataclass(frozen=True)
class Block:
    reason: str | None
    language: str
    title: str | None
    code: str
    shown: str | None

    @property
    def runs(self) -> bool:
        return not self.reason and not re.match(r"(#|//) \S+/\S+\n", self.code)

    @property
    def frameworks(self) -> set[str]:
        return {name for names in IMPORT.findall(self.code) for name in names} & set(FRONTENDS)


def blocks(page: Path) -> list[Block]:
    return [Block(**found.groupdict()) for found in BLOCK.finditer(page.read_text())]


def programs():
    """The blocks to run, for each page and each framework under test."""
    for page in PAGES:
        found = [block for block in blocks(page) if block.runs and page.name not in ELSEWHERE]
        frameworks = sorted(set().union(*(block.frameworks for block in found)))
        for name in frameworks or ["numpy"]:
            own = [block for block in found if len(frameworks) < 2 or block.frameworks <= {name}]
            if own and name in requested():
                marks = [pytest.mark.gpu] if name == "cupy" else []
                yield pytest.param(own, id=f"{page.relative_to(ROOT).as_posix()}-{name}", marks=marks)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that the processes of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith("popen") else base


@pytest.mark.parametrize(("path", "code"), EXCERPTS)
def test_code_in_a_document_is_that_of_the_file(path, code):
    assert code.strip("\n") in (ROOT / path).read_text()


@pytest.mark.parametrize("page", list(programs()))
def test_a_page_prints_what_it_shows(page, shared, tmp_path):
    if ml_dtypes is None and any("aotops.testing" in block.code for block in page):
        pytest.skip("the page shows bfloat16, which NumPy has by ml_dtypes")
    python = installed.interpreter(shared)
    program, shown = [], []
    for block in page:
        if block.title:
            (tmp_path / block.title).write_text(block.code)
        elif block.language == "sh":
            printed = shell(block.code, python, tmp_path)
            assert block.shown is None or settled(printed) == settled(block.shown), block.code
        else:
            assert block.language == "python", f"a block of {block.language} has neither a path nor a title"
            program.append(f"{block.code}\nprint({END!r}, flush=True)\n")
            shown.append(settled(block.shown or ""))
    (tmp_path / "page.py").write_text("".join(program))  # MindSpore compiles functions from their file
    printed = installed.run(python, "page.py", cwd=tmp_path).split(END) if program else [""]
    assert [settled(part) for part in printed] == [*shown, ""]


def test_every_framework_gives_what_the_first_page_shows(shared, tmp_path):
    python = installed.interpreter(shared)
    shutil.copy(ROOT / "examples" / "five_frameworks.py", tmp_path)
    printed = installed.run(python, "five_frameworks.py", cwd=tmp_path).splitlines()
    page = (ROOT / "docs" / "index.md").read_text().splitlines()
    shown = [line for line in printed if line in page]
    assert {line.split()[0] for line in shown} >= set(requested()) - {"cupy"}, "\n".join(printed)


def shell(commands: str, python: Path, folder: Path) -> str:
    script = f'exec 2>&1\nexport PATH="{python.parent}:$PATH"\n{commands}'
    return installed.run("bash", "-ec", script, cwd=folder)


def settled(text: str) -> str:
    """Without what depends on the machine: folders of the package, versions of libraries, GPUs, seconds."""
    text = re.sub(r"\S*aotops/libaotops\.so", "aotops/libaotops.so", text)
    text = re.sub(r"(library +drivers +pass)\s+.*", r"\1", text)  # of many GPUs on a line of its own
    return re.sub(r"(it needs GLIBC).*|( in )[\d.]+ s", r"\1\2", text).strip()


def test_the_fields_of_adding_an_op_are_those_of_the_operators_that_it_names():
    text = (ROOT / "docs" / "adding_an_op.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", text, re.M)
    known = {op.name: op for forward in OPS.values() for op in (forward, forward.backward) if op}
    assert len(rows) > 10
    for field, see in rows:
        name, *slots = re.findall(r"`(\w+)`", see)
        assert field in {known.name for known in fields(Op)}
        assert getattr(known[name], field), f"{name} has no {field}"
        assert set(slots) <= {*known[name].inputs, *known[name].slots}, f"{name} has no slots {slots}"


NAMES_OF_OTHERS = {".npz", "GLIBCXX_3.4.21", "PyMethodDef", "jax.custom_jvp"}


def test_the_names_in_design_are_in_the_tree():
    """In its code, not in its comments: what has gone stays longest there."""
    words = set(re.findall(r"\w+", "\n".join(map(_code, _sources()))))
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / "design.md").read_text(), flags=re.S)
    missing = set()
    for name in set(re.findall(r"`([^`\n]+)`", text)):
        if "/" in name and " " not in name:
            found = (ROOT / name).exists()
        else:
            found = set(re.findall(r"[A-Za-z_]\w+", re.sub(r"<\w+>", "", name))) <= words
        missing |= set() if found else {name}
    assert missing == NAMES_OF_OTHERS


def _sources():
    for folder in ("aotops", "frontends", "cuda_src", "packaging"):
        yield from (file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".h", ".cpp", ".cu", ".cuh"))
    yield from (ROOT / "Makefile", ROOT / "pyproject.toml")


def _code(file: Path) -> str:
    comment = r"#.*" if file.suffix == ".py" else r"//.*"
    return re.sub(r'""".*?"""|/\*.*?\*/', "", re.sub(comment, "", file.read_text()), flags=re.S)


def test_the_files_that_pages_name_are_in_the_tree():
    """By a path from the root, or in a link; so are the sections that links name."""
    of_a_package = {"cuda_src/scale.h", "cuda_src/scale.cpp", "tests/test_scale.py"}
    folders = "aotops|benchmarks|cuda_src|docs|examples|frontends|packaging|tests"
    missing = set()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        named = set(re.findall(rf"`((?:{folders})/[\w./]+)`", text)) - of_a_package
        missing |= {(page.name, name) for name in named if not (ROOT / name).exists()}
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            path, _, section = link.partition("#")
            file = page.parent / path if path else page
            if not file.exists() or (section and section not in _sections(file)):
                missing.add((page.name, link))
    assert not missing


def _sections(page: Path) -> set[str]:
    """The anchors of the titles, as the site and GitHub make them."""
    titles = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_variables_of_processes_are_documented():
    read = r'(?:environ(?:\.get\(|\[)|getenv\(|env\()"(AOTOPS_\w+)"'
    known = {name for file in _sources() for name in re.findall(read, file.read_text())}
    assert {"AOTOPS_LIBRARY", "AOTOPS_THREADS"} <= known
    pages = "\n".join(page.read_text() for page in PAGES)
    assert {name for name in known if f"`{name}=" not in pages} == set()


def test_the_numbers_of_tensors_are_those_of_the_call_path():
    page = (ROOT / "docs" / "your_own_operator.md").read_text()
    assert f"has up to {MOST_SLOTS}, its workspace included, of which {MOST_OPTIONAL} may be optional." in page


def test_design_names_what_keeps_its_residuals():
    text = (ROOT / "docs" / "design.md").read_text()
    text = text[text.index("always keep theirs") : text.index("**Results in place of inputs**")]
    assert {name for name, op in OPS.items() if op.always_save_residuals and f"`{name}`" not in text} == set()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_table_has_every_operator(page):
    named = re.findall(r"^\| `(\w+)(?:\(.*?\))?` \|", (ROOT / page).read_text(), re.M)
    assert set(OPS) <= set(named)


def test_the_first_page_has_the_signatures():
    shown = dict(re.findall(r"^\| `(\w+)(\(.*?\))` \|", (ROOT / "docs" / "index.md").read_text(), re.M))
    own = {name: str(signature(op.bind)).replace("'", '"').replace("e-0", "e-") for name, op in OPS.items()}
    assert {name: shown[name] for name in own} == own


def test_the_versions_of_frameworks_are_those_of_pyproject():
    extras = (ROOT / "pyproject.toml").read_text()
    least = dict(re.findall(r'^(torch|jax|mindspore) = \["\1>=([\d.]+)"', extras, re.M))
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        said = " ".join(page.read_text().split())
        assert f"PyTorch from {least['torch']}, JAX from {least['jax']} and MindSpore from {least['mindspore']}" in said


def test_ci_runs_the_commands_of_the_first_page():
    shown = re.findall(r"^make \w+", (ROOT / "README.md").read_text(), re.M)
    assert shown[:2] == re.findall(r"^make \w+", (ROOT / ".ci" / "run").read_text(), re.M)


def test_from_zero_to_a_wheel_runs_the_commands_of_the_first_page():
    (block,) = (each for each in blocks(ROOT / "README.md") if each.reason and each.reason.startswith("From zero"))
    shown = [line.split("  #")[0].strip() for line in block.code.splitlines()]
    page = [each.code.replace(" -q", "") for each in blocks(ROOT / "docs" / "your_own_operator.md")]
    run = [line for code in page for line in code.splitlines()]
    assert len(shown) == 5
    assert [line for line in run if line in shown] == shown


def test_each_command_is_run_or_says_why_not():
    """Fences without a language have output, or a drawing."""
    marked = Counter(block.reason for page in PAGES for block in blocks(page) if block.reason)
    assert marked == NOT_RUN
    for page in PAGES:
        text = re.sub(r"<!-- .*? -->\n```sh\n.*?```|" + BLOCK.pattern, "", page.read_text(), flags=re.S)
        commands = re.findall(r"^```\n(?:python|torchrun|pip|aotops|make|g\+\+) .*", text, re.M)
        assert page.name in ELSEWHERE or not commands, f"{page.name}: ```sh, for {commands}"


@pytest.mark.skipif(not {"torch", "jax"} <= set(requested()), reason="the transcript has torch and JAX")
def test_the_transcript_is_what_the_walkthrough_prints(shared):
    made, kept = walkthrough.transcript(shared), walkthrough.TRANSCRIPT.read_text()
    assert walkthrough.settled(made) == walkthrough.settled(kept), "run python tests/programs/walkthrough.py"
