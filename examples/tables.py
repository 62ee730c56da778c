"""Helpers that the scripts for tables share: their options, the record of a run, and the tables in a document."""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]


def parser(description: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options.add_argument("--markdown", type=Path, metavar="FILE", help="update the tables of a document")
    options.add_argument("--from", type=Path, metavar="FILE", dest="source", help="read the figures, measure nothing")
    options.add_argument("--quick", action="store_true", help="few repeats")
    return options


def record(device: str, rows: Sequence[Row], **more: Any) -> Result:
    """The result of a run, with what is needed to run it again."""
    import torch

    import aotops

    versions = {"aotops": aotops.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return {
        "device": device,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "versions": versions,
        **more,
        "rows": list(rows),
    }


def source(result: Result) -> str:
    """The line above a table: what was measured on, when and with what."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['device']}; {result['date'][:10]}; {versions}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table in Markdown, whose first ``texts`` columns are text and the others numbers."""
    rule = ["---" if i < texts else "--:" for i in range(len(head))]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join(["", lines[0], f"|{'|'.join(rule)}|", *lines[1:], ""])


def run(args: argparse.Namespace, measure: Callable[[], Result], texts: Callable[[Result], dict[str, str]]) -> Result:
    """Measures, or reads what was measured, and writes what the options ask for."""
    result = json.loads(args.source.read_text()) if args.source else measure()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        for name, text in texts(result).items():
            fill_in(args.markdown, name, text)
    return result


def fill_in(file: Path, name: str, text: str) -> None:
    """Replaces what is between ``<!-- figures NAME -->`` and ``<!-- end -->``."""
    marked = re.compile(rf"(<!-- figures {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    document, n = marked.subn(lambda match: f"{match[1]}{text}\n{match[2]}", file.read_text())
    if n != 1:
        raise SystemExit(f"{file}: {n} places are marked <!-- figures {name} -->, expected 1")
    file.write_text(document)
