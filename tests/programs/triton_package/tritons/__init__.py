"""Operators whose kernels are Triton's."""

from pathlib import Path

from aotops import Library

from . import ops

library = Library(
    "tritons",
    [ops.vector_add, ops.row_softmax, ops.seeded_dropout, ops.norm, ops.product, ops.attend],
    Path(__file__).with_name("libtritons.so"),
    cases="tritons.cases",
    triton="tritons.launch",
)
