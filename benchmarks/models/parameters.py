"""Initial parameters as NumPy arrays: the same for every implementation and framework. Their names are those of the
models in torch (torch_models.py)."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

from .spec import Size

Shape = tuple[int, ...]


def initial(name: str, shape: Shape, layers: int, seed: int = 0) -> Any:
    """A parameter in float32: as GPT-2's, from N(0, 0.02^2), with those that add to the residual stream scaled by
    1 / sqrt(2 * layers). It depends on its name, shape and seed only."""
    if len(shape) == 1:
        return np.full(shape, 0 if name.endswith("bias") else 1, np.float32)
    into_residual = name.endswith(("out.weight", "down.weight"))
    std = np.float32(0.02 / math.sqrt(2 * layers) if into_residual else 0.02)
    return np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32) * std


def gpt2(size: Size) -> dict[str, Any]:
    """The parameters of GPT-2 by name. Linear weights are (outputs, inputs); the head's is ``tokens.weight``."""
    return {name: initial(name, shape, size.layers) for name, shape in gpt2_shapes(size).items()}


def gpt2_shapes(size: Size) -> dict[str, Shape]:
    width, mlp = size.width, size.mlp
    shapes: dict[str, Shape] = {"tokens.weight": (size.vocabulary, width), "places.weight": (size.tokens, width)}
    for i in range(size.layers):
        shapes |= _norm(f"blocks.{i}.norm1", width) | _norm(f"blocks.{i}.norm2", width)
        shapes |= _linear(f"blocks.{i}.attention.qkv", width, 3 * width)
        shapes |= _linear(f"blocks.{i}.attention.out", width, width)
        shapes |= _linear(f"blocks.{i}.up", width, mlp) | _linear(f"blocks.{i}.down", mlp, width)
    return shapes | _norm("norm", width)


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, inputs: int, outputs: int) -> dict[str, Shape]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
