"""The C++ of an entry: its operator in the calling convention, the plan of its launches, and the embedded code."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .declaration import MULTIPROCESSORS, Argument, Call, Entry, Tensor, Variant
from .expressions import Expression

_CPP = {"int": "int64_t", "float": "double", "bool": "bool"}
_SCALARS = {"i32": "int32_t", "i64": "int64_t", "fp32": "float", "fp64": "double", "i1": "int8_t"}
_LIMITS = {"launches": 8, "zeroed": 8, "arguments": 96}
"""The limits of triton.h."""


@dataclass(frozen=True)
class Made:
    """A variant as the worker compiled it for a GPU."""

    arch: str
    facts: Mapping[str, Any]
    code: bytes

    @property
    def variant(self) -> Variant:
        facts = self.facts
        return Variant(facts["launch"], facts["config"], facts["hint"], tuple(facts["types"].items()))


def read(arch: str, text: str) -> list[Made]:
    """The variants that the worker wrote."""
    return [Made(arch, facts, base64.b64decode(facts.pop("cubin"))) for facts in json.loads(text)]


def header(entry: Entry) -> str:
    """``<name>.h``: attributes and shape inference, for a CPU entry of the author's too."""
    return _Header(entry).text()


def sources(entry: Entry, made: Sequence[Made], archs: Sequence[str]) -> tuple[str, str]:
    """``<name>.cpp`` with the entry, and ``<name>.S`` with the code."""
    for what, most in _LIMITS.items():
        most_of = {
            "launches": len(entry.launches), "zeroed": len(entry.zeroed),
            "arguments": max(len(call.arguments) for call in entry.calls),
        }  # fmt: skip
        if most_of[what] > most:
            raise entry.error(f"it has {most_of[what]} {what}, expected at most {most}")
    return _Source(entry, made, archs).text()


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _text(value: str) -> str:
    return json.dumps(value)


class _Names:
    """The C++ of the names of an entry's expressions. ``s`` are the sizes, ``op`` the operator."""

    def __init__(self, entry: Entry, op: str) -> None:
        self.entry = entry
        self.of = {name: f"s.d_{name}" for name in entry.kinds}
        self.of |= {name: f"{op}a_{name}" for name in entry.attrs}

    def cpp(self, expression: Expression, constants: Mapping[str, str] | None = None) -> str:
        return expression.cpp(self.of | dict(constants or {}))

    def unknown(self, expressions: Iterable[Expression]) -> str:
        """Whether a size that they have is not known."""
        names = sorted({name for each in expressions for name in each.names} - set(self.entry.attrs))
        known = [f"{self.of[name]} < 0" for name in names if name in self.of]
        return " || ".join(known) or "false"


# -------------------------------------------------------------------------------------------------------- the operator


