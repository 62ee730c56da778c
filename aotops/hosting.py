"""Hosting: functions of MindSpore's AOT convention and of tvm-ffi, in libraries that know nothing of this one, as
operators of every frontend. ``load`` loads the library, ``Library.op`` defines the operator."""

from __future__ import annotations

import atexit
import contextlib
import functools
import linecache
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from inspect import Parameter, signature
from keyword import iskeyword
from numbers import Integral
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any
from zlib import crc32

from . import tvm_ffi_functions
from .library import Library, LibraryError
from .op import ATTRIBUTE_TYPES, Op, Rule, check_known, check_no_strings
from .spec import DEVICES, DTYPES, TensorSpec, dtype_name

SOURCES = (".cc", ".cpp", ".cxx", ".cu")
FLAGS = ("-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0")
"""The option that MindSpore compiles a source with: the std::string of its AotExtra is that of the old ABI."""
MOST_TENSORS = 63  # call.py: MOST_SLOTS
_TAKEN = ("aotops", "aten", "prim", "prims", "higher_order", "load_library", "loaded_libraries")
"""Namespaces of operators that a process with torch has already."""
_NOT_OPERATORS = ("name",)
"""Members that torch's namespaces of operators have themselves."""
_NOT_NAMES = ("Ellipsis", "NoneType")
"""Identifiers that are words of torch's schemas."""

_loaded: dict[str, tuple[Library, Any, Any]] = {}
"""By name, the library, and what tells another one: the file and its functions, or objects of tvm-ffi."""


def load(
    path: str | os.PathLike[str] | Any,
    name: str | None = None,
    *,
    flags: Sequence[str] = (),
    include: Sequence[str | os.PathLike[str]] = (),
    arch: str | int | Sequence[str | int] | None = None,
) -> Library:
    """A library of kernels of MindSpore's AOT convention or of tvm-ffi. ``library.op(...)`` then defines its operators.

    Args:
        path: a shared library, or a source (.cc, .cpp, .cxx, .cu), which is compiled first. Or, in place of a file, a
            ``tvm_ffi.Module``, or a dict of ``tvm_ffi.Function`` by name, which are kept for good.
        name: an identifier, torch's namespace for the operators; by default the file's name without "lib" and ".so".
        flags, include, arch: of a source, as ``aotops.compile`` takes them.

    Raises:
        LibraryError: the file is missing, is no shared library, or does not load, such as for an unresolved symbol; or
            it was written to while it was loaded.
        CompileError: the compiler refuses the source.
        TypeError: flags, include or arch is given, and the file is no source; or ``path`` is something else.
        ValueError: the name is no identifier, or that of another file which is loaded already.
    """
    if not isinstance(path, str | os.PathLike):
        if flags or include or arch is not None:
            raise TypeError("aotops.load: flags, include and arch are for a source, and an object is none")
        return _load_objects(path, name)
    file = Path(path).absolute()
    name = name or file.name.partition(".")[0].removeprefix("lib")
    _check_library_name(name)
    if not file.exists():
        raise LibraryError(f"{file} does not exist")
    if file.suffix in SOURCES:
        from .compiler import compile as compile_source

        file = compile_source(file, name=name, flags=(*FLAGS, *flags), include=include, arch=arch)
    elif flags or include or arch is not None:
        raise TypeError(f"aotops.load: flags, include and arch are for a source, and {file.name} is none")
    library = Library(name, (), file)
    known = _loaded.get(name)
    if known and known[1:] == (file, library.functions):
        return known[0]
    if known:
        raise ValueError(
            f"aotops.load: name is {name!r}, the name of {known[1]} as it was when it was loaded: give another, "
            f"load(path, name=...)"
        )
    library.registered  # noqa: B018  in libaotops.so
    _loaded[name] = library, file, library.functions
    return library


def _load_objects(source: Any, name: str | None) -> Library:
    library = tvm_ffi_functions.FunctionLibrary(name or "", source)
    if name is None:
        raise ValueError("aotops.load: name is None, expected an identifier: functions of tvm-ffi have no file's name")
    _check_library_name(name)
    known = _loaded.get(name)
    if known and known[1] is source:
        return known[0]
    if known:
        raise ValueError(f"aotops.load: name is {name!r}, the name of {known[1]}: give another, load(path, name=...)")
    library.registered  # noqa: B018  in libaotops.so
    _loaded[name] = library, source, None
    return library


