"""The bprop of a rule made of operators, as hosted operators may state, and of a backward that has no gradient."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import ops

from aotops.hosting import written_out
from aotops.op import Attr, Op, Rule

from .specs import zeros_like


def bprop_of_rule(op: Op, rule: Rule, attrs: Sequence[Attr], functions: Any) -> Callable[..., Any]:
    """The bprop that a rule is. ``functions``: those of the library's operators."""
    n, hidden = len(op.outputs), len(op.entry_outputs) > 1
    out = {y: f"out[{i}]" if hidden else "out" for i, y in enumerate(op.outputs)}
    out |= {f"d{y}": f"d{each}" for y, each in list(out.items())}
    values = {name: f"attr_{name}" for name in op.attrs}
    arguments = "".join(f", {out.get(name, values.get(name, name))}" for name in rule.parameters)
    inputs = "".join(f"{slot}, " for slot in op.inputs)
    body = f"return fill(({inputs}), rule(functions{arguments}))"
    known = {values[name]: value for name, value in zip(op.attrs, attrs, strict=True)}
    function, expected, name = _with_source(rule.function), len(op.inputs), op.name
    assert n

    def fill(inputs, found):
        gradients = found if isinstance(found, (tuple, list)) else (found,)
        if len(gradients) != expected:
            raise TypeError(f"{name}: its backward returned another number of gradients than there are inputs")
        return tuple([zeros_like(x) if g is None else g for g, x in zip(gradients, inputs)])  # noqa: B905

    return written_out("bprop", f"({inputs}out, dout)", body, fill=fill, rule=function, functions=functions, **known)


def _with_source(function: Callable[..., Any]) -> Callable[..., Any]:
    """A lambda as a function with a name: graph mode cannot find the source of a lambda that is an argument."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != "<lambda>":
        return function
    lines = linecache.getlines(code.co_filename)
    names = code.co_varnames[: code.co_argcount]
    found = {
        ast.unparse(node.body)
        for node in ast.walk(ast.parse("".join(lines)))
        if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno
        if tuple(arg.arg for arg in node.args.args) == names
    }
    if len(found) != 1:
        return function
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    outer = function.__globals__ | {name: cell.cell_contents for name, cell in cells}
    used = {name: outer[name] for name in (*code.co_names, *code.co_freevars) if name in outer}
    return written_out("rule", f"({', '.join(names)})", f"return {found.pop()}", **used)


class _Refuse(ops.PrimitiveWithInfer):
    """Raises when PyNative calls it and when graph mode compiles it."""

    def __init__(self, op: Op) -> None:
        super().__init__(f"{op.name}refusal")
        self.op = op

    def __call__(self, *_):
        raise NotImplementedError(f"{self.op.name} has no gradient: derivatives of a higher order are not supported")

    __infer__ = __call__


def refusal(backward: Op, given: Sequence[str]) -> Callable[..., Any]:
    """The bprop of a backward that states no gradient. Without one MindSpore's error would not name the operator."""
    inputs = "".join(f"{slot}, " for slot in given)
    return written_out("refusal", f"({inputs}out, dout)", f"return refuse({inputs})", refuse=_Refuse(backward))
