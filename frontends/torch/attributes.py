"""Where the parameters, buffers and children of a module are found."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import nn

from .tensors import is_compiling


@lru_cache(maxsize=4096)
def are_instances(cls: type, *names: str) -> bool:
    """Whether attributes of these names are what an instance's dictionaries have: the class has neither them, such as a
    property, nor a way of its own to find them. A class is asked once."""
    ways: Any = cls.__getattr__, cls.__getattribute__  # type: ignore[attr-defined]
    is_modules = ways == (nn.Module.__getattr__, object.__getattribute__)
    return is_modules and not any(hasattr(cls, name) for name in names)


def has_own(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether names are those of parameters and buffers, if the module has them. nn.Module's ``__getattr__``, which is
    asked where the class or the instance may have others, takes 0.6 us for each, of 8 to 13 of a forward."""
    cls: Any = type(module)
    return not is_compiling() and are_instances(cls, *names) and module.__dict__.keys().isdisjoint(names)
