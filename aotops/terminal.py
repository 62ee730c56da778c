"""Text for people: as wide as the terminal, and in its colors. What goes elsewhere has neither."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from errno import EACCES
from pathlib import Path
from typing import Any

_CODES = {"green": "32", "red": "31", "yellow": "33", "bold": "1"}


def columns() -> int | None:
    """The width of the terminal, or COLUMNS; None where stdout is no terminal: then lines are not wrapped."""
    if os.environ.get("COLUMNS") or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def has_color(stream: Any) -> bool:
    """Whether it is a terminal, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def colored(text: str, color: str) -> str:
    return f"\x1b[{_CODES[color]}m{text}\x1b[0m"


def hung(head: str, text: str, width: int | None, indent: int | None = None) -> list[str]:
    """Lines of ``head`` and ``text``, wrapped at blanks. ``indent``: of the second line on; None: under ``text``."""
    if width is None:
        return [f"{head}{text}".rstrip()]
    more = " " * (len(head) if indent is None else indent)
    whole = {"break_long_words": False, "break_on_hyphens": False}  # a path is not cut
    lines = textwrap.wrap(text, width, initial_indent=head, subsequent_indent=more, **whole)  # type: ignore[arg-type]
    return lines or [head.rstrip()]


def check_known(what: str, given: Iterable[str] | None, known: Iterable[str]) -> None:
    """Raises ValueError for a name that is not known."""
    known = list(known)
    for name in given or ():
        if name not in known:
            raise ValueError(f"{what} has {name!r}, expected some of {', '.join(known)}")


def check_writable(what: str, path: Path | None) -> None:
    """Raises ValueError for a file, or a folder of files, that cannot be written: before what takes long. Folders that
    are not there are made later."""
    if path is None:
        return
    where = next(each for each in (path, *path.absolute().parents) if each.exists())
    if where != path and not where.is_dir():
        raise ValueError(f"{what} is {path}, but {where} is a file")
    if not os.access(where, os.W_OK):
        raise ValueError(f"{what} is {path}, which cannot be written: {os.strerror(EACCES)}")


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The text of an error: there is no such name; the names that are like it, or else all of them."""
    from difflib import get_close_matches  # seldom needed

    spelled: dict[str, str] = {each.lower(): each for each in known}
    alike: Sequence[str] = get_close_matches(name.lower(), spelled, 3)
    if alike:
        return f"there is no {what} {name!r}: did you mean {' or '.join(spelled[each] for each in alike)}?"
    return f"there is no {what} {name!r}; there are {', '.join(spelled.values())}"
