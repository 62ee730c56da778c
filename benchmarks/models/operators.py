"""The operators that the models are built of, in two flavours of the same functions: torch's and this library's.

Each flavour calls its operators as its user would write them. Parameters are those of torch's own modules.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from aotops.frontends import torch as aotops


class Torch:
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


class Aotops:
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


FLAVOURS: dict[str, Any] = {"torch": Torch, "aotops": Aotops}
