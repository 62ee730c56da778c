"""Loading a library: a file that was rebuilt, written to, or deleted; one that contradicts itself; names and texts of
every kind."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aotops
from aotops import toolchain
from aotops.frontends import numpy as frontend
from aotops.library import Library, LibraryError
from aotops.testing.frameworks import requested

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

# Gives its input, plus VALUE, plus what the library that it is linked with says.
SOURCE = """
#ifdef NEEDS
extern "C" float needed();
#else
static float needed() { return 0; }
#endif
extern "C" int Value(int, void **params, int *, long **, const char **, void *, void *) {
  *static_cast<float *>(params[1]) = *static_cast<float *>(params[0]) + VALUE + needed();
  return 0;
}
"""
NEEDED = 'extern "C" float needed() { return VALUE; }'
names = (f"loading_{i}" for i in count())


def build(file: Path, value: int, *flags: str, source: str = SOURCE) -> Path:
    """By a linker, which replaces the file."""
    command = ["g++", "-shared", "-fPIC", f"-DVALUE={value}", "-x", "c++", "-", "-x", "none", *flags, "-o", str(file)]
    subprocess.run(command, input=source.encode(), check=True)
    return file


def load(file: Path) -> Library:
    """Under a name that is new."""
    library = aotops.load(file, name=next(names))
    library.op("Value", inputs=("x",), outputs=("y",), same_spec_as={"y": "x"})
    return library


def value(library: Library) -> float:
    return float(frontend.of(library).Value(np.zeros(1, "f4"))[0])


# ------------------------------------------------------------------------------------------------------ a changed file


def _linked(file: Path, value: int, *flags: str) -> None:
    build(file, value, *flags)


def _replaced(file: Path, value: int, *flags: str) -> None:
    os.replace(build(file.with_name("new.so"), value, *flags), file)


def _deleted_and_copied(file: Path, value: int, *flags: str) -> None:
    new = build(file.with_name("new.so"), value, *flags)
    file.unlink()
    shutil.copy(new, file)


def _of_the_same_time(file: Path, value: int, *flags: str) -> None:
    old = file.stat()
    build(file, value, *flags)
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))


@pytest.mark.parametrize("change", [_linked, _replaced, _deleted_and_copied, _of_the_same_time])
@pytest.mark.parametrize("flags", [(), ("-Wl,-soname,libvalue.so",)], ids=["", "soname"])
def test_a_rebuilt_library_is_loaded_as_it_is_now(tmp_path, change, flags):
    file = build(tmp_path / "libvalue.so", 1, *flags)
    libraries = [load(file)]
    for number in (2, 3):
        change(file, number, *flags)
        with pytest.raises(ValueError, match=rf"name is '{libraries[0].name}', the name of .*as it was when"):
            aotops.load(file, name=libraries[0].name)
        libraries += [load(file), load(file)]
    assert [value(library) for library in libraries] == [1, 2, 2, 3, 3]


def test_a_host_that_loads_libraries_itself_gets_no_old_one(tmp_path):
    """MindSpore opens the real path of a library's file."""
    file = build(tmp_path / "libvalue.so", 1)
    (tmp_path / "link.so").symlink_to(file)
    functions = load(tmp_path / "link.so").functions
    assert functions.real_path() == str(file)
    assert ctypes.CDLL(functions.real_path())._handle == functions._handle
    build(file, 2)
    assert functions.real_path() == str(file)
    with pytest.raises(LibraryError, match=r"libvalue.so was replaced in this process, .* restart the process"):
        load(file).functions.real_path()


def test_a_library_that_somebody_else_has_loaded(tmp_path):
    file = build(tmp_path / "libvalue.so", 1)
    other = ctypes.CDLL(str(file))
    assert load(file).address("Value") == ctypes.cast(other.Value, ctypes.c_void_p).value
    build(file, 2)
    assert value(load(file)) == 2


def test_a_rebuilt_library_finds_what_lies_beside_it(tmp_path):
    """By the same $ORIGIN."""
    build(tmp_path / "libneeded.so", 10, source=NEEDED)
    flags = ("-DNEEDS", f"-L{tmp_path}", "-lneeded", "-Wl,-rpath,$ORIGIN")
    file = build(tmp_path / "libvalue.so", 1, *flags)
    before = load(file)
    build(file, 2, *flags)
    assert (value(before), value(load(file))) == (11, 12)


def test_a_rebuilt_library_that_another_one_needs_is_refused(tmp_path):
    """The loader would bind to the old one, whose name is the same."""
    flags = ("-DNEEDS", f"-L{tmp_path}", "-lasked", "-Wl,-rpath,$ORIGIN")
    build(tmp_path / "libasked.so", 10, source=NEEDED)
    file = build(tmp_path / "libvalue.so", 1, *flags)
    assert value(load(file)) == 11
    build(tmp_path / "libasked.so", 20, source=NEEDED)
    build(file, 2, *flags)
    with pytest.raises(
        LibraryError, match=r"libvalue.so needs libasked.so, which is loaded from .*restart the process"
    ):
        load(file)


