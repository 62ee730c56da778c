"""The row of an operator: all that is tried on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtypes import numpy_dtype

if TYPE_CHECKING:
    from aotops.bench.work import Work

Arrays = dict[str, "np.ndarray | None"]
Shape = tuple[int, ...]

F32, F64, I32, I64 = "float32", "float64", "int32", "int64"
FLOATING = "expected float16, bfloat16, float32 or float64"
X = ((2, 3), F32)
"""An input of a ``Bad`` call."""


@dataclass(frozen=True)
class Case:
    """A call: shapes by input (None for an optional one that is not given), and the other arguments."""

    shapes: dict[str, Shape | None]
    attrs: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    """Inputs are normally distributed with this deviation ..."""
    mean: float = 0.0
    """... and, the first of them, about this mean."""
    grid: float = 0.0
    """They are multiples of this, where it is not 0: sums of such are exact in every dtype."""
    classes: dict[str, int] = field(default_factory=dict)
    """Inputs that are integers, from 0 up to this."""
    ascending: tuple[str, ...] = ()
    """Inputs of these that are sorted."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Inputs with a dtype of their own (int64 for ``classes`` without it). Integers without ``classes`` are below 100,
    and above -100 where they have a sign; complex numbers and those of 8 bits are normally distributed."""
    wide: tuple[str, ...] = ()
    """Inputs and results that are float32 where a dtype of 16 bits is tried."""
    constants: tuple[str, ...] = ()
    """Inputs that have no gradient, such as weights of classes. They are positive, so that no divisor is near 0."""
    magnified: float = 1.0
    """By how much the formula itself magnifies a rounding error of its inputs: the condition number."""
    grad_condition: float = 1.0
    """The condition number of the gradient, relative to that of the formula."""
    inner_roundings: int = 0
    """Roundings of the dtype itself that a result may have besides its own: those of the factors of a product."""
    dtype_roundings: int = 0
    """Roundings of the dtype itself that a gradient may have: one for each of the terms that a framework sums over a
    broadcast axis, as it does for its own operators; or those of a result that the gradient is computed from."""

    @property
    def given(self) -> dict[str, Shape]:
        """The shapes of the inputs that are not None."""
        return {slot: shape for slot, shape in self.shapes.items() if shape is not None}

    def array_dtype(self, slot: str) -> str:
        """The dtype of an array that the reference takes: float64 for an input of the dtype that is tried."""
        return self.dtypes.get(slot, "int64" if slot in self.classes else "float64")

    def random(self, random: np.random.Generator) -> Arrays:
        """Inputs: float64, but those with a dtype of their own."""
        arrays: Arrays = {}
        for slot, shape in self.shapes.items():
            if shape is None:
                arrays[slot] = None
            elif slot in self.classes or slot in self.dtypes:
                arrays[slot] = self._own(random, slot, shape)
            else:
                values = random.normal(0.0 if arrays else self.mean, self.scale, shape)
                values = abs(values) if slot in self.constants else values
                arrays[slot] = np.round(values / self.grid) * self.grid if self.grid else values
        return arrays

    def _own(self, random: np.random.Generator, slot: str, shape: Shape) -> np.ndarray:
        """An input with a dtype of its own."""
        dtype = numpy_dtype(self.array_dtype(slot))
        if slot in self.classes:
            most = self.classes[slot] or (0 in shape)  # nothing is drawn then
            drawn = np.asarray(random.integers(0, most, shape)).astype(dtype)
            return np.sort(drawn) if slot in self.ascending else drawn
        if dtype.kind in "biu":
            low, high = (0, 2) if dtype.kind == "b" else (-99 if dtype.kind == "i" else 0, 100)
            return np.asarray(random.integers(low, high, shape)).astype(dtype)
        values = random.normal(0, self.scale, shape)
        return (values + 1j * random.normal(0, self.scale, shape) if dtype.kind == "c" else values).astype(dtype)

    def __repr__(self) -> str:
        """Python that makes it, without what is left at its default."""
        default, said = Case({}), [f"{self.shapes!r}"]
        said += [f"{self.attrs!r}"] if self.attrs else []
        others = (f.name for f in fields(self) if f.name not in ("shapes", "attrs"))
        said += [f"{name}={getattr(self, name)!r}" for name in others if getattr(self, name) != getattr(default, name)]
        return f"Case({', '.join(said)})"

    def __str__(self) -> str:
        shapes = [f"{slot}{'x'.join(map(str, s)) or '0dim'}" for slot, s in self.given.items()]
        attrs = [f"{name}={value}" for name, value in self.attrs.items()]
        return "-".join([*shapes, *attrs, *([f"mean={self.mean:g}"] if self.mean else []), *self.wide]).replace(" ", "")


@dataclass(frozen=True)
class Bad:
    """A call with one thing wrong."""

    arrays: dict[str, Any]
    """Shape and dtype by input; anything else is passed as it is."""
    attrs: dict[str, Any]
    error: type[Exception] | tuple[type[Exception], ...]
    words: tuple[str, ...]
    """All of them are in the error's text, and the operator's name."""
    served_by: tuple[str, ...] = ()
    """Frameworks whose frontend composes what the kernel refuses."""

    def __init__(self, arrays, attrs, error, *words, served_by=()):
        given = {"arrays": arrays, "attrs": attrs, "error": error, "words": words, "served_by": served_by}
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return "-".join(self.words).replace(" ", "_")


class Draw:
    """The means to draw a random call."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        from hypothesis import strategies

        self._draw, self._st = draw, strategies

    def integer(self, low: int, high: int) -> int:
        return self._draw(self._st.integers(low, high))

    def choice(self, *values: Any) -> Any:
        return self._draw(self._st.sampled_from(values))

    def flag(self) -> bool:
        return self._draw(self._st.booleans())

    def size(self) -> int:
        return self.integer(0, 5)

    def shape(self, most: int = 4) -> Shape:
        return self._draw(self._st.lists(self._st.integers(0, 5), max_size=most).map(tuple))

    def broadcast(self, shape: Shape) -> tuple[Shape, Shape]:
        """This shape, and one that broadcasts to it, in either order."""
        few = tuple(1 if self.flag() else dim for dim in shape[self.integer(0, len(shape)) :])
        return self._draw(self._st.permutations([shape, few]))


