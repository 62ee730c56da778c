"""Contiguous inputs of operators in the graphs that Inductor compiles.

An entry reads contiguous tensors, and a call copies those that are not. Inductor does not see that copy: it is not
fused with what makes the tensor, and the backward, which keeps the tensor, makes it again. On a GPU, for example, the
results of a group norm are NCHW in a model in channels_last, and so is what elementwise operators make of them before a
convolution. As a node of the graph the copy is the way the tensor is written, and what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aotops.op import Op


def with_copies(op: Op, overload: Any, decomposed: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The decomposition ``decomposed`` of an operator, if it has one; of calls that it leaves to the kernel, the call
    on contiguous inputs. Elementwise operators read any strides, and others write to their inputs."""
    if op.elementwise or op.mutates:
        return decomposed
    n_inputs, scalars = len(op.inputs), [slot in op.accepts_scalar for slot in op.inputs]

    def on_contiguous(*args: Any) -> Any:
        result = NotImplemented if decomposed is None else decomposed(*args)
        if result is not NotImplemented:
            return result
        inputs, rest = args[:n_inputs], args[n_inputs:]
        given = [_contiguous(t, scalar) for t, scalar in zip(inputs, scalars, strict=True)]
        return NotImplemented if all(a is b for a, b in zip(inputs, given, strict=True)) else overload(*given, *rest)

    return on_contiguous


def _contiguous(t: Tensor | None, accepts_scalar: bool) -> Tensor | None:
    if t is None or not is_known(t) or t.is_contiguous() or (accepts_scalar and _is_one_number(t)):
        return t
    return t.contiguous()


def is_known(t: Tensor) -> bool:
    """Whether its strides can be compared: sizes that depend on data, such as of x[mask], must not be."""
    return all(n.node.has_hint() for n in (*t.shape, *t.stride()) if isinstance(n, torch.SymInt))


def _is_one_number(t: Tensor) -> bool:
    """Whether all elements are one in memory, which a call passes without axes."""
    return all(stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1)
