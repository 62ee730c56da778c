"""The declaration of an entry: its tensors and attributes, and the kernels that it launches."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from .expressions import Expression, Kind, parse
from .launch import Config, Launch

POINTERS = {
    "float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64", "int32": "*i32", "int64": "*i64",
    "bool": "*i1", "int8": "*i8", "uint8": "*u8", "int16": "*i16",
}  # fmt: skip
"""Triton's type of a pointer to each dtype."""
FLOATING = ("float16", "bfloat16", "float32", "float64")
SCALARS: dict[str, Kind] = {"i32": "int", "i64": "int", "fp32": "float", "fp64": "float", "i1": "bool"}
"""The types of arguments that are no pointers, and the kind of their values."""
_DEFAULT_SCALARS = {"int": "i32", "float": "fp32", "bool": "i1"}
MOST_AXES = 8
WORKSPACE = "workspace"
MULTIPROCESSORS = "multiprocessors"
"""The name, in a grid, of the number that the GPU has."""


class DeclarationError(ValueError):
    """A declaration that is wrong, or does not fit its kernel."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of an entry: ``T[*M, N]``."""

    name: str
    type: str
    """A dtype, or the name of a type."""
    leading: str | None
    """The name of any number of leading axes, whose product it is in expressions."""
    axes: tuple[Expression, ...]
    text: str


class Argument(NamedTuple):
    """An argument of a kernel that is no constexpr."""

    parameter: str
    tensor: str | None
    value: Expression | None
    type: str
    """Triton's; of a pointer empty, since it depends on the dtype."""

    @property
    def constant(self) -> int | None:
        """The integer that it always is."""
        text = self.value.text if self.value else ""
        return int(text) if text.isdigit() and self.type in ("i32", "i64") else None

    @property
    def is_passed(self) -> bool:
        """Whether it is a parameter of compiled code: None and 1 are constants of it."""
        return (self.tensor is not None or self.value is not None) and self.constant != 1


@dataclass(frozen=True)
class Variant:
    """What is compiled: a kernel for certain dtypes, in a configuration, with hints."""

    launch: int
    config: int
    hint: int
    types: tuple[tuple[str, str], ...]
    """The dtype of each named type."""


