"""The losses of transformers' models, which are functions that a model calls, on the library's kernel: logits of 16
bits are not copied to float32, and their gradient takes their memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from . import functional as F
from . import known_losses as known
from .precision import products_allow_tf32


def _cross_entropy(logits, labels, vocab_size, num_items_in_batch, ignore_index):
    if logits.element_size() != 2:
        logits = logits.float()
    target = labels.view(-1).to(logits.device)
    reduction = _reduction(num_items_in_batch)
    loss = F.cross_entropy(logits.view(-1, vocab_size), target, ignore_index, reduction, dtype="float32")
    return _shared(loss, num_items_in_batch)


def _reduction(num_items_in_batch):
    return "mean" if num_items_in_batch is None else "sum"


def _shared(loss, num_items_in_batch):
    """A sum as a mean over the items of all batches of a step."""
    if hasattr(num_items_in_batch, "to"):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _of_the_next(labels, shift_labels, ignore_index):
    if shift_labels is not None:
        return shift_labels
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def causal_lm_loss(
    logits, labels, vocab_size: int, num_items_in_batch=None, ignore_index: int = -100, shift_labels=None, **kwargs
):
    """The loss of the next token."""
    target = _of_the_next(labels, shift_labels, ignore_index)
    return _cross_entropy(logits, target, vocab_size, num_items_in_batch, ignore_index)


def causal_lm_head_loss(
    weight,
    bias,
    softcap,
    logits,
    labels,
    vocab_size: int,
    num_items_in_batch=None,
    ignore_index: int = -100,
    shift_labels=None,
    **kwargs,
):
    """The loss of the next token with the head in it. ``logits``: the rows that the head would take, by the name that
    models call the loss with."""
    target = _of_the_next(labels, shift_labels, ignore_index).to(logits.device)
    options = {"softcap": softcap, "allow_tf32": products_allow_tf32()}
    dtype = "float32" if logits.element_size() == 2 else None
    reduction = _reduction(num_items_in_batch)
    loss = F.linear_cross_entropy(logits, weight, target, bias, ignore_index, reduction, dtype=dtype, **options)
    return _shared(loss.float(), num_items_in_batch)


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
