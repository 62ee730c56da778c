"""The declarative definition of an operator: data that every frontend turns into functions of its framework."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from inspect import signature
from operator import index
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .hosting import Foreign
    from .library import Library

Attr = int | float | bool | str | tuple[Any, ...] | None

_INT64 = range(-(1 << 63), 1 << 63)


def _integer(value: Any) -> int:
    """The value of any object with __index__, such as NumPy's and torch's integers, except a bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "ndim", False):
        raise TypeError
    if (number := index(value)) not in _INT64:
        raise ValueError
    return number


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(_integer(v) for v in (value if isinstance(value, tuple | list) else (value,)))


def _rows(each: Callable[[Any], Attr]) -> Callable[[Any], Attr]:
    def rows(value: Any) -> tuple[Attr, ...]:
        if not isinstance(value, tuple | list) or not all(isinstance(row, tuple | list) for row in value):
            raise TypeError
        return tuple(map(each, value))

    return rows


def _number(value: Any) -> float:
    """No tensor with a gradient, which would be lost."""
    is_number = hasattr(value, "__float__") and not getattr(value, "ndim", 0) and not isinstance(value, bool)
    if not is_number or getattr(value, "requires_grad", False):
        raise TypeError
    return float(value) + 0.0  # 0.0 for -0.0: the two are one key


def _numbers(value: Any) -> tuple[float, ...]:
    return tuple(_number(v) for v in (value if isinstance(value, tuple | list) else (value,)))


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    """Refuses NUL, which ends a string in C, and line ends, which separate attributes."""
    if not isinstance(value, str):
        raise TypeError
    if not (value.isascii() and value.isprintable()):
        raise ValueError
    return str(value)


class AttributeType(NamedTuple):
    """A type of attributes."""

    plain: Callable[[Any], Attr]
    """Converts to a plain Python value."""
    expected: str
    """In an error."""
    letter: str
    """The type of a hosted operator's attribute (extra.py)."""
    stub: str
    """The annotation of a parameter."""
    schema: str
    """In a schema of torch's dispatcher. A dimension of an "int[]" may be symbolic."""
    key: str
    """In torch's call path, how a value becomes part of a key (torch.cpp); "x": Python binds it."""


ATTRIBUTE_TYPES = {
    "float": AttributeType(_number, "a number", "f", "float", "float", "f"),
    "int": AttributeType(_integer, "an integer of 64 bits", "i", "int", "int", "i"),
    "int[]": AttributeType(_integers, "integers of 64 bits", "I", "int | Sequence[int]", "SymInt[]", "l"),
    "float[]": AttributeType(_numbers, "numbers", "F", "float | Sequence[float]", "float[]", "x"),
    "int[][]": AttributeType(
        _rows(_integers), "a list of lists of integers of 64 bits", "J", "Sequence[Sequence[int]]", "int[][]", "x"
    ),
    "float[][]": AttributeType(
        _rows(_numbers), "a list of lists of numbers", "G", "Sequence[Sequence[float]]", "float[][]", "x"
    ),
    "bool": AttributeType(_bool, "True or False", "b", "bool", "bool", "b"),
    "str": AttributeType(_text, "a string of printable ASCII characters", "s", "str", "str", "s"),
}


@dataclass(frozen=True, eq=False)
class Rule:
    """A gradient made of operators: a function of a namespace, which has the library's operators in the framework at
    hand, and of inputs, outputs, gradients of outputs and attributes, which its parameters name. It returns a gradient
    for each input, or None."""

    function: Callable[..., Any]
    parameters: tuple[str, ...]

    def __call__(self, op: Op, namespace: Any, named: Mapping[str, Any]) -> tuple[Any, ...]:
        """One gradient, or None, for each input.

        Raises:
            TypeError: the function returned another number of gradients.
        """
        gradients = self.function(namespace, *(named[name] for name in self.parameters))
        gradients = gradients if isinstance(gradients, tuple | list) else (gradients,)
        if len(gradients) != len(op.inputs):
            raise TypeError(
                f"{op.name}: its backward returned {len(gradients)} gradients, expected {len(op.inputs)}, "
                f"for {', '.join(op.inputs)}"
            )
        return tuple(gradients)


