"""Runs something as soon as a module of torch is imported that takes long to import: a part of the torch frontend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


def when_imported(name: str, action: Action) -> None:
    """Calls ``action`` with the module: now, or after something else has imported it."""
    waiting = next((f for f in sys.meta_path if isinstance(f, _Finder) and f.name == name), None)
    if waiting is not None and sys.modules.get(name) is None:
        waiting.actions += (action,)
        return
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    if sys.modules.get(name) is not None:
        # import_module waits for a thread that is importing it
        finder.run(import_module(name))


class _Finder(MetaPathFinder):
    """Finds the module by the finders behind it, one of another library among them. It is never removed: an import in
    another thread that iterates over ``sys.meta_path`` would skip the next finder."""

    def __init__(self, name: str, action: Action) -> None:
        self.name, self.actions = name, (action,)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None):
        if name != self.name:
            return None
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else finders
        found = (f.find_spec(name, path, target) for f in behind if hasattr(f, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRun(spec, spec.loader, self)
        return spec

    def run(self, module: ModuleType) -> None:
        for action in self.actions:
            action(module)


class _ThenRun(Loader):
    """The loader of one import: the module has its own loader again before its first line runs."""

    def __init__(self, spec: ModuleSpec, loader: Loader, finder: _Finder) -> None:
        self.spec, self.loader, self.finder = spec, loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.spec.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.finder.run(module)
