"""The call path of PyTorch: whole calls as builtins of Python (cuda_src/host/torch.cpp).

``function`` makes builtins that allocate what they return, for the forward and backward of an autograd function too;
``public`` makes builtins that do all of a plain call, from the arguments of the public function on.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from ctypes import (
    c_char_p,
    c_int,
    c_uint64,
    c_void_p,
    py_object,
    pythonapi,
)
from functools import cache, partial
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch

from aotops import call, library
from aotops.call import builtin, handle_of, keep, pointer_of, struct_capsule
from aotops.op import ATTRIBUTE_TYPES, Attr, Op

from . import overwrite, private, structs
from .images import Images
from .structs import Slots

_METH_KEYWORDS = 0x02


@cache
def lib() -> ctypes.CDLL:
    """The library, with its structs compared with those of structs.py. Raises LibraryError if they differ."""
    call.check_structs("aot_torch_structs", 20, structs.ALL)
    return call.lib()


def set_up(gate: structs.GateFacts | None) -> bool:
    """Lets builtins take torch tensors. False if this torch has no exchange table (before 2.10) or no gate."""
    capsule = private.exchange_table
    if call.call_path() != "tensors" or capsule is None or gate is None:
        return False
    get = pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, [py_object, c_char_p]
    types = (c_void_p * 2)(id(torch.Tensor), id(torch.nn.Parameter))
    exchange = get(capsule, b"dlpack_exchange_api")
    facts = structs.Torch(
        exchange=exchange, types=types, size_type=id(torch.Size), empty_like=id(torch.empty_like), gate=gate
    )
    lib()
    assigns_only = torch.autograd.function.FunctionCtx.save_for_backward.__code__.co_names == ("to_save",)
    if not assigns_only:  # torch.cpp assigns too
        return False
    set_up = ctypes.PYFUNCTYPE(c_int, c_void_p)(library.function("aot_torch_setup"))  # it makes a tensor: with the GIL
    return bool(set_up(ctypes.addressof(facts)))


def gate() -> Callable[..., bool]:
    """After ``set_up``: a builtin of tensors, each of which may be None, that returns whether a call on them is plain,
    with autocast on or off."""
    return builtin("gate", "aot_torch_gate", struct_capsule(c_int()))


class Function(NamedTuple):
    """Builtins that take one tensor, or None, for each input and allocate what they return."""

    run: Callable[..., Any]
    """Returns the output, or a tuple of them."""
    forward: Callable[..., Any]
    """``run`` as the forward of a ``torch.autograd.Function``: takes its context first, and saves for the backward."""
    backward: Callable[..., Any]
    """Its backward: takes the context and the gradients of the outputs, returns those of the inputs."""


def function(
    op: Op,
    attrs: tuple[Attr, ...],
    prototypes: Callable[..., tuple[Any, ...] | None],
    keep_residuals_from: int,
    fallback: Callable[..., Any],
    channels_last: Images | None = None,
) -> Function:
    """An operator with its attributes as builtins.

    Args:
        prototypes: takes an operator, its attributes, one tensor, or None, for each input, and the slots whose second
            axis the operator has as its last; returns, for each of ``op.entry_outputs`` that is not like an input, a
            tensor of its shape, dtype and device, else None.
        keep_residuals_from: for a first input on a GPU with fewer elements no residuals are kept.
        fallback: the backward in Python, for a call that is not plain, and for an operator without a backward: a
            function of the saved tensors, the gradients of the outputs, for each input whether its gradient is needed,
            and the context, which has as ``inputs`` those that were replaced by a residual (Op.replaced).
        channels_last: the images that the entry reads and writes with their second axis as their last.
    """
    hooks = private.saved_tensor_hooks if op.replaced(attrs) else None
    last = channels_last.among if channels_last else lambda _: ()
    handle = _function_handle(op, attrs, prototypes, keep_residuals_from, hooks, channels_last=last(op.slots))
    run, forward = (builtin(op.name, f"aot_torch_{kind}", handle) for kind in ("run", "forward"))
    if op.backward is None or op.backward.factors(attrs):
        return Function(run, forward, lambda ctx, *dys: fallback(ctx.saved_tensors, dys, ctx.needs_input_grad, ctx))
    of_backward = last(op.backward.slots)
    backward_handle = _function_handle(op.backward, attrs, prototypes, keep_residuals_from, channels_last=of_backward)
    drop = overwrite.drop_inputs if hooks else None
    return Function(run, forward, _backward(op, op.backward, backward_handle, fallback, drop))


def _backward(
    op: Op, backward: Op, handle: Any, fallback: Callable[..., Any], drop: Callable[[Any], None] | None
) -> Callable[..., Any]:
    sources = [*(f"d{y}" for y in op.outputs), *op.saved]
    slots = {slot: i for i, slot in enumerate(backward.slots)}
    gradients = [backward.alias.get(f"d{x}", f"d{x}") for x in op.inputs]
    assert len(backward.overwrites) < 2, f"{backward.name} overwrites more than one input"
    over_output, over_input, asked = -1, -1, None
    if private.CAN_OVERWRITE:
        for y, x in backward.overwrites.items():
            over_output, over_input = slots[y], slots[x]
            asked = partial(overwrite.may_overwrite, op.saved.index(x))
    made = structs.Backward(
        function=pointer_of(handle),
        n_grads=len(op.outputs),
        n_inputs=len(op.inputs),
        source=Slots(*(sources.index(slot) for slot in backward.inputs)),
        gradient=Slots(*(slots.get(gradient, -1) for gradient in gradients)),
        fallback=id(fallback),
        over_output=over_output,
        over_input=over_input,
        over_from=overwrite.FROM,
        may_overwrite=id(asked),
        drop_inputs=None if drop is None else id(drop),
    )
    return builtin(op.name, "aot_torch_backward", struct_capsule(made, handle, fallback, asked, drop))


def _function_handle(
    op: Op,
    attrs: tuple[Attr, ...],
    prototypes: Callable[..., tuple[Any, ...] | None],
    keep_residuals_from: int,
    hooks: Callable[..., Any] | None = None,
    wanted: Iterable[str] | None = None,
    channels_last: Iterable[str] = (),
) -> Any:
    """``wanted``: the results to write. By default these are the outputs, some as a call asks for them, and are what is
    returned; else all results are."""
    slots = {slot: i for i, slot in enumerate(op.slots)}
    written = range(len(op.inputs), len(slots))
    prototype = [slots.get(op.same_spec_as.get(slot, ""), -1) for slot in op.slots]

    def bits(names: Iterable[str]) -> int:
        return sum(1 << slots[name] for name in names)

    handle, make_prototypes = handle_of(op, attrs), partial(prototypes, op, attrs, channels_last=channels_last)
    made_prototypes: dict[Any, Any] = {}
    replaced = op.replaced(attrs) if hooks else {}
    always = (y for y in op.outputs if y in slots and y not in op.optional) if wanted is None else wanted
    made = structs.Function(
        call=pointer_of(handle),
        prototype=Slots(*prototype),
        has_prototypes=any(prototype[i] < 0 for i in written),
        equal=Slots(*(slots.get(op.duplicates.get(slot, "") if wanted is None else "", -1) for slot in op.slots)),
        always=bits([*always, *op.workspace]),
        residuals=bits(op.kept_residuals(attrs)),
        scratch=bits(op.workspace),
        keep_from=-1 if op.always_save_residuals else keep_residuals_from,
        n_returned=len(op.outputs if wanted is None else op.results),
        n_saved=len(op.saved),
        saved=Slots(*(slots[slot] for slot in op.saved)),
        instead=Slots(*(slots.get(replaced.get(slot, ""), -1) for slot in op.saved)),
        saved_for=(c_uint64 * call.MOST_SLOTS)(*(bits(op.saved_for.get(slot, ())) for slot in op.saved)),
        channels_last=bits(channels_last),
        none_for_unread=none_for_unread(op),
        hooks=None if hooks is None else id(hooks),
        make_prototypes=id(make_prototypes),
        prototypes=id(made_prototypes),
    )
    return struct_capsule(made, handle, hooks, make_prototypes, made_prototypes)


def compiled(
    op: Op,
    attrs: tuple[Attr, ...],
    wanted: Iterable[str],
    prototypes: Callable[..., tuple[Any, ...] | None],
    fallback: Callable[..., Any],
) -> Callable[..., Any]:
    """A builtin of one tensor, or None, for each input, which returns what the dispatcher's operator does: every result
    of its own memory, None for those that are not ``wanted``. ``fallback``: it, for a call that is not plain."""
    handle = _function_handle(op, attrs, prototypes, -1, wanted=wanted)
    made = structs.Compiled(function=pointer_of(handle), fallback=id(fallback))
    return builtin(op.name, "aot_torch_compiled", struct_capsule(made, handle, fallback))


def none_for_unread(op: Op) -> bool:
    """Whether the backward is given None for the gradients of outputs that nobody has read. Where it needs zeros in the
    place of one of them, what is saved must tell their spec: an input like it, or all inputs."""
    always = set(op.saved) - set(op.saved_for) - set(op.optional)
    like = {op.same_spec_as.get(y) for y in op.outputs if y not in op.unread}
    return bool(op.unread) and (set(op.inputs) <= set(op.saved) or like <= always)


def differentiable(function: Function, apply: Callable[..., Any]) -> Any:
    """For ``bind`` of ``public``: an operator bound to attributes, and the ``apply`` of its autograd
    function."""
    handle = function.run.__self__  # type: ignore[attr-defined]
    return struct_capsule(structs.Differentiable(function=pointer_of(handle), apply=id(apply)), handle, apply)


def public(
    op: Op,
    bind: Callable[..., Any],
    fallback: Callable[..., Any],
    cast: Callable[..., Any] | None = None,
    images: Images | None = None,
    bind_last: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A builtin with the signature of ``op.bind`` that executes plain calls.

    Args:
        bind: takes the public attributes as they are given; returns what ``differentiable`` makes of them, or None for
            the fallback to run the call.
        fallback: the function in Python, for a call that is not plain, or that the entry refuses.
        cast: takes inputs and public attributes; returns those that autocast makes of them, or None for the fallback to
            run the call.
        images, bind_last: as ``bind``, for images in channels_last, with the attribute for channels that are last.
    """
    handle = _public_handle(op, bind, fallback, cast, images, bind_last)
    return builtin(op.name, "aot_torch_public", handle, call.METH_FASTCALL | _METH_KEYWORDS)