class Autocast(Enum):
    """Changes that torch.autocast makes to a call. Inputs that are cast are the floating ones, but float64."""

    LOWER = "inputs are cast to its 16-bit dtype"
    FLOAT32_ON_CUDA = (
        "inputs are cast to float32; on a CPU to their widest dtype, and results to that of the vmappable inputs"
    )
    IF_REFUSED = "inputs are cast as those of FLOAT32_ON_CUDA are on a CPU, if the operator refuses them as they are"
    WIDE_LOSS = 'where x has 16 bits, the attribute dtype is "float32" unless it is given'
    LOWER_WIDE_LOSS = "as LOWER; then as WIDE_LOSS"


@dataclass(frozen=True)
class Product:
    """The product that an operator computes of two factors, perhaps with more around it."""

    factors: tuple[str | tuple[str, ...], str | tuple[str, ...]]
    """The input that each factor is, or those that make it up."""
    flops: Callable[[Any], int]
    """FLOPs of a call: a function of the same object as ``Op.shapes``. The backward has a product as large for each
    factor."""
    bilinear: bool = True
    """The outputs are linear in each factor; any other input is ``Op.added``. The derivatives, and those of the
    backward, are the two operators themselves (``bilinear_tangent`` and what follows it in aotops/formula.py)."""
    unless: str = ""
    """The attribute without which the operator is bilinear. With it, the formula holds."""
    fused: Callable[..., Any] | None = None
    """The operator as the framework's own products and elementwise functions, for a compiler that fuses these: a
    function of ``Fusing`` (aotops/formula.py) and of inputs, attributes and residuals, which its parameters name.
    Residuals are None, or given without inputs. Returns all ``results``, or NotImplemented."""
    fused_backward: Callable[..., Any] | None = None
    """The backward, likewise."""


@dataclass(frozen=True)
class Padding:
    """More columns of a matrix that change no result but those that are as long, which have zeros there. A compiler may
    then compute the matrix as a product of whole lines."""

    slot: str
    """The input that is padded, along its last axis."""
    value: float
    """Its values there."""
    results: tuple[str, ...]
    """The results that are as long as the input. Of a backward the only one is."""
    indices: tuple[str, ...]
    """Inputs of indices along the axis."""
    holds: Callable[[Any], bool]
    """Whether it holds for a call: a function of the same object as ``Op.shapes``."""


@dataclass(frozen=True)
class Parts:
    """A call that is composed of parts of axes that the entry takes whole."""

    dims: Callable[[Any], Mapping[str, str]]
    """As ``Op.dims``, with these axes split."""
    function: Callable[..., Any]
    """The results of a part, or those that are partial sums by ``dims``: a function of ``PartMathematics``
    (aotops/formula.py) and of inputs, None for absent ones, and attributes, which its parameters name."""


