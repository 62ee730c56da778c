"""Expressions of a declaration, such as ``cdiv(n, BLOCK)``: of the names of dimensions, attributes, sizes and
constexprs. Each is evaluated here, for the launch plan of ``aotops check``, and written as C++ for the library.
Integers have 64 bits in both."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Kind = Literal["int", "float", "bool"]

FUNCTIONS = {"cdiv": 2, "min": 2, "max": 2, "next_power_of_2": 1}
"""Their arguments. ``cdiv(a, b)`` is the quotient rounded up."""
_OPERATORS: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "add"),
    ast.Sub: ("-", "sub"),
    ast.Mult: ("*", "mul"),
    ast.FloorDiv: ("//", "div"),
    ast.Mod: ("%", "mod"),
}
_COMPARISONS: dict[type, str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_INT64 = range(-(1 << 63), 1 << 63)


class Uncomputable(ArithmeticError):
    """A division by zero, or an integer of more than 64 bits."""


@dataclass(frozen=True)
class Expression:
    """An expression whose names are known, each with its kind."""

    text: str
    kinds: Mapping[str, Kind]

    @cached_property
    def tree(self) -> ast.expr:
        return ast.parse(self.text, mode="eval").body

    @cached_property
    def kind(self) -> Kind:
        return _Kinds(self).of(self.tree)

    @cached_property
    def names(self) -> frozenset[str]:
        called = {node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        return frozenset(n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n not in called)

    def value(self, named: Mapping[str, Any]) -> Any:
        """Its value, as the library computes it.

        Raises:
            Uncomputable: a division by zero, or an integer that needs more than 64 bits.
        """
        return _evaluated(self.tree, named)

    def cpp(self, named: Mapping[str, str]) -> str:
        """C++ in which ``named`` stands for each name, and ``m`` is an ``Arithmetic`` (triton.h)."""
        return _cpp(self.tree, named)


def parse(text: Any, kinds: Mapping[str, Kind]) -> Expression:
    """An expression of names.

    Raises:
        ValueError: it is none, or has another name or function.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        text = repr(text)
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is no expression, expected a string such as 'cdiv(n, BLOCK)'")
    expression = Expression(text.strip(), kinds)
    try:
        tree = expression.tree
    except SyntaxError:
        raise ValueError(f"{text!r} is no expression, expected one such as 'cdiv(n, BLOCK)'") from None
    _Kinds(expression).of(tree)
    return expression


