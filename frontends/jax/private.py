"""The private names of JAX that this frontend uses, and public names that have moved between versions of JAX. No other
file has either."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import dispatch

try:
    from jax.errors import InconclusiveDimensionOperation as InconclusiveDimensionOperation
except ImportError:  # older JAX
    from jax.core import InconclusiveDimensionOperation as InconclusiveDimensionOperation
try:
    from jax import ffi as ffi
except ImportError:  # before JAX 0.5
    from jax.extend import ffi as ffi
try:
    from jax.extend.core import unmapped_aval
except ImportError:  # older JAX, which does not export it everywhere
    from jax._src.core import unmapped_aval
try:
    from jax.export import is_symbolic_dim as is_symbolic_dim
except ModuleNotFoundError:  # JAX 0.4 without absl-py, which jax.export imports: then no dimension is symbolic

    def is_symbolic_dim(dim: object) -> bool:
        return False


_PARTITIONED = getattr(dispatch, "prim_requires_devices_during_lowering", None)
LACKS = () if _PARTITIONED is not None else ("jax._src.dispatch.prim_requires_devices_during_lowering",)
"""The private names that this version of JAX does not have. Without this one XLA gathers what gradients take."""


def needs_devices(primitive: Any) -> None:
    """Has JAX find out the devices before it lowers a primitive whose lowering may have a custom_partitioning, which it
    looks for in jaxprs alone."""
    if _PARTITIONED is not None:
        _PARTITIONED.add(primitive)


def with_leading_axis(size: int, type: Any) -> Any:
    """The abstract value of a batch."""
    try:
        return unmapped_aval(size, 0, type)
    except TypeError:  # older JAX, which takes the axis's name too
        return unmapped_aval(size, None, 0, type)


def typeof(x: Any) -> Any:
    """JAX's type of an array; None before JAX 0.6, whose types tell no sharding."""
    return jax.typeof(x) if hasattr(jax, "typeof") else None


def tangent_type(x: Any) -> Any:
    """The type of a tangent of an array."""
    aval = (jax.typeof(x) if hasattr(jax, "typeof") else jax.core.get_aval(x)).strip_weak_type()
    return aval.to_tangent_aval() if hasattr(aval, "to_tangent_aval") else aval.at_least_vspace()


def varying_axes(x: Any) -> Any:
    """The mesh axes along which an array varies, as shard_map tracks them."""
    t = typeof(x)
    return t.mat.varying if hasattr(t, "mat") else getattr(t, "vma", ())


def as_varying(x: Any, axes: tuple[str, ...]) -> Any:
    """An array that varies along more mesh axes."""
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)
