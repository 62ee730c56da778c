"""The product of matrices, batched."""

from __future__ import annotations

from ..matrix import library_workspace
from ..op import operator
from ..spec import TensorSpec, accumulate_dtype, check_dtype, check_floating, check_like, shape_text, size


def _product(op, a, b, transpose_a, transpose_b):
    """Checks both; gives the spec of their product."""
    check_floating(op, "a", a)
    check_floating(op, "b", b)
    check_dtype(op, "b", b, a.dtype)
    for slot, x in (("a", a), ("b", b)):
        if len(x.shape) < 2:
            raise ValueError(f"{op}: {slot} has shape {shape_text(x.shape)}, expected at least two axes")
    m, k = reversed(a.shape[-2:]) if transpose_a else a.shape[-2:]
    inner, n = reversed(b.shape[-2:]) if transpose_b else b.shape[-2:]
    if inner != k:
        expected = f"(..., n, {k})" if transpose_b else f"(..., {k}, n)"
        raise ValueError(
            f"{op}: b has shape {shape_text(b.shape)}, expected {expected}, to multiply {shape_text(a.shape)}, "
            "the shape of a"
        )
    few, many = sorted((a.shape[:-2], b.shape[:-2]), key=len)
    few = (1,) * (len(many) - len(few)) + tuple(few)
    if any(i != j and i != 1 and j != 1 for i, j in zip(few, many, strict=True)):
        raise ValueError(
            f"{op}: b has shape {shape_text(b.shape)}, whose leading axes do not broadcast with those of "
            f"{shape_text(a.shape)}, the shape of a"
        )
    batch = (j if i == 1 else i for i, j in zip(few, many, strict=True))
    return TensorSpec((*batch, m, n), a.dtype), k


def _infer(a, b, transpose_a, transpose_b, allow_tf32):
    y, k = _product("matmul", a, b, transpose_a, transpose_b)
    return y, TensorSpec((library_workspace(size(y.shape), k),), accumulate_dtype(a.dtype))


def _infer_backward(dy, a, b, transpose_a, transpose_b, allow_tf32):
    op = "matmul_backward"
    y, k = _product(op, a, b, transpose_a, transpose_b)
    check_like(op, "dy", dy, "y", y)
    # a's and b's gradients of every product, where a matrix is broadcast; matmul.h says where they are summed at once
    batch, batch_a, batch_b = (size(x.shape[:-2]) for x in (y, a, b))
    sum_a = batch * size(a.shape[-2:]) if batch_a != batch else 0
    sum_b = batch * size(b.shape[-2:]) if batch_b != batch and (transpose_a or batch_a != batch or batch_b != 1) else 0
    work = sum_a + sum_b + library_workspace(size(y.shape), k)
    return a, b, TensorSpec((work,), accumulate_dtype(a.dtype))


_ATTRS = {"transpose_a": "bool", "transpose_b": "bool", "allow_tf32": "bool"}


@operator(
    inputs=("dy", "a", "b"),
    outputs=("da", "db"),
    workspace=("workspace",),
    infer=_infer_backward,
    optional=("da", "db"),
    attrs=_ATTRS,
    like={"da": "a", "db": "b"},
    batched=("dy", "a", "b", "da", "db"),
    aligned=True,
)
def matmul_backward(dy, a, b, transpose_a=False, transpose_b=False, allow_tf32=False):
    return (dy, a, b), (transpose_a, transpose_b, allow_tf32)


@operator(
    inputs=("a", "b"),
    outputs=("y",),
    workspace=("workspace",),
    infer=_infer,
    attrs=_ATTRS,
    backward=matmul_backward,
    batched=("a", "b", "y"),
    aligned=True,
    autocast={"cpu": "autocast", "cuda": "autocast"},
)
def matmul(a, b, transpose_a=False, transpose_b=False, allow_tf32=False):
    """The matrix product ``a @ b``, of each pair of matrices along the leading axes, which broadcast.

    Args:
        a: (..., m, k), or (..., k, m) with transpose_a; float16, bfloat16, float32 or float64.
        b: (..., k, n), or (..., n, k) with transpose_b; of a's dtype.
        transpose_a, transpose_b: the last two axes change places first; nothing is copied for it. In torch, NumPy and
            CuPy one need not say so: a transposed view, such as ``a.mT``, is taken as it lies.
        allow_tf32: float32 may be multiplied in TF32 on a GPU, with 10 bits of each factor.

    Returns:
        (..., m, n), of the same dtype. Sums are taken in float32 (float64 for float64), and rounded once.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes.
        ValueError: shapes that do not fit; fewer than two axes; tensors on different devices.
    """
    return (a, b), (transpose_a, transpose_b, allow_tf32)
