"""The command ``aotops``. A subcommand imports what it needs when it runs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from . import __version__, terminal
from .frontends import FRONTENDS
from .spec import DEVICES, FLOATING

EXPECTED = (ImportError, LookupError, OSError, ValueError, NotImplementedError)
"""Errors that a user can mend: the message is enough."""


class Commands(click.Group):
    """A group whose errors are one line on stderr, with a traceback only where AOTOPS_DEBUG is set."""

    def main(self, args: Any = None, prog_name: str | None = "aotops", *rest: Any, **extra: Any) -> Any:
        args = list(sys.argv[1:] if args is None else args)
        standalone = extra.pop("standalone_mode", True)
        extra |= {"standalone_mode": False, "obj": ["aotops", *args]}
        if not standalone:
            return super().main(args, prog_name, *rest, **extra)
        try:
            status = super().main(args, prog_name, *rest, **extra)
        except click.Abort:
            sys.exit(130)
        except click.ClickException as error:
            _fail(_usage(error), error.exit_code)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, for the interpreter's last flush
            sys.exit(1)
        except Exception as error:
            if os.environ.get("AOTOPS_DEBUG"):
                raise
            _fail(_message(error), 1)
        sys.exit(status if isinstance(status, int) else 0)

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)  # as they are defined here

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if (command := super().get_command(context, name)) or context.resilient_parsing:
            return command
        context.fail(terminal.unknown("command", name, self.list_commands(context)))


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "aotops"
    text = error.format_message().rstrip(".")
    return f"{where}: {text}; see `{where} --help`" if isinstance(error, click.UsageError) else f"{where}: {text}"


def _message(error: Exception) -> str:
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    if isinstance(error, EXPECTED) or type(error).__module__.startswith("aotops."):
        return f"aotops: {text}"
    return f"aotops: {type(error).__name__}: {text}; AOTOPS_DEBUG=1 shows the traceback"


def _fail(message: str, status: int) -> None:
    click.echo(terminal.colored(message, "red") if terminal.has_color(sys.stderr) else message, err=True)
    sys.exit(status)


def _printed(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def _registry() -> Any:
    """With the package of the current directory."""
    from . import registry

    registry.use(Path())
    return registry


def _completion(known: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    """Completes a word to the names that begin with it, for a shell."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        try:
            return [name for name in known() if name.startswith(incomplete)]
        except ValueError:  # in the pyproject.toml of this directory
            return []

    return complete


_operators, _libraries = _completion(lambda: _registry().names()), _completion(lambda: _registry().offered())


class Words(click.ParamType):
    """A list with commas. ``known``: words that a shell completes."""

    name = "A,B"

    def __init__(self, *known: str) -> None:
        self.known = known

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, word = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{each}") for each in self.known if each.startswith(word)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        return value if isinstance(value, list) else [word.strip() for word in value.split(",") if word.strip()]


class Shapes(Words):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return [tuple(int(dim) for dim in word.split("x")) for word in super().convert(value, param, ctx)]
        except ValueError:
            self.fail(f"{value!r}: expected shapes as 8192x4096, or lengths of rows", param, ctx)


IMPLS = "aotops", "naive", "torch", "torch.compile", "quack", "liger", "mindspore", "numpy"
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group("aotops", cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(version)s")
def main() -> None:
    """Kernels that are called, and differentiated, from every framework.

    \b
    Example:
      aotops new scale && cd scale && aotops build && aotops check scale
    """


# -------------------------------------------------------------------------------------------------------------- authors


@main.command()
@click.argument("name")
@click.option(
    "--template",
    type=click.Choice(("elementwise", "row", "reduction", "product", "triton")),
    default="elementwise",
    show_default=True,
    help="The kernel to begin with.",
)
@click.option("--directory", type=FOLDER, help="Where to write the package.  [default: ./NAME]")
def new(name: str, template: str, directory: Path | None) -> None:
    """Write the package of a new operator.

    It has a kernel, a definition, cases, tests and a pyproject.toml; it builds and passes its checks as it is. In a
    checkout of aotops the operator is written into the library itself.

    \b
    Example:
      aotops new scale --template row
    """
    create = import_module("aotops.new").create
    files = create(name, template, directory)
    package = next((file.parent for file in files if file.name == "pyproject.toml"), None)
    for file in (*files, *_write_stubs(package)):
        click.echo(os.path.relpath(file))
    build = "make lib" if package is None else f"cd {os.path.relpath(package)} && aotops build"
    click.echo(f"next: {build} && aotops check {name}", err=True)


def _write_stubs(package: Path | None) -> Iterator[Path]:
    """Writes the type stubs of a package's libraries, for editors and type checkers."""
    if package is None:
        return
    registry, library_class = import_module("aotops.registry"), import_module("aotops.library").Library
    registry.use(package)
    for library in registry.offered().values():
        if isinstance(library, library_class) and library.path.is_relative_to(package.absolute()):
            yield from import_module("aotops.frontends.stubs").write(library)


@main.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path())
@click.option("--watch", is_flag=True, help="Build again whenever a source changes, until interrupted.")
@click.option("--arch", help="GPU architectures, as 80,90, instead of those of the pyproject.toml.")
@click.option("--cuda", type=click.Choice(["12"]), help="For drivers from 525: the CUDA 12.9 toolchain, and an audit.")
@click.option("--verbose", is_flag=True, help="Name each file that is compiled, and show all errors of a compiler.")
def build(directory: Path, watch: bool, arch: str | None, cuda: str | None, verbose: bool) -> None:
    """Compile the kernels of a package.

    [tool.aotops] in its pyproject.toml names the sources and the library.

    \b
    Example:
      aotops build scale --watch
    """
    run = import_module("aotops.build").build
    click.echo(os.path.relpath(run(directory, watch=watch, arch=arch, verbose=verbose or None, cuda=cuda)))


