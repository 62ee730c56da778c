"""The library of a package as a part of its installation. The package's setup.py is

    from setuptools import setup
    from aotops.setuptools import kernels
    setup(**kernels())

or it has none, and pyproject.toml names the backend ``aotops.build_backend``. Either way [tool.aotops] in
pyproject.toml says what is built (build.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setuptools import Distribution
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from .build import build


class BuildLibrary(build_py):
    """Builds the library where pyproject.toml says, from which setuptools copies it as a file of the package."""

    def run(self) -> None:
        build(Path.cwd())
        super().run()


class PlatformWheel(bdist_wheel):
    """Tagged py3-none-<platform>: the library is for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """So that files go to platlib."""
        return True


def kernels() -> dict[str, Any]:
    """Arguments for ``setuptools.setup``."""
    return {"distclass": PlatformDistribution, "cmdclass": {"build_py": BuildLibrary, "bdist_wheel": PlatformWheel}}
