"""The classes of replaced modules: subclasses of theirs, made once, with a forward that calls the library."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from aotops.infer import MAX_NDIM

from . import replaced_calls, replaced_globals, replaced_layers, replaced_masks
from .known_modules import ORIGINAL
from .replaced_forwards import FUSED, MADE_FOR, learn, operator_of, serve_of
from .replaced_images import is_alone
from .tensors import is_compiling, is_known

_KINDS = "_aotops_kinds"
"""The attribute with the kinds of its operators."""
_MADE: dict[tuple[type, tuple[str, ...]], type[nn.Module]] = {}


def class_for(original: type[nn.Module], kinds: tuple[str, ...]) -> type[nn.Module]:
    """The subclass that calls the library's operators of these kinds."""
    if (original, kinds) not in _MADE:
        _MADE[original, kinds] = _made(original, kinds)
    return _MADE[original, kinds]


def _made(original: type[nn.Module], kinds: tuple[str, ...]) -> type[nn.Module]:
    """It has the name of the original, by which others know a module."""
    call = None if replaced_globals.kinds_of(original) else replaced_calls.call_of(original, *learn(original))  # type: ignore[misc]
    own: dict[str, Any] = {"__reduce_ex__": _reduced, ORIGINAL: original, **_methods(original, kinds, call)}
    own |= {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")} | {_KINDS: kinds}
    made = type(original.__name__, (original,), own)
    if call:
        call.struct.type = id(made)  # _MADE keeps it
        replaced_calls.call_without_frames(made, original, call)
        replaced_layers.note(made, original, kinds)
    MADE_FOR[made] = original
    learn(made)
    return made


def _methods(original: type[nn.Module], kinds: tuple[str, ...], call: replaced_calls.Call | None) -> dict[str, Any]:
    if replaced_globals.kinds_of(original):
        return replaced_masks.without_positions(original, kinds, replaced_globals.methods_of(original, kinds))
    forward: Any = _forward(original)
    forward = _at_once(call.run, forward, original.forward) if call else forward
    forward.__code__ = forward.__code__.replace()  # torch's compiler compiles a code for so many classes, and no more
    return {"forward": forward}


def _at_once(run, python, theirs):
    """The builtin, and the forwards in Python for what it leaves."""

    @functools.wraps(python)
    def forward(self, *args, **kwargs):
        if kwargs or is_compiling():
            return python(self, *args, **kwargs)
        result = run(self, *args)
        if result is None:
            return python(self, *args)
        return result if result is not False else theirs(self, *args)

    return forward


def _forward(original: type[nn.Module]) -> Any:
    theirs = original.forward
    form, names = learn(original)  # type: ignore[misc]
    serve = serve_of(form, names)
    if form.kind == "linear_cross_entropy":
        return _of_a_model(serve, theirs)
    if form.kind in ("add_norm", "batch_norm"):
        return _of_layers(serve, theirs, form.kind == "batch_norm" and is_alone(form))
    return _of_a_layer(serve, theirs, form.kind in FUSED, form.kind == "matrix")


def _of_a_layer(serve, theirs, is_fused, is_product):
    @functools.wraps(theirs)
    def forward(self, *args, **kwargs):
        if is_product and is_compiling():  # torch's compiler pads a product by itself
            return theirs(self, *args, **kwargs)
        x = args[0] if args and not kwargs else None
        if isinstance(x, Tensor) and _is_served(self, x):  # torch.fx traces the original
            left = is_fused and x.is_cuda and is_compiling()
            result = NotImplemented if left else serve(self, *args)
            if result is not NotImplemented:
                return result
        return theirs(self, *args, **kwargs)

    return forward


def _is_served(module: nn.Module, x: Tensor) -> bool:
    """Whether there is an operator for the tensors of a call; the children of a module ask of their own parameters."""
    if x.dim() > MAX_NDIM or not is_known(x):
        return False
    return is_compiling() or all(p is None or is_known(p) for p in module._parameters.values())


def _of_layers(serve, theirs, compiles):
    """``compiles``: whether calls in compiled code are served. Of several modules torch's compiler fuses what follows a
    norm by itself."""

    @functools.wraps(theirs)
    def forward(self, *args, **kwargs):
        if args and isinstance(args[0], Tensor) and (compiles or not is_compiling()):
            result = serve(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return theirs(self, *args, **kwargs)

    return forward


def _of_a_model(serve, theirs):
    @functools.wraps(theirs)
    def forward(self, *args, **kwargs):
        result = serve(self, theirs, args, kwargs)
        return theirs(self, *args, **kwargs) if result is NotImplemented else result

    return forward


def _reduced(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """A made class has no name by which pickle finds it: it is made again."""
    reduced: Any = object.__reduce_ex__(self, max(int(protocol), 2))
    make, arguments, *state = reduced
    cls: Any = type(self)
    if ORIGINAL in vars(cls):
        make, arguments = _made_again, (getattr(cls, ORIGINAL), getattr(cls, _KINDS), *arguments[1:])
    return make, arguments, *state


def _made_again(original: type[nn.Module], kinds: tuple[str, ...], *arguments: Any) -> nn.Module:
    """Where the original's forward is not a known one, as in another version, the original."""
    found, called = learn(original), replaced_globals.kinds_of(original)
    known = set(called) if called or not found else {operator_of(found[0])}
    cls = class_for(original, kinds) if known.issuperset(kinds) else original
    return cls.__new__(cls, *arguments)


def _loss(theirs: type[nn.Module]) -> type[nn.Module]:
    """The class of a loss that a forward makes at each call."""
    return class_for(theirs, ("cross_entropy",))


replaced_globals.CALLED["cross_entropy"] = replaced_globals.Called(
    ("CrossEntropyLoss",), lambda value: value is nn.CrossEntropyLoss, _loss
)
