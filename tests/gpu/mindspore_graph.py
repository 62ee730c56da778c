"""Every operator in MindSpore's graph mode, forward and gradient, against NumPy in float64.

    python tests/gpu/mindspore_graph.py [--device GPU|CPU]

A script by itself, for a machine whose MindSpore has no GPU kernels of its own: whatever is not one of our operators
happens on the host, in NumPy. Prints a line a case; exits with 1 where one fails.
"""

from __future__ import annotations

import argparse
import math
import sys

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from aotops.frontends import mindspore as aot

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-12}
"""Of a result's largest magnitude, or of 1."""

rng = np.random.default_rng(0)


# ------------------------------------------------------------------------------------------------------- host tensors


def to_device(array: np.ndarray, dtype: str) -> ms.Tensor:
    if dtype != "bfloat16":
        return ms.Tensor(array.astype(dtype))
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return ms.Tensor(ms.Tensor.convert_bytes_to_tensor(rounded.tobytes(), array.shape, ms.bfloat16))


def to_host(tensor: ms.Tensor) -> np.ndarray:
    if tensor.dtype != ms.bfloat16:
        return tensor.asnumpy().astype(np.float64)
    bits = np.frombuffer(tensor.get_bytes(), np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64).reshape(tensor.shape)


# --------------------------------------------------------------------------------------------------------- references
# Each gives the results and, for the gradient dy of the first, the gradients of the inputs.


def add_reference(dy, a, b):
    return a + b, (dy, dy)


def gelu_reference(approximate):
    def reference(dy, x):
        if approximate == "none":
            cdf = 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))
            return x * cdf, (dy * (cdf + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)),)
        slope = math.sqrt(2 / math.pi)
        t = np.tanh(slope * (x + 0.044715 * x**3))
        return x / 2 * (1 + t), (dy * ((1 + t) / 2 + x / 2 * (1 - t * t) * slope * (1 + 3 * 0.044715 * x * x)),)

    return reference


def layer_norm_reference(ndim, eps, has_weight, has_bias):
    def reference(dy, x, *affine):
        weight = affine[0] if has_weight else 1.0
        axes, rows = tuple(range(-ndim, 0)), tuple(range(x.ndim - ndim))
        rstd = 1 / np.sqrt(x.var(axes, keepdims=True) + eps)
        xhat, g = (x - x.mean(axes, keepdims=True)) * rstd, dy * weight
        dx = rstd * (g - g.mean(axes, keepdims=True) - xhat * (g * xhat).mean(axes, keepdims=True))
        dweight, dbias = (dy * xhat).sum(rows), dy.sum(rows)
        grads = (dx, *[dweight] * has_weight, *[dbias] * has_bias)
        return xhat * weight + (affine[-1] if has_bias else 0.0), grads

    return reference


# --------------------------------------------------------------------------------------------------------------- cells


class Add(nn.Cell):
    def construct(self, a, b):
        return aot.add(a, b)


class Gelu(nn.Cell):
    def __init__(self, approximate):
        super().__init__()
        self.approximate = approximate

    def construct(self, x):
        return aot.gelu(x, self.approximate)


class LayerNorm(nn.Cell):
    def __init__(self, shape, eps):
        super().__init__()
        self.shape, self.eps = shape, eps

    def construct(self, x):
        return aot.layer_norm(x, self.shape, eps=self.eps)


class LayerNormWeight(LayerNorm):
    def construct(self, x, weight):
        return aot.layer_norm(x, self.shape, weight, eps=self.eps)


class LayerNormBias(LayerNorm):
    def construct(self, x, bias):
        return aot.layer_norm(x, self.shape, None, bias, self.eps)


class LayerNormAffine(LayerNorm):
    def construct(self, x, weight, bias):
        return aot.layer_norm(x, self.shape, weight, bias, self.eps)


class Gradient(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.grad = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, dy, *inputs):
        return self.grad(self.net)(*inputs, dy)


# --------------------------------------------------------------------------------------------------------------- cases


