"""PyTorch: CPU and CUDA tensors, differentiable, on the current stream.

A call takes one of three ways, the first that serves it:

- plain eager tensors: straight to the kernel, and, where a gradient is wanted, through ``autograd.Function``'s own C
  entry, which costs a quarter of its Python wrapper;
- inside ``torch.func`` transforms: an ``autograd.Function`` of the kind that they understand, with a vmap rule;
- everything else (``torch.compile``, ``export``, fake and meta tensors, subclasses, modes): an operator of
  ``torch.library``, ``torch.ops.aotops.<op>``.

The backward is not itself differentiable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor

from aotops import call
from aotops.frontends import torch_inductor
from aotops.op import Attr, Op
from aotops.ops import OPS
from aotops.spec import TensorSpec, check_broadcast

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_READS_TENSORS = call.read_torch(torch)

KEEP_RESIDUALS_FROM = 1 << 18
"""Elements of a CUDA tensor from which the forward keeps what the backward would else compute again. Below, and on the
CPU, to allocate it costs more than to compute it."""

Tensors = Sequence["Tensor | None"]


# ------------------------------------------------------------------------------------------------------------- running


def _spec(t: Tensor | None) -> TensorSpec | None:
    return None if t is None else TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))


@functools.cache
def _launcher(op: Op, attrs: tuple[Attr, ...]) -> Callable[..., None]:
    """A function of one tensor, or None, for each slot."""
    return call.tensors(op, attrs) if _READS_TENSORS else functools.partial(_by_address, op, attrs)


def _by_address(op: Op, attrs: tuple[Attr, ...], *tensors: Tensor | None) -> None:
    given = [t for t in tensors if t is not None]
    device = given[0].device
    if any(not t.is_contiguous() or t.device != device for t in given):
        raise ValueError(f"{op.name}: tensors must be contiguous and on one device")
    run = call.addresses(op, attrs, device.type, tuple(map(_spec, tensors)))
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    run(device.index or 0, stream, *(t.data_ptr() for t in given))


def _plain(t: Tensor) -> Tensor:
    """Contiguous, and a Tensor itself: a subclass that only has another __torch_function__ arrives as it is."""
    t = t.contiguous().resolve_neg()
    return t if type(t) in _PLAIN else t.as_subclass(Tensor)


def _check_devices(op: Op, inputs: Tensors) -> None:
    given = [(slot, t) for slot, t in zip(op.inputs, inputs, strict=True) if t is not None]
    first, device = given[0][0], given[0][1].device
    for slot, t in given:
        if t.device != device:
            raise ValueError(f"{op.name}: {slot} is on {t.device}, expected {device}, the device of {first}")


_REFUSALS = (TypeError, ValueError, AttributeError, BufferError, RuntimeError)
"""What a call raises that does not get its tensors as it wants them."""


@functools.lru_cache(maxsize=4096)
def _written(op: Op, attrs: tuple[Attr, ...], given: tuple[tuple[torch.Size, torch.dtype] | None, ...]):
    """The arguments of ``torch.empty`` for everything that an entry writes."""
    specs = op.specs([g and TensorSpec(tuple(g[0]), str(g[1]).removeprefix("torch.")) for g in given], attrs)
    return {name: _empty_arguments(spec) for name, spec in specs.items()}


def _empty_arguments(spec: TensorSpec) -> dict[str, Any]:
    return {"size": spec.shape, "dtype": _DTYPES[spec.dtype]}


def _allocate(op: Op, attrs: tuple[Attr, ...], inputs: Tensors, names: Container[str]) -> list[Tensor | None]:
    """One tensor for each of ``op.extra_outputs``, None for those that are not among ``names``."""
    written = _written(op, attrs, tuple([None if t is None else (t.shape, t.dtype) for t in inputs]))
    device = inputs[0].device
    return [torch.empty(**written[name], device=device) if name in names else None for name in op.extra_outputs]


def _models(op: Op, attrs: tuple[Attr, ...], *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """Tensors for ``empty_like``, each with the memory of one element, for what is not like an input."""
    specs = op.specs([_spec(t) for t in inputs], attrs)
    arguments = {name: _empty_arguments(specs[name]) for name in op.extra_outputs if name not in op.like}
    for one in arguments.values():
        one["stride"] = (0,) * len(one["size"])
    device = inputs[0].device
    return tuple(
        torch.empty_strided(**arguments[name], device=device) if name in arguments else None
        for name in op.extra_outputs
    )


def _write(op: Op, inputs: Tensors, attrs: tuple[Attr, ...], names: Container[str]) -> tuple[Tensor | None, ...]:
    written = _allocate(op, attrs, inputs, names)
    _launcher(op, attrs)(*inputs, *written)
    return tuple(written[: len(op.results)])


def _run(op: Op, inputs: Tensors, attrs: tuple[Attr, ...], wanted: Sequence[str]) -> tuple[Tensor | None, ...]:
    """Any inputs that the operator takes. One result for each output and residual, None where it is not wanted."""
    names = {*(op.alias.get(name, name) for name in wanted), *op.workspace}
    names |= {y for y in op.outputs if y not in op.optional}
    try:
        return _write(op, inputs, attrs, names)
    except _REFUSALS:
        pass
    for slot, t in zip(op.inputs, inputs, strict=True):
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{op.name}: {slot} is a {type(t).__name__}, expected a torch.Tensor")
    op.specs([_spec(t) for t in inputs], attrs)
    _check_devices(op, inputs)
    return _write(op, [None if t is None else _plain(t) for t in inputs], attrs, names)


def _run_backward(op: Op, saved: Tensors, grads: Tensors, attrs: tuple[Attr, ...], needed: Sequence[bool], run=_run):
    """One gradient, or None, for each input of ``op``."""
    backward = op.backward
    assert backward is not None
    if not any(needed):
        return (None,) * len(needed)
    given = dict(zip((f"d{y}" for y in op.outputs), grads, strict=True)) | dict(zip(op.saved, saved, strict=True))
    if backward.has_kernel:
        wanted = [f"d{x}" for x, need in zip(op.inputs, needed, strict=True) if need]
        results = run(backward, [given[s] for s in backward.inputs], attrs, wanted)
        given |= zip(backward.results, results, strict=True)
    given = backward.with_aliases(given)
    return tuple(given.get(f"d{x}") if need else None for x, need in zip(op.inputs, needed, strict=True))


# --------------------------------------------------------------------------------------------------------- plain eager


class _Eager:
    """An operator bound to its attributes, for plain tensors. Nothing is checked here: the entry does, and ``_general``
    has another look at what it refuses."""

    def __init__(self, op: Op, attrs: tuple[Attr, ...]) -> None:
        self.op, self.attrs = op, attrs
        self.without_residuals = {*op.outputs, *op.workspace}
        self.run, forward = self._run, self._forward
        backward = torch.autograd.function.once_differentiable(self._backward)
        if _READS_TENSORS:
            builtins = call.function(op, attrs, _models, KEEP_RESIDUALS_FROM, backward)
            self.run, forward = builtins.run, builtins.forward
        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        function = type(op.name.title().replace("_", ""), (torch.autograd.Function,), members)
        # without the Python wrapper, which serves torch.func
        self.apply = super(torch.autograd.Function, function).apply
        if _READS_TENSORS:
            if builtins.backward:
                function._backward_cls.apply = builtins.backward  # without the one that looks for members["backward"]
            self.differentiable = call.differentiable(builtins, self.apply)

    def _run(self, *inputs: Tensor | None):
        op = self.op
        results = _write(op, inputs, self.attrs, self.without_residuals)
        return _visible(op, results)

    def _forward(self, ctx, *inputs: Tensor | None):
        op, x = self.op, inputs[0]
        keep = op.costly or (x.is_cuda and x.numel() > KEEP_RESIDUALS_FROM)
        results = _write(op, inputs, self.attrs, op.extra_outputs if keep else self.without_residuals)
        named = dict(zip((*op.inputs, *op.results), (*inputs, *results), strict=True))
        ctx.save_for_backward(*(named[slot] for slot in op.saved))
        return _visible(op, results)

    def _backward(self, ctx, *grads: Tensor):
        return _run_backward(self.op, ctx.saved_tensors, grads, self.attrs, ctx.needs_input_grad)


@functools.cache
def _eager(op: Op, attrs: tuple[Attr, ...]) -> _Eager:
    return _Eager(op, attrs)


def _visible(op: Op, written: Sequence[Tensor]):
    return written[0] if len(op.outputs) == 1 else tuple(written[: len(op.outputs)])


# ---------------------------------------------------------------------------------------------------------- torch.func


class _Transformable(torch.autograd.Function):
    """Gives outputs and residuals: what a later backward needs must be among the results."""

    @staticmethod
    def forward(op, attrs, wanted, *inputs):
        return _run(op, inputs, attrs, wanted)

    @staticmethod
    def setup_context(ctx, inputs, output):
        op, attrs, _, *tensors = inputs
        named = dict(zip((*op.inputs, *op.results), (*tensors, *output), strict=True))
        ctx.op, ctx.attrs = op, attrs
        ctx.save_for_backward(*(named[slot] for slot in op.saved))
        ctx.mark_non_differentiable(*(named[slot] for slot in op.residuals))

    @staticmethod
    def backward(ctx, *grads):
        op = ctx.op
        if op.backward is None:
            raise RuntimeError(f"{op.name}: the backward of this operator is not differentiable")
        dys = grads[: len(op.outputs)]
        grads = _run_backward(op, ctx.saved_tensors, dys, ctx.attrs, ctx.needs_input_grad[3:], _transformed)
        return None, None, None, *grads

    @staticmethod
    def vmap(info, in_dims, op, attrs, wanted, *inputs):
        def run(*tensors):
            return _transformed(op, tensors, attrs, wanted)

        return _batch(op, info.batch_size, in_dims[3:], inputs, wanted, run)


def _transformed(op: Op, inputs: Tensors, attrs: tuple[Attr, ...], wanted: Sequence[str]):
    return _Transformable.apply(op, attrs, tuple(wanted), *inputs)


def _batch(op: Op, size: int, dims: Sequence[int | None], inputs: Tensors, wanted: Sequence[str], run):
    """vmap's rule: one call with a leading axis where every slot in question may have one, else a call an example."""
    batched = {slot for slot, dim in zip(op.inputs, dims, strict=True) if dim is not None}
    ndims = [None if t is None else t.dim() - (dim is not None) for t, dim in zip(inputs, dims, strict=True)]
    if op.takes_batch({*batched, *wanted}, ndims):
        moved = [
            t if t is None or slot not in op.batched
            else t.movedim(dim, 0) if dim is not None
            else t.expand(size, *t.shape)
            for slot, t, dim in zip(op.inputs, inputs, dims, strict=True)
        ]  # fmt: skip
        results = run(*moved)
    else:
        examples = [
            run(*(t if dim is None else t.select(dim, i) for t, dim in zip(inputs, dims, strict=True)))
            for i in range(size)
        ]
        results = tuple(None if r[0] is None else torch.stack(r) for r in zip(*examples, strict=True))
    return results, tuple(None if r is None else 0 for r in results)


