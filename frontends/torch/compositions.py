"""Arguments that torch's functions accept and the kernels do not, as compositions.

Each function here has the name of an operator and the arguments of torch's function, after ``function``, the public one
without them. It returns NotImplemented for a call that the kernel serves, or refuses, by itself. Only calls that the
builtin has refused come here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aotops.op import Op
from aotops.ops import BUILTIN
from aotops.spec import DTYPES, check_devices

from .mathematics import wide_dtype
from .private import legacy_get_string
from .registered import namespaces
from .tensors import Tensors, check_tensors, is_compiling, specs_of

_FLOATING = [getattr(torch, name) for name in DTYPES if name.startswith(("float", "bfloat")) and hasattr(torch, name)]


def add(function: Callable[..., Tensor], a: Any, b: Any, alpha: Any = 1) -> Any:
    """Tensors of two dtypes, as torch promotes them."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype == b.dtype:
        return NotImplemented
    dtype = torch.result_type(a, b)
    return function(a.to(dtype), b.to(dtype), alpha=alpha) if dtype in _FLOATING else NotImplemented


def matmul(function, a, b, transpose_a=False, transpose_b=False, allow_tf32=False) -> Any:
    """Vectors: (k) stands for (1, k) on the left and for (k, 1) on the right."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or min(a.dim(), b.dim()) == 0:
        return NotImplemented
    left, right = a.dim() == 1, b.dim() == 1
    if not (left or right) or (left and transpose_a) or (right and transpose_b):
        return NotImplemented
    y = function(a[None] if left else a, b[:, None] if right else b, transpose_a, transpose_b, allow_tf32)
    y = y.squeeze(-1) if right else y
    return y.squeeze(-1 if right else -2) if left else y


def softmax(function, x, dim=-1, dtype: torch.dtype | None = None) -> Any:
    """``dtype``: that x is converted to first."""
    if dtype is None or not isinstance(x, Tensor):
        return NotImplemented
    if dtype not in _FLOATING:
        raise TypeError(f"softmax: dtype is {dtype}, expected a floating dtype of torch")
    return function(x.to(dtype), dim)


def conv2d(
    function, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, layout="NCHW", allow_tf32=False
) -> Any:
    """channels_last tensors, as NHWC views; and padding "same" for a kernel of an even size, which needs one more zero
    on the right than on the left."""
    images = all(isinstance(t, Tensor) and t.dim() == 4 for t in (x, weight))
    if layout == "NCHW" and images and (_is_channels_last(x) or _is_channels_last(weight)):
        views = x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1)
        return function(*views, bias, stride, padding, dilation, groups, "NHWC", allow_tf32).permute(0, 3, 1, 2)
    is_same = isinstance(padding, str) and padding == "same"
    if not is_same or not (isinstance(x, Tensor) and isinstance(weight, Tensor)) or weight.dim() != 4:
        return NotImplemented
    sides = weight.shape[2:] if layout == "NCHW" else weight.shape[1:3]
    steps = tuple(dilation) if isinstance(dilation, (tuple, list)) else (dilation,)
    if len(steps) not in (1, 2):
        return NotImplemented
    reach = [d * (k - 1) for d, k in zip(steps * (2 // len(steps)), sides, strict=True)]
    if all(n % 2 == 0 for n in reach) or stride not in (1, (1,), [1], (1, 1), [1, 1]):
        return NotImplemented
    more = [0, reach[1] % 2, 0, reach[0] % 2]
    x = torch.nn.functional.pad(x, more if layout == "NCHW" else [0, 0, *more])
    return function(x, weight, bias, 1, tuple(n // 2 for n in reach), dilation, groups, layout, allow_tf32)


def _is_channels_last(t: Tensor) -> bool:
    # is_contiguous(memory_format=...) fails inside vmap
    return not t.is_contiguous() and t.movedim(1, -1).is_contiguous()


def batch_norm(function, x, weight=None, bias=None, eps=1e-5, axis=1, activation=None) -> Any:
    """channels_last tensors, as views whose channels are last."""
    if axis != 1 or not (isinstance(x, Tensor) and x.dim() >= 4 and _is_channels_last(x)):
        return NotImplemented
    y, mean, var = function(x.movedim(1, -1), weight, bias, eps, -1, activation)
    return y.movedim(-1, 1), mean, var


def batch_norm_relu(function, x, weight=None, bias=None, residual=None, eps=1e-5, axis=1) -> Any:
    """As ``batch_norm``; the residual is brought into x's memory format."""
    tensors = all(isinstance(t, Tensor) and t.dim() >= 4 for t in (x, x if residual is None else residual))
    if axis != 1 or not tensors or not _is_channels_last(x):
        return NotImplemented
    moved = None if residual is None else residual.movedim(1, -1)
    y, mean, var = function(x.movedim(1, -1), weight, bias, moved, eps, -1)
    return y.movedim(-1, 1), mean, var


