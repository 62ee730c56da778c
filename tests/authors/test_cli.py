"""The command: what it calls, what it prints, and what a user's mistake looks like. And the registry that it lists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

import aotops
from aotops import cli, registry, terminal, testing
from aotops.library import Library, LibraryError
from aotops.op import operator
from aotops.ops import BUILTIN, OPS
from aotops.testing.report import Failure, Item, Report

COMMANDS = ["new", "build", "compile", "check", "bench", "list", "info", "stubs", "schemas", "include-dir", "cmake-dir"]


def run(*arguments, status=0):
    result = CliRunner().invoke(cli.main, [str(word) for word in arguments])
    assert result.exit_code == status, result.output
    return result


def one_line(result) -> str:
    """The line that it printed on stderr."""
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def module(monkeypatch):
    """Puts a module of these members in the place of one of aotops."""

    def put(name, **members):
        made = ModuleType(f"aotops.{name}")
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, made.__name__, made)
        return made

    return put


# ----------------------------------------------------------------------------------------------------------------- help


def test_the_commands():
    assert list(cli.main.commands) == COMMANDS


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_an_example(command):
    told = run(*command.split(), "--help").stdout
    (example,) = (line.strip() for line in told.partition("Example:\n")[2].splitlines()[:1])
    assert f"aotops {command}".strip() in example


def test_version():
    assert run("--version").stdout == f"{aotops.__version__}\n"


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "aotops: there is no command 'nope'; there are new, build,"),
        (["bench", "--nope"], "aotops bench: No such option '--nope'; see `aotops bench --help`"),
        (["check"], "aotops check: Missing argument 'OP...'"),
        (
            ["new", "x", "--template", "round"],
            "'round' is not one of 'elementwise', 'row', 'reduction', 'product', 'triton'",
        ),
        (["bench", "--shapes", "8xa"], "'8xa': expected shapes as 8192x4096"),
        (["compile", "/none.cu"], "File '/none.cu' does not exist"),
        (["chek", "add"], "aotops: there is no command 'chek': did you mean check?"),
    ],
)
def test_a_mistake_in_the_command_line_is_one_line(arguments, words):
    assert words in one_line(run(*arguments, status=2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "nothing"], "aotops: there is no operator 'nothing'; there are add,"),
        (["bench", "--impls", "nope"], "aotops: bench: --impls has 'nope', expected some of aotops, naive,"),
        (["bench", "--dtypes", "int8"], "aotops: bench: --dtypes has 'int8', expected some of float16, bfloat16,"),
        (["bench", "add", "--shapes", "1x2x3", "--device", "cpu"], "aotops: bench: add: no case has these shapes,"),
        (["stubs", "nope"], "aotops: there is no library 'nope'; there are aotops"),
        (["bench", "--impls", "none"], "aotops: bench: nothing was measured, and --merge names nothing"),
        (["check", "geluu"], "aotops: there is no operator 'geluu': did you mean gelu?"),
        (["bench", "gelu", "layernorm"], "aotops: there is no operator 'layernorm': did you mean layer_norm"),
        (["list", "LayerNorm"], "aotops: there is no operator 'LayerNorm': did you mean layer_norm"),
        (["list", "aotops.gleu"], "aotops: there is no operator 'aotops.gleu': did you mean aotops.gelu"),
        (["stubs", "aotop"], "aotops: there is no library 'aotop': did you mean aotops?"),
    ],
)
def test_a_failure_is_one_line(arguments, words):
    result = run(*arguments, status=1)
    assert one_line(result).startswith(words)


def test_errors_of_aotops_and_of_a_bug(module):
    class CompileError(Exception):
        __module__ = "aotops.toolchain"

    def fail(error):
        def build(*args, **kwargs):
            raise error

        module("build", build=build)
        return run("build", status=1).stderr

    assert fail(CompileError("k.cu:3: error: x")) == "aotops: k.cu:3: error: x\n"
    assert fail(LibraryError("no symbol")) == "aotops: no symbol\n"
    assert fail(KeyError("no 'x'")) == "aotops: no 'x'\n"
    assert fail(ZeroDivisionError("zero")) == "aotops: ZeroDivisionError: zero; AOTOPS_DEBUG=1 shows the traceback\n"


def test_an_error_is_red_on_a_terminal_alone(monkeypatch):
    a_terminal, a_pipe = SimpleNamespace(isatty=lambda: True), SimpleNamespace(isatty=lambda: False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal.colored("x", "red") == "\x1b[31mx\x1b[0m"
    assert terminal.has_color(a_terminal)
    assert not terminal.has_color(a_pipe)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.has_color(a_terminal)


def test_a_process(tmp_path, python):
    """The traceback where it is asked for; no click; and a reader that leaves."""
    bad = "import sys; sys.argv[1:] = ['stubs', 'nope']; from aotops.__main__ import main; main()"
    told = python(bad, expect=1)
    assert told.splitlines() == ["aotops: there is no library 'nope'; there are aotops"]
    assert "Traceback" in python(bad, expect=1, AOTOPS_DEBUG="1")
    without = "import sys; sys.modules['click'] = None; " + bad
    assert python(without, expect=1).splitlines() == [
        "aotops: the commands need click, which is not installed: pip install 'aotops[tools]'"
    ]
    shell = f"{sys.executable} -m aotops list --json | head -c 1"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=300)
    assert (done.stdout, done.stderr) == ("[", "")


# ------------------------------------------------------------------------------------------------- what a command calls


def test_new(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    files = [tmp_path / "scale/pyproject.toml", tmp_path / "scale/scale/ops.py"]
    module("new", create=lambda *args: calls.append(args) or files)
    result = run("new", "scale", "--template", "row")
    assert result.stdout == "scale/pyproject.toml\nscale/scale/ops.py\n"
    assert result.stderr == "next: cd scale && aotops build && aotops check scale\n"
    del files[0]  # as in a checkout
    assert run("new", "scale", "--directory", "elsewhere").stderr == "next: make lib && aotops check scale\n"
    assert calls == [("scale", "row", None), ("scale", "elementwise", Path("elsewhere"))]


def test_new_writes_stubs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    printed = run("new", "with_stubs", "--template", "row").stdout.split()
    registry.use(None)
    stub = "with_stubs/with_stubs/frontends/torch.pyi"
    assert stub in printed
    assert "def with_stubs(x: Tensor" in (tmp_path / stub).read_text()


def test_build(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    module("build", build=lambda *args, **options: calls.append((args, options)) or tmp_path / "scale/libscale.so")
    assert run("build").stdout == "scale/libscale.so\n"
    (tmp_path / "scale").mkdir()
    run("build", "scale", "--watch", "--arch", "90", "--verbose", "--cuda", "12")
    assert calls == [
        ((Path(),), {"watch": False, "arch": None, "verbose": None, "cuda": None}),
        ((Path("scale"),), {"watch": True, "arch": "90", "verbose": True, "cuda": "12"}),
    ]


def test_compile(tmp_path, monkeypatch):
    source, made, output = (tmp_path / name for name in ("kernel.cpp", "cached.so", "libkernel.so"))
    source.write_text("")
    made.write_text("library")
    calls = []
    monkeypatch.setattr(aotops, "compile", lambda *a, **k: calls.append((a, k)) or made, raising=False)
    assert run("compile", source).stdout == f"{made}\n"
    assert run("compile", source, "-o", output, "--arch", "80,90").stdout == f"{output}\n"
    assert output.read_text() == "library"
    assert calls == [((source,), {"arch": None}), ((source,), {"arch": "80,90"})]


def test_check(monkeypatch):
    """A line is printed when its item is known, into a pipe too."""
    calls, printed = [], []

    def check(op, *, progress, **options):
        calls.append((op, options))
        failure = Failure("wrong", "x (3,)") if op.name == "gelu" else None
        items = [Item("values", "numpy cpu", "pass", "2 cases in float16, bfloat16, float32, float64")]
        items += [Item("threads", "cpu", "fail", "", failure)] if failure else []
        for item in items:
            progress(item)
            printed.append(sys.stdout.buffer.getvalue().decode())
        return Report(op.name, "lib.so", items, 1.5)

    monkeypatch.setattr(testing, "check", check, raising=False)
    head = f"{'values':16}  {'numpy cpu':17}  pass  2 cases in all dtypes\n"
    told = run("check", "add", "--frameworks", "torch, jax", "--quick", "--seed", "3").stdout
    assert told == f"add in {OPS['add'].library.path}\n{head}1 passed in 1.5 s\n"
    assert told.startswith(printed[0])
    assert printed[0].endswith(head)
    options = {"frameworks": ["torch", "jax"], "dtypes": None, "devices": None}
    assert calls == [(OPS["add"], options | {"quick": True, "huge": False, "sanitize": False, "seed": 3})]
    failed = run("check", "gelu", status=1).stdout
    assert "\nthreads, cpu: wrong\n  smallest case: x (3,)\n" in failed
    assert not {"\x1b", "\r"} & set(failed)
    result = run("check", "aotops.add", "gelu", "--json", status=1)
    assert [each["ok"] for each in json.loads(result.stdout).values()] == [True, False]
    calls.clear()
    run("check", "aotops", status=1)
    assert [op for op, _ in calls] == list(OPS.values())


def completed(*words: str) -> list[str]:
    """The words that a shell offers for the last one."""
    *before, last = words
    complete = BashComplete(cli.main, {}, "aotops", "_AOTOPS_COMPLETE")
    return [item.value for item in complete.get_completions(before, last)]


def test_a_shell_completes_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert completed("che") == ["check"]
    for command in ("check", "bench", "list"):
        assert completed(command, "add", "la") == ["layer_norm"]
    assert completed("check", "ao") == ["aotops"]
    assert completed("stubs", "") == ["aotops"]
    assert completed("check", "--frameworks", "numpy,to") == ["numpy,torch"]
    assert completed("check", "--dtypes", "f") == ["float16", "float32", "float64"]
    assert completed("chek", "la") == []
    (tmp_path / "broken").mkdir()
    monkeypatch.chdir(tmp_path / "broken")
    Path("pyproject.toml").write_text("aotops.libraries = ")
    assert completed("check", "la") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_completes(shell):
    source = CliRunner().invoke(cli.main, [], env={"_AOTOPS_COMPLETE": f"{shell}_source"}).output
    assert f"_AOTOPS_COMPLETE={shell}_complete" in source
    words = {"COMP_WORDS": "aotops check ma", "COMP_CWORD": "ma" if shell == "fish" else "2"}
    told = CliRunner().invoke(cli.main, [], env={"_AOTOPS_COMPLETE": f"{shell}_complete"} | words).output
    assert "matmul" in told
    assert "layer_norm" not in told


def test_words_that_a_shell_completes_are_those_that_are_known():
    from aotops.bench import baselines
    from aotops.testing import checker

    assert {*cli.IMPLS} == {*baselines.MAKERS}
    assert cli.FLOATING == checker.DTYPES


@pytest.mark.parametrize("command", ["include-dir", "cmake-dir"])
def test_folders(monkeypatch, command):
    monkeypatch.setattr(aotops, command.replace("-", "_"), lambda: Path("/there"), raising=False)
    assert run(command).stdout == "/there\n"


# -------------------------------------------------------------------------------------------------------- the registry


@operator(inputs=("x",), outputs=("y",), same_spec_as={"y": "x"})
def gelu(x, factor=2.0):
    return (x,), ()


OTHER = Library("other", [gelu], Path("/none/libother.so"))
NAMED = Library("nobody", [], Path("/none/libother.so"))
NUMBER = 3


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package that offers these libraries."""

    def install(**points):
        folder = tmp_path / f"offers{len(list(tmp_path.iterdir()))}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder.stem[:-2]}\nVersion: 1\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[aotops.libraries]", *lines]))

    monkeypatch.syspath_prepend(tmp_path)
    return install


