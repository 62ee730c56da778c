"""MindSpore: ``ops.Custom`` of type "aot" on the library's own entries, in PyNative and in graph mode, on CPU and GPU.

The functions work eagerly, in ``nn.Cell.construct`` and under ``ms.jit``, with static and dynamic shapes, and under
``ms.grad``, ``value_and_grad`` and ``vmap``. Limits:

- Derivatives of a higher order, and ``ms.jvp``, which is a gradient of a gradient, are compositions that the operators'
  definitions state (mindspore_formula.py). In graph mode they need known dimensions. PyNative mode has no third order,
  except of elementwise operators and of products. A backward of a hosted operator is not differentiable. Each of these
  raises NotImplementedError.
- A backward computes the gradients of all inputs that are present, wanted or not.
- vmap calls the kernel once per example.
- In graph mode, attributes and the axes normalized over are constants; every other dimension may be unknown.
  MindSpore itself rounds some numbers to float32 when it compiles: 1e300 becomes infinity, and 16777217.0 becomes
  16777216.0, but 0.1 keeps its digits.
- Inside a graph, ``ms.grad`` and ``ms.vmap`` need every argument of a function, including those with defaults.
- With unknown dimensions, only the kernel can find some errors, and MindSpore's exception does not contain the message;
  ``aotops.library.last_error()`` returns it.
- Automatic mixed precision of level O1 casts nothing here: the functions and modules compute in the dtype of their
  input.
"""

from __future__ import annotations

import ast
import linecache
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from inspect import signature
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common import initializer
from mindspore.rewrite.common import namespace

from aotops.extra import encode_foreign
from aotops.hosting import NUMBERS, Namespace, written_out
from aotops.infer import UNKNOWN_DIM, UNKNOWN_RANK, infer
from aotops.library import Library
from aotops.op import Attr, Op, Rule
from aotops.ops import BUILTIN, OPS
from aotops.spec import FLOATING, INTEGERS, TensorSpec, accumulate_dtype, shape_text

from .mindspore_formula import gradient_of_backward, has_second_order

__all__ = [
    *OPS, "GELU", "LLTM", "Conv2d", "CrossEntropyLoss", "LayerNorm", "Linear", "RMSNorm", "Softmax", "functions",
    "of",
]  # fmt: skip

_DEVICES = {"CPU": "cpu", "GPU": "cuda"}  # by MindSpore's device_target


# ------------------------------------------------------------------------------------------------- the public functions
# Graph mode compiles these from their source, and Op.bind with them.


def functions(library: Library, module: str = __name__) -> dict[str, Callable[..., Any]]:
    """The functions of a library's operators. ``module``: where they are found, for pickle."""
    return {name: _function(op, module) for name, op in library.ops.items()}


@cache
def of(library: Library) -> Namespace:
    """The functions of a library's operators as a module, each made when it is first asked for: those that are defined
    later too. Of a hosted operator:

    - With a rule for shapes in Python, there is a primitive for each set of shapes, and graph mode needs known ones.
    - One that writes to inputs should be given Parameters in graph mode, which orders reads of no other tensor after
      the call.
    """
    return Namespace(library, "mindspore", lambda op, module: {op.name: _function(op, module)}, at_once=True)


def _function(op: Op, module: str) -> Callable[..., Any]:
    run, parameters = _run(op), signature(op.bind)
    # A nested function: automatic mixed precision of level O1 rewrites the sources that it can, and not such.
    bound = f"def bound(): return bind({', '.join(parameters.parameters)})"
    body = f"{bound}\n        inputs, attrs = bound(); return run(inputs, attrs)"
    function = written_out(op.name, str(parameters), body, bind=op.bind, run=run)
    function.__module__, function.__qualname__, function.__doc__ = module, op.name, op.bind.__doc__
    return function


@cache
def _run(op: Op, forward: Op | None = None) -> Callable[..., Any]:
    """The operator as a function of its inputs, as a tuple, and its attributes. ``forward``: the operator of which it
    is the backward."""
    choose = _Choose(op, forward)
    align = _aligner(op) if op.broadcast else None
    many, visible = len(op.entry_outputs) > 1, 0 if len(op.outputs) == 1 else slice(len(op.outputs))
    none = not op.outputs

    def run(inputs, attrs):
        if align is not None:
            inputs = align(inputs)
        primitive = choose(attrs, *inputs)
        results = primitive(*[t for t in inputs if t is not None])
        if none:
            return None
        return results[visible] if many else results

    return run


