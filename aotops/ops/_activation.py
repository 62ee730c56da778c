"""Activation functions and their slopes, as formulas."""

from __future__ import annotations

from math import pi, sqrt


def activated(m, x, activation):
    """``activation``: None, "relu", "gelu", "gelu_tanh" or "silu"."""
    if activation is None:
        return x
    if activation == "relu":
        return m.where(x > 0, x, m.zeros(x))
    return x * (m.sigmoid(x) if activation == "silu" else gelu_gate(m, x, activation == "gelu_tanh"))


def slope(m, x, activation):
    """The derivative of ``activated``. That of relu at 0 is 0."""
    if activation == "relu":
        return m.where(x > 0, m.zeros(x) + 1, m.zeros(x))
    if activation == "silu":
        gate = m.sigmoid(x)
        return gate * (1 + x * (1 - gate))
    return gelu_gate(m, x, activation == "gelu_tanh") + x * _gelu_gate_slope(m, x, activation == "gelu_tanh")


def gelu_gate(m, x, tanh):
    """Phi(x), which GELU multiplies x by; with ``tanh`` its approximation."""
    if tanh:
        return m.sigmoid(2 * _tanh_argument(x))
    return m.erfc(x * -sqrt(0.5)) * 0.5


def _gelu_gate_slope(m, x, tanh):
    if tanh:
        gate = gelu_gate(m, x, tanh)
        return 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x) * gate * (1 - gate)
    return m.exp(x * x * -0.5) * sqrt(0.5 / pi)


def _tanh_argument(x):
    return sqrt(2 / pi) * (x + 0.044715 * x * x * x)