# -------------------------------------------------------------------------------------------------------- torch.library

_library = torch.library.Library("aotops", "DEF")


def _register(op: Op) -> Callable[..., Any]:
    """``torch.ops.aotops.<op>``: gives every output and residual."""
    written = op.results
    tensors = [f"Tensor{'?' if slot in op.optional else ''} {slot}" for slot in op.inputs]
    attrs = [f"{kind} {name}" for name, kind in op.attrs.items()]
    returns = "Tensor" if len(written) == 1 else f"({', '.join(['Tensor'] * len(written))})"
    _library.define(f"{op.name}({', '.join(tensors + attrs)}) -> {returns}")
    n = len(op.inputs)

    def split(args):
        return args[:n], tuple(tuple(a) if isinstance(a, list) else a for a in args[n:])

    def pack(results):
        return results[0] if len(written) == 1 else tuple(results)

    def kernel(*args):
        inputs, attrs = split(args)
        return pack(_run(op, inputs, attrs, written))

    def fake(*args):
        inputs, attrs = split(args)
        specs = op.specs([_spec(t) for t in inputs], attrs)
        _check_devices(op, inputs)
        return pack([torch.empty(**_empty_arguments(specs[name]), device=inputs[0].device) for name in written])

    def vmap(info, dims, *args):
        inputs, attrs = split(args)
        results, out_dims = _batch(
            op, info.batch_size, dims[:n], inputs, written, lambda *t: _results(disp(*t, *attrs))
        )
        return pack(results), pack(out_dims)

    def setup_context(ctx, inputs, output):
        tensors, ctx.attrs = split(inputs)
        named = dict(zip((*op.inputs, *written), (*tensors, *_results(output)), strict=True))
        ctx.save_for_backward(*(named[slot] for slot in op.saved))

    def backward(ctx, *grads):
        def run(backward_op, inputs, attrs, wanted):
            return _results(dispatched[backward_op.name](*inputs, *attrs))

        needed = ctx.needs_input_grad[:n]
        grads = _run_backward(op, ctx.saved_tensors, grads[: len(op.outputs)], ctx.attrs, needed, run)
        return *(g if need else None for g, need in zip(grads, needed, strict=True)), *(None for _ in op.attrs)

    name = f"aotops::{op.name}"
    for device in ("CPU", "CUDA"):
        _library.impl(op.name, kernel, device)
    disp = getattr(torch.ops.aotops, op.name).default
    torch.library.register_fake(name, fake, lib=_library)
    torch.library.register_vmap(name, vmap, lib=_library)
    if op.backward is not None:
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=_library)
    return disp


