"""The table: a row for each operator, which owns everything that is tried on it, in every frontend. It is installed as
``aotops.testing.cases``.

Each module in this folder is named as its operator, and has its ``ROW`` (aotops/testing/row.py says what of): a float64
reference, cases, how random calls are drawn, what is refused, what is the same in torch, and what ``aotops bench``
measures.

There is no row for a gradient: it is checked against finite differences of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import numpy as np

from aotops.ops import OPS
from aotops.spec import accumulate_dtype
from aotops.testing import FLOATING, Arrays, Case, Draw, Row
from aotops.testing.dtypes import is_floating, ml_dtypes, numpy_dtype
from aotops.testing.tolerances import allowed, apart, assert_close
from aotops.testing.trial import DTYPES, Trial, dtype_of, rounded, rounded_inputs

__all__ = [
    "CASES", "DTYPES", "FLOATING", "Arrays", "Case", "Draw", "Row", "allowed", "apart", "assert_close", "dtype_of",
    "is_floating", "ml_dtypes", "numpy_dtype", "rounded", "rounded_inputs",
]  # fmt: skip

CASES: dict[str, Row] = {
    name: import_module(f"{__name__}.{name}").ROW
    for name in sorted(module.name for module in iter_modules(__path__))
    if not name.startswith("_")
}

# A case is named by its operator and its place in the row.


@cache
def trial(name: str, index: int, dtype: str) -> Trial:
    case = CASES[name].cases[index]
    return Trial(CASES[name], case, dtype, f"{name} {case}")


@cache
def first_case(name: str) -> int:
    """A case of two axes or more and at least ten elements, with every input."""
    for i, case in enumerate(CASES[name].cases):
        x, *_ = case.shapes.values()
        if all(case.shapes.values()) and len(x) > 1 and 10 < math.prod(x) < 1000:
            return i
    raise AssertionError(f"{name} has no case of a small matrix")


def row_samples(name: str) -> Mapping[str, Case]:
    """The cases that are tried in every context, by the suffix of its name."""
    return CASES[name].samples or {"": CASES[name].cases[first_case(name)]}


def inputs(name: str, index: int, dtype: str) -> Arrays:
    """The case's inputs, rounded to the dtype, as float64; integers as they are."""
    return dict(trial(name, index, dtype).inputs)


def dtypes(name: str, index: int, dtype: str) -> dict[str, str]:
    """By input and result, the dtype of the case where ``dtype`` is tried; of floating ones."""
    slots = (*OPS[name].inputs, *OPS[name].outputs)
    return {slot: accumulate_dtype(dtype) if slot in CASES[name].cases[index].wide else dtype for slot in slots}


def output_gradients(name: str, index: int, dtype: str) -> tuple[np.ndarray | None, ...]:
    """A gradient of each result to start from; None for one of integers."""
    return trial(name, index, dtype).output_gradients


def assert_values(got: tuple[np.ndarray, ...], name: str, index: int, dtype: str) -> None:
    trial(name, index, dtype).assert_values(got)


def assert_gradients(got: dict[str, np.ndarray | None], name: str, index: int, dtype: str) -> None:
    """``got``: by input; None, or nothing, where the input is None or integers."""
    trial(name, index, dtype).assert_gradients(got)
