"""aotops.compile and aotops build: what is compiled, what is taken from the cache, and what an error says."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import aotops
from aotops import build, toolchain
from aotops.testing.frameworks import requested

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

ADD = """
#include <cstdint>
extern "C" int Add(int n, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  int64_t size = 1;
  for (int i = 0; i < ndims[0]; ++i) size *= shapes[0][i];
  for (int64_t i = 0; i < size; ++i)
    static_cast<float *>(params[2])[i] = static_cast<float *>(params[0])[i] + static_cast<float *>(params[1])[i];
  return n - 3;
}
"""
ANSWER = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTOPS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _answer(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


def _count(monkeypatch) -> list[str]:
    """The names of all runs of a compiler from now on."""
    runs, run = [], toolchain.run
    monkeypatch.setattr(
        toolchain, "run", lambda command, what, **options: runs.append(what) or run(command, what, **options)
    )
    return runs


# ------------------------------------------------------------------------------------------------------------- compile


def test_a_source_becomes_a_library():
    library = aotops.compile(ADD, name="mine")
    assert library.name == "libmine.so"
    a, y = (ctypes.c_float * 3)(1, 2, 3), (ctypes.c_float * 3)()
    shape, pointer = (ctypes.c_int64 * 1)(3), ctypes.POINTER(ctypes.c_int64)
    params = (ctypes.c_void_p * 3)(*(ctypes.addressof(x) for x in (a, a, y)))
    status = ctypes.CDLL(str(library)).Add(
        3, params, (ctypes.c_int * 3)(1, 1, 1), (pointer * 3)(shape, shape, shape), None, None, None
    )
    assert (status, list(y)) == (0, [2, 4, 6])


def test_a_source_with_aot_h_has_its_runtime():
    source = """
