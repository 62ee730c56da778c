"""Shared by the norms over trailing axes."""

from __future__ import annotations


def axes(normalized_shape):
    if type(normalized_shape) is tuple:
        return normalized_shape
    return tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)


def affine(call):
    """The shape of the gradients of weight and bias."""
    return call.normalized_shape if call.weight is None else call.weight


def dims(rows, parameters, statistics):
    """``Op.dims``: ``rows`` have every axis, ``parameters`` the normalized ones, which are whole, and perhaps more."""

    def stated(call):
        whole = " ".join(f"N{i}" for i in range(len(call.normalized_shape)))
        lines = "".join(f"p{i} " for i in range(len(affine(call)) - len(call.normalized_shape)))
        stated = dict.fromkeys(rows, f"... {lines}{whole}") | dict.fromkeys(parameters, lines + whole)
        return stated | {statistics: f"... {lines}S"}

    return stated


def statistics(n):
    """n numbers for each row."""
    return lambda call: (*call.x[: -len(call.normalized_shape)], n)


# ------------------------------------------------------------------------------------------------------------ formulas
# x, dy and what is returned are wide; ``n`` is the number of axes normalized over.


def _last(n):
    return tuple(range(-n, 0))


def layer_normalized(m, x, n, eps):
    """(x - mean) * rstd, and rstd."""
    centered = x - m.mean(x, _last(n))
    rstd = m.rsqrt(m.mean(centered * centered, _last(n)) + eps)
    return centered * rstd, rstd


def rms_normalized(m, x, n, eps):
    """x * rstd, and rstd. ``eps``: None for the machine epsilon."""
    rstd = m.rsqrt(m.mean(x * x, _last(n)) + (m.epsilon(x) if eps is None else eps))
    return x * rstd, rstd


def scaled(m, x, weight, offset, bias=None):
    y = x if weight is None else x * (m.wide(weight) + offset if offset else m.wide(weight))
    return y if bias is None else y + m.wide(bias)


def layer_norm_gradients(m, dy, x, weight, normalized_shape, eps, offset):
    """dx, dweight, dbias."""
    n = len(normalized_shape)
    normed, rstd = layer_normalized(m, x, n, eps)
    g = scaled(m, dy, weight, offset)
    dx = rstd * (g - m.mean(g, _last(n)) - normed * m.mean(g * normed, _last(n)))
    axes = _rows(x, weight, n)
    return dx, m.sum(dy * normed, axes), m.sum(dy, axes)


def rms_norm_gradients(m, dy, x, weight, normalized_shape, eps, offset):
    """dx, dweight, dbias."""
    n = len(normalized_shape)
    normed, rstd = rms_normalized(m, x, n, eps)
    g = scaled(m, dy, weight, offset)
    dx = rstd * (g - normed * m.mean(g * normed, _last(n)))
    axes = _rows(x, weight, n)
    return dx, m.sum(dy * normed, axes), m.sum(dy, axes)


def _rows(x, weight, n):
    """The axes that x has and the weight has not, which has those normalized over if it is absent."""
    return tuple(range(len(x.shape) - (n if weight is None else len(weight.shape))))
