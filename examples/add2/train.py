"""Trains a * a + b * b to zero with a kernel of one's own, compiled in one of three ways."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from add2 import add2
from torch import nn

import aotops
import aotops.toolchain
from aotops.frontends.torch import functions

HERE = Path(__file__).parent


def by_jit(device: str) -> Path:
    return aotops.compile(HERE / ("add2.cu" if device == "cuda" else "add2.cpp"))


def by_setup(device: str) -> Path:
    """The library as ``pip install`` compiles it."""
    _run([sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", f"build/{device}"], device)
    return HERE / "build" / device / "add2" / "libadd2.so"


def by_cmake(device: str) -> Path:
    build = f"build/cmake-{device}"
    cuda = [f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(aotops.toolchain.parse_archs(None))}"] if device == "cuda" else []
    options = [f"-Daotops_DIR={aotops.cmake_dir()}", f"-DADD2_CUDA={'ON' if cuda else 'OFF'}", *cuda]
    _run(["cmake", "-S", ".", "-B", build, *options], device)
    _run(["cmake", "--build", build], device)
    return HERE / build / "libadd2.so"


def _run(command: list[str], device: str) -> None:
    without_nvcc = {"NVCC": ""} if device == "cpu" else {}
    subprocess.run(command, cwd=HERE, env=os.environ | without_nvcc, check=True, stdout=subprocess.DEVNULL)


class AddModel(nn.Module):
    def __init__(self, n: int, add) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(n)) for _ in range(2))
        self.add = add

    def forward(self):
        return self.add(self.a * self.a, self.b * self.b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", choices=("jit", "setup", "cmake"), default="jit")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int, default=1024)
    args = parser.parse_args()

    compiled = {"jit": by_jit, "setup": by_setup, "cmake": by_cmake}[args.compiler](args.device)
    library = aotops.Library("add2", [add2], compiled)

    torch.manual_seed(0)
    print("Initializing model...")
    model = AddModel(args.n, functions(library)["add2"]).to(args.device)
    print("Initializing optimizer...")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    print("Begin training...")
    for epoch in range(500):
        optimizer.zero_grad()
        loss = model().sum()
        loss.backward()
        optimizer.step()
        if epoch % 25 == 0:
            print(f"epoch {epoch:>3d}: loss = {loss:>8.3f}")


if __name__ == "__main__":
    main()
