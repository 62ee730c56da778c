"""The operators for JAX: each is one XLA custom call, with derivatives of any mode and order, batched by vmap.

They work under jit, grad, vmap, scan, cond, checkpoint and shard_map. A program exported with ``jax.export`` needs
``disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in (TARGET, SCRATCH_TARGET)]``, and
``register()`` in the process that loads it. Limits:

- XLA partitions a call over several devices as its definition states (``Op.dims``), and gathers the axes that the
  kernel takes whole. An operator without such a statement gathers its inputs, and each device computes all of the
  result: the first such call of a process gives a ``ShardingWarning``, except if only the ``in_shardings`` of jit name
  the devices, which JAX's types do not show. A program of several devices that ``jax.export`` writes does so too:
  JAX cannot export how it is partitioned.
- Gradients are computed by the backward kernels; forward mode and the derivatives of a backward by the operators'
  formulas, of which products are kernels again. An operator without a formula, such as a hosted one, has a gradient
  alone: forward mode is a TypeError, and a second order a NotImplementedError.
- Attributes, and so the axes normalized over, are constants of the program: they can be neither traced nor symbolic in
  an export. Other dimensions can.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce, wraps
from math import prod
from operator import add as plus
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching, mlir
from jax.tree_util import tree_flatten, tree_unflatten

from aotops import library
from aotops.extra import encode
from aotops.formula import backward_cotangents, backward_tangents, bilinear_tangent, compose, is_bilinear, parameters
from aotops.hosting import NUMBERS, Namespace
from aotops.infer import UNKNOWN_DIM, infer, infer_symbolic
from aotops.library import Library
from aotops.op import Attr, Op
from aotops.ops import BUILTIN, OPS
from aotops.spec import DEVICES, TensorSpec, accumulate_dtype, shape_text

from .jax_linear import apply as apply_linear
from .jax_mathematics import Mathematics
from .jax_sharding import aligned, mesh_of, partitioned, typeof

try:
    from jax.errors import InconclusiveDimensionOperation
except ImportError:  # older JAX
    from jax.core import InconclusiveDimensionOperation
try:
    from jax.extend.core import Primitive, jaxpr_as_fun
except ImportError:  # older JAX
    from jax.core import Primitive, jaxpr_as_fun
try:
    from jax import ffi
except ImportError:  # before JAX 0.5
    from jax.extend import ffi

try:
    from jax.export import is_symbolic_dim
except ModuleNotFoundError:  # JAX 0.4 without absl-py, which jax.export imports: then no dimension is symbolic

    def is_symbolic_dim(dim: object) -> bool:
        return False


__all__ = ["LLTM", "SCRATCH_TARGET", "TARGET", "ShardingWarning", "functions", "of", "register", *OPS]

TARGET, SCRATCH_TARGET = "aotops", "aotops_scratch"
"""The names of the custom calls. The second is used only in exported programs, for operators that need a workspace
whose size depends on a symbolic dimension."""


class ShardingWarning(UserWarning):
    """Each of several devices computes the whole result."""


Array = Any  # jax.Array, or what jit accepts as one
Attrs = tuple[Attr, ...]
Names = tuple[str, ...]


def register(library: Library = BUILTIN) -> None:
    """Makes a library's operators known to XLA. The functions here do so when first called; a process that calls none
    of them, and runs a program loaded by ``jax.export``, has to do so itself.

    Raises:
        LibraryError: the library is missing, does not load, or is of another version.
    """
    _register_targets()
    library.registered  # noqa: B018  for the handler, which looks it up by name


@cache
def _register_targets() -> None:
    # Not at import: a registration that XLA refuses disables the whole backend.
    lib = library.load()
    ffi.register_ffi_target(TARGET, ffi.pycapsule(lib.aot_xla_cpu), platform="cpu")
    ffi.register_ffi_target(SCRATCH_TARGET, ffi.pycapsule(lib.aot_xla_cpu), platform="cpu")
    # Without CUDA entries too: the handler's error is clearer than XLA's.
    ffi.register_ffi_target(TARGET, ffi.pycapsule(lib.aot_xla_cuda), platform="CUDA")
    ffi.register_ffi_target(SCRATCH_TARGET, ffi.pycapsule(lib.aot_xla_cuda_scratch), platform="CUDA")


# ------------------------------------------------------------------------------------------------------------ functions


def functions(library: Library, module: str = __name__) -> dict[str, Callable[..., Array]]:
    """The functions of a library's operators. ``module``: where they are found, for pickle."""
    return {name: _function(op, module) for name, op in library.ops.items()}