# ------------------------------------------------------------------------------------------------------- cross entropy


def cross_entropy(
    function,
    x,
    target,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    dtype: torch.dtype | str | None = None,
    weight: Tensor | None = None,
    z_loss=0.0,
    softcap=0.0,
    **former: bool | None,
) -> Any:
    """Class weights that require a gradient, or of another dtype; targets that are probabilities, of x's shape;
    (N, C, d...) with targets of (N, d...); targets of uint8; a ``dtype`` of torch's; and torch's former names of the
    reductions, ``size_average`` and ``reduce``."""
    if not former.keys() <= {"size_average", "reduce"}:
        return NotImplemented
    accepted, named = _accepted_weight(x, weight), _name(dtype)
    is_byte = isinstance(target, Tensor) and target.dtype == torch.uint8
    if former or is_byte or accepted is not weight or named is not dtype:
        if any(value is not None for value in former.values()):  # warns, as torch does
            reduction = legacy_get_string(former.get("size_average"), former.get("reduce"))
        target = target.long() if is_byte else target
        return function(x, target, ignore_index, reduction, label_smoothing, named, accepted, z_loss, softcap)
    if not (isinstance(x, Tensor) and isinstance(target, Tensor)) or x.dim() == 0 or x.dtype not in _FLOATING:
        return NotImplemented
    learns = _learns(weight)
    if not learns and x.dim() <= 2 and not target.is_floating_point():
        return NotImplemented
    loss = ignore_index, reduction, label_smoothing, dtype, z_loss, softcap
    ignore_index, reduction, label_smoothing, dtype, z_loss, softcap = _checked(
        BUILTIN.ops["cross_entropy"], loss, (x, target, weight)
    )
    if target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"cross_entropy: target has dtype {target.dtype}, expected classes or probabilities")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"cross_entropy: reduction is {reduction!r}, expected 'none', 'sum' or 'mean'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing is {label_smoothing}, expected 0 to 1")
    for name, value in (("z_loss", z_loss), ("softcap", softcap)):
        if not 0 <= value < math.inf:
            raise ValueError(f"cross_entropy: {name} is {value}, expected a finite number, 0 or more")
    axis = min(1, x.dim() - 1)
    _check_shapes(x, target, weight, axis)
    rows, classes = x.movedim(axis, -1), x.shape[axis]
    if not learns and not target.is_floating_point():
        flat = rows.reshape(-1, classes), target.reshape(-1)
        losses = function(*flat, ignore_index, reduction, label_smoothing, dtype, weight, z_loss, softcap)
        return losses.reshape(target.shape) if reduction == "none" else losses
    result, wide = _result_dtype(x, dtype), wide_dtype(x.dtype)
    logits = softcap * torch.tanh(rows.to(wide) / softcap) if softcap else rows
    more = z_loss * torch.logsumexp(logits.to(wide), -1) ** 2 if z_loss else 0
    if target.is_floating_point():
        if ignore_index >= 0:
            raise ValueError(f"cross_entropy: ignore_index is {ignore_index}, expected none: target has probabilities")
        aims = target.movedim(axis, -1) * (1 - label_smoothing) + label_smoothing / classes
        losses = more - _sum_of_logarithms(logits, aims if weight is None else aims * weight)
        return _reduced(losses, reduction, losses.numel()).to(result)
    assert weight is not None  # it is learned
    weight = weight.to(wide)
    counts = target != ignore_index
    factors = torch.where(counts, weight[target.clamp(0, classes - 1)], 0)
    logits = logits.to(wide)  # the parts of its gradient are then added before rounding
    losses = function(logits.reshape(-1, classes), target.reshape(-1), ignore_index, "none")
    losses = losses.reshape(target.shape) * factors
    if label_smoothing:
        smooth = torch.where(counts, -_sum_of_logarithms(logits, weight), 0)
        losses = (1 - label_smoothing) * losses + label_smoothing / classes * smooth
    losses = losses + torch.where(counts, more, 0) if z_loss else losses
    return _reduced(losses, reduction, factors.sum()).to(result)


def cross_entropy_lse(function, *args: Any, **kwargs: Any) -> Any:
    """Class weights that require a gradient, or of another dtype; a ``dtype`` of torch's."""
    (x, target, weight), attrs = BUILTIN.ops["cross_entropy_lse"].bind(*args, **kwargs)
    accepted, loss = _accepted_weight(x, weight), _loss(attrs)
    given = x, target, *loss[:4], accepted, *loss[4:]
    if accepted is not weight or loss is not attrs:
        return function(*given)
    if not isinstance(x, Tensor) or not _learns(weight):
        return NotImplemented
    _check_call(BUILTIN.ops["cross_entropy_lse"], loss, (x, target, weight))
    y = cross_entropy(lambda *args, **kwargs: function(*args, **kwargs)[0], *given)
    return y, *function(x, target, loss[0], softcap=loss[-1])[1:]


