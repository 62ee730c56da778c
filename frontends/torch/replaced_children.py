"""Attributes of modules, and their hooks, which the forwards of replaced ones read at each call.

Where nothing is traced, a child or a parameter is found in the module's own dictionary of them, before which only an
attribute of the instance, or of its class, comes: ``nn.Module.__getattr__`` takes 0.5 us for each.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks

from aotops.call import builtin, struct_capsule

from .attributes import are_instances
from .tensors import READS_TENSORS, is_compiling

GLOBAL_HOOKS = (
    hooks._global_forward_hooks,
    hooks._global_forward_pre_hooks,
    hooks._global_backward_hooks,
    hooks._global_backward_pre_hooks,
)
_IN_C: Callable[[nn.Module], bool] | None = (
    builtin("bare", "aot_torch_bare", struct_capsule((c_void_p * 4)(*map(id, GLOBAL_HOOKS)), GLOBAL_HOOKS))
    if READS_TENSORS
    else None
)


def is_bare(module: nn.Module) -> bool:
    """Whether a call of the module is its class's forward, and nothing more."""
    if _IN_C and not is_compiling():
        return _IN_C(module)
    return not (
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
    )


def child(module: nn.Module, name: str) -> Any:
    """``getattr`` of a child."""
    return _found(module, module._modules, name)


def parameter(module: nn.Module, name: str) -> Any:
    """``getattr`` of a parameter."""
    return _found(module, module._parameters, name)


def _found(module: nn.Module, among: dict[str, Any], name: str) -> Any:
    if name in among and name not in module.__dict__ and are_instances(type(module), name):  # type: ignore[arg-type]
        return among[name]
    return getattr(module, name)
