"""Cells on the operators, with the arguments, parameters and state of MindSpore's."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common import initializer
from mindspore.rewrite.common import namespace

from aotops.ops import BUILTIN

from .primitives import of

_ops = of(BUILTIN)


def _beside(x, parameter):
    """A norm's parameter as it is where the operator takes it, float32 beside 16 bits, or else in x's dtype."""
    if parameter.dtype == ms.float32 and x.dtype in (ms.float16, ms.bfloat16):
        return parameter
    return parameter.astype(x.dtype)


class LayerNorm(nn.LayerNorm):
    """``mindspore.nn.LayerNorm`` on the library's kernel: the same arguments, defaults, parameters and state."""

    def construct(self, input_x):
        is_plain = self.begin_norm_axis == self.begin_params_axis
        if is_plain and self.begin_norm_axis == -len(self.normalized_shape):  # of an input of unknown rank too
            shape = tuple(self.normalized_shape)
        else:
            shape = input_x.shape[self.begin_norm_axis :]
        if is_plain:
            gamma, beta = _beside(input_x, self.gamma), _beside(input_x, self.beta)
            return _ops.layer_norm(input_x, shape, gamma, beta, self.epsilon)
        gamma, beta = self.gamma.astype(input_x.dtype), self.beta.astype(input_x.dtype)
        y = _ops.layer_norm(input_x, shape, None, None, self.epsilon)
        return y * gamma + beta


class RMSNorm(nn.Cell):
    """Root mean square normalization over the trailing axes ``normalized_shape``: the arguments, defaults and parameter
    of ``torch.nn.RMSNorm``, since mindspore.nn has none, and ``weight_offset``, which is added to the weight; the
    initial weight is 1 - weight_offset."""

    def __init__(self, normalized_shape, eps=None, elementwise_affine=True, dtype=ms.float32, weight_offset=0.0):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps, self.weight_offset = eps, float(weight_offset)
        self.weight = (
            ms.Parameter(ops.ones(self.normalized_shape, dtype) - weight_offset, name="weight")
            if elementwise_affine
            else None
        )

    def construct(self, x):
        weight = None if self.weight is None else _beside(x, self.weight)
        return _ops.rms_norm(x, self.normalized_shape, weight, self.eps, self.weight_offset)