class _Constant(ops.PrimitiveWithInfer):
    """A function of the specs of tensors. PyNative calls it; graph mode evaluates it during compilation, where tensors
    have no values and an exception is an error of the compilation."""

    def __init__(self, op: Op, purpose: str) -> None:
        super().__init__(f"{op.name}_{purpose}")
        self.op = op
        self.set_const_prim(True)
        self.add_prim_attr("constexpr_prim", True)

    def evaluate(self, attrs: Any, specs: Sequence[TensorSpec | None]) -> Any:
        raise NotImplementedError

    def __call__(self, attrs, *inputs):
        specs = [_spec(self.op, slot, t) for slot, t in zip(self.op.inputs, inputs, strict=True)]
        return self.evaluate(attrs, specs)

    def __infer__(self, attrs, *inputs):
        specs = [_compiled_spec(self.op, slot, item) for slot, item in zip(self.op.inputs, inputs, strict=True)]
        return {"dtype": None, "shape": None, "value": self.evaluate(attrs["value"], specs)}


class _Choose(_Constant):
    """Checks a call and returns the primitive for it."""

    def __init__(self, op: Op, forward: Op | None = None) -> None:
        super().__init__(op, "primitive")
        self.forward = forward

    def evaluate(self, attrs, specs):
        for (name, kind), value in zip(self.op.attrs.items(), attrs, strict=True):
            if (value is None and not kind.endswith("?")) or (isinstance(value, tuple) and None in value):
                raise TypeError(f"{self.op.name}: {name} is unknown while the graph is compiled, expected a constant")
        given = {slot: spec for slot, spec in zip(self.op.inputs, specs, strict=True) if spec is not None}
        if self.op.foreign is not None:
            return self.hosted(attrs, given)
        attrs, target = self.op.canonical(attrs), ms.get_context("device_target")
        known = given | infer(self.op, attrs, tuple(specs), _DEVICES.get(target, target))
        needed = any(spec.shape == () for spec in known.values())  # see _primitive
        needed = needed or (self.op.backward is not None and bool(self.op.backward.duplicates))  # see _gradient
        dtypes = tuple((slot, spec.dtype) for slot, spec in known.items() if needed)
        if self.forward is not None:
            return _backward(self.forward, attrs, tuple(given), self.op.entry_outputs, dtypes, target)
        return _differentiable(self.op, attrs, tuple(given), dtypes, target)

    def hosted(self, attrs: Any, given: dict[str, TensorSpec]) -> ops.Custom:
        attrs, target = self.op.canonical(attrs), ms.get_context("device_target")
        known = given | infer(self.op, attrs, tuple(given.values()), _DEVICES.get(target, target))
        dtypes = tuple((slot, spec.dtype) for slot, spec in known.items())
        if not _needs_shapes(self.op):
            return _differentiable(self.op, attrs, tuple(given), dtypes, target)
        if any(dim < 0 for spec in known.values() for dim in spec.shape):
            raise ValueError(
                f"{self.op.name}: a dimension is unknown while the graph is compiled, and the rule for the shapes of "
                f"results is Python's: expected the library to have an InferShape, or same_spec_as"
            )
        shapes = tuple((slot, spec.shape) for slot, spec in known.items())
        return _differentiable(self.op, attrs, tuple(given), dtypes, target, shapes)


def _needs_shapes(op: Op) -> bool:
    """Whether MindSpore must be told the shapes of results, of a hosted operator or its backward."""
    own = op.foreign is not None and not op.foreign.by_shapes_alone(op)
    return own or (op.backward is not None and _needs_shapes(op.backward))


# -------------------------------------------------------------------------------------------------------- registration


