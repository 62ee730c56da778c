"""Shared by the norms over trailing axes."""

from __future__ import annotations


def axes(normalized_shape):
    if type(normalized_shape) is tuple:
        return normalized_shape
    return tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)


def normalized(call):
    return call.normalized_shape


def dims(rows, parameters, statistics):
    """``Op.dims``: ``rows`` have every axis, ``parameters`` the normalized ones, which are whole."""

    def stated(call):
        whole = " ".join(f"N{i}" for i in range(len(call.normalized_shape)))
        return dict.fromkeys(rows, f"... {whole}") | dict.fromkeys(parameters, whole) | {statistics: "... S"}

    return stated


def statistics(n):
    """n numbers for each row."""
    return lambda call: (*call.x[: -len(call.normalized_shape)], n)
