"""The operators for JAX: each is one XLA custom call, differentiable in reverse mode and batched by vmap.

They work under jit, grad, vmap, scan, cond, checkpoint and shard_map. A program exported with ``jax.export`` needs
``disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(TARGET)]``, and ``register()`` where it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from .. import library
from ..extra import encode
from ..op import Attr, Op
from ..ops import OPS
from ..spec import TensorSpec, shape_text

try:
    from jax import ffi
except ImportError:  # before JAX 0.5
    from jax.extend import ffi

__all__ = ["TARGET", "register", *OPS]

TARGET = "aotops"
"""The name of the custom call."""

Array = Any  # jax.Array, or what jit takes for one
Attrs = tuple[Attr, ...]
Names = tuple[str, ...]


@cache
def register() -> None:
    """Makes the custom call known to XLA. The functions here do so when first called; a process that calls none of
    them, and runs a program loaded by ``jax.export``, has to do so itself.

    Raises:
        LibraryError: the library is missing, does not load, or is of another version.
    """
    # Not at import: a registration that XLA refuses takes the whole of JAX down.
    lib = library.load()
    ffi.register_ffi_target(TARGET, ffi.pycapsule(lib.aot_xla_cpu), platform="cpu")
    # Without CUDA entries too: the handler says so better than XLA would.
    ffi.register_ffi_target(TARGET, ffi.pycapsule(lib.aot_xla_cuda), platform="CUDA")


# ------------------------------------------------------------------------------------------------------------ functions


def _function(op: Op) -> Callable[..., Array]:
    @wraps(op.bind, assigned=("__name__", "__qualname__", "__doc__"))
    def function(*args, **kwargs):
        inputs, attrs = op.bind(*args, **kwargs)
        for slot, x in zip(op.inputs, inputs, strict=True):
            if x is not None and not hasattr(x, "dtype") and not isinstance(x, (int, float, complex)):
                raise TypeError(f"{op.name}: {slot} is a {type(x).__name__}, expected an array")
        return _run(op, attrs, *inputs)

    return function


@partial(jax.jit, static_argnums=(0, 1))  # for eager calls: a bare custom call is set up anew each time
def _run(op: Op, attrs: Attrs, *inputs: Array | None) -> Array:
    register()
    if op.broadcast and all(x is not None for x in inputs):
        inputs = _broadcast(op, inputs)
    with jax.named_scope(op.name):
        outputs = _apply(op, attrs, op.outputs, *_vary(inputs, _varying(inputs)))
    return outputs if len(outputs) > 1 else outputs[0]


def _broadcast(op: Op, inputs: Sequence[Array]) -> Sequence[Array]:
    try:
        return jnp.broadcast_arrays(*inputs)
    except ValueError as error:
        shapes = " and ".join(shape_text(x.shape) for x in inputs)
        raise ValueError(f"{op.name}: shapes {shapes} do not broadcast") from error


# ------------------------------------------------------------------------------------------------------------ gradients


def _apply(op: Op, attrs: Attrs, wanted: Names, *inputs: Array | None) -> tuple[Array, ...]:
    """The wanted outputs of an operator. An alias is JAX's own to differentiate."""
    call = _differentiable if op.has_kernel else _launch
    return call(op, attrs, wanted, *inputs)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(op, attrs, wanted, *inputs):
    return _launch(op, attrs, wanted, *inputs)


def _forward(op, attrs, wanted, *inputs):
    if op.backward is None:
        raise NotImplementedError(f"{op.name} has no gradient: derivatives of a higher order are not supported")
    results = tuple(s for s in op.extra_outputs if s in wanted or s in op.saved)
    given = dict(zip(op.inputs, inputs, strict=True))
    given |= zip(results, _apply(op, attrs, results, *inputs), strict=True)
    # Only arrays and their structure pass from here to the backward: the keys carry which gradients there are to be.
    gradients = {d: None for d in op.backward_outputs(inputs) if d}
    return tuple(given[s] for s in wanted), ([given[s] for s in op.saved], gradients)


