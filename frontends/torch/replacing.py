"""The library's kernels in a model that exists: ``replace`` changes the classes of its modules, in place and back.

A replaced module has a subclass of its class, made for it, whose ``forward`` calls the library. So it is the same
object, with its parameters, hooks, buffers, name and ``repr``, and an instance of its class. A function bound to the
instance would be another's after a deepcopy, and could not be pickled.

A subclass's forward calls the original one for all that it does not know: another dtype, a child that was exchanged
after ``replace``, or one with hooks that it would pass by.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from .known_modules import ORIGINAL
from .known_rotations import without_halves
from .replaced_classes import class_for
from .replaced_forwards import SERVED, learn, operator_of, refusal
from .replaced_globals import CALLED, called_by
from .replaced_losses import LOSSES, loss_for

OPTIONAL = ("linear_cross_entropy", "attention")
"""The kinds that are replaced only where they are asked for: one changes what a model returns, and the other is not
faster everywhere."""
KINDS = tuple(kind for kind in dict.fromkeys((*SERVED, *CALLED)) if kind not in OPTIONAL)
_LOSS = "loss_function"
"""The property of transformers' models with the function that they call."""
_OF_ITS_OWN = ("__init_subclass__", "__reduce__", "__reduce_ex__")
_HARMLESS = (
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("transformers.modeling_layers", "GradientCheckpointingLayer"),
)
"""Classes whose ``__init_subclass__`` notes the class of the configuration, or puts a checkpoint around the forward."""


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


def replace(
    model: nn.Module, *, only: Iterable[str] | None = None, without: Iterable[str] = (), also: Iterable[str] = ()
) -> Replacement:
    """Lets the modules of a model that exists compute by the library's kernels, in place.

    Parameters, buffers, hooks, names, ``state_dict`` and ``repr`` stay as they are, and results up to rounding. A
    module is replaced if its forward is torch's, or has the bytecode of a known one of transformers or timm.

    Args:
        model: on any device, in any dtype, training or not.
        only: the kinds to replace: "layer_norm", "rms_norm", "gelu", "swiglu", "linear" (with the activation after it),
            "softmax", "cross_entropy", "conv2d", "batch_norm" (with the residual and the activation after it),
            "add_norm" (a residual's sum and the norm of it), "rope" and "mask". Default: all.
        without: kinds to leave.
        also: kinds that are replaced only where they are asked for. "linear_cross_entropy": the head of a model for
            language and its loss, where the model is called in training with ``labels=``: its result then has no
            ``logits``, as with Liger. "attention": torch's attention in transformers' models, and in modules whose
            forward calls ``scaled_dot_product_attention``.

    Returns:
        A record, whose rows say what was replaced, what was left, and why. ``restore()`` takes it back, as does the end
        of a ``with``.

    Raises:
        TypeError: model is no module.
        ValueError: another kind.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace: model has type {type(model).__name__}, expected torch.nn.Module")
    asked, left = _kinds("also", also), _kinds("without", without)
    kinds = (_kinds("only", KINDS if only is None else only) | asked) - left
    uneven = without_halves(model) if "rope" in kinds else ""
    found = [each for name, module in list(model.named_modules()) for each in _found(name, module, kinds, uneven)]
    changes = [each for each in found if each.kinds()]
    values = [each.value() for each in changes]  # of all, before one is changed
    for each, value in zip(changes, values, strict=True):
        setattr(each.module, each.attribute, value)
    rows = [row for each in found for row in each.rows]
    return Replacement([*rows, *_missed(model, rows, asked - left)], [each.module for each in changes])


def restore(model: nn.Module) -> None:
    """Takes back every replacement in a model: also in a copy of one, or in one of a file, which have no record.

    Raises:
        RuntimeError: another class was made of that of a module, as by a parametrization or FSDP. Then no module is
            changed.
    """
    _restore(list(model.modules()))


def _kinds(argument: str, given: Iterable[str]) -> set[str]:
    found = {given} if isinstance(given, str) else set(given)
    if unknown := sorted(found.difference(KINDS, OPTIONAL)):
        raise ValueError(f"replace: {argument} has {unknown[0]!r}, expected {', '.join((*KINDS, *OPTIONAL))}")
    return found


def _restore(modules: list[nn.Module]) -> None:
    for module in modules:
        if hasattr(type(module), ORIGINAL) and ORIGINAL not in vars(type(module)):
            raise RuntimeError(
                f"restore: a module has class {type(module).__name__}, made of the replaced one, expected that one: "
                "remove the parametrization, or the wrapper, first"
            )
    for module in modules:
        if hasattr(type(module), ORIGINAL):
            module.__class__ = getattr(type(module), ORIGINAL)
        if vars(module).get("_loss_function") in LOSSES:
            del module._loss_function


# ----------------------------------------------------------------------------------------------------------- judgement


class _Found(NamedTuple):
    """An attribute of a module that a replacement would set, and the rows about it."""

    module: nn.Module
    attribute: str
    rows: list[Row]

    def kinds(self) -> tuple[str, ...]:
        return tuple(row.operator for row in self.rows if row.operator)

    def value(self) -> Any:
        """The attribute's new value."""
        return loss_for(self.module)[1] if self.attribute == _LOSS else class_for(type(self.module), self.kinds())


