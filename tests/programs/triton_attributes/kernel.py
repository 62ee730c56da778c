"""Kernels that need more of a launch than a grid."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, y_ptr, M, N, B: tl.constexpr, EARLY: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[B, B])
    y = tl.make_tensor_descriptor(y_ptr, shape=[M, N], strides=[N, 1], block_shape=[B, B])
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i, j = tl.program_id(0) * B, tl.program_id(1) * B
    y.store([i, j], x.load([i, j]))
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def twice_kernel(x_ptr, y_ptr, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def rows_kernel(x_ptr, y_ptr, M, N, B: tl.constexpr, num_stages: tl.constexpr):
    at = tl.arange(0, B)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=num_stages):
        here = at < N
        tl.store(y_ptr + row * N + at, tl.load(x_ptr + row * N + at, mask=here) + num_stages, mask=here)


@triton.jit
def copy_rows_kernel(x_ptr, y_ptr, M, N, B: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[1, B])
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        value = x.load([row, 0])
        at = tl.arange(0, B)
        tl.store(y_ptr + row * N + at, value.reshape([B]), mask=at < N)


@triton.jit
def large_kernel(a_ptr, b_ptr, c_ptr, K, B: tl.constexpr):
    m, k = tl.arange(0, B), tl.arange(0, B)
    total = tl.zeros([B, B], tl.float32)
    for start in range(0, K, B):
        a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k[:, None]) * B + m[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + m[:, None] * B + m[None, :], total)
