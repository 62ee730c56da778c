"""Whether torch allows TF32 on a GPU. From torch 2.9 on its settings have a value for each operator. Where those
differ, ``allow_tf32``, the older setting, raises an error if it is read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .tensors import is_compiling

_resolved: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


def convolutions_allow_tf32() -> bool:
    if _resolved is None or (is_compiling() and _has_one_value("conv")):
        return torch.backends.cudnn.allow_tf32
    return _allows("conv")


def products_allow_tf32() -> bool:
    if _resolved is None or (is_compiling() and _has_one_value("matmul")):
        return torch.backends.cuda.matmul.allow_tf32
    return _allows("matmul")


@torch.compiler.assume_constant_result
def _allows(operator: str) -> bool:
    """A trace keeps the value. That of the older setting it guards."""
    assert _resolved is not None
    return _resolved("cuda", operator) == "tf32"


@torch.compiler.assume_constant_result
def _has_one_value(operator: str) -> bool:
    """Whether the older setting can be read."""
    try:
        _ = torch.backends.cudnn.allow_tf32 if operator == "conv" else torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        return False
    return True
