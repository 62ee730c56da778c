"""The functions of a library's operators: their arguments, and the jit that eager calls run in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aotops.hosting import NUMBERS, Namespace
from aotops.library import Library
from aotops.op import Op
from aotops.spec import shape_text

from .custom_call import check_x64, register, vary, varying
from .primitive import apply
from .private import is_symbolic_dim
from .sharding import Array, Attrs, aligned


def functions(library: Library, module: str = __package__) -> dict[str, Callable[..., Array]]:
    """The functions of a library's operators. ``module``: where they are found, for pickle."""
    return {name: function_of(op, module) for name, op in library.ops.items()}


@cache
def of(library: Library) -> Namespace:
    """The functions of a library's operators as a module, each made when it is first asked for: those that are defined
    later too. An operator that writes to inputs returns their new values after its outputs: JAX's arrays stay as they
    are."""
    return Namespace(library, "jax", lambda op, module: {op.name: function_of(op, module)})


def function_of(op: Op, module: str) -> Callable[..., Array]:
    @wraps(op.bind, assigned=("__name__", "__qualname__", "__doc__"))
    def function(*args, **kwargs):
        inputs, attrs = _bind(op, args, kwargs)
        return _jitted(op, attrs, *inputs)

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
    check_x64(op, slot, NUMBERS[type(x)])
    return jnp.asarray(x, NUMBERS[type(x)])


@partial(jax.jit, static_argnums=(0, 1))  # for eager calls: without jit, each would compile the custom call again
def _jitted(op: Op, attrs: Attrs, *inputs: Array | None) -> Array:
    register(op.library)
    alike = op.broadcast and all(x is not None for x in inputs)
    arrays = aligned(op, attrs, _broadcast(op, inputs) if alike else inputs)
    with jax.named_scope(op.name):
        outputs = apply(op, attrs, (*op.outputs, *op.mutates), *vary(arrays, varying(arrays)))
    return outputs if len(outputs) > 1 else outputs[0]


def _broadcast(op: Op, inputs: Sequence[Any]) -> Sequence[Array]:
    try:
        return jnp.broadcast_arrays(*inputs)
    except ValueError as error:
        shapes = " and ".join(shape_text(x.shape) for x in inputs)
        raise ValueError(f"{op.name}: shapes {shapes} do not broadcast") from error
