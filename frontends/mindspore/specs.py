"""The specs of a call's tensors, of their values or while a graph is compiled, and what follows from specs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from aotops.hosting import NUMBERS
from aotops.infer import UNKNOWN_DIM, UNKNOWN_RANK
from aotops.op import Op
from aotops.spec import TensorSpec, accumulate_dtype, shape_text


def device() -> str:
    """The device of MindSpore's target; of another target its name, for which there is no entry."""
    target = ms.get_context("device_target")
    return {"CPU": "cpu", "GPU": "cuda"}.get(target, target)


def spec_of(op: Op, slot: str, t: Any) -> TensorSpec | None:
    if t is None:
        return None
    if op.foreign is not None and type(t) in NUMBERS:
        return TensorSpec((), NUMBERS[type(t)])
    if not isinstance(t, Tensor):
        raise TypeError(f"{op.name}: {slot} is {t!r:.40}, expected a mindspore.Tensor")
    if slot in op.mutates and not t.is_contiguous():  # MindSpore would pass a copy
        raise ValueError(f"{op.name}: {slot} is not contiguous, expected a tensor to write to")
    return TensorSpec(tuple(t.shape), dtype_name(t.dtype))


def compiled_spec(op: Op, slot: str, item: dict[str, Any]) -> TensorSpec | None:
    """The spec of an argument during compilation."""
    dtype = item["dtype"]
    if dtype is None:
        return None
    if op.foreign is not None and type(item["value"]) in NUMBERS:
        return TensorSpec((), NUMBERS[type(item["value"])])
    if not isinstance(dtype, ms.dtype.TensorType):
        raise TypeError(f"{op.name}: {slot} is {item['value']!r:.40}, expected a mindspore.Tensor")
    return TensorSpec(tuple(item["shape"]), dtype_name(dtype.element_type()))


def dtype_name(dtype: Any) -> str:
    return str(dtype).lower().replace("float8e", "float8_e")


def zeros_like(x):
    """MindSpore 2.7 has no kernel for it on the CPU in bfloat16."""
    if isinstance(x, Tensor) and x.dtype == ms.bfloat16:
        return ops.zeros_like(x.astype(ms.float32)).astype(ms.bfloat16)
    return ops.zeros_like(x)


class Constant(ops.PrimitiveWithInfer):
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
        specs = [spec_of(self.op, slot, t) for slot, t in zip(self.op.inputs, inputs, strict=True)]
        return self.evaluate(attrs, specs)

    def __infer__(self, attrs, *inputs):
        specs = [compiled_spec(self.op, slot, item) for slot, item in zip(self.op.inputs, inputs, strict=True)]
        return {"dtype": None, "shape": None, "value": self.evaluate(attrs["value"], specs)}


# --------------------------------------------------------------------------------------------------------- broadcasting


def aligner(op: Op) -> Callable[..., Any]:
    common_shape = _CommonShape(op, "common_shape")

    def align(inputs):
        sources, wide = common_shape((), *inputs)
        shape = tuple([inputs[i].shape[axis] for i, axis in sources])
        return tuple([t if w is None else broadcast(t, shape, w) for t, w in zip(inputs, wide)])  # noqa: B905

    def broadcast(t, shape, wide):
        return ops.broadcast_to(t.astype(wide), shape).astype(t.dtype)

    return align


class _CommonShape(Constant):
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