def registered(name: str, *arguments: Any, library: Library = BUILTIN, **keywords: Any) -> ops.Custom:
    """The primitive of an operator, with MindSpore's registration information (``ops.CustomRegOp``): the names of its
    tensors, the dtypes that it takes, and its attributes. MindSpore then checks the dtypes of each call.

    Args:
        name: the operator's.
        arguments, keywords: those of its function. The tensors are examples: which are given, and their ranks.

    Returns:
        A function of the tensors that are given, in the order of the operator's inputs, which returns every output of
        the entry, residuals and workspace too. It is differentiable as the function is.

    Raises:
        ValueError: MindSpore wants the same attributes of each registration of an entry in a process: one that is None
            here and was not before, or the other way round.
        NotImplementedError: a hosted operator; tensors of different shapes, of an operator that broadcasts.
    """
    op = library.ops[name]
    if op.foreign is not None:
        raise NotImplementedError(f"{name}: a hosted operator cannot be registered: call its function")
    inputs, attrs = op.bind(*arguments, **keywords)
    attrs, target = op.canonical(attrs), ms.get_context("device_target")
    specs = {slot: spec for slot, t in zip(op.inputs, inputs, strict=True) if (spec := _spec(op, slot, t))}
    if op.broadcast and len({spec.shape for spec in specs.values()}) > 1:
        raise NotImplementedError(f"{name}: tensors of different shapes cannot be registered: call its function")
    plain = _differentiable(op, attrs, tuple(specs), (), target)
    entry = op.library.entry_name(op, _DEVICES.get(target, target))
    info = ops.CustomRegOp(f"{entry}_{zlib.crc32(repr((attrs, tuple(specs))).encode()):x}")
    for i, slot in enumerate(specs):
        info.input(i, slot)
    for i, slot in enumerate(op.entry_outputs):
        info.output(i, slot)
    for dtypes in _dtype_rows(op, attrs, specs, _DEVICES.get(target, target)):
        info.dtype_format(*(getattr(ops.DataType, f"{_DATA_TYPES[dtype]}_Default") for dtype in dtypes))
    for attr, value in _entry_attrs(op, attrs, tuple(specs), op.entry_outputs).items():
        info.attr(attr, "required", "all", value=value)
    reg_info = info.target(target).get_op_info()
    file = op.library.functions_of(op).real_path()
    primitive = ops.Custom(f"{file}:{entry}", None, None, "aot", plain.bprop, reg_info)
    primitive.add_prim_attr("multi_output", len(op.entry_outputs) > 1)
    return primitive


_DATA_TYPES = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "int32": "I32", "int64": "I64",
    "uint8": "U8", "int8": "I8", "bool": "BOOL",
}  # fmt: skip


def _dtype_rows(op: Op, attrs: tuple[Attr, ...], specs: Mapping[str, TensorSpec], device: str) -> list[tuple[str, ...]]:
    """Those of the inputs given and of the outputs, for each dtype that the operator takes."""
    rows = []
    for dtype in FLOATING:
        for integer in INTEGERS if any(spec.dtype in INTEGERS for spec in specs.values()) else INTEGERS[:1]:
            given = {
                slot: TensorSpec(spec.shape, dtype if spec.dtype in FLOATING else integer)
                for slot, spec in specs.items()
            }
            outputs = infer(op, attrs, tuple(given.get(slot) for slot in op.inputs), device)
            rows.append((*(given[s].dtype for s in given), *(outputs[y].dtype for y in op.entry_outputs)))
    return rows


# --------------------------------------------------------------------------------------------------------- broadcasting


def _aligner(op: Op) -> Callable[..., Any]:
    common_shape = _CommonShape(op, "common_shape")

    def align(inputs):
        sources, wide = common_shape((), *inputs)
        shape = tuple([inputs[i].shape[axis] for i, axis in sources])
        return tuple([t if w is None else broadcast(t, shape, w) for t, w in zip(inputs, wide)])  # noqa: B905

    def broadcast(t, shape, wide):
        return ops.broadcast_to(t.astype(wide), shape).astype(t.dtype)

    return align


