"""The libraries of operators in this environment: the built-in one, and those that installed packages offer.

A package offers a library through an entry point, in its pyproject.toml:

    [project.entry-points."aotops.libraries"]
    scale = "scale:library"

The commands find the package of the current directory too, installed or not.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from . import terminal
from .library import Library, LibraryError
from .op import Op
from .spec import DEVICES

GROUP = "aotops.libraries"
_directory: Path | None = None


def libraries() -> dict[str, Library]:
    """Every library by name, the built-in one first.

    Raises:
        LibraryError: a package's entry point does not import, or is not a library of that name.
    """
    found = offered()
    for each in found.values():
        if isinstance(each, LibraryError):
            raise each
    return found  # type: ignore[return-value]


def offered() -> dict[str, Library | LibraryError]:
    """Every library by name, the built-in one first; the error of one that does not import."""
    from .ops import BUILTIN

    points = {point.name: point for point in (*entry_points(group=GROUP), *_points(_directory))}
    return {BUILTIN.name: BUILTIN} | {name: _loaded(points[name]) for name in sorted(points)}


def use(directory: Path | None) -> None:
    """Adds the libraries of the package in a directory, installed or not: those of its pyproject.toml, imported from
    there. The commands do so for the current directory."""
    global _directory
    _directory = directory and directory.absolute()
    if _points(_directory) and str(_directory) not in sys.path:
        sys.path.insert(0, str(_directory))


def directory() -> Path | None:
    """The directory given to ``use``."""
    return _directory


@cache
def _points(directory: Path | None) -> tuple[EntryPoint, ...]:
    """The entry points in a directory's pyproject.toml. None if there is no reader of TOML (Python 3.10)."""
    file = directory and directory / "pyproject.toml"
    if file is None or not file.exists() or GROUP not in (content := file.read_text()):
        return ()
    try:
        toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        return ()
    try:
        offered = toml.loads(content).get("project", {}).get("entry-points", {}).get(GROUP, {})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return tuple(EntryPoint(name, value, GROUP) for name, value in offered.items())


def library(name: str) -> Library:
    """A library by name.

    Raises:
        KeyError: there is no such library.
        LibraryError: its package does not import.
    """
    found = offered()
    if name not in found:
        raise KeyError(terminal.unknown("library", name, found))
    if isinstance(found[name], LibraryError):
        raise found[name]  # type: ignore[misc]
    return found[name]  # type: ignore[return-value]


def get(name: str) -> Op:
    """An operator by name: ``"scale"``, or ``"library.scale"`` where several libraries have one of that name.

    Raises:
        KeyError: there is no such operator, or several.
    """
    wanted, _, op = name.rpartition(".")
    known = {each: library for each, library in offered().items() if isinstance(library, Library)}
    found = [known[each].ops[op] for each in known if wanted in ("", each) and op in known[each].ops]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{each.library.name}.{op}" for each in found)
        raise KeyError(f"{name!r} is in several libraries, expected one of {names}")
    all_of_them = sorted(f"{each}.{op}" if wanted else op for each in known for op in known[each].ops)
    raise KeyError("; ".join([terminal.unknown("operator", name, all_of_them), *_broken()]))


def select(names: Iterable[str]) -> dict[str, Op]:
    """Operators, each by the shortest name that ``get`` takes. A name may be that of a library, for all of its
    operators.

    Raises:
        KeyError: there is no such operator or library.
    """
    selected = {}
    for name in names:
        try:
            op = get(name)
            selected[_name(op)] = op
        except KeyError:
            owner = offered().get(name)
            if not isinstance(owner, Library):
                raise
            selected |= {_name(op): op for op in owner.ops.values()}
    return selected


def names() -> list[str]:
    """All that ``select`` takes: each operator by its shortest name, and the libraries."""
    known = [each for each in offered().values() if isinstance(each, Library)]
    times = Counter(op for each in known for op in each.ops)
    operators = (op if times[op] == 1 else f"{each.name}.{op}" for each in known for op in each.ops)
    return [*operators, *(each.name for each in known)]


def _name(op: Op) -> str:
    try:
        return op.name if get(op.name) is op else f"{op.library.name}.{op.name}"
    except KeyError:
        return f"{op.library.name}.{op.name}"


