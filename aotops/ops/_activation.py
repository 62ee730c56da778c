"""Activation functions and their slopes, as formulas."""

from __future__ import annotations

from math import pi, sqrt


def activated(m, x, activation):
    """``activation``: None, "relu", "gelu", "gelu_tanh", "silu" or "hardswish"."""
    if activation is None:
        return x
    if activation == "relu":
        return m.where(x > 0, x, m.zeros(x))
    if activation == "hardswish":
        return m.where(x <= -3, m.zeros(x), m.where(x < 3, x * (x * (1 / 6) + 0.5), x))
    return x * (m.sigmoid(x) if activation == "silu" else gelu_gate(m, x, activation == "gelu_tanh"))


def slope(m, x, activation):
    """The derivative of ``activated``. That of relu at 0 is 0; of hardswish 0 at -3 and 1 at 3."""
    if activation == "relu":
        return m.where(x > 0, m.zeros(x) + 1, m.zeros(x))
    if activation == "silu":
        gate = m.sigmoid(x)
        return gate * (1 + x * (1 - gate))
    if activation == "hardswish":
        return m.where(x <= -3, m.zeros(x), m.where(x < 3, x * (1 / 3) + 0.5, m.zeros(x) + 1))
    return gelu_gate(m, x, activation == "gelu_tanh") + x * _gelu_gate_slope(m, x, activation == "gelu_tanh")


def gelu_gate(m, x, tanh):
    """Phi(x), which GELU multiplies x by; with ``tanh`` its approximation."""
    if tanh:
        return m.sigmoid(2 * _tanh_argument(x))
    return _narrow_gate(m, x) if m.narrow else m.erfc(x * -sqrt(0.5)) * 0.5


def _narrow_gate(m, x):
    """As the CUDA kernels compute it in 16 bits (cuda_src/cuda/gelu.cuh): with t = 1 / (1 + p a), Phi(-a) is
    exp(-a^2 / 2) t P(t), to 5e-6 of itself. It takes fewer instructions than erfc, and as many as erf, with which
    (1 + erf) / 2 cancels: it is 0 below -5.5, and off by 200 units of bfloat16 before that."""
    a = m.where(x < 0, -x, x)
    t = 1 / (0.306 * a + 1)
    p = -0.076268576 * t + 0.19705218
    for coefficient in (0.0005876893, 0.13872351, 0.11753883, 0.12236543):
        p = p * t + coefficient
    tail = p * t * _exponential(m, x)
    return m.where(x < 0, tail, 1 - tail)


def _exponential(m, x):
    return m.exp(x * x * -0.5)


def _gelu_gate_slope(m, x, tanh):
    if tanh:
        gate = gelu_gate(m, x, tanh)
        return 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x) * gate * (1 - gate)
    return _exponential(m, x) * sqrt(0.5 / pi)


def _tanh_argument(x):
    return sqrt(2 / pi) * (x + 0.044715 * x * x * x)