@dataclass(frozen=True, eq=False)
class Op:
    """The inputs, outputs, attributes and gradient of an operator.

    Its entries are ``aot_<name>_cpu`` and ``aot_<name>_cuda`` of its library. They take the ``slots`` in order: inputs,
    outputs, residuals, workspace. The gradient follows by name: ``backward`` takes ``dy`` for the output ``y`` and
    returns ``dx`` for the input ``x``; its other inputs are saved by the forward.
    """

    name: str
    bind: Callable[..., tuple[tuple[Any, ...], tuple[Attr, ...]]]
    """The public signature and docstring. Returns the inputs and attributes, in the order of ``inputs`` and ``attrs``.
    Its parameters are these, except attributes that depend on other arguments, such as which inputs are None."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    optional: frozenset[str] = frozenset()
    """Inputs that may be None, and outputs that a caller may leave out. Of a backward, an incoming gradient is None if
    nobody has read the output."""
    accepts_scalar: frozenset[str] = frozenset()
    """Inputs that accept a 0-dim tensor as a value for all elements, such as the gradient of a sum."""
    attrs: Mapping[str, str] = field(default_factory=dict)
    """Attributes and their types (ATTRIBUTE_TYPES); with a "?" it may be None, and is then absent for the entry."""
    residuals: tuple[str, ...] = ()
    """Outputs that only the backward needs, and recomputes if they are absent."""
    always_save_residuals: bool = False
    """Residuals are cheaper to keep than to recompute, on every device and for every size."""
    workspace: tuple[str, ...] = ()
    """Scratch memory."""
    backward: Op | None = None
    same_spec_as: Mapping[str, str] = field(default_factory=dict)
    """Outputs with the spec of an input."""
    shapes: Mapping[str, Callable[[Any], tuple[Any, ...]]] = field(default_factory=dict)
    """The shapes of all other outputs and residuals, for symbolic dimensions only; the library infers numbers. Each is
    a function of an object whose members are the inputs' shapes and the attributes."""
    alias: Mapping[str, str] = field(default_factory=dict)
    """Outputs that are an input, or another output, without a copy: the entry has no slot for them. If all are inputs,
    there is no kernel."""
    duplicates: Mapping[str, str] = field(default_factory=dict)
    """Optional outputs that have the values of another output, each with the spec of an input. Where the two have one
    dtype, the entry writes the other alone, which then stands for both (``merged``)."""
    alias_factor: Mapping[str, str] = field(default_factory=dict)
    """Aliases of a backward without a kernel that the framework, which can differentiate that, multiplies by an
    attribute. With 1 they are the alias itself."""
    dims: Callable[[Any], Mapping[str, str]] | None = None
    """The axes of each slot but the workspace, by name, from which sharding follows (aotops/sharding.py says how they
    are written): a function of the same object as ``shapes``. Without it an elementwise operator has independent axes
    alone, and others are not split."""
    parts: Parts | None = None
    """How more axes than those of ``dims`` are split."""
    vmappable: frozenset[str] = frozenset()
    """Slots that may have additional leading axes, over which results are independent: vmap adds one."""
    seeds: frozenset[str] = frozenset()
    """Inputs of random numbers that belong to places in a whole call. Where one is given, vmap adds no axis: examples
    with one seed have the same numbers."""
    vmap_same_rank: bool = False
    """vmap adds an axis only if all inputs have the same rank, because the kernel itself broadcasts leading axes."""
    min_rank: int = 0
    """The minimum rank of the ``vmappable`` inputs of an example of a batch."""
    broadcast: bool = False
    """Inputs of different shapes are broadcast by the frontend."""
    elementwise: bool = False
    """All tensors have the same shape, and results may have the strides of an input."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Inputs of which the backward needs only the spec if a residual of the same spec is kept: the residual is saved
    instead of the input, which may then be changed in place."""
    keeps: Callable[[Any], bool] | None = None
    """Whether residuals are kept with these attributes, the members of its argument. Where they are not, they have no
    elements, and ``instead`` and ``overwrites`` do not hold for them. Without it they always are."""
    saved_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Inputs and residuals that the backward, for which they are optional, takes for the gradients of these inputs
    alone. Where none of those is wanted, the inputs are not kept and the residuals not computed."""
    fuses: frozenset[str] = frozenset()
    """Results for which a compiler may evaluate ``formula``, because it fuses that into one pass. Where others are
    wanted, the entry is called. Those of an elementwise operator are all."""
    overwrites: Mapping[str, str] = field(default_factory=dict)
    """Outputs and residuals that the entry may write over an input of the same spec, at the same address. Of a backward
    the input is a residual of the forward, which nobody but the backward has."""
    formula: Callable[..., Any] | None = None
    """The operator as a composition: a function of the mathematics of a framework (aotops/formula.py) and of inputs and
    attributes, which its parameters name. Returns ``composed``. Frontends differentiate it where the operator has no
    kernel for a derivative: in forward mode, and for the derivatives of a backward."""
    fused: Callable[..., Any] | None = None
    """The operator as the framework's own reductions and elementwise functions, for a compiler that fuses these: as
    ``formula``, of ``Fusing`` (aotops/formula.py). It holds where inputs have elements."""
    product: Product | None = None
    """The product that it computes, if it is one."""
    padding: Padding | None = None
    """The padding of an input that changes no result."""
    autocast: Autocast | None = None
    """Changes that torch.autocast makes to a call."""
    rule: Rule | None = None
    """The gradient, where it is made of operators instead of a ``backward``."""
    mutates: tuple[str, ...] = ()
    """Inputs that the entry writes to. The operator then has no gradient; one that has returns the new state."""
    foreign: Foreign | None = None
    """The function that it hosts: of MindSpore's convention, in a library that does not know this one."""
    library: Library = field(default=None, repr=False)  # type: ignore[assignment]
    """Whose entries it has; set by ``Library``."""

    def bound_to(self, library: Library) -> Op:
        """The operator and its backward, as those of a library."""
        backward = self.backward
        if backward is not None and backward.library is not library:
            backward = backward.bound_to(library)
        return replace(self, library=library, backward=backward)

    @property
    def entry(self) -> str:
        """The name of its entries, without the device."""
        return "aot_hosted" if self.foreign else f"aot_{self.name}"

    @cached_property
    def entry_outputs(self) -> tuple[str, ...]:
        """Everything the entry writes: outputs, residuals, workspace."""
        return (*(y for y in self.outputs if y not in self.alias), *self.residuals, *self.workspace)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """``entry_outputs`` without the workspace."""
        return self.entry_outputs[: len(self.entry_outputs) - len(self.workspace)]

    @cached_property
    def slots(self) -> tuple[str, ...]:
        return (*self.inputs, *self.entry_outputs)

    @cached_property
    def composed(self) -> tuple[str, ...]:
        """The outputs of ``formula``: those that are not aliases."""
        return tuple(y for y in self.outputs if y not in self.alias)

    @cached_property
    def bilinear(self) -> tuple[str, str] | tuple[()]:
        """The two factors of a bilinear operator."""
        return self.product.factors if self.product and self.product.bilinear else ()  # type: ignore[return-value]

    @cached_property
    def added(self) -> tuple[str, ...]:
        """The inputs that a bilinear operator adds to its product."""
        return tuple(slot for slot in self.inputs if slot not in self.bilinear) if self.bilinear else ()

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """The forward's slots that the backward takes, in its order."""
        if self.rule is not None:
            return tuple(s for s in self.rule.parameters if s in self.slots)
        if self.backward is None:
            return ()
        gradients = {f"d{y}" for y in self.outputs}
        return tuple(s for s in self.backward.inputs if s not in gradients)

    @cached_property
    def constants(self) -> frozenset[str]:
        """The inputs that the backward has no gradient for."""
        if self.backward is None:
            return frozenset()
        return frozenset(x for x in self.inputs if f"d{x}" not in self.backward.outputs)

    def left_out(self, wanted: Iterable[str]) -> frozenset[str]:
        """The slots that are not kept where the gradients of these inputs are wanted (``saved_for``)."""
        named = frozenset(wanted)
        return frozenset(slot for slot, others in self.saved_for.items() if named.isdisjoint(others))

    @cached_property
    def unread(self) -> frozenset[str]:
        """The outputs that may be left unread: the backward takes none for their gradient, and reads no zeros; or they
        have no gradient."""
        backward = self.backward
        if backward is None:
            return frozenset()
        return frozenset(y for y in self.outputs if f"d{y}" in backward.optional or f"d{y}" not in backward.inputs)

    @cached_property
    def has_kernel(self) -> bool:
        return self.foreign is not None or set(self.alias) != set(self.outputs)

    @property
    def has_gradient(self) -> bool:
        return self.backward is not None or self.rule is not None

    @cached_property
    def public_attrs(self) -> tuple[str, ...]:
        """The attributes that are parameters of ``bind``."""
        return tuple(name for name in self.attrs if name in signature(self.bind).parameters)

    def takes_batch(self, slots: Iterable[str], ndims: Sequence[int | None]) -> bool:
        """Whether these slots may all have another leading axis. ``ndims``: the inputs' ranks without it."""
        ranks = {slot: n for slot, n in zip(self.inputs, ndims, strict=True) if n is not None}
        given = set(ranks.values())
        return (
            self.vmappable.issuperset(slots)
            and all(n >= self.min_rank for slot, n in ranks.items() if slot in self.vmappable)
            and self.seeds.isdisjoint(ranks)
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
        """The call with each transposed view replaced by the matrix that it is a view of."""
        given, said = list(inputs), list(attrs)
        for i, j in self.transposable:
            if getattr(given[i], "ndim", 0) > 1 and not contiguous(given[i]):
                matrix = given[i].swapaxes(-2, -1)
                if contiguous(matrix):
                    given[i], said[j] = matrix, not said[j]
        return tuple(given), tuple(said)

    def kept_residuals(self, attrs: Sequence[Any]) -> tuple[str, ...]:
        """The residuals that have elements with these attributes."""
        named = SimpleNamespace(**dict(zip(self.attrs, attrs, strict=True)))
        return self.residuals if self.keeps is None or self.keeps(named) else ()

    def replaced(self, attrs: Sequence[Any]) -> Mapping[str, str]:
        """``instead``, with these attributes."""
        return self.instead if self.instead and self.kept_residuals(attrs) else {}

    def call(self, attrs: Sequence[Any], shapes: Sequence[Any]) -> SimpleNamespace:
        """The object that ``shapes``, ``dims`` and ``Product.flops`` are functions of: by name, the inputs' shapes,
        None for absent ones, and the attributes."""
        return SimpleNamespace(
            **dict(zip(self.inputs, shapes, strict=True)), **dict(zip(self.attrs, attrs, strict=True))
        )

    def is_optional(self, slot: str) -> bool:
        return slot in self.optional or slot in self.residuals or slot in self.workspace

    def canonical(self, attrs: Sequence[Any]) -> tuple[Attr, ...]:
        """The attributes as plain Python values of their types. They can be keys of caches, for which 1, 1.0 and True
        would be equal, and which a tensor that changes would corrupt.

        Raises:
            TypeError: a value is not of its attribute's type, or there is not one for each.
            ValueError: an integer needs more than 64 bits, a number is too large for a float.
        """
        if len(attrs) != len(self.attrs):
            expected = ", ".join(self.attrs) or "none"
            raise TypeError(f"{self.name}: its definition returns {len(attrs)} attributes, expected {expected}")
        return tuple(
            self._attr(name, kind, value) for (name, kind), value in zip(self.attrs.items(), attrs, strict=True)
        )

    def _attr(self, name: str, kind: str, value: Any) -> Attr:
        if value is None and kind.endswith("?"):
            return None
        plain, expected, *_ = ATTRIBUTE_TYPES[kind.removesuffix("?")]
        try:
            if (given := plain(value)) == _INT64[0] and kind == "int?":  # entries take it for None
                raise ValueError
            return given
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            expected += " or None" if kind.endswith("?") else ""
            raised = TypeError if isinstance(error, TypeError) else ValueError
            raise raised(f"{self.name}: {name} is {_short(value)}, expected {expected}") from None

    def with_aliases(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """``named``, values by slot, with the outputs that are aliases of them."""
        return {**named, **{y: named[source] for y, source in self.alias.items() if source in named}}

    def merged(self, dtypes: Mapping[str, Any]) -> dict[str, str]:
        """``duplicates`` in a call: each output that is to be another.

        Args:
            dtypes: of the inputs by name, as a framework has them.
        """
        like = self.same_spec_as
        return {y: other for y, other in self.duplicates.items() if dtypes[like[y]] == dtypes[like[other]]}

    def factors(self, attrs: Sequence[Any]) -> dict[str, Any]:
        """The factor of each alias in ``alias_factor`` that is not 1."""
        values = dict(zip(self.attrs, attrs, strict=True))
        return {y: values[name] for y, name in self.alias_factor.items() if values[name] != 1}


def _short(value: Any) -> str:
    """One line for an error message."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python converts at most 4300 digits
        return "too large a number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def operator(**definition: Any) -> Callable[[Callable[..., Any]], Op]:
    """Makes an ``Op`` of a function, which has its name, public signature and docstring. ``backward``: an operator, or
    the fields of one, which is named ``<name>_backward`` and has the same attributes."""

    def define(bind: Callable[..., Any]) -> Op:
        fields = dict(definition)
        if isinstance(backward := fields.get("backward"), Mapping):
            own = {"attrs": fields.get("attrs", {}), **backward}
            fields["backward"] = _defined(f"{bind.__name__}_backward", _unbound, own)
        return _defined(bind.__name__, bind, fields)

    return define


_TUPLES = ("inputs", "outputs", "residuals", "workspace", "mutates")
_SETS = ("optional", "accepts_scalar", "vmappable", "seeds", "fuses")
_OF_SLOTS = ("same_spec_as", "shapes", "alias")


def _defined(name: str, bind: Callable[..., Any], fields: Mapping[str, Any]) -> Op:
    check_no_strings(name, {key: fields.get(key) for key in (*_TUPLES, *_SETS)})
    op = Op(name=name, bind=bind, **{**fields, **{key: frozenset(fields.get(key, ())) for key in _SETS}})
    _check_names(op)
    if op.mutates and op.has_gradient:
        raise NotImplementedError(f"{name}: an operator that writes to {', '.join(op.mutates)} has no gradient")
    if required := [slot for slot in op.added if slot not in op.optional]:
        raise TypeError(f"{op.name}: {required[0]} is required, expected it in optional: it is added to a product")
    return op


def _check_names(op: Op) -> None:
    """Raises ValueError for names that are not different, or that no slot has, and for types that no attribute has.
    Names of _SETS are not compared: a forward and its backward may have one set."""
    slots = (*op.inputs, *op.outputs, *op.residuals, *op.workspace)
    if len({*slots, *op.attrs}) < len(slots) + len(op.attrs):
        raise ValueError(
            f"{op.name}: tensors and attributes are {', '.join((*slots, *op.attrs))}, expected no name twice"
        )
    for attr, kind in op.attrs.items():
        if not isinstance(kind, str) or kind.removesuffix("?") not in ATTRIBUTE_TYPES:
            raise ValueError(f"{op.name}: the type of {attr} is {kind!r}, expected one of {', '.join(ATTRIBUTE_TYPES)}")
    for key in _OF_SLOTS:
        check_known(op.name, key, getattr(op, key), slots)
    for key in ("same_spec_as", "alias"):
        check_known(op.name, key, getattr(op, key).values(), slots)
    check_known(op.name, "mutates", op.mutates, op.inputs)
    if op.backward is not None:
        check_known(op.name, "the backward", op.backward.outputs, [f"d{x}" for x in op.inputs])
        check_known(op.name, "the backward", op.backward.inputs, (*slots, *(f"d{y}" for y in op.outputs)))


def check_no_strings(name: str, given: Mapping[str, Any]) -> None:
    """Raises TypeError for a string where a tuple of names is expected: its letters would be the names."""
    for what, names in given.items():
        if isinstance(names, str):
            raise TypeError(f"{name}: {what} is {names!r}, expected a tuple of names, as ({names!r},)")


def check_known(name: str, what: str, given: Iterable[str], known: Collection[str]) -> None:
    for each in given:
        if each not in known:
            raise ValueError(f"{name}: {what} names {each!r}, expected one of {', '.join(known) or 'none'}")


def _unbound(*_: Any) -> Any:
    raise TypeError("a backward is called with its inputs and attributes: it has no public signature")
