"""Batches of a synthetic text, or of images: the same for every model of a size, implementation and framework."""

from __future__ import annotations

from typing import Any

import numpy as np

from .spec import IGNORED, Size

MASKED = 0.15  # BERT's fraction of positions to be predicted


HELD_OUT = 1 << 20  # the seed of a batch that is not trained on


IMAGES = 2  # batches of images, which take turns: they stay in the GPU's memory


def batches(name: str, size: Size, count: int) -> list[tuple[Any, ...]]:
    different = [batch(name, size, i) for i in range(min(count, IMAGES) if size.image else count)]
    return [different[i % len(different)] for i in range(count)]


def batch(name: str, size: Size, seed: int) -> tuple[Any, ...]:
    """A tuple of NumPy arrays, the arguments of the model."""
    rng = np.random.default_rng(seed)
    if size.image:
        return _images(rng, size)
    text = _text(rng, size.vocabulary, size.batch, size.tokens + 1)
    return _masked(rng, text, size) if name == "bert" else _next_token(text)


def _images(rng: np.random.Generator, size: Size) -> tuple[Any, ...]:
    """Noise, brighter where the class's row and column meet, and the classes."""
    images = rng.standard_normal((size.batch, 3, size.image, size.image), np.float32)
    classes = rng.integers(size.vocabulary, size=size.batch)
    rows, columns = classes * size.image // size.vocabulary, classes * 7 % size.image
    images[np.arange(size.batch), :, rows] += 1
    images[np.arange(size.batch), :, :, columns] += 1
    return images, classes


def _text(rng: np.random.Generator, vocabulary: int, rows: int, length: int) -> Any:
    """Tokens distributed as Zipf's law says. Half of them are determined by the token before, so that there is more to
    learn than frequencies."""
    frequencies = 1 / np.arange(1, vocabulary + 1)
    tokens = np.searchsorted(np.cumsum(frequencies / frequencies.sum()), rng.random((rows, length)))
    tokens = np.minimum(tokens, vocabulary - 1)
    follows = rng.random((rows, length)) < 0.5
    for i in range(1, length):
        tokens[:, i] = np.where(follows[:, i], (tokens[:, i - 1] * 31 + 7) % vocabulary, tokens[:, i])
    return tokens


def _next_token(text: Any) -> tuple[Any, ...]:
    return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])


def _masked(rng: np.random.Generator, text: Any, size: Size) -> tuple[Any, ...]:
    """Rows of half the length to the whole; token 0 stands for those to predict and for padding."""
    tokens = text[:, : size.tokens]
    lengths = rng.integers(size.tokens // 2, size.tokens + 1, size.batch)
    inside = np.arange(size.tokens) < lengths[:, None]
    predicted = inside & (rng.random(tokens.shape) < MASKED)
    predicted[:, 0] = True
    return np.where(inside & ~predicted, tokens, 0), inside[:, None, None], np.where(predicted, tokens, IGNORED)
