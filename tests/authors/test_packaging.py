"""Wheels and sdists of the tree: the tag of a wheel, what is in it, an sdist, and an editable install; what the library
needs of a system. Without a network, by the environment's setuptools."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from aotops import library
from aotops.testing.frameworks import requested

pytestmark = pytest.mark.skipif(
    "torch" not in requested(), reason="packaging is tested once, in torch's environment: torch requires setuptools"
)

ROOT = Path(__file__).parents[2]
TAG = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
LIBRARY = b"stands for the library"
FOLDERS = ("aotops", "frontends", "cuda_src", "packaging", "tests")


@pytest.mark.parametrize(
    ("arguments", "archs"),
    [((), "75 80 90 100 120"), (("ARCHS=90",), "90"), (("WHEEL_ARCHS=80 90",), "80 90")],
    ids=["none", "ARCHS", "WHEEL_ARCHS"],
)
def test_a_wheel_is_for_the_architectures_asked_for(arguments, archs):
    command = ["make", "-n", "wheel", "NVCC=", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("ARCHS", "WHEEL_ARCHS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert f'lib ARCHS="{archs}" ' in done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="wheels for aarch64 are cross-compiled on x86-64 alone")
def test_a_wheel_for_aarch64_is_compiled_by_the_cross_compiler():
    variables = ("ARCHS", "WHEEL_ARCHS", "NVCC", "ISAS", "CXX", "MAKEFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    command = ["make", "-n", "-B", "wheel", "TARGET=aarch64"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    commands = re.sub(r"\\\n\s*", "", done.stdout).splitlines()
    compiled = [line for line in commands if re.search(r" -c \S+\.(cpp|cu) -o ", line)]
    assert len(compiled) > 40
    assert {line.split(" -std")[0] for line in compiled} == {
        "aarch64-linux-gnu-g++",
        "build/cuda-12.9/bin/nvcc -ccbin aarch64-linux-gnu-g++",
    }
    assert all(re.search(r" -o build/aarch64/\S+\.o$", line) for line in compiled)
    assert not [line for line in compiled if " -m" in line.replace(" -MMD -MP", "") or "avx" in line]
    codes = {tuple(re.findall(r"code=(\w+)", line)) for line in compiled if ".cu -o" in line}
    assert codes == {("sm_90", "sm_100", "compute_100"), ("sm_90a",)}
    (link,) = (line for line in commands if " -shared " in line)
    assert "-ccbin aarch64-linux-gnu-g++ -shared -nodlink -cudart static -Lbuild/cuda-12.9/lib/aarch64" in link
    assert "--plat-name=linux_aarch64 " in done.stdout
    assert "--plat manylinux_2_28_aarch64 " in done.stdout
    assert "build/aarch64/audited/aotops/libaotops.so 90 100 103 110 120 121 130 " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("TARGET=armv7l",), f"TARGET is 'armv7l', expected {platform.machine()}"),
        pytest.param(
            ("TARGET=aarch64", "NVCC=/usr/bin/nvcc"),
            "NVCC is '/usr/bin/nvcc', expected none or build/cuda-12.9/bin/nvcc",
            marks=pytest.mark.skipif(platform.machine() == "aarch64", reason="any nvcc compiles for its own machine"),
        ),
    ],
)
def test_what_cannot_be_compiled_for_another_machine_is_refused(arguments, said):
    done = subprocess.run(["make", "-n", "lib", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.fixture
def tree(tmp_path):
    """A copy of what is packaged, with a file in the place of the library."""
    copy = tmp_path / "tree"
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.a", "*.pyi")
        )
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "Makefile", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    (copy / "aotops/libaotops.so").write_bytes(LIBRARY)
    (copy / "aotops/lib").mkdir(exist_ok=True)
    (copy / "aotops/lib/libaot.a").write_bytes(LIBRARY)
    return copy


def run(*arguments, cwd, **environment) -> str:
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_is_for_this_platform_and_any_python(tree, tmp_path):
    stale = tree / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/aotops/stale.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")  # as an earlier build leaves a module that the tree no longer has
    run(
        "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist", tree, cwd=tree
    )
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith(f"-{TAG}.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        (metadata,) = (name for name in files if name.endswith(".dist-info/WHEEL"))
        assert {f"Tag: {TAG}", "Root-Is-Purelib: false"} <= set(archive.read(metadata).decode().splitlines())
        assert archive.read("aotops/libaotops.so") == LIBRARY
    assert {name for name in files if not name.split("/")[0].endswith(".dist-info")} == expected_files(tree)
    assert {"aotops/frontends/jax/__init__.pyi", "aotops/frontends/numpy.pyi", "aotops/py.typed"} <= files


def test_a_wheel_for_another_machine_has_its_library(tree, tmp_path):
    products = tmp_path / "products"
    for name in ("aotops/libaotops.so", "aotops/lib/libaot.a"):
        (products / name).parent.mkdir(parents=True, exist_ok=True)
        (products / name).write_bytes(f"{name} for aarch64".encode())
    settings = {"--build-option": "--plat-name=linux_aarch64"}
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r}, {settings!r})"
    run("-c", build, cwd=tree, AOTOPS_PRODUCTS=str(products))
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert archive.read("aotops/libaotops.so") == b"aotops/libaotops.so for aarch64"
        assert archive.read("aotops/lib/libaot.a") == b"aotops/lib/libaot.a for aarch64"
    assert files == expected_files(tree)


def expected_files(tree) -> set[str]:
    """The content of a wheel beside its metadata: the modules, what lies beside them, and the headers for authors."""
    packages = {"aotops": "aotops", "frontends": "aotops/frontends", "tests/cases": "aotops/testing/cases"}
    headers = {
        f"aotops/include/{path.relative_to(tree / 'cuda_src')}"
        for pattern in ("*.h", "cpu/*.h", "cuda/*.h", "cuda/*.cuh")
        for path in (tree / "cuda_src").glob(pattern)
    }
    return headers | {
        f"{package}/{path.relative_to(tree / folder)}"
        for folder, package in packages.items()
        for path in (tree / folder).rglob("*")
        if path.is_file()
    }


def test_sdist_has_the_sources_and_no_product(tree, tmp_path):
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    run("-c", build, cwd=tree)
    (file,) = tmp_path.glob("aotops-*.tar.gz")
    with tarfile.open(file) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    sources = {str(path.relative_to(tree)) for folder in FOLDERS for path in (tree / folder).rglob("*")}
    assert {name for name in sources if (tree / name).is_file() and not name.endswith((".so", ".a"))} <= names
    assert {"Makefile", "pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.endswith((".so", ".a", ".pyc"))]


def test_a_tree_without_a_library_compiles_it(tree, tmp_path):
    """As pip builds an sdist. In the place of the Makefile, one that writes a file."""
    (tree / "aotops/libaotops.so").unlink()
    (tree / "Makefile").write_text(
        "lib:\n\techo compiled by $(notdir $(PYTHON)) >aotops/libaotops.so\n\ttouch aotops/lib/libaot.a\n"
    )
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    run("-c", build, cwd=tree)
    with zipfile.ZipFile(*tmp_path.glob("aotops-*.whl")) as archive:
        assert archive.read("aotops/libaotops.so").decode() == f"compiled by {Path(sys.executable).name}\n"


def test_a_failed_compilation_is_an_error(tree, tmp_path):
    (tree / "aotops/libaotops.so").unlink()
    (tree / "Makefile").write_text("lib:\n\t@echo no compiler here; exit 1\n")
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "no compiler here" in done.stdout
    assert "aotops: `make lib` failed" in done.stderr
    assert not list(tmp_path.glob("aotops-*.whl"))


def test_editable_install_imports_the_tree(tree, tmp_path):
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    run("-c", build, cwd=tree)
    (wheel,) = tmp_path.glob(f"aotops-*-{TAG}.whl")
    run("-m", "pip", "install", "--no-index", "--no-deps", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    # -S: without this environment's own aotops
    program = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n" + (
        "import aotops, aotops.frontends as frontends; print(aotops.__file__, frontends.__file__)"
    )
    assert run("-E", "-S", "-c", program, cwd=tmp_path).split() == [
        str(tree / "aotops/__init__.py"),
        str(tree / "frontends/__init__.py"),
    ]
    assert (tree / "frontends/numpy.pyi").exists()


# --------------------------------------------------------------------------------------------------------- the library


def test_stubs_of_glibc_link_a_library_for_an_older_one(tmp_path):
    """pthread_create moved in glibc 2.34, log has had a new version since 2.29."""
    source, library = tmp_path / "uses.c", tmp_path / "uses.so"
    source.write_text(
        "#include <math.h>\n#include <pthread.h>\n#include <stdio.h>\n"
        "int f(pthread_t *t, void *(*g)(void *), double x) {\n"
        '  fputs(x > sqrt(2) ? "a" : "b", stdout);\n'
        "  return log(x) > 0 ? pthread_create(t, 0, g, 0) : 0;\n}\n"
    )
    stubs = run(ROOT / "packaging/glibc_floor.py", "2.28", tmp_path / "stubs", cwd=tmp_path).split()
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-z,defs", source, "-o", library, *stubs, "-lm"], check=True)
    table = subprocess.run(["objdump", "-T", library], check=True, capture_output=True, text=True).stdout
    symbols = dict(reversed(pair) for pair in re.findall(r"\(?GLIBC_([0-9.]+)\)? +(\w+)$", table, re.MULTILINE))
    assert {name: symbols[name] for name in ("pthread_create", "log", "stdout")} == {
        "pthread_create": "2.2.5",
        "log": "2.2.5",
        "stdout": "2.2.5",
    }


def test_the_library_needs_no_openmp_runtime():
    """A wheel cannot rely on one, and a copy in it would be the second one of a process with torch."""
    needed = subprocess.run(["readelf", "-d", library.path()], check=True, capture_output=True, text=True).stdout
    assert "NEEDED" in needed
    assert not re.findall(r"NEEDED.*omp", needed)


@pytest.mark.parametrize("threads", ["own", ""], ids=["own threads", "OpenMP's threads, if there are any"])
def test_a_program_in_c_calls_the_entries(tmp_path, threads):
    program = tmp_path / "entries"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, ROOT / "tests/programs/aarch64_entries.c", "-o", program, "-ldl", "-lm"], check=True)
    environment = {**os.environ, "AOTOPS_THREADS": threads, "OMP_NUM_THREADS": "3"}
    done = subprocess.run([program, library.path()], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert threads in done.stdout.partition("threads: ")[2]


# ------------------------------------------------------------------------------------------------------------- threads

_THREADS = """
import ctypes, os, sys
import numpy
{imports}
from aotops.frontends import numpy as frontend
from aotops import library
x = numpy.linspace(-3, 3, 1 << 20, dtype="float32")
before = len(os.listdir("/proc/self/task"))
frontend.gelu(x)
runtime = library.load().aot_thread_runtime
runtime.restype = ctypes.c_char_p
print(runtime().decode(), len(os.listdir("/proc/self/task")) - before)
"""


def test_in_a_process_with_torch_the_threads_are_torchs(python):
    """The runtime that torch's library is bound to, even where another package has loaded a copy of its own before. So
    torch.set_num_threads applies."""
    imports = "import sklearn.utils.extmath, torch; torch.set_num_threads(1)"
    runtime, started = python(_THREADS.format(imports=imports), OMP_NUM_THREADS="3").split()
    assert "/torch/lib/" in runtime
    assert started == "0"


def test_own_threads(python):
    """As many as OMP_NUM_THREADS says, with the calling one."""
    runtime, started = python(_THREADS.format(imports=""), AOTOPS_THREADS="own", OMP_NUM_THREADS="4").split()
    assert (runtime, started) == ("own", "3")


def test_own_threads_in_several_threads_and_after_a_fork(python):
    """Loops of two threads at once, whose results are those of one thread; then the same in a child process."""
    program = """
