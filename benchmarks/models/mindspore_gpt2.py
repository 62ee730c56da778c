"""GPT-2 in MindSpore, over two flavours of the same functions: MindSpore's and this library's.

The names of the parameters are those of parameters.py. Attention is composed of MindSpore's operators in both flavours.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from aotops.frontends import mindspore as aotops

from .spec import Size

NORM_EPS = 1e-5
layer_norm = ops.LayerNorm(-1, -1, NORM_EPS)  # ops.layer_norm is not supported on the CPU


class MindSpore:
    @staticmethod
    def linear(x, weight, bias=None):
        return ops.dense(x, weight, bias)

    @staticmethod
    def linear_gelu(x, weight, bias):
        return ops.gelu(ops.dense(x, weight, bias), approximate="tanh")

    @staticmethod
    def norm(x, weight, bias):
        return layer_norm(x, weight, bias)[0]

    @staticmethod
    def add_norm(x, residual, weight, bias):
        h = x + residual
        return layer_norm(h, weight, bias)[0], h

    @staticmethod
    def cross_entropy(logits, targets):
        return ops.cross_entropy(logits, targets)


class Aotops:
    @staticmethod
    def linear(x, weight, bias=None):
        return aotops.linear(x, weight, bias)

    @staticmethod
    def linear_gelu(x, weight, bias):
        return aotops.linear(x, weight, bias, "gelu_tanh")

    @staticmethod
    def norm(x, weight, bias):
        return aotops.layer_norm(x, weight.shape, weight, bias, NORM_EPS)

    @staticmethod
    def add_norm(x, residual, weight, bias):
        return aotops.add_layer_norm(x, residual, weight.shape, weight, bias, NORM_EPS)

    @staticmethod
    def cross_entropy(logits, targets):
        return aotops.cross_entropy(logits, targets)


FLAVOURS: dict[str, Any] = {"mindspore": MindSpore, "aotops": Aotops}


class Block(nn.Cell):
    """From the norm before attention to the norm before the next block's, or the last one: its parameters are given,
    because its module is the next block."""

    def __init__(self, flavour: Any, size: Size, p: dict[str, Any], prefix: str, next_norm: tuple[Any, Any]) -> None:
        super().__init__(auto_prefix=False)
        names = ("attention.qkv", "attention.out", "norm2", "up", "down")
        (
            (self.qkv, self.qkv_bias),
            (self.out, self.out_bias),
            (self.norm, self.norm_bias),
            (self.up, self.up_bias),
            (self.down, self.down_bias),
        ) = (pair(p, f"{prefix}.{name}") for name in names)
        self.next_norm, self.next_norm_bias = next_norm
        self.linear, self.linear_gelu, self.add_norm = flavour.linear, flavour.linear_gelu, flavour.add_norm
        self.shape = (size.batch, size.tokens, size.heads, size.width // size.heads)
        self.scale = 1 / math.sqrt(size.width // size.heads)
        self.later = Tensor(np.triu(np.full((size.tokens, size.tokens), -np.inf, np.float32), 1))

    def construct(self, y, h):
        y = self.linear(self.attention(self.linear(y, self.qkv, self.qkv_bias)), self.out, self.out_bias)
        y, h = self.add_norm(y, h, self.norm, self.norm_bias)
        y = self.linear(self.linear_gelu(y, self.up, self.up_bias), self.down, self.down_bias)
        return self.add_norm(y, h, self.next_norm, self.next_norm_bias)

    def attention(self, qkv):
        q, k, v = (part.reshape(self.shape).swapaxes(1, 2) for part in ops.chunk(qkv, 3, -1))
        weights = ops.softmax(ops.matmul(q, k.swapaxes(2, 3)) * self.scale + self.later, -1)
        return ops.matmul(weights, v).swapaxes(1, 2).reshape(*self.shape[:2], -1)


class GPT2(nn.Cell):
    def __init__(self, flavour: Any, size: Size, initial: dict[str, Any]) -> None:
        super().__init__(auto_prefix=False)
        p = {name: Parameter(Tensor(array), name=name) for name, array in initial.items()}
        self.tokens, self.places = p["tokens.weight"], p["places.weight"]
        self.first_norm, self.first_norm_bias = pair(p, "blocks.0.norm1")
        norms = [*(f"blocks.{i}.norm1" for i in range(1, size.layers)), "norm"]
        blocks = [Block(flavour, size, p, f"blocks.{i}", pair(p, norm)) for i, norm in enumerate(norms)]
        self.blocks = nn.CellList(blocks, auto_prefix=False)
        self.linear, self.norm, self.cross_entropy = flavour.linear, flavour.norm, flavour.cross_entropy

    def logits(self, tokens):
        h = ops.gather(self.tokens, tokens, 0) + self.places
        y = self.norm(h, self.first_norm, self.first_norm_bias)
        for block in self.blocks:
            y, h = block(y, h)
        return self.linear(y, self.tokens).reshape(-1, self.tokens.shape[0])

    def construct(self, tokens, targets):
        return self.cross_entropy(self.logits(tokens), targets.reshape(-1))


def pair(p: dict[str, Any], name: str) -> tuple[Any, Any]:
    return p[f"{name}.weight"], p[f"{name}.bias"]