#include "aot.h"
struct Nothing {
  static constexpr const char *name = "nothing";
  static constexpr aot::Slot inputs[] = {{"x"}}, outputs[] = {{"y"}};
  aot::Status init(const aot::Attrs &) { return aot::kOk; }
  aot::Status infer(const aot::Tensor *in, aot::Spec *out) const { return out[0] = in[0], aot::kOk; }
};
aot::Status nothing(const Nothing &, const aot::Tensor *, const aot::Tensor *, void *) { return aot::kOk; }
AOT_ENTRY(Nothing, aot_nothing_cpu, nothing)
"""
    library = ctypes.CDLL(str(aotops.compile(source)))
    library.aot_last_error.restype = ctypes.c_char_p
    assert library.aot_nothing_cpu(0, None, None, None, None, None, None) == 5
    assert library.aot_last_error() == b"nothing: 0 tensors given, x is missing"


def test_what_is_compiled_is_compiled_once(tmp_path, monkeypatch):
    (tmp_path / "answer.h").write_text("#define ANSWER 42\n")
    source = tmp_path / "answer.cpp"
    source.write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    runs = _count(monkeypatch)
    first = aotops.compile(source)
    assert (_answer(first), aotops.compile(str(source)), len(runs)) == (42, first, 1)

    (tmp_path / "answer.h").write_text("#define ANSWER 43\n")
    second = aotops.compile(source)
    assert (_answer(second), len(runs)) == (43, 2), "a changed header"
    assert aotops.compile(source, flags=["-DOTHER"]) != second
    assert len(runs) == 3, "another flag"
    (tmp_path / "answer.h").write_text("#define ANSWER 42\n")
    assert (aotops.compile(source), len(runs)) == (first, 3), "the first one again"


@pytest.mark.parametrize("form", ["<v.h>", '"v.h"', "<sub/v.h>", "NAME", "has_include"])
def test_a_header_that_appears_in_an_earlier_folder_is_seen(tmp_path, monkeypatch, form):
    """In a folder of ``include``, of the environment or, for a name in quotes, beside the source."""
    asked = "#if __has_include(<v.h>)\n#include <v.h>\n#else\n#define V 3\n#endif\n"
    include = asked if form == "has_include" else f"#define NAME <v.h>\n#include {form}\n"
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    name = "sub/v.h" if form == "<sub/v.h>" else "v.h"
    for folder in (one, two, three):
        (folder / name).parent.mkdir(parents=True)
    (tmp_path / "k.cpp").write_text(f'{include}extern "C" int answer() {{ return V; }}\n')
    (three / name).write_text("#define V 3\n")
    if form == "has_include":
        (three / name).unlink()
    monkeypatch.setenv("CPATH", f"{two}:{three}")
    runs = _count(monkeypatch)

    def answer():
        return _answer(aotops.compile(tmp_path / "k.cpp", include=[one]))

    assert (answer(), answer(), len(runs)) == (3, 3, 1)
    (two / name).write_text("#define V 2\n")
    assert (answer(), answer(), len(runs)) == (2, 2, 2)
    (one / name).write_text("#define V 1\n")
    assert (answer(), answer(), len(runs)) == (1, 1, 3)
    if form == '"v.h"':
        (tmp_path / "v.h").write_text("#define V 0\n")
        assert (answer(), answer(), len(runs)) == (0, 0, 4)


def test_folders_of_the_environment_are_seen(tmp_path, monkeypatch):
    """GCC takes the headers of CPLUS_INCLUDE_PATH for a system's, and does not list them beside the user's."""
    (tmp_path / "v.h").write_text("#define V 1\n")
    source = '#include <v.h>\nextern "C" int answer() { return V; }\n'
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(tmp_path))
    assert _answer(aotops.compile(source)) == 1
    (tmp_path / "v.h").write_text("#define V 2\n")
    assert _answer(aotops.compile(source)) == 2


def test_a_header_that_changes_while_it_is_compiled_is_compiled_again(tmp_path, monkeypatch):
    (tmp_path / "v.h").write_text("#define V 1\n")
    source = tmp_path / "k.cpp"
    source.write_text('#include "v.h"\nextern "C" int answer() { return V; }\n')
    run = toolchain.run

    def slow(command, what):
        """The header is saved after the compiler has read it."""
        said = run(command, what)
        (tmp_path / "v.h").write_text("#define V 2\n")
        return said

    monkeypatch.setattr(toolchain, "run", slow)
    aotops.compile(source)
    assert _answer(aotops.compile(source)) == 2


def test_a_manifest_of_another_form_is_none(cache):
    library = aotops.compile(ANSWER)
    (manifest,) = cache.glob("*/*.json")
    for text in ("[1]", "{}", "null", '{"library": 1, "headers": 2}', "no JSON"):
        manifest.write_text(text)
        assert aotops.compile(ANSWER) == library


def test_a_changed_header_of_aotops_compiles_again(tmp_path, monkeypatch):
    shutil.copytree(toolchain.include_dir(), tmp_path / "include")
    monkeypatch.setattr(toolchain, "include_dir", lambda: tmp_path / "include")
    source = '#include "aot.h"\n#ifndef ANSWER\n#define ANSWER 1\n#endif\nextern "C" int answer() { return ANSWER; }\n'
    assert _answer(aotops.compile(source)) == 1
    with (tmp_path / "include" / "aot.h").open("a") as header:
        header.write("#define ANSWER 2\n")
    assert _answer(aotops.compile(source)) == 2


def test_a_folder_that_cannot_be_written_is_told(package, tmp_path, monkeypatch):
    """The cache can lie elsewhere, the objects of a package cannot."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("AOTOPS_CACHE", str(tmp_path / "file"))
    with pytest.raises(aotops.CompileError, match=r"file/.* cannot be written: .*; set AOTOPS_CACHE to a folder$"):
        aotops.compile("int f() { return 1; }")
    (package / "build").touch()
    with pytest.raises(aotops.CompileError, match=r"build/aotops cannot be written: [^;]*$"):
        build.build(package)


def test_many_processes_compile_once(tmp_path):
    log = tmp_path / "log"
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo run >>{log};; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    program = f"import aotops; print(aotops.compile({ANSWER!r}))"
    environment = os.environ | {"CXX": str(compiler)}

    def start(_):
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300
        )

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(start, range(8)))
    assert not [each.stderr for each in done if each.returncode]
    (library,) = {each.stdout for each in done}
    assert _answer(Path(library.strip())) == 42
    assert log.read_text() == "run\n"


