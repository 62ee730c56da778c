"""The declarative definition of an operator: data that every frontend turns into functions of its framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from operator import index
from typing import Any

Attr = int | float | bool | str | tuple[int, ...] | None

_INT64 = range(-(1 << 63), 1 << 63)


def _integer(value: Any) -> int:
    """What has __index__ is an integer, NumPy's and torch's among them; a bool is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "ndim", False):
        raise TypeError
    if (number := index(value)) not in _INT64:
        raise ValueError
    return number


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(_integer(v) for v in (value if isinstance(value, tuple | list) else (value,)))


def _number(value: Any) -> float:
    """No tensor with a gradient, which would be lost."""
    is_number = hasattr(value, "__float__") and not getattr(value, "ndim", 0) and not isinstance(value, bool)
    if not is_number or getattr(value, "requires_grad", False):
        raise TypeError
    return float(value) + 0.0  # 0.0 for -0.0: the two are one key


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    """A NUL would end the text in C, and the end of a line the attribute."""
    if not isinstance(value, str):
        raise TypeError
    if not (value.isascii() and value.isprintable()):
        raise ValueError
    return str(value)


# For each type of an attribute: what makes a plain value of Python of it, and its name in an error.
_KINDS: dict[str, tuple[Callable[[Any], Attr], str]] = {
    "float": (_number, "a number"),
    "int": (_integer, "an integer of 64 bits"),
    "int[]": (_integers, "integers of 64 bits"),
    "bool": (_bool, "True or False"),
    "str": (_text, "a string of printable ASCII characters"),
}


