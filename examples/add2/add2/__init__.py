"""The operator add2: its definition, and the library of a package that has it."""

from __future__ import annotations

from pathlib import Path

from aotops import Library, operator


@operator(
    inputs=("a", "b"), outputs=("c",), same_spec_as={"c": "a"}, vmappable=("a", "b", "c"), elementwise=True,
    backward={"inputs": ("dc",), "outputs": ("da", "db"), "alias": {"da": "dc", "db": "dc"}},
)  # fmt: skip
def add2(a, b):
    """``a + b``, of two tensors of one shape and dtype."""
    return (a, b), ()


library = Library("add2", [add2], Path(__file__).with_name("libadd2.so"))
