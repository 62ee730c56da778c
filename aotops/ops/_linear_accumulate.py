"""linear's backward whose gradient of weight is added to a tensor."""

from __future__ import annotations

from ..op import operator
from .linear import linear

_BACKWARD = linear.backward
assert _BACKWARD is not None


@operator(
    inputs=(*_BACKWARD.inputs, "dweight"),
    outputs=("dx", "dbias"),
    workspace=_BACKWARD.workspace,
    shapes=_BACKWARD.shapes,
    optional=("bias", "pre_activation", "dx", "dbias"),
    attrs=linear.attrs,
    same_spec_as={"dx": "x"},
    mutates=("dweight",),
)
def linear_accumulate(dy, x, weight, bias=None, pre_activation=None, dweight=None, activation=None, allow_tf32=False):
    """The backward of ``linear``, which adds the gradient of weight to dweight inside the product.

    Args:
        dy: the gradient of linear's result.
        x: as linear's, and so are weight, bias and activation.
        pre_activation: the input of the activation, which is computed again if it is None.
        dweight: of weight's shape; float32, for float64 float64.

    Returns:
        The gradients of x and bias.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes; another one of dweight.
        ValueError: shapes that do not fit; another activation; tensors on different devices.
    """
    return (dy, x, weight, bias, pre_activation, dweight), (activation, allow_tf32)
