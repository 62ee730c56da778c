"""Prints the table of the built-in operators for cuda_src/host/torch_stable.cpp, from their definitions.

python packaging/torch_table.py >build/torch_table.inc
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from aotops.ops import OPS
from frontends.torch_schema import schema, written

if __name__ == "__main__":
    both = [one for op in OPS.values() for one in (op, op.backward) if one is not None and one.has_kernel]
    print("// Made by packaging/torch_table.py of the definitions in aotops/ops/.")
    for op in dict.fromkeys(both):
        print(f'{{"{schema(op)}", "{written(op)}", {str(op.elementwise).lower()}}},')