class _Header:
    def __init__(self, entry: Entry) -> None:
        self.entry, self.names = entry, _Names(entry, "")

    def text(self) -> str:
        entry = self.entry
        lines = [
            f"// Made by `aotops build` from the declaration of {entry.name}.",
            "#pragma once",
            '#include "triton.h"',
            "",
            "namespace aot {",
            "inline namespace AOT_ISA {",
            "",
            f"struct {_camel(entry.name)} {{",
            f"  static constexpr const char *name = {_text(entry.name)};",
            f"  static constexpr Slot inputs[] = {{{', '.join(map(self._slot, entry.inputs.values()))}}};",
            f"  static constexpr Slot outputs[] = {{{', '.join(self._outputs())}}};",
            *(f"  static constexpr DType {_types(t)}[] = {{{_dtypes(some)}}};" for t, some in self._types().items()),
            *(f"  {_CPP[kind]} a_{name} = 0;" for name, kind in entry.attrs.items()),
            "",
            *self._sizes(),
            "",
            "  Status init([[maybe_unused]] const Attrs &attrs) {",
            *(f"    AOT_TRY(attrs.get({_text(name)}, &a_{name}));" for name in entry.attrs),
            "    return kOk;",
            "  }",
            "",
            *self._bind(),
            "",
            *self._infer(),
            *self._workspace(),
            "};",
            "",
            "}  // namespace AOT_ISA",
            "}  // namespace aot",
            "",
        ]
        return "\n".join(lines)

    def _types(self) -> dict[str, tuple[str, ...]]:
        """The named types, and the dtypes of inputs that have one."""
        fixed = {t.type: (t.type,) for t in self.entry.inputs.values() if t.type not in self.entry.dtypes}
        return {**self.entry.dtypes, **fixed}

    def _slot(self, tensor: Tensor) -> str:
        some = self.entry.dtypes.get(tensor.type, (tensor.type,))
        said = some[0] if len(some) == 1 else f"{', '.join(some[:-1])} or {some[-1]}"
        kind = "optional" if tensor.name in self.entry.residuals else "required"
        return f"{{{_text(tensor.name)}, {kind}, {_text(said)}}}"

    def _outputs(self) -> list[str]:
        slots = [self._slot(tensor) for tensor in self.entry.outputs.values()]
        return [*slots, *(['{"workspace", workspace}'] if self.entry.workspace else [])]

    def _sizes(self) -> Iterator[str]:
        entry = self.entry
        yield "  // The dtypes and sizes of a call; -1 where one is not known."
        yield "  struct Sizes {"
        for name in entry.dtypes:
            yield f"    DType t_{name} = DType::unknown;"
        for leading in sorted({t.leading for t in entry.inputs.values() if t.leading}):
            yield f"    triton::Axes all_{leading};"
        for name in entry.kinds:
            if name not in entry.attrs:
                yield f"    int64_t d_{name} = -1;"
        yield "  };"

    def _bind(self) -> Iterator[str]:
        entry = self.entry
        yield "  Status bind(const Tensor *in, Sizes *sizes) const {"
        yield "    Sizes &s = *sizes;"
        fixed = sorted({t.type for t in entry.inputs.values() if t.type not in entry.dtypes})
        for dtype in fixed:
            yield f"    DType t_{dtype} = DType::unknown;"
        for i, tensor in enumerate(entry.inputs.values()):
            bound = f"{'s.' if tensor.type in entry.dtypes else ''}t_{tensor.type}"
            types = _types(tensor.type)
            yield f"    AOT_TRY(triton::match_type(name, inputs[{i}], in[{i}], {types}, std::size({types}), &{bound}));"
            leading = f"&s.all_{tensor.leading}, {_text(tensor.leading)}" if tensor.leading else "nullptr, nullptr"
            shape = _text("[" + ", ".join([*([f"*{tensor.leading}"] if tensor.leading else []),
                                           *(axis.text for axis in tensor.axes)]) + "]")  # fmt: skip
            axes = ", ".join(map(_axis, tensor.axes))
            what = f"{_text(tensor.name)}, in[{i}], {shape}, {leading}"
            yield f"    AOT_TRY(triton::match_shape(name, {what}, {{{axes}}}));"
        for leading in sorted({t.leading for t in entry.inputs.values() if t.leading}):
            yield f"    s.d_{leading} = s.all_{leading}.product();"
        if entry.sizes:
            yield "    triton::Arithmetic m;"
        for name, expression in entry.sizes.items():
            yield f"    if (!({self.names.unknown([expression])})) {{"
            yield f"      s.d_{name} = {self.names.cpp(expression)};"
            yield f"      AOT_TRY(triton::check_computed(name, {_text(f'the size {name}')}, m));"
            yield f"      AOT_TRY(triton::check_dimension(name, {_text(f'the size {name}')}, s.d_{name}));"
            yield "    }"
        yield "    return kOk;"
        yield "  }"

    def _infer(self) -> Iterator[str]:
        entry = self.entry
        yield "  Status infer(const Tensor *in, Spec *out) const {"
        yield "    Sizes s;"
        yield "    AOT_TRY(bind(in, &s));"
        if any(tensor.axes for tensor in entry.outputs.values()):
            yield "    [[maybe_unused]] triton::Arithmetic m;"
        for i, tensor in enumerate(entry.outputs.values()):
            dims = []
            for k, axis in enumerate(tensor.axes):
                yield f"    const int64_t d{i}_{k} = {self.names.unknown([axis])} ? -1 : {self.names.cpp(axis)};"
                yield f"    AOT_TRY(triton::check_computed(name, {_text(f'the shape of {tensor.name}')}, m));"
                if not axis.text.isidentifier():
                    what = _text(f"axis {axis.text} of {tensor.name}")
                    yield f"    if (!({self.names.unknown([axis])}))"
                    yield f"      AOT_TRY(triton::check_dimension(name, {what}, d{i}_{k}));"
                dims.append(f"d{i}_{k}")
            leading = f"&s.all_{tensor.leading}" if tensor.leading else "nullptr"
            dtype = f"s.t_{tensor.type}" if tensor.type in entry.dtypes else _dtype(tensor.type)
            yield f"    out[{i}] = triton::made_spec({dtype}, {leading}, {{{', '.join(dims)}}});"
            yield f"    AOT_TRY(check_size(name, {_text(tensor.name)}, out[{i}]));"
        if entry.workspace:
            yield "    int64_t bytes = 0;"
            yield "    AOT_TRY(workspace_bytes(s, &bytes));"
            yield f"    out[{len(entry.outputs)}] = triton::workspace_spec(bytes);"
        yield "    return kOk;"
        yield "  }"

    def _workspace(self) -> Iterator[str]:
        if self.entry.workspace:
            yield ""
            yield "  // The bytes of scratch, -1 where a size is not known; in <name>.cpp, which knows the kernels."
            yield "  Status workspace_bytes(const Sizes &s, int64_t *bytes) const;"