@main.command(name="compile")
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("-o", "--output", type=FILE, help="Copy the library there.")
@click.option("--arch", help="GPU architectures, as 80,90.  [default: those of this machine's GPUs]")
def compile_(source: Path, output: Path | None, arch: str | None) -> None:
    """Compile a .cu or .cpp file to a shared library.

    The path is printed: one in the cache unless -o is given.

    \b
    Example:
      aotops compile kernel.cu -o libkernel.so
    """
    import aotops

    library = aotops.compile(source, arch=arch)  # type: ignore[attr-defined]
    if output is not None:
        import shutil

        library = shutil.copyfile(library, output)
    click.echo(library)


@main.command()
@click.argument("ops", nargs=-1, required=True, metavar="OP...", shell_complete=_operators)
@click.option("--frameworks", type=Words(*FRONTENDS), help=f"Only these of {', '.join(FRONTENDS)}.")
@click.option("--dtypes", type=Words(*FLOATING), help="Only these dtypes.")
@click.option("--devices", type=Words(*DEVICES), help="Only these of cpu, cuda.")
@click.option("--quick", is_flag=True, help="Few cases.")
@click.option("--huge", is_flag=True, help="A tensor of more than 2^31 elements too.")
@click.option("--sanitize", is_flag=True, help="On a GPU, run compute-sanitizer too.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random inputs.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--soak", is_flag=True, help="Instead, repeat the calls under load, and compare every result to the bit.")
@click.option("--seconds", type=float, default=300.0, show_default=True, help="With --soak: for everything.")
@click.option("--record", type=FILE, help="With --soak: write the record there, as JSON.")
@click.pass_obj
def check(
    arguments: list[str],
    ops: tuple[str, ...],
    as_json: bool,
    soak: bool,
    seconds: float,
    record: Path | None,
    **options: Any,
) -> None:
    """Check operators in each installed framework.

    Values, gradients, shapes, memory and threads are checked. OP is the name of an operator or of a library. The exit
    status is 1 if a check fails.

    \b
    Example:
      aotops check scale --frameworks torch,jax
    """
    operators = _registry().select(ops)
    if soak:
        terminal.check_writable("check: --record", record)
        return _soak(arguments, operators, as_json, seconds, record, options)
    testing, report = import_module("aotops.testing"), import_module("aotops.testing.report")
    lines = report.Lines(report.widest(options["frameworks"]))
    show = (lambda text: None) if as_json else click.echo  # as soon as it is known, into a pipe too
    reports = {}
    for name, op in operators.items():
        show(lines.title(op.name, op.library.path))
        reports[name] = testing.check(op, progress=lambda item: show(lines.item(item)), **options)
        show(lines.end(reports[name]))
    if as_json:
        _printed({name: json.loads(report.to_json()) for name, report in reports.items()})
    if not all(report.ok for report in reports.values()):
        sys.exit(1)


def _soak(
    arguments: list[str], operators: dict[str, Any], as_json: bool, seconds: float, record: Path | None, options: Any
) -> None:
    taken = {name: options.pop(name) for name in ("dtypes", "devices", "seed")}
    if given := [name for name, value in options.items() if value]:
        raise click.UsageError(f"--soak does not take --{given[0]}", click.get_current_context())
    run = import_module("aotops.testing").soak

    def write(found: Any) -> None:
        if record:
            new = record.with_name(f"{record.name}.new")
            new.write_text(found.to_json() + "\n")
            new.replace(record)

    found = run(list(operators.values()), seconds=seconds, command=shlex.join(arguments), so_far=write, **taken)
    write(found)
    click.echo(found.to_json() if as_json else found.render())
    if not found.ok:
        sys.exit(1)


# ---------------------------------------------------------------------------------------------------------------- bench


