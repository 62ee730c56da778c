"""Specs of tensors: shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

DEVICES = ("cpu", "cuda")
FLOATING = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "int64")
DTYPES = (
    *FLOATING, *INTEGERS, "bool", "int8", "int16", "uint8", "uint16", "uint32", "uint64", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""Every dtype of the calling convention; those of the built-in operators first."""


class TensorSpec(NamedTuple):
    """A tensor without its data. A dimension may be symbolic (a torch.SymInt, a jax.export dimension)."""

    shape: tuple[int, ...]
    dtype: str


def dtype_name(dtype: Any) -> str:
    """The name of a framework's dtype, or of one that is given by name."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    return name.rpartition(".")[2].lower()


def accumulate_dtype(dtype: str) -> str:
    """The dtype of statistics and sums of a tensor."""
    return "float64" if dtype == "float64" else "float32"


def shape_text(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def check_like(op: str, slot: str, spec: TensorSpec, model_slot: str, model: TensorSpec) -> None:
    """For an operator without a kernel: no entry checks its calls."""
    if spec.dtype != model.dtype:
        raise TypeError(f"{op}: {slot} has dtype {spec.dtype}, expected {model.dtype}")
    if spec.shape != model.shape:
        raise ValueError(
            f"{op}: {slot} has shape {shape_text(spec.shape)}, expected {shape_text(model.shape)}, "
            f"the shape of {model_slot}"
        )


def check_broadcast(op: str, slots: Sequence[str], specs: Sequence[TensorSpec]) -> None:
    """Raises ValueError if a shape does not broadcast with the first one."""
    for slot, spec in zip(slots[1:], specs[1:], strict=True):
        pairs = zip(reversed(specs[0].shape), reversed(spec.shape), strict=False)
        if any(a != b and a != 1 and b != 1 for a, b in pairs):
            raise ValueError(
                f"{op}: {slot} has shape {shape_text(spec.shape)}, which does not broadcast with "
                f"{shape_text(specs[0].shape)}, the shape of {slots[0]}"
            )


def check_devices(op: str, slots: Sequence[str], tensors: Sequence[Any]) -> None:
    """Raises ValueError unless all tensors that are given are on one device."""
    first, *others = [(slot, t) for slot, t in zip(slots, tensors, strict=True) if t is not None]
    for slot, t in others:
        if t.device != first[1].device:
            raise ValueError(f"{op}: {slot} is on {t.device}, expected {first[1].device}, the device of {first[0]}")