def test_the_list(installed):
    installed(other=f"{__name__}:OTHER", broken="no_such_module:library")
    ours, broken, other = json.loads(run("list", "--json").stdout)
    assert [ours["library"], broken["library"], other["library"]] == ["aotops", "broken", "other"]
    assert [op["name"] for op in ours["operators"]] == list(OPS)
    assert ours["error"] is None
    add = ours["operators"][0]
    assert add["signature"] == "add(a, b, alpha=1)"
    assert add["gradient"] is True
    assert "cpu" in add["devices"]
    assert "no_such_module" in broken["error"]
    (op,) = other["operators"]
    assert op == {"name": "gelu", "signature": "gelu(x, factor=2.0)", "devices": [], "gradient": False}
    assert "/none/libother.so does not exist" in other["error"]
    told = run("list").stdout
    assert "add(a, b, alpha=1)" in told
    assert "error: the entry point broken = 'no_such_module:library' does not load" in told


def test_an_operator_is_shown(installed):
    installed(other=f"{__name__}:OTHER")
    ours, other = json.loads(run("list", "linear", "other", "--json").stdout)
    assert (ours["library"], ours["name"], ours["outputs"]) == ("aotops", "linear", ["y"])
    assert ours["inputs"] == {"x": "", "weight": "", "bias": "optional"}
    assert ours["attributes"] == {"activation": "str?", "allow_tf32": "bool"}
    assert "cpu" in ours["devices"]
    assert (other["library"], other["signature"]) == ("other", "gelu(x, factor=2.0)")
    told = run("list", "linear").stdout
    assert told.startswith("linear(x, weight, bias=None, activation=None, allow_tf32=False)\n  library     aotops, ")
    assert "\n  inputs      x, weight, bias (optional)\n" in told
    assert "float16, bfloat16, float32 or float64" in told  # of the docstring