def _check_library_name(name: str) -> None:
    give = "give another, load(path, name=...)"
    if name in _TAKEN:
        owner = "the built-in operators" if name == "aotops" else "operators of torch"
        raise ValueError(f"aotops.load: name is {name!r}, the name of {owner}: {give}")
    if not _is_name(name) or name.startswith("_"):
        raise ValueError(
            f"aotops.load: name is {name!r}, expected an identifier of ASCII characters, without _ in front: {give}"
        )


def _is_name(name: Any) -> bool:
    """Whether every framework takes it: torch's schemas are ASCII."""
    is_identifier = isinstance(name, str) and name.isascii() and name.isidentifier()
    return is_identifier and not iskeyword(name) and name not in _NOT_NAMES


# ------------------------------------------------------------------------------------------------------- definitions


@dataclass(frozen=True, eq=False)
class Foreign:
    """The function that an operator hosts, and how the specs of its outputs are found."""

    symbols: Mapping[str, str]
    """By device, the function's name."""
    rule: Callable[..., Any] | None = None
    """Takes the inputs' specs, and attributes that its parameters name; returns those of the outputs."""
    shape: Any = None
    dtype: Any = None
    """MindSpore's out_shape and out_dtype: constants, or functions of the inputs' shapes and dtypes."""
    order: tuple[str | None, ...] = ()
    """The names of the function's arguments, where it is one of tvm-ffi; None is passed as such."""

    def in_library(self, op: Op) -> bool:
        """Whether the library infers, at least a part."""
        rest = any(y not in op.same_spec_as for y in op.outputs)
        return rest and self.rule is None and (self.shape is None or self.dtype is None)

    def by_shapes_alone(self, op: Op) -> bool:
        """Whether the C side can find the outputs' shapes, without Python."""
        return all(y in op.same_spec_as for y in op.outputs) or (self.rule is None and self.shape is None)

    def specs(
        self,
        op: Op,
        attrs: Sequence[Any],
        specs: Sequence[TensorSpec | None],
        from_library: Callable[[], Sequence[TensorSpec]],
    ) -> tuple[TensorSpec, ...]:
        """One for each output. Dimensions may be symbolic.

        Raises:
            TypeError: the rule returned something that is no spec.
        """
        inputs = dict(zip(op.inputs, specs, strict=True))
        if all(y in op.same_spec_as for y in op.outputs):
            return tuple(inputs[op.same_spec_as[y]] for y in op.outputs)  # type: ignore[misc]
        if self.rule is not None:
            found = self._by_rule(op, attrs, specs)
        else:
            inferred = from_library() if self.in_library(op) else ()
            found = self._by_parts(op, specs, inferred)
        return tuple(
            inputs[op.same_spec_as[y]] if y in op.same_spec_as else _checked(op, y, spec)  # type: ignore[misc]
            for y, spec in zip(op.outputs, found, strict=True)
        )

    def _by_rule(self, op: Op, attrs: Sequence[Any], specs: Sequence[TensorSpec | None]) -> Sequence[Any]:
        assert self.rule is not None
        found = self.rule(*specs, **_wanted(self.rule, dict(zip(op.attrs, attrs, strict=True))))
        return _each(op, "infer", [found] if isinstance(found, TensorSpec) else found)

    def _by_parts(self, op: Op, specs: Sequence[Any], inferred: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        shapes: Sequence[Any] = [spec.shape for spec in inferred[: len(op.outputs)]]
        dtypes: Sequence[Any] = [spec.dtype for spec in inferred[: len(op.outputs)]]
        if self.shape is not None:
            shape = self.shape(*(spec.shape for spec in specs)) if callable(self.shape) else self.shape
            one = len(op.outputs) == 1 and not (shape and isinstance(shape[0], tuple | list))
            shapes = _each(op, "out_shape", [shape] if one else shape)
        if self.dtype is not None:
            # a dtype of NumPy or MindSpore may be a class, which is callable
            is_rule = callable(self.dtype) and not isinstance(self.dtype, type) and dtype_name(self.dtype) not in DTYPES
            dtype = self.dtype(*(spec.dtype for spec in specs)) if is_rule else self.dtype
            dtypes = _each(op, "out_dtype", dtype if isinstance(dtype, tuple | list) else [dtype] * len(op.outputs))
        return [TensorSpec(shape, dtype_name(d)) for shape, d in zip(shapes, dtypes, strict=True)]


def define(
    library: Library,
    name: str,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attrs: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    infer: Callable[..., Any] | None = None,
    out_shape: Any = None,
    out_dtype: Any = None,
    same_spec_as: Mapping[str, str] | None = None,
    backward: Op | str | Callable[..., Any] | None = None,
    mutates: Sequence[str] = (),
    order: Sequence[str | None] | None = None,
    workspace: bool | None = None,
    device: str | None = None,
    cpu: str | None = None,
    cuda: str | None = None,
    vmappable: Iterable[str] = (),
    doc: str | None = None,
) -> Op:
    """Defines an operator of a library, which every frontend then has: ``aotops.frontends.torch.of(library)``.

    A library made with aotops' own aot.h, which exports ``aot_<name>_cpuInfer``, is called as a built-in one. Any other
    function is hosted: with an ``order`` it is one of tvm-ffi, ``__tvm_ffi_<name>``, else one of MindSpore's
    convention. How the specs of the outputs are found: by ``same_spec_as``, ``infer``, ``out_shape`` and ``out_dtype``,
    or else by the library's ``<symbol>InferShape`` and ``<symbol>InferType``.

    Args:
        name: the operator's; also the function's, except where ``cpu`` or ``cuda`` name it.
        inputs, outputs: the names of the tensors, in the function's order.
        attrs: attributes and their types: "bool", "int", "float", "str", "int[]", "float[]", "int[][]", "float[][]".
        defaults: values for the last attributes.
        infer: a function of the inputs' TensorSpecs, and of attributes that it takes as keywords, which returns the
            outputs' TensorSpec, or a tuple of them.
        out_shape, out_dtype: as ``mindspore.ops.Custom`` takes them; a dtype may be a string.
        same_spec_as: outputs with the spec of an input. Such calls are the fastest.
        backward: an operator of this library, or its name: it takes ``d<output>`` and what else it names of inputs and
            outputs, and gives ``d<input>``. Or a function of a namespace of the library's operators and of such names,
            which returns a gradient, or None, for each input.
        mutates: inputs that the function writes to.
        order: of a function of tvm-ffi, the names of all inputs, outputs and attributes in the order of its arguments;
            None for an argument that is None.
        workspace: whether Init may ask for a workspace; by default, whether there is an Init.
        device: "cpu" or "cuda": where the function runs. By default the function ``<name>_cpu``, ``<name>_cuda`` or
            ``aot_<name>_<device>`` is for that device; one called ``name`` is for CUDA where the library has device
            code, else for the CPU.
        cpu, cuda: the name of the function for the device.
        vmappable: inputs and outputs that may have another leading axis, over which results are independent.

    Raises:
        LibraryError: the library exports no such function.
        TypeError, ValueError: a definition that is not one.
    """
    check_no_strings(name, {"inputs": inputs, "outputs": outputs, "mutates": mutates, "vmappable": vmappable})
    slots: dict[str, Any] = {"inputs": tuple(inputs), "outputs": tuple(outputs), "mutates": tuple(mutates)}
    like, defaults = dict(same_spec_as or {}), dict(defaults or {})
    op = Op(name, _unbound, **slots, attrs=dict(attrs or {}), same_spec_as=like, vmappable=frozenset(vmappable))
    _check_names(op, defaults)
    op = replace(op, bind=_bind(op, defaults, doc), **_gradient(library, op, backward))
    if order is not None:
        tvm_ffi_functions.check_order(op, order)
    elif library.address(f"aot_{name}_cpuInfer") or library.address(f"aot_{name}_cudaInfer"):
        if infer or out_shape or out_dtype or device or cpu or cuda:
            raise TypeError(f"{name}: {library.path} infers for itself, and has its own entries")
        return _added(library, op)
    if order is None and (taken := tvm_ffi_functions.symbol_in(library, cpu or cuda or name)):
        expected = ", ".join((*op.inputs, *op.outputs, *op.attrs))
        raise TypeError(
            f"{name}: {taken} is a function of tvm-ffi, and order is missing, expected {expected} in the order of its "
            f"arguments: order=(...)"
        )
    symbols = _symbols(library, name, device, {"cpu": cpu, "cuda": cuda}, is_tvm_ffi=order is not None)
    has_init = order is None and any(library.address(f"{symbol}Init") for symbol in symbols.values())
    if workspace and order is not None:
        raise TypeError(f"{name}: workspace is {workspace}, expected None: a function of tvm-ffi asks for none")
    if workspace is None:
        # MindSpore's operators have an output: without another one, the workspace
        workspace = not op.outputs or has_init
    if infer is not None and (out_shape is not None or out_dtype is not None):
        raise TypeError(f"{name}: infer and out_shape or out_dtype are given, expected one rule")
    if not set(op.outputs) <= set(like) and infer is None:
        for rule, companion in ((out_shape, "InferShape"), (out_dtype, "InferType")):
            if rule is None and not all(library.address(f"{symbol}{companion}") for symbol in symbols.values()):
                raise TypeError(
                    f"{name}: {library.path} has no {next(iter(symbols.values()))}{companion}: tell the outputs' specs "
                    f"by infer=, same_spec_as=, or out_shape= and out_dtype="
                )
    foreign = Foreign(symbols, infer, out_shape, out_dtype, tuple(order or ()))
    op = replace(op, foreign=foreign, workspace=("workspace",) if workspace else ())
    if len(op.slots) > MOST_TENSORS:
        raise NotImplementedError(f"{name} has {len(op.slots)} tensors, expected at most {MOST_TENSORS}")
    return _added(library, op)


def _added(library: Library, op: Op) -> Op:
    if op.name in library.ops:
        raise ValueError(f"{op.name}: the library {library.name} has an operator of this name already")
    library.ops[op.name] = bound = op.bound_to(library)
    if library.defined is not None:
        library.defined(bound)
    return bound


def _unbound(*args: Any) -> Any:
    """Until the names are known to be valid."""
    raise NotImplementedError


def _check_names(op: Op, defaults: Mapping[str, Any]) -> None:
    name, inputs, outputs, attrs = op.name, op.inputs, op.outputs, op.attrs
    every = (*inputs, *outputs, *attrs)
    for each in (name, *every):
        if not _is_name(each):
            raise ValueError(f"{name}: {each!r} is no identifier of ASCII characters, or a word of Python's or torch's")
    if name in _NOT_OPERATORS or name.startswith("__"):
        raise ValueError(f"{name}: an operator of this name cannot be called in torch: give another, and cpu= or cuda=")
    if len(set(every)) < len(every) or "workspace" in every:
        raise ValueError(f"{name}: inputs, outputs and attributes are {', '.join(every)}, expected different names")
    if not inputs:
        raise ValueError(f"{name}: there is no input, whose device the call would be made on")
    if not outputs and not op.mutates:
        raise ValueError(f"{name}: there is no output, and no input that it writes to (mutates=)")
    for attr, kind in attrs.items():
        if kind not in ATTRIBUTE_TYPES:
            raise ValueError(f"{name}: the type of {attr} is {kind!r}, expected one of {', '.join(ATTRIBUTE_TYPES)}")
    check_known(name, "defaults", defaults, attrs)
    if list(defaults) and set(list(attrs)[-len(defaults) :]) != set(defaults):
        raise ValueError(f"{name}: defaults are for {', '.join(defaults)}, expected the last of {', '.join(attrs)}")
    check_known(name, "same_spec_as", op.same_spec_as, outputs)
    check_known(name, "same_spec_as", op.same_spec_as.values(), inputs)
    check_known(name, "mutates", op.mutates, inputs)


def _symbols(
    library: Library, name: str, device: str | None, named: Mapping[str, str | None], is_tvm_ffi: bool = False
) -> dict[str, str]:
    is_object = isinstance(library, tvm_ffi_functions.FunctionLibrary)
    prefix = tvm_ffi_functions.PREFIX if is_tvm_ffi and not is_object else ""
    given = {where: symbol for where, symbol in named.items() if symbol}
    if device is not None:
        if device not in DEVICES:
            raise ValueError(f"{name}: device is {device!r}, expected cpu or cuda")
        given.setdefault(device, name)
    if not given:
        pairs = [(where, symbol) for where in DEVICES for symbol in (f"{name}_{where}", f"aot_{name}_{where}")]
        given = {where: symbol for where, symbol in pairs if library.address(prefix + symbol)}
    if not given and is_object:
        raise TypeError(
            f"{name}: device is None, expected cpu or cuda, where the function runs: an object tells neither"
        )
    given = given or {"cuda" if library.contents.has_cuda else "cpu": name}
    given = {where: prefix + symbol for where, symbol in given.items()}
    for symbol in given.values():
        if library.address(symbol) is None:
            close = get_close_matches(symbol, library.exported, 3, 0.5)
            hint = f"; did you mean {' or '.join(close)}?" if close else "" if prefix else ' (is it extern "C"?)'
            raise LibraryError(f"{library.path} exports no {symbol}{hint}")
    return given


def _gradient(library: Library, op: Op, backward: Op | str | Callable[..., Any] | None) -> dict[str, Any]:
    if backward is None:
        return {}
    name, attrs = op.name, op.attrs
    if op.mutates:
        raise NotImplementedError(f"{name}: an operator that writes to {', '.join(op.mutates)} has no gradient")
    forward = (*op.inputs, *op.outputs, *(f"d{y}" for y in op.outputs))
    if isinstance(backward, str):
        if backward not in library.ops:
            raise ValueError(f"{name}: backward is {backward!r}, expected an operator defined before: library.op(...)")
        backward = library.ops[backward]
    if not isinstance(backward, Op):
        if not callable(backward):
            raise TypeError(f"{name}: backward is {backward!r}, expected a function, an operator or its name")
        functions, *parameters = signature(backward).parameters or ("",)
        if functions in (*forward, *attrs, ""):
            raise TypeError(f"{name}: backward's first parameter is {functions!r}, expected F, the library's functions")
        check_known(name, "backward", parameters, (*forward, *attrs))
        return {"rule": Rule(backward, tuple(parameters))}
    check_known(name, f"backward {backward.name}", backward.inputs, forward)
    check_known(name, f"backward {backward.name}", backward.outputs, [f"d{x}" for x in op.inputs])
    check_known(name, f"backward {backward.name}", backward.attrs, attrs)
    if list(backward.attrs) == list(attrs):
        return {"backward": backward}
    if backward.foreign is None:
        raise ValueError(f"{name}: {backward.name} has the attributes {', '.join(backward.attrs)}, expected {attrs}")
    # the frontends give it all of the forward's, of which the function reads what it wants
    return {"backward": replace(backward, name=f"{name}_backward", attrs=attrs)}


def _bind(op: Op, defaults: Mapping[str, Any], doc: str | None) -> Callable[..., Any]:
    """A function that has a source, which MindSpore's graph mode compiles."""
    values = {attr: op._attr(attr, op.attrs[attr], value) for attr, value in defaults.items()}  # checks the types
    parameters = [*op.inputs, *(f"{attr}={values[attr]!r}" if attr in values else attr for attr in op.attrs)]
    taken, said = "".join(f"{x}, " for x in op.inputs), "".join(f"{a}, " for a in op.attrs)
    function = written_out(op.name, f"({', '.join(parameters)})", f"return ({taken}), ({said})")
    function.__doc__ = doc or f"The hosted operator {op.name}."
    return function


def written_out(name: str, parameters: str, body: str, **names: Any) -> Callable[..., Any]:
    """A function that has a source: MindSpore's graph mode compiles it."""
    source = f"def make({', '.join(names)}):\n    def {name}{parameters}:\n        {body}\n    return {name}\n"
    entry = len(source), None, source.splitlines(keepends=True)
    file = f"{_sources()}/{name}_{crc32(source.encode()):x}.py"
    while linecache.cache.get(file, entry)[:3] != entry:  # another source of the same checksum
        file += "_"
    if file not in linecache.cache:
        linecache.cache[file] = *entry, file
        with contextlib.suppress(OSError):
            Path(file).write_text(source)
    scope: dict[str, Any] = {"__name__": __name__, "inf": float("inf"), "nan": float("nan")}
    exec(compile(source, file, "exec"), scope)
    return scope["make"](**names)


@functools.cache
def _sources() -> str:
    """A folder for the sources of this process. Python has them in linecache, but MindSpore opens the file of a line to
    print it, and prints an error for each file that is not there."""
    try:
        folder = tempfile.mkdtemp(prefix="aotops-")
    except OSError:
        return "<aotops>"
    process = os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # not a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


# ---------------------------------------------------------------------------------------------------------- namespaces


class Namespace(ModuleType):
    """The functions of a library's operators in one framework, each made when it is first asked for: operators may be
    defined later.

    Args:
        make: takes an operator and this module's name; returns its functions by name.
        at_once: each is made when it is defined, for MindSpore's graph mode, which reads ``vars`` of a module.
    """

    def __init__(
        self, library: Library, framework: str, make: Callable[[Op, str], Mapping[str, Any]], at_once: bool = False
    ) -> None:
        name = f"aotops_{framework}_of_{library.name}"
        super().__init__(name, f"The operators of the library {library.name} for {framework}.")
        self.__dict__.update(_library=library, _make=make, _lock=RLock())
        sys.modules[name] = self  # where pickle and MindSpore look for it
        if at_once:
            library.defined = lambda op: self.__dict__.update(make(op, name))
            for op in library.ops.values():
                library.defined(op)

    def __getattr__(self, name: str) -> Any:
        library: Library = self.__dict__["_library"]
        op = library.ops.get(name) or library.ops.get(name.removesuffix("_backward"))
        with self.__dict__["_lock"]:  # an operator is registered once, by whichever thread asks first
            if op and name not in self.__dict__:
                self.__dict__.update(self.__dict__["_make"](op, self.__name__))
        if name not in self.__dict__:
            known = ", ".join(library.ops) or "none"
            raise AttributeError(f"the library {library.name} has no operator {name!r}; there are {known}")
        return self.__dict__[name]

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__["_library"].ops)


