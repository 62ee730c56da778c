"""The losses of transformers' models, which are functions that a model calls, on the library's kernel: logits of 16
bits are not copied to float32, and their gradient takes their memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from . import functional as F
from . import known_losses as known


def _cross_entropy(logits, labels, vocab_size, num_items_in_batch, ignore_index):
    if logits.element_size() != 2:
        logits = logits.float()
    reduction = "mean" if num_items_in_batch is None else "sum"
    target = labels.view(-1).to(logits.device)
    loss = F.cross_entropy(logits.view(-1, vocab_size), target, ignore_index, reduction, dtype="float32")
    if hasattr(num_items_in_batch, "to"):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def causal_lm_loss(
    logits, labels, vocab_size: int, num_items_in_batch=None, ignore_index: int = -100, shift_labels=None, **kwargs
):
    """The loss of the next token."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    return _cross_entropy(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


def masked_lm_loss(logits, labels, vocab_size: int, num_items_in_batch=None, ignore_index: int = -100, **kwargs):
    """The loss of the tokens that have a label."""
    return _cross_entropy(logits, labels, vocab_size, num_items_in_batch, ignore_index)


LOSSES = (causal_lm_loss, masked_lm_loss)


def loss_for(module: nn.Module) -> tuple[Any, Callable[..., Any] | None]:
    """The loss function of a transformers' model that calls one, and ours for it; None where there is none."""
    if not isinstance(getattr(type(module), "loss_function", None), property) or not _calls_it(module):
        return None, None
    function = module.loss_function
    pairs = ((known.causal_lm_loss, causal_lm_loss), (known.masked_lm_loss, masked_lm_loss))
    return function, next((ours for reference, ours in pairs if known.is_loss(function, reference)), None)


def _calls_it(module: nn.Module) -> bool:
    """Whether its forward names the function. Models without a head do not, and some with one make a loss of torch."""
    forward = inspect.unwrap(type(module).forward)
    return "loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ())