def _results(value) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


dispatched: dict[str, Callable[..., Any]] = {}
for _op in OPS.values():
    for _one in (_op.backward, _op):
        if _one is not None and _one.has_kernel:
            dispatched[_one.name] = _register(_one)
torch_inductor.register(dispatched.values())


# ----------------------------------------------------------------------------------------------------- public functions

_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_is_compiling = torch.compiler.is_dynamo_compiling
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_autocast_enabled = torch._C._is_any_autocast_enabled
_grad_enabled = torch.is_grad_enabled


def _public(op: Op) -> Callable[..., Any]:
    disp = dispatched[op.name]

    def general(*args, **kwargs):
        return _general(op, disp, *op.bind(*args, **kwargs))

    def bind(*attrs):
        named = dict.fromkeys(op.inputs) | dict(zip(op.attrs, attrs, strict=True))
        return _eager(op, op.bind(**named)[1]).differentiable

    plain = call.public(op, bind, _REFUSALS, general) if _READS_TENSORS else _plain_first(op, disp)

    @functools.wraps(op.bind)
    def function(*args, **kwargs):
        if _is_compiling():
            inputs, attrs = op.bind(*args, **kwargs)
            return _dispatch(op, disp, inputs, attrs)
        return plain(*args, **kwargs)

    if _READS_TENSORS:
        call.serve(function, plain)
    return function