import os, threading
import numpy
from aotops.frontends import numpy as frontend
x, a = numpy.linspace(-3, 3, 1 << 19, dtype="float32"), numpy.ones((200, 200))
expected = frontend.gelu(x), frontend.matmul(a, a)
def work():
    for _ in range(20):
        good.append(all((y == e).all() for y, e in zip((frontend.gelu(x), frontend.matmul(a, a)), expected)))
def run():
    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads], [thread.join(200) for thread in threads]
    return len(good) == 60 and all(good)
good = []
first, good = run(), []
child = os.fork()
if not child:
    os._exit(0 if run() else 1)
print(first, os.waitpid(child, 0)[1], run())
"""
    assert python(program, AOTOPS_THREADS="own", OMP_NUM_THREADS="3").split() == ["True", "0", "True"]


def test_a_name_that_is_no_kind_of_threads(python):
    said = python("from aotops import library\nlibrary.load()", expect=1, AOTOPS_THREADS="tbb")
    assert "ValueError: AOTOPS_THREADS is 'tbb', expected own" in said


# -------------------------------------------------------------------------------------------------------------- driver

_DRIVER = """
#include <string.h>
static int version(int *v) { *v = %d; return 0; }
static int refuse(void) { return 35; }
int cuGetProcAddress_v2(const char *name, void **function, int v, unsigned long flags, int *result) {
  *function = !strcmp(name, "cuDriverGetVersion") ? (void *)version
              : !strncmp(name, "cuGetProcAddress", 16) ? (void *)cuGetProcAddress_v2 : (void *)refuse;
  if (result) *result = 0;
  return 0;
}
"""
_LAUNCH = """
import ctypes
from aotops import library
shape = (ctypes.c_int64 * 1)(4)
print(library.load().aot_gelu_cuda(2, (ctypes.c_void_p * 2)(64, 64), (ctypes.c_int * 2)(1, 1),
    (ctypes.c_void_p * 2)(*[ctypes.addressof(shape)] * 2), (ctypes.c_char_p * 2)(b"float32", b"float32"), None, None))