@cache
def of(library: Library) -> Namespace:
    """The functions of a library's operators as a module, each made when it is first asked for: those that are defined
    later too. An operator that writes to inputs returns their new values after its outputs: JAX's arrays stay as they
    are."""
    return Namespace(library, "jax", lambda op, module: {op.name: _function(op, module)})


def _function(op: Op, module: str) -> Callable[..., Array]:
    @wraps(op.bind, assigned=("__name__", "__qualname__", "__doc__"))
    def function(*args, **kwargs):
        inputs, attrs = _bind(op, args, kwargs)
        return _run(op, attrs, *inputs)

    function.__module__ = module
    return function


def _bind(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Array | None, ...], Attrs]:
    """The inputs and the attributes. Refuses JAX's tracers as attributes and other objects as arrays: the core, which
    knows no framework, cannot recognize them."""
    inputs, attrs = op.bind(*args, **kwargs)
    for name, value in zip(op.attrs, attrs, strict=True):
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, jax.core.Tracer) or is_symbolic_dim(part):
                kind = "traced" if isinstance(part, jax.core.Tracer) else "symbolic"
                raise TypeError(f"{op.name}: {name} is {value}, which is {kind}, expected a constant of the program")
    attrs = op.canonical(attrs)
    for slot, x in zip(op.inputs, inputs, strict=True):
        is_array = hasattr(x, "dtype") and not isinstance(x, np.ma.MaskedArray)  # JAX would drop its mask
        if x is not None and not is_array and not isinstance(x, (int, float, complex)):
            raise TypeError(f"{op.name}: {slot} is a {type(x).__name__}, expected an array")
    if op.foreign is not None:
        inputs = tuple(_number(op, slot, x) for slot, x in zip(op.inputs, inputs, strict=True))
    return inputs, attrs


def _number(op: Op, slot: str, x: Any) -> Any:
    """An array of one of Python's numbers, of the dtype that hosted functions are given."""
    if type(x) not in NUMBERS:
        return x
    _check_x64(op, slot, NUMBERS[type(x)])
    return jnp.asarray(x, NUMBERS[type(x)])


def _check_x64(op: Op, slot: str, dtype: str) -> None:
    """Without 64 bits JAX would use half as many, and a hosted function does not check that."""
    if jax.dtypes.canonicalize_dtype(dtype).name != dtype:
        raise TypeError(f"{op.name}: {slot} has dtype {dtype}, which JAX has with jax_enable_x64 alone")


@partial(jax.jit, static_argnums=(0, 1))  # for eager calls: without jit, each would compile the custom call again
def _run(op: Op, attrs: Attrs, *inputs: Array | None) -> Array:
    register(op.library)
    if op.broadcast and all(x is not None for x in inputs):
        inputs = _broadcast(op, inputs)
    inputs = aligned(op, attrs, inputs)
    with jax.named_scope(op.name):
        outputs = _apply(op, attrs, (*op.outputs, *op.mutates), *_vary(inputs, _varying(inputs)))
    return outputs if len(outputs) > 1 else outputs[0]