def linear_cross_entropy(function, *args: Any, **kwargs: Any) -> Any:
    """Class weights that require a gradient, for which the logits are made; and a ``dtype`` of torch's."""
    return _loss_of_head("linear_cross_entropy", function, *args, **kwargs)


def linear_cross_entropy_lse(function, *args: Any, **kwargs: Any) -> Any:
    """As ``linear_cross_entropy``."""
    return _loss_of_head("linear_cross_entropy_lse", function, *args, **kwargs)


def _loss_of_head(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    op, ops = BUILTIN.ops[name], namespaces[BUILTIN]
    inputs, attrs = op.bind(*args, **kwargs)
    (x, weight, target, bias, class_weight), (*loss, allow_tf32) = inputs, _loss(attrs)
    if not _learns(class_weight):
        given = x, weight, target, bias, *loss[:4], class_weight, *loss[4:], allow_tf32
        return NotImplemented if loss[3] is attrs[3] else function(*given)
    _check_call(op, (*loss, allow_tf32), inputs)
    logits = ops.linear(x, weight, bias, None, allow_tf32)
    flat = logits.reshape(target.numel(), logits.shape[-1]), target.reshape(target.numel())
    y = ops.cross_entropy(*flat, *loss[:4], class_weight, *loss[4:])
    y = y.reshape(target.shape) if loss[1] == "none" else y
    if "lse" not in op.outputs:
        return y
    lse = ops.cross_entropy_lse(*flat, loss[0], softcap=loss[-1])[1]
    return y, lse.reshape(target.shape)


def _check_call(op: Op, attrs: tuple[Any, ...], inputs: Tensors) -> None:
    """Raises the operator's error for what does not fit, where a composition would raise another's."""
    if not is_compiling():
        specs_of(op, _checked(op, attrs, inputs), inputs)


def _checked(op: Op, attrs: tuple[Any, ...], inputs: Tensors) -> tuple[Any, ...]:
    """The attributes as plain values: computations with a tensor have its dtype."""
    check_tensors(op, inputs)
    check_devices(op.name, op.inputs, inputs)
    return op.canonical(attrs)


def _loss(attrs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The attributes of an operator of losses, of which the fourth is ``dtype``, with its name; attrs if it has one."""
    named = _name(attrs[3])
    return attrs if named is attrs[3] else (*attrs[:3], named, *attrs[4:])


def _accepted_weight(x: Any, weight: Any) -> Any:
    """A weight of a dtype that the kernel takes."""
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and weight.is_floating_point()):
        return weight
    wide = wide_dtype(x.dtype)
    return weight if weight.dtype in (x.dtype, wide) else weight.to(wide)


def _learns(weight: Any) -> bool:
    """Whether the gradient of a weight is recorded."""
    return isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled()


def _name(dtype: Any) -> Any:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def _check_shapes(x: Tensor, target: Tensor, weight: Tensor | None, axis: int) -> None:
    expected = x.shape if target.is_floating_point() else (*x.shape[:axis], *x.shape[axis + 1 :])
    if tuple(target.shape) != tuple(expected):
        raise ValueError(f"cross_entropy: target has shape {tuple(target.shape)}, expected {tuple(expected)}")
    if weight is not None and tuple(weight.shape) != (x.shape[axis],):
        raise ValueError(f"cross_entropy: weight has shape {tuple(weight.shape)}, expected {(x.shape[axis],)}")


def _sum_of_logarithms(rows: Tensor, aims: Tensor) -> Tensor:
    """The sum over the classes of aims * log(softmax(rows)), in float32 for 16 bits."""
    wide = wide_dtype(rows.dtype)
    return (torch.log_softmax(rows, -1, dtype=wide) * aims).sum(-1)


def _reduced(losses: Tensor, reduction: str, count: Any) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / count if reduction == "mean" else losses.sum()


def _result_dtype(x: Tensor, dtype: str | None) -> torch.dtype:
    """``dtype``, which is x's or float32 for 16 bits. If None, x's, or under autocast, where losses are of float32, at
    least that."""
    if dtype is not None:
        expected = {x.dtype, wide_dtype(x.dtype)}
        found = getattr(torch, dtype, None)
        if found not in expected:
            raise TypeError(f"cross_entropy: dtype is {dtype}, expected None or {' or '.join(map(str, expected))}")
        return found
    is_wide = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return wide_dtype(x.dtype) if is_wide else x.dtype


_FUNCTIONS = (
    add, batch_norm, batch_norm_relu, conv2d, cross_entropy, cross_entropy_lse, linear_cross_entropy,
    linear_cross_entropy_lse, matmul, softmax,
)  # fmt: skip
COMPOSED: dict[str, Callable[..., Any]] = {f.__name__: f for f in _FUNCTIONS}