def test_an_error_has_the_compilers_message_and_the_line(tmp_path):
    with pytest.raises(aotops.CompileError, match=r"mine\.cpp:2:.*'?missing'?") as raised:
        aotops.compile(ANSWER + "int f() { return missing; }\n", name="mine")
    assert "return missing;" in str(raised.value)
    assert str(tmp_path) not in str(raised.value)
    with pytest.raises(aotops.CompileError, match="undefined reference to `elsewhere'"):
        aotops.compile('extern "C" int elsewhere();\nextern "C" int f() { return elsewhere(); }\n')


def test_a_failure_leaves_no_library(cache):
    for _ in range(2):
        with pytest.raises(aotops.CompileError):
            aotops.compile("not C++;")
    assert not list(cache.rglob("*.so"))


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ("missing.cpp", {}, "missing.cpp cannot be read: No such file"),
        ("kernel.py", {}, "'kernel.py', expected a file named .cpp, .cc, .cxx or .cu"),
        (ANSWER, {"kind": "c"}, "kind is 'c', expected 'cpp' or 'cu'"),
        (ANSWER, {"name": "a/b"}, "name is 'a/b', expected"),
    ],
)
def test_a_wrong_argument_is_told(source, arguments, message):
    with pytest.raises(ValueError, match=message):
        aotops.compile(source, **arguments)


def test_a_missing_compiler_is_told(monkeypatch):
    toolchain.nvcc.cache_clear()
    monkeypatch.setenv("NVCC", "")
    with pytest.raises(aotops.CompileError, match=r"no CUDA compiler: .*pip install nvidia-cuda-nvcc"):
        aotops.compile("__global__ void f() {}\n")
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    toolchain.nvcc.cache_clear()
    with pytest.raises(aotops.CompileError, match="NVCC is '/nowhere/nvcc', which does not run"):
        aotops.compile("__global__ void f() {}\n")
    toolchain.nvcc.cache_clear()


@pytest.mark.parametrize(
    ("arch", "expected"),
    [("90", ("90",)), ("sm_80,sm_90", ("80", "90")), (86, ("86",)), (("8.0", "90a"), ("80", "90a"))],
)
def test_architectures_have_several_forms(arch, expected):
    assert toolchain.parse_archs(arch) == expected


def test_another_architecture_is_refused():
    with pytest.raises(ValueError, match="arch is 'hopper', expected compute capabilities"):
        toolchain.parse_archs("hopper")


# --------------------------------------------------------------------------------------------------------------- build


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "two"
    (folder / "two").mkdir(parents=True)
    (folder / "two" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "aotops.build_backend"\n'
        '[project]\nname = "two"\nversion = "1.2"\n'
        '[tool.aotops]\nlibrary = "two/libtwo.so"\nsources = ["*.cpp"]\n'
        '[tool.setuptools]\npackages = ["two"]\npackage-data = { two = ["*.so"] }\n'
    )
    (folder / "a.cpp").write_text('#include "a.h"\nextern "C" int answer() { return ANSWER; }\n')
    (folder / "a.h").write_text("#define ANSWER 42\n")
    (folder / "b.cpp").write_text('extern "C" int other() { return 1; }\n')
    return folder


def add_to_table(package: Path, line: str) -> None:
    file = package / "pyproject.toml"
    file.write_text(file.read_text().replace("[tool.setuptools]", f"{line}\n[tool.setuptools]"))


def test_a_package_is_built_where_it_has_changed(package, monkeypatch):
    runs = _count(monkeypatch)
    library = build.build(package)
    loaded = ctypes.CDLL(str(library))
    loaded.aot_version.restype = ctypes.c_char_p
    assert (loaded.answer(), loaded.other(), loaded.aot_version()) == (42, 1, b"1.2")
    assert library == package / "two" / "libtwo.so"

    runs.clear()
    assert (build.build(package), runs) == (library, [])
    (package / "a.h").write_text("#define ANSWER 43\n")
    build.build(package)
    assert runs == ["compiling a.cpp (baseline)", "linking libtwo.so"]
    runs.clear()
    library.unlink()
    build.build(package)
    assert runs == ["linking libtwo.so"]