def _types(name: str) -> str:
    return f"k_{name}"


def _dtype(name: str) -> str:
    return f"DType::{'boolean' if name == 'bool' else name}"


def _dtypes(names: Iterable[str]) -> str:
    return ", ".join(map(_dtype, names))


def _axis(axis: Expression) -> str:
    if axis.text.isidentifier():
        return f"{{{_text(axis.text)}, &s.d_{axis.text}, 0}}"
    return f"{{nullptr, nullptr, {axis.text}}}"


# ------------------------------------------------------------------------------------------------------------ the entry


class _Source:
    def __init__(self, entry: Entry, made: Sequence[Made], archs: Sequence[str]) -> None:
        self.entry, self.made, self.archs = entry, made, archs
        self.names = _Names(entry, "op.")
        self.op = _camel(entry.name)
        self.variants = list(dict.fromkeys(each.variant for each in made))
        self.index = {variant: i for i, variant in enumerate(self.variants)}
        self.codes = {code: i for i, code in enumerate(dict.fromkeys(each.code for each in made))}

    def text(self) -> tuple[str, str]:
        name = self.entry.name
        lines = [
            f"// Made by `aotops build` from the declaration of {name}.",
            f'#include "{name}.h"',
            "",
            *(f'extern "C" __attribute__((visibility("hidden"))) const unsigned char {self._symbol(i)}[];'
              for i in self.codes.values()),
            "",
            "namespace aot {",
            "inline namespace AOT_ISA {",
            "namespace {",
            "",
            *self._program(),
            "",
            *(line for call in self.entry.calls for line in (*self._config(call), "", *self._grid(call), "")),
            *self._scratch(),
            *(line for call in self.entry.calls for line in (*self._launch(call), "")),
            *self._plan(),
            "}  // namespace",
            "",
            *self._workspace_bytes(),
            "}  // namespace AOT_ISA",
            "}  // namespace aot",
            "",
            f"AOT_TRITON_ENTRY(aot::OnCuda, aot_{name}_cuda, aot::plan, aot::kProgram, aot::loaded)",
            "",
        ]  # fmt: skip
        return "\n".join(lines), "\n".join(self._assembly())

    def _symbol(self, code: int) -> str:
        return f"aot_triton_{self.entry.name}_{code}"

    def _assembly(self) -> Iterator[str]:
        yield '\t.section .rodata, "a"'
        for code, i in self.codes.items():
            yield f"\t.balign 64\n\t.globl {self._symbol(i)}\n\t.hidden {self._symbol(i)}\n{self._symbol(i)}:"
            padded = code + bytes(-len(code) % 8)
            words = [f"0x{int.from_bytes(padded[at : at + 8], 'little'):x}" for at in range(0, len(padded), 8)]
            for at in range(0, len(words), 8):
                yield "\t.quad " + ",".join(words[at : at + 8])
        yield '\t.section .note.GNU-stack, "", @progbits\n'

    def _program(self) -> Iterator[str]:
        found = {(each.arch, each.variant): each for each in self.made}
        targets = {each.arch: each.facts["target"] for each in self.made}
        archs = [arch for arch in self.archs if arch in targets]
        exact = {arch: "true" if targets[arch][-1] in "af" else "false" for arch in archs}
        yield "constexpr triton::Arch kArchs[] = {"
        yield from (f"    {{{_text(targets[arch])}, {arch}, {exact[arch]}}}," for arch in archs)
        yield "};"
        yield "const triton::Kernel kKernels[] = {"
        for arch in archs:
            for variant in self.variants:
                each = found.get((arch, variant))
                yield f"    {self._kernel(each)},"
        yield "};"
        count = len(self.variants)
        yield (
            f"const triton::Program kProgram = {{{_text(self.entry.name)}, kArchs, {len(archs)}, kKernels, {count}}};"
        )
        yield f"triton::Loaded<{len(self.codes)}> loaded{{kProgram}};"
        yield ""
        yield "// Its Init loads the code."
        yield f"struct OnCuda : {self.op} {{"
        yield "  Status init(const Attrs &attrs) {"
        yield f"    AOT_TRY({self.op}::init(attrs));"
        yield "    loaded.preload();"
        yield "    return kOk;"
        yield "  }"
        yield "};"

    def _kernel(self, made: Made | None) -> str:
        if made is None:
            return '{nullptr, 0, "", 0, 0, 0, false, false}'
        facts, code = made.facts, self.codes[made.code]
        flags = ", ".join(str(bool(facts[name])).lower() for name in ("pdl", "cooperative"))
        return (
            f"{{{self._symbol(code)}, {code}, {_text(facts['name'])}, {facts['threads']}, {facts['shared']}, "
            f"{facts['ctas']}, {flags}}}"
        )

    # -------------------------------------------------------------------------------------------------- configurations

    def _parameters(self) -> str:
        return f"[[maybe_unused]] const {self.op} &op, [[maybe_unused]] const {self.op}::Sizes &s"

    def _condition(self, call: Call, config: int) -> str:
        """Without the GPU."""
        condition, chosen = call.conditions[config], call.configs[config].dtypes
        parts = [self.names.cpp(condition)] if condition else []
        parts += ["(" + " || ".join(f"s.t_{t} == {_dtype(d)}" for d in some) + ")" for t, some in chosen.items()]
        return " && ".join(parts) or "true"

    def _config(self, call: Call) -> Iterator[str]:
        yield f"// The configuration of {call.launch.kernel}; -1: there is none."
        yield f"int config_{call.index}({self._parameters()}, [[maybe_unused]] int arch,"
        yield "             [[maybe_unused]] triton::Arithmetic &m) {"
        for c, config in enumerate(call.configs):
            condition = self._condition(call, c)
            if config.archs is not None:
                condition = f"({' || '.join(f'arch == {arch}' for arch in config.archs)}) && {condition}"
            yield f"  if ({condition}) return {c};"
            if condition == "true":
                yield "}"
                return
        yield "  return -1;"
        yield "}"

    def _grid(self, call: Call) -> Iterator[str]:
        yield f"void grid_{call.index}({self._parameters()}, int config, [[maybe_unused]] int64_t multiprocessors,"
        yield "            int64_t *grid, [[maybe_unused]] triton::Arithmetic &m) {"
        yield "  grid[0] = grid[1] = grid[2] = 1;"
        yield "  switch (config) {"
        for c, grid in enumerate(call.grids):
            constants = {} if MULTIPROCESSORS in self.entry.kinds else {MULTIPROCESSORS: MULTIPROCESSORS}
            constexprs = call.configs[c].constexprs.items()
            constants |= {k: _constant(v) for k, v in constexprs if isinstance(v, int | float)}
            yield f"    case {c}:"
            yield from (f"      grid[{i}] = {self.names.cpp(each, constants)};" for i, each in enumerate(grid))
            yield "      break;"
        yield "  }"
        yield "}"

    # --------------------------------------------------------------------------------------------------------- scratch

    def _own_scratch(self, call: Call) -> dict[int, tuple[int, int]]:
        """By configuration, the bytes of scratch that a block of a kernel needs, at most, and its CTAs."""
        needs: dict[int, tuple[int, int]] = {}
        for each in self.made:
            if each.variant.launch == call.index and each.facts["scratch"]:
                align = max(each.facts["align"], 1)
                size = -(-each.facts["scratch"] // align) * align
                needs[each.variant.config] = max(needs.get(each.variant.config, (0, 1)), (size, each.facts["ctas"]))
        return needs

    def _scratch(self) -> Iterator[str]:
        """Where each part of the workspace begins."""
        entry = self.entry
        if not entry.workspace:
            return
        if entry.residuals:
            yield "// Of a residual, or of the memory in the workspace for one that the caller left out."
            yield "void *address(const Tensor &t, char *instead) { return t ? t.data : instead; }"
            yield ""
        yield "struct Layout {"
        yield from (f"  int64_t at_{name} = 0;" for name in entry.in_workspace)
        yield from (f"  int64_t of_{call.index} = 0;" for call in entry.calls if self._own_scratch(call))
        yield "  int64_t bytes = 0;"
        yield "};"
        yield ""
        yield f"Status lay_out({self._parameters()}, Layout *l) {{"
        yield "  [[maybe_unused]] triton::Arithmetic m;"
        for name, tensor in entry.in_workspace.items():
            yield f"  l->at_{name} = l->bytes;"
            yield f"  l->bytes = m.add(l->bytes, triton::aligned(m, {self._bytes(tensor)}));"
        for call in entry.calls:
            needs = self._own_scratch(call)
            if needs:
                yield f"  l->of_{call.index} = l->bytes;"
                yield f"  int64_t most_{call.index} = 0, grid_of_{call.index}[3];"
            for config, (size, ctas) in sorted(needs.items()):
                i = call.index
                yield f"  if ({self._condition(call, config)}) {{"
                # the workspace is the same on every GPU
                most = "triton::kMostMultiprocessors" if call.depends_on_multiprocessors(config) else "1"
                yield f"    for (int64_t n = 1; n <= {most}; ++n) {{"
                yield f"      grid_{i}(op, s, {config}, n, grid_of_{i}, m);"
                yield f"      int64_t blocks = INT64_C({size * ctas});"
                yield f"      for (int64_t each : grid_of_{i}) blocks = m.mul(blocks, m.max(each, 0));"
                yield f"      most_{i} = m.max(most_{i}, blocks);"
                yield "    }"
                yield "  }"
            if needs:
                yield f"  l->bytes = m.add(l->bytes, triton::aligned(m, most_{call.index}));"
        yield f'  return triton::check_computed({self.op}::name, "the workspace", m);'
        yield "}"
        yield ""

    def _bytes(self, tensor: Tensor) -> str:
        dtype = f"s.t_{tensor.type}" if tensor.type in self.entry.dtypes else _dtype(tensor.type)
        size = f"triton::bytes_of({dtype})"
        if tensor.leading:
            size = f"m.mul({size}, s.d_{tensor.leading})"
        for axis in tensor.axes:
            size = f"m.mul({size}, m.max({self.names.cpp(axis)}, 0))"
        return size

    def _workspace_bytes(self) -> Iterator[str]:
        if not self.entry.workspace:
            return
        kinds = [name for name in self.entry.kinds if name not in self.entry.attrs]
        yield f"Status {self.op}::workspace_bytes(const Sizes &s, int64_t *bytes) const {{"
        yield f"  if ({' || '.join(f's.d_{name} < 0' for name in kinds) or 'false'}) return *bytes = -1, kOk;"
        yield "  Layout l;"
        yield "  AOT_TRY(lay_out(*this, s, &l));"
        yield "  return *bytes = l.bytes, kOk;"
        yield "}"
        yield ""

    # -------------------------------------------------------------------------------------------------------- launches

    def _address(self, name: str) -> str:
        entry = self.entry
        if name in entry.inputs:
            return f"in[{list(entry.inputs).index(name)}].data"
        if name in entry.outputs:
            at = f"out[{list(entry.outputs).index(name)}]"
            return f"address({at}, work + layout.at_{name})" if name in entry.residuals else f"{at}.data"
        return f"(work + layout.at_{name})"

    def _launch(self, call: Call) -> Iterator[str]:
        i, kernel = call.index, _text(call.launch.kernel)
        layout = ", const Layout &layout, char *work" if self.entry.workspace else ""
        yield f"Status launch_{i}({self._parameters()}, [[maybe_unused]] const Tensor *in,"
        yield "                [[maybe_unused]] const Tensor *out, const triton::Gpu &gpu,"
        yield f"                triton::Launch *l{layout}) {{"
        yield "  [[maybe_unused]] triton::Arithmetic m;"
        yield f"  l->kernel = {kernel}, l->n = 0;"
        yield f"  l->config = config_{i}(op, s, gpu.arch, m);"
        yield f'  AOT_TRY(triton::check_computed({self.op}::name, "the condition of a configuration", m));'
        yield f"  if (l->config < 0) return triton::fail_no_config({self.op}::name, {kernel});"
        yield f"  grid_{i}(op, s, l->config, gpu.multiprocessors, l->grid, m);"
        yield from self._values(call)
        yield f'  AOT_TRY(triton::check_computed({self.op}::name, "an argument or the grid", m));'
        yield f"  AOT_TRY(triton::check_grid({self.op}::name, *l));"
        yield from self._hint(call)
        yield from self._variant(call)
        yield from self._pass(call)
        yield "  return kOk;"
        yield "}"

    def _values(self, call: Call) -> Iterator[str]:
        for k, each in enumerate(call.arguments):
            if each.value is not None and each.is_passed:
                yield f"  const {_SCALARS_WIDE[each.type]} v{k} = {self.names.cpp(each.value)};"

    def _hint(self, call: Call) -> Iterator[str]:
        place = {each.parameter: k for k, each in enumerate(call.arguments)}
        tests = []
        for hint in call.hints:
            parts = []
            for parameter, value in hint.items():
                k = place[parameter]
                tensor = call.arguments[k].tensor
                if tensor:
                    parts.append(f"triton::is_aligned({self._address(tensor)})")
                else:
                    parts.append(f"v{k} == 1" if value == 1 else f"v{k} % 16 == 0")
            tests.append(" && ".join(parts) or "true")
        lines = " : ".join(f"({test}) ? {h}" for h, test in enumerate(tests))
        yield f"  l->hint = {lines} : -1;"
        yield f"  if (l->hint < 0) return triton::fail_no_hint({self.op}::name, {_text(call.launch.kernel)});"

    def _variant(self, call: Call) -> Iterator[str]:
        """The table has the first variant of each combination of dtypes and configuration."""
        combinations = list(call.combinations())
        table = [
            self.index.get(Variant(call.index, c, 0, types), -1)
            for types in combinations
            for c in range(len(call.configs))
        ]
        yield f"  static constexpr int kVariants[] = {{{', '.join(map(str, table))}}};"
        place = "0"
        for name in call.types:
            some = f"{self.op}::{_types(name)}"
            place = f"({place} * {len(self.entry.dtypes[name])} + "
            place += f"static_cast<int>(std::find(std::begin({some}), std::end({some}), s.t_{name}) - {some}))"
        yield f"  l->variant = kVariants[{place} * {len(call.configs)} + l->config];"
        yield f"  if (l->variant < 0) return triton::fail_no_config({self.op}::name, {_text(call.launch.kernel)});"
        yield "  l->variant += l->hint;"

    def _pass(self, call: Call) -> Iterator[str]:
        for k, each in enumerate(call.arguments):
            if not each.is_passed:
                continue
            ones = [h for h, hint in enumerate(call.hints) if hint.get(each.parameter) == 1]
            unless = "".join(f"if (l->hint != {h}) " for h in ones)
            if each.type == "i32":
                kernel_argument = _text(each.parameter)
                yield f"  AOT_TRY(triton::check_int32({self.op}::name, *l, {kernel_argument}, v{k}));"
            yield f"  {unless}{self._passed(each, k)};"
        own = f"work + layout.of_{call.index}" if self._own_scratch(call) else "nullptr"
        yield f"  triton::pass(l, {own});"
        yield "  triton::pass(l, nullptr);"

    def _passed(self, argument: Argument, k: int) -> str:
        if argument.tensor:
            return f"triton::pass(l, {self._address(argument.tensor)})"
        return f"triton::pass_as<{_SCALARS[argument.type]}>(l, static_cast<{_SCALARS[argument.type]}>(v{k}))"

    def _plan(self) -> Iterator[str]:
        entry = self.entry
        yield "Status plan(const OnCuda &op, const Tensor *in, const Tensor *out, const triton::Gpu &gpu,"
        yield "            triton::Plan *plan) {"
        yield f"  {self.op}::Sizes s;"
        yield "  AOT_TRY(op.bind(in, &s));"
        more = ""
        if entry.workspace:
            last, more = len(entry.outputs), ", layout, work"
            yield "  Layout layout;"
            yield "  AOT_TRY(lay_out(op, s, &layout));"
            yield f"  if (!out[{last}] && layout.bytes)"
            yield (f'    return fail(kConventionMisused, "%s: the workspace is missing", {self.op}::name);')
            yield f"  char *work = triton::workspace_start(out[{last}]);"
        for call in entry.calls:
            i = call.index
            yield f"  AOT_TRY(launch_{i}(op, s, in, out, gpu, &plan->launch[{i}]{more}));"
        if entry.zeroed:
            yield "  triton::Arithmetic m;"
        for i, name in enumerate(entry.zeroed):
            yield f"  plan->zero[{i}] = {{{self._address(name)}, {self._bytes(entry.tensors[name])}}};"
        yield f"  plan->launches = {len(entry.calls)}, plan->zeroed = {len(entry.zeroed)};"
        yield "  return kOk;"
        yield "}"
        yield ""


_SCALARS_WIDE = {"i32": "int64_t", "i64": "int64_t", "fp32": "double", "fp64": "double", "i1": "bool"}


def _constant(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"INT64_C({value})" if isinstance(value, int) else repr(value)