NUMBERS = {bool: "bool", int: "int64", float: "float32"}
"""The dtypes of a hosted operator's inputs that are given as Python's numbers, which become tensors without axes: those
of MindSpore."""


# ------------------------------------------------------------------------------------------------------- rules' results


def _wanted(function: Callable[..., Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    parameters = signature(function).parameters.values()
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        return dict(attrs)
    return {p.name: attrs[p.name] for p in parameters if p.name in attrs}


def _each(op: Op, rule: str, found: Any) -> Sequence[Any]:
    """One for each output."""
    if not isinstance(found, tuple | list) or len(found) != len(op.outputs):
        expected = "one" if len(op.outputs) == 1 else f"a tuple of {len(op.outputs)}"
        raise TypeError(f"{op.name}: {rule} returned {found!r:.80}, expected {expected}, for {', '.join(op.outputs)}")
    return found


def _checked(op: Op, slot: str, spec: Any) -> TensorSpec:
    if not isinstance(spec, TensorSpec):
        raise TypeError(f"{op.name}: the rule gives {spec!r:.80} for {slot}, expected an aotops.TensorSpec")
    shape, dtype = spec
    if not isinstance(shape, tuple | list) or any(
        isinstance(d, bool | float | str | tuple | list | type(None)) for d in shape
    ):
        raise TypeError(f"{op.name}: the rule gives {slot} the shape {shape!r:.80}, expected a tuple of integers")
    if any(isinstance(d, Integral) and d < -2 for d in shape):
        raise ValueError(f"{op.name}: the rule gives {slot} the shape {shape!r:.80}, expected no dimension below 0")
    if dtype not in DTYPES:
        raise TypeError(
            f"{op.name}: the rule gives {slot} the dtype {dtype!r:.40}, expected one of {', '.join(DTYPES)}"
        )
    return TensorSpec(tuple(int(d) if isinstance(d, Integral) else d for d in shape), dtype)