def test_a_package_is_built_where_a_header_appears_or_changes_meanwhile(package, monkeypatch):
    (package / "earlier").mkdir()
    add_to_table(package, 'include = ["earlier", "."]')
    (package / "a.cpp").write_text('#include <a.h>\nextern "C" int answer() { return ANSWER; }\n')
    runs = _count(monkeypatch)
    build.build(package)
    runs.clear()
    (package / "earlier" / "a.h").write_text("#define ANSWER 44\n")
    library = build.build(package)
    assert runs == ["compiling a.cpp (baseline)", "linking libtwo.so"]
    assert _answer(shutil.copy(library, package / "44.so")) == 44
    counted = toolchain.run

    def slow(command, what, **options):
        """The header is saved after the compiler has read it."""
        said = counted(command, what, **options)
        if what.startswith("compiling a.cpp"):
            (package / "earlier" / "a.h").write_text("#define ANSWER 46\n")
        return said

    monkeypatch.setattr(toolchain, "run", slow)
    (package / "earlier" / "a.h").write_text("#define ANSWER 45\n")
    build.build(package)
    monkeypatch.setattr(toolchain, "run", counted)
    runs.clear()
    assert _answer(shutil.copy(build.build(package), package / "46.so")) == 46
    assert runs == ["compiling a.cpp (baseline)", "linking libtwo.so"]


def test_watching_builds_each_change_once(package, monkeypatch):
    """Also of a header elsewhere, which only the compiler's list of dependencies names; after an error; and of a
    header that is changed while it is compiled."""
    headers = package.parent / "headers"
    headers.mkdir()
    (headers / "other.h").write_text("#define OTHER 1\n")
    (package / "b.cpp").write_text('#include "other.h"\nextern "C" int other() { return OTHER; }\n')
    table = (package / "pyproject.toml").read_text()
    (package / "pyproject.toml").write_text(
        table.replace("[tool.setuptools]", 'include = ["../headers"]\n[tool.setuptools]')
    )
    told, runs = [], _count(monkeypatch)
    contents = iter(["#define OTHER nonsense here\n", "#define OTHER 43\n"])
    times = itertools.count(1)

    def change(_seconds):
        """In the place of time.sleep(): at every fifth poll a change."""
        if next(times) % 5 == 0:
            if (content := next(contents, None)) is None:
                raise KeyboardInterrupt
            (headers / "other.h").write_text(content)

    monkeypatch.setattr(build, "time", SimpleNamespace(sleep=change, time=time.time, time_ns=time.time_ns))
    monkeypatch.setattr(build, "tell", told.append)
    monkeypatch.setattr(toolchain, "tell", told.append)
    monkeypatch.setattr(toolchain, "_QUIET_SECONDS", 0)  # as if each compile took long
    with pytest.raises(KeyboardInterrupt):
        build.build(package, watch=True)
    assert not [line for line in told if line.endswith("...")]
    assert ctypes.CDLL(str(package / "two" / "libtwo.so")).other() == 43
    assert sum("is built" in line for line in told) == 2
    assert sum("nonsense" in line for line in told) == 1
    assert runs.count("compiling b.cpp (baseline)") == told.count("compiling b.cpp (baseline)") == 3
    assert runs.count("compiling a.cpp (baseline)") == told.count("compiling a.cpp (baseline)") == 1


def test_a_wrong_table_does_not_end_watching(package, monkeypatch):
    file, told = package / "pyproject.toml", []
    good = file.read_text()
    contents = iter(["[tool.aotops", good.replace("*.cpp", "a.cpp")])

    def change(_seconds):
        if (content := next(contents, None)) is None:
            raise KeyboardInterrupt
        file.write_text(content)

    monkeypatch.setattr(build, "time", SimpleNamespace(sleep=change, time=time.time, time_ns=time.time_ns))
    monkeypatch.setattr(build, "_wait", lambda project, seen, began: change(0) or seen)
    monkeypatch.setattr(build, "tell", told.append)
    with pytest.raises(KeyboardInterrupt):
        build.build(package, watch=True)
    built, wrong, again = (line for line in told if not line.startswith(("compiling", "linking")))
    assert "is built" in built
    assert "is built" in again
    assert wrong.startswith(f"{file}: Expected ']'")


def test_lines_of_several_threads_are_not_mixed():
    program = """
import threading
from aotops.toolchain import tell
run = [threading.Thread(target=lambda: [tell("x" * 40) for _ in range(200)]) for _ in range(4)]
for each in run: each.start()
for each in run: each.join()
"""
    code = [sys.executable, "-c", program]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, check=True)
    assert set(done.stderr.splitlines()) == {"aotops: " + "x" * 40}


