"""Heads of transformers' models for language, known by the bytecode of the model's forward, which names them.

A name in capitals stands for any other, as in known_modules.py. What the global names mean is not compared: they slice
the hidden rows before the head, and hold the results.
"""
# mypy: ignore-errors
# ruff: noqa: F821

from __future__ import annotations

import inspect
from typing import Any

import torch

from . import known_older_heads as older
from .bytecode import Form, Names, named

_GLOBALS = (
    "slice_logits_to_keep",
    "CausalLMOutputWithPast",
    "MoeCausalLMOutputWithPast",
    "CausalLMOutputWithCrossAttentions",
)


def _llama(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    inputs_embeds=None,
    labels=None,
    use_cache=None,
    logits_to_keep=0,
    **kwargs,
):
    outputs = self.MODEL(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    hidden_states = outputs.last_hidden_state
    hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)
    logits = self.HEAD(hidden_states)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
    return CausalLMOutputWithPast(
        loss=loss,
        logits=logits,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )


def _deepseek(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    inputs_embeds=None,
    labels=None,
    use_cache=None,
    logits_to_keep=0,
    **kwargs,
):
    outputs = self.MODEL(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    hidden_states = outputs.last_hidden_state
    hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)
    logits = self.HEAD(hidden_states)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
    return MoeCausalLMOutputWithPast(
        loss=loss,
        logits=logits,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        router_logits=outputs.router_logits,
    )


def _gemma2(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    inputs_embeds=None,
    labels=None,
    use_cache=None,
    logits_to_keep=0,
    **kwargs,
):
    outputs = self.MODEL(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    hidden_states = outputs.last_hidden_state
    hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)
    logits = self.HEAD(hidden_states)
    if self.config.final_logit_softcapping is not None:
        logits = logits / self.config.final_logit_softcapping
        logits = torch.tanh(logits)
        logits = logits * self.config.final_logit_softcapping
    loss = None
    if labels is not None:
        loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
    return CausalLMOutputWithPast(
        loss=loss,
        logits=logits,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )


def _gpt2(
    self,
    input_ids=None,
    past_key_values=None,
    attention_mask=None,
    token_type_ids=None,
    position_ids=None,
    inputs_embeds=None,
    encoder_hidden_states=None,
    encoder_attention_mask=None,
    labels=None,
    use_cache=None,
    logits_to_keep=0,
    **kwargs,
):
    transformer_outputs = self.MODEL(
        input_ids,
        past_key_values=past_key_values,
        attention_mask=attention_mask,
        token_type_ids=token_type_ids,
        position_ids=position_ids,
        inputs_embeds=inputs_embeds,
        encoder_hidden_states=encoder_hidden_states,
        encoder_attention_mask=encoder_attention_mask,
        use_cache=use_cache,
        **kwargs,
    )
    hidden_states = transformer_outputs.last_hidden_state
    hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)
    logits = self.HEAD(hidden_states)
    loss = None
    if labels is not None:
        loss = self.loss_function(
            logits,
            labels,
            vocab_size=self.config.vocab_size,
            **kwargs,
        )
    return CausalLMOutputWithCrossAttentions(
        loss=loss,
        logits=logits,
        past_key_values=transformer_outputs.past_key_values,
        hidden_states=transformer_outputs.hidden_states,
        attentions=transformer_outputs.attentions,
        cross_attentions=transformer_outputs.cross_attentions,
    )


HEADS = [
    Form("linear_cross_entropy", {"forward": forward}, options)
    for forward, options in (
        (_llama, {}),
        (_deepseek, {}),
        (_gpt2, {}),
        (_gemma2, {"softcap": "final_logit_softcapping"}),
        (older.llama, {}),
        (older.llama_cached, {}),
        (older.deepseek, {}),
        (older.deepseek_cached, {}),
        (older.gpt2, {}),
        (older.gemma2, {"softcap": "final_logit_softcapping"}),
        (older.gemma2_cached, {"softcap": "final_logit_softcapping"}),
    )
]


def head_of(kind: type) -> tuple[Form, Names] | None:
    """The form of a class of models that have a head, below the decorators of its forward."""
    forward: Any = inspect.unwrap(getattr(kind, "forward"))  # noqa: B009
    for form in HEADS:
        names = named(forward, form.methods["forward"], but=_GLOBALS)
        if names is not None:
            return form, names
    return None
