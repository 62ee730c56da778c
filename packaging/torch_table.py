"""Prints the table of the built-in operators for cuda_src/host/torch_stable.cpp, from their definitions.

python packaging/torch_table.py >build/torch_table.inc
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from aotops.ops import OPS
from frontends.torch_schema import rows

if __name__ == "__main__":
    print("// Made by packaging/torch_table.py of the definitions in aotops/ops/.")
    for schema, written, elementwise in rows(OPS.values()):
        print(f'{{"{schema}", "{written}", {str(elementwise).lower()}}},')
