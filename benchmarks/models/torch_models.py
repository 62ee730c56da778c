"""The models in torch. Each is written once, over a flavour of operators (``operators.py``).

``model(*batch)`` is the loss of a batch and ``model.logits(*batch[:-1])`` what it is the loss of; the last tensor of a
batch is the targets. Embeddings are torch's in every flavour. There is no dropout.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .parameters import initial
from .spec import IGNORED, Size


class Attention(nn.Module):
    def __init__(self, ops: Any, size: Size, bias: bool, causal: bool = True) -> None:
        super().__init__()
        self.ops, self.heads, self.causal = ops, size.heads, causal
        self.qkv = nn.Linear(size.width, 3 * size.width, bias)
        self.out = nn.Linear(size.width, size.width, bias)

    def forward(self, x: Tensor, rotation: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        """``padding``: what ``ops.padding`` made of a mask."""
        qkv = self.ops.linear(x, self.qkv)
        return self.ops.linear(self.ops.attention(qkv, self.heads, self.causal, rotation, padding), self.out)


def rotation(tokens: int, width: int, base: float = 10000.0) -> Tensor:
    """Cosines and sines, (2, tokens, width)."""
    frequencies = base ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(tokens), frequencies).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019): norms before attention and MLP, GELU's tanh approximation, tied embedding."""

    class Block(nn.Module):
        def __init__(self, ops: Any, size: Size) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
            self.attention = Attention(ops, size, bias=True)
            self.up, self.down = nn.Linear(size.width, size.mlp), nn.Linear(size.mlp, size.width)

    def __init__(self, ops: Any, size: Size) -> None:
        super().__init__()
        self.ops, self.size = ops, size
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(self.Block(ops, size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        h = self.tokens(tokens) + self.places.weight
        y = self.ops.norm(h, self.blocks[0].norm1)
        norms = [*(block.norm1 for block in list(self.blocks)[1:]), self.norm]
        for block, norm in zip(self.blocks, norms, strict=True):
            y, h = self.ops.add_norm(block.attention(y), h, block.norm2)
            y = self.ops.linear(self.ops.linear(y, block.up, "gelu_tanh"), block.down)
            y, h = self.ops.add_norm(y, h, norm)
        return y

    def logits(self, tokens: Tensor) -> Tensor:
        return self.ops.linear(self.hidden(tokens), self.head)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.ops.cross_entropy(self.logits(tokens).flatten(0, -2), targets.flatten())


class Llama(nn.Module):
    """A model as Llama (Touvron et al., arXiv:2302.13971): RMSNorm, rotary embedding, SwiGLU, no biases."""

    class Block(nn.Module):
        def __init__(self, ops: Any, size: Size) -> None:
            super().__init__()
            self.ops = ops
            self.norm1, self.norm2 = nn.RMSNorm(size.width, eps=1e-5), nn.RMSNorm(size.width, eps=1e-5)
            self.attention = Attention(ops, size, bias=False)
            self.gate, self.up = (nn.Linear(size.width, size.mlp, bias=False) for _ in range(2))
            self.down = nn.Linear(size.mlp, size.width, bias=False)

        def gate_and_up(self, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.ops.linear(y, self.gate), self.ops.linear(y, self.up)

    def __init__(self, ops: Any, size: Size) -> None:
        super().__init__()
        self.ops, self.size = ops, size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(self.Block(ops, size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.register_buffer("rotation", rotation(size.tokens, size.width // size.heads), persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        h = self.tokens(tokens)
        y = self.ops.norm(h, self.blocks[0].norm1)
        norms = [*(block.norm1 for block in list(self.blocks)[1:]), self.norm]
        for block, norm in zip(self.blocks, norms, strict=True):
            y, h = self.ops.add_norm(block.attention(y, self.rotation), h, block.norm2)
            y = self.ops.swiglu(*block.gate_and_up(y))
            y, h = self.ops.add_norm(self.ops.linear(y, block.down), h, norm)
        return y

    def logits(self, tokens: Tensor) -> Tensor:
        return self.ops.linear(self.hidden(tokens), self.head)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.ops.cross_entropy(self.logits(tokens).flatten(0, -2), targets.flatten())


class HeadGPT2(GPT2):
    """GPT-2 whose head and loss are one operator, where there is one."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.ops.head_loss(self.hidden(tokens), self.head, targets)


class HeadLlama(Llama):
    """A Llama whose head and loss are one operator."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.ops.head_loss(self.hidden(tokens), self.head, targets)


class PackedLlama(Llama):
    """Llama whose gate and up are the halves of one product."""

    class Block(Llama.Block):
        def __init__(self, ops: Any, size: Size) -> None:
            super().__init__(ops, size)
            self.gate = nn.Linear(size.width, 2 * size.mlp, bias=False)
            del self.up

        def gate_and_up(self, y: Tensor) -> tuple[Tensor, Tensor]:
            gate, up = self.ops.linear(y, self.gate).chunk(2, -1)
            return gate, up


class Bert(nn.Module):
    """BERT (Devlin et al., arXiv:1810.04805) with its head for masked tokens: norms after attention and MLP, exact
    GELU, padding masked, and positions whose target is ``IGNORED``."""

    class Block(nn.Module):
        def __init__(self, ops: Any, size: Size) -> None:
            super().__init__()
            self.attention = Attention(ops, size, bias=True, causal=False)
            self.norm1, self.norm2 = (nn.LayerNorm(size.width, eps=1e-12) for _ in range(2))
            self.up, self.down = nn.Linear(size.width, size.mlp), nn.Linear(size.mlp, size.width)

    def __init__(self, ops: Any, size: Size) -> None:
        super().__init__()
        self.ops, self.size = ops, size
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.tokens, size.width)
        self.norm = nn.LayerNorm(size.width, eps=1e-12)
        self.blocks = nn.ModuleList(self.Block(ops, size) for _ in range(size.layers))
        self.transform = nn.Linear(size.width, size.width)
        self.transform_norm = nn.LayerNorm(size.width, eps=1e-12)
        self.head = nn.Linear(size.width, size.vocabulary)
        self.head.weight = self.tokens.weight

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """``mask``: (batch, 1, 1, tokens), true where there is a token."""
        y = self.ops.norm(self.tokens(tokens) + self.places.weight, self.norm)
        padding = self.ops.padding(mask)
        for block in self.blocks:
            y, _ = self.ops.add_norm(block.attention(y, padding=padding), y, block.norm1)
            hidden = self.ops.linear(y, block.up, "gelu")
            y, _ = self.ops.add_norm(self.ops.linear(hidden, block.down), y, block.norm2)
        y = self.ops.norm(self.ops.linear(y, self.transform, "gelu"), self.transform_norm)
        return self.ops.linear(y, self.head)

    def forward(self, tokens: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(tokens, mask).flatten(0, -2)
        return self.ops.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al., arXiv:2010.11929): patches by a convolution, a class token, norms
    before attention and MLP, exact GELU."""

    class Block(nn.Module):
        def __init__(self, ops: Any, size: Size) -> None:
            super().__init__()
            self.norm1, self.norm2 = (nn.LayerNorm(size.width, eps=1e-6) for _ in range(2))
            self.attention = Attention(ops, size, bias=True, causal=False)
            self.up, self.down = nn.Linear(size.width, size.mlp), nn.Linear(size.mlp, size.width)

    def __init__(self, ops: Any, size: Size) -> None:
        super().__init__()
        self.ops = ops
        self.patches = nn.Conv2d(3, size.width, size.patch, size.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, size.width))
        self.places = nn.Parameter(torch.empty(1, size.tokens, size.width))
        self.blocks = nn.ModuleList(self.Block(ops, size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, eps=1e-6)
        self.head = nn.Linear(size.width, size.vocabulary)

    def logits(self, images: Tensor) -> Tensor:
        patches = self.ops.conv(images, self.patches).flatten(2).transpose(1, 2)
        h = torch.cat((self.class_token.expand(len(images), -1, -1), patches), 1) + self.places
        y = self.ops.norm(h, self.blocks[0].norm1)
        norms = [*(block.norm1 for block in list(self.blocks)[1:]), self.norm]
        for block, norm in zip(self.blocks, norms, strict=True):
            y, h = self.ops.add_norm(block.attention(y), h, block.norm2)
            y = self.ops.linear(self.ops.linear(y, block.up, "gelu"), block.down)
            y, h = self.ops.add_norm(y, h, norm)
        return self.ops.linear(y[:, 0], self.head)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return self.ops.cross_entropy(self.logits(images), targets)


class ResNet(nn.Module):
    """ResNet-50 (He et al., arXiv:1512.03385) with the stride in the convolution of 3 x 3, in channels_last."""

    channels_last = True

    class Convolution(nn.Module):
        """A convolution, its batch norm, and perhaps a residual and a ReLU."""

        def __init__(self, ops: Any, inputs: int, outputs: int, kernel: int, stride: int = 1, relu: bool = True):
            super().__init__()
            self.ops, self.relu = ops, relu
            self.convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
            self.norm = ops.batch_norm(outputs, relu)

        def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
            return self.ops.batch_normed(self.ops.conv(x, self.convolution), self.norm, self.relu, residual)

    class Block(nn.Module):
        def __init__(self, ops: Any, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            convolution = partial(ResNet.Convolution, ops)
            self.reduce, self.spread = convolution(inputs, width, 1), convolution(width, width, 3, stride)
            self.expand, self.residual = convolution(width, 4 * width, 1), None
            if stride != 1 or inputs != 4 * width:
                self.residual = convolution(inputs, 4 * width, 1, stride, relu=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.expand(self.spread(self.reduce(x)), x if self.residual is None else self.residual(x))

    def __init__(self, ops: Any, size: Size) -> None:
        super().__init__()
        self.ops = ops
        self.stem = self.Convolution(ops, 3, size.width, 7, 2)
        blocks, inputs = [], size.width
        for i, depth in enumerate((3, 4, 6, 3)):
            width = size.width << i
            for j in range(depth):
                blocks.append(self.Block(ops, inputs, width, 2 if i > 0 and j == 0 else 1))
                inputs = 4 * width
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(inputs, size.vocabulary)

    def logits(self, images: Tensor) -> Tensor:
        y = functional.max_pool2d(self.stem(images), 3, 2, 1)
        for block in self.blocks:
            y = block(y)
        return self.ops.linear(y.mean((2, 3)), self.head)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return self.ops.cross_entropy(self.logits(images), targets)


MODELS: dict[str, type[nn.Module]] = {
    "gpt2": GPT2,
    "gpt2_head": HeadGPT2,
    "llama": Llama,
    "llama_head": HeadLlama,
    "llama_packed": PackedLlama,
    "bert": Bert,
    "vit": ViT,
    "resnet": ResNet,
}


def build(name: str, ops: Any, size: Size, dtype: torch.dtype, device: str) -> nn.Module:
    """The model with its initial parameters."""
    with torch.device(device):
        model = MODELS[name](ops, size)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(initial(key, tuple(parameter.shape), size.layers)))
    return model.to(dtype, memory_format=torch.channels_last if getattr(model, "channels_last", False) else None)
