"""The built-in operators: every module in this folder defines one, under its own name; ``_*.py`` are shared helpers."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ..library import Library

BUILTIN = Library(
    "aotops",
    [
        getattr(import_module(f"{__name__}.{name}"), name)
        for name in sorted(m.name for m in iter_modules(__path__) if not m.name.startswith("_"))
    ],
    cases="aotops.testing.cases",
)
OPS = BUILTIN.ops
