"""The driver that runs nothing (fake_cuda.c), compiled."""

import tempfile
from functools import cache
from pathlib import Path

from aotops import toolchain

SOURCE = Path(__file__).with_name("fake_cuda.c")


@cache
def fake_driver() -> Path:
    library = Path(tempfile.mkdtemp()) / "libfake_cuda.so"
    flags = ("-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    toolchain.run((*toolchain.cxx().command, *flags, str(SOURCE), "-o", str(library)), "compiling fake_cuda.c")
    return library
