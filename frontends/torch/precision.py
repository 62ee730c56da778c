"""Whether torch allows TF32 on a GPU. From torch 2.9 on its settings have a value for each operator. Where those
differ, ``allow_tf32``, the older setting, raises an error if it is read."""

from __future__ import annotations

import torch

from . import private
from .tensors import is_compiling


def convolutions_allow_tf32() -> bool:
    if private.precision_of is None or (is_compiling() and _has_one_value("conv")):
        return torch.backends.cudnn.allow_tf32
    return _allows("conv")


def products_allow_tf32() -> bool:
    if private.precision_of is None or (is_compiling() and _has_one_value("matmul")):
        return torch.backends.cuda.matmul.allow_tf32
    return _allows("matmul")


@private.constant
def _allows(operator: str) -> bool:
    """A trace keeps the value. That of the older setting it guards."""
    return private.precision_of("cuda", operator) == "tf32"


@private.constant
def _has_one_value(operator: str) -> bool:
    """Whether the older setting can be read."""
    try:
        _ = torch.backends.cudnn.allow_tf32 if operator == "conv" else torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        return False
    return True