class _CommonShape(_Constant):
    """For each axis of the broadcast shape, the input and its axis that have the length. For each input None or, if it
    must be broadcast, the dtype to do that in, which is the dtype that its gradient is summed in. Two unknown lengths
    are assumed equal; the kernel checks them."""

    def evaluate(self, attrs, specs):
        shapes = [() if spec is None else spec.shape for spec in specs]
        if any(UNKNOWN_RANK in shape for shape in shapes):
            return (), (None,) * len(specs)
        ndim = max(map(len, shapes))
        sources = tuple(self.source(shapes, axis) for axis in range(-ndim, 0))
        shape = tuple(shapes[i][axis] for i, axis in sources)
        wide = [spec and spec.shape != shape and getattr(ms, accumulate_dtype(spec.dtype)) for spec in specs]
        return sources, tuple(dtype or None for dtype in wide)

    def source(self, shapes, axis):
        lengths = {i: shape[axis] for i, shape in enumerate(shapes) if len(shape) >= -axis}
        known = {length for length in lengths.values() if length not in (1, UNKNOWN_DIM)}
        if len(known) > 1:
            given = " and ".join(shape_text(shape) for shape in shapes)
            raise ValueError(f"{self.op.name}: shapes {given} do not broadcast")
        rank = {1: 2, UNKNOWN_DIM: 1}  # a known length decides, then an unknown one, then 1
        return min(lengths, key=lambda i: rank.get(lengths[i], 0)), axis


# --------------------------------------------------------------------------------------------------------------- specs


def _spec(op: Op, slot: str, t: Any) -> TensorSpec | None:
    if t is None:
        return None
    if op.foreign is not None and type(t) in NUMBERS:
        return TensorSpec((), NUMBERS[type(t)])
    if not isinstance(t, Tensor):
        raise TypeError(f"{op.name}: {slot} is {t!r:.40}, expected a mindspore.Tensor")
    if slot in op.mutates and not t.is_contiguous():  # MindSpore would pass a copy
        raise ValueError(f"{op.name}: {slot} is not contiguous, expected a tensor to write to")
    return TensorSpec(tuple(t.shape), str(t.dtype).lower())


def _compiled_spec(op: Op, slot: str, item: dict[str, Any]) -> TensorSpec | None:
    """The same, of an argument during compilation."""
    dtype = item["dtype"]
    if dtype is None:
        return None
    if op.foreign is not None and type(item["value"]) in NUMBERS:
        return TensorSpec((), NUMBERS[type(item["value"])])
    if not isinstance(dtype, ms.dtype.TensorType):
        raise TypeError(f"{op.name}: {slot} is {item['value']!r:.40}, expected a mindspore.Tensor")
    return TensorSpec(tuple(item["shape"]), str(dtype.element_type()).lower())


# ---------------------------------------------------------------------------------------------------------- primitives


