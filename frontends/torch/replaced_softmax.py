"""The forward of a softmax's module, as those of replaced_forwards.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import functional as F
from .bytecode import Names


def softmax(names: Names, **_: Any) -> Callable[..., Any]:
    def serve(self, x):
        if self.dim is None or not x.is_floating_point() or (x.is_cuda and not has_whole_vectors(x, self.dim)):
            return NotImplemented
        return F.softmax(x, self.dim)

    return serve


def has_whole_vectors(x: Tensor, axis: int) -> bool:
    """Whether the axis is the last, of whole vectors of 16 bytes. Of others the library's kernels have a block for each
    row: 49 elements of 16 bits took 7 times as long as torch's (docs/lab_notes.md)."""
    return x.dim() > 0 and axis in (-1, x.dim() - 1) and x.shape[-1] * x.element_size() % 16 == 0
