"""The record of a soak: a row for each operator and pass, and for each run of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .steps import Steps


@dataclass
class Row:
    operator: str
    pass_: str
    device: str
    calls: int
    """Cases, each in its dtypes."""
    least: int
    """Repeats of the call that was repeated least."""
    repeats: int
    wrong: list[str] = field(default_factory=list)
    """The calls that were not right, and how."""

    @property
    def name(self) -> str:
        return f"{self.operator} {self.pass_}, {self.device}"


@dataclass
class Record:
    """``ok``: it has ended, every call was repeated, at least one was, and all of them were right."""

    rows: Sequence[Row]
    steps: Sequence[Steps]
    facts: dict[str, Any]
    """Command, device, date, versions and seconds."""
    ended: bool = True

    @property
    def ok(self) -> bool:
        some = self.ended and bool(self.rows or self.steps)
        return some and all(row.least and not row.wrong for row in self.rows) and not any(s.wrong for s in self.steps)

    def to_json(self) -> str:
        rows = [{key.rstrip("_"): value for key, value in asdict(row).items()} for row in self.rows]
        data = {
            **self.facts,
            "ok": self.ok,
            "ended": self.ended,
            "operators": rows,
            "steps": [asdict(run) for run in self.steps],
        }
        return json.dumps(data, indent=2)

    def render(self) -> str:
        """A table of at most 79 columns, and below it what was wrong."""
        lines = [f"soak: {self.facts['device']}, aotops {self.facts['versions']['aotops']}"]
        if self.rows:
            lines.append(f"{'operator':18}{'pass':10}{'device':7}{'calls':>6}{'least':>9}{'repeats':>12}{'wrong':>7}")
        for row in self.rows:
            counts = f"{row.calls:6}{row.least:9,}{row.repeats:12,}{len(row.wrong):7}"
            lines.append(f"{row.operator:18}{row.pass_:10}{row.device:7}{counts}")
        for run in self.steps:
            equal = "wrong" if run.wrong else "equal" if run.run != "synchronized" else "reference"
            lines.append(f"{run.name:54}{run.steps:7,} steps  {equal}")
        lines += [f"\n{row.name}: {text}" for row in self.rows for text in row.wrong]
        lines += [
            f"\n{row.name}: some calls were not repeated, give it more seconds"
            for row in self.rows
            if not row.least and not row.wrong
        ]
        lines += [f"\n{run.name}: {run.wrong}" for run in self.steps if run.wrong]
        return "\n".join([*lines, f"{'ok' if self.ok else 'not ok'} in {self.facts['seconds']:.0f} s"])
