"""The library's kernels in a model that exists: ``replace`` changes the classes of its modules, in place and back.

A replaced module has a subclass of its class, made for it, whose ``forward`` calls the library. So it is the same
object, with its parameters, hooks, buffers, name and ``repr``, and an instance of its class. A function bound to the
instance would be another's after a deepcopy, and could not be pickled.

A subclass's forward calls the original one for all that it does not know: another dtype, a child that was exchanged
after ``replace``, or one with hooks that it would pass by.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from .replaced_forwards import KINDS, MADE_FOR, learn, refusal, serve_of
from .replaced_losses import LOSSES, loss_for

_ORIGINAL = "_aotops_original"
"""The attribute of a made class with the class that it was made of."""
_LOSS = "loss_function"
"""The property of transformers' models with the function that they call."""
_OF_ITS_OWN = ("__init_subclass__", "__reduce__", "__reduce_ex__")


class Row(NamedTuple):
    """A module of a model: its name and class, and the operator that it is replaced by, or why it is left."""

    name: str
    module: str
    operator: str | None
    reason: str


class Replacement:
    """A record of what ``replace`` did. It prints as a table, in which modules whose names differ by a number share a
    line.

    Attributes:
        rows: a ``Row`` of each module without children, and of each other one that has, or seems to have, an operator.
    """

    def __init__(self, rows: list[Row], modules: list[nn.Module]) -> None:
        self.rows, self._modules = rows, modules

    def restore(self) -> None:
        """Takes back what this call of ``replace`` did. Called again, it does nothing.

        Raises:
            RuntimeError: another class was made of that of a module, as by a parametrization or FSDP. Then no module is
                changed.
        """
        _restore(self._modules)
        self._modules = []

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        alike: dict[tuple[str, ...], list[str]] = {}
        for row in sorted(self.rows, key=lambda row: row.operator is None):
            place = _pattern(row.name) if row.operator else ""  # class and reason tell those apart that are left
            alike.setdefault((row.operator or "-", place, row.module, row.reason), []).append(row.name)
        lines = [("operator", "count", "module", "class", "left because")]
        for (operator, _, module, reason), names in alike.items():
            shown = names[0] or "(model)" if len(names) == 1 else _pattern(names[0])
            others = "" if len({*map(_pattern, names)}) == 1 else ", ..."
            lines.append((operator, str(len(names)), shown + others, module, reason))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def replace(model: nn.Module, *, only: Iterable[str] | None = None, without: Iterable[str] = ()) -> Replacement:
    """Lets the modules of a model that exists compute by the library's kernels, in place.

    Parameters, buffers, hooks, names, ``state_dict`` and ``repr`` stay as they are, and results up to rounding. A
    module is replaced if its forward is torch's, or has the bytecode of a known one of transformers or timm.

    Args:
        model: on any device, in any dtype, training or not.
        only: the kinds to replace: "layer_norm", "rms_norm", "gelu", "swiglu", "linear" (with the activation after it),
            "softmax", "cross_entropy" and "conv2d". Default: all.
        without: kinds to leave.

    Returns:
        A record, whose rows say what was replaced, what was left, and why. ``restore()`` takes it back, as does the end
        of a ``with``.

    Raises:
        TypeError: model is no module.
        ValueError: another kind.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace: model has type {type(model).__name__}, expected torch.nn.Module")
    kinds = _kinds("only", KINDS if only is None else only) - _kinds("without", without)
    found = [(module, *row) for name, module in list(model.named_modules()) for row in _rows(name, module, kinds)]
    changes = [(module, attribute) for module, row, attribute in found if row.operator]
    values = [_value(*change) for change in changes]  # of all, before one is changed
    for (module, attribute), value in zip(changes, values, strict=True):
        setattr(module, attribute, value)
    return Replacement([row for _, row, _ in found], [module for module, _ in changes])


def restore(model: nn.Module) -> None:
    """Takes back every replacement in a model: also in a copy of one, or in one of a file, which have no record.

    Raises:
        RuntimeError: another class was made of that of a module, as by a parametrization or FSDP. Then no module is
            changed.
    """
    _restore(list(model.modules()))


def _kinds(argument: str, given: Iterable[str]) -> set[str]:
    found = {given} if isinstance(given, str) else set(given)
    if unknown := sorted(found.difference(KINDS)):
        raise ValueError(f"replace: {argument} has {unknown[0]!r}, expected {', '.join(KINDS)}")
    return found


def _restore(modules: list[nn.Module]) -> None:
    for module in modules:
        if hasattr(type(module), _ORIGINAL) and _ORIGINAL not in vars(type(module)):
            raise RuntimeError(
                f"restore: a module has class {type(module).__name__}, made of the replaced one, expected that one: "
                "remove the parametrization, or the wrapper, first"
            )
    for module in modules:
        if hasattr(type(module), _ORIGINAL):
            module.__class__ = getattr(type(module), _ORIGINAL)
        if vars(module).get("_loss_function") in LOSSES:
            del module._loss_function


# ----------------------------------------------------------------------------------------------------------- judgement


def _rows(name: str, module: nn.Module, kinds: Collection[str]) -> Iterator[tuple[Row, str]]:
    """The rows of a module, with the attribute that a replacement sets."""
    kind, reason = _judged(module, kinds)
    if kind or reason or not any(module.children()):
        reason = reason or ("" if kind else "no operator has its forward")
        yield Row(name, type(module).__name__, None if reason else kind, reason), "__class__"
    function, ours = loss_for(module)
    if function is not None:
        reason = _loss_reason(function, ours, kinds)
        operator = None if reason else "cross_entropy"
        yield Row(f"{name}.{_LOSS}".lstrip("."), function.__name__, operator, reason), _LOSS


def _judged(module: nn.Module, kinds: Collection[str]) -> tuple[str | None, str]:
    """The operator for a module, and why it is left nevertheless."""
    cls = type(module)
    if hasattr(cls, _ORIGINAL):
        return None, "replaced already"
    found = learn(cls)
    if found is None:
        return None, ""
    form, names = found
    refused = refusal(module, form, names)
    if refused is None or refused:
        return None, refused or ""
    own = [method for method in ("forward", *form.methods) if method in vars(module)]
    if own:
        return form.kind, f"its {own[0]} is the instance's own"
    if type(cls) is not type or any(name in vars(base) for base in cls.__mro__[:-1] for name in _OF_ITS_OWN):
        return form.kind, "its class is made, subclassed or pickled in a way of its own"
    return form.kind, "" if form.kind in kinds else "not selected"


def _loss_reason(function: Any, ours: Any, kinds: Collection[str]) -> str:
    if function in LOSSES:
        return "replaced already"
    if ours is None:
        return "its loss is not a known one"
    return "" if "cross_entropy" in kinds else "not selected"


# -------------------------------------------------------------------------------------------------------------- change


def _value(module: nn.Module, attribute: str) -> Any:
    return loss_for(module)[1] if attribute == _LOSS else _class_for(type(module))


def _class_for(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass that calls the library."""
    if original not in _MADE:
        _MADE[original] = _made(original)
    return _MADE[original]


