"""Tensors as the definitions see them, and an entry's call on tensors that have memory.

A plain call, and a call of the dispatcher whose kernels are in C, do not come here (cuda_src/host): only their errors,
results for other devices than a kernel's (fake, meta), and before torch 2.10 the call itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotops.call import addresses
from aotops.call import tensors as launcher
from aotops.infer import UNKNOWN_DIM, infer, infer_symbolic
from aotops.op import Attr, Op
from aotops.spec import DTYPES as NAMES
from aotops.spec import TensorSpec, check_devices

from . import call, gate, private

Tensors = Sequence[Any]
"""A tensor, or None, for each slot."""
DTYPES = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

READS_TENSORS = call.set_up(gate.facts())
"""Whether C takes tensors: from torch 2.10 on. Else entries are called by address, and every call by the dispatcher."""
is_plain: Callable[..., bool] | None = call.gate() if READS_TENSORS else None
"""Whether a call on these tensors is plain, with autocast on or off."""

is_compiling = torch.compiler.is_dynamo_compiling

KEEP_RESIDUALS_FROM = 1 << 18
"""Elements of a CUDA tensor from which the forward keeps residuals. For smaller ones, and on the CPU, allocating them
costs more than recomputing them."""

_NONE: Mapping[str, Tensor] = {}


def is_number(eps: object) -> bool:
    """Whether it is an epsilon to compute with, as one of np.float64, which is a float, too. A tensor may want a
    gradient; a bool is torch's to take or refuse."""
    return isinstance(eps, (float, int)) and not isinstance(eps, bool)


# --------------------------------------------------------------------------------------------------------------- specs


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spec_of(t: Tensor | None) -> TensorSpec | None:
    return None if t is None else TensorSpec(tuple(t.shape), name_of(t.dtype))


def specs_of(op: Op, attrs: tuple[Any, ...], inputs: Tensors) -> dict[str, TensorSpec]:
    """The spec of every output and residual, for dimensions that may be symbolic."""
    return inferred(op, attrs, tuple(map(spec_of, inputs)), inputs[0].device.type)


def inferred(
    op: Op, attrs: tuple[Any, ...], specs: tuple[TensorSpec | None, ...], device: str
) -> dict[str, TensorSpec]:
    """``specs_of`` where there are no tensors of these shapes."""
    if is_symbolic(attrs) or is_symbolic([spec.shape for spec in specs if spec]):
        return infer_symbolic(op, attrs, specs, _hint, device)
    return infer(op, op.canonical(attrs), specs, device)


def is_symbolic(values: Sequence[Any]) -> bool:
    """Whether one of the values, or of the elements of one that is a sequence, is symbolic."""
    parts = (part for v in values for part in (v if isinstance(v, (tuple, list)) else (v,)))
    return any(isinstance(part, SYMBOLIC) for part in parts)


def _hint(dim: Any) -> int:
    """The value that torch traces a symbolic dimension with. Comparing it adds no guard."""
    if not isinstance(dim, torch.SymInt):
        return dim
    return dim.node.hint if dim.node.has_hint() else UNKNOWN_DIM


def all_given(inputs: Tensors) -> bool:
    return all(t is not None for t in inputs)


def check_tensors(op: Op, inputs: Tensors) -> None:
    for slot, t in zip(op.inputs, inputs, strict=True):
        if t is None and slot in op.optional:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op.name}: {slot} is {t!r:.40}, expected a torch.Tensor")
        if kind := odd_kind(t):
            raise TypeError(f"{op.name}: {slot} is {kind}, expected a strided tensor")
        if private.is_batched(t) and private.level_of(t) > (private.current_level() or 0):
            raise RuntimeError(f"{op.name}: {slot} is a tensor of a vmap that has ended, expected one from outside")


def odd_kind(t: Any) -> str:
    """The kind of a tensor that no kernel and no composition takes, or nothing."""
    if not isinstance(t, Tensor):
        return ""
    if t.is_nested or t.is_quantized:
        return "a nested tensor" if t.is_nested else "a quantized tensor"
    return "" if t.layout == torch.strided else f"a tensor of layout {t.layout}"


def is_known(*tensors: Tensor) -> bool:
    """Whether an operator computes what torch's do: not of a nested, sparse or quantized tensor, nor of a class of
    others', such as a quantized weight's, which gives each of torch's operators a meaning of its own."""
    if is_plain is not None and not is_compiling() and is_plain(*tensors):
        return True
    for t in tensors:
        if odd_kind(t) or (type(t) not in PLAIN_TYPES and not type(t).__module__.startswith(private.KNOWN_TENSORS)):
            return False
    return True


def empty_arguments(spec: TensorSpec) -> dict[str, Any]:
    """The arguments of ``torch.empty``."""
    return {"size": spec.shape, "dtype": DTYPES[spec.dtype]}


