"""Losses of transformers' models, known by their bytecode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .bytecode import global_of, named


def fixed_cross_entropy(source, target, num_items_in_batch=None, ignore_index=-100, **kwargs):
    """The loss of transformers, to which the two below pass on logits in float32."""
    reduction = "sum" if num_items_in_batch is not None else "mean"
    loss = nn.functional.cross_entropy(source, target, ignore_index=ignore_index, reduction=reduction)
    if reduction == "sum":
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        loss = loss / num_items_in_batch
    return loss


def causal_lm_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
    logits = logits.float()
    if shift_labels is None:
        labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    logits = logits.view(-1, vocab_size)
    shift_labels = shift_labels.view(-1)
    shift_labels = shift_labels.to(logits.device)
    loss = fixed_cross_entropy(logits, shift_labels, num_items_in_batch, ignore_index, **kwargs)
    return loss


def masked_lm_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
    logits = logits.float()
    logits = logits.view(-1, vocab_size)
    labels = labels.view(-1)
    labels = labels.to(logits.device)
    loss = fixed_cross_entropy(logits, labels, num_items_in_batch, ignore_index, **kwargs)
    return loss


def is_loss(function: Any, reference: Any) -> bool:
    """Whether a function is a reference of a loss, with the names of its parameters, and calls the one above."""
    if named(function, reference, but=("fixed_cross_entropy",)) != {}:
        return False
    codes = function.__code__, reference.__code__
    same = len({code.co_varnames[: code.co_argcount] for code in codes}) == 1
    return same and named(global_of(function, "fixed_cross_entropy"), fixed_cross_entropy) == {}