def test_a_library_that_was_written_to_in_place_is_refused(tmp_path, python):
    """Its code in memory is that of the file. In a process of its own, whose end might run it."""
    file, new = build(tmp_path / "libvalue.so", 1), build(tmp_path / "new.so", 2)
    program = f"""
import os, shutil, aotops
aotops.load({str(file)!r})
shutil.copyfile({str(new)!r}, {str(file)!r})
try:
    aotops.load({str(file)!r}, name="second")
except aotops.library.LibraryError as error:
    print(error, flush=True)
os._exit(0)
"""
    said = python(program)
    assert "libvalue.so was written to since it was loaded" in said
    assert "restart the process" in said


def test_a_library_whose_file_is_gone(tmp_path):
    """A library that is loaded stays; one that is not cannot be loaded any more."""
    file = build(tmp_path / "libvalue.so", 1)
    library = aotops.load(file, name=next(names))
    file.unlink()
    library.op("Value", inputs=("x",), outputs=("y",), same_spec_as={"y": "x"})
    assert value(library) == 1
    with pytest.raises(LibraryError, match="exports no Valu; did you mean Value"):
        library.op("Valu", inputs=("x",), outputs=("y",), same_spec_as={"y": "x"})
    with pytest.raises(LibraryError, match=r"libvalue.so does not exist"):
        aotops.load(file, name=next(names))


# ------------------------------------------------------------------------------------------------------------- headers


@pytest.fixture(scope="module")
def elf_file(tmp_path_factory):
    return build(tmp_path_factory.mktemp("elf") / "libelf.so", 1)