def _no_defaults(dtype: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Row:
    """All that is tried on an operator."""

    reference: Callable[..., Any]
    """The formula in NumPy, as plain as can be: a function of the public function's arguments, by name, that takes
    float64 arrays and gives the result, a tuple where there are several."""
    cases: tuple[Case, ...] = ()
    """Shapes to think of: 0-dim, empty, one element, odd, one axis and several, each optional input alone; and one for
    each path of a kernel that size decides."""
    under_load: tuple[Case, ...] = ()
    """More for ``soak`` on a GPU: one for each path of a kernel that only larger tensors take."""
    draw: Callable[[Draw], Case] | None = None
    """A random call that the operator takes, of small tensors."""
    bad: tuple[Bad, ...] = ()
    """Calls that it refuses."""
    bench: tuple[Work, ...] = ()
    """The calls that ``aotops bench`` measures: each variant's tensors, which give its shapes, bytes and FLOPs."""
    torch: Callable[..., Any] | None = None
    """The operator in torch: a function of the module ``torch`` and the public function's arguments. Without it, that
    of ``torch.nn.functional`` of the operator's name, whose arguments but the first have the same names."""
    samples: Mapping[str, Case] | None = None
    """The cases that are tried in every context of torch (contexts.py), by the suffix of its name; without it, the
    first case of a small matrix."""
    opcheck: tuple[Case, ...] = ()
    """More of what ``torch.library.opcheck`` is given, besides the samples: each optional input absent."""
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
    """The dtypes to try; ``check`` leaves out what the operator refuses."""
    indeterminate: Mapping[float, float] = field(default_factory=dict)
    """A value of an input for which the formula says infinity times 0, and its limit there: a result may be NaN or the
    limit."""
    defaults: Callable[[str], dict[str, Any]] = _no_defaults
    """By dtype, the arguments for which None, or nothing, stands for something that depends on it."""
    gradient: bool = True
    """Whether the operator has a gradient."""
    complex: bool = False
    """The reference takes complex numbers: its derivative is then the imaginary part of a tiny imaginary step. For what
    has kinks, about which finite differences are wrong, or costs much, since one step is enough."""

    def results(self, arrays: Arrays, attrs: dict[str, Any], dtype: str) -> tuple[np.ndarray, ...]:
        """The formula's value, in float64, where ``dtype`` is tried."""
        given = {name: value for name, value in attrs.items() if value is not None}
        results = self.reference(**arrays, **self.defaults(dtype) | given)
        return tuple(np.asarray(y) for y in (results if isinstance(results, tuple) else (results,)))

    def in_torch(self, torch: Any, name: str) -> Callable[..., Any]:
        """torch's own, which takes the first input by position and all else by name."""
        return partial(self.torch, torch) if self.torch else getattr(torch.nn.functional, name)
