"""The definitions."""

from __future__ import annotations

from aotops import operator


@operator(inputs=("x", "y"), outputs=("out",), same_spec_as={"out": "x"}, elementwise=True, vmappable=("x", "y", "out"))
def vector_add(x, y):
    """x + y."""
    return (x, y), ()


@operator(inputs=("x",), outputs=("y",), same_spec_as={"y": "x"}, vmappable=("x", "y"), min_rank=1)
def row_softmax(x):
    """softmax along the last axis."""
    return (x,), ()


@operator(inputs=("x",), outputs=("y",), attrs={"p": "float", "seed": "int"}, same_spec_as={"y": "x"})
def seeded_dropout(x, p=0.5, seed=0):
    """x with elements left out at random."""
    return (x,), (p, seed)


@operator(
    inputs=("dy", "x", "weight", "mean", "rstd"),
    outputs=("dx", "dweight", "dbias"),
    workspace=("workspace",),
    attrs={"eps": "float"},
    same_spec_as={"dx": "x", "dweight": "weight", "dbias": "weight"},
)
def norm_backward(dy, x, weight, mean, rstd, eps=1e-5):
    return (dy, x, weight, mean, rstd), (eps,)


@operator(
    inputs=("x", "weight", "bias"),
    outputs=("y",),
    residuals=("mean", "rstd"),
    always_save_residuals=True,
    workspace=("workspace",),
    attrs={"eps": "float"},
    same_spec_as={"y": "x"},
    shapes={"mean": lambda call: call.x[:-1], "rstd": lambda call: call.x[:-1]},
    backward=norm_backward,
)
def norm(x, weight, bias, eps=1e-5):
    """layer norm along the last axis."""
    return (x, weight, bias), (eps,)


@operator(inputs=("a", "b"), outputs=("c",), shapes={"c": lambda call: (*call.a[:-1], call.b[-1])})
def product(a, b):
    """a @ b."""
    return (a, b), ()


@operator(inputs=("q", "k", "v"), outputs=("o",), attrs={"causal": "bool", "scale": "float"}, same_spec_as={"o": "q"})
def attend(q, k, v, causal=False, scale=0.125):
    """Attention of heads of 64."""
    return (q, k, v), (causal, scale)
