"""Triton kernels of the kinds that its users write first: elementwise, rows, random numbers, a gradient with partial
sums, a product, attention."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    total = tl.load(x_ptr + at, mask=here) + tl.load(y_ptr + at, mask=here)
    tl.store(out_ptr + at, total, mask=here)


@triton.jit
def softmax_kernel(y_ptr, x_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    y = e / tl.sum(e, axis=0)
    tl.store(y_ptr + row * stride + at, y.to(y_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def dropout_kernel(x_ptr, y_ptr, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    x = tl.load(x_ptr + at, mask=here)
    kept = tl.rand(seed, at) > p
    tl.store(y_ptr + at, tl.where(kept, x / (1 - p), 0.0).to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def norm_kernel(x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    here = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=here, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / columns
    centered = tl.where(here, x - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centered * centered, axis=0) / columns + eps)
    weight = tl.load(weight_ptr + at, mask=here).to(tl.float32)
    bias = tl.load(bias_ptr + at, mask=here).to(tl.float32)
    y = centered * rstd * weight + bias
    tl.store(y_ptr + row * columns + at, y.to(y_ptr.dtype.element_ty), mask=here)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_dweight_ptr, partial_dbias_ptr,
    rows, columns, groups, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    here = at < columns
    weight = tl.load(weight_ptr + at, mask=here, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for row in range(group, rows, groups):
        start = row * columns
        dy = tl.load(dy_ptr + start + at, mask=here, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + start + at, mask=here, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normal = tl.where(here, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        dweight += dy * normal
        dbias += dy
        scaled = dy * weight
        a = tl.sum(scaled * normal, axis=0) / columns
        b = tl.sum(scaled, axis=0) / columns
        dx = (scaled - normal * a - b) * rstd
        tl.store(dx_ptr + start + at, dx.to(dx_ptr.dtype.element_ty), mask=here)
    tl.store(partial_dweight_ptr + group * columns + at, dweight, mask=here)
    tl.store(partial_dbias_ptr + group * columns + at, dbias, mask=here)


@triton.jit
def column_sums_kernel(
    partial_dweight_ptr, partial_dbias_ptr, dweight_ptr, dbias_ptr, groups, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, groups, ROWS):
        row = start + tl.arange(0, ROWS)
        here = (row[:, None] < groups) & (column[None, :] < columns)
        at = row[:, None] * columns + column[None, :]
        dweight += tl.load(partial_dweight_ptr + at, mask=here, other=0.0)
        dbias += tl.load(partial_dbias_ptr + at, mask=here, other=0.0)
    total = tl.sum(dweight, axis=0).to(dweight_ptr.dtype.element_ty)
    tl.store(dweight_ptr + column, total, mask=column < columns)
    total = tl.sum(dbias, axis=0).to(dbias_ptr.dtype.element_ty)
    tl.store(dbias_ptr + column, total, mask=column < columns)


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak
    b_at = b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_at, mask=(m[:, None] < M) & (k[None, :] < K - start), other=0.0)
        b = tl.load(b_at, mask=(k[:, None] < K - start) & (n[None, :] < N), other=0.0)
        total = tl.dot(a, b, total)
        a_at += BLOCK_K * stride_ak
        b_at += BLOCK_K * stride_bk
    c_at = c_ptr + m[:, None] * stride_cm + n[None, :] * stride_cn
    tl.store(c_at, total.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, length, scale, CAUSAL: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * length * D
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    at = head + row[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=row[:, None] < length, other=0.0)
    most = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, D], tl.float32)
    end = tl.minimum(length, (tl.program_id(0) + 1) * BLOCK_M) if CAUSAL else length
    for start in range(0, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        below = column[:, None] < length
        k = tl.load(k_ptr + head + column[:, None] * D + d[None, :], mask=below, other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        seen = column[None, :] < length
        if CAUSAL:
            seen = seen & (column[None, :] <= row[:, None])
        score = tl.where(seen, score, -1.0e30)
        higher = tl.maximum(most, tl.max(score, axis=1))
        p = tl.where(seen, tl.exp(score - higher[:, None]), 0.0)
        shrunk = tl.exp(most - higher)
        v = tl.load(v_ptr + head + column[:, None] * D + d[None, :], mask=below, other=0.0)
        total = total * shrunk + tl.sum(p, axis=1)
        o = o * shrunk[:, None] + tl.dot(p.to(v.dtype), v)
        most = higher
    o = o / total[:, None]
    tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=row[:, None] < length)
