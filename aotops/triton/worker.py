"""The compiler of Triton kernels, a process of its own: ``python -m aotops.triton.worker -c launch.py --entry add
--arch 90 --triton 3.7.1 --digest 0 -o FILE``. It compiles every variant of an entry for a GPU and writes them as JSON.
It needs Triton, and neither a GPU nor torch."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import ptx
from .declaration import Call, DeclarationError, Variant, load
from .launch import Config

SETTINGS = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_INTERPRET": "0"}
"""Line numbers would double the size of the code."""
DEFAULTS = {"TRITON_DEFAULT_FP_FUSION": "1"}
"""The default of Triton before 3.10; 3.9 warns where the variable is not set."""

MOST_SHARED = {
    "75": 65536, "80": 166912, "86": 101376, "87": 166912, "89": 101376, "90": 232448, "100": 232448, "103": 232448,
    "120": 101376, "121": 101376,
}  # fmt: skip
"""The shared memory of a block, in bytes."""


class Refused(Exception):
    """A kernel that cannot be compiled as it is declared; the message is for its author."""


def main() -> None:
    options = argparse.ArgumentParser(prog="aotops.triton.worker")
    options.add_argument("-c", dest="file", type=Path, required=True)
    for name in ("entry", "arch", "triton", "digest"):
        options.add_argument(f"--{name}", required=True)
    options.add_argument("-MMD", dest="track", action="store_true")
    options.add_argument("-MF", dest="depends", type=Path)
    options.add_argument("-o", dest="output", type=Path, required=True)
    given = options.parse_args()
    try:
        _compile(given)
    except (Refused, DeclarationError) as error:
        sys.exit(str(error))


def _compile(given: argparse.Namespace) -> None:
    os.environ.update(SETTINGS | {name: os.environ.get(name, value) for name, value in DEFAULTS.items()})
    (entry,) = (each for each in load(given.file) if each.name == given.entry)
    folder = given.file.absolute().parent
    with tempfile.TemporaryDirectory(prefix="aotops-triton-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        made = [_compiled(call, folder, given) for call in entry.calls]
    given.output.write_text(json.dumps([each for variants in made for each in variants]))
    if given.depends:
        # a Makefile's first dependency is the source, which --digest stands for
        read = [*_modules_below(folder)]
        given.depends.write_text(
            f"{given.output}: {' '.join(str(path).replace(' ', chr(92) + ' ') for path in read)}\n"
        )


def _modules_below(folder: Path) -> Iterable[Path]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(file).absolute() for file in files if file}
    return sorted(path for path in paths if path.is_relative_to(folder) and path.suffix == ".py")


# ------------------------------------------------------------------------------------------------------------- kernels


def kernel(call: Call, folder: Path) -> Any:
    """The function of a launch: Triton's JITFunction, or that of its interpreter.

    Raises:
        Refused: the file fails, or has no such kernel.
    """
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import KernelInterface

    function = getattr(_module(folder / call.file), call.function, None)
    while isinstance(function, Autotuner | Heuristics):  # the declaration has the configurations
        function = function.fn
    if not isinstance(function, KernelInterface):
        raise Refused(f"{call.entry.name}: {call.file} has no kernel {call.function}, expected a @triton.jit function")
    return function


def _module(file: Path) -> Any:
    """A file's module, which can import those beside it."""
    name = f"_aotops_{file.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(file):
        return sys.modules[name]
    if not file.exists():
        raise Refused(f"{file} does not exist")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None
    assert found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:  # whatever the author's file raises
        raise Refused(f"{file.name} fails: {type(error).__name__}: {error}") from error
    return module


def check_parameters(call: Call, function: Any) -> None:
    """Raises Refused unless each parameter of a kernel is an argument or a constexpr, and nothing else is."""
    what = f"{call.entry.name}: {call.launch.kernel}"
    names, arguments = set(function.arg_names), {each.parameter for each in call.arguments}
    for config in call.configs:
        for name in (*arguments, *config.constexprs):
            if name not in names:
                raise Refused(f"{what}: it has no parameter {name}, expected some of {', '.join(function.arg_names)}")
        for parameter in function.params:
            name = parameter.name
            if parameter.is_constexpr and name in arguments:
                raise Refused(f"{what}: {name} is a tl.constexpr, expected it in Config(...), not in arguments")
            if name in arguments or name in config.constexprs or _has_default(parameter):
                continue
            if parameter.is_constexpr and name in config.stated:
                continue
            if parameter.is_constexpr:
                raise Refused(f"{what}: the tl.constexpr {name} has no value in {config}, expected Config({name}=...)")
            raise Refused(f"{what}: the parameter {name} has no argument, expected it in Launch(arguments=...)")