_MADE: dict[type[nn.Module], type[nn.Module]] = {}


def _made(original: type[nn.Module]) -> type[nn.Module]:
    """It has the name of the original, by which others know a module."""
    form, names = learn(original)  # type: ignore[misc]
    serve, theirs = serve_of(form, names), original.forward

    @functools.wraps(theirs)
    def forward(self, *args, **kwargs):
        if args and not kwargs and isinstance(args[0], Tensor):  # torch.fx traces the original
            result = serve(self, *args)
            if result is not NotImplemented:
                return result
        return theirs(self, *args, **kwargs)

    own: dict[str, Any] = {"forward": forward, "__reduce_ex__": _reduced, _ORIGINAL: original}
    own |= {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    made = type(original.__name__, (original,), own)
    MADE_FOR[made] = original
    learn(made)
    return made


def _reduced(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """A made class has no name by which pickle finds it: it is made again."""
    reduced: Any = object.__reduce_ex__(self, max(int(protocol), 2))
    make, arguments, *state = reduced
    if _ORIGINAL in vars(type(self)):
        make, arguments = _made_again, (getattr(type(self), _ORIGINAL), *arguments[1:])
    return make, arguments, *state


def _made_again(original: type[nn.Module], *arguments: Any) -> nn.Module:
    """Where the original's forward is not a known one, as in another version, the original."""
    cls = _class_for(original) if learn(original) else original
    return cls.__new__(cls, *arguments)
