"""Statements of transformers' models that make causal masks, known by their bytecode: those that make positions, which
rise by one, where a call gives none, and the calls of the functions that make the masks.

A name in capitals stands for any other, but END, which ends what is compared.
"""
# mypy: ignore-errors
# ruff: noqa: F821, F841, B018

from __future__ import annotations

from types import CodeType

import torch

from .bytecode import places_of, steps_of

CAUSAL = ("create_causal_mask", "create_sliding_window_causal_mask")


def _rising(past_key_values, position_ids, inputs_embeds):
    if position_ids is None:
        past_seen_tokens = past_key_values.get_seq_length() if past_key_values is not None else 0
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
        position_ids = position_ids.unsqueeze(0)
    END


def _named(self, inputs_embeds, attention_mask, past_key_values, position_ids):
    mask_kwargs = {
        "config": self.config,
        "inputs_embeds": inputs_embeds,
        "attention_mask": attention_mask,
        "past_key_values": past_key_values,
        "position_ids": position_ids,
    }
    END


def _by_names(mask_kwargs):
    MAKER(**mask_kwargs)[END]


def _call(self, inputs_embeds, attention_mask, past_key_values, position_ids):
    MAKER(
        config=self.config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        past_key_values=past_key_values,
        position_ids=position_ids,
    )[END]


def _choice(self, inputs_embeds, attention_mask, past_key_values, position_ids):
    """Mistral's."""
    mask_function = create_causal_mask if self.config.sliding_window is None else create_sliding_window_causal_mask
    CAUSAL_MASK = mask_function(
        config=self.config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        past_key_values=past_key_values,
        position_ids=position_ids,
    )
    END


def passes_positions(function) -> bool:
    """Whether a function seems to make causal masks of positions."""
    code = function.__code__
    return any(name in code.co_names for name in CAUSAL) and any(
        isinstance(names, tuple) and {"inputs_embeds", "position_ids"} <= set(names) for names in code.co_consts
    )


def knows_positions(function) -> bool:
    """Whether each causal mask that a function makes is of its argument ``position_ids``, which is a sequence that
    rises by one where it was None."""
    inner = [each for each in function.__code__.co_consts if isinstance(each, CodeType)]
    if function.__globals__.get("torch") is not torch or any(
        name in each.co_names for each in inner for name in CAUSAL
    ):
        return False
    steps = list(steps_of(function))
    made, named = places_of(_rising, steps), places_of(_named, steps)
    by_names, calls = places_of(_by_names, steps), places_of(_call, steps) | places_of(_choice, steps)
    return (
        bool(made)
        and _uses(steps, ("STORE_FAST", "DELETE_FAST", "STORE_DEREF"), "position_ids") <= made
        and _uses(steps, ("FAST", "DEREF"), "mask_kwargs") <= (named | by_names if named else set())
        and all(_uses(steps, ("LOAD_",), name) <= by_names | calls for name in CAUSAL)
    )


def _uses(steps, opnames, name) -> set[int]:
    """The numbers of the instructions that use a name."""
    return {i for i, (opname, value) in enumerate(steps) if value == name and any(each in opname for each in opnames)}
