"""Something to do once a module is imported, which is slow to import or seldom needed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, run: Callable[[], None]) -> None:
    """Runs a function, which must not raise: now, if the module is imported, or as soon as it is."""
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _Finder) and finder.name == name), None)
    if finder is None:
        finder = _Finder(name)
        sys.meta_path.insert(0, finder)
    finder.functions.append(run)
    if sys.modules.get(name) is not None:
        import_module(name)  # waits for a thread that is importing it
        finder.run()


class _Finder(MetaPathFinder):
    """Finds the module by the finders behind it, one of another library among them. It is never removed: an import in
    another thread that iterates over ``sys.meta_path`` would skip the next finder."""

    def __init__(self, name: str) -> None:
        self.name, self.functions = name, deque[Callable[[], None]]()

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

    def run(self) -> None:
        """Each function once, of whichever thread is first."""
        while self.functions:
            try:
                function = self.functions.popleft()
            except IndexError:
                return
            function()


class _ThenRun(Loader):
    """The loader of one import: the module has its own loader again before its first line runs."""

    def __init__(self, spec: ModuleSpec, loader: Loader, finder: _Finder) -> None:
        self.spec, self.loader, self.finder = spec, loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.spec.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.finder.run()
