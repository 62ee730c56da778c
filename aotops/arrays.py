"""The base of the frontends without autograd (NumPy, CuPy): each operator as a function, and its gradient as a function
``<op>_backward(dy, <arguments of the op>)``."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .hosting import NUMBERS, Namespace
from .infer import infer
from .library import Library
from .op import Attr, Op, Rule
from .spec import TensorSpec, accumulate_dtype, check_broadcast, check_like

Arrays = Sequence[Any]


class ArrayFrontend(ABC):
    """The primitives of an array library, from which ``functions`` makes the operators."""

    device: str
    """The device of its arrays: "cpu" or "cuda"."""

    @abstractmethod
    def prepare(self, op: Op, slot: str, value: Any) -> Any:
        """The value as a contiguous, aligned array in native byte order. Raises TypeError if it is not an array, or is
        of a subclass with more meaning than its elements, which a result, a plain array, would lose."""

    @abstractmethod
    def spec(self, array: Any) -> TensorSpec: ...

    @abstractmethod
    def empty(self, spec: TensorSpec, model: Any) -> Any:
        """An uninitialised array on model's device."""

    def device_of(self, array: Any) -> AbstractContextManager[Any]:
        """Makes the array's device the current one. Accepts other objects, which ``prepare`` refuses later."""
        return nullcontext()

    @abstractmethod
    def broadcast(self, arrays: Arrays) -> Arrays: ...

    @abstractmethod
    def launch(self, op: Op, attrs: tuple[Attr, ...], arrays: Arrays) -> None:
        """Runs the entry on one array, or None, for each slot."""

    @abstractmethod
    def number(self, value: float, dtype: str, model: Any) -> Any:
        """An array without axes, on the device of ``model``, an array or None."""

    def write_back(self, op: Op, slot: str, given: Any, written: Any) -> None:
        """Writes to an input what an entry wrote to the copy of it that ``prepare`` made."""
        given[...] = written

    def functions(self, library: Library, module: str) -> dict[str, Callable[..., Any]]:
        """Each operator of a library, and its gradient, by name. ``module``: where they are found, for pickle."""
        functions: dict[str, Callable[..., Any]] = {}
        for op in library.ops.values():
            functions |= self.functions_of(op, module)
        return functions

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
        @functools.wraps(op.bind)
        def function(*args, **kwargs):
            inputs, attrs = op.bind(*args, **kwargs)
            attrs = op.canonical(attrs)
            if op.transposable:
                inputs, attrs = op.absorb_transposed_views(inputs, attrs, _contiguous)
            with self.device_of(inputs[0]):
                prepared = self._prepare(op, inputs)
                results = self._run(op, prepared, attrs, op.outputs)
                for slot, given, used in zip(op.inputs, inputs, prepared, strict=True) if op.mutates else ():
                    if slot in op.mutates and given is not used:
                        self.write_back(op, slot, given, used)
                return _one_or_all(results)

        return function

    def _backward(self, op: Op) -> Callable[..., Any]:
        rule, backward = op.rule, op.backward
        differentiate = self._by_rule(op, rule) if rule else self._by_operator(op, backward)  # type: ignore[arg-type]

        def function(dy, *args, **kwargs):
            bound, attrs = op.bind(*args, **kwargs)
            attrs = op.canonical(attrs)
            with self.device_of(bound[0]):
                return differentiate(dy, bound, attrs)

        parameters = [inspect.Parameter("dy", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        parameters += inspect.signature(op.bind).parameters.values()
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        gradients = [f"d{slot}" for slot in op.inputs if backward is None or f"d{slot}" in backward.outputs]
        function.__doc__ = (
            f"The gradient of ``{op.name}``.\n\n"
            f"Args:\n    dy: the gradient of {op.name}'s result, like it; a tuple where there are several.\n"
            f"    The others are those of {op.name}.\n\n"
            f"Returns:\n    {', '.join(gradients)}; None where the input is None.\n"
        )
        return function

    def _by_rule(self, op: Op, rule: Rule) -> Callable[..., Any]:
        def differentiate(dy, bound, attrs):
            inputs = self._prepare(op, bound)
            given = dict(zip((*op.inputs, *op.attrs), (*inputs, *attrs), strict=True))
            given |= zip((f"d{y}" for y in op.outputs), _gradients_of(op, dy), strict=True)
            if outputs := [slot for slot in op.saved if slot in op.outputs]:
                given |= zip(outputs, self._run(op, inputs, attrs, outputs), strict=True)
            return _one_or_all(rule(op, self.of(op.library), given))

        return differentiate

    def _by_operator(self, op: Op, backward: Op) -> Callable[..., Any]:
        gradients = [f"d{slot}" for slot in op.inputs if f"d{slot}" in backward.outputs]

        def differentiate(dy, bound, attrs):
            inputs = self._prepare(op, bound)
            dys = _gradients_of(op, dy)
            given = dict(zip(op.inputs, inputs, strict=True))
            given |= {f"d{y}": g for y, g in zip(op.outputs, dys, strict=True)}
            if outputs := [slot for slot in op.saved if slot in op.outputs]:
                given |= zip(outputs, self._run(op, inputs, attrs, outputs), strict=True)
            if backward.has_kernel:
                taken = self._prepare(backward, [given.get(slot) for slot in backward.inputs])
                present = {f"d{slot}" for slot, value in zip(op.inputs, inputs, strict=True) if value is not None}
                given |= zip(backward.results, self._run(backward, taken, attrs, present), strict=True)
            else:
                given = dict(
                    zip(backward.inputs, self._prepare(backward, [given[s] for s in backward.inputs]), strict=True)
                )
                self._check_gradients(op, inputs, attrs, given)
            given = backward.with_aliases(given)
            if not op.broadcast:
                return _one_or_all([given[g] for g in gradients])
            factors = backward.factors(attrs)
            return _one_or_all(
                [
                    None if value is None else _sum_to(given[f"d{x}"], value.shape, factors.get(f"d{x}", 1))
                    for x, value in zip(op.inputs, bound, strict=True)
                ]
            )

        return differentiate

    def _prepare(self, op: Op, inputs: Arrays) -> Arrays:
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
        if all(spec.shape == specs[0].shape for spec in specs):
            return arrays
        return [self.prepare(op, slot, a) for slot, a in zip(op.inputs, self.broadcast(arrays), strict=True)]

    def _check_gradients(self, op: Op, inputs: Arrays, attrs: tuple[Attr, ...], gradients: dict[str, Any]) -> None:
        """For a backward without a kernel, which would check it: each ``dy`` is like ``y``."""
        assert op.backward is not None
        self._infer(op.backward, list(gradients.values()), attrs)
        expected = self._infer(op, inputs, attrs)
        for y in op.outputs:
            check_like(op.backward.name, f"d{y}", self.spec(gradients[f"d{y}"]), y, expected[y])

    def _run(self, op: Op, inputs: Arrays, attrs: tuple[Attr, ...], wanted: Sequence[str] | set[str]) -> list[Any]:
        """``wanted``: names of outputs and residuals. Returns these in the order of a sequence; for a set, one for each
        of ``op.results``, None for those that are not wanted."""
        specs = self._infer(op, inputs, attrs)
        model = next(a for a in inputs if a is not None)
        needed = {*wanted, *op.workspace, *(y for y in op.outputs if y not in op.optional)}
        written = {name: self.empty(specs[name], model) if name in needed else None for name in op.entry_outputs}
        self.launch(op, attrs, [*inputs, *written.values()])
        return [written[name] for name in (op.results if isinstance(wanted, set) else wanted)]

    def _infer(self, op: Op, inputs: Arrays, attrs: tuple[Attr, ...]) -> dict[str, TensorSpec]:
        return infer(op, attrs, tuple(None if a is None else self.spec(a) for a in inputs), self.device)


def _contiguous(value: Any) -> bool:
    """True for other objects than arrays, which ``prepare`` refuses."""
    return getattr(getattr(value, "flags", None), "c_contiguous", True)


def _gradients_of(op: Op, dy: Any) -> Sequence[Any]:
    """One for each output."""
    n = len(op.outputs)
    if n == 1:
        return [dy]
    if not isinstance(dy, tuple | list):
        what = "None" if dy is None else f"a {type(dy).__name__}"
        raise TypeError(f"{op.name}_backward: dy is {what}, expected a tuple of {n}, for {' and '.join(op.outputs)}")
    if len(dy) != n:
        raise ValueError(f"{op.name}_backward: dy has {len(dy)}, expected {n}, for {' and '.join(op.outputs)}")
    return dy


def _one_or_all(results: Sequence[Any]) -> Any:
    """None where there is no result, of an operator that writes to its inputs alone."""
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