def _broadcast(op: Op, inputs: Sequence[Array]) -> Sequence[Array]:
    try:
        return jnp.broadcast_arrays(*inputs)
    except ValueError as error:
        shapes = " and ".join(shape_text(x.shape) for x in inputs)
        raise ValueError(f"{op.name}: shapes {shapes} do not broadcast") from error


# ---------------------------------------------------------------------------------------------------------- primitive
# Not jax.custom_jvp: JAX drops its rule when it splits a scan that is differentiated twice.


@dataclass(frozen=True)
class _Call:
    """A call for the ``wanted`` slots. ``forward``: the operator whose backward it is of, if it is one's."""

    op: Op
    forward: Op | None
    attrs: Attrs
    wanted: Names

    def __repr__(self) -> str:
        return f"{self.op.name}({', '.join(map(str, self.attrs))}) -> {', '.join(self.wanted)}"


def _apply(op: Op, attrs: Attrs, wanted: Names, *inputs: Array | None, forward: Op | None = None) -> tuple[Array, ...]:
    """The wanted outputs of an operator. ``forward``: see ``_Call``. JAX itself differentiates aliases."""
    results = dict(zip(op.inputs, inputs, strict=True))
    merged = op.merged({s: x is not None and x.dtype for s, x in results.items()}) if op.duplicates else {}
    sources = {merged.get(s, op.alias.get(s, s)) for s in wanted}
    written = tuple(s for s in (*op.entry_outputs, *op.mutates) if s in sources)
    if written:
        leaves, tree = tree_flatten(inputs)
        program = jax.make_jaxpr(lambda *leaves: _call(op, attrs, written, *tree_unflatten(tree, leaves)))(*leaves)
        outputs = _operator.bind(*leaves, call=_Call(op, forward, attrs, written), tree=tree, program=program)
        results |= zip(written, outputs, strict=True)
    results |= {s: results[other] for s, other in merged.items() if s in wanted}
    results = op.with_aliases(results)
    return tuple(results[s] for s in wanted)


_operator = Primitive("aotops")
_operator.multiple_results = True


def _evaluate(*leaves, call, tree, program):
    return jaxpr_as_fun(program)(*leaves)


def _batch(leaves, axes, *, call, tree, program):
    size = next(x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(leaves, axes, strict=True)]
    batched = tree_unflatten(tree, [axis is not None for axis in axes])
    return _batched(call, size, batched, *tree_unflatten(tree, moved)), (0,) * len(call.wanted)


def _jvp(leaves, moved, *, call, tree, program):
    op, attrs = call.op, call.attrs
    given = dict(zip(op.inputs, tree_unflatten(tree, leaves), strict=True))
    tangents = dict(zip(op.inputs, tree_unflatten(tree, moved), strict=True))
    tangents = {slot: t for slot, t in tangents.items() if not (t is None or type(t) is ad.Zero)}
    written = call.wanted
    if call.forward is None and op.has_gradient:
        written = tuple(s for s in op.entry_outputs if s in call.wanted or s in op.saved)
    inputs = tuple(given.values())
    results = _apply(op, attrs, written, *inputs, forward=call.forward)
    if call.forward is None:  # named for the policies of jax.checkpoint
        results = [checkpoint_name(y, f"{op.library.name}.{op.name}") for y in results]
    given |= zip(written, results, strict=True)
    # Residuals have no tangent: formulas and derivatives of a higher order are of the inputs.
    outputs = tuple(s for s in call.wanted if s in op.outputs)
    found = dict(zip(outputs, _tangents(call, outputs, given, tangents), strict=True))
    return (
        [given[s] for s in call.wanted],
        [found[s] if s in found else ad.Zero(_tangent_type(given[s])) for s in call.wanted],
    )


_operator.def_impl(_evaluate)
_operator.def_abstract_eval(lambda *leaves, call, tree, program: program.out_avals)
ad.primitive_jvps[_operator] = _jvp
batching.primitive_batchers[_operator] = _batch
mlir.register_lowering(_operator, mlir.lower_fun(_evaluate, multiple_results=True))