def _found(name: str, module: nn.Module, kinds: Collection[str], uneven: str) -> Iterator[_Found]:
    """``uneven``: why the rotations of the model are left."""
    judged = [*_calls(module, kinds, uneven)] or [_judged(module, kinds)]
    rows = []
    for kind, reason in judged:
        if kind or reason or not any(module.children()):
            reason = reason or ("" if kind else "no operator has its forward")
            rows.append(Row(name, type(module).__name__, None if reason else kind, reason))
    yield _Found(module, "__class__", rows)
    function, ours = loss_for(module)
    if function is not None:
        reason = _loss_reason(function, ours, kinds)
        operator = None if reason else "cross_entropy"
        yield _Found(module, _LOSS, [Row(f"{name}.{_LOSS}".lstrip("."), function.__name__, operator, reason)])


def _judged(module: nn.Module, kinds: Collection[str]) -> tuple[str | None, str]:
    """The operator for a module, and why it is left nevertheless."""
    cls = type(module)
    if hasattr(cls, ORIGINAL):
        return None, "replaced already"
    found = learn(cls)
    if found is None:
        return None, ""
    form, names = found
    kind = operator_of(form)
    is_lazy = any(map(nn.parameter.is_lazy, module.parameters(recurse=False)))
    refused = "" if is_lazy else refusal(module, form, names)
    if refused is None:
        return None, ""
    if any(map(nn.parameter.is_lazy, module.parameters())):  # torch gives it another class then
        return None, _about(kind, "its parameters are made at its first call: replace it after that")
    if refused:
        return None, _about(kind, refused)
    reason = _own_ways(module, form.methods) or _unselected(kind, kinds)
    if not reason and kind == "linear_cross_entropy" and "cross_entropy" not in kinds:
        reason = "" if loss_for(module)[0] in LOSSES else "its loss is not selected"
    if not reason and kind == "add_norm":
        norm = type(getattr(module, names["NORM"]))
        selected = hasattr(norm, ORIGINAL) or operator_of(learn(norm)[0]) in kinds  # type: ignore[index]
        reason = "" if selected else "its norm is not selected"
    return kind, _about(kind, reason)


def _about(kind: str, reason: str) -> str:
    """The reason, which names the kind where it is one that is asked for."""
    return f"{kind}: {reason}" if reason and kind in OPTIONAL else reason


def _calls(module: nn.Module, kinds: Collection[str], uneven: str) -> Iterator[tuple[str | None, str]]:
    """The operators for the functions that the forward of a module calls, and why they are left nevertheless."""
    if hasattr(type(module), ORIGINAL):
        return
    for kind, unknown in called_by(type(module)).items():
        reason = _unselected(kind, kinds) or (f"its {unknown} is not a known one" if unknown else "")
        reason = reason or (uneven if kind == "rope" else "") or _own_ways(module, ())
        yield kind, f"{kind}: {reason}" if reason else ""


def _own_ways(module: nn.Module, methods: Iterable[str]) -> str:
    """Why the class of a module cannot be exchanged, or "". ``methods``: those that its forward calls."""
    cls = type(module)
    own = [method for method in ("forward", *methods) if method in vars(module)]
    if own:
        return f"its {own[0]} is the instance's own"
    bases = [base for base in cls.__mro__[:-1] if (base.__module__, base.__qualname__) not in _HARMLESS]
    if type(cls) is not type or any(name in vars(base) for base in bases for name in _OF_ITS_OWN):
        return "its class is made, subclassed or pickled in a way of its own"
    return ""


def _missed(model: nn.Module, rows: list[Row], asked: Collection[str]) -> Iterator[Row]:
    """The rows of kinds that were asked for, and that no other row is about."""
    again = any(row.reason == "replaced already" for row in rows)
    for kind in sorted(asked):
        if not again and not any(row.operator == kind or row.reason.startswith(f"{kind}: ") for row in rows):
            yield Row(
                "", type(model).__name__, None, f"{kind}: asked for, and no module's forward is known to compute it"
            )


def _unselected(kind: str, kinds: Collection[str]) -> str:
    if kind in kinds:
        return ""
    return f"also={kind!r} replaces it" if kind in OPTIONAL else "not selected"


def _loss_reason(function: Any, ours: Any, kinds: Collection[str]) -> str:
    if function in LOSSES:
        return "replaced already"
    if ours is None:
        return "its loss is not a known one"
    return "" if "cross_entropy" in kinds else "not selected"
