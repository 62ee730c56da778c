"""The build, as far as pyproject.toml cannot state it: the library is compiled with the package, it and headers are
copied into it, type stubs are written, and the wheel is for one platform and every Python 3. An editable install does
the stubs alone: `make lib` compiles, and the headers are cuda_src/'s."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PRODUCTS = ("aotops/libaotops.so", "aotops/lib/libaot.a")  # of `make lib`
# Those for another machine lie in a folder of their own: make wheel TARGET=aarch64
COMPILED = Path(os.environ.get("AOTOPS_PRODUCTS", ROOT))
# The headers that an operator outside this repository includes: aotops.include_dir().
HEADERS = ("*.h", "cpu/*.h", "cuda/*.h", "cuda/*.cuh")
# Packages that lie elsewhere in the tree, with those in them.
ELSEWHERE = {"aotops.frontends": "frontends", "aotops.testing.cases": "tests/cases"}


def packages() -> dict[str, str]:
    """The folder of each package."""
    found = {"aotops": "aotops"} | ELSEWHERE
    inside = {
        f"{package}.{name}": f"{folder}/{name.replace('.', '/')}"
        for package, folder in found.items()
        for name in find_packages(str(ROOT / folder), exclude=["templates*"])
    }
    return found | inside


class BuildWithLibrary(build_py):
    def run(self):
        if not self.editable_mode:
            compile_library()
        subprocess.run([sys.executable, "-m", "frontends.stubs"], cwd=ROOT, check=True)
        super().run()
        if not self.editable_mode:
            for product in PRODUCTS:
                self.copy(COMPILED / product, product)
            for header in (found for pattern in HEADERS for found in (ROOT / "cuda_src").glob(pattern)):
                self.copy(header, "aotops/include" / header.relative_to(ROOT / "cuda_src"))

    def copy(self, file, name):
        target = Path(self.build_lib, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)


def compile_library():
    """Runs `make lib`, unless it has been run: variables of the Makefile (NVCC, ARCHS, ISAS, JOBS) come from the
    environment. A machine without a GPU and nvcc gets no CUDA entries, which take longer than all else."""
    if all((COMPILED / product).is_file() for product in PRODUCTS):
        return
    has_cuda = "NVCC" in os.environ or shutil.which("nvidia-smi") or shutil.which("nvcc")
    command = ["make", "lib", f"PYTHON={sys.executable}", *(() if has_cuda else ("NVCC=",))]
    try:
        subprocess.run(command, cwd=ROOT, check=True)
    except FileNotFoundError:
        raise SystemExit("aotops: make is not installed; compiling aotops needs GNU make and g++") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"aotops: `make lib` failed with status {error.returncode}; its messages are above") from None


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]

    def run(self):
        # from an earlier build: it may contain modules that no longer exist
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()


Distribution.has_ext_modules = lambda self: True  # so files go to platlib
setup(
    packages=list(packages()),
    package_dir=packages(),
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
)
