"""What ``check`` found: an item for each check, and for a failure the smallest case and the line that reproduces it."""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

PASS, FAIL, UNAVAILABLE = "pass", "fail", "not available"
_COLORS = {PASS: "green", FAIL: "bold red", UNAVAILABLE: "yellow"}


@dataclass(frozen=True)
class Failure:
    message: str
    case: str = ""
    """The smallest case that fails: shapes and attributes."""
    dtype: str = ""
    line: str = ""
    """Python that runs the check on this case alone."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of the worst element, where there is one: at, got, expected, allowed."""


@dataclass(frozen=True)
class Item:
    check: str
    """A name that ``check(only=...)`` takes."""
    where: str
    """The framework and device, or what else was checked."""
    status: str
    """"pass", "fail" or "not available"."""
    detail: str = ""
    """How much was checked, or why it is not available."""
    failure: Failure | None = None


@dataclass(frozen=True)
class Report:
    """The result of ``check``. ``ok``: no item failed, and at least one passed."""

    op: str
    library: str
    """The path of the shared library."""
    items: Sequence[Item]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        counts = self.counts
        return not counts[FAIL] and bool(counts[PASS])

    @property
    def exit_code(self) -> int:
        """Of a command: 0 if it is ok, else 1."""
        return 0 if self.ok else 1

    @property
    def counts(self) -> Counter[str]:
        return Counter(item.status for item in self.items)

    @property
    def failures(self) -> list[Item]:
        return [item for item in self.items if item.status == FAIL]

    def to_json(self) -> str:
        """An object with op, library, ok, seconds and items."""
        data = {"op": self.op, "library": self.library, "ok": self.ok, "seconds": round(self.seconds, 2)}
        return json.dumps(data | {"items": [asdict(item) for item in self.items]}, indent=2, default=str)

    def render(self, color: bool | None = None) -> str:
        """Text for a terminal. ``color``: None for colors if stdout is a terminal and NO_COLOR is not set. Colors need
        rich."""
        if color is None:
            color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        text = self._with_rich() if color and find_spec("rich") else self._plain()
        return text.rstrip() + "\n"

    def _title(self) -> str:
        return f"{self.op} in {self.library}"

    def _summary(self) -> str:
        counts = self.counts
        said = ", ".join(f"{counts[status]} {word}" for status, word in _WORDS.items() if counts[status])
        return f"{said or 'nothing was checked'} in {self.seconds:.1f} s"

    def _plain(self) -> str:
        rows = [(item.check, item.where, item.status, item.detail) for item in self.items]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [self._title()]
        lines += [
            "  ".join((*(t.ljust(w) for t, w in zip(row, widths, strict=False)), row[3])).rstrip() for row in rows
        ]
        return "\n".join([*lines, *map(_told, self.failures), self._summary()])

    def _with_rich(self) -> str:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(self._title()), title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0)
        )
        for item in self.items:
            status = Text(item.status, _COLORS[item.status])
            table.add_row(Text(item.check), Text(item.where), status, Text(item.detail))
        console = Console(file=io.StringIO(), force_terminal=True, width=None)
        console.print(table)
        for item in self.failures:
            console.print(Text(_told(item)), soft_wrap=True)
        console.print(Text(self._summary(), _COLORS[PASS if self.ok else FAIL]))
        return console.file.getvalue()  # type: ignore[attr-defined]


_WORDS = {PASS: "passed", FAIL: "failed", UNAVAILABLE: "not available"}


def _told(item: Item) -> str:
    """A failure, in full."""
    failure = item.failure
    assert failure is not None
    case = f"\n  smallest case: {failure.case}{f', {failure.dtype}' if failure.dtype else ''}" if failure.case else ""
    line = f"\n  to reproduce: {failure.line}" if failure.line else ""
    return f"\n{item.check}, {item.where}: {failure.message}{case}{line}\n"
