"""The private names of torch stand in one file, which says what this version lacks; and the package's imports run one
way."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import private  # noqa: E402

FOLDER = Path(ours.__file__).parent
FILES = {path.stem: ast.parse(path.read_text()) for path in FOLDER.glob("*.py")}
KNOWN = (2, 13)  # the version that CI installs


def names(tree: ast.AST):
    """Each dotted name, or module that is imported from, with the names that are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"private"}))
def test_a_private_name_stands_in_private(name):
    pattern = re.compile(r"^(torch|forward_ad|_functorch)(\.\w+)*\._[a-z]\w*$", re.I)
    assert not [found for found in names(FILES[name]) if pattern.match(found)]


def test_this_version_lacks_nothing():
    if tuple(map(int, torch.__version__.split(".")[:2])) != KNOWN:
        pytest.skip("another version of torch")
    import_module(private.JOINT_GRAPH)
    import_module(private.CODE_CACHE)
    assert not private.LACKS


def test_a_missing_name_stops_the_import_and_is_told(python):
    program = """
import torch
del torch._C._profiler._RecordFunctionFast
try:
    from aotops.frontends import torch
except ImportError as error:
    print(error)
"""
    assert "lacks torch._C._profiler._RecordFunctionFast, expected torch 2.4 or later" in python(program)


def test_a_missing_optional_name_is_told(python):
    program = """
import torch
del torch._C._FunctionBase
from aotops.frontends.torch import private
print(private.LACKS)
"""
    assert "torch._C._FunctionBase" in python(program)


def test_without_early_passes_inductor_takes_the_others(python):
    """torch has them from 2.6 on."""
    program = """
import warnings
from torch._inductor.fx_passes import joint_graph
del joint_graph.early_patterns
with warnings.catch_warnings(record=True) as caught:
    from aotops.frontends import torch
print([str(w.message) for w in caught if "aotops" in str(w.message)])
print(any("aotops" in str(key) for key in joint_graph.pass_patterns[-1].patterns))
"""
    assert python(program).split() == ["[]", "True"]


def test_a_level_of_forward_mode_is_seen_at_another_entry(python):
    """There is a torch whose eager calls do not enter it where its compiled graphs do."""
    program = """
import torch
from torch.autograd import forward_ad
def enter_dual_level():
    forward_ad._current_level = torch._C._enter_dual_level()
    return forward_ad._current_level
forward_ad.enter_dual_level = enter_dual_level
from aotops.frontends import torch as F
x = torch.randn(3)
with forward_ad.dual_level():
    y = F.gelu(forward_ad.make_dual(x, torch.ones(3)))
    print(forward_ad.unpack_dual(y).tangent is not None)
"""
    assert python(program).strip() == "True"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (private.JOINT_GRAPH, private.FIRST_PASS),
        (private.CODE_CACHE, private.KEY_DETAILS),
        ("torch.utils.checkpoint", "CheckpointPolicy"),
    ],
)
def test_a_missing_name_of_a_module_that_is_imported_later_is_told(python, module, name):
    program = f"""
import {module} as module
if hasattr(module, {name!r}):
    del module.{name}
import aotops.frontends.torch
from aotops.frontends.torch import private
print(private.LACKS)
"""
    assert f"{module}.{name}" in python(program)


def test_imports_run_one_way():
    """No module of the package is imported by one that it imports."""
    imported = {
        name: {
            stem
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.level == 1
            for stem in ([node.module] if node.module else [alias.name for alias in node.names])
        }
        for name, tree in FILES.items()
    }

    def reached(name: str, path: tuple[str, ...] = ()) -> None:
        assert name not in path, f"imports in a circle: {' -> '.join((*path, name))}"
        for other in imported.get(name, ()):
            reached(other, (*path, name))

    reached("__init__")


def test_a_file_is_short():
    assert not {name: n for name in FILES if (n := len((FOLDER / f"{name}.py").read_text().splitlines())) > 300}
