"""What pyproject.toml cannot say: a wheel holds a shared library, for one platform and for every Python 3."""

import shutil

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]

    def run(self):
        # of an earlier build: a module that is no longer in the tree would still be packed
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()


Distribution.has_ext_modules = lambda self: True  # so files go to platlib
setup(cmdclass={"bdist_wheel": PlatformWheel})
