"""The wheel's tag, which pyproject.toml cannot set: a shared library for one platform and every Python 3."""

import shutil

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]

    def run(self):
        # from an earlier build: it may contain modules that no longer exist
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()


Distribution.has_ext_modules = lambda self: True  # so files go to platlib
setup(cmdclass={"bdist_wheel": PlatformWheel})