class Entry:
    """An entry ``aot_<name>_cuda``, which launches Triton kernels.

    Args:
        name: of the operator.
        inputs, outputs: tensors in the order of the operator's: ``{"x": "T[*M, N]"}`` is a tensor of the type T with a
            last axis N and any number before it, whose product is M. A type is a dtype, or a name that ``dtypes`` has.
            An axis of an input is a name or a number; of an output an expression.
        launches: what is launched, in this order.
        attrs: attributes and their types: "int", "float" or "bool".
        dtypes: by name of a type, the dtypes that it may be; T is any floating dtype without it.
        sizes: integers by name, expressions of dimensions, attributes, and sizes before it.
        residuals: outputs after these that a caller may leave out, as the operator's residuals. The kernels then write
            to the workspace instead.
        scratch: more tensors, whose memory the workspace is. The operator then states ``workspace=("workspace",)``.
        zeroed: outputs and scratch that are filled with zeros before the launches.
        workspace: whether there is a workspace; without it, whether there is scratch or a residual. Kernels that make
            tensor descriptors need one too.

    Raises:
        DeclarationError: a declaration that is wrong.
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        launches: Sequence[Launch] | Launch,
        attrs: Mapping[str, str] | None = None,
        dtypes: Mapping[str, Sequence[str]] | None = None,
        sizes: Mapping[str, Any] | None = None,
        residuals: Mapping[str, str] | None = None,
        scratch: Mapping[str, str] | None = None,
        zeroed: Sequence[str] = (),
        workspace: bool | None = None,
    ) -> None:
        self.name, self.attrs = name, dict(attrs or {})
        self.dtypes = {each: tuple(chosen) for each, chosen in (dtypes or {"T": FLOATING}).items()}
        self.launches = (launches,) if isinstance(launches, Launch) else tuple(launches)
        self.zeroed = tuple(zeroed)
        self.residuals = tuple(residuals or ())
        self.workspace = bool(scratch or residuals) if workspace is None else workspace
        self._check_names(inputs, outputs, residuals or {}, sizes or {}, scratch or {})
        self.inputs = {slot: self._input(slot, text) for slot, text in inputs.items()}
        self.sizes = self._sizes(sizes or {})
        self.outputs = {slot: self._made(slot, text) for slot, text in {**outputs, **(residuals or {})}.items()}
        self.scratch = {slot: self._made(slot, text) for slot, text in (scratch or {}).items()}
        self.tensors = {**self.inputs, **self.outputs, **self.scratch}
        self._check_types()
        self.calls = [Call(self, i, launch) for i, launch in enumerate(self.launches)]

    def error(self, text: str) -> DeclarationError:
        return DeclarationError(f"{self.name}: {text}")

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """The names that an expression may have, without constexprs."""
        return self._dimensions | self._attributes | dict.fromkeys(self.sizes, "int")

    @property
    def _dimensions(self) -> dict[str, Kind]:
        found: dict[str, Kind] = {}
        for tensor in self.inputs.values():
            found |= dict.fromkeys([tensor.leading] if tensor.leading else [], "int")
            found |= {axis.text: "int" for axis in tensor.axes if axis.text.isidentifier()}
        return found

    @property
    def _attributes(self) -> dict[str, Kind]:
        return dict(self.attrs)  # type: ignore[arg-type]

    @property
    def in_workspace(self) -> dict[str, Tensor]:
        """The tensors in the workspace, in order: a residual is there where a caller leaves it out."""
        return self.scratch | {name: self.outputs[name] for name in self.residuals}

    def used_types(self, tensors: Iterable[str]) -> tuple[str, ...]:
        """The named types of tensors, in the order of ``dtypes``."""
        used = {self.tensors[name].type for name in tensors}
        return tuple(name for name in self.dtypes if name in used)

    # ------------------------------------------------------------------------------------------------------- reading

    def _check_names(self, *groups: Mapping[str, Any]) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise self.error(f"name is {self.name!r}, expected small letters, digits and _")
        names = [name for group in (*groups, self.attrs, self.dtypes) for name in group]
        for name in names:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or name == WORKSPACE:
                raise self.error(f"{name!r} cannot be a name, expected letters, digits and _")
        if twice := {name for name in names if names.count(name) > 1}:
            raise self.error(f"{', '.join(sorted(twice))} is the name of two things, expected different names")
        for attr, kind in self.attrs.items():
            if kind not in ("int", "float", "bool"):
                raise self.error(f"the attribute {attr} has type {kind!r}, expected 'int', 'float' or 'bool'")
        for each, chosen in self.dtypes.items():
            for dtype in chosen:
                if dtype not in POINTERS:
                    raise self.error(f"dtypes of {each} has {dtype!r}, expected some of {', '.join(POINTERS)}")
        if not groups[0] or not groups[1] or not self.launches:
            raise self.error("inputs, outputs and launches are expected, at least one of each")

    def _split(self, slot: str, text: str) -> tuple[str, list[str]]:
        found = re.fullmatch(r"\s*([A-Za-z]\w*)\s*\[(.*)\]\s*", text) if isinstance(text, str) else None
        if not found:
            raise self.error(f"{slot} is {text!r}, expected a type and axes, such as 'T[*M, N]' or 'float32[N]'")
        if found[1] not in self.dtypes and found[1] not in POINTERS:
            raise self.error(f"{slot} has type {found[1]!r}, expected {', '.join((*self.dtypes, *POINTERS))}")
        axes = [axis.strip() for axis in re.split(r",(?![^()]*\))", found[2])] if found[2].strip() else []
        if len(axes) > MOST_AXES or any(axis.startswith("*") for axis in axes[1:]):
            raise self.error(f"{slot} is {text!r}, expected at most {MOST_AXES} axes, and * with the first one alone")
        return found[1], axes

    def _input(self, slot: str, text: str) -> Tensor:
        kind, axes = self._split(slot, text)
        leading = axes.pop(0)[1:].strip() if axes and axes[0].startswith("*") else None
        for axis in (*axes, *([leading] if leading is not None else [])):
            if not re.fullmatch(r"[A-Za-z]\w*|\d+", axis) or axis in self.attrs or axis in self.dtypes:
                raise self.error(f"{slot} is {text!r}, whose axis {axis!r} is expected to be a name or a number")
        return Tensor(slot, kind, leading, tuple(parse(axis, {axis: "int"}) for axis in axes), text)

    def _sizes(self, given: Mapping[str, Any]) -> dict[str, Expression]:
        sizes: dict[str, Expression] = {}
        for name, text in given.items():
            known = self._dimensions | self._attributes | dict.fromkeys(sizes, "int")  # type: ignore[arg-type]
            sizes[name] = self.parsed(f"sizes has {name}", text, known, "int")
        return sizes

    def _made(self, slot: str, text: str) -> Tensor:
        kind, axes = self._split(slot, text)
        leading = axes.pop(0)[1:].strip() if axes and axes[0].startswith("*") else None
        if leading is not None and leading not in {each.leading for each in self.inputs.values()}:
            raise self.error(f"{slot} is {text!r}, and no input has the leading axes *{leading}")
        known = self._dimensions | self._attributes | dict.fromkeys(self.sizes, "int")  # type: ignore[arg-type]
        return Tensor(slot, kind, leading, tuple(self.parsed(slot, axis, known, "int") for axis in axes), text)

    def parsed(self, what: str, text: Any, kinds: Mapping[str, Kind], kind: Kind | None) -> Expression:
        try:
            expression = parse(text, kinds)
        except ValueError as error:
            raise self.error(f"{what}: {error}") from None
        if kind and expression.kind != kind:
            expected = {"int": "an integer", "float": "a number", "bool": "a comparison"}[kind]
            raise self.error(f"{what}: {expression.text!r} is of kind {expression.kind}, expected {expected}")
        return expression

    def _check_types(self) -> None:
        read = {tensor.type for tensor in self.inputs.values()}
        for tensor in (*self.outputs.values(), *self.scratch.values()):
            if tensor.type in self.dtypes and tensor.type not in read:
                raise self.error(f"{tensor.name} has type {tensor.type}, which no input has")
        leading = [(tensor.leading, tensor.name) for tensor in self.inputs.values() if tensor.leading]
        plain = {axis.text: tensor.name for tensor in self.inputs.values() for axis in tensor.axes}
        for name, slot in leading:
            if name in plain:
                raise self.error(f"{name} is an axis of {plain[name]}, and all leading axes of {slot}")
        for name in self._dimensions:
            if name in self.tensors or name in self.sizes:
                raise self.error(f"{name} is an axis, and the name of a tensor or a size: expected different names")
        for name in self.zeroed:
            if name not in self.outputs and name not in self.scratch:
                raise self.error(f"zeroed has {name!r}, expected some of {', '.join((*self.outputs, *self.scratch))}")
        if (self.scratch or self.residuals) and not self.workspace:
            raise self.error("workspace is False, expected True: there is scratch, or a residual")


class Call:
    """A launch, as an entry makes it: its expressions read."""

    def __init__(self, entry: Entry, index: int, launch: Launch) -> None:
        self.entry, self.index, self.launch = entry, index, launch
        file, colon, self.function = launch.kernel.partition(":")
        self.file = file
        if not colon or not self.function.isidentifier() or not file.endswith(".py"):
            raise entry.error(f"kernel is {launch.kernel!r}, expected a file and a function: 'kernel.py:add_kernel'")
        self.arguments = [self._argument(name, value) for name, value in launch.arguments.items()]
        self.configs = launch.configs
        self._check_configs()
        self.conditions = [
            None if config.when is None else entry.parsed(f"when of {config}", config.when, entry.kinds, "bool")
            for config in self.configs
        ]
        self.grids = [self._grid(config) for config in self.configs]
        self.hints: list[dict[str, int]] = []
        for hint in map(self._hint, launch.hints):
            if hint not in self.hints:
                self.hints.append(hint)
        if not self.hints:
            raise self._error("hints is empty, expected {} for calls of which nothing is known")

    @property
    def pointers(self) -> list[str]:
        """The parameters that are addresses."""
        return [each.parameter for each in self.arguments if each.tensor]

    @property
    def integers(self) -> list[str]:
        """The parameters whose value a call decides."""
        return [each.parameter for each in self.arguments if each.type in ("i32", "i64") and each.constant is None]

    @property
    def types(self) -> tuple[str, ...]:
        """The named types that the kernel depends on."""
        return self.entry.used_types([each.tensor for each in self.arguments if each.tensor])

    def combinations(self) -> Iterator[tuple[tuple[str, str], ...]]:
        """The dtypes of the named types that the kernel is compiled for."""
        yield from product(*([(name, dtype) for dtype in self.entry.dtypes[name]] for name in self.types))

    def variants(self, arch: str) -> Iterator[Variant]:
        """What is compiled for a GPU."""
        for types in self.combinations():
            for c in range(len(self.configs)):
                if self.is_for(c, dict(types), arch):
                    yield from (Variant(self.index, c, h, types) for h in range(len(self.hints)))

    def depends_on_multiprocessors(self, config: int) -> bool:
        """Whether a grid does."""
        own = MULTIPROCESSORS in self.entry.kinds or MULTIPROCESSORS in self.configs[config].constexprs
        return not own and any(MULTIPROCESSORS in each.names for each in self.grids[config])

    def is_for(self, config: int, types: Mapping[str, str], arch: str) -> bool:
        """Whether a configuration is for these dtypes on this GPU."""
        one = self.configs[config]
        return (one.archs is None or arch in one.archs) and all(types.get(t) in some for t, some in one.dtypes.items())

    def signature(self, variant: Variant) -> tuple[dict[str, str], dict[str, Any], dict[str, int]]:
        """By parameter: its type, constexprs, and those that are multiples of 16."""
        types, config = dict(variant.types), self.configs[variant.config]
        signature = {each.parameter: self._type(each, types) for each in self.arguments}
        constexprs = dict(config.constexprs)
        for each in self.arguments:
            if not each.is_passed:
                constexprs[each.parameter] = each.constant
        multiples = {each.parameter: 16 for each in self.arguments if each.constant and each.constant % 16 == 0}
        for parameter, value in self.hints[variant.hint].items():
            if value == 1:
                constexprs[parameter] = 1
            else:
                multiples[parameter] = value
        signature |= dict.fromkeys(constexprs, "constexpr")
        return signature, constexprs, multiples

    def compiled_of(self, arch: str) -> str:
        """A text of all that the compiled code depends on, but for the kernel."""
        variants = [(variant, self.signature(variant)) for variant in self.variants(arch)]
        options = [(sorted(config.options.items(), key=str), sorted(config.stated)) for config in self.configs]
        return repr((self.launch.kernel, self.entry.workspace, variants, options))

    def passed(self, variant: Variant) -> list[Argument]:
        """The arguments that are parameters of the compiled kernel."""
        ones = {parameter for parameter, value in self.hints[variant.hint].items() if value == 1}
        return [each for each in self.arguments if each.is_passed and each.parameter not in ones]

    def _type(self, argument: Argument, types: Mapping[str, str]) -> str:
        if argument.tensor is None:
            return argument.type
        kind = self.entry.tensors[argument.tensor].type
        return POINTERS[types.get(kind, kind)]

    # ------------------------------------------------------------------------------------------------------- reading

    def _error(self, text: str) -> DeclarationError:
        return self.entry.error(f"{self.launch.kernel}: {text}")

    def _argument(self, parameter: str, given: Any) -> Argument:
        entry = self.entry
        if given is None:
            return Argument(parameter, None, None, "*i8")
        if given in entry.tensors:
            return Argument(parameter, given, None, "")
        text, colon, kind = str(given).rpartition(":")
        text, kind = (text, kind.strip()) if colon else (given, "")
        value = entry.parsed(f"{self.launch.kernel}: the argument {parameter}", text, entry.kinds, None)
        kind = kind or _DEFAULT_SCALARS[value.kind]
        if kind not in SCALARS or (value.kind, SCALARS[kind]) not in _CONVERTED:
            expected = [name for name, of in SCALARS.items() if (value.kind, of) in _CONVERTED]
            raise self._error(f"the argument {parameter} is {given!r}, expected the type {' or '.join(expected)}")
        return Argument(parameter, None, value, kind)

    def _check_configs(self) -> None:
        if not self.configs or not all(isinstance(config, Config) for config in self.configs):
            raise self._error("configs is empty, expected Config(...)" if not self.configs else "configs has no Config")
        for config in self.configs:
            for name in config.constexprs:
                if name in self.launch.arguments:
                    raise self._error(f"{name} is an argument and a constexpr of {config}")
            for name, chosen in config.dtypes.items():
                if name not in self.types or not set(chosen) <= set(self.entry.dtypes[name]):
                    raise self._error(
                        f"dtypes of {config} has {name} of {', '.join(chosen)}, expected dtypes of the entry and a "
                        f"type of the kernel's tensors"
                    )

    def _grid(self, config: Config) -> tuple[Expression, ...]:
        if not 1 <= len(self.launch.grid) <= 3:
            raise self._error(f"grid has {len(self.launch.grid)} dimensions, expected one to three")
        kinds = {name: _KINDS[type(value)] for name, value in config.constexprs.items() if type(value) in _KINDS}
        what = f"{self.launch.kernel}: grid, of {config}"
        known: dict[str, Kind] = {MULTIPROCESSORS: "int"}
        known |= self.entry.kinds | kinds
        return tuple(self.entry.parsed(what, text, known, "int") for text in self.launch.grid)

    def _hint(self, hint: Mapping[str, int]) -> dict[str, int]:
        groups = {"pointers": self.pointers, "integers": self.integers}
        found: dict[str, int] = {}
        for name, value in hint.items():
            for parameter in groups.get(name, [name]):
                allowed = (16,) if parameter in self.pointers else (16, 1) if parameter in self.integers else ()
                if value not in allowed:
                    raise self._error(
                        f"hints has {name}={value!r}, expected 16 for pointers, 16 or 1 for integers, of "
                        f"{', '.join((*self.pointers, *self.integers))}"
                    )
                found[parameter] = value
        return found


_CONVERTED = {("int", "int"), ("float", "float"), ("int", "float"), ("bool", "bool")}
_KINDS: dict[type, Kind] = {int: "int", float: "float", bool: "bool"}


def load(file: Path) -> list[Entry]:
    """The entries that a file declares.

    Raises:
        DeclarationError: it fails, or has no ``ENTRIES``.
    """
    try:
        found = runpy.run_path(str(file)).get("ENTRIES")
    except DeclarationError as error:
        raise DeclarationError(f"{file.name}: {error}") from None
    except Exception as error:  # whatever the author's file raises
        raise DeclarationError(f"{file.name} fails: {type(error).__name__}: {error}") from error
    entries = [found] if isinstance(found, Entry) else found
    if not isinstance(entries, list | tuple) or not entries or not all(isinstance(each, Entry) for each in entries):
        raise DeclarationError(f"{file.name} has no ENTRIES, expected a list of aotops.triton.Entry")
    names = [each.name for each in entries]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DeclarationError(f"{file.name}: two entries are called {twice[0]}, expected different names")
    return list(entries)
