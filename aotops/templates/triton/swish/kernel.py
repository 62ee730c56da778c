"""The kernels, y = x * sigmoid(beta * x) and its gradient."""

import triton
import triton.language as tl


@triton.jit
def swish_kernel(x_ptr, y_ptr, n, beta, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    x = tl.load(x_ptr + at, mask=here).to(tl.float32)
    y = x / (1 + tl.exp(-beta * x))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def swish_backward_kernel(dy_ptr, x_ptr, dx_ptr, n, beta, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    dy = tl.load(dy_ptr + at, mask=here).to(tl.float32)
    x = tl.load(x_ptr + at, mask=here).to(tl.float32)
    s = 1 / (1 + tl.exp(-beta * x))
    dx = dy * (s + beta * x * s * (1 - s))
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=here)