def _plain_first(op: Op, disp: Callable[..., Any]) -> Callable[..., Any]:
    """What ``call.public`` is, in Python."""

    def function(*args, **kwargs):
        inputs, attrs = op.bind(*args, **kwargs)
        if not (_dispatch_modes() or (op.autocast and _autocast_enabled())):
            # Subclasses, wrappers of torch.func, strides, broadcasts: the entry refuses all that is not plain.
            try:
                eager = _eager(op, attrs)
                grad = _grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
                return eager.apply(*inputs) if grad else eager.run(*inputs)
            except _REFUSALS:
                pass
        return _general(op, disp, inputs, attrs)

    return function


def _general(op: Op, disp: Callable[..., Any], inputs: Tensors, attrs: tuple[Attr, ...]):
    """What plain eager does not take as it is. Raises for what the operator does not take at all."""
    inputs = _prepare(op, inputs)
    if op.transposable:
        inputs, attrs = op.as_they_lie(inputs, attrs, Tensor.is_contiguous)
    if _transforms_active():
        return _visible(op, _transformed(op, inputs, attrs, (*op.outputs, *op.residuals)))
    plain = all(type(t) in _PLAIN for t in inputs) and not _dispatch_modes()
    if not plain or any(t is not None and t.device.type not in ("cpu", "cuda") for t in inputs):
        return _dispatch(op, disp, inputs, attrs)
    op.specs([_spec(t) for t in inputs], attrs)
    _check_devices(op, inputs)
    inputs = [None if t is None else _plain(t) for t in inputs]
    grad = _grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    return _eager(op, attrs).apply(*inputs) if grad else _eager(op, attrs).run(*inputs)


def _dispatch(op: Op, disp: Callable[..., Any], inputs: Tensors, attrs: tuple[Attr, ...]):
    if op.broadcast:
        inputs = torch.broadcast_tensors(*inputs)
    return _visible(op, _results(disp(*inputs, *attrs)))


def _prepare(op: Op, inputs: Tensors) -> Tensors:
    for slot, t in zip(op.inputs, inputs, strict=True):
        if not (isinstance(t, Tensor) or (t is None and slot in op.optional)):
            raise TypeError(f"{op.name}: {slot} is {t!r:.40}, expected a torch.Tensor")
    if op.autocast and _autocast_enabled() and torch.is_autocast_enabled(inputs[0].device.type):
        device = inputs[0].device.type
        to = torch.get_autocast_dtype(device) if op.autocast == "autocast" else getattr(torch, op.autocast)
        inputs = [t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(to) for t in inputs]
    if not op.broadcast:
        return inputs
    check_broadcast(op.name, op.inputs, [_spec(t) for t in inputs])
    return torch.broadcast_tensors(*inputs)


