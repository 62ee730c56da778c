"""Functions of tvm-ffi that are hosted (hosting.py): symbols of a library, or objects in place of one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .library import Library, check, load
from .op import Op

PREFIX = "__tvm_ffi_"


class FunctionLibrary(Library):
    """Function objects of tvm-ffi as a library.

    Args:
        source: a ``tvm_ffi.Module``, or functions by name.

    Raises:
        TypeError: it is something else.
    """

    def __init__(self, name: str, source: Any) -> None:
        super().__init__(name, ())
        self._source, self._look_up = source, _look_up_in(source)
        self._kept: dict[str, Any] = {}  # for good: calls that C has bound hold no reference

    @property
    def path(self) -> Path:
        """In texts, in place of a file."""
        return Path(f"{type(self._source).__name__} {self.name}")

    @property
    def exported(self) -> Iterable[str]:
        return list(self._source) if isinstance(self._source, Mapping) else ()

    def address(self, symbol: str) -> int | None:
        """The address of a function object.

        Raises:
            TypeError: the object of this name is no ``tvm_ffi.Function``.
        """
        found = self._kept.get(symbol) or self._look_up(symbol)
        if found is None:
            return None
        if not hasattr(found, "__chandle__"):
            raise TypeError(
                f"aotops.load: {symbol} is {found!r:.80}, expected a tvm_ffi.Function: tvm_ffi.convert(function) is one"
            )
        handle: int = found.__chandle__()
        check(load().aot_function_object(self.name.encode(), symbol.encode(), ctypes.c_void_p(handle)))
        self._kept[symbol] = found
        return handle

    @cached_property
    def registered(self) -> bool:
        check(load().aot_library(self.name.encode(), None, 0))
        return True


def _look_up_in(source: Any) -> Callable[[str], Any]:
    if isinstance(source, Mapping):
        return dict(source).get
    if hasattr(source, "implements_function") and hasattr(source, "get_function"):
        return lambda name: source.get_function(name, True) if source.implements_function(name, True) else None
    raise TypeError(
        f"aotops.load: path is {source!r:.80}, expected a path, a tvm_ffi.Module, or a dict of tvm_ffi.Function by name"
    )


def symbol_in(library: Library, name: str) -> str | None:
    """The function of tvm-ffi of this name, in a library that has no other one so called."""
    if isinstance(library, FunctionLibrary):
        return name
    symbols = (name, f"{name}_cpu", f"{name}_cuda")
    if any(library.address(symbol) for symbol in symbols):
        return None
    return next((PREFIX + symbol for symbol in symbols if library.address(PREFIX + symbol)), None)


def check_order(op: Op, order: Sequence[str | None]) -> None:
    """Raises TypeError or ValueError if an order does not name each tensor and attribute once."""
    every = (*op.inputs, *op.outputs, *op.attrs)
    if isinstance(order, str) or not all(name is None or isinstance(name, str) for name in order):
        raise TypeError(f"{op.name}: order is {order!r:.80}, expected the names of the function's arguments")
    if sorted(name for name in order if name is not None) != sorted(every):
        raise ValueError(f"{op.name}: order is {', '.join(map(str, order))}, expected each of {', '.join(every)} once")