@dataclass(frozen=True, eq=False)
class Op:
    """What an operator takes, gives and saves.

    Its entries are ``aot_<name>_cpu`` and ``aot_<name>_cuda``. They take the ``slots`` in order: inputs, outputs,
    residuals, workspace. Names tell the gradient: ``backward`` takes ``dy`` for the output ``y`` and gives ``dx`` for
    the input ``x``; whatever else it takes is saved by the forward.
    """

    name: str
    bind: Callable[..., tuple[tuple[Any, ...], tuple[Attr, ...]]]
    """The public signature and docstring; returns the inputs and the attributes, each in the order given here. Its
    parameters are those inputs and attributes, but for attributes that follow from the others; the entry takes the
    attributes that it returns where inputs are None."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    optional: frozenset[str] = frozenset()
    """Inputs that may be None, and outputs that a caller may leave out."""
    accepts_scalar: frozenset[str] = frozenset()
    """Inputs that accept a 0-dim tensor, which stands for all elements: the gradient of a sum comes that way."""
    attrs: Mapping[str, str] = field(default_factory=dict)
    """Attributes and their types: "int[]", "int", "float", "bool" or "str"; with a "?" one may be None, and the
    entry then finds none."""
    residuals: tuple[str, ...] = ()
    """Outputs that only the backward needs, and recomputes if they are absent."""
    always_save_residuals: bool = False
    """Residuals are cheaper to keep than to recompute, whatever the device and the size."""
    workspace: tuple[str, ...] = ()
    """Scratch; its content means nothing afterwards."""
    backward: Op | None = None
    same_spec_as: Mapping[str, str] = field(default_factory=dict)
    """Outputs whose spec is that of an input."""
    shapes: Mapping[str, Callable[[Any], tuple[Any, ...]]] = field(default_factory=dict)
    """The shapes of all other outputs and residuals, for symbolic dimensions only: the library infers all others. Each
    is a function of a call, whose members are the inputs' shapes and the attributes, by name."""
    alias: Mapping[str, str] = field(default_factory=dict)
    """Outputs that are an input, or another output, without a copy: the entry has no slot for them. If all are inputs,
    there is no kernel."""
    scale: Mapping[str, str] = field(default_factory=dict)
    """Aliases of a backward without a kernel that are multiplied by an attribute: by the framework, which can
    differentiate that. With 1 they are the alias itself."""
    vmappable: frozenset[str] = frozenset()
    """Slots that may have additional leading axes, whose indices are independent problems: vmap adds one."""
    vmap_same_rank: bool = False
    """vmap adds an axis only if all inputs have the same rank, because the kernel itself broadcasts leading axes."""
    axes: int = 0
    """Least rank of an example of a batch."""
    broadcast: bool = False
    """Inputs of different shapes are broadcast by the frontend."""
    elementwise: bool = False
    """All tensors have one shape, in any order of elements: a result may have the strides of an input."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Inputs of which the backward needs only the spec if a residual of the same spec is kept: the residual is saved
    instead of the input, which may then be changed in place."""
    autocast: Mapping[str, str] = field(default_factory=dict)
    """By kind of device the dtype that torch.autocast casts to before this operator; "autocast" for its own, of 16
    bits. An operator that names some device computes, on another, in the widest dtype it is given, and its results have
    the widest of the ``vmappable`` inputs: as torch's norms on the CPU."""

    @cached_property
    def entry_outputs(self) -> tuple[str, ...]:
        """Everything the entry writes: outputs, residuals, workspace."""
        return (*(y for y in self.outputs if y not in self.alias), *self.residuals, *self.workspace)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The same without the workspace."""
        return self.entry_outputs[: len(self.entry_outputs) - len(self.workspace)]

    @cached_property
    def slots(self) -> tuple[str, ...]:
        return (*self.inputs, *self.entry_outputs)

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Which of the forward's slots the backward takes, in its order."""
        if self.backward is None:
            return ()
        gradients = {f"d{y}" for y in self.outputs}
        return tuple(s for s in self.backward.inputs if s not in gradients)

    @cached_property
    def has_kernel(self) -> bool:
        return set(self.alias) != set(self.outputs)

    @cached_property
    def public_attrs(self) -> tuple[str, ...]:
        """The attributes that are parameters of ``bind``."""
        return tuple(name for name in self.attrs if name in signature(self.bind).parameters)

    def takes_batch(self, slots: Iterable[str], ndims: Sequence[int | None]) -> bool:
        """Whether these slots may all carry one more leading axis, where inputs have so many axes without it."""
        given = {n for n in ndims if n is not None}
        return (
            self.vmappable.issuperset(slots)
            and min(given) >= self.axes
            and not (self.vmap_same_rank and len(given) > 1)
        )

    @cached_property
    def transposable(self) -> tuple[tuple[int, int], ...]:
        """Inputs that may be transposed views, each with the attribute that transposes it: ``transpose_a`` of ``a``."""
        names = list(self.attrs)
        pairs = ((i, f"transpose_{slot}") for i, slot in enumerate(self.inputs))
        return tuple((i, names.index(name)) for i, name in pairs if name in names)

    def absorb_transposed_views(
        self, inputs: Sequence[Any], attrs: tuple[Attr, ...], contiguous: Callable[[Any], bool]
    ) -> tuple[tuple[Any, ...], tuple[Attr, ...]]:
        """The same call, with each transposed view replaced by the matrix that it is a view of."""
        given, said = list(inputs), list(attrs)
        for i, j in self.transposable:
            if getattr(given[i], "ndim", 0) > 1 and not contiguous(given[i]):
                matrix = given[i].swapaxes(-2, -1)
                if contiguous(matrix):
                    given[i], said[j] = matrix, not said[j]
        return tuple(given), tuple(said)

    def is_optional(self, slot: str) -> bool:
        return slot in self.optional or slot in self.residuals or slot in self.workspace

    def canonical(self, attrs: Sequence[Any]) -> tuple[Attr, ...]:
        """The attributes as plain values of Python, each of its type: what caches may be asked for, since 1, 1.0 and
        True are no more one key, and a tensor's value is read now.

        Raises:
            TypeError: a value is not of its attribute's type.
            ValueError: an integer needs more than 64 bits, a number is too large for a float.
        """
        return tuple(
            self._attr(name, kind, value) for (name, kind), value in zip(self.attrs.items(), attrs, strict=True)
        )

    def _attr(self, name: str, kind: str, value: Any) -> Attr:
        if value is None and kind.endswith("?"):
            return None
        plain, expected = _KINDS[kind.removesuffix("?")]
        try:
            return plain(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            expected += " or None" if kind.endswith("?") else ""
            raised = TypeError if isinstance(error, TypeError) else ValueError
            raise raised(f"{self.name}: {name} is {_short(value)}, expected {expected}") from None

    def with_aliases(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """``named``, values by slot, and the outputs that are one of them."""
        return {**named, **{y: named[source] for y, source in self.alias.items() if source in named}}

    def factors(self, attrs: Sequence[Any]) -> dict[str, Any]:
        """What each alias of ``scale`` is multiplied by, where that is not 1."""
        values = dict(zip(self.attrs, attrs, strict=True))
        return {y: values[name] for y, name in self.scale.items() if values[name] != 1}

    def backward_outputs(self, inputs: Sequence[object]) -> tuple[str | None, ...]:
        """For each input the name of its gradient among the backward's outputs; None where there is none."""
        assert self.backward is not None, f"{self.name} has no backward"
        return tuple(
            f"d{slot}" if value is not None and f"d{slot}" in self.backward.outputs else None
            for slot, value in zip(self.inputs, inputs, strict=True)
        )


def _short(value: Any) -> str:
    """Its text on one line of an error."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "too large a number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def operator(**definition: Any) -> Callable[[Callable[..., Any]], Op]:
    """Makes an ``Op`` of the function that gives its name, public signature and docstring."""

    def define(bind: Callable[..., Any]) -> Op:
        for key in ("optional", "accepts_scalar", "vmappable"):
            definition[key] = frozenset(definition.get(key, ()))
        return Op(name=bind.__name__, bind=bind, **definition)

    return define