@lru_cache(maxsize=256)  # a network has some dozens; bounded, for attributes that change with each step
def _differentiable(
    op: Op,
    attrs: tuple[Attr, ...],
    given: tuple[str, ...],
    dtypes: tuple[tuple[str, str], ...],
    target: str,
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> ops.Custom:
    """``given``: the inputs that are present."""
    bprop = _bprop_of_rule(op, op.rule, attrs) if op.rule is not None else None
    if op.backward is not None:
        inputs = "".join(f"{slot}, " for slot in given)
        body = f"return gradient(({inputs}), out, dout)"
        gradient = _gradient(op, attrs, given, dict(dtypes), target, dict(shapes))
        bprop = written_out("bprop", f"({inputs}out, dout)", body, gradient=gradient)
    return _primitive(op, attrs, given, op.entry_outputs, dict(dtypes), target, bprop, dict(shapes))


def _primitive(
    op: Op,
    attrs: Sequence[Attr],
    given: Sequence[str],
    wanted: Sequence[str],
    dtypes: Mapping[str, str],
    target: str,
    bprop: Callable[..., Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> ops.Custom:
    """An entry bound to its attributes and to the slots that are present.

    The library infers shapes and dtypes, because graph mode asks for them without Python, with dynamic shapes and in a
    program loaded from a file. With 0-dim tensors ``dtypes`` states the dtypes instead: MindSpore turns a 0-dim result
    whose dtype the library inferred into a number and, after ``set_inputs`` in PyNative mode, raises.
    """
    entry = op.library.entry_name(op, _DEVICES.get(target, target))
    one, known = len(op.entry_outputs) == 1, all(name in dtypes for name in wanted)
    types = tuple(ms.dtype.TensorType(getattr(ms, dtypes[name])) for name in wanted) if known else None
    file = op.library.functions_of(op).real_path()
    told = tuple(shapes[name] for name in wanted) if shapes else None
    shape = told[0] if told and one else told
    primitive = ops.Custom(f"{file}:{entry}", shape, types[0] if types and one else types, "aot", bprop)
    primitive.add_prim_attr("reg_op_name", primitive.uniq_name)  # MindSpore 2.10 needs it to infer in C++
    primitive.add_prim_attr("multi_output", not one)
    if op.foreign is not None:
        known_dtypes = [dtypes[slot] for slot in (*op.inputs, *op.outputs)]
        primitive.add_prim_attr("hosted", encode_foreign(op, attrs, known_dtypes))
        if op.mutates:
            primitive.add_prim_attr("side_effect_mem", True)
        return primitive
    for name, value in _entry_attrs(op, attrs, given, wanted).items():
        primitive.add_prim_attr(name, value)
    return primitive


def _entry_attrs(op: Op, attrs: Sequence[Attr], given: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    """What an entry reads of its AotExtra. MindSpore's own floats are float32: a decimal string keeps the digits."""
    values = {name: value for name, value in zip(op.attrs, attrs, strict=True) if value is not None}
    plain = {name: repr(value) if isinstance(value, float) else value for name, value in values.items()}
    return {**plain, "inputs": _mask(op.inputs, given), "outputs": _mask(op.entry_outputs, wanted)}


def _mask(slots: Sequence[str], present: Sequence[str]) -> int:
    return sum(1 << i for i, slot in enumerate(slots) if slot in present)


def _gradient(
    op: Op,
    attrs: Sequence[Attr],
    given: Sequence[str],
    dtypes: Mapping[str, str],
    target: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> Callable[..., Any]:
    """A function of the inputs, as a tuple, the results and their gradients that returns the gradient of each input.
    Without ``dtypes`` all tensors have one (``registered``)."""
    backward = op.backward
    assert backward is not None
    written = op.entry_outputs
    named = [*given, *written, *(f"d{name}" for name in written)]
    taken = [slot for slot in backward.inputs if slot in named]
    merged = backward.merged({f"d{y}": dtypes[y] for y in op.outputs} | dtypes) if dtypes else backward.duplicates
    shared = {**backward.alias, **merged}
    gradients = [shared.get(f"d{slot}", f"d{slot}") for slot in given]
    factors = backward.factors(attrs)
    scales = [Tensor(factors[f"d{slot}"], ms.float64) if f"d{slot}" in factors else None for slot in given]
    wanted = [y for y in backward.entry_outputs if y in gradients or y in backward.workspace]
    kernel = None
    if backward.has_kernel:
        if backward.foreign is not None:
            dtypes, shapes = _backward_specs(op, backward, attrs, dtypes, target, shapes)
        else:
            dtypes = {f"d{slot}": dtypes[slot] for slot in given if dtypes}
        known = tuple(dtypes.items()), target, tuple(shapes.items())
        kernel = _backward(op, tuple(attrs), tuple(taken), tuple(wanted), *known)
        named += wanted
    arguments = [named.index(slot) for slot in taken]
    places = [named.index(name) if name in named else None for name in gradients]
    one, one_gradient = len(written) == 1, len(backward.entry_outputs) == 1

    def gradient(inputs, out, dout):
        tensors = (*inputs, out, dout) if one else (*inputs, *out, *dout)
        if kernel is not None:
            grads = kernel(*[tensors[i] for i in arguments])
            tensors = (*tensors, grads) if one_gradient else (*tensors, *grads)
        found = [ops.zeros_like(x) if i is None else tensors[i] for i, x in zip(places, inputs)]  # noqa: B905
        return tuple([x if scale is None else times(x, scale) for x, scale in zip(found, scales)])  # noqa: B905

    def times(x, scale):
        wide = ms.float64 if x.dtype == ms.float64 else ms.float32
        return (x.astype(wide) * scale.astype(wide)).astype(x.dtype)

    return gradient


@lru_cache(maxsize=256)
def _backward(
    op: Op,
    attrs: tuple[Attr, ...],
    given: tuple[str, ...],
    wanted: tuple[str, ...],
    dtypes: tuple[tuple[str, str], ...],
    target: str,
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> ops.Custom:
    """The backward of ``op``, whose gradient is composed. ``given``, ``wanted``: its inputs and outputs."""
    backward = op.backward
    assert backward is not None
    bprop = _refusal(backward, given)
    if has_second_order(op, attrs):
        choose = _Compose(op, attrs, wanted, target)
        inputs = "".join(f"{slot}, " for slot in given)
        every = "".join(f"{slot if slot in given else None}, " for slot in backward.inputs)
        dout = "(dout,)" if len(backward.entry_outputs) == 1 else "dout"
        body = f"return choose((), {every})({inputs}{dout})"
        bprop = written_out("bprop", f"({inputs}out, dout)", body, choose=choose)
    return _primitive(backward, attrs, given, wanted, dict(dtypes), target, bprop, dict(shapes))


class _Compose(_Constant):
    """Returns the gradient of a backward, a function of its inputs and of the gradients of its outputs."""

    def __init__(self, op: Op, attrs: tuple[Attr, ...], wanted: tuple[str, ...], target: str) -> None:
        assert op.backward is not None
        super().__init__(op.backward, "gradient")
        self.call = op, attrs, wanted, _DEVICES.get(target, target)

    def __call__(self, attrs, *inputs):
        specs = [_spec(self.op, slot, t) for slot, t in zip(self.op.inputs, inputs, strict=True)]
        return _composed(*self.call, tuple(specs), eager=True)

    def evaluate(self, attrs, specs):
        return _composed(*self.call, tuple(specs), eager=False)


@lru_cache(maxsize=256)
def _composed(
    op: Op,
    attrs: tuple[Attr, ...],
    wanted: tuple[str, ...],
    device: str,
    specs: tuple[TensorSpec | None, ...],
    eager: bool,
) -> Callable[..., Any]:
    assert op.backward is not None

    def call(called: Op) -> Callable[..., Any]:
        return _run(called, op if called is op.backward else None)

    given = {slot: spec for slot, spec in zip(op.backward.inputs, specs, strict=True) if spec is not None}
    return gradient_of_backward(op, attrs, tuple(given), wanted, tuple(given.values()), call, device, eager)


def _backward_specs(
    op: Op,
    backward: Op,
    attrs: Sequence[Attr],
    dtypes: Mapping[str, str],
    target: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Dtypes of a hosted backward's slots, and their shapes, where they are known."""
    unknown = (UNKNOWN_RANK,)
    specs = {slot: TensorSpec(shapes.get(slot, unknown), dtype) for slot, dtype in dtypes.items()}
    specs |= {f"d{y}": specs[y] for y in op.outputs}
    taken = tuple(specs[slot] for slot in backward.inputs)
    found = infer(backward, tuple(attrs), taken, _DEVICES.get(target, target))
    named = dict(zip(backward.inputs, taken, strict=True)) | found
    found_shapes = {slot: spec.shape for slot, spec in named.items()} if shapes else {}
    return {slot: spec.dtype for slot, spec in named.items()}, found_shapes


def _bprop_of_rule(op: Op, rule: Rule, attrs: Sequence[Attr]) -> Callable[..., Any]:
    """The bprop that a rule made of operators is."""
    n, hidden = len(op.outputs), len(op.entry_outputs) > 1
    out = {y: f"out[{i}]" if hidden else "out" for i, y in enumerate(op.outputs)}
    out |= {f"d{y}": f"d{each}" for y, each in list(out.items())}
    values = {name: f"attr_{name}" for name in op.attrs}
    arguments = "".join(f", {out.get(name, values.get(name, name))}" for name in rule.parameters)
    inputs = "".join(f"{slot}, " for slot in op.inputs)
    body = f"return fill(({inputs}), rule(functions{arguments}))"
    known = {values[name]: value for name, value in zip(op.attrs, attrs, strict=True)}
    function, functions = _with_source(rule.function), of(op.library)
    expected, name = len(op.inputs), op.name
    assert n

    def fill(inputs, found):
        gradients = found if isinstance(found, (tuple, list)) else (found,)
        if len(gradients) != expected:
            raise TypeError(f"{name}: its backward returned another number of gradients than there are inputs")
        return tuple([ops.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs)])  # noqa: B905

    return written_out("bprop", f"({inputs}out, dout)", body, fill=fill, rule=function, functions=functions, **known)


def _with_source(function: Callable[..., Any]) -> Callable[..., Any]:
    """A lambda as a function with a name: graph mode cannot find the source of a lambda that is an argument."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != "<lambda>":
        return function
    lines = linecache.getlines(code.co_filename)
    names = code.co_varnames[: code.co_argcount]
    found = {
        ast.unparse(node.body)
        for node in ast.walk(ast.parse("".join(lines)))
        if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno
        if tuple(arg.arg for arg in node.args.args) == names
    }
    if len(found) != 1:
        return function
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    outer = function.__globals__ | {name: cell.cell_contents for name, cell in cells}
    used = {name: outer[name] for name in (*code.co_names, *code.co_freevars) if name in outer}
    return written_out("rule", f"({', '.join(names)})", f"return {found.pop()}", **used)


class _Refuse(ops.PrimitiveWithInfer):
    """Raises when PyNative calls it and when graph mode compiles it."""

    def __init__(self, op: Op) -> None:
        super().__init__(f"{op.name}_refusal")
        self.op = op

    def __call__(self, *_):
        raise NotImplementedError(f"{self.op.name} has no gradient: derivatives of a higher order are not supported")

    __infer__ = __call__


def _refusal(backward: Op, given: Sequence[str]) -> Callable[..., Any]:
    """The bprop of a backward that states no gradient. Without one MindSpore's error would not name the operator."""
    inputs = "".join(f"{slot}, " for slot in given)
    return written_out("refusal", f"({inputs}out, dout)", f"return refuse({inputs})", refuse=_Refuse(backward))


globals().update(functions(BUILTIN))


# ------------------------------------------------------------------------------------------------------------- modules


def _beside(x, parameter):
    """A norm's parameter as it is where the operator takes it, float32 beside 16 bits, or else in x's dtype."""
    if parameter.dtype == ms.float32 and x.dtype in (ms.float16, ms.bfloat16):
        return parameter
    return parameter.astype(x.dtype)


class LayerNorm(nn.LayerNorm):
    """``mindspore.nn.LayerNorm`` on the library's kernel: the same arguments, defaults, parameters and state."""

    def construct(self, input_x):
        shape = input_x.shape[self.begin_norm_axis :]
        if self.begin_norm_axis == self.begin_params_axis:
            gamma, beta = _beside(input_x, self.gamma), _beside(input_x, self.beta)
            return layer_norm(input_x, shape, gamma, beta, self.epsilon)  # type: ignore[name-defined] # noqa: F821
        gamma, beta = self.gamma.astype(input_x.dtype), self.beta.astype(input_x.dtype)
        y = layer_norm(input_x, shape, None, None, self.epsilon)  # type: ignore[name-defined] # noqa: F821
        return y * gamma + beta


class RMSNorm(nn.Cell):
    """Root mean square normalization over the trailing axes ``normalized_shape``: the arguments, defaults and parameter
    of ``torch.nn.RMSNorm``, since mindspore.nn has none, and ``weight_offset``, which is added to the weight; the
    initial weight is 1 - weight_offset."""

    def __init__(self, normalized_shape, eps=None, elementwise_affine=True, dtype=ms.float32, weight_offset=0.0):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps, self.weight_offset = eps, float(weight_offset)
        self.weight = (
            ms.Parameter(ops.ones(self.normalized_shape, dtype) - weight_offset, name="weight")
            if elementwise_affine
            else None
        )

    def construct(self, x):
        weight = None if self.weight is None else _beside(x, self.weight)
        return rms_norm(x, self.normalized_shape, weight, self.eps, self.weight_offset)  # type: ignore[name-defined] # noqa: F821


class Linear(nn.Dense):
    """``mindspore.nn.Dense`` on the library's kernel: the same arguments, defaults, parameters and state, but for the
    activation, which is applied in the same kernel: None, "relu", "gelu", "gelu_tanh" or "silu"."""

    def __init__(self, *args, activation=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.applied = activation

    def construct(self, x):
        bias = self.bias.astype(x.dtype) if self.has_bias else None
        return linear(x, self.weight.astype(x.dtype), bias, self.applied)  # type: ignore[name-defined] # noqa: F821


class GELU(nn.GELU):
    """``mindspore.nn.GELU`` on the library's kernel: the same argument, the same default."""

    def construct(self, x):
        return gelu(x, self.approximate)  # type: ignore[name-defined] # noqa: F821


class Softmax(nn.Softmax):
    """``mindspore.nn.Softmax`` on the library's kernel: the same argument, an int, the same default."""

    def __init__(self, axis=-1):
        super().__init__(axis)
        self.axis = axis

    def construct(self, input):
        return softmax(input, self.axis)  # type: ignore[name-defined] # noqa: F821


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """``mindspore.nn.CrossEntropyLoss`` on the library's kernel: the same arguments and defaults. With class
    weights, with labels that are probabilities, and with more axes than (N, C) it calls MindSpore's own."""

    def construct(self, logits, labels):
        if self.weight is not None or logits.ndim > 2 or labels.dtype not in (ms.int32, ms.int64):
            return super().construct(logits, labels)
        options = self.ignore_index, self.reduction, self.label_smoothing
        return cross_entropy(logits, labels, *options)  # type: ignore[name-defined] # noqa: F821


class LLTM(nn.Cell):
    """The cell of PyTorch's tutorial "Custom C++ and CUDA Extensions", its arguments, parameters and initial values.
    ``construct(input, (old_h, old_cell))`` returns new_h and new_cell.

    ``bias`` is (1, 3 * state_size), as in the code that comes with the tutorial. ``load_state_dict`` also accepts
    (3 * state_size,), as in the tutorial's text; ``mindspore.load_param_into_net`` does not.
    """

    def __init__(self, input_features, state_size, dtype=ms.float32):
        super().__init__()
        self.input_features, self.state_size = input_features, state_size
        shapes = {"weights": (3 * state_size, state_size + input_features), "bias": (1, 3 * state_size)}
        uniform = initializer.Uniform(state_size**-0.5)
        for name, shape in shapes.items():
            setattr(self, name, ms.Parameter(initializer.initializer(uniform, shape, dtype), name=name))

    def construct(self, input, state):
        weights, bias = self.weights.astype(input.dtype), self.bias.astype(input.dtype)
        return lltm(input, weights, bias, state[0], state[1])  # type: ignore[name-defined] # noqa: F821

    def _load_from_state_dict(self, state_dict, prefix, *args):
        bias = state_dict.get(f"{prefix}bias")
        if isinstance(bias, Tensor) and bias.shape == (3 * self.state_size,):
            state_dict[f"{prefix}bias"] = bias.reshape(1, -1)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Conv2d(nn.Conv2d):
    """``mindspore.nn.Conv2d`` on the library's kernel: the same arguments, defaults, parameters and state. With
    asymmetric padding, which pad_mode "same" may need, it calls MindSpore's own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        top, bottom, left, right = _conv2d_padding(self)
        self.symmetric = top == bottom and left == right and self.data_format == "NCHW"
        self.options = (self.stride, (top, left), self.dilation, self.group)

    def construct(self, x):
        if not self.symmetric:
            return super().construct(x)
        bias = self.bias.astype(x.dtype) if self.has_bias else None
        weight = self.weight.astype(x.dtype)
        return conv2d(x, weight, bias, *self.options)  # type: ignore[name-defined] # noqa: F821


def _conv2d_padding(cell: nn.Conv2d) -> tuple[int, int, int, int]:
    """Top, bottom, left, right. For pad_mode "same" with a stride other than 1, which depends on the image, values that
    are not symmetric."""
    if cell.pad_mode == "valid":
        return 0, 0, 0, 0
    if cell.pad_mode == "pad":
        padding = cell.padding
        return (padding,) * 4 if isinstance(padding, int) else tuple(padding)
    reach = [d * (k - 1) for d, k in zip(cell.dilation, cell.kernel_size, strict=True)]
    if cell.stride != (1, 1):
        return 0, 1, 0, 1
    return reach[0] // 2, reach[0] - reach[0] // 2, reach[1] // 2, reach[1] - reach[1] // 2


def _leave_unrewritten(modules: Sequence[type]) -> None:
    """Automatic mixed precision of level O1 rewrites the sources of Cells, and cannot rewrite these, which are named as
    the Cells of MindSpore's that they inherit from. MindSpore has no public list of those to leave as they are."""
    if kept := getattr(namespace, "_subtree_black_list", None):
        kept.extend(modules)


_leave_unrewritten((Conv2d, CrossEntropyLoss, GELU, LLTM, LayerNorm, Linear, RMSNorm, Softmax))