# ---------------------------------------------------------------------------------------------------------- derivatives


def _tangents(call: _Call, outputs: Names, given: Mapping[str, Array], tangents: Mapping[str, Array]):
    """The tangents of outputs. ``given``: inputs and whatever the backward saves."""
    op, attrs = call.op, call.attrs
    if op.backward is not None and not op.backward.has_kernel:
        factors = op.backward.factors(attrs)
        return [reduce(plus, (_times(t, factors.get(f"d{slot}", 1)) for slot, t in tangents.items()))]
    if call.forward is not None and is_bilinear(call.forward, attrs):
        kind, saved = _TangentOfBackward, op.inputs
    elif op.has_gradient:
        kind, saved = _TangentOfProduct if is_bilinear(op, attrs) else _Tangent, op.saved
    else:
        return _tangents_of_formula(op, attrs, outputs, given, tangents)
    types = tuple(_tangent_type(given[s]) for s in outputs)
    residuals = {s: given[s] for s in saved if given[s] is not None}
    return apply_linear(kind(op, call.forward, attrs, outputs, types), residuals, tangents, types)


def _times(x: Array, factor: float) -> Array:
    return x if factor == 1 else (x.astype(accumulate_dtype(x.dtype.name)) * factor).astype(x.dtype)


def _tangent_type(x: Array) -> Any:
    type_of = jax.typeof(x) if hasattr(jax, "typeof") else jax.core.get_aval(x)
    aval = type_of.strip_weak_type()
    return aval.to_tangent_aval() if hasattr(aval, "to_tangent_aval") else aval.at_least_vspace()


def _tangents_of_formula(op, attrs, wanted, given, moving):
    """For an operator without a gradient of its own, such as a backward."""
    if op.formula is None:
        why = "" if op.foreign else ": derivatives of a higher order are not supported"
        raise NotImplementedError(f"{op.name} has no gradient{why}")

    def formula(moving):
        outputs = _composed(op, attrs, wanted, {**given, **moving})
        return [y.astype(given[s].dtype) for s, y in zip(wanted, outputs, strict=True)]

    return jax.jvp(formula, ({s: given[s] for s in moving},), (moving,))[1]


def _composed(op: Op, attrs: Attrs, wanted: Names, given: Mapping[str, Array]) -> tuple[Array, ...]:
    """The wanted outputs, computed by the formula."""
    outputs = compose(_mathematics(op.library), op, attrs, [given[s] for s in op.inputs])
    named = op.with_aliases(dict(zip(op.composed, outputs, strict=True)))
    return tuple(named[s] for s in wanted)


@cache
def _mathematics(library: Library) -> Mathematics:
    return Mathematics(of(library))


@dataclass(frozen=True)
class _LinearMap:
    """A tangent of an operator's ``moved`` outputs, which are of these types. ``forward``: see ``_apply``."""

    op: Op
    forward: Op | None
    attrs: Attrs
    moved: Names
    types: tuple[Any, ...]

    def _run(self, op: Op, inputs: Mapping[str, Array], names: Container[str]) -> dict[str, Array]:
        """These outputs of a product, or of its backward."""
        forward = None if op.backward else self.forward or self.op
        wanted = tuple(y for y in op.outputs if y in names)
        found = _apply(op, self.attrs, wanted, *(inputs.get(slot) for slot in op.inputs), forward=forward)
        return dict(zip(wanted, found, strict=True))

    def _zeros(self, residuals: Mapping[str, Array], tangents: Mapping[str, Array]) -> list[Array | None]:
        """Of the moved outputs, varying as the arguments do."""
        zeros = [jnp.zeros(t.shape, t.dtype) for t in self.types]
        return _vary(zeros, _varying([*residuals.values(), *tangents.values()]))


