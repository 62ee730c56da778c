"""The references, and what is tried on the operators."""

from __future__ import annotations

import numpy as np

from aotops.testing import Case, Row


def vector_add(x, y):
    if x.shape != y.shape:
        raise ValueError
    return x + y


def row_softmax(x):
    if not x.ndim:
        raise ValueError
    e = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
    return e / e.sum(-1, keepdims=True)


def norm(x, weight, bias, eps=1e-5):
    if not x.ndim or weight.shape != x.shape[-1:] or bias.shape != x.shape[-1:]:
        raise ValueError
    mean = x.mean(-1)
    rstd = 1 / np.sqrt(((x - mean[..., None]) ** 2).mean(-1) + eps)
    return (x - mean[..., None]) * rstd[..., None] * weight + bias


def product(a, b):
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError
    return a @ b


def attend(q, k, v, causal=False, scale=0.125):
    if q.ndim < 2 or q.shape[-1] != 64 or not q.shape == k.shape == v.shape:
        raise ValueError
    score = q @ np.swapaxes(k, -1, -2) * scale
    if causal:
        score = np.where(np.tril(np.ones(score.shape[-2:])) > 0, score, -np.inf)
    p = np.exp(score - score.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def _two(shape):
    return Case({"x": shape, "y": shape})


def _norm(shape):
    return Case({"x": shape, "weight": shape[-1:], "bias": shape[-1:]})


def _heads(shape, **attrs):
    # the probabilities are rounded to the dtype before they are multiplied: at most 2**-8, of bfloat16
    return Case(dict.fromkeys("qkv", shape), attrs, magnified=2048.0)


CASES = {
    "vector_add": Row(vector_add, tuple(map(_two, ((), (1,), (7,), (4, 6), (0, 3), (33, 1025), (300, 300))))),
    "row_softmax": Row(
        row_softmax, tuple(Case({"x": shape}) for shape in ((1,), (4, 6), (3, 5, 16), (0, 4), (5, 1000), (2, 5000)))
    ),
    "norm": Row(norm, tuple(map(_norm, ((4, 6), (1, 1), (3, 5, 16), (70, 33), (2, 2000))))),
    "product": Row(
        product,
        tuple(Case({"a": (m, k), "b": (k, n)}) for m, n, k in ((1, 1, 1), (16, 32, 64), (70, 65, 33), (512, 512, 64))),
    ),
    "attend": Row(attend, (_heads((1, 64)), _heads((2, 70, 64), causal=True), _heads((1, 2, 128, 64), scale=0.5))),
}
