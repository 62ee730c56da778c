"""The host time of a call of a hosted function, three CPU tensors of four floats: a bare C function of the calling
convention, which knows nothing of aotops; the built-in ``add``; and, where it is installed, tvm-ffi's call of that same
C function.

    python -m benchmarks.hosted_call

Each figure is the least of the repeats, and every repeat runs all cases in turn.
"""

from __future__ import annotations

import tempfile
import timeit
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aotops
from aotops import call
from aotops.frontends import numpy as numpy_frontend
from aotops.frontends import torch as torch_frontend

from .call_overhead import device_name

REPEATS, CALLS = 60, 1000
KERNEL = """
#include <cstdint>
extern "C" __attribute__((visibility("default")))
int Sum(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, void *extra) {
  int64_t n = 1;
  for (int i = 0; i < ndims[2]; ++i) n *= shapes[2][i];
  const float *x = (const float *)params[0], *y = (const float *)params[1];
  for (int64_t i = 0; i < n; ++i) ((float *)params[2])[i] = x[i] + y[i];
  return 0;
}
"""
# The convention's arrays, made of tvm-ffi's tensors.
WITH_TVM_FFI = (
    "#include <tvm/ffi/tvm_ffi.h>\n"
    + KERNEL
    + """
using tvm::ffi::TensorView;
void call(TensorView x, TensorView y, TensorView z) {
  void *params[] = {x.data_ptr(), y.data_ptr(), z.data_ptr()};
  int ndims[] = {x.ndim(), y.ndim(), z.ndim()};
  int64_t *shapes[] = {const_cast<int64_t *>(x.shape().data()), const_cast<int64_t *>(y.shape().data()),
                       const_cast<int64_t *>(z.shape().data())};
  const char *dtypes[] = {"float32", "float32", "float32"};
  TVM_FFI_ICHECK_EQ(Sum(3, params, ndims, shapes, dtypes, nullptr, nullptr), 0);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(call, call);
"""
)


def cases() -> dict[str, Callable[[], Any]]:
    library = aotops.load(aotops.compile(KERNEL, name="hosted_call"))
    hosted = library.op("Sum", inputs=("x", "y"), outputs=("z",), same_spec_as={"z": "x"})
    x, y, z = (torch.rand(4) for _ in range(3))
    arrays = [t.numpy() for t in (x, y, z)]
    built_in = call.tensors(aotops.get("add"), (1.0, None))
    ours = call.tensors(hosted, ())
    public, public_hosted = torch_frontend.add, torch_frontend.of(library).Sum
    array_hosted = numpy_frontend.of(library).Sum
    found: dict[str, Callable[[], Any]] = {
        "torch, three tensors: built-in": lambda: built_in(x, y, z),
        "torch, three tensors: hosted": lambda: ours(x, y, z),
        "NumPy, three arrays: built-in": lambda: built_in(*arrays),
        "NumPy, three arrays: hosted": lambda: ours(*arrays),
        "torch, public function: built-in": lambda: public(x, y),
        "torch, public function: hosted": lambda: public_hosted(x, y),
        "NumPy, public function: built-in": lambda: numpy_frontend.add(arrays[0], arrays[1]),
        "NumPy, public function: hosted": lambda: array_hosted(arrays[0], arrays[1]),
    }
    if find_spec("tvm_ffi"):
        theirs = _tvm_ffi()
        found["torch, three tensors: tvm-ffi"] = lambda: theirs(x, y, z)
    return found


def _tvm_ffi() -> Callable[..., Any]:
    import tvm_ffi
    import tvm_ffi.cpp

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "call.cpp")
        source.write_text(WITH_TVM_FFI)
        return tvm_ffi.load_module(tvm_ffi.cpp.build("call", cpp_files=str(source), build_directory=folder)).call


def main() -> None:
    functions = cases()
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(REPEATS):
        for name, function in functions.items():
            best[name] = min(best[name], timeit.timeit(function, number=CALLS) / CALLS)
    print(f"nanoseconds a call: {device_name('cpu')}, torch {torch.__version__}, numpy {np.__version__}")
    for name, seconds in best.items():
        print(f"{name:36}{seconds * 1e9:8,.0f}")


if __name__ == "__main__":
    main()
