"""The cases that are measured: what the rows of a library's operators say, in the shapes and dtypes asked for.

A library's rows are ``CASES`` of the module that it names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from .. import registry
from ..library import Library
from ..ops import BUILTIN, OPS
from .enlarged import enlarged
from .work import Rows, Shape, Work

_folder: Path | None = None


def use(folder: Path | None) -> None:
    """Uses the rows in this folder for the built-in operators."""
    global _folder
    _folder = folder
    find.cache_clear()


def folder() -> Path | None:
    return _folder


def rows(library: Library = BUILTIN) -> Mapping[str, Any]:
    """A library's rows, by operator.

    Raises:
        LookupError: the library names no module of cases, or there are no rows in the folder.
        ImportError: the module does not import.
    """
    if library.name == BUILTIN.name and _folder is not None:
        return _loaded(_folder)
    if library.cases is None:
        raise LookupError(f"bench: the library {library.name} has no cases: expected Library(..., cases=MODULE)")
    return import_module(library.cases).CASES


@cache
def _loaded(folder: Path) -> Mapping[str, Any]:
    name = "aotops_bench_rows"
    spec = spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None or not (folder / "__init__.py").exists():
        raise LookupError(
            f"bench: there are no rows in {folder}; --cases names their folder, tests/cases of a checkout"
        )
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CASES


def row(name: str) -> Any:
    """The row of an operator by the name that the registry knows it by, or None."""
    op = registry.get(name)
    return rows(op.library).get(op.name)


def works(ops: Iterable[str] | None = None) -> list[Work]:
    """The work of these operators, by the names that the registry knows them by; by default the built-in ones.

    Raises:
        LookupError: an operator has no row.
    """
    return [replace(work, op=name) for name in (OPS if ops is None else ops) for work in _works(name)]


def _works(name: str) -> Sequence[Work]:
    op, found = registry.get(name), row(name)
    if found is None and op.library.name == BUILTIN.name:  # --cases may name a few rows
        return ()
    if found is None:
        raise LookupError(f"bench: {op.library.cases} has no row of {op.name}")
    return getattr(found, "bench", ()) or (enlarged(op, found.cases),)


@cache
def find(op: str, variant: str) -> Work:
    """Accepts results of other versions, too."""
    try:
        return next(work for work in works([op]) if work.variant == variant)
    except (LookupError, ImportError, StopIteration):
        return Rows("", "", variant=variant, op=op)


@dataclass(frozen=True)
class Case:
    work: Work
    pass_: str
    shape: Shape
    dtype: str

    def __reduce__(self) -> Any:
        return _found_again, (self.work.op, self.work.variant, self.pass_, self.shape, self.dtype)

    @property
    def bytes(self) -> int:
        return self.work.bytes(self.pass_, self.shape, self.dtype)

    @property
    def flops(self) -> int:
        return self.work.flops(self.pass_, self.shape)

    @property
    def small(self) -> bool:
        return self.work.small(self.shape)

    @property
    def inputs(self) -> list[tuple[str, Shape]]:
        """The letter and the shape of each."""
        tensors = self.work.tensors(self.shape)
        return [(letter, tensors[letter]) for letter in self.work.reads]

    def __str__(self) -> str:
        return f"{self.work.name} {self.pass_} {'x'.join(map(str, self.shape))} {self.dtype}"


def _found_again(op: str, variant: str, *rest: Any) -> Case:
    """A case that was pickled, without the functions of its work."""
    return Case(find(op, variant), *rest)


def cases(
    device: str,
    dtypes: list[str],
    ops: Sequence[str] | None = None,
    shapes: list[Shape] | None = None,
    passes: list[str] | None = None,
    quick: bool = False,
) -> Iterator[Case]:
    """The work of operators by the names that the registry knows them by. Without TF32 on a CPU."""
    for work in works(ops):
        if work.tf32 and device == "cpu":
            continue
        for shape in dict.fromkeys(work.shapes(device, shapes, quick)):
            for dtype in dtypes:
                for pass_ in work.passes:
                    if dtype in work.dtypes and pass_ in (passes or work.passes):
                        yield Case(work, pass_, shape, dtype)