class _Tangent(_LinearMap):
    """The transpose is the operator's backward. In forward mode it is the derivative of the operator's formula, or the
    transpose of the backward's where an input of that formula is not saved, so as to save no more."""

    def transpose(self, residuals, cotangents, names):
        given = self._given(residuals, dict(zip(self.moved, cotangents, strict=True)))
        if self.op.rule is not None:
            return self._by_rule(given, names)
        backward, wanted = self.op.backward, self._names(names)
        inputs = [given.get(s) for s in backward.inputs]
        found = _apply(backward, self.attrs, wanted, *_vary(inputs, _varying(inputs)), forward=self.op)
        return {d[1:]: ct for d, ct in zip(wanted, found, strict=True)}

    def evaluate(self, residuals, tangents):
        op = self.op
        if op.rule is None and op.backward.formula is None:
            raise TypeError(f"{op.name} has no derivative in forward mode: expected grad or vjp, not jvp")
        given = dict.fromkeys(op.inputs) | residuals
        # XLA:CPU miscompiled the transposed backward of lltm in reverse over forward mode (JAX 0.10)
        if op.formula and all(s in op.saved for s in parameters(op.formula) if s in op.inputs):
            types = dict(zip(self.moved, self.types, strict=True))
            return _tangents_of_formula(op, self.attrs, self.moved, given | types, tangents)
        found, transposed = jax.vjp(partial(self._gradients, residuals, tangents), *self._zeros(residuals, tangents))
        return transposed({slot: tangents[slot] for slot in found})

    def _gradients(self, residuals, inputs, *cotangents) -> dict[str, Array]:
        """The backward as a composition: by input, of its dtype."""
        given = self._given(residuals, dict(zip(self.moved, cotangents, strict=True)))
        if self.op.rule is not None:
            found = self._by_rule(given, inputs)
        else:
            wanted = self._names(inputs)
            given = dict.fromkeys(self.op.backward.inputs) | given
            gradients = _composed(self.op.backward, self.attrs, wanted, given)
            found = {d[1:]: ct for d, ct in zip(wanted, gradients, strict=True)}
        return {slot: ct.astype(inputs[slot].dtype) for slot, ct in found.items()}

    def _given(self, residuals, cotangents):
        zeros = dict.fromkeys(self.op.outputs)
        return residuals | {f"d{y}": ct for y, ct in (zeros | cotangents).items()}

    def _names(self, names) -> Names:
        return tuple(d for d in self.op.backward.outputs if d[1:] in names)

    def _by_rule(self, given, names):
        attrs = dict(zip(self.op.attrs, self.attrs, strict=True))
        slots = dict.fromkeys(self.op.inputs)
        found = self.op.rule(self.op, of(self.op.library), slots | given | attrs)
        return {slot: ct for slot, ct in zip(self.op.inputs, found, strict=True) if slot in names and ct is not None}


class _TangentOfProduct(_Tangent):
    def evaluate(self, residuals, tangents):
        return (bilinear_tangent(_mathematics(self.op.library), self._run, self.op, residuals, tangents),)


class _TangentOfBackward(_LinearMap):
    """Of the backward of a product."""

    def evaluate(self, residuals, tangents):
        m = _mathematics(self.op.library)
        found = backward_tangents(m, self._run, self.forward, residuals, tangents, self.moved)
        zeros = self._zeros(residuals, tangents)
        return tuple(found.get(d, zero) for d, zero in zip(self.moved, zeros, strict=True))

    def transpose(self, residuals, cotangents, names):
        given = dict(zip(self.moved, cotangents, strict=True))
        return backward_cotangents(_mathematics(self.op.library), self._run, self.forward, residuals, given, names)


# ---------------------------------------------------------------------------------------------------------- custom call