@pytest.mark.parametrize("command", [["list"], ["list", "conv2d", "layer_norm"], ["info"]])
def test_what_a_command_prints_fits_the_terminal(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    told = run(*command).stdout
    assert [line for line in told.splitlines() if len(line) > 70 and "/" not in line] == []


def test_an_operator_by_name(installed):
    installed(other=f"{__name__}:OTHER", broken="no_such_module:library")
    assert aotops.get("add") is OPS["add"]
    with pytest.raises(KeyError, match=r"'gelu' is in several libraries, expected one of aotops\.gelu, other\.gelu"):
        aotops.get("gelu")
    assert aotops.get("aotops.gelu") is OPS["gelu"]
    assert aotops.get("other.gelu").library.name == "other"
    with pytest.raises(KeyError, match=r"there is no operator 'scale'; there are add, .*; the entry point broken"):
        aotops.get("scale")
    assert list(registry.select(["aotops.add", "other"])) == ["add", "other.gelu"]
    with pytest.raises(LibraryError, match="the entry point broken"):
        aotops.libraries()


def test_an_entry_point_that_is_no_library(installed):
    installed(number=f"{__name__}:NUMBER", misnamed=f"{__name__}:NAMED")
    offered = registry.offered()
    assert offered["aotops"] is BUILTIN
    assert str(offered["number"]).endswith("is a int, expected a Library of that name")
    assert str(offered["misnamed"]).endswith("is the library 'nobody', expected a Library of that name")
    with pytest.raises(LibraryError, match="is a int"):
        registry.library("number")


def test_the_package_of_the_current_directory(tmp_path, monkeypatch):
    """It is found before it is installed, and before another of its name that is."""
    pytest.importorskip("tomllib", reason="Python 3.10 reads TOML with tomli, which is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "_directory", None)
    (tmp_path / "pyproject.toml").write_text('[project.entry-points."aotops.libraries"]\nmine = "mine_here:library"\n')
    definition = "from aotops import Library\nlibrary = Library('mine', [], '/none/libmine.so')\n"
    (tmp_path / "mine_here.py").write_text(definition)
    assert "mine" not in aotops.libraries()
    assert [each["library"] for each in json.loads(run("list", "--json").stdout)] == ["aotops", "mine"]
    assert sys.modules.pop("mine_here").__file__ == str(tmp_path / "mine_here.py")
    registry.use(tmp_path / "none")
    assert "mine" not in aotops.libraries()
