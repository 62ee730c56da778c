"""What the norms over trailing axes have in common: checks, shapes and the text of their docstrings.

The rules and texts are those of cuda_src/norm.h.
"""

from __future__ import annotations

from .spec import TensorSpec, accumulate_dtype, check_floating, check_like, shape_text, size


def axes(normalized_shape):
    if type(normalized_shape) is tuple:
        return normalized_shape
    return tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)


def partial_rows(rows, cols):
    """Rows of partial sums that a backward keeps; cuda_src/norm.h has the same rule and its reason."""
    fit = min(max((9 << 18) // max(cols, 1), 16), 528)
    return min(rows, fit) if isinstance(rows, int) else fit


def check_rows(op, slot, x, normalized_shape):
    check_floating(op, slot, x)
    n = len(normalized_shape)
    if n == 0:
        raise ValueError(f"{op}: normalized_shape is empty, expected at least one axis")
    if tuple(x.shape[-n:]) != normalized_shape:
        raise ValueError(
            f"{op}: {slot} has shape {shape_text(x.shape)}, expected its trailing axes to be normalized_shape "
            f"{shape_text(normalized_shape)}"
        )


def check_affine(op, x, normalized_shape, **affine):
    for slot, spec in affine.items():
        if spec is not None:
            check_like(op, slot, spec, "normalized_shape", TensorSpec(normalized_shape, x.dtype))


def stats_spec(x, normalized_shape, numbers):
    """Of each row's statistics, so many numbers."""
    return TensorSpec((*x.shape[: -len(normalized_shape)], numbers), accumulate_dtype(x.dtype))


def infer(op, numbers, inputs, normalized_shape):
    """``inputs`` by name, x (and residual) first. Returns the specs of y (and h) and of so many statistics a row."""
    x = inputs["x"]
    check_rows(op, "x", x, normalized_shape)
    rows = [slot for slot in ("x", "residual") if slot in inputs]
    for slot in rows[1:]:
        check_like(op, slot, inputs[slot], "x", x)
    check_affine(op, x, normalized_shape, **{slot: inputs[slot] for slot in inputs if slot not in rows})
    return *(x for _ in rows), stats_spec(x, normalized_shape, numbers)


def infer_backward(op, name, numbers, gradients, x, weight, stats, normalized_shape):
    """``name``: of x; ``gradients`` by name, ``stats`` by name. Returns the specs of dx, of the sums over the rows, as
    many as there are ``numbers``, and of the workspace."""
    check_rows(op, name, x, normalized_shape)
    for slot, spec in gradients.items():
        check_like(op, slot, spec, name, x)
    check_affine(op, x, normalized_shape, weight=weight)
    for slot, spec in stats.items():
        if spec is not None:
            what = "each row's mean and rstd" if numbers == 2 else "each row's rstd"
            check_like(op, slot, spec, what, stats_spec(x, normalized_shape, numbers))
    rows, cols = size(x.shape[: -len(normalized_shape)]), size(normalized_shape)
    work = numbers * partial_rows(rows, cols) * cols + (numbers * rows if None in stats.values() else 0)
    affine = TensorSpec(normalized_shape, x.dtype)
    return x, *(affine for _ in range(numbers)), TensorSpec((work,), accumulate_dtype(x.dtype))
