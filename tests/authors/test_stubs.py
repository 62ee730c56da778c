"""Type stubs: they have what the frontends have, and a type checker sees signatures through them."""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from aotops.frontends import FRONTENDS, stubs
from aotops.library import Library
from aotops.op import operator
from aotops.ops import BUILTIN, OPS

ROOT = Path(__file__).parents[2]
SOURCES = {
    name: next(
        file for file in (ROOT / f"frontends/{name}.py", ROOT / f"frontends/{name}/__init__.py") if file.exists()
    )
    for name in FRONTENDS
}


def functions_of(text: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def test_there_is_a_stub_for_each_framework(tmp_path):
    copy = shutil.copytree(ROOT / "frontends", tmp_path / "frontends", ignore=shutil.ignore_patterns("*.pyi"))
    expected = {copy / source.relative_to(ROOT / "frontends").with_suffix(".pyi") for source in SOURCES.values()}
    assert set(stubs.write(BUILTIN, copy)) == expected == set(copy.rglob("*.pyi"))


@pytest.mark.parametrize("name", FRONTENDS)
def test_a_stub_has_what_the_frontend_has(name):
    pytest.importorskip(name)
    frontend = import_module(f"aotops.frontends.{name}")
    tree = ast.parse(stubs.text(BUILTIN, name, SOURCES[name].read_text()))
    named = {getattr(node, "name", None) for node in tree.body}
    named |= {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    named |= {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert named - {None} == set(frontend.__all__)
    for function, node in functions_of(ast.unparse(tree)).items():
        parameters = [p.arg for p in node.args.args + node.args.kwonlyargs]
        assert parameters == list(inspect.signature(getattr(frontend, function)).parameters)


def test_signatures():
    @operator(
        inputs=("x", "mask", "scale"),
        outputs=("y", "total"),
        optional=("mask",),
        attrs={"axes": "int[]", "mode": "str?", "scale_number": "float?"},
        backward=OPS["gelu"].backward,
    )
    def masked(x, scale, axes, mask=None, *, mode=None, more=1.5):
        return (x, mask, scale), (axes, mode, None)

    text = stubs.text(Library("mine", [masked]), "numpy")
    found = functions_of(text)
    assert ast.unparse(found["masked"]).partition("\n")[0] == (
        "def masked(x: NDArray[Any], scale: NDArray[Any] | float, axes: int | Sequence[int], "
        "mask: NDArray[Any] | None=None, *, mode: str | None=None, more: Any=1.5, "
        "out: tuple[NDArray[Any] | None, NDArray[Any] | None] | None=None) -> tuple[NDArray[Any], NDArray[Any]]:"
    )
    backward = ast.unparse(found["masked_backward"]).partition("\n")[0]
    assert backward.startswith("def masked_backward(dy: tuple[NDArray[Any], NDArray[Any]], x: NDArray[Any]")
    assert backward.endswith("-> NDArray[Any]:")
    assert "masked_backward" not in functions_of(stubs.text(Library("mine", [masked]), "torch"))


def test_what_else_a_frontend_defines():
    source = '''
import torch
from torch import nn
from aotops.frontends.torch import functions

LIMIT = 1 << 4
_hidden = 2

class Net(nn.Module):
    """Doc."""

    size: int

    def __init__(self, size: int = LIMIT) -> None:
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def _own(self): ...

def help(x: int) -> int:
    return x
'''
    text = stubs.text(Library("mine", []), "torch", source)
    compile(text, "stub", "exec")
    for line in ("import torch", "from torch import nn", "LIMIT: int", "class Net(nn.Module):", "    size: int"):
        assert line in text.splitlines()
    assert "def forward(self, x: torch.Tensor) -> torch.Tensor: ..." in text
    for absent in ("_hidden", "_own", "self.size", "aotops.frontends"):
        assert absent not in text


def test_what_a_frontend_exports_again():
    """In the form that type checkers take as public, of what ``__all__`` names alone."""
    source = "from .modules import Net, Other\nfrom .run import functions\n\n__all__ = ['Net', 'functions']\n"
    lines = stubs.text(Library("mine", []), "torch", source).splitlines()
    assert {"from .modules import Net as Net", "from .run import functions as functions"} <= set(lines)
    assert not [line for line in lines if "Other" in line]


def test_stubs_of_a_package(tmp_path):
    (tmp_path / "frontends").mkdir()
    for framework in ("torch", "numpy"):
        (tmp_path / f"frontends/{framework}.py").write_text("from aotops.frontends import functions\n")
    library = Library("mine", [OPS["gelu"]], tmp_path / "libmine.so")
    files = stubs.write(library)
    assert [file.relative_to(tmp_path).as_posix() for file in files] == ["frontends/numpy.pyi", "frontends/torch.pyi"]
    assert list(functions_of(files[0].read_text())) == ["gelu", "gelu_backward"]
    with pytest.raises(FileNotFoundError, match=r"stubs: .*none has none of torch\.py, .*numpy\.py"):
        stubs.write(library, tmp_path / "none")


GOOD = """
import torch
from aotops.frontends import torch as F

x = torch.Tensor()
y: torch.Tensor = F.gelu(x, approximate="tanh")
norm, total = F.add_layer_norm(x, y, (3, 4), eps=1e-6)
net: torch.nn.Module = F.LayerNorm()
names = sorted(F.functions(__import__("aotops").get("gelu").library))
"""
BAD = {
    "F.gelu(x, approximate=1)": "incompatible type",
    "F.gellu(x)": 'Module has no attribute "gellu"',
    "F.softmax('x')": "incompatible type",
    "F.linear(x)": "Missing positional argument",
    "a, b, c = F.add_layer_norm(x, x, 3)": "Need more than 2 values",
}
TORCH = "from . import nn as nn\nclass Tensor: ...\n"
LAYERS = ["LayerNorm", "RMSNorm", "Linear", "GELU", "Softmax", "CrossEntropyLoss", "Conv2d"]
"""The part of torch that the stub names: mypy would read torch itself for 20 s."""


def test_a_type_checker_sees_signatures(tmp_path):
    pytest.importorskip("mypy", reason="mypy is installed in torch's environment")
    shutil.copytree(ROOT / "aotops", tmp_path / "aotops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(ROOT / "frontends", tmp_path / "aotops/frontends", ignore=shutil.ignore_patterns("__pycache__"))
    stubs.write(BUILTIN, tmp_path / "aotops/frontends")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.pyi").write_text(TORCH)
    layers = "".join(f"class {name}(Module): ...\n" for name in LAYERS)
    (tmp_path / "torch/nn.pyi").write_text(f"class Module: ...\n{layers}")
    (tmp_path / "user.py").write_text(GOOD + "".join(f"{line}\n" for line in BAD))
    first = len(GOOD.splitlines()) + 1
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--no-site-packages",
        "--config-file=",
        "--follow-imports=silent",
        "user.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    errors = [line for line in done.stdout.splitlines() if line.startswith("user.py:")]
    assert [int(line.split(":")[1]) for line in errors] == [first + i for i in range(len(BAD))], (
        done.stdout + done.stderr
    )
    for error, words in zip(errors, BAD.values(), strict=True):
        assert words in error
