"""The head of a model for language and its loss as one operator: ``linear_cross_entropy``, which makes no logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .bytecode import Form, Names
from .replaced_losses import causal_lm_head_loss, causal_lm_loss, loss_for


class _Changed:
    """An object with some attributes of its own, and the others of another object."""

    def __init__(self, of: Any, own: dict[str, Any]) -> None:
        self._of, self._own = of, own

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__["_own"]
        return own[name] if name in own else getattr(self.__dict__["_of"], name)


def causal_lm(matrix: Callable[[nn.Module], Tensor | None], names: Names, softcap: str = "") -> Callable[..., Any]:
    """The model's own forward, with a head that hands on the hidden rows and a loss that has the head in it.
    ``matrix``: the weight of a module whose call is a product and no more."""
    place = names["HEAD"]

    def serve(self, theirs, args, kwargs):
        head = getattr(self, place)
        weight: Any = matrix(head)
        if type(weight) not in (Tensor, nn.Parameter) or weight.shape[0] != self.config.vocab_size:
            return NotImplemented
        if not _wants_loss_alone(self, args, kwargs):
            return NotImplemented
        config, cap = self.config, getattr(self.config, softcap) if softcap else None
        own: dict[str, Any] = {place: _handed_on, "config": _Changed(config, {softcap: None}) if softcap else config}
        own["loss_function"] = functools.partial(causal_lm_head_loss, weight, head.bias, cap or 0.0)
        result = theirs(_Changed(self, own), *args, **kwargs)
        return type(result)(**{name: value for name, value in result.items() if name != "logits"})

    return serve


def _handed_on(hidden: Tensor) -> Tensor:
    return hidden


def _wants_loss_alone(self: Any, args: Any, kwargs: Any) -> bool:
    kept = kwargs.get("logits_to_keep", 0)
    named = len(args) <= 1 and kwargs.get("labels") is not None and isinstance(kept, int) and kept == 0
    is_dictionary = kwargs.get("return_dict", self.config.return_dict) is True
    return named and is_dictionary and self.training and self.loss_function is causal_lm_loss


def refusal(module: nn.Module, form: Form, names: Names) -> str:
    function, ours = loss_for(module)
    if function is not causal_lm_loss and ours is not causal_lm_loss:
        return "its loss is not that of the next token"
    head = getattr(module, names["HEAD"])
    cls = getattr(type(head), "_aotops_original", type(head))  # of one that is replaced
    return "" if cls is nn.Linear else f"its head is a {type(head).__name__}, expected Linear"
