"""The tables that dispatcher.py and public.py fill as operators are registered. Derivatives, which are imported before
both, read them when they run."""

from __future__ import annotations

from typing import Any

from aotops.hosting import Namespace
from aotops.library import Library
from aotops.op import Op

dispatched: dict[Op, Any] = {}
"""The operator of torch's dispatcher for each operator and backward that has a kernel."""
in_c: set[Op] = set()
"""Operators whose kernels for the dispatcher are in C."""
namespaces: dict[Library, Namespace] = {}
"""The functions of each library, which rules and formulas call. torch.compile reads it."""
builtins: dict[Op, Any] = {}
"""The builtin of each public function that serves plain calls in C."""
