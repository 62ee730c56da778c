"""A digest of what a definition of an operator is made of: the code of its functions and of all that they call by name,
and the values that they read. What is the same in every process with these versions of Python and torch has the same
digest."""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import sys
import sysconfig
from collections import ChainMap, _tuplegetter  # type: ignore[attr-defined]
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from aotops.library import Library

_VALUES = (type(None), bool, int, float, complex, str, bytes, type(...), PurePath, torch.dtype, torch.device)
_VERSIONED = {"aotops", "torch", "numpy"}
"""Packages whose functions and classes are known by their names, as those of Python are: the key of a cache has their
versions, or they do not change what an operator is."""
_PYTHON = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
_UNREAD = {
    "globals", "vars", "locals", "eval", "exec", "compile", "__import__", "import_module", "__globals__",
    "__builtins__", "_getframe", "currentframe", "modules", "getattr", "attrgetter", "methodcaller", "environ",
    "environb", "getenv", "getenvb", "open", "read_text", "read_bytes", "load", "loadtxt", "genfromtxt", "fromfile",
    "memmap",
}  # fmt: skip
"""Names by which code reads what its own names do not tell."""
_MOST = 10_000
"""Parts of a definition from which it is taken for unknown, which takes some tens of milliseconds."""


def digest(part: Any) -> bytes | None:
    """None if it reaches what has no digest, such as a tensor or a file."""
    try:
        return _Walk().of(part)
    except (_UnknownError, RecursionError):
        return None


class _UnknownError(Exception):
    pass


class _Plain:
    pass


class _Walk:
    def __init__(self) -> None:
        self.seen: dict[Any, tuple[bytes, Any]] = {}  # what is kept alive keeps its id

    def of(self, part: Any, names: Iterable[str] = ()) -> bytes:
        """``names``: of the code that reaches the part, which may be attributes of a module."""
        if isinstance(part, _VALUES) and not isinstance(part, enum.Enum):
            if not _is_versioned(type(part)):  # with methods of its own
                raise _UnknownError
            return _hash(type(part).__qualname__, repr(part))
        if isinstance(part, ModuleType) and _is_versioned(part):
            return _hash("module", part.__name__)
        key = id(part) if not isinstance(part, ModuleType) else (id(part), tuple(names))
        if key in self.seen:
            return self.seen[key][0]
        if len(self.seen) > _MOST:
            raise _UnknownError
        self.seen[key] = _hash("again", str(len(self.seen))), part
        return self._module(part, names) if isinstance(part, ModuleType) else self._part(part)

    def _part(self, part: Any) -> bytes:
        if isinstance(part, Library):
            return _hash("library", part.name)
        if isinstance(part, CodeType):
            return self._code(part)
        if isinstance(part, (staticmethod, classmethod, MethodType)):
            return self._all(part.__func__, getattr(part, "__self__", None))
        if isinstance(part, functools.partial):
            return self._all(part.func, part.args, part.keywords)
        if isinstance(part, property):
            return self._all(part.fget, part.fset, part.fdel)
        if isinstance(part, enum.Enum):
            return self._all(type(part), part.name)
        if isinstance(part, (BuiltinFunctionType, type, FunctionType)) and _is_versioned(part):
            own = _contents(part) if isinstance(part, FunctionType) else []
            return _hash(part.__module__ or "", part.__qualname__, *(self.of(value).hex() for value in own))
        if isinstance(part, FunctionType):
            return self._function(part)
        if isinstance(part, type):
            members = {name: value for name, value in vars(part).items() if not _is_of_class(name, value)}
            return self._all(part.__qualname__, type(part), *part.__bases__, members)
        if isinstance(part, functools._lru_cache_wrapper):
            return self.of(part.__wrapped__)
        if isinstance(part, (tuple, list)):
            return self._all(type(part), getattr(part, "__dict__", None), *part)
        if isinstance(part, (set, frozenset)):
            kind = self._all(type(part), getattr(part, "__dict__", None))
            return _hash(kind.hex(), *sorted(self.of(one).hex() for one in part))
        if isinstance(part, Mapping):
            more = getattr(part, "default_factory", None), getattr(part, "__dict__", None)
            return self._all(type(part), *more, *(one for pair in part.items() for one in pair))
        if is_dataclass(part):
            named = {field.name: getattr(part, field.name) for field in fields(part)}
            others = {name: value for name, value in getattr(part, "__dict__", {}).items() if name not in named}
            others = {name: value for name, value in others.items() if not _is_cached_property(type(part), name)}
            return self._all(type(part), *named.values(), others)
        if type(part).__basicsize__ > _Plain.__basicsize__:  # it has more than its attributes
            raise _UnknownError
        if not _is_versioned(type(part)) and hasattr(part, "__dict__") and not _slots(type(part)):
            return self._all(type(part), vars(part))
        raise _UnknownError

    def _all(self, *parts: Any) -> bytes:
        return _hash(*(self.of(part).hex() for part in parts))

    def _function(self, function: FunctionType) -> bytes:
        names = sorted(_names(function.__code__))
        if not _UNREAD.isdisjoint(names):
            raise _UnknownError
        known = ChainMap(_imported(function.__code__, function.__globals__), function.__globals__)
        found = [self.of(known[name], names).hex() if name in known else name for name in names]
        enclosed = [self.of(value, names).hex() for value in _contents(function)]
        return _hash(self.of(function.__code__).hex(), *found, "enclosed", *enclosed)

    def _module(self, module: ModuleType, names: Iterable[str]) -> bytes:
        found = {name: vars(module)[name] for name in names if name in vars(module)}
        return _hash("module", module.__name__, *(self.of(value, names).hex() for value in found.values()))

    def _code(self, code: CodeType) -> bytes:
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        own = code.co_code, counts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return self._all(*own, getattr(code, "co_exceptiontable", b""), code.co_consts)