print(library.last_error())
"""


@pytest.mark.skipif(not library.has_cuda(), reason="the library was built without CUDA")
def test_a_driver_older_than_the_runtime_is_told(python, tmp_path):
    """With a stand-in for the driver, that of CUDA 11.4."""
    source = tmp_path / "driver.c"
    source.write_text(_DRIVER % 11040)
    stand_in = ["-Wl,-soname,libcuda.so.1", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run(["gcc", "-shared", "-fPIC", source, *stand_in], check=True)
    status, text = python(_LAUNCH, LD_LIBRARY_PATH=str(tmp_path)).splitlines()
    assert status == "4"
    assert re.match(r"gelu: the NVIDIA driver.* supports CUDA up to 11.4, expected CUDA 1[23]: update the driver", text)


_CUBLASLT = "".join(
    f"int {name}(void) {{ return 1; }}\n"
    for name in (
        *(f"cublasLtMatmulDesc{what}" for what in ("Create", "SetAttribute", "Destroy")),
        *(f"cublasLtMatrixLayout{what}" for what in ("Create", "SetAttribute", "Destroy")),
        *(f"cublasLtMatmulPreference{what}" for what in ("Create", "SetAttribute", "Destroy")),
        "cublasLtCreate", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoConfigGetAttribute", "cublasLtMatmul",
    )
)  # fmt: skip
_WHICH = """
import ctypes, sys
from aotops import library
for name in sys.argv[1:]:
    ctypes.CDLL(name)