class _Kinds:
    """The kind of each node. Refuses what is not of the language."""

    def __init__(self, expression: Expression) -> None:
        self.text, self.kinds = expression.text, expression.kinds

    def of(self, node: ast.expr) -> Kind:
        match node:
            case ast.Constant(value=bool()):
                return "bool"
            case ast.Constant(value=int() as value) if value in _INT64:
                return "int"
            case ast.Constant(value=float()):
                return "float"
            case ast.Name(id=name):
                return self._name(name)
            case ast.BinOp(left=left, op=op, right=right):
                return self._arithmetic(op, left, right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._number(operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._expect(operand, "bool")
                return "bool"
            case ast.BoolOp(values=values):
                for each in values:
                    self._expect(each, "bool")
                return "bool"
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
                for each in (left, *others):
                    self.of(each)
                return "bool"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._expect(test, "bool")
                return "float" if "float" in (self.of(body), self.of(orelse)) else self.of(body)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if len(args) == FUNCTIONS.get(name):
                for each in args:
                    self._expect(each, "int")
                return "int"
        raise ValueError(
            f"{self.text!r} has {ast.unparse(node)!r}, expected names, numbers, + - * // %, comparisons, and, or, not, "
            f"if else, {', '.join(FUNCTIONS)}"
        )

    def _name(self, name: str) -> Kind:
        if name not in self.kinds:
            raise ValueError(f"{self.text!r} has {name}, expected some of {', '.join(sorted(self.kinds)) or 'no name'}")
        return self.kinds[name]

    def _arithmetic(self, op: ast.operator, left: ast.expr, right: ast.expr) -> Kind:
        kinds = {self._number(left), self._number(right)}
        if isinstance(op, ast.Div) or (type(op) in _OPERATORS and "float" in kinds):
            if isinstance(op, ast.FloorDiv | ast.Mod):
                raise ValueError(f"{self.text!r} has // or % of a number that is no integer")
            return "float"
        if type(op) not in _OPERATORS:
            raise ValueError(f"{self.text!r} has {type(op).__name__}, expected + - * // % or /")
        return "int"

    def _number(self, node: ast.expr) -> Kind:
        kind = self.of(node)
        if kind == "bool":
            raise ValueError(f"{self.text!r} computes with {ast.unparse(node)!r}, which is True or False")
        return kind

    def _expect(self, node: ast.expr, kind: Kind) -> None:
        if self.of(node) != kind:
            expected = "an integer" if kind == "int" else "a comparison"
            raise ValueError(f"{self.text!r} has {ast.unparse(node)!r}, expected {expected} there")


# ---------------------------------------------------------------------------------------------------------- in Python


def _evaluated(node: ast.expr, named: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return named[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _computed(op, _evaluated(left, named), _evaluated(right, named))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _checked(-_evaluated(operand, named))
        case ast.UnaryOp(operand=operand):
            return not _evaluated(operand, named)
        case ast.BoolOp(op=op, values=values):
            each = (_evaluated(value, named) for value in values)
            return all(each) if isinstance(op, ast.And) else any(each)
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_evaluated(each, named) for each in (left, *others)]
            return all(_compared(op, a, b) for op, a, b in zip(ops, values, values[1:], strict=False))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _evaluated(body if _evaluated(test, named) else orelse, named)
        case ast.Call(func=ast.Name(id=name), args=args):
            return _called(name, [_evaluated(each, named) for each in args])
    raise AssertionError(ast.dump(node))


def _computed(op: ast.operator, a: Any, b: Any) -> Any:
    match op:
        case ast.Add():
            return _checked(a + b)
        case ast.Sub():
            return _checked(a - b)
        case ast.Mult():
            return _checked(a * b)
    if not b:
        raise Uncomputable("a division by zero")
    return _checked(a / b if isinstance(op, ast.Div) else a // b if isinstance(op, ast.FloorDiv) else a % b)


def _compared(op: ast.cmpop, a: Any, b: Any) -> bool:
    text = _COMPARISONS[type(op)]
    return {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[text]


def _called(name: str, args: list[int]) -> int:
    if name == "cdiv":
        return _checked(-_computed(ast.FloorDiv(), _checked(-args[0]), args[1]))
    if name == "next_power_of_2":
        return _checked(1 << max(0, args[0] - 1).bit_length())
    return min(args) if name == "min" else max(args)


def _checked(value: Any) -> Any:
    if isinstance(value, int) and value not in _INT64:
        raise Uncomputable("an integer of more than 64 bits")
    return value


# -------------------------------------------------------------------------------------------------------------- in C++


def _cpp(node: ast.expr, named: Mapping[str, str]) -> str:
    match node:
        case ast.Constant(value=bool() as value):
            return "true" if value else "false"
        case ast.Constant(value=int() as value):
            return f"INT64_C({value})"
        case ast.Constant(value=float() as number):
            return repr(number)
        case ast.Name(id=name):
            return named[name]
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"m.quotient({_cpp(left, named)}, {_cpp(right, named)})"
        case ast.BinOp(left=left, op=op, right=right):
            return f"m.{_OPERATORS[type(op)][1]}({_cpp(left, named)}, {_cpp(right, named)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"m.sub(0, {_cpp(operand, named)})"
        case ast.UnaryOp(operand=operand):
            return f"!({_cpp(operand, named)})"
        case ast.BoolOp(op=op, values=values):
            return "(" + (" && " if isinstance(op, ast.And) else " || ").join(_cpp(v, named) for v in values) + ")"
        case ast.Compare(left=left, ops=ops, comparators=others):
            each = [_cpp(one, named) for one in (left, *others)]
            pairs = zip(ops, each, each[1:], strict=False)
            return "(" + " && ".join(f"({a} {_COMPARISONS[type(op)]} {b})" for op, a, b in pairs) + ")"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({_cpp(test, named)} ? {_cpp(body, named)} : {_cpp(orelse, named)})"
        case ast.Call(func=ast.Name(id=name), args=args):
            return f"m.{name}({', '.join(_cpp(each, named) for each in args)})"
    raise AssertionError(ast.dump(node))
