"""The base of the frontends without autograd (NumPy, CuPy): each operator as a function, and its gradient as a function
``<op>_backward(dy, <arguments of the op>)``."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from aotops.hosting import NUMBERS, Namespace
from aotops.infer import MAX_NDIM, infer
from aotops.library import Library
from aotops.op import Attr, Op
from aotops.spec import TensorSpec, accumulate_dtype, check_broadcast, check_like, shape_text

Arrays = Sequence[Any]


class ArrayFrontend(ABC):
    """The primitives of an array library, from which ``functions`` makes the operators."""

    device: str
    """The device of its arrays: "cpu" or "cuda"."""
    xp: Any
    """The library."""
    plain_types: tuple[type, ...]
    """The types of its arrays that mean no more than their elements."""

    @abstractmethod
    def prepare(self, op: Op, slot: str, value: Any) -> Any:
        """The value as a contiguous, aligned array in native byte order: an array of the library, or of another one
        that exports its memory.

        Raises:
            TypeError: it is neither, or of a type with more meaning than its elements, which a result, a plain array,
                would lose.
            ValueError: it is on another device.
        """

    def check_writable(self, op: str, slot: str, value: Any) -> None:
        """Raises TypeError if the value is not a plain array of the library, ValueError if it is read-only."""
        if type(value) not in self.plain_types:
            library = self.xp.__name__
            raise TypeError(f"{op}: {slot} is a {type(value).__name__}, expected a {library}.ndarray to write to")
        if not getattr(value.flags, "writeable", True):
            raise ValueError(f"{op}: {slot} is read-only, expected an array to write to")
        if _overlaps_itself(value):
            raise ValueError(f"{op}: {slot} has elements that share memory, expected an array to write to")

    @abstractmethod
    def target(self, op: str, slot: str, out: Any) -> Any:
        """A view of a writable array that an entry can write to; None if the elements are not laid out plainly. Raises
        ValueError if it is on another device than the current one."""

    @abstractmethod
    def spec(self, array: Any) -> TensorSpec: ...

    @abstractmethod
    def empty(self, spec: TensorSpec, model: Any) -> Any:
        """An uninitialised array on model's device."""

    def device_of(self, array: Any) -> AbstractContextManager[Any]:
        """Makes the array's device the current one. Accepts other objects, which ``prepare`` refuses later."""
        return nullcontext()

    @abstractmethod
    def launch(self, op: Op, attrs: tuple[Attr, ...], arrays: Arrays) -> None:
        """Runs the entry on one array, or None, for each slot."""

    def plain(self, op: Op) -> Callable[[Arrays, tuple[Attr, ...], Any], Any] | None:
        """A function of inputs, attributes and ``out`` that runs a call whose arrays need no preparation, which takes
        ten times as long as a small call, and returns its result; None for any other call."""
        return None

    @abstractmethod
    def number(self, value: float, dtype: str, model: Any) -> Any:
        """An array without axes, on the device of ``model``, an array or None."""

    @abstractmethod
    def share_memory(self, a: Any, b: Any) -> bool:
        """Whether two arrays have an element in common; at most whether their extents overlap."""

    def functions(self, library: Library, module: str) -> dict[str, Callable[..., Any]]:
        """Each operator of a library, and its gradient, by name. ``module``: where they are found, for pickle."""
        return {name: f for op in library.ops.values() for name, f in self.functions_of(op, module).items()}

    def functions_of(self, op: Op, module: str) -> dict[str, Callable[..., Any]]:
        functions = {op.name: self._forward(op)}
        if op.has_gradient:
            functions[f"{op.name}_backward"] = self._backward(op)
        for name, function in functions.items():
            function.__module__, function.__name__, function.__qualname__ = module, name, name
        return functions

    @functools.cache  # noqa: B019  one frontend a framework, which is never freed
    def of(self, library: Library) -> Namespace:
        return Namespace(library, type(self).__module__.rpartition(".")[2], self.functions_of)

    def _forward(self, op: Op) -> Callable[..., Any]:
        takes_out, plain = _takes_out(op), self.plain(op)
        inputs_alone = -1 if op.attrs else len(op.inputs)  # of a call that is bound as it is

        @functools.wraps(op.bind)
        def function(*args, **kwargs):
            if plain and len(args) == inputs_alone and (not kwargs or (takes_out and [*kwargs] == ["out"])):
                found = plain(args, (), kwargs.get("out"))
                if found is not None:
                    return found
            out = kwargs.pop("out", None) if takes_out else None
            inputs, attrs = op.bind(*args, **kwargs)
            attrs = op.canonical(attrs)
            if plain and (found := plain(inputs, attrs, out)) is not None:
                return found
            if op.transposable:
                inputs, attrs = op.absorb_transposed_views(inputs, attrs, _contiguous)
            with self.device_of(inputs[0]):
                prepared = self._prepare(op, inputs)
                outs = None if out is None else _Outs(self, op.name, op.outputs, out)
                mutated = self._mutated(op, inputs, prepared, outs) if op.mutates else ()
                found = self._run(op, prepared, attrs, op.outputs, outs)
                for given, written in mutated:
                    if not self.share_memory(given, written):
                        given[...] = written
                return _one_or_all([found[y] for y in op.outputs], outs)

        if takes_out and op.outputs:
            _describe_out(function, op.outputs)
        return function

    def _mutated(self, op: Op, inputs: Arrays, prepared: list[Any], outs: _Outs | None) -> list[tuple[Any, Any]]:
        """Each input that the operator writes to, with what ``prepare`` made of it. An input that is read, and shares
        memory with one of them, becomes a copy: as in NumPy's own functions, what is read is as it was."""
        pairs: list[tuple[Any, Any]] = []
        for slot, given, used in zip(op.inputs, inputs, prepared, strict=True):
            if slot in op.mutates and given is not None:
                self.check_writable(op.name, slot, given)
                if outs is not None:
                    outs.check_apart(slot, given)
                near = [other for other, _ in pairs if self.share_memory(given, other)]
                if any(self.xp.shares_memory(given, other) for other in near):
                    raise ValueError(f"{op.name}: {slot} shares memory with another input that is written to")
                pairs.append((given, used))
        for i, (slot, used) in enumerate(zip(op.inputs, prepared, strict=True)):
            is_read = slot not in op.mutates and used is not None
            if is_read and any(self.share_memory(used, written) for _, written in pairs):
                prepared[i] = used.copy()
        return pairs

    def _backward(self, op: Op) -> Callable[..., Any]:
        gradients = tuple(f"d{x}" for x in op.inputs if op.backward is None or f"d{x}" in op.backward.outputs)
        takes_out = _takes_out(op)

        def function(dy, *args, **kwargs):
            out = kwargs.pop("out", None) if takes_out else None
            inputs, attrs = op.bind(*args, **kwargs)
            attrs = op.canonical(attrs)
            with self.device_of(inputs[0]):
                outs = None if out is None else _Outs(self, f"{op.name}_backward", gradients, out)
                found = self._gradients(op, dy, inputs, attrs, outs)
                return _one_or_all([found[d] for d in gradients], outs)

        parameters = [inspect.Parameter("dy", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        parameters += inspect.signature(op.bind).parameters.values()
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        unread = " and ".join(f"that of {y}" for y in op.outputs if y in op.unread)
        function.__doc__ = (
            f"The gradient of ``{op.name}``.\n\n"
            f"Args:\n    dy: the gradient of {op.name}'s result, like it; a tuple where there are several"
            f"{f', of which {unread} may be None, for zeros' if unread else ''}.\n"
            f"    The others are those of {op.name}.\n\n"
            f"Returns:\n    {', '.join(gradients)}; None where the input is None.\n"
        )
        if takes_out:
            _describe_out(function, gradients)
        return function

    def _gradients(self, op: Op, dy: Any, bound: Arrays, attrs: tuple[Attr, ...], outs: _Outs | None) -> dict[str, Any]:
        """By name, the gradient of each input that has one, None for an absent one. ``bound``: the inputs as given."""
        inputs = self._prepare(op, bound)
        dys = [dy] if len(op.outputs) == 1 else _several(f"{op.name}_backward: dy", dy, op.outputs, (tuple, list))
        given = dict(zip(op.inputs, inputs, strict=True))
        given |= {f"d{y}": g for y, g in zip(op.outputs, dys, strict=True)}
        # a backward that can do without a residual computes it itself
        optional = () if op.backward is None else op.backward.optional
        needed = {*op.outputs, *(slot for slot in op.kept_residuals(attrs) if slot not in optional)}
        if wanted := [slot for slot in op.saved if slot in needed]:
            given |= self._run(op, inputs, attrs, wanted)
        if op.rule is not None:
            found = op.rule(op, self.of(op.library), dict(zip(op.attrs, attrs, strict=True)) | given)
            return {f"d{x}": gradient for x, gradient in zip(op.inputs, found, strict=True)}
        backward = op.backward
        assert backward is not None
        taken = self._prepare(backward, [given.get(slot) for slot in backward.inputs])
        if backward.has_kernel:
            present = {f"d{slot}" for slot, value in zip(op.inputs, inputs, strict=True) if value is not None}
            dtypes = {slot: a is not None and a.dtype for slot, a in zip(backward.inputs, taken, strict=True)}
            merged = {y: d for y, d in backward.merged(dtypes).items() if {y, d} <= present}
            direct = None if op.broadcast else outs  # else its gradients have another shape
            given |= self._run(backward, taken, attrs, present - {*merged}, direct, list(given.values()))
            given |= {y: given[d] for y, d in merged.items()}
        else:
            given |= zip(backward.inputs, taken, strict=True)
            self._infer(backward, taken, attrs)
            expected = self._infer(op, inputs, attrs)
            for y in op.outputs:  # as a kernel would check
                check_like(backward.name, f"d{y}", self.spec(given[f"d{y}"]), y, expected[y])
        given = backward.with_aliases(given)
        factors = backward.factors(attrs)
        for x, value in zip(op.inputs, bound, strict=True) if op.broadcast else ():
            if value is not None:
                shape = (value if isinstance(value, self.xp.ndarray) else self.prepare(op, x, value)).shape
                value = _sum_to(given[f"d{x}"], shape, factors.get(f"d{x}", 1))
            given[f"d{x}"] = value
        return given

    def _prepare(self, op: Op, inputs: Arrays) -> list[Any]:
        if op.foreign and any(type(value) in NUMBERS for value in inputs):
            model = next((value for value in inputs if type(value) not in NUMBERS), None)
            numbers = [(value, NUMBERS.get(type(value))) for value in inputs]
            inputs = [self.number(value, dtype, model) if dtype else value for value, dtype in numbers]
        named = zip(op.inputs, inputs, strict=True)
        arrays = [None if value is None else self.prepare(op, slot, value) for slot, value in named]
        if not op.broadcast or any(a is None for a in arrays):
            return arrays
        specs = [self.spec(a) for a in arrays]
        check_broadcast(op.name, op.inputs, specs)
        for slot, spec in zip(op.inputs, specs, strict=True):
            if len(spec.shape) > MAX_NDIM:  # of which broadcast_arrays says less
                raise ValueError(f"{op.name}: {slot} has {len(spec.shape)} dimensions, expected at most {MAX_NDIM}")
        if all(spec.shape == specs[0].shape for spec in specs):
            return arrays
        return [self.prepare(op, slot, a) for slot, a in zip(op.inputs, self.xp.broadcast_arrays(*arrays), strict=True)]

    def _run(
        self, op: Op, inputs: Arrays, attrs: tuple[Attr, ...], wanted: Collection[str],
        outs: _Outs | None = None, kept: Arrays = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Runs the entry.

        Args:
            wanted: names of outputs and residuals.
            outs: where the caller wants them. An output that shares no memory with an input, or with an array of
                ``kept``, is written there.

        Returns:
            By name, what the entry wrote; None for what is not wanted.
        """
        specs = self._infer(op, inputs, attrs)
        model = next(a for a in inputs if a is not None)
        needed = {*wanted, *op.workspace, *(y for y in op.outputs if y not in op.optional)}
        written = outs.targets(specs, (*inputs, *kept)) if outs else {}
        written = {
            name: None if name not in needed else written[name] if name in written else self.empty(specs[name], model)
            for name in op.entry_outputs
        }
        self.launch(op, attrs, [*inputs, *written.values()])
        return written

    def _infer(self, op: Op, inputs: Arrays, attrs: tuple[Attr, ...]) -> dict[str, TensorSpec]:
        return infer(op, attrs, tuple(None if a is None else self.spec(a) for a in inputs), self.device)


class _Outs:
    """The argument ``out`` of a call: an array, or None, for each result."""

    def __init__(self, frontend: ArrayFrontend, op: str, results: Sequence[str], out: Any) -> None:
        self._frontend, self._op = frontend, op
        is_tuple = isinstance(out, tuple)
        arrays = _several(f"{op}: out", out, results, tuple) if is_tuple or len(results) != 1 else (out,)
        self._results = results
        self._slots = [f"out[{i}]" for i in range(len(arrays))] if is_tuple else ["out"]
        self._given = {i: array for i, array in enumerate(arrays) if array is not None}
        for i, array in self._given.items():
            frontend.check_writable(op, self._slots[i], array)
            for j in range(i):
                if j in self._given:
                    self.check_apart(self._slots[j], self._given[j], i)
        self._targets: dict[int, Any] = {}

    def check_apart(self, slot: str, other: Any, *places: int) -> None:
        """Raises ValueError if an array, of all or of those at some places, shares memory with another argument that is
        written to."""
        for i in places or self._given:
            if self._frontend.share_memory(self._given[i], other):
                raise ValueError(f"{self._op}: {self._slots[i]} shares memory with {slot}")

    def targets(self, specs: Mapping[str, TensorSpec], inputs: Arrays) -> dict[str, Any]:
        """By result, the arrays that an entry can write to: those that are laid out plainly and overlap none of
        ``inputs``. Raises TypeError or ValueError if one is not of its spec."""
        for i, array in self._given.items():
            if (spec := specs.get(self._results[i])) is None:
                continue
            self._check(i, spec)
            target = self._frontend.target(self._op, self._slots[i], array)
            overlaps = self._frontend.xp.may_share_memory
            if target is not None and not any(a is not None and overlaps(target, a) for a in inputs):
                self._targets[i] = target
        return {self._results[i]: target for i, target in self._targets.items()}

    def filled(self, results: Arrays) -> list[Any]:
        """The results, in the arrays given for them."""
        for i in self._given:
            if results[i] is None:
                raise ValueError(
                    f"{self._op}: {self._slots[i]} is an array, expected None: there is no {self._results[i]}"
                )
            self._check(i, self._frontend.spec(results[i]))
            self._frontend.target(self._op, self._slots[i], self._given[i])
        copied = {i: results[i] for i in self._given if results[i] is not self._targets.get(i)}
        if len(copied) > 1:  # a result may be an argument, which another's array overlaps
            copied = {i: result.copy() for i, result in copied.items()}
        for i, result in copied.items():
            self._given[i][...] = result
        return [self._given.get(i, result) for i, result in enumerate(results)]

    def _check(self, i: int, expected: TensorSpec) -> None:
        spec, what = self._frontend.spec(self._given[i]), f"{self._op}: {self._slots[i]} has"
        if spec.dtype != expected.dtype:
            raise TypeError(f"{what} dtype {spec.dtype}, expected {expected.dtype}")
        if spec.shape != expected.shape:
            raise ValueError(f"{what} shape {shape_text(spec.shape)}, expected {shape_text(expected.shape)}")


_MOST_SUMS = 1 << 20
"""Sums of strides that ``_overlaps_itself`` tries, in some tenths of a second. It takes an array that needs more, as of
several interleaved axes of a thousand elements each, for one that overlaps itself."""


def _overlaps_itself(array: Any) -> bool:
    """Whether two elements of an array lie at one address, as broadcasting and sliding windows make them."""
    if array.flags.c_contiguous or array.size < 2:
        return False
    axes = sorted((abs(stride), n - 1) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1)
    if axes[0][0] == 0:
        return True
    reaches = [array.itemsize - 1]  # bytes, by the axes of smaller strides
    for stride, most in axes:
        reaches.append(reaches[-1] + stride * most)
    # Two elements meet if a sum of strides, each up to as many times as its axis has elements after the first, is less
    # than an element. Of a slice or transposed view no stride is within the reach of the smaller ones.
    sums: set[int] = set()
    tried = 0
    for (stride, most), reach in zip(reversed(axes), reversed(reaches[:-1]), strict=True):
        found = {stride * i for i in range(1, min(most, reach // stride, _MOST_SUMS) + 1)}
        for total in sums:
            times = range(max(-most, -((total + reach) // stride)), min(most, (reach - total) // stride) + 1)
            tried += len(times)
            if tried > _MOST_SUMS:
                return True
            found.update(total + stride * i for i in times)
        tried += len(found)
        if tried > _MOST_SUMS:
            return True
        sums = found
    return bool(sums)


def _takes_out(op: Op) -> bool:
    """An operator may have an argument of that name."""
    return "out" not in inspect.signature(op.bind).parameters


def _describe_out(function: Callable[..., Any], results: Sequence[str]) -> None:
    """Adds ``out`` to the signature and the docstring of a function."""
    signature = inspect.signature(function)
    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = [*signature.parameters.values(), out]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    one = (
        "an array of its shape and dtype"
        if len(results) == 1
        else f"a tuple of arrays, or None, for {', '.join(results)}"
    )
    given = f"    out: {one}, to write the result to and return. It may be strided, and overlap the inputs.\n\n"
    head, returns, tail = inspect.cleandoc(function.__doc__ or "").partition("Returns:\n")
    function.__doc__ = f"{head.rstrip()}\n{given}{returns}{tail}" if returns else function.__doc__


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _contiguous(value: Any) -> bool:
    """True for other objects than arrays, which ``prepare`` refuses."""
    return getattr(getattr(value, "flags", None), "c_contiguous", True)


def _several(what: str, value: Any, names: Sequence[str], types: Any) -> Sequence[Any]:
    """The value, one for each of several names. Raises TypeError or ValueError if it is not that."""
    n, each = len(names), " and ".join(names)
    if not isinstance(value, types):
        found = "None" if value is None else f"a {type(value).__name__}"
        raise TypeError(f"{what} is {found}, expected a tuple of {n}, for {each}")
    if len(value) != n:
        raise ValueError(f"{what} has {len(value)}, expected {n}, for {each}")
    return value


def _one_or_all(results: list[Any], outs: _Outs | None) -> Any:
    """The results, in the arrays given for them. None where there is none, of an operator that writes to its inputs
    alone."""
    results = results if outs is None else outs.filled(results)
    return results[0] if len(results) == 1 else tuple(results) or None


def _sum_to(gradient: Any, shape: tuple[int, ...], factor: float) -> Any:
    """The gradient of a broadcast input: summed over the axes that it was broadcast along, times a factor."""
    new = gradient.ndim - len(shape)
    axes = (*range(new), *(new + i for i, n in enumerate(shape) if n == 1 and gradient.shape[new + i] != 1))
    if not axes and factor == 1:
        return gradient
    dtype = gradient.dtype
    total = gradient.sum(axis=axes, dtype=accumulate_dtype(dtype.name))
    return (total * factor).astype(dtype).reshape(shape)
