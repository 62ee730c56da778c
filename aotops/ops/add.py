"""a + alpha * b. Its gradients are the one that came in, and alpha times that: aliases, no kernel."""

from __future__ import annotations

from ..op import operator


def _formula(m, a, b, alpha, b_number):
    return m.wide(a) + alpha * (b_number if b is None else m.wide(b))


@operator(
    inputs=("a", "b"),
    outputs=("y",),
    optional=("b",),
    attrs={"alpha": "float", "b_number": "float?"},
    same_spec_as={"y": "a"},
    formula=_formula,
    vmappable=("a", "b", "y"),
    elementwise=True,
    broadcast=True,
    backward={
        "inputs": ("dy",),
        "outputs": ("da", "db"),
        "alias": {"da": "dy", "db": "dy"},
        "alias_factor": {"db": "alpha"},
        "vmappable": ("dy", "da", "db"),
        "elementwise": True,
    },
)
def add(a, b, alpha=1):
    """The sum ``a + alpha * b``, as ``torch.add``.

    Args:
        a: float16, bfloat16, float32 or float64; any shape.
        b: of a's dtype, of any shape that broadcasts with a's; or a number of Python.
        alpha: a number. Numbers have no gradient, and what compiles a program compiles it again for another number.

    Returns:
        The sum, of the broadcast shape and a's dtype. It is computed in float32 (float64 for float64), where
        ``alpha * b`` may be fused with the sum, and rounded once.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes; an alpha that is no number.
        ValueError: shapes that do not broadcast; tensors on different devices; an alpha beyond float32's range for
            tensors that are not float64.
    """
    if isinstance(b, (int, float)):
        return (a, None), (alpha, int(b) if isinstance(b, bool) else b)
    return (a, b), (alpha, None)