told = ctypes.c_char_p(), ctypes.c_char_p()
library.load().aot_cublaslt(*map(ctypes.byref, told))
print(*(text.value.decode() for text in told), sep="|")
"""


@pytest.mark.skipif(not library.has_cuda(), reason="the library was built without CUDA")
@pytest.mark.parametrize(
    ("driver", "installed", "loaded", "expected"),
    [
        (12040, "13 12", "", "12|the dynamic loader finds it"),
        (12040, "13 12", "13", "12|the dynamic loader finds it"),
        (12040, "13 12", "13 12", "12|the process has loaded it"),
        (12040, "13", "13", "|the dynamic loader does not find libcublasLt.so.12, and the driver runs no later one"),
        (13000, "13 12", "", "13|the dynamic loader finds it"),
        (13000, "13 12", "12", "12|the process has loaded it"),
        (13000, "13 12", "12 13", "13|the process has loaded it"),
        (13000, "", "", "|the dynamic loader does not find libcublasLt.so.12 or .13"),
        (0, "13 12", "12", "|there is no NVIDIA driver"),
    ],
)
def test_cublaslt_is_one_that_the_driver_runs(driver, installed, loaded, expected, tmp_path):
    """With stand-ins for the driver and for cuBLASLt."""
    sources = {"libcuda.so.1": _DRIVER % driver} if driver else {}
    sources |= {f"libcublasLt.so.{major}": _CUBLASLT for major in installed.split()}
    for name, source in sources.items():
        (tmp_path / "a.c").write_text(source)
        stand_in = [f"-Wl,-soname,{name}", "-o", tmp_path / name]
        subprocess.run(["gcc", "-shared", "-fPIC", tmp_path / "a.c", *stand_in], check=True)
    command = [sys.executable, "-c", _WHICH, *(f"libcublasLt.so.{major}" for major in loaded.split())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AOTOPS_")}
    environment |= {"LD_LIBRARY_PATH": str(tmp_path), "AOTOPS_LIBRARY": str(library.path())}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    path, _, reason = done.stdout.strip().rpartition("|")
    assert f"{path.rpartition('libcublasLt.so.')[2]}|{reason}" == expected, done.stderr


def test_errors_of_cuda_that_a_user_can_fix(tmp_path):
    """Compiled without CUDA."""
    source, program = tmp_path / "errors.cpp", tmp_path / "errors"
    source.write_text(
        """
