"""Shared by the batch normalizations: axes, formulas."""

from __future__ import annotations

from . import _activation


def channels(call):
    """(C,)"""
    return (call.x[call.axis],)


def dims(rows, of_channels):
    """``Op.dims``: ``rows`` have every axis of x. The channels are independent; the other axes are whole."""

    def stated(call):
        n = len(call.x)
        names = [f"N{i}" for i in range(n)]
        names[call.axis % n] = "c"
        return dict.fromkeys(rows, " ".join(names)) | dict.fromkeys(of_channels, "c")

    return stated


# ------------------------------------------------------------------------------------------------------------ formulas
# x, dy and what is returned are wide.


def _others(x, axis):
    n = len(x.shape)
    return tuple(i for i in range(n) if i != axis % n)


def _terms(x, axis):
    """The elements of a channel; 1 where there are none, whose sums are 0."""
    terms = 1
    for i in _others(x, axis):
        terms = terms * x.shape[i]
    return 1 if isinstance(terms, int) and terms == 0 else terms


def _mean(m, x, axis):
    """Keeps the axes, with length 1."""
    return m.sum(x, _others(x, axis), keepdims=True) / _terms(x, axis)


def _spread(m, of_channels, x, axis):
    """Numbers of channels, with axes of length 1 after them."""
    return m.reshape(of_channels, (x.shape[axis], *(1,) * (len(x.shape) - 1 - axis % len(x.shape))))


def normalized(m, x, weight, bias, eps, axis):
    """y, mean, var."""
    mean = _mean(m, x, axis)
    centred = x - mean
    return _scaled(m, centred, mean, _mean(m, centred * centred, axis), weight, bias, eps, axis)


def normalized_in_one_reduction(m, x, weight, bias, eps, axis):
    """``normalized``, for a compiler."""
    var, mean = m.var_mean(x, _others(x, axis))
    return _scaled(m, x - mean, mean, var, weight, bias, eps, axis)


def _scaled(m, x, mean, var, weight, bias, eps, axis):
    """y, mean, var. x: centred; mean and var: with x's axes."""
    y = x * m.rsqrt(var + eps)
    y = y if weight is None else y * _spread(m, m.wide(weight), x, axis)
    y = y if bias is None else y + _spread(m, m.wide(bias), x, axis)
    return y, m.reshape(mean, (x.shape[axis],)), m.reshape(var, (x.shape[axis],))


def activated(m, z, activation):
    """``_activation.activated``, of which a ReLU keeps NaN."""
    return m.where(z <= 0, m.zeros(z), z) if activation == "relu" else _activation.activated(m, z, activation)


def activation_gradient(m, dy, z, activation):
    """dy f'(z). ``z``: a function of no arguments that computes it."""
    if activation is None:
        return dy
    z = z()
    if activation == "relu":
        return m.where(z <= 0, m.zeros(dy), dy)
    return dy * _activation.slope(m, z, activation)


def z_of_statistics(m, x, weight, bias, mean, var, eps, axis):
    """The input of the activation, by the forward's mean and var."""
    centred, spread = x - _spread(m, mean, x, axis), _spread(m, var, x, axis)
    return _scaled(m, centred, spread, spread, weight, bias, eps, axis)[0]


def gradients(m, g, dmean, dvar, x, weight, eps, axis):
    """dx, dweight, dbias."""
    centred = x - _mean(m, x, axis)
    rstd = m.rsqrt(_mean(m, centred * centred, axis) + eps)
    dweight = m.sum(g * (centred * rstd), _others(x, axis))
    return _gradients(m, g, dmean, dvar, centred, rstd, dweight, weight, axis)


def gradients_of_statistics(m, g, dmean, dvar, x, weight, mean, var, eps, axis):
    """``gradients``, of the forward's mean and var, for a compiler, which fuses expressions of a limited length:
    elements are multiplied by rstd once. x has elements: of none, dweight with an eps of 0 would be 0 * infinity."""
    centred, rstd = x - _spread(m, mean, x, axis), m.rsqrt(_spread(m, var, x, axis) + eps)
    dweight = m.sum(g * centred, _others(x, axis)) * m.reshape(rstd, (x.shape[axis],))
    return _gradients(m, g, dmean, dvar, centred, rstd, dweight, weight, axis)


def _gradients(m, g, dmean, dvar, x, rstd, dweight, weight, axis):
    """dx, dweight, dbias. x: centred; rstd: with x's axes."""
    terms = _terms(x, axis)
    dbias = m.sum(g, _others(x, axis))
    scale = rstd if weight is None else rstd * _spread(m, m.wide(weight), x, axis)
    dx = scale * (g - _spread(m, dbias, x, axis) / terms - x * (rstd * _spread(m, dweight, x, axis) / terms))
    dx = dx if dmean is None else dx + _spread(m, dmean, x, axis) / terms
    dx = dx if dvar is None else dx + _spread(m, dvar, x, axis) * x * 2 / terms
    return dx, dweight, dbias