def _call(op: Op, attrs: Attrs, wanted: Names, *inputs: Array | None) -> tuple[Array, ...]:
    specs = tuple(None if x is None else TensorSpec(x.shape, x.dtype.name) for x in inputs)
    if any(is_symbolic_dim(dim) for spec in specs if spec for dim in spec.shape):
        return _custom_call(op, attrs, wanted, _symbolic_specs(op, attrs, specs), *inputs)
    infer(op, attrs, specs)  # the library's errors, before those of the statement of axes
    if op.dims is None and not op.elementwise:
        _warn_of_mesh(op, inputs)
    return partitioned(_on_each_platform, op, attrs, wanted, *inputs)


def _on_each_platform(op: Op, attrs: Attrs, wanted: Names, *inputs: Array | None) -> tuple[Array, ...]:
    specs = tuple(None if x is None else TensorSpec(x.shape, x.dtype.name) for x in inputs)
    cpu, cuda = (infer(op, attrs, specs, device) for device in DEVICES)
    calls = [partial(_custom_call, op, attrs, wanted, found) for found in (cpu, cuda)]
    if cpu == cuda:
        return calls[0](*inputs)
    return jax.lax.platform_dependent(*inputs, cpu=calls[0], cuda=calls[1])  # workspaces differ


def _custom_call(
    op: Op, attrs: Attrs, wanted: Names, specs: Mapping[str, TensorSpec], *inputs: Array | None
) -> tuple[Array, ...]:
    """``specs``: of all results; the handler allocates a workspace that they lack."""
    written = [s for s in op.entry_outputs if s in wanted or s in op.workspace or not op.is_optional(s)]
    present = [x is not None for x in inputs] + [s in written for s in op.entry_outputs]
    results = [s for s in written if s in specs]
    for slot in op.outputs if op.foreign else ():
        _check_x64(op, slot, specs[slot].dtype)
    types = [jax.ShapeDtypeStruct(specs[s].shape, specs[s].dtype) for s in results]
    entry = op.entry if op.foreign or op.library is BUILTIN else f"{op.library.name}/{op.entry}"
    texts = {"entry": entry, "attrs": encode(op, attrs, present)}
    if results != written:
        texts["scratch"] = ",".join(op.workspace)
    target = TARGET if results == written else SCRATCH_TARGET
    aliases: dict[str, Any] = {}
    if op.mutates:  # the entry writes to the memory of a further result, where XLA puts the input
        places = {op.inputs.index(slot): len(types) + i for i, slot in enumerate(op.mutates)}
        types += [jax.ShapeDtypeStruct(inputs[i].shape, inputs[i].dtype) for i in places]  # type: ignore[union-attr]
        aliases["input_output_aliases"], texts["aliased"] = places, str(len(places))
        results = [*results, *op.mutates]
    call = ffi.ffi_call(target, types, **aliases)
    outputs = call(*(x for x in inputs if x is not None), **texts)
    named = dict(zip(results, _vary(outputs, _varying(inputs)), strict=True))
    return tuple(named[s] for s in wanted)


def _symbolic_specs(op: Op, attrs: Attrs, specs: Sequence[TensorSpec | None]) -> dict[str, TensorSpec]:
    found = infer_symbolic(op, attrs, specs, lambda dim: UNKNOWN_DIM if is_symbolic_dim(dim) else dim)
    try:
        # XLA removes a call with empty results, so that an invalid shape would not be found at run time.
        fits = all(dim >= 1 for spec in found.values() for dim in spec.shape if is_symbolic_dim(dim))
    except InconclusiveDimensionOperation as error:
        what = str(error).partition("\n")[0].removesuffix(".")
        raise ValueError(f"{op.name}: {what}: give jax.export.symbolic_shape a constraint that decides it") from error
    if not fits:
        shapes = " and ".join(shape_text(spec.shape) for spec in specs if spec)
        raise ValueError(f"{op.name}: shapes {shapes} do not fit")
    return found