def _broken() -> list[str]:
    return [str(each) for each in offered().values() if isinstance(each, LibraryError)]


@cache
def _loaded(point: EntryPoint) -> Library | LibraryError:
    try:
        library = point.load()
    except Exception as error:
        return LibraryError(f"the entry point {point.name} = {point.value!r} does not load: {error}")
    if not isinstance(library, Library) or library.name != point.name:
        what = f"the library {library.name!r}" if isinstance(library, Library) else f"a {type(library).__name__}"
        return LibraryError(
            f"the entry point {point.name} = {point.value!r} is {what}, expected a Library of that name"
        )
    return library


# ---------------------------------------------------------------------------------------------------------- the listing


def describe() -> list[dict[str, Any]]:
    """Every library: name, file, error (None where it loads) and operators, each with name, signature, the devices that
    it has entries for, and whether it has a gradient."""
    return [_described(name, each) for name, each in offered().items()]


def _described(name: str, library: Library | LibraryError) -> dict[str, Any]:
    if isinstance(library, LibraryError):
        return {"library": name, "file": None, "error": str(library), "operators": []}
    error = None
    try:
        library.functions  # noqa: B018, loads it
    except (LibraryError, ValueError) as caught:
        error = str(caught)
    operators = [
        {
            "name": op.name,
            "signature": f"{op.name}{inspect.signature(op.bind)}",
            "devices": [] if error else [device for device in DEVICES if has_entry(op, device)],
            "gradient": op.has_gradient,
        }
        for op in library.ops.values()
    ]
    return {"library": name, "file": str(library.path), "error": error, "operators": operators}


def has_entry(op: Op, device: str) -> bool:
    return op.library.entry_address(op, device) is not None


def describe_operator(op: Op) -> dict[str, Any]:
    """The text of ``describe`` on an operator, and its library, docstring, inputs, outputs and attributes."""
    owner = _described(op.library.name, op.library)
    (own,) = (each for each in owner["operators"] if each["name"] == op.name)
    doc = inspect.getdoc(op.bind)
    inputs = {slot: "optional" if slot in op.optional else "" for slot in op.inputs}
    more = {"inputs": inputs, "outputs": [*op.outputs], "attributes": dict(op.attrs), "doc": doc}
    return {"library": owner["library"], "file": owner["file"], "error": owner["error"]} | own | more


def render(found: list[dict[str, Any]]) -> str:
    """The text of ``describe``'s result."""
    return "\n\n".join(_rendered(each) for each in found)


def render_operator(op: dict[str, Any]) -> str:
    """The text of ``describe_operator``'s result."""
    width = terminal.columns()
    facts = {
        "library": f"{op['library']}, {op['file']}",
        "error": op["error"],
        "devices": ", ".join(op["devices"]) or "no entry",
        "gradient": "yes" if op["gradient"] else "none",
        "inputs": ", ".join(f"{slot} ({kind})" if kind else slot for slot, kind in op["inputs"].items()),
        "outputs": ", ".join(op["outputs"]) or "none: it writes to its inputs",
        "attributes": ", ".join(f"{name}: {kind}" for name, kind in op["attributes"].items()),
    }
    lines = terminal.hung("", op["signature"], width, 4)
    for name, text in facts.items():
        lines += terminal.hung(f"  {name:12}", text, width) if text else []
    for line in ("", *(op["doc"] or "").splitlines()) if op["doc"] else ():
        text = line.lstrip()
        margin = len(line) - len(text)
        lines += terminal.hung(" " * margin, text, width, margin and margin + 4)
    return "\n".join(lines)


def _rendered(each: dict[str, Any]) -> str:
    width = terminal.columns()
    lines = terminal.hung(f"{each['library']}  ", each["file"] or "", width)
    if each["error"]:
        lines += terminal.hung("  error: ", each["error"], width)
    longest = max((len(op["signature"]) for op in each["operators"]), default=0)
    room = longest if width is None else min(longest, max(width - 23, 30))
    for op in each["operators"]:
        first, *more = terminal.hung("", op["signature"], room, 4)
        devices, gradient = ", ".join(op["devices"]) or "no entry", "gradient" if op["gradient"] else ""
        lines.append(f"  {first:{room}}  {devices:9}  {gradient}".rstrip())
        lines += [f"  {line}" for line in more]
    return "\n".join(lines)
