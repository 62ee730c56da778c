"""The functions by which tvm-ffi calls a library's operators: a source with one for each entry of other sources.

python aotops/tvm_ffi.py cuda_src/*.cpp >build/tvm_ffi_functions.cpp
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

_COMMENT = re.compile(r"//[^\n]*")
_ENTRY = re.compile(r"AOT_(?:CPU_)?ENTRY\s*\([^,()]*,\s*aot_(\w+)_(?:cpu|cuda)\s*,")
"""aotops/cmake/tvm_ffi.cmake has the same expressions."""


def functions(sources: Iterable[str]) -> str:
    """The source with ``__tvm_ffi_<op>`` for each operator whose entry is in these texts (cuda_src/tvm_ffi.h)."""
    names = sorted({name for text in sources for name in _ENTRY.findall(_COMMENT.sub("", text))})
    return "".join(["#include <tvm_ffi.h>\n", *(f"AOT_TVM_FFI({name})\n" for name in names)])


if __name__ == "__main__":
    print(functions(Path(file).read_text() for file in sys.argv[1:]), end="")
