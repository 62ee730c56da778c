"""Batched matrix product."""

from __future__ import annotations

from math import prod

from ..op import Autocast, Product, operator


def _product(call):
    m, n = call.a[-1 if call.transpose_a else -2], call.b[-2 if call.transpose_b else -1]
    few, many = sorted((call.a[:-2], call.b[:-2]), key=len)
    few = (1,) * (len(many) - len(few)) + tuple(few)
    return (*(j if i == 1 else i for i, j in zip(few, many, strict=True)), m, n)


def _factors(call, prefix=""):
    """The axes of a and b, or of their gradients."""
    a, b = "... k m" if call.transpose_a else "... m k", "... n k" if call.transpose_b else "... k n"
    return {f"{prefix}a": a, f"{prefix}b": b}


def _fused_backward(m, dy, a, b, transpose_a, transpose_b):
    """Factors that broadcast are left to the kernel, which does not round the products that it sums."""
    if a.shape[:-2] != b.shape[:-2]:
        return NotImplemented
    da = m.matmul(b, dy, transpose_b, True) if transpose_a else m.matmul(dy, b, False, not transpose_b)
    db = m.matmul(dy, a, True, transpose_a) if transpose_b else m.matmul(a, dy, not transpose_a, False)
    return da, db


@operator(
    inputs=("a", "b"),
    outputs=("y",),
    workspace=("workspace",),
    shapes={"y": _product},
    attrs={"transpose_a": "bool", "transpose_b": "bool", "allow_tf32": "bool"},
    dims=lambda call: {**_factors(call), "y": "... m n"},
    product=Product(
        factors=("a", "b"),
        flops=lambda call: 2 * prod(_product(call)) * call.a[-2 if call.transpose_a else -1],
        fused=lambda m, a, b, transpose_a, transpose_b: m.matmul(a, b, transpose_a, transpose_b),
        fused_backward=_fused_backward,
    ),
    vmappable=("a", "b", "y"),
    vmap_same_rank=True,
    autocast=Autocast.LOWER,
    backward={
        "inputs": ("dy", "a", "b"),
        "outputs": ("da", "db"),
        "workspace": ("workspace",),
        "optional": ("da", "db"),
        "same_spec_as": {"da": "a", "db": "b"},
        "dims": lambda call: {"dy": "... m n", **_factors(call), **_factors(call, "d")},
        "vmappable": ("dy", "a", "b", "da", "db"),
        "vmap_same_rank": True,
    },
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