#include "cuda/error_text.h"
extern "C" const char *aot_last_error();
int main(int, char **files) {
  const int compiled[] = {750, 800, 1200, 0};
  char line[256];
  aot::CudaFailure old = {35, "", 12040, 13000, "", 0, compiled}, none = old, code = old, other = old;
  none.driver = 0, other.code = 700, other.text = "bad";
  code.code = 209, code.gpu = "NVIDIA P100", code.capability = 60;
  for (auto &failure : {old, none, code, other}) {
    const int status = aot::fail_cuda("gelu", failure);
    std::printf("%d %s\\n", status, aot_last_error());
  }
  std::printf("%s\\n", aot::driver_release(line, files[1]));
}
"""
    )
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC\n"
    )
    sources = ROOT / "cuda_src"
    flags = ["-std=c++17", f"-I{sources}", '-DAOT_VERSION="test"']
    subprocess.run(["g++", *flags, source, sources / "error.cpp", "-o", program], check=True)
    done = subprocess.run([program, tmp_path / "version"], check=True, capture_output=True, text=True)
    old, none, code, other, release = done.stdout.splitlines()
    assert re.fullmatch(
        r"4 gelu: the NVIDIA driver.* supports CUDA up to 12.4, expected CUDA 13: update the driver to release 580 or "
        r"later \(nvidia-smi shows it\), or use a library compiled with CUDA 12",
        old,
    )
    assert none.startswith("4 gelu: no NVIDIA driver was found (libcuda.so.1), expected release 580 or later")
    assert code == (
        "4 gelu: the library has no code for NVIDIA P100, compute capability 6.0 (it was compiled for 7.5, 8.0, 12.0): "
        "compile it with ARCHS=60"
    )
    assert (other, release) == ("4 gelu: bad", "550.54.15")
