"""Registers the operators of ``torch.library`` as fallbacks of Inductor: a part of the torch frontend.

Inductor makes a fallback of an operator that it does not know, which is right. But before torch 2.13 it formats the
operator's arguments for its log first, even where nothing is logged. The text of an argument contains all that it was
computed from, and an argument that is used twice appears twice: in a residual network the text doubles with each
operator. So each operator is made a fallback before Inductor sees it.

Inductor takes seconds to import, which only those who compile should wait for. So the operators are registered after
something else has imported Inductor's table of lowerings. A public function or an operator's fake kernel would be too
late: they do not run where their result is cached, or where the graph was exported before.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

from .imports import after_import

_LOWERING = "torch._inductor.lowering"


def register(operators: Iterable[Any]) -> None:
    """Makes these ``OpOverload`` fallbacks of Inductor: now, or as soon as it is imported."""
    overloads = tuple(operators)
    after_import(_LOWERING, lambda: _make_fallbacks(import_module(_LOWERING), overloads))


def _make_fallbacks(lowering: ModuleType, operators: Iterable[Any]) -> None:
    try:
        for operator in operators:
            _make_fallback(lowering, operator)
    except Exception as error:  # Inductor must work: without the fallbacks it does, though more slowly
        warnings.warn(f"aotops: Inductor {lowering.torch.__version__} took no fallbacks: {error!r}", stacklevel=2)


def _make_fallback(lowering: ModuleType, operator: Any) -> None:
    """The strides of an operator's results follow from those of its inputs. So these must be what the fake kernel
    saw: exactly where Inductor can do that (torch 2.7), else in the same order."""
    as_traced = getattr(lowering, "constrain_to_fake_tensors", None) or lowering.constrain_to_fx_strides
    # with warn=True a decomposition that is registered already is an error under CI
    lowering.make_fallback(operator, as_traced, warn=False)
