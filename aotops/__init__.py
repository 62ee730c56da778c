"""CUDA and CPU kernels in one plain shared library, callable and differentiable in every framework.

Use the built-in operators through a frontend: ``from aotops.frontends import torch`` (or numpy, cupy, jax, mindspore).
The functions here are for kernels of your own. They are imported when they are first used, and need the standard
library alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compiler import compile as compile
    from .hosting import load as load
    from .library import Library as Library
    from .library import LibraryError as LibraryError
    from .op import Autocast as Autocast
    from .op import Op as Op
    from .op import Parts as Parts
    from .op import Product as Product
    from .op import operator as operator
    from .registry import get as get
    from .registry import libraries as libraries
    from .spec import TensorSpec as TensorSpec
    from .toolchain import CompileError as CompileError
    from .toolchain import cmake_dir as cmake_dir
    from .toolchain import include_dir as include_dir

__version__ = "0.2.0"

_HOMES = {
    "Autocast": "op",
    "CompileError": "toolchain",
    "Library": "library",
    "LibraryError": "library",
    "Op": "op",
    "Parts": "op",
    "Product": "op",
    "TensorSpec": "spec",
    "cmake_dir": "toolchain",
    "compile": "compiler",
    "get": "registry",
    "include_dir": "toolchain",
    "libraries": "registry",
    "load": "hosting",
    "operator": "op",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aotops' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
