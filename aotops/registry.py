"""The libraries of operators in this environment: the built-in one, and those that installed packages offer.

A package offers a library through an entry point, in its pyproject.toml:

    [project.entry-points."aotops.libraries"]
    scale = "scale:library"
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from .library import Library, LibraryError
from .op import Op

GROUP = "aotops.libraries"


def libraries() -> dict[str, Library]:
    """Every library by name, the built-in one first.

    Raises:
        LibraryError: a package's entry point does not import, or is not a library of that name.
    """
    from .ops import BUILTIN

    offered = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return {BUILTIN.name: BUILTIN} | {point.name: _load(point) for point in offered}


def get(name: str) -> Op:
    """An operator by name: ``"scale"``, or ``"library.scale"`` where several libraries have one of that name.

    Raises:
        KeyError: there is no such operator, or several.
    """
    library, _, op = name.rpartition(".")
    known = libraries()
    found = [known[each].ops[op] for each in known if library in ("", each) and op in known[each].ops]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{each.library.name}.{op}" for each in found)
        raise KeyError(f"{name!r} is in several libraries, expected one of {names}")
    names = ", ".join(sorted(op for each in known.values() for op in each.ops))
    raise KeyError(f"there is no operator {name!r}; there are {names}")


@cache
def _load(point: EntryPoint) -> Library:
    try:
        library = point.load()
    except Exception as error:
        raise LibraryError(f"the entry point {point.name} = {point.value!r} does not load: {error}") from error
    if not isinstance(library, Library) or library.name != point.name:
        what = f"the library {library.name!r}" if isinstance(library, Library) else f"a {type(library).__name__}"
        raise LibraryError(f"the entry point {point.name} = {point.value!r} is {what}, expected a Library of that name")
    return library