def _public_handle(
    op: Op,
    bind: Callable[..., Any],
    fallback: Callable[..., Any],
    cast: Callable[..., Any] | None,
    images: Images | None,
    bind_last: Callable[..., Any] | None,
) -> Any:
    parameters = signature(op.bind).parameters.values()
    positions = {name: i for i, name in enumerate((*op.inputs, *op.public_attrs))}
    names, defaults = [sys.intern(p.name) for p in parameters], [p.default for p in parameters]
    bound: dict[Any, Any] = {}
    made = structs.Public(
        n_inputs=len(op.inputs),
        n_attrs=len(op.public_attrs),
        n_parameters=len(names),
        constants=sum(1 << i for i, slot in enumerate(op.inputs) if slot in op.constants),
        most_bound=call.MOST_BOUND,
    )
    for i, (name, default) in enumerate(zip(names, defaults, strict=True)):
        made.position[i], made.names[i] = positions[name], id(name)
        made.defaults[i] = None if default is Parameter.empty else id(default)
    made.n_transposable = len(op.transposable)
    for i, (slot, attr) in enumerate(op.transposable):
        made.transposable[i], made.transposes[i] = slot, len(op.inputs) + attr
    kinds = (ATTRIBUTE_TYPES[op.attrs[name].removesuffix("?")] for name in op.public_attrs)
    made.kinds = "".join(kind.key for kind in kinds).encode()
    made.copies = b"n" if images else b"e" if op.elementwise else b"a"
    record = partial(private.RecordFunction, f"{op.library.name}::{op.name}")
    made.bind, made.bound, made.record, made.fallback = id(bind), id(bound), id(record), id(fallback)
    made.cast = None if cast is None else id(cast)
    last = None
    if images and bind_last:
        last = _public_handle(op, bind_last, fallback, None, None, None)
        slots = images.among(op.inputs)
        made.images = sum(1 << i for i, slot in enumerate(op.inputs) if slot in slots)
        made.layout, made.most_axes = positions[images.attr], images.most_axes
        made.first_layout, made.last_layout = id(images.second), id(images.last)
        made.channels_last = pointer_of(last)
    return struct_capsule(made, names, defaults, bound, bind, record, fallback, cast, images, last)


def install_vectorcall(function: Callable[..., Any], builtin: Any) -> None:
    """On CPython 3.12 and later, makes a call of ``function``, which forwards to a builtin of ``public``, call that
    builtin without a frame. To inspection and torch.compile it is still a Python function."""
    _install("aot_torch_install_vectorcall", function, builtin.__self__)


def install_call(function: Callable[..., Any], handle: Any) -> bool:
    """As ``install_vectorcall``, of the ``__call__`` of a replaced module's class. False before CPython 3.12."""
    return bool(_install("aot_torch_install_call", function, handle))


def _install(symbol: str, function: Callable[..., Any], handle: Any) -> int:
    keep((function, handle))
    return ctypes.PYFUNCTYPE(c_int, py_object, py_object)(library.function(symbol))(function, handle)
