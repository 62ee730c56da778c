"""The public functions of operators, which take the arguments of torch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from aotops.hosting import NUMBERS, Namespace
from aotops.library import Library
from aotops.op import Op
from aotops.ops import BUILTIN
from aotops.spec import check_broadcast

from ..torch_schema import EXTRA, has_out
from . import call, dispatcher
from .autocast import caster
from .compositions import COMPOSED
from .eager import eager, is_worth_binding, run_eager
from .images import images_of
from .out import check_unrecorded, copied, write
from .registered import builtins, dispatched, namespaces
from .tensors import (
    DTYPES,
    KEEP_RESIDUALS_FROM,
    READS_TENSORS,
    Tensors,
    all_given,
    check_tensors,
    is_compiling,
    is_plain,
    is_symbolic,
    odd_kind,
    public_outputs,
    results_of,
    spec_of,
)


def functions(library: Library, module: str = __package__) -> dict[str, Callable[..., Any]]:
    """The functions of a library's operators, which it registers as ``torch.ops.<library>``, once in a process.
    ``module``: where they are found, for pickle."""
    of(library)
    dispatcher.register(library.ops.values())
    return {name: _public(op, module) for name, op in library.ops.items()}


def of(library: Library) -> Namespace:
    """The functions of a library's operators as a module, each made, and registered as ``torch.ops.<library>.<op>``,
    when it is first asked for: those that are defined later too."""
    made = namespaces.get(library)
    if made is None and is_compiling():
        raise RuntimeError("aotops.frontends.torch.of is called first in a compiled function, expected before it")
    return made or _namespace_of(library)


def _namespace_of(library: Library) -> Namespace:
    def make(op: Op, module: str) -> dict[str, Callable[..., Any]]:
        dispatcher.register([op])
        return {op.name: _public(op, module)}

    return namespaces.setdefault(library, Namespace(library, "torch", make))


def _public(op: Op, module: str) -> Callable[..., Any]:
    disp = dispatched[op]
    first, second = op.inputs[0], op.inputs[1] if len(op.inputs) > 1 else ""
    torchs_names = {"input": first, "other": second} if "input" not in op.inputs else {}
    composed = COMPOSED.get(op.name) if op.library is BUILTIN else None
    extra, _ = EXTRA.get(op.name, ("", "")) if composed else ("", "")  # None here, or composed
    takes_out, most = has_out(op), len(signature(op.bind).parameters)

    def sort(args, kwargs):
        """The inputs and attributes. ``input`` and ``other``, torch's names of the first two inputs, are accepted."""
        if extra and len(args) > most and args[most] is None:
            args = args[:most]
        inputs, attrs = op.bind(*args, **{torchs_names.get(n, n): v for n, v in kwargs.items() if n != extra})
        if op.foreign is not None:
            return _with_numbers(inputs), attrs
        number, tensor = inputs[:2] if op.broadcast else (None, None)
        if not (isinstance(number, (int, float)) and isinstance(tensor, Tensor)):
            return inputs, attrs
        # torch.add accepts a number first; without alpha the sum commutes, and the number is not rounded
        return op.bind(tensor, number) if attrs[0] == 1 else ((tensor.new_full((), number), tensor), attrs)

    def compose(args, kwargs):
        """NotImplemented for a call that the kernel serves, or refuses."""
        if composed is None or any(map(odd_kind, (*args, *kwargs.values()))):
            return NotImplemented
        return composed(function, *args, **{torchs_names.get(name, name): value for name, value in kwargs.items()})

    def route(run, args, kwargs):
        """The result of a composition, or of ``run``; written to ``out`` if that is given."""
        out = kwargs.pop("out", None) if takes_out else None
        if out is not None:
            check_unrecorded(op, out, (*args, *kwargs.values()))
        result = compose(args, kwargs)
        if result is NotImplemented:
            inputs, attrs = sort(args, kwargs)
            if out is not None and not is_compiling() and write(op, out, inputs, attrs):
                return out
            result = run(op, disp, inputs, attrs)
        return result if out is None else copied(op, out, result)

    def general(*args, **kwargs):
        return route(_general, args, kwargs)

    def bind(last, *attrs):
        if not is_worth_binding(op, attrs):
            return None
        named = dict.fromkeys(op.inputs) | dict(zip(op.public_attrs, attrs, strict=True))
        return eager(op, op.canonical(op.bind(**named)[1]), last).differentiable

    is_builtin = READS_TENSORS and not op.mutates
    parts = functools.partial(bind, False), general, caster(op), images_of(op), functools.partial(bind, True)
    plain = call.public(op, *parts) if is_builtin else general

    @functools.wraps(op.bind)
    def function(*args, **kwargs):
        return route(_dispatch, args, kwargs) if is_compiling() else plain(*args, **kwargs)

    function.__module__ = module
    # a code of its own: torch.compile limits the recompilations of a code
    function.__code__ = function.__code__.replace(co_name=op.name)  # type: ignore[attr-defined]
    if extra or takes_out:
        own = signature(op.bind)
        more = [Parameter(extra, Parameter.POSITIONAL_OR_KEYWORD, default=None)] if extra else []
        more += [Parameter("out", Parameter.KEYWORD_ONLY, default=None)] if takes_out else []
        function.__signature__ = own.replace(parameters=[*own.parameters.values(), *more])  # type: ignore[attr-defined]
    if is_builtin:
        builtins[op] = plain
        call.install_vectorcall(function, plain)
    return function


def _with_numbers(inputs: Sequence[Any]) -> Tensors:
    """Python's numbers as tensors."""
    if not any(type(value) in NUMBERS for value in inputs):
        return inputs
    device = next((value.device for value in inputs if isinstance(value, Tensor)), None)
    dtypes = [NUMBERS.get(type(value)) for value in inputs]
    return [
        torch.tensor(value, dtype=DTYPES[dtype], device=device) if dtype else value
        for value, dtype in zip(inputs, dtypes, strict=True)
    ]


def _general(op: Op, disp: Callable[..., Any], inputs: Tensors, attrs: tuple[Any, ...]):
    """A call that is not plain, or that the builtin refused. Raises for arguments that the operator does not accept."""
    check_tensors(op, inputs)
    if not is_symbolic(attrs):
        attrs = op.canonical(attrs)
    if op.broadcast and all_given(inputs):
        check_broadcast(op.name, op.inputs, list(filter(None, map(spec_of, inputs))))
    strided = op.elementwise and not all(t is None or t.is_contiguous() for t in inputs)
    if strided or op.mutates or is_plain is None or not is_plain(*inputs):
        return _dispatch(op, disp, inputs, attrs)
    # a backward by the dispatcher overwrites nothing, which matters where tensors are large
    if inputs[0] is not None and inputs[0].numel() < KEEP_RESIDUALS_FROM and not is_worth_binding(op, attrs):
        try:
            return _dispatch(op, disp, inputs, attrs)
        except (RuntimeError, TypeError, ValueError):  # the entry refuses the call: run_eager says why
            pass
    return run_eager(op, inputs, attrs)


def _dispatch(op: Op, disp: Callable[..., Any], inputs: Tensors, attrs: tuple[Any, ...]):
    if op.broadcast and all_given(inputs):
        inputs = torch.broadcast_tensors(*inputs)
    return public_outputs(op, results_of(disp(*inputs, *attrs)))