def _backward(op, attrs, wanted, left, gradients):
    saved, names = left
    given = dict(zip(op.saved, saved, strict=True))
    given |= {f"d{y}": dy for y, dy in zip(wanted, gradients, strict=True)}
    inputs = [given[s] for s in op.backward.inputs]
    found = dict(zip(names, _apply(op.backward, attrs, tuple(names), *inputs), strict=True))
    return tuple(found.get(f"d{slot}") for slot in op.inputs)


_differentiable.defvjp(_forward, _backward)


# ---------------------------------------------------------------------------------------------------------- custom call


def _launch(op: Op, attrs: Attrs, wanted: Names, *inputs: Array | None) -> tuple[Array, ...]:
    results = dict(zip(op.inputs, inputs, strict=True))
    sources = {op.alias.get(s, s) for s in wanted}
    written = tuple(s for s in op.extra_outputs if s in sources)
    if written:
        call = custom_vmap(partial(_call, op, attrs, written))
        call.def_vmap(partial(_batched, op, attrs, written))
        results |= zip(written, call(*inputs), strict=True)
    results = op.with_aliases(results)
    return tuple(results[s] for s in wanted)


def _call(op: Op, attrs: Attrs, wanted: Names, *inputs: Array | None) -> tuple[Array, ...]:
    specs = op.specs([None if x is None else TensorSpec(x.shape, x.dtype.name) for x in inputs], attrs)
    written = [s for s in op.extra_outputs if s in wanted or s in op.workspace or not op.is_optional(s)]
    present = [x is not None for x in inputs] + [s in written for s in op.extra_outputs]
    types = [jax.ShapeDtypeStruct(specs[s].shape, specs[s].dtype) for s in written]
    call = ffi.ffi_call(TARGET, types)
    outputs = call(*(x for x in inputs if x is not None), entry=f"aot_{op.name}", attrs=encode(op, attrs, present))
    results = dict(zip(written, _vary(outputs, _varying(inputs)), strict=True))
    return tuple(results[s] for s in wanted)


def _batched(op: Op, attrs: Attrs, wanted: Names, n: int, batched: Sequence[bool], *inputs: Array | None):
    """vmap's rule. Outputs that may carry one more leading axis come from one call, the others from a call for each
    index. XLA drops whichever nobody uses, such as the dweight of a weight that is not trained."""
    slots = list(zip(op.inputs, inputs, batched, strict=True))
    ndims = [None if x is None else x.ndim - b for _, x, b in slots]
    at_once = op.takes_batch((slot for slot, _, b in slots if b), ndims)
    together = tuple(s for s in wanted if at_once and s in op.batched)
    apart = tuple(s for s in wanted if s not in together)
    results: dict[str, Array] = {}
    if together:
        grow = [x is not None and slot in op.batched and not b for slot, x, b in slots]
        grown = [jnp.broadcast_to(x, (n, *x.shape)) if g else x for x, g in zip(inputs, grow, strict=True)]
        results |= zip(together, _launch(op, attrs, together, *grown), strict=True)
    if apart:

        def one(rows):
            return _launch(op, attrs, apart, *(row if b else x for row, (_, x, b) in zip(rows, slots, strict=True)))

        results |= zip(apart, jax.lax.map(one, tuple(x if b else None for _, x, b in slots)), strict=True)
    return tuple(results[s] for s in wanted), (True,) * len(wanted)


# ------------------------------------------------------------------------------------------------------------ shard_map
# A shard_map that checks (check_vma) knows along which mesh axes each array varies. A custom call wants its inputs to
# agree; JAX then sums a gradient over the axes along which its input did not vary.


def _varying(arrays: Iterable[Array | None]) -> frozenset[str]:
    types = [jax.typeof(x) for x in arrays if x is not None] if hasattr(jax, "typeof") else []
    axes = [t.mat.varying if hasattr(t, "mat") else getattr(t, "vma", ()) for t in types]
    return frozenset().union(*axes)


def _vary(arrays: Iterable[Array | None], axes: frozenset[str]) -> list[Array | None]:
    return [_vary_one(x, tuple(axes - _varying([x]))) if axes and x is not None else x for x in arrays]


def _vary_one(x: Array, axes: tuple[str, ...]) -> Array:
    if not axes:
        return x
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)


globals().update({name: _function(op) for name, op in OPS.items()})