def cases():
    """name, a cell, its reference, the inputs' shapes."""
    for shape in ((), (1,), (7, 33), (1024, 257)):
        yield f"add {shape}", Add(), add_reference, (shape, shape)
    for approximate in ("none", "tanh"):
        for shape in ((), (7, 33), (1024, 257)):
            yield f"gelu {approximate} {shape}", Gelu(approximate), gelu_reference(approximate), (shape,)
    eps = 1e-3
    cells = ((LayerNorm, 0, 0), (LayerNormWeight, 1, 0), (LayerNormBias, 0, 1), (LayerNormAffine, 1, 1))
    for shape, normalized in (((5, 33), (33,)), ((3, 4, 5), (4, 5)), ((2100, 768), (768,)), ((3, 20000), (20000,))):
        for cell, weight, bias in cells:
            reference = layer_norm_reference(len(normalized), eps, weight, bias)
            shapes = (shape, *[normalized] * (weight + bias))
            yield f"layer_norm {cell.__name__} {shape}", cell(normalized, eps), reference, shapes


def dynamic_cases():
    """name, a cell, its reference, the inputs' shapes where n is unknown. Forward only: the gradient of a result of
    unknown shape begins with a kernel of MindSpore's own."""
    yield "add", Add(), add_reference, lambda n: ((n, 5), (n, 5))
    yield "gelu", Gelu("tanh"), gelu_reference("tanh"), lambda n: ((n, 5),)
    reference = layer_norm_reference(1, 1e-3, 1, 1)
    yield "layer_norm", LayerNormAffine((64,), 1e-3), reference, lambda n: ((n, 64), (64,), (64,))


def check(name: str, got: ms.Tensor, expected: np.ndarray, dtype: str) -> None:
    host = to_host(got)
    if str(got.dtype).lower() != dtype or host.shape != np.shape(expected):
        raise AssertionError(f"{name} is {got.dtype} {host.shape}, expected {dtype} {np.shape(expected)}")
    error = np.max(np.abs(host - expected)) / max(1.0, np.max(np.abs(expected)))
    if not error <= TOLERANCE[dtype]:
        raise AssertionError(f"{name} is off by {error:.2e}, expected at most {TOLERANCE[dtype]:.0e}")


def run(cell: nn.Cell, reference, shapes, dtype: str) -> None:
    inputs = [to_device(rng.standard_normal(shape), dtype) for shape in shapes]
    y = cell(*inputs)
    dy = to_device(rng.standard_normal(y.shape), dtype)
    expected, expected_grads = reference(to_host(dy), *map(to_host, inputs))
    check("the result", y, expected, dtype)
    for i, (grad, of) in enumerate(zip(Gradient(cell)(dy, *inputs), expected_grads, strict=True)):
        check(f"gradient {i}", grad, of, dtype)


def run_dynamic(cell: nn.Cell, reference, shapes, dtype: str) -> None:
    cell.set_inputs(*(ms.Tensor(shape=[d or None for d in shape], dtype=getattr(ms, dtype)) for shape in shapes(0)))
    for n in (2, 3000, 1):
        inputs = [to_device(rng.standard_normal(shape), dtype) for shape in shapes(n)]
        expected, _ = reference(to_host(inputs[0]), *map(to_host, inputs))
        check(f"the result for {n}", cell(*inputs), expected, dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("GPU", "CPU"), default="GPU")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), nargs="*", default=tuple(TOLERANCE))
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE, device_target=args.device)

    failures = 0
    for dtype in args.dtype:
        todo = [(name, run, case) for name, *case in cases()]
        todo += [(f"{name} of unknown shape", run_dynamic, case) for name, *case in dynamic_cases()]
        for name, do, case in todo:
            try:
                do(*case, dtype)
                print(f"ok    {dtype:8} {name}", flush=True)
            except Exception as error:
                failures += 1
                print(f"FAIL  {dtype:8} {name}: {type(error).__name__}: {str(error).splitlines()[0][:300]}", flush=True)
    print(f"{args.device}: {failures} failed" if failures else f"{args.device}: all passed")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
