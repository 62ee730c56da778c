"""The operators of ``torch.library`` made known to Inductor: part of the torch frontend, and no frontend itself.

Inductor takes an operator that it has not heard of as a fallback, which is right, but before torch 2.13 it writes the
operator's arguments down for its log first, whether the log wants them or not. An argument is written with all that
it was computed from, and one that is used twice is written twice: in a residual network the text doubles with each
operator. So each operator becomes a fallback before Inductor meets it, which is what Inductor would make of it itself.

Inductor takes seconds to import, and who does not compile should not wait for it. So the operators are registered when
somebody else has imported its table of lowerings. There is no other moment that serves everyone: a public function, or
an operator's fake kernel, is not run again where its result is in a cache, and neither hears of a graph that was
exported before.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LOWERING = "torch._inductor.lowering"


def register(operators: Iterable[Any]) -> None:
    """Makes these ``OpOverload`` fallbacks of Inductor: now, or as soon as it is imported."""
    finder = _Finder(tuple(operators))
    sys.meta_path.insert(0, finder)
    if sys.modules.get(_LOWERING) is not None:
        # waits for a thread that is at it
        finder.register(import_module(_LOWERING))


class _Finder(MetaPathFinder):
    """Finds the lowerings where the others do. It stays: to take it away would make an import in another thread, which
    is at this place of the list, skip the next finder."""

    def __init__(self, operators: Sequence[Any]) -> None:
        self.operators = operators

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None):
        if name != _LOWERING:
            return None
        others = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec, spec.loader, self)
        return spec

    def register(self, lowering: ModuleType) -> None:
        try:
            for operator in self.operators:
                _make_fallback(lowering, operator)
        except Exception as error:  # Inductor must come up: without us it compiles the same, though it may take longer
            warnings.warn(f"aotops: Inductor {lowering.torch.__version__} took no fallbacks: {error!r}", stacklevel=2)


class _ThenRegister(Loader):
    """A loader for one module, which has its own again before its first line runs."""

    def __init__(self, spec: ModuleSpec, loader: Loader, finder: _Finder) -> None:
        self.spec, self.loader, self.finder = spec, loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.spec.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.finder.register(module)


def _make_fallback(lowering: ModuleType, operator: Any) -> None:
    """An operator's results have strides that follow from those of its inputs, so these must be what the fake kernel
    saw: to the number where Inductor keeps them (torch 2.7), else in their order."""
    as_traced = getattr(lowering, "constrain_to_fake_tensors", None) or lowering.constrain_to_fx_strides
    # what warn asks for is an error, under CI, where somebody has registered a decomposition
    lowering.make_fallback(operator, as_traced, warn=False)
