"""Tests of an operator, for authors of packages: ``check``, ``soak``, and the row of cases that they take.

    from aotops.testing import check
    assert check("gelu").ok

NumPy is needed, and whatever framework is tested. A function is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .row import F32, F64, FLOATING, I32, I64, Arrays, Bad, Case, Draw, Row, Shape, X

if TYPE_CHECKING:
    from .checker import check as check
    from .report import Report as Report
    from .soaking import soak as soak

__all__ = [
    "F32", "F64", "FLOATING", "I32", "I64", "Arrays", "Bad", "Case", "Draw", "Report", "Row", "Shape", "X", "check",
    "soak",
]  # fmt: skip

_HOMES = {"Report": "report", "check": "checker", "soak": "soaking"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aotops.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
