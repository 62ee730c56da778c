"""Prints the table of the built-in operators for cuda_src/host/torch_stable.cpp, from their definitions.

python packaging/torch_table.py >build/torch_table.inc
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from aotops.op import Op
from aotops.ops import OPS
from frontends.torch_schema import maskable, schema

KINDS = {"int": "integer", "float": "number", "bool": "boolean", "str": "text", "int[]": "integers"}


def row(op: Op) -> str:
    attrs = [f"{{{quoted(name)}, {kind_of(op, name)}, {flag(t.endswith('?'))}}}" for name, t in op.attrs.items()]
    fields = [
        quoted(op.name),
        quoted(schema(op)),
        len(op.inputs),
        listed(map(quoted, op.inputs)),
        sum(1 << i for i, slot in enumerate(op.inputs) if slot in op.optional),
        len(op.results),
        len(op.workspace),
        listed(map(quoted, op.entry_outputs)),
        sum(1 << i for i, slot in enumerate(op.results) if slot in maskable(op)),
        flag(op.elementwise),
        len(attrs),
        listed(attrs),
    ]
    return listed(map(str, fields)) + ","


def kind_of(op: Op, attr: str) -> str:
    kind = op.attrs[attr].removesuffix("?")
    if kind not in KINDS or op.mutates:
        raise SystemExit(f"{op.name}: torch_stable.cpp takes no {kind}, and no input that an entry writes to")
    return f"Kind::{KINDS[kind]}"


def quoted(text: str) -> str:
    return f'"{text}"'


def flag(value: bool) -> str:
    return "true" if value else "false"


def listed(items) -> str:
    return f"{{{', '.join(items)}}}"


if __name__ == "__main__":
    both = [one for op in OPS.values() for one in (op, op.backward) if one is not None and one.has_kernel]
    print("// Made by packaging/torch_table.py of the definitions in aotops/ops/.")
    for op in dict.fromkeys(both):
        print(row(op))
