"""Registers the operators of ``torch.library`` as fallbacks of Inductor: a part of the torch frontend.

Inductor makes a fallback of an operator that it does not know, which is right. But before torch 2.13 it formats the
operator's arguments for its log first, even where nothing is logged. The text of an argument contains all that it was
computed from, and an argument that is used twice appears twice: in a residual network the text doubles with each
operator. So each operator is made a fallback before Inductor sees it.

Inductor takes seconds to import, which only those who compile should wait for. So the operators are registered after
something else has imported Inductor's table of lowerings. A public function or an operator's fake kernel would be too
late: they do not run where their result is cached, or where the graph was exported before.
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
    waiting = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    if waiting is not None and sys.modules.get(_LOWERING) is None:
        waiting.operators += tuple(operators)
        return
    finder = _Finder(tuple(operators))
    sys.meta_path.insert(0, finder)
    if sys.modules.get(_LOWERING) is not None:
        # import_module waits for a thread that is importing it
        finder.register(import_module(_LOWERING))


class _Finder(MetaPathFinder):
    """Finds the lowerings by the finders behind it, one of another library among them. It is never removed: an import
    in another thread that iterates over ``sys.meta_path`` would skip the next finder."""

    def __init__(self, operators: tuple[Any, ...]) -> None:
        self.operators = operators

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None):
        if name != _LOWERING:
            return None
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else finders
        found = (f.find_spec(name, path, target) for f in behind if hasattr(f, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec, spec.loader, self)
        return spec

    def register(self, lowering: ModuleType) -> None:
        try:
            for operator in self.operators:
                _make_fallback(lowering, operator)
        except Exception as error:  # Inductor must work: without the fallbacks it does, though more slowly
            warnings.warn(f"aotops: Inductor {lowering.torch.__version__} took no fallbacks: {error!r}", stacklevel=2)


class _ThenRegister(Loader):
    """The loader of one import: the module has its own loader again before its first line runs."""

    def __init__(self, spec: ModuleSpec, loader: Loader, finder: _Finder) -> None:
        self.spec, self.loader, self.finder = spec, loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.spec.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.finder.register(module)


def _make_fallback(lowering: ModuleType, operator: Any) -> None:
    """The strides of an operator's results follow from those of its inputs. So these must be what the fake kernel
    saw: exactly where Inductor can do that (torch 2.7), else in the same order."""
    as_traced = getattr(lowering, "constrain_to_fake_tensors", None) or lowering.constrain_to_fx_strides
    # with warn=True a decomposition that is registered already is an error under CI
    lowering.make_fallback(operator, as_traced, warn=False)