@main.command()
@click.argument("ops", nargs=-1, metavar="[OP]...", shell_complete=_operators)
@click.option("--device", type=click.Choice(DEVICES), help="Default: cuda where torch finds one, else cpu.")
@click.option(
    "--impls",
    type=Words(*IMPLS, "none"),
    help=f"Only these, of those installed: {', '.join(IMPLS)}; 'none' measures nothing, for --merge.",
)
@click.option("--dtypes", type=Words(*FLOATING), help="Default: bfloat16,float32.")
@click.option(
    "--shapes",
    type=Shapes(),
    metavar="MxN,N",
    help="Only these, each of the operators whose shapes have as many numbers: MxNxK of products; on a GPU N alone "
    "means 2^26 elements in rows of N.",
)
@click.option("--passes", type=Words("forward", "backward"), help="Only these of forward, backward.")
@click.option("--quick", is_flag=True, help="Few shapes and few repeats: to see that all works, not for the record.")
@click.option(
    "--jobs", type=int, metavar="N", help="Processes that compile ahead what torch.compile and quack want compiled."
)
@click.option("--turns", type=FILE, help="Others run beside it, but for measurements, which lock this file.")
@click.option("--json", type=FILE, help="Write the results there.")
@click.option("--plots", type=FOLDER, help="Draw there, one PNG an operator.")
@click.option("--cases", type=FOLDER, help="The rows of the built-in operators.")
@click.option("--merge", type=FILE, multiple=True, help="Keep the rows of these earlier results too.")
@click.pass_obj
def bench(arguments: list[str], ops: tuple[str, ...], cases: Path | None, **options: Any) -> None:
    """Time operators against what others offer.

    Forward and backward are timed, and compared with a copy of as many bytes. On a GPU the time is the device's, from
    replays of CUDA graphs; on a CPU it is that of the call.

    OP is the name of an operator or of a library; without one, all built-in operators are timed. An entry
    aot_<op>_naive_<device> of the operator's library, with the same arguments, is timed beside it.

    \b
    Example:
      aotops bench gelu softmax --device cpu --quick --plots plots
    """
    from .bench.cases import use
    from .bench.run import Options, run

    _registry()
    if cases:
        use(cases)
    run(Options(ops=ops, command=shlex.join(arguments), **options))


# --------------------------------------------------------------------------------------------------------- what is here


@main.command(name="list")
@click.argument("ops", nargs=-1, metavar="[OP]...", shell_complete=_operators)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def list_(ops: tuple[str, ...], as_json: bool) -> None:
    """List the operators of every library, or show one.

    The libraries are the built-in one, and those that installed packages offer. With OP, the name of an operator or of
    a library: its signature, devices, inputs, outputs, attributes and docstring, which tells shapes and dtypes.

    \b
    Example:
      aotops list gelu
    """
    registry = _registry()
    chosen = registry.select(ops).values()
    found = [registry.describe_operator(op) for op in chosen] if ops else registry.describe()
    if as_json:
        _printed(found)
    elif ops:
        click.echo("\n\n".join(map(registry.render_operator, found)))
    else:
        click.echo(registry.render(found))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option("--try", "attempt", is_flag=True, help="Call an operator in each framework, in a process of its own.")
def info(as_json: bool, attempt: bool) -> None:
    """Tell what is installed and what works.

    Library, devices, compilers and frameworks; and the command that mends what is unavailable.

    \b
    Example:
      aotops info --try
    """
    from . import info

    _registry()
    found = info.collect(attempt=attempt)
    if as_json:
        _printed(found)
    else:
        click.echo(info.render(found))


@main.command()
@click.argument("library", shell_complete=_libraries)
@click.option("--output", type=FOLDER, help="Where to write.  [default: the frontends folder of the library's package]")
def stubs(library: str, output: Path | None) -> None:
    """Write type stubs for the functions of a library.

    A .pyi file for each framework, for editors and type checkers.

    \b
    Example:
      aotops stubs scale
    """
    from .frontends import stubs

    for file in stubs.write(_registry().library(library), output):
        click.echo(os.path.relpath(file))


@main.command()
@click.argument("library", shell_complete=_libraries)
def schemas(library: str) -> None:
    """Print the rows by which a C++ program registers a library's operators with LibTorch.

    The program passes them to aot_torch_register_library. Only operators whose entries are made with aot.h have one.

    \b
    Example:
      aotops schemas scale >scale.schemas
    """
    from .frontends.torch_schema import rows

    found = list(rows(_registry().library(library).ops.values()))
    if not found:
        raise LookupError(f"{library} has no operator whose entry is made with aot.h")
    click.echo(f"aotops {__version__}")
    for schema, written, elementwise in found:
        click.echo(f"{schema}\t{written}\t{int(elementwise)}")


@main.command(name="include-dir")
def include_dir() -> None:
    """Print the folder of the headers for kernels.

    \b
    Example:
      g++ -shared -fPIC -I"$(aotops include-dir)" scale.cpp -o libscale.so
    """
    import aotops

    click.echo(aotops.include_dir())  # type: ignore[attr-defined]


@main.command(name="cmake-dir")
def cmake_dir() -> None:
    """Print the folder of the CMake package.

    \b
    Example:
      cmake -S . -B build -Daotops_DIR="$(aotops cmake-dir)"
    """
    import aotops

    click.echo(aotops.cmake_dir())  # type: ignore[attr-defined]
