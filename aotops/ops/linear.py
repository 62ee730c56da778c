"""A linear layer: a product with a matrix of weights, a bias and an activation."""

from __future__ import annotations

from ..matrix import library_workspace, workspace_elements
from ..op import operator
from ..spec import TensorSpec, accumulate_dtype, check_dtype, check_floating, check_like, shape_text, size

ACTIVATIONS = (None, "relu", "gelu_tanh", "gelu", "silu")  # in the order of cuda_src/linear.h, which says so too
PARTS = 64  # cuda_src/linear.h: kParts


def _layer(op, x, weight, bias, activation):
    """Checks the inputs; gives the spec of the result."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{op}: activation is {activation!r}, expected None, {', '.join(map(repr, ACTIVATIONS[1:-1]))} or 'silu'"
        )
    check_floating(op, "x", x)
    check_floating(op, "weight", weight)
    check_dtype(op, "weight", weight, x.dtype)
    if len(x.shape) < 1:
        raise ValueError(f"{op}: x has shape (), expected at least one axis")
    if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: weight has shape {shape_text(weight.shape)}, expected (out, {x.shape[-1]}), to multiply "
            f"{shape_text(x.shape)}, the shape of x"
        )
    if bias is not None:
        check_like(op, "bias", bias, "weight's first axis", TensorSpec(weight.shape[:1], x.dtype))
    return TensorSpec((*x.shape[:-1], weight.shape[0]), x.dtype)


def _before(y, activation):
    """The spec of what goes into the activation: of no columns where there is none."""
    return y if activation is not None else TensorSpec((*y.shape[:-1], 0), y.dtype)


def _infer(x, weight, bias, activation, allow_tf32):
    y = _layer("linear", x, weight, bias, activation)
    work = library_workspace(size(y.shape), x.shape[-1])
    return y, _before(y, activation), TensorSpec((work,), accumulate_dtype(x.dtype))


def _infer_backward(dy, x, weight, bias, before, activation, allow_tf32):
    op = "linear_backward"
    y = _layer(op, x, weight, bias, activation)
    check_like(op, "dy", dy, "y", y)
    if before is not None:
        check_like(op, "before", before, "what goes into the activation", _before(y, activation))
    slope = 0 if activation is None else workspace_elements(size(y.shape), x.dtype)
    work = slope + PARTS * weight.shape[0] + library_workspace(size(y.shape), x.shape[-1])
    return x, weight, TensorSpec(weight.shape[:1], x.dtype), TensorSpec((work,), accumulate_dtype(x.dtype))


_ATTRS = {"activation": "str?", "allow_tf32": "bool"}


@operator(
    inputs=("dy", "x", "weight", "bias", "before"),
    outputs=("dx", "dweight", "dbias"),
    workspace=("workspace",),
    infer=_infer_backward,
    optional=("bias", "before", "dx", "dweight", "dbias"),
    attrs=_ATTRS,
    like={"dx": "x", "dweight": "weight"},
    batched=("dy", "x", "before", "dx"),
)
def linear_backward(dy, x, weight, bias, before, activation=None, allow_tf32=False):
    return (dy, x, weight, bias, before), (activation, allow_tf32)


@operator(
    inputs=("x", "weight", "bias"),
    outputs=("y",),
    residuals=("before",),
    workspace=("workspace",),
    infer=_infer,
    optional=("bias",),
    attrs=_ATTRS,
    backward=linear_backward,
    batched=("x", "y", "before"),
    costly=True,
    autocast={"cpu": "autocast", "cuda": "autocast"},
)
def linear(x, weight, bias=None, activation=None, allow_tf32=False):
    """A linear layer and what follows it: ``activation(x @ weight.T + bias)``, as ``torch.nn.functional.linear``.

    Args:
        x: (..., in); float16, bfloat16, float32 or float64.
        weight: (out, in), of x's dtype.
        bias: (out,), of x's dtype, or None.
        activation: None, "relu", "gelu", "gelu_tanh" (GELU in its tanh approximation) or "silu".
        allow_tf32: float32 may be multiplied in TF32 on a GPU, with 10 bits of each factor.

    Returns:
        (..., out), of the same dtype. Sums are taken, and the bias and the activation applied, in float32 (float64 for
        float64), and rounded once.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes.
        ValueError: shapes that do not fit; another activation; tensors on different devices.
    """
    return (x, weight, bias), (activation, allow_tf32)
