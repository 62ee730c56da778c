"""The operators and optimizers of the models, in flavours of the same functions: torch's, this library's, and this
library's with torch's attention.

Each flavour calls its operators as its user would write them. Parameters are those of torch's own modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from aotops.frontends import torch as aotops

from .spec import BETA1, BETA2, EPS, LEARNING_RATE, WEIGHT_DECAY

ADAMW = {"lr": LEARNING_RATE, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": WEIGHT_DECAY}


class Torch:
    @staticmethod
    def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **ADAMW, fused=True)

    @staticmethod
    def padding(mask: Tensor) -> Tensor:
        """The padding as ``attention`` takes it, of a mask (batch, 1, 1, tokens): true where there is a token, from the
        first on."""
        return mask

    @staticmethod
    def attention(qkv: Tensor, heads: int, causal: bool, rotation: Tensor | None, padding: Tensor | None) -> Tensor:
        """Attention of rows (batch, tokens, 3 width). ``rotation``: (2, tokens, width of a head), of q and k."""
        parts = qkv.unflatten(-1, (3, heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in parts)  # (batch, heads, tokens, width of a head)
        if rotation is not None:
            q, k = rotated(q, rotation), rotated(k, rotation)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=padding, is_causal=causal)
        return y.transpose(1, 2).flatten(2)

    @staticmethod
    def linear(x: Tensor, layer: nn.Linear, activation: str | None = None) -> Tensor:
        y = functional.linear(x, layer.weight, layer.bias)
        if activation is None:
            return y
        return functional.gelu(y, approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])

    @staticmethod
    def conv(x: Tensor, layer: nn.Conv2d) -> Tensor:
        return functional.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding)

    @staticmethod
    def batch_norm(channels: int, relu: bool) -> nn.Module:
        return nn.BatchNorm2d(channels)

    @staticmethod
    def batch_normed(x: Tensor, layer: nn.Module, relu: bool, residual: Tensor | None = None) -> Tensor:
        y = layer(x) if residual is None else layer(x) + residual
        return functional.relu(y) if relu else y

    @staticmethod
    def norm(x: Tensor, layer: Any) -> Tensor:
        if isinstance(layer, nn.LayerNorm):
            return functional.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
        return functional.rms_norm(x, layer.normalized_shape, layer.weight, layer.eps)

    @classmethod
    def add_norm(cls, x: Tensor, residual: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
        h = x + residual
        return cls.norm(h, layer), h

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    cross_entropy = staticmethod(functional.cross_entropy)

    @classmethod
    def head_loss(cls, x: Tensor, layer: nn.Linear, targets: Tensor) -> Tensor:
        return cls.cross_entropy(cls.linear(x, layer).flatten(0, -2), targets.flatten())


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding (Su et al., arXiv:2104.09864), in halves, as Llama's."""
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Aotops:
    @staticmethod
    def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return aotops.AdamW(parameters, **ADAMW)

    @staticmethod
    def padding(mask: Tensor) -> Tensor:
        """The number of tokens of each example."""
        return mask.sum((1, 2, 3))

    @staticmethod
    def attention(qkv: Tensor, heads: int, causal: bool, rotation: Tensor | None, padding: Tensor | None) -> Tensor:
        if rotation is None:
            return aotops.qkv_attention(qkv, heads, lengths=padding, causal=causal)
        cos, sin = rotation.to(qkv.dtype).chunk(2, -1)[0]
        q, k, v = aotops.qkv_rope(qkv, cos, sin, heads)
        return aotops.attention(q, k, v, padding, causal=causal).flatten(2)

    @staticmethod
    def linear(x: Tensor, layer: nn.Linear, activation: str | None = None) -> Tensor:
        return aotops.linear(x, layer.weight, layer.bias, activation)

    @staticmethod
    def conv(x: Tensor, layer: nn.Conv2d) -> Tensor:
        return aotops.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding)

    @staticmethod
    def batch_norm(channels: int, relu: bool) -> nn.Module:
        return aotops.BatchNorm2d(channels, activation="relu" if relu else None)

    @staticmethod
    def batch_normed(x: Tensor, layer: nn.Module, relu: bool, residual: Tensor | None = None) -> Tensor:
        return layer(x, residual)

    @staticmethod
    def norm(x: Tensor, layer: Any) -> Tensor:
        if isinstance(layer, nn.LayerNorm):
            return aotops.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
        return aotops.rms_norm(x, layer.normalized_shape, layer.weight, layer.eps)

    @staticmethod
    def add_norm(x: Tensor, residual: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
        if isinstance(layer, nn.LayerNorm):
            return aotops.add_layer_norm(x, residual, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
        return aotops.add_rms_norm(x, residual, layer.normalized_shape, layer.weight, layer.eps)

    swiglu = staticmethod(aotops.swiglu)
    cross_entropy = staticmethod(aotops.cross_entropy)

    @staticmethod
    def head_loss(x: Tensor, layer: nn.Linear, targets: Tensor) -> Tensor:
        return aotops.linear_cross_entropy(x, layer.weight, targets, layer.bias)


class WithTorchAttention(Aotops):
    """As it pays on GPUs that have no kernels of the library's attention of their own."""

    padding = staticmethod(Torch.padding)
    attention = staticmethod(Torch.attention)


FLAVOURS: dict[str, Any] = {"torch": Torch, "aotops": Aotops, "aotops.sdpa": WithTorchAttention}
