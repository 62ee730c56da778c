"""Attributes of modules, which the forwards of replaced ones read at each call.

Where nothing is traced, a child or a parameter is found in the module's own dictionary of them, before which only an
attribute of the instance, or of its class, would come: ``nn.Module.__getattr__`` takes 0.5 us for each.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks

from aotops.call import builtin, struct_capsule

from .tensors import READS_TENSORS, is_compiling

_GLOBAL = (
    hooks._global_forward_hooks,
    hooks._global_forward_pre_hooks,
    hooks._global_backward_hooks,
    hooks._global_backward_pre_hooks,
)
_IN_C: Callable[[nn.Module], bool] | None = (
    builtin("bare", "aot_torch_bare", struct_capsule((c_void_p * 4)(*map(id, _GLOBAL)), _GLOBAL))
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
    """``getattr`` of a child, where no class of the module has an attribute of its name."""
    children = module._modules
    return children[name] if name in children and name not in module.__dict__ else getattr(module, name)


def parameter(module: nn.Module, name: str) -> Any:
    """``getattr`` of a parameter, as ``child``."""
    parameters = module._parameters
    return parameters[name] if name in parameters and name not in module.__dict__ else getattr(module, name)
