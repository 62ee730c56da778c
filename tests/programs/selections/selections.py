"""The definitions of the operators of selections.h, and what they are checked with."""

from pathlib import Path

import numpy as np

from aotops import Library, operator
from aotops.testing import Case, Row


@operator(inputs=("x",), outputs=("y",), same_spec_as={"y": "x"})
def flipped(x):
    return (x,), ()


@operator(inputs=("x",), outputs=("place",), shapes={"place": lambda call: call.x[:1]})
def argmax(x):
    return (x,), ()


@operator(
    inputs=("x",),
    outputs=("values", "place"),
    attrs={"k": "int"},
    shapes=dict.fromkeys(("values", "place"), lambda call: (call.x[0], call.k)),
    backward={"inputs": ("dvalues", "place", "x"), "outputs": ("dx",), "same_spec_as": {"dx": "x"}},
)
def topk(x, k=1):
    return (x,), (k,)


@operator(inputs=("x",), outputs=("counts",), attrs={"bins": "int"}, shapes={"counts": lambda call: (call.bins,)})
def histogram(x, bins):
    return (x,), (bins,)


@operator(
    inputs=("table", "index"),
    outputs=("y",),
    shapes={"y": lambda call: (*call.index, call.table[1])},
    backward={"inputs": ("dy", "table", "index"), "outputs": ("dtable",), "same_spec_as": {"dtable": "table"}},
)
def take(table, index):
    return (table, index), ()


@operator(
    inputs=("x", "seed"),
    outputs=("y",),
    attrs={"p": "float"},
    same_spec_as={"y": "x"},
    backward={"inputs": ("dy", "seed"), "outputs": ("dx",), "same_spec_as": {"dx": "dy"}},
)
def drop(x, seed, p=0.5):
    return (x, seed), (p,)


@operator(inputs=("x", "mean"), outputs=("y",), attrs={"momentum": "float"}, same_spec_as={"y": "x"}, mutates=("mean",))
def centered(x, mean, momentum=0.1):
    return (x, mean), (momentum,)


TWENTY = tuple(f"x{i}" for i in range(20))
LIKE = {f"d{slot}": slot for slot in TWENTY}


@operator(
    inputs=TWENTY,
    outputs=("y",),
    same_spec_as={"y": "x0"},
    backward={"inputs": ("dy", *TWENTY), "outputs": tuple(LIKE), "same_spec_as": LIKE},
)
def squares(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15, x16, x17, x18, x19):
    return (x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15, x16, x17, x18, x19), ()


@operator(inputs=("radius", "angle"), outputs=("z",), shapes={"z": lambda call: call.radius})
def polar(radius, angle):
    return (radius, angle), ()


# ---------------------------------------------------------------------------------------------------------- references


def matrix(x):
    if x.ndim != 2:
        raise ValueError("expected two axes")
    return x


def topk_reference(x, k=1):
    if k > matrix(x).shape[1]:
        raise ValueError("expected rows of k elements")
    place = np.argsort(np.where(np.isnan(x), -np.inf, -x), 1, kind="stable")[:, :k]
    return np.take_along_axis(x, place, 1), place


def histogram_reference(x, bins):
    return np.bincount(np.floor(x[(x >= 0) & (x < bins)]).astype(np.int64), minlength=bins)


def take_reference(table, index):
    if index.ndim != 1:
        raise ValueError("expected one axis")
    return matrix(table)[index]


def random_bits(seed, n):
    """SplitMix64, as the kernel has it."""
    with np.errstate(over="ignore"):
        z = np.array(seed, np.int32).view(np.uint32).astype(np.uint64)
        z = (z[0] | z[1] << np.uint64(32)) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)


def drop_reference(x, seed, p=0.5):
    if seed.shape != (2,):
        raise ValueError("expected two numbers")
    kept = (random_bits(seed, x.size) >> np.uint64(11)) * 2.0**-53 >= p
    return np.where(kept.reshape(x.shape), x / (1 - p), 0)


def centered_reference(x, mean, momentum=0.1):
    if matrix(x).shape[1:] != mean.shape or not len(x):
        raise ValueError("expected a row of x")
    return x - mean, mean + momentum * (x.mean(0) - mean)


library = Library(
    "selections",
    [flipped, argmax, topk, histogram, take, drop, centered, squares, polar],
    Path(__file__).with_name("libselections.so"),
    cases="selections",
)
SEED = {"dtypes": {"seed": "int32"}}
CASES = {
    "flipped": Row(lambda x: x.ravel()[::-1].reshape(x.shape), (Case({"x": (4, 6)}), Case({"x": (0,)}))),
    "argmax": Row(lambda x: matrix(x).argmax(1), (Case({"x": (4, 6)}), Case({"x": (3, 1)}), Case({"x": (0, 2)}))),
    "topk": Row(topk_reference, (Case({"x": (4, 6)}, {"k": 3}), Case({"x": (3, 1)}), Case({"x": (0, 2)}))),
    "histogram": Row(
        histogram_reference, (Case({"x": (5, 7)}, {"bins": 4}, scale=2.0), Case({"x": (0,)}, {"bins": 2}))
    ),
    "take": Row(
        take_reference,
        (
            Case({"table": (5, 3), "index": (7,)}, classes={"index": 5}),
            Case({"table": (5, 3), "index": (7,)}, classes={"index": 5}, dtypes={"index": "int32"}),
        ),
    ),
    "drop": Row(
        drop_reference,
        (Case({"x": (4, 6), "seed": (2,)}, {"p": 0.25}, **SEED), Case({"x": (9,), "seed": (2,)}, **SEED)),
    ),
    "centered": Row(centered_reference, (Case({"x": (4, 6), "mean": (6,)}), Case({"x": (1, 3), "mean": (3,)}))),
    "squares": Row(lambda **xs: sum(x * x for x in xs.values()), (Case(dict.fromkeys(TWENTY, (3, 4))),)),
    "polar": Row(
        lambda radius, angle: radius * np.exp(1j * angle), (Case({"radius": (4, 6), "angle": (4, 6)}),)
    ),
}  # fmt: skip
