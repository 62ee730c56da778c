"""One module per framework: ``from aotops.frontends import torch`` (or numpy, cupy, jax, mindspore).

Each has the same functions, with the same signatures. A frontend is imported, and with it its framework, only when it
is asked for.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

FRONTENDS = ("cupy", "jax", "mindspore", "numpy", "torch")


def __getattr__(name: str) -> ModuleType:
    if name.startswith("__"):
        raise AttributeError(name)
    if name not in FRONTENDS:
        raise AttributeError(f"aotops has no frontend {name!r}; there are {', '.join(FRONTENDS)}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return list(FRONTENDS)
