"""The build backend of packages with [tool.aotops] in their pyproject.toml: setuptools', which builds the library too.

[build-system]
requires = ["setuptools>=77", "aotops"]
build-backend = "aotops.build_backend"
"""

from __future__ import annotations

import sys
from pathlib import Path

from .compiler import CompileError

try:
    from setuptools import setup
    from setuptools.build_meta import _BuildMetaBackend

    from .setuptools import kernels
except ImportError as error:  # Python 3.12 and later have none in a new environment, and those before an old one
    needs = "aotops.build_backend needs setuptools 77 or later: pip install 'setuptools>=77'"
    raise ImportError(f"{needs} ({error})") from None


class _Backend(_BuildMetaBackend):
    def run_setup(self, setup_script: str = "setup.py") -> None:
        try:
            if Path(setup_script).exists():
                super().run_setup(setup_script)
            else:
                setup(**kernels())
        except (CompileError, ValueError) as error:
            sys.exit(f"aotops: {error}")


_backend = _Backend()
get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist
get_requires_for_build_editable = _backend.get_requires_for_build_editable
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _backend.prepare_metadata_for_build_editable
build_wheel = _backend.build_wheel
build_sdist = _backend.build_sdist
build_editable = _backend.build_editable