ERRORS = """template <typename T> T twice(T x) { int unused; return x * undefined_thing; }
template <typename T> T g(T x) { return x.bad(); }
extern "C" int answer() { return g(1) + g(2.0) + g(3.f) + twice(1); }
extern "C" int more() { return oops; }
"""


def test_the_first_error_of_each_place_is_shown(package, monkeypatch):
    (package / "a.cpp").write_text(ERRORS)
    add_to_table(package, 'flags = ["-Wall"]')
    with pytest.raises(aotops.CompileError) as few:
        build.build(package)
    with pytest.raises(aotops.CompileError) as everything:
        build.build(package, verbose=True)
    few, everything = str(few.value), str(everything.value)
    assert few.startswith("compiling a.cpp (baseline) failed:\n")
    assert few.count("error: ") == 3
    assert few.count("a.cpp:2:") == 1
    for words in ("undefined_thing", "oops", "bad"):
        assert words in few
    assert "warning" not in few
    assert "required from" not in few
    lines = len(everything.splitlines()) - len(few.splitlines()) + 1
    assert few.endswith(f"\n({lines} more lines: aotops build --verbose)")
    assert everything.count("error: ") == 5
    assert "required from" in everything


def test_all_of_a_message_without_an_error_is_shown():
    assert toolchain.first_error("ld: undefined reference\nmore") == "ld: undefined reference\nmore"
    text = 'k.cu(3): error: identifier "x" is undefined\n  x;\n  ^\n\nk.cu(3): error: identifier "x" is undefined\n'
    assert toolchain.first_error(text) == 'k.cu(3): error: identifier "x" is undefined\n  x;\n  ^'


@pytest.mark.parametrize("kind", ["cpp", "cu"])
def test_a_folder_of_any_name(package, tmp_path, monkeypatch, kind):
    """nvcc runs its steps by a shell, which would take some of these for something else."""
    if kind == "cu" and toolchain.nvcc() is None:
        pytest.skip("nvcc is not installed")
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b'/a $HOME, it\'s "x" #y: \xc3\xa9 \xe9')) / "package"
    shutil.copytree(package, folder)
    (folder / "a.h").rename(folder / "two" / "a.h")
    (folder / "a.cpp").rename(folder / f"a.{kind}")
    table, text = folder / "pyproject.toml", (folder / "pyproject.toml").read_text()
    table.write_text(text.replace('["*.cpp"]', f'["a.{kind}"]\ninclude = ["two"]\narchs = ["80"]'))
    library = os.fsencode(build.build(folder))
    assert ctypes.CDLL(library).answer() == 42
    compiled = aotops.compile(folder / f"a.{kind}", include=[folder / "two"], arch="80")
    assert ctypes.CDLL(os.fsencode(compiled)).answer() == 42
    (folder / "two" / "a.h").write_text("#define ANSWER 43\n")
    runs = _count(monkeypatch)
    build.build(folder)
    assert [run.partition(" (")[0] for run in runs] == [f"compiling a.{kind}", "linking libtwo.so"]
    again = aotops.compile(folder / f"a.{kind}", include=[folder / "two"], arch="80")
    assert ctypes.CDLL(os.fsencode(again)).answer() == 43
    (folder / f"a.{kind}").write_text("not C++;\n")
    with pytest.raises(aotops.CompileError) as raised:
        build.build(folder)
    assert f"{os.fsencode(folder).decode(errors='replace')}/a.{kind}" in str(raised.value)


