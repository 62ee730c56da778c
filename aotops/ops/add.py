"""a + b. Its gradient is the gradient that came in, twice: an alias, no kernel."""

from __future__ import annotations

from ..op import operator


@operator(
    inputs=("dy",),
    outputs=("da", "db"),
    alias={"da": "dy", "db": "dy"},
    vmappable=("dy", "da", "db"),
    elementwise=True,
)
def add_backward(dy):
    return (dy,), ()


@operator(
    inputs=("a", "b"),
    outputs=("y",),
    backward=add_backward,
    same_spec_as={"y": "a"},
    vmappable=("a", "b", "y"),
    elementwise=True,
    broadcast=True,
)
def add(a, b):
    """The sum ``a + b``.

    Args:
        a, b: float16, bfloat16, float32 or float64, both the same; any shapes that broadcast.

    Returns:
        Their sum, of the broadcast shape and the same dtype.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes.
        ValueError: shapes that do not broadcast; tensors on different devices.
    """
    return (a, b), ()