def prototypes(
    op: Op, attrs: tuple[Attr, ...], *inputs: Any, channels_last: Container[str] = ()
) -> tuple[Tensor | None, ...] | None:
    """For each output that is not like an input, a tensor for ``empty_like``, without memory: a CUDA graph's pool must
    hold none that is not of its own tensors. None if the operator refuses the inputs: a composition may serve them
    (compositions.py). ``channels_last``: slots that the operator has with their second axis as their last."""

    def spec_in(slot: str, t: Tensor | None) -> TensorSpec | None:
        return spec_of(t.movedim(1, -1) if t is not None and slot in channels_last else t)

    try:
        specs = infer(op, attrs, tuple(map(spec_in, op.inputs, inputs)), inputs[0].device.type)
    except (TypeError, ValueError):
        return None
    device = inputs[0].device

    def one(slot: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        shape = (*shape[:1], *shape[-1:], *shape[1:-1]) if slot in channels_last else shape
        made = torch.empty_strided(shape, (0,) * len(shape), dtype=DTYPES[dtype], device=device)
        made.untyped_storage().resize_(0)
        return made

    return tuple(None if y in op.same_spec_as else one(y, specs[y].shape, specs[y].dtype) for y in op.entry_outputs)


# ------------------------------------------------------------------------------------------------------------- results


def results_of(value: Any) -> tuple:
    """The results of a call, as a tuple."""
    return () if value is None else tuple(value) if isinstance(value, (tuple, list)) else (value,)


def packed(results: Sequence[Any]):
    """The results as the dispatcher returns them."""
    return results[0] if len(results) == 1 else tuple(results) or None


def public_outputs(op: Op, written: Sequence[Tensor]):
    """The outputs as a public function returns them: None if the operator only writes to its inputs."""
    return packed(written[: len(op.outputs)])


# ------------------------------------------------------------------------------------------------------------- running


def run(
    op: Op, inputs: Tensors, attrs: tuple[Attr, ...], wanted: Sequence[str], into: Mapping[str, Tensor] = _NONE
) -> tuple[Tensor | None, ...]:
    """Runs the entry on tensors that have memory. Returns each output and residual, None for one that is not wanted.
    ``into``: contiguous tensors to write results to."""
    names = {*(op.alias.get(name, name) for name in wanted), *op.workspace}
    names |= {y for y in op.outputs if y not in op.optional}
    device = inputs[0].device
    written = _written(op, attrs, device.type, tuple([None if t is None else (t.shape, t.dtype) for t in inputs]))
    check_devices(op.name, op.inputs, inputs)
    for slot, t in zip(op.inputs, inputs, strict=True):
        if t is not None and t.numel() and not t.data_ptr():
            raise RuntimeError(f"{op.name}: {slot} has no memory: its storage was freed")
    if op.elementwise and (strides := common_strides(inputs)):
        return _run_elementwise(op, inputs, attrs, names, strides)
    plain = [None if t is None else plain_tensor(t) for t in inputs]
    results = [
        into[name] if name in into else torch.empty(**written[name], device=device) if name in names else None
        for name in op.entry_outputs
    ]
    _launcher(op, attrs)(*plain, *results)
    for slot, t, used in zip(op.inputs, inputs, plain, strict=True) if op.mutates else ():
        if slot in op.mutates and t is not used:
            t.copy_(used)
    return tuple(results[: len(op.results)])


def plain_tensor(t: Tensor) -> Tensor:
    """A contiguous Tensor. Subclasses that only override __torch_function__ come here too."""
    t = t.contiguous().resolve_neg()
    return t if type(t) in PLAIN_TYPES else t.as_subclass(Tensor)


def common_strides(inputs: Tensors) -> tuple[int, ...] | None:
    """The strides that torch gives the result of an elementwise operator; None if it is contiguous."""
    if all(t is None or t.is_contiguous() for t in inputs):
        return None
    return private.elementwise_strides([t for t in inputs if t is not None])


@functools.lru_cache(maxsize=4096)
def _written(op: Op, attrs: tuple[Attr, ...], device: str, given: tuple[tuple[torch.Size, torch.dtype] | None, ...]):
    """The arguments of ``torch.empty`` for everything that an entry writes."""
    specs = tuple(g and TensorSpec(tuple(g[0]), name_of(g[1])) for g in given)
    return {name: empty_arguments(spec) for name, spec in infer(op, attrs, specs, device).items()}


def _run_elementwise(
    op: Op, inputs: Tensors, attrs: tuple[Attr, ...], names: Container[str], strides: tuple[int, ...]
) -> tuple[Tensor | None, ...]:
    """Runs the entry on tensors of the same strides, without gaps, as vectors."""
    model = inputs[0]

    def laid_out(t: Tensor | None) -> Tensor | None:
        t = t if t is None else t.resolve_neg()
        if t is None or t.stride() == strides:
            return t
        return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)

    def vector(t: Tensor | None) -> Tensor | None:
        return t if t is None else plain_tensor(t.as_strided((t.numel(),), (1,)))

    given = [laid_out(t) for t in inputs]
    results = [
        torch.empty_strided(model.shape, strides, dtype=model.dtype, device=model.device) if name in names else None
        for name in op.entry_outputs
    ]
    _launcher(op, attrs)(*map(vector, given), *map(vector, results))
    return tuple(results)


def _launcher(op: Op, attrs: tuple[Attr, ...]) -> Callable[..., None]:
    """A function of one tensor, or None, for each slot."""
    return launcher(op, attrs) if READS_TENSORS else functools.partial(_by_address, op, attrs)


def _by_address(op: Op, attrs: tuple[Attr, ...], *tensors: Tensor | None) -> None:
    given = [t for t in tensors if t is not None]
    device = given[0].device
    run = addresses(op, attrs, device.type, tuple(map(spec_of, tensors)))
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    run(device.index or 0, stream, *(t.data_ptr() for t in given))