def test_a_folder_of_any_name_has_aotops_itself(package, tmp_path, monkeypatch):
    """nvcc gives the linker its script without quotes."""
    if toolchain.nvcc() is None:
        pytest.skip("nvcc is not installed")
    folder = tmp_path / "a (folder) & more" / "cmake"
    shutil.copytree(toolchain.cmake_dir(), folder)
    monkeypatch.setattr(toolchain, "cmake_dir", lambda: folder)
    (package / "a.cpp").rename(package / "a.cu")
    table, text = package / "pyproject.toml", (package / "pyproject.toml").read_text()
    table.write_text(text.replace('["*.cpp"]', '["a.cu"]\narchs = ["80"]'))
    assert ctypes.CDLL(str(build.build(package))).answer() == 42
    assert ctypes.CDLL(str(aotops.compile(package / "a.cu", arch="80"))).answer() == 42
    (tmp_path / "more space").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "more space"))
    (package / "b.cu").write_text("int other() { return 1; }")
    with pytest.raises(aotops.CompileError, match=r"nvcc cannot read a path in .*/more space': set TMPDIR"):
        aotops.compile(package / "b.cu", arch="80")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('sources = ["*.cpp"]', "", "has no sources and no triton"),
        ('sources = ["*.cpp"]', 'sources = ["c.cpp"]', "'c.cpp', which does not exist"),
        ('sources = ["*.cpp"]', 'sources = ["*.c"]', "sources matches no file"),
        ('sources = ["*.cpp"]', 'sources = "a.cpp"', "sources is 'a.cpp', expected a list of strings"),
        ('sources = ["*.cpp"]', 'sources = ["*.h"]', "a.h, expected .cpp"),
        ("[tool.aotops]", '[tool.aotops]\nisas = ["sse"]', "'sse', expected baseline, avx2 or avx512"),
        ("[tool.aotops]", "[tool.aotops]\nlibs = []", "has libs, expected library, sources"),
        ("[tool.aotops]", "[tool.other]", r"has no table \[tool.aotops\]"),
    ],
)
def test_a_wrong_table_is_told(package, old, new, message):
    file = package / "pyproject.toml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        build.build(package)


def test_the_backend_builds_a_wheel_with_the_library(package, tmp_path):
    program = f"import aotops.build_backend as b; print(b.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=package, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("two-1.2-py3-none-linux_")
    with zipfile.ZipFile(wheel) as opened:
        assert "two/libtwo.so" in opened.namelist()
        assert "Root-Is-Purelib: false" in opened.read("two-1.2.dist-info/WHEEL").decode()


def test_the_backends_error_is_the_compilers(package, tmp_path):
    (package / "b.cpp").write_text("not C++;\n")
    program = f"import aotops.build_backend as b; b.build_wheel({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=package, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "b.cpp:1:1: error" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_backend_says_which_setuptools_it_needs(tmp_path):
    """A new environment of Python 3.11 has an older one, and of later versions none."""
    (tmp_path / "setuptools").mkdir()
    (tmp_path / "setuptools" / "__init__.py").write_text("setup = None\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import aotops.build_backend"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "ImportError: aotops.build_backend needs setuptools 77 or later: pip install" in done.stderr


def test_cmake_finds_aotops(tmp_path):
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(mine LANGUAGES CXX)\n"
        "find_package(aotops REQUIRED)\naotops_add_library(mine mine.cpp)\n"
    )
    (tmp_path / "mine.cpp").write_text(
        '#include "aot.h"\nAOT_API int answer() { return aot::fail(aot::kNotImplemented, "%s", "mine"); }\n'
    )
    for command in (
        ["-S", tmp_path, "-B", tmp_path / "b", f"-Daotops_DIR={aotops.cmake_dir()}"],
        ["--build", tmp_path / "b"],
    ):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    library = ctypes.CDLL(str(tmp_path / "b" / "libmine.so"))
    library.aot_last_error.restype = ctypes.c_char_p
    assert (library.answer(), library.aot_last_error()) == (3, b"mine")


# ------------------------------------------------------------------------------------------------------------ examples


def test_the_example_trains_the_same_with_each_compiler():
    if "torch" not in requested():
        pytest.skip("torch is not under test")
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    program = Path(__file__).parents[2] / "examples" / "add2" / "train.py"

    def train(compiler):
        command = [sys.executable, program, "--device", "cpu", "--compiler", compiler]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if line.startswith("epoch")]

    with ThreadPoolExecutor(2) as pool:
        logs = list(pool.map(train, ("jit", "setup", "cmake")))
    assert logs[0] == logs[1] == logs[2]
    assert [line.split(":")[0] for line in logs[0]] == [f"epoch {epoch:>3}" for epoch in range(0, 500, 25)]
    assert logs[0][0].startswith("epoch   0: loss = ")
    assert logs[0][-1] == "epoch 475: loss =    0.000"