def stated_options(call: Call, function: Any, config: Config) -> dict[str, Any]:
    """The options of a configuration that are parameters of the kernel too."""
    names = set(function.arg_names) - {each.parameter for each in call.arguments}
    return {name: value for name, value in config.stated.items() if name in names}


def _has_default(parameter: Any) -> bool:
    return parameter.default is not parameter._param.empty


# ----------------------------------------------------------------------------------------------------------- compiling


def _compiled(call: Call, folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    try:
        import triton
    except ImportError as error:
        raise Refused(f"triton does not import: {error}") from None
    if triton.__version__ != given.triton:
        raise Refused(f"triton is {triton.__version__}, expected {given.triton}: it was exchanged during the build")
    function = kernel(call, folder)
    check_parameters(call, function)
    return [_variant(call, function, variant, given) for variant in call.variants(given.arch)]


def _variant(call: Call, function: Any, variant: Variant, given: argparse.Namespace) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    config, began = call.configs[variant.config], time.perf_counter()
    signature, constexprs, multiples = call.signature(variant)
    for name, value in stated_options(call, function, config).items():
        signature[name], constexprs[name] = "constexpr", value
    for parameter in function.params:
        if parameter.name not in signature:
            signature[parameter.name], constexprs[parameter.name] = "constexpr", parameter.default
    signature = {name: signature[name] for name in function.arg_names}
    where = {name: (i,) for i, name in enumerate(function.arg_names)}
    exempt = {p.name for p in function.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    attrs = {where[name]: [["tt.divisibility", 16]] for name in multiples if name not in exempt}
    what = f"{call.entry.name}: {call.launch.kernel}, {config}, {_dtypes(variant)}sm_{given.arch}"
    source = ASTSource(function, signature, {where[name]: value for name, value in constexprs.items()}, attrs)
    options = {name: value for name, value in config.options.items() if value is not None}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", int(given.arch), 32), options=options)
    except Exception as error:  # of the kernel, of a pass of Triton, or of ptxas
        raise Refused(f"{what}: it does not compile: {type(error).__name__}: {error}{_advice(str(error))}") from None
    return {
        "launch": variant.launch, "config": variant.config, "hint": variant.hint, "types": dict(variant.types),
        "seconds": time.perf_counter() - began,
    } | _facts(call, variant, made, what, given)  # fmt: skip


def _advice(error: str) -> str:
    if "'tensor' object has no attribute" not in error:
        return ""
    return "\na tensor descriptor as an argument is not supported: make it in the kernel, tl.make_tensor_descriptor"


def _dtypes(variant: Variant) -> str:
    return "".join(f"{name}={dtype}, " for name, dtype in variant.types)


def _facts(call: Call, variant: Variant, made: Any, what: str, given: argparse.Namespace) -> dict[str, Any]:
    """The facts that the launcher needs, checked against the PTX."""
    facts, found = made.metadata, ptx.read(made.asm["ptx"])
    types = dict(variant.types)
    passed = [call._type(each, types) for each in call.passed(variant)]
    if (wrong := ptx.mismatch(found, passed)) is not None:
        raise Refused(
            f"{what}: triton {given.triton} compiled it for another way of launching: {wrong}; this aotops does not "
            f"know this release of triton"
        )
    if found.threads and found.threads != 32 * facts.num_warps:
        raise Refused(f"{what}: it is for {found.threads} threads, and triton says {facts.num_warps} warps")
    if getattr(facts, "profile_scratch_size", 0):
        raise Refused(f"{what}: it needs memory of Triton's profiler, which is not supported: switch the profiler off")
    most = MOST_SHARED.get(given.arch, 1 << 30)
    if facts.shared > most:
        raise Refused(
            f"{what}: it needs {facts.shared} bytes of shared memory, sm_{given.arch} has {most}: fewer num_stages, "
            f"smaller blocks, or Config(archs=...) without {given.arch!r}"
        )
    if facts.global_scratch_size and not call.entry.workspace:
        raise Refused(
            f"{what}: it needs scratch, as a kernel does that makes tensor descriptors: state Entry(workspace=True), "
            f'and workspace=("workspace",) in the operator'
        )
    return {
        "name": found.name, "target": found.target, "threads": 32 * facts.num_warps, "shared": facts.shared,
        "ctas": facts.num_ctas, "pdl": bool(facts.launch_pdl), "cooperative": bool(facts.launch_cooperative_grid),
        "scratch": facts.global_scratch_size, "align": facts.global_scratch_align,
        "cubin": base64.b64encode(made.asm["cubin"]).decode(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