@given(data=st.data())
def test_a_head_of_random_bytes_is_an_error(elf_file, data):
    """In the head of the file, in a segment, or in the dynamic section: never another exception than LibraryError, and
    nothing of it reaches the loader."""
    content = bytearray(elf_file.read_bytes())
    segments = int.from_bytes(content[32:40], "little")
    dynamic = content.index((0x6FFFFEF5).to_bytes(8, "little")) - 16 * 8
    first, last = data.draw(st.sampled_from([(16, 64), (segments, segments + 11 * 56), (dynamic, dynamic + 16 * 24)]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(first, last - 8))
        content[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    file = elf_file.with_name("libbroken.so")
    file.unlink(missing_ok=True)
    file.write_bytes(content)
    with suppress(LibraryError):
        Library("broken", (), file).contents  # noqa: B018


@pytest.mark.parametrize(
    ("at", "bytes", "why"),
    [
        (16, b"\x02\0", "is no shared library"),
        (32, b"\xff" * 8, "bytes of at least"),
        (40, b"\xff" * 8, "bytes of at least"),
        (54, b"\x39\0", "is no shared library"),
        (56, b"\0\0", "there is no dynamic section"),
        (58, b"\x41\0", "sections have 65 bytes"),
    ],
)
def test_a_head_that_contradicts_the_file_is_refused(elf_file, tmp_path, at, bytes, why):
    content = elf_file.read_bytes()
    file = tmp_path / "libbroken.so"
    file.write_bytes(content[:at] + bytes + content[at + len(bytes) :])
    with pytest.raises(LibraryError, match=why):
        aotops.load(file)


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["class", "None", "aten", "prims", "_", "__init__", "Ellipsis", "étude", "aotops"])
def test_a_name_that_torch_refuses_is_refused(elf_file, name):
    with pytest.raises(ValueError, match=rf"aotops.load: name is '{name}', .*give another, load\(path, name=...\)"):
        aotops.load(elf_file, name=name)
    library = aotops.load(elf_file, name="names_of_all_kinds")
    if name not in ("aten", "prims", "_", "aotops"):
        with pytest.raises(ValueError, match=f"{name}: "):
            library.op(name, inputs=("x",), outputs=("y",), same_spec_as={"y": "x"}, cpu="Value")
    if not name.startswith("_") and name not in ("aten", "prims", "aotops"):
        with pytest.raises(ValueError, match=f"'{name}' is no identifier of ASCII characters"):
            library.op("Value", inputs=(name,), outputs=("y",), same_spec_as={"y": name})
    assert not library.ops


def test_a_function_of_any_name_and_a_folder_that_is_not_utf_8(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/lat\xe9n"))
    folder.mkdir()
    source = """
    extern "C" int étude(int, void **, int *, long **, const char **, void *, void *) { return 7; }
    extern "C" int Throws(int, void **, int *, long **, const char **, void *, void *) { throw Text(); }
    """
    head = (
        "#include <stdexcept>\nstruct Text : std::exception { const char *what() const noexcept override {"
        ' return "caf\\xe9 \\xf0\\x9f\\x8c\\x8d \\xed\\xa0\\x80"; } };'
    )
    library = aotops.load(build(folder / "libetude.so", 1, source=head + source))
    specs = {"inputs": ("x",), "outputs": ("y",), "same_spec_as": {"y": "x"}}
    library.op("Etude", cpu="étude", **specs)
    library.op("Throws", **specs)
    F, x = frontend.of(library), np.zeros((2, 3), "f4")
    with pytest.raises(RuntimeError, match=r"Etude: étude of .*/lat\\xe9n/libetude.so returned 7, expected 0, for"):
        F.Etude(x)
    with pytest.raises(RuntimeError, match=r"Throws: caf\\xe9 🌍 \\xed\\xa0\\x80$"):
        F.Throws(x)
    with pytest.raises(LibraryError, match=r"exports no Étude"):
        library.op("Other", cpu="Étude", **specs)
    if "jax" in requested():
        import jax

        from aotops.frontends import jax as jax_frontend

        with jax.default_device(jax.devices("cpu")[0]), pytest.raises(Exception, match=r"Throws: caf\\xe9 🌍"):
            jax.block_until_ready(jax.jit(jax_frontend.of(library).Throws)(x))
    assert aotops.compile(_written(folder / "same.cpp", SOURCE), flags=["-DVALUE=3"]).exists()


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


# ------------------------------------------------------------------------------------------------------------- sources


def test_a_source_takes_flags_and_folders_of_headers(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTOPS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "value.h").write_text("#define VALUE TWICE * 2\n")
    source = _written(tmp_path / "twice.cpp", '#include "value.h"\n' + SOURCE)
    for number in (3, 4):
        library = aotops.load(source, name=next(names), flags=[f"-DTWICE={number}"], include=[tmp_path / "include"])
        library.op("Value", inputs=("x",), outputs=("y",), same_spec_as={"y": "x"})
        assert value(library) == 2 * number
    with pytest.raises(TypeError, match=r"flags, include and arch are for a source, and libelf.so is none"):
        aotops.load(build(tmp_path / "libelf.so", 1), flags=["-DVALUE=2"])


SEEDED = """
#include <random>
#include "custom_aot_extra.h"

struct State : AotKernelData {
  uint64_t seed;
  float scale;
};

extern "C" int NoiseInit(int *, int64_t **, const char **, AotExtra *extra) {
  auto *state = new State;
  extra->SetKernelData(state);
  state->seed = extra->Attr<int64_t>("seed"), state->scale = extra->Attr<float>("scale");
  if (extra->Attr<std::string>("kind") != "uniform" || extra->Attr<std::vector<int64_t>>("axes").size() != 2) return 1;
  return extra->HasAttr("nothing") || !extra->Attr<bool>("on");
}

extern "C" int Noise(int nparam, void **params, int *, int64_t **shapes, const char **, void *, AotExtra *extra) {
  const auto *state = static_cast<const State *>(extra->KernelData());
  std::mt19937_64 random(state->seed);
  for (int64_t i = 0; i < shapes[1][0]; ++i)
    static_cast<float *>(params[1])[i] = static_cast<float *>(params[0])[i] + state->scale * (random() >> 40);
  return nparam - 2;
}
"""


def test_a_kernel_reads_attributes_by_the_header_that_is_shipped(tmp_path, monkeypatch):
    """A random seed, as an attribute; with std::string of either ABI."""
    monkeypatch.setenv("AOTOPS_CACHE", str(tmp_path / "cache"))
    assert (toolchain.include_dir() / "custom_aot_extra.h").exists()
    results = []
    for flags in ((), ("-D_GLIBCXX_USE_CXX11_ABI=1",)):
        library = aotops.load(_written(tmp_path / "noise.cc", SEEDED), name=next(names), flags=flags)
        attrs = {"seed": "int", "scale": "float", "kind": "str", "axes": "int[]", "on": "bool"}
        library.op("Noise", inputs=("x",), outputs=("y",), attrs=attrs, same_spec_as={"y": "x"})
        noise = frontend.of(library).Noise
        for seed in (1, 2, 1):
            results.append(noise(np.zeros(4, "f4"), seed, 2.0**-24, "uniform", (0, 1), True).tolist())
        with pytest.raises(
            ValueError, match=r"Noise: NoiseInit of .* returned 1, expected 0, for float32 \(4,\) and float32 \(4,\)"
        ):
            noise(np.zeros(4, "f4"), 1, 2.0**-24, "normal", (0, 1), True)
    first, second, again, *others = results
    assert first == again
    assert first != second
    assert others == [first, second, first]
    assert min(first + second) > 0
    assert max(first + second) < 1
