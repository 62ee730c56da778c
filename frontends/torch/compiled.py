"""Calls of operators in the code that Inductor writes.

A fallback calls ``torch.ops.<library>.<op>.default``, which reads arguments by a schema and passes an autograd kernel
in Python, though nothing is recorded there. Where the attributes are constants the code calls a builtin that is bound
to them instead, whose way to the kernel is that of a plain eager call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

from aotops.library import LibraryError
from aotops.op import Attr, Op

from ..torch_schema import mask, splitter
from . import call, private
from .registered import dispatched, in_c
from .tensors import READS_TENSORS, prototypes

_IMPORT = "add_import_once"
"""The function of Inductor's writer that adds a line to the head of the module, once."""


@functools.lru_cache(maxsize=1024)
def bound(library: str, name: str, attrs: tuple[Attr, ...], wanted: tuple[str, ...]) -> Callable[..., Any]:
    """For Inductor's code: a function of an operator's inputs, by the names of its library and its own, that returns
    what the dispatcher's does, for these attributes and results."""
    op = next((op for op in dispatched if (op.library.name, op.name) == (library, name)), None)
    if op is None:
        raise LibraryError(f"compiled code calls {library}::{name}, which is not registered: load its library first")
    if len(attrs) != len(op.attrs) or not set(wanted) <= set(op.results):
        found = f"compiled code calls {library}::{name} as another version of the library has it: attributes {attrs}, "
        expected = f"results {wanted}, expected attributes {(*op.attrs,)}, results {op.results}: empty Inductor's cache"
        raise LibraryError(found + expected)
    attrs = op.canonical(attrs)
    overload, rest = dispatched[op], (*attrs, *mask(op, wanted))

    def fallback(*inputs):
        return overload(*inputs, *rest)

    if not READS_TENSORS:
        return fallback
    return call.compiled(op, attrs, wanted, prototypes, fallback)


def binding(op: Op, lowered: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of a fallback whose code calls ``bound``."""
    if op not in in_c or op.mutates or not READS_TENSORS:
        return lowered
    split = splitter(op)

    def lower(*args, **kwargs):
        result = lowered(*args, **kwargs)
        # the mask alone may come by name: torch adds its default so
        _, attrs, wanted = split((*args, *kwargs.values()))
        if all(map(_is_constant, attrs)) and (kernel := _fallback_of(result)) is not None:
            _bind(kernel, op, (op.library.name, op.name, op.canonical(attrs), wanted))
        return result

    return lower


def _is_constant(attr: Any) -> bool:
    """Whether it is the same in each call, and its text in Python is a constant."""
    if type(attr) is tuple:
        return all(map(_is_constant, attr))
    return attr is None or type(attr) in (bool, int, str) or (type(attr) is float and math.isfinite(attr))


def _fallback_of(result: Any) -> Any:
    """The node of Inductor's graph whose results these are; None if it is another one than expected."""
    ir = import_module(private.IR)
    boxes = result if isinstance(result, (list, tuple)) else (result,)
    for box in filter(None, boxes):
        node = getattr(getattr(box, "data", None), "data", None)
        kernel = node.inputs[0] if isinstance(node, ir.MultiOutput) else node
        return kernel if type(kernel) is ir.FallbackKernel else None
    return None


def _bind(kernel: Any, op: Op, key: tuple[Any, ...]) -> None:
    """Replaces the name that the node is called by, and its arguments, as the code is written."""
    theirs, arguments, named = kernel.get_kernel_name, kernel.codegen_args, kernel.codegen_kwargs
    kernel.get_kernel_name = lambda: _name_in_code(key) or theirs()
    kernel.codegen_args = lambda: arguments()[: len(op.inputs)] if _name_in_code(key) else arguments()
    kernel.codegen_kwargs = lambda *given, **options: [] if _name_in_code(key) else named(*given, **options)


def _name_in_code(key: tuple[Any, ...]) -> str | None:
    """A variable of the module that is written, which is ``bound`` of the key; None where the code is not Python."""
    graph = import_module(private.LOWERING).V.graph
    if graph.cpp_wrapper or getattr(graph, "fx_wrapper", False):
        return None
    if (module := graph.wrapper_code) is None or not hasattr(module, _IMPORT):
        return None
    while (parent := getattr(module, "parent_wrapper", None)) is not None:  # of a part of the graph
        module = parent
    names = vars(module).setdefault("_aotops_names", {})
    if key not in names:
        names[key] = f"aotops_{len(names)}_{key[1]}"
        write = getattr(module, _IMPORT)
        write(f"from {__name__} import bound as aotops_bound")
        write(f"{names[key]} = aotops_bound{key!r}")
    return names[key]
