"""The functions of the built-in operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotops.ops import BUILTIN, OPS

from .public import functions

__all__ = [*OPS]
globals().update(functions(BUILTIN))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