class Linear(nn.Dense):
    """``mindspore.nn.Dense`` on the library's kernel: the same arguments, defaults, parameters and state, but for the
    activation, which is applied in the same kernel: None, "relu", "gelu", "gelu_tanh" or "silu"."""

    def __init__(self, *args, activation=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.applied = activation

    def construct(self, x):
        bias = self.bias.astype(x.dtype) if self.has_bias else None
        return _ops.linear(x, self.weight.astype(x.dtype), bias, self.applied)


class GELU(nn.GELU):
    """``mindspore.nn.GELU`` on the library's kernel: the same argument, the same default."""

    def construct(self, x):
        return _ops.gelu(x, self.approximate)


class Softmax(nn.Softmax):
    """``mindspore.nn.Softmax`` on the library's kernel: the same argument, an int, the same default."""

    def __init__(self, axis=-1):
        super().__init__(axis)
        self.axis = axis

    def construct(self, input):
        return _ops.softmax(input, self.axis)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """``mindspore.nn.CrossEntropyLoss`` on the library's kernel: the same arguments and defaults; weight, a tensor, is
    a constant. With a weight that is a Parameter, with labels that are probabilities, and with more axes than (N, C) it
    calls MindSpore's own."""

    def __init__(self, weight=None, *args, **kwargs):
        super().__init__(weight, *args, **kwargs)
        self.learns = isinstance(weight, ms.Parameter)

    def construct(self, logits, labels):
        if self.learns or logits.ndim > 2 or labels.dtype not in (ms.int32, ms.int64):
            return super().construct(logits, labels)
        wide = ms.float64 if logits.dtype == ms.float64 else ms.float32
        weight = None if self.weight is None else self.weight.astype(wide)
        options = self.ignore_index, self.reduction, self.label_smoothing
        return _ops.cross_entropy(logits, labels, *options, None, weight)


class LinearCrossEntropyLoss(nn.Dense):
    """The head of a model and its loss without the logits (``linear_cross_entropy``): the arguments, parameters and
    state of ``mindspore.nn.Dense``, and the options of the loss. ``construct(x, target)`` returns the loss."""

    def __init__(
        self,
        *args,
        ignore_index=-100,
        reduction="mean",
        label_smoothing=0.0,
        class_weight=None,
        z_loss=0.0,
        softcap=0.0,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.options = ignore_index, reduction, label_smoothing, None
        self.class_weight, self.more = class_weight, (z_loss, softcap)

    def construct(self, x, target):
        bias = self.bias.astype(x.dtype) if self.has_bias else None
        weight = self.weight.astype(x.dtype)
        return _ops.linear_cross_entropy(x, weight, target, bias, *self.options, self.class_weight, *self.more)


class LLTM(nn.Cell):
    """The cell of PyTorch's tutorial "Custom C++ and CUDA Extensions", its arguments, parameters and initial values.
    ``construct(input, (old_h, old_cell))`` returns new_h and new_cell.

    ``bias`` is (1, 3 * state_size), as in the code that comes with the tutorial. ``load_state_dict`` also accepts
    (3 * state_size,), as in the tutorial's text; ``mindspore.load_param_into_net`` does not.
    """

    def __init__(self, input_features, state_size, dtype=ms.float32):
        super().__init__()
        self.input_features, self.state_size = input_features, state_size
        shapes = {"weights": (3 * state_size, state_size + input_features), "bias": (1, 3 * state_size)}
        uniform = initializer.Uniform(state_size**-0.5)
        for name, shape in shapes.items():
            setattr(self, name, ms.Parameter(initializer.initializer(uniform, shape, dtype), name=name))

    def construct(self, input, state):
        weights, bias = self.weights.astype(input.dtype), self.bias.astype(input.dtype)
        return _ops.lltm(input, weights, bias, state[0], state[1])

    def _load_from_state_dict(self, state_dict, prefix, *args):
        bias = state_dict.get(f"{prefix}bias")
        if isinstance(bias, Tensor) and bias.shape == (3 * self.state_size,):
            state_dict[f"{prefix}bias"] = bias.reshape(1, -1)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Conv2d(nn.Conv2d):
    """``mindspore.nn.Conv2d`` on the library's kernel: the same arguments, defaults, parameters and state. With
    asymmetric padding, which pad_mode "same" may need, it calls MindSpore's own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        top, bottom, left, right = _conv2d_padding(self)
        self.symmetric = top == bottom and left == right and self.data_format == "NCHW"
        self.options = (self.stride, (top, left), self.dilation, self.group)

    def construct(self, x):
        if not self.symmetric:
            return super().construct(x)
        bias = self.bias.astype(x.dtype) if self.has_bias else None
        weight = self.weight.astype(x.dtype)
        return _ops.conv2d(x, weight, bias, *self.options)


def _conv2d_padding(cell: nn.Conv2d) -> tuple[int, int, int, int]:
    """Top, bottom, left, right. For pad_mode "same" with a stride other than 1, which depends on the image, values that
    are not symmetric."""
    if cell.pad_mode == "valid":
        return 0, 0, 0, 0
    if cell.pad_mode == "pad":
        padding = cell.padding
        return (padding,) * 4 if isinstance(padding, int) else tuple(padding)
    reach = [d * (k - 1) for d, k in zip(cell.dilation, cell.kernel_size, strict=True)]
    if cell.stride != (1, 1):
        return 0, 1, 0, 1
    return reach[0] // 2, reach[0] - reach[0] // 2, reach[1] // 2, reach[1] - reach[1] // 2


def _leave_unrewritten(modules: Sequence[type]) -> None:
    """Automatic mixed precision of level O1 rewrites the sources of Cells, and cannot rewrite these, which are named as
    the Cells of MindSpore's that they inherit from. MindSpore has no public list of those to leave as they are."""
    if kept := getattr(namespace, "_subtree_black_list", None):
        kept.extend(modules)


_leave_unrewritten((Conv2d, CrossEntropyLoss, GELU, LLTM, LayerNorm, Linear, LinearCrossEntropyLoss, RMSNorm, Softmax))
