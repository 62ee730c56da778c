"""The files that docs/adding_an_op.md shows."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = dict(
    re.findall(r"```(?:python|cpp)\n(?:#|//) (\S+)\n(.*?)```", (ROOT / "docs" / "adding_an_op.md").read_text(), re.S)
)
(NAME,) = {Path(path).stem for path in FILES}
