"""The product of two matrices."""

from __future__ import annotations

from math import prod

from aotops import Product, operator


@operator(
    inputs=("a", "b"),
    outputs=("y",),
    shapes={"y": lambda call: (call.a[0], call.b[1])},
    product=Product(("a", "b"), flops=lambda call: 2 * prod(call.a) * call.b[1]),
    dims=lambda call: {"a": "m k", "b": "k n", "y": "m n"},
    backward={
        "inputs": ("dy", "a", "b"),
        "outputs": ("da", "db"),
        "optional": ("da", "db"),
        "same_spec_as": {"da": "a", "db": "b"},
        "dims": lambda call: {"dy": "m n", "a": "m k", "b": "k n", "da": "m k", "db": "k n"},
    },
)
def multiply(a, b):
    """The matrix product ``a @ b``.

    Args:
        a: (m, k); float16, bfloat16, float32 or float64.
        b: (k, n); of a's dtype.

    Returns:
        (m, n), of the same dtype. Sums are taken in float32 (float64 for float64).

    Raises:
        TypeError: a dtype that is not floating, or two dtypes.
        ValueError: shapes that do not fit.
    """
    return (a, b), ()