for _op in OPS.values():
    globals()[_op.name] = _public(_op)


def _channels_last(conv2d: Callable[..., Any]) -> Callable[..., Any]:
    """A channels_last tensor is NHWC by another name: it goes in as a view, and so does what comes out."""

    def is_channels_last(t: Any) -> bool:
        if not isinstance(t, Tensor) or t.dim() != 4 or t.is_contiguous():
            return False
        return t.is_contiguous(memory_format=torch.channels_last)

    @functools.wraps(conv2d)
    def function(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, layout="NCHW", allow_tf32=False):
        rest = bias, stride, padding, dilation, groups
        if layout == "NCHW" and (is_channels_last(x) or is_channels_last(weight)) and x.dim() == 4:
            y = conv2d(x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1), *rest, "NHWC", allow_tf32)
            return y.permute(0, 3, 1, 2)
        return conv2d(x, weight, *rest, layout, allow_tf32)

    return function


conv2d = _channels_last(conv2d)  # type: ignore[name-defined] # noqa: F821


# -------------------------------------------------------------------------------------------------------------- modules


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` on the library's kernel: the same arguments, parameters and state."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)  # type: ignore[name-defined] # noqa: F821


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` on the library's kernel: the same arguments, parameters and state."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)  # type: ignore[name-defined] # noqa: F821


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` on the library's kernel: the same arguments, parameters and state, and an activation that is
    applied in the same kernel: None, "relu", "gelu", "gelu_tanh" or "silu"."""

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, activation=None):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.activation)  # type: ignore[name-defined] # noqa: F821

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", activation={self.activation!r}" if self.activation else "")


class GELU(torch.nn.GELU):
    """``torch.nn.GELU`` on the library's kernel: the same argument."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x, self.approximate)  # type: ignore[name-defined] # noqa: F821


class Softmax(torch.nn.Softmax):
    """``torch.nn.Softmax`` on the library's kernel: the same argument."""

    def forward(self, x: Tensor) -> Tensor:
        if self.dim is None:  # torch warns, and chooses an axis
            return super().forward(x)
        return softmax(x, self.dim)  # type: ignore[name-defined] # noqa: F821


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` on the library's kernel: the same arguments. With weights of classes, with targets
    that are probabilities, and with more axes than (N, C) it is torch's own."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.weight is not None or target.is_floating_point() or x.dim() > 2:
            return super().forward(x, target)
        options = self.ignore_index, self.reduction, self.label_smoothing
        return cross_entropy(x, target, *options)  # type: ignore[name-defined] # noqa: F821


class LLTM(torch.nn.Module):
    """The cell of PyTorch's tutorial "Custom C++ and CUDA Extensions" on the library's kernel, with its arguments,
    parameters and state, and a device and dtype besides. ``forward(input, (old_h, old_cell))``: new_h, new_cell."""

    def __init__(self, input_features: int, state_size: int, device=None, dtype=None) -> None:
        super().__init__()
        self.input_features, self.state_size = input_features, state_size
        gates, features = 3 * state_size, state_size + input_features
        self.weights = torch.nn.Parameter(torch.empty(gates, features, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(1, gates, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.state_size**-0.5
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return lltm(input, self.weights, self.bias, *state)  # type: ignore[name-defined] # noqa: F821

    def extra_repr(self) -> str:
        return f"input_features={self.input_features}, state_size={self.state_size}"


class Conv2d(torch.nn.Conv2d):
    """``torch.nn.Conv2d`` on the library's kernel: the same arguments, parameters and state; channels_last tensors stay
    so, and TF32 is as ``torch.backends.cudnn.allow_tf32`` has it. With another padding_mode than zeros, and with
    padding "same", it is torch's own."""

    def forward(self, x: Tensor) -> Tensor:
        if self.padding_mode != "zeros" or self.padding == "same":
            return super().forward(x)
        padding = 0 if self.padding == "valid" else self.padding
        options = self.stride, padding, self.dilation, self.groups
        return conv2d(x, self.weight, self.bias, *options, allow_tf32=torch.backends.cudnn.allow_tf32)
