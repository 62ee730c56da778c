"""One row: trains a model in a process of its own and writes what it measured.

``python -m benchmarks.models.train SPEC FILE``; SPEC is the JSON of a `Spec`. A process for each row, so that the first
step, the caches of compilation and the memory are its own.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from .spec import Spec


def main() -> None:
    """Writes the device, the framework's version and the row."""
    spec, file = Spec(**json.loads(sys.argv[1])), Path(sys.argv[2])
    framework = import_module(f".{spec.framework}_train", __package__)
    file.write_text(
        json.dumps({"device": framework.device(), "version": framework.VERSION, "row": framework.measure(spec)})
    )


if __name__ == "__main__":
    main()
