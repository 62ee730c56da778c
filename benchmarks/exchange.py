"""Functions of torch.nn.functional on this library's kernels, with torch's parameters, for networks that call those.

A call that the library's function does not take is torch's own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from aotops.frontends import torch as aotops
from aotops.frontends.torch import running
from aotops.frontends.torch.attention import _drop_is_taken, _is_taken

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def exchanged() -> Any:
    """A context in which torch.nn.functional's functions are these."""
    return mock.patch.multiple(functional, **FUNCTIONS)


def taken(x: Tensor, *others: Tensor | None) -> bool:
    dtype = x.dtype
    for t in others:
        if t is not None and t.dtype != dtype:
            return False
    return dtype in DTYPES


def linear(input, weight, bias=None):
    return (aotops if taken(input, weight, bias) else TORCHS).linear(input, weight, bias)


def conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    is_ours = taken(input, weight, bias) and not isinstance(padding, str)
    return (aotops if is_ours else TORCHS).conv2d(input, weight, bias, stride, padding, dilation, groups)


def batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """Compiled for a GPU too, where the library's module is torch's."""
    terms = input.numel() // (input.shape[1] or 1)
    is_right = momentum is not None and (running_mean is None) == (running_var is None) and terms > 1 and eps > 0
    if training and is_right and taken(input, weight, bias):
        y, mean, var = aotops.batch_norm(input, weight, bias, eps)
        statistics = running_mean, running_var, None  # nn.BatchNorm2d counts batches before the call
        if running_mean is None or running.track(mean, var, statistics, momentum, terms):
            return y
    return TORCHS.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    return (aotops if taken(input, weight, bias) else TORCHS).layer_norm(input, normalized_shape, weight, bias, eps)


def gelu(input, *, approximate="none"):
    return (aotops if taken(input) else TORCHS).gelu(input, approximate=approximate)


def cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    is_ours = taken(input, weight) and input.dim() <= 2 and not target.is_floating_point()
    if is_ours and size_average is None and reduce is None:
        return aotops.cross_entropy(input, target, ignore_index, reduction, label_smoothing, weight=weight)
    options = size_average, ignore_index, reduce, reduction, label_smoothing
    return TORCHS.cross_entropy(input, target, weight, *options)


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """For what it does not take, the library's calls torch.nn.functional's, which is this one."""
    is_ours = _is_taken(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    attend = (aotops if is_ours and _drop_is_taken(query, dropout_p) else TORCHS).scaled_dot_product_attention
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


FUNCTIONS = {
    each.__name__: each
    for each in (linear, conv2d, batch_norm, layer_norm, gelu, cross_entropy, scaled_dot_product_attention)
}
TORCHS = SimpleNamespace(**{name: getattr(functional, name) for name in FUNCTIONS})
