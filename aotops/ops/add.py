"""a + b. Its gradient is the gradient that came in, twice: an alias, no kernel."""

from __future__ import annotations

from ..op import operator
from ..spec import check_floating, check_like


def _infer(a, b):
    check_floating("add", "a", a)
    check_like("add", "b", b, "a", a)
    return (a,)


@operator(
    inputs=("dy",),
    outputs=("da", "db"),
    infer=lambda dy: (dy, dy),
    alias={"da": "dy", "db": "dy"},
    batched=("dy", "da", "db"),
    elementwise=True,
)
def add_backward(dy):
    return (dy,), ()


@operator(
    inputs=("a", "b"),
    outputs=("y",),
    infer=_infer,
    backward=add_backward,
    like={"y": "a"},
    batched=("a", "b", "y"),
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
