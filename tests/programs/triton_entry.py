"""Calls of an entry of Triton kernels without a GPU: its plan, and what it tells a driver that runs nothing."""

from __future__ import annotations

import ctypes
import json
from ctypes import c_char_p, c_int, c_int64, c_void_p
from pathlib import Path

from aotops import library


class Driver:
    """tests/programs/fake_cuda.c, in the place of the driver."""

    def __init__(self, file: Path) -> None:
        self._lib = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        self._lib.fake_report.restype = c_char_p

    def __getattr__(self, name):
        return getattr(self._lib, f"fake_{name}")

    def told(self) -> list[str]:
        """The lines since the last time."""
        lines = self._lib.fake_report().decode().splitlines()
        self._lib.fake_reset()
        return lines


class Entry:
    """An entry's functions. A tensor is (address, shape, dtype)."""

    def __init__(self, file: Path, name: str) -> None:
        self.lib, self.symbol = ctypes.CDLL(str(file)), f"aot_{name}_cuda"
        self.lib.aot_last_error.restype = c_char_p

    def call(self, tensors, attrs="", stream=0) -> None:
        with _extra(attrs) as extra:
            self._checked(getattr(self.lib, self.symbol)(*_arguments(tensors), c_void_p(stream), extra))

    def plan(self, tensors, attrs="", capability=90):
        text = ctypes.create_string_buffer(1 << 16)
        with _extra(attrs) as extra:
            function = getattr(self.lib, f"{self.symbol}Plan")
            self._checked(function(*_arguments(tensors), extra, capability, text, len(text)))
        return json.loads(text.value)

    def init(self, attrs="") -> None:
        with _extra(attrs) as extra:
            self._checked(getattr(self.lib, f"{self.symbol}Init")(None, None, None, extra))

    def _checked(self, status: int) -> None:
        if status:
            raise library.ERRORS[status](self.lib.aot_last_error().decode())


class _extra:
    def __init__(self, attrs: str) -> None:
        self.attrs = attrs

    def __enter__(self):
        self.made = c_void_p(library.load().aot_extra_new(self.attrs.encode()))
        return self.made

    def __exit__(self, *error):
        library.load().aot_extra_delete(self.made)


def _arguments(tensors):
    n = len(tensors)
    rows = [(c_int64 * max(1, len(shape)))(*shape) for _, shape, _ in tensors]
    return (
        c_int(n),
        (c_void_p * n)(*(address for address, _, _ in tensors)),
        (c_int * n)(*(len(shape) for _, shape, _ in tensors)),
        (ctypes.POINTER(c_int64) * n)(*(ctypes.cast(row, ctypes.POINTER(c_int64)) for row in rows)),
        (c_char_p * n)(*(dtype.encode() for _, _, dtype in tensors)),
    )