def _hash(*parts: str) -> bytes:
    return sha256("\0".join(f"{len(part)} {part}" for part in parts).encode(errors="surrogatepass")).digest()


def _names(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _contents(function: FunctionType) -> list[Any]:
    """The defaults of its parameters, and what it encloses."""
    found: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    own = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
    return [*found, own] if own else found


def _imported(code: CodeType, scope: Mapping[str, Any]) -> dict[str, ModuleType]:
    """The modules that a function imports when it is called, by what no name of its own is."""
    found: dict[str, ModuleType] = {}
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for i, step in enumerate(steps):
        if step.opname != "IMPORT_NAME":
            continue
        level, name = steps[i - 2].argval, step.argval
        if level:
            base = (scope.get("__package__") or "").rsplit(".", level - 1)[0]
            name = f"{base}.{name}" if name else base
        module = sys.modules.get(name)
        if module is None and not _is_known(name):
            raise _UnknownError
        if module is not None:
            found[step.argval] = module
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _imported(inner, scope)
    return found


def _is_versioned(part: Any) -> bool:
    """Whether it is of a package whose version is known."""
    if isinstance(part, ModuleType):
        name = part.__name__
    elif isinstance(part, FunctionType):  # which may have the __module__ of another that it wraps
        name = part.__globals__.get("__name__", "")
    else:
        name = part.__module__ or "builtins"
    return _is_known(name)


@functools.cache
def _is_known(name: str) -> bool:
    root = name.partition(".")[0]
    if root in _VERSIONED:
        return True
    if root not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(root), "__file__", None)  # a module of one's own may have the name of Python's
    return file is None or (file.startswith(_PYTHON) and "site-packages" not in file)


def _is_cached_property(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)


def _slots(kind: type) -> bool:
    return any(vars(one).get("__slots__") for one in kind.__mro__ if not _is_versioned(one))


_OF_CLASS = (
    "__module__", "__doc__", "__annotations__", "__annotate__", "__annotations_cache__", "__annotate_func__",
    "__firstlineno__", "__static_attributes__", "__dataclass_fields__", "__dataclass_params__",
)  # fmt: skip
"""Python and dataclasses put these into each class; they have no meaning of their own."""


def _is_of_class(name: str, value: Any) -> bool:
    return name in _OF_CLASS or inspect.isgetsetdescriptor(value) or isinstance(value, _tuplegetter)
