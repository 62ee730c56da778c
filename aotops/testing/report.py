"""The findings of ``check``: an item for each check, and for a failure the smallest case and the line that reproduces
it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aotops import terminal

from .frameworks import ADAPTERS, requested
from .trial import DTYPES

PASS, FAIL, UNAVAILABLE = "pass", "fail", "not available"
_COLORS = {PASS: "green", FAIL: "red", UNAVAILABLE: "yellow"}


@dataclass(frozen=True)
class Failure:
    message: str
    case: str = ""
    """The smallest case that fails: shapes and attributes."""
    dtype: str = ""
    line: str = ""
    """Python that runs the check on this case alone."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The worst element, where there is one: at, got, expected, allowed."""


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
        """The exit status of a command: 0 if it is ok, else 1."""
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
        """Text for a terminal. ``color``: None for colors if stdout is a terminal and NO_COLOR is not set."""
        lines = Lines(max((len(item.where) for item in self.items), default=0), color)
        return "\n".join([lines.title(self.op, self.library), *map(lines.item, self.items), lines.end(self)]) + "\n"


_WORDS = {PASS: "passed", FAIL: "failed", UNAVAILABLE: "not available"}


class Lines:
    """The text of a report, part by part, so that each can be printed when it is known. ``where``: the width of that
    column. ``color``: as ``Report.render`` takes it."""

    def __init__(self, where: int, color: bool | None = None) -> None:
        self.where, self.width = where, terminal.columns()
        self.color = terminal.has_color(sys.stdout) if color is None else color

    def title(self, op: str, library: str) -> str:
        return f"{op} in {library}"

    def item(self, item: Item) -> str:
        """A line; a detail that does not fit begins another."""
        status = f"{item.status:{len(FAIL)}}"
        head = f"{item.check:{_CHECK}}  {item.where:{self.where}}  "
        detail = item.detail.replace(", ".join(DTYPES), "all dtypes")
        line = f"{head}{status}  {detail}".rstrip()
        rest: Iterable[str] = ()
        if self.width is not None and len(line) > self.width:
            line, rest = f"{head}{status}".rstrip(), terminal.hung("    ", detail, self.width)
        if self.color:
            line = f"{head}{terminal.colored(item.status, _COLORS[item.status])}{line[len(head) + len(item.status) :]}"
        return "\n".join([line, *rest])

    def end(self, report: Report) -> str:
        """The failures, in full, and the summary."""
        counts = report.counts
        said = ", ".join(f"{counts[status]} {word}" for status, word in _WORDS.items() if counts[status])
        summary = f"{said or 'nothing was checked'} in {report.seconds:.1f} s"
        if self.color:
            summary = terminal.colored(summary, _COLORS[PASS if report.ok else FAIL])
        return "\n".join([*map(_told, report.failures), summary])


def widest(frameworks: Sequence[str] | None) -> int:
    """The width of ``where`` before it is known what is there: in these frameworks, or those installed."""
    names = (adapter.name for each in frameworks or requested() for adapter in ADAPTERS.get(each, ()))
    return max((len(f"0-dim, {name} cuda") for name in names), default=0)


_CHECK = len("NaN and infinity")
"""The longest name of a check."""


def _told(item: Item) -> str:
    """A failure, in full."""
    failure = item.failure
    assert failure is not None
    case = f"\n  smallest case: {failure.case}{f', {failure.dtype}' if failure.dtype else ''}" if failure.case else ""
    line = f"\n  to reproduce: {failure.line}" if failure.line else ""
    return f"\n{item.check}, {item.where}: {failure.message}{case}{line}\n"
