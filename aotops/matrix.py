"""What the operators that multiply matrices have in common. The rules are those of cuda_src/matrix.h."""

from __future__ import annotations

from .spec import accumulate_dtype


def workspace_elements(n, dtype):
    """Elements of a workspace, which are of accumulate_dtype(dtype), that n of ``dtype`` take there; whatever follows
    begins at a multiple of 64."""
    words = n if dtype == accumulate_dtype(dtype) else (n + 1) // 2
    return (words + 63) // 64 * 64


def library_workspace(elements, k):
    """Elements of scratch for cuBLASLt, for a product of so many elements, each a sum of k terms: it may cut k into
    pieces. None for a small one."""
    work = elements * k
    return (1 << 23) if not isinstance(work, int) or work >= 1 << 24 else 0