def _batched(call: _Call, n: int, batched: Sequence[bool], *inputs: Array | None) -> list[Array]:
    """The batching rule. Outputs that may have another leading axis come from one call, the others from a call for each
    index. XLA removes a call whose results are not used, such as the dweight of a weight that is not trained."""
    op, attrs, wanted = call.op, call.attrs, call.wanted
    apply = partial(_apply, forward=call.forward)
    slots = list(zip(op.inputs, inputs, batched, strict=True))
    ndims = [None if x is None else x.ndim - b for _, x, b in slots]
    at_once = op.takes_batch((slot for slot, _, b in slots if b), ndims)
    together = tuple(s for s in wanted if at_once and s in op.vmappable)
    apart = tuple(s for s in wanted if s not in together)
    results: dict[str, Array] = {}
    if together:
        grow = [x is not None and slot in op.vmappable and not b for slot, x, b in slots]
        grown = [jnp.broadcast_to(x, (n, *x.shape)) if g else x for x, g in zip(inputs, grow, strict=True)]
        results |= zip(together, apply(op, attrs, together, *grown), strict=True)
    if apart:

        def one(rows):
            return apply(op, attrs, apart, *(row if b else x for row, (_, x, b) in zip(rows, slots, strict=True)))

        results |= zip(apart, jax.lax.map(one, tuple(x if b else None for _, x, b in slots)), strict=True)
    return [results[s] for s in wanted]


# ------------------------------------------------------------------------------------------------------ several devices

_warned = False


def _warn_of_mesh(op: Op, inputs: Sequence[Array | None]) -> None:
    """Warns, once in a process, that XLA gathers inputs that several devices share."""
    global _warned
    mesh = mesh_of(inputs)
    manual = getattr(mesh, "manual_axes", ())  # in shard_map each part is an array
    n = 1 if mesh is None else prod(size for axis, size in mesh.shape.items() if axis not in manual)
    if _warned or n == 1:
        return
    _warned = True
    text = f"{op.name}: its definition has no dims: each of {n} devices gathers the inputs and computes all of the"
    warnings.warn(f"{text} result; in jax.shard_map each does its part", ShardingWarning, stacklevel=2)


# ------------------------------------------------------------------------------------------------------------ shard_map
# With check_vma, shard_map tracks the mesh axes along which each array varies. The inputs of a custom call must agree;
# JAX then sums a gradient over the axes along which its input does not vary.


def _varying(arrays: Iterable[Array | None]) -> frozenset[str]:
    types = [typeof(x) for x in arrays if x is not None]
    axes = [t.mat.varying if hasattr(t, "mat") else getattr(t, "vma", ()) for t in types]
    return frozenset().union(*axes)


def _vary(arrays: Iterable[Array | None], axes: frozenset[str]) -> list[Array | None]:
    return [_vary_one(x, tuple(axes - _varying([x]))) if axes and x is not None else x for x in arrays]


def _vary_one(x: Array, axes: tuple[str, ...]) -> Array:
    if not axes:
        return x
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)


globals().update(functions(BUILTIN))


# -------------------------------------------------------------------------------------------------------------- modules


class LLTM(NamedTuple):
    """The cell of PyTorch's tutorial "Custom C++ and CUDA Extensions". It has no state, as is usual in
    JAX: ``init(key)`` returns the parameters, ``apply(parameters, input, (old_h, old_cell))`` new_h and
    new_cell."""

    input_features: int
    state_size: int

    def init(self, key: Array, dtype: Any = jnp.float32) -> dict[str, Array]:
        """``weights`` (3 * state, state + features) and ``bias`` (1, 3 * state), uniform within 1 / sqrt(state)."""
        shapes = {
            "weights": (3 * self.state_size, self.state_size + self.input_features),
            "bias": (1, 3 * self.state_size),
        }
        bound = self.state_size**-0.5
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.uniform(key, shape, dtype, -bound, bound)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def apply(self, parameters: dict[str, Array], input: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        return lltm(input, parameters["weights"], parameters["bias"], *state)  # type: ignore[name-defined] # noqa: F821
