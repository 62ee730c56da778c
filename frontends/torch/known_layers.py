"""Layers of transformers that add a residual before a norm, known as the modules of known_modules.py are."""

from __future__ import annotations

import torch
from torch import nn

from .known_modules import form


@form("add_norm", layer="post_norm")
def _post_norm(self, hidden_states, input_tensor):
    hidden_states = self.PRODUCT(hidden_states)
    hidden_states = self.DROPOUT(hidden_states)
    hidden_states = self.NORM(hidden_states + input_tensor)
    return hidden_states


@form("add_norm", layer="decoder")
def _decoder(
    self,
    hidden_states,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    use_cache=False,
    position_embeddings=None,
    **kwargs,
):
    residual = hidden_states
    hidden_states = self.FIRST(hidden_states)
    hidden_states, _ = self.ATTENTION(
        hidden_states=hidden_states,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.NORM(hidden_states)
    hidden_states = self.MLP(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states


@form("add_norm", layer="encoder")
def _encoder(self, hidden_states, attention_mask, **kwargs):
    residual = hidden_states
    hidden_states = self.FIRST(hidden_states)
    hidden_states, _ = self.ATTENTION(hidden_states=hidden_states, attention_mask=attention_mask, **kwargs)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.NORM(hidden_states)
    hidden_states = self.MLP(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states


@form("add_norm", layer="image")
def _image(self, hidden_states, attention_mask=None, **kwargs):
    residual = hidden_states
    hidden_states = self.FIRST(hidden_states)
    hidden_states, _ = self.ATTENTION(hidden_states, attention_mask, **kwargs)
    hidden_states = self.DROPOUT(hidden_states)
    hidden_states = hidden_states + residual
    residual = hidden_states
    hidden_states = self.NORM(hidden_states)
    hidden_states = self.MLP(hidden_states)
    hidden_states = self.DROPOUT(hidden_states)
    hidden_states = hidden_states + residual
    return hidden_states


@form("add_norm", layer="modern")
def _modern(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
    attn_output, _ = self.ATTENTION(
        self.FIRST(hidden_states), position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs
    )
    hidden_states = hidden_states + attn_output
    hidden_states = hidden_states + self.MLP(self.NORM(hidden_states))
    return hidden_states


@form("add_norm", layer="cross")
def _cross(
    self,
    hidden_states,
    attention_mask=None,
    encoder_hidden_states=None,
    encoder_attention_mask=None,
    past_key_values=None,
    use_cache=True,
    **kwargs,
):
    residual = hidden_states
    hidden_states = self.FIRST(hidden_states)
    hidden_states, _ = self.ATTENTION(
        hidden_states, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs
    )
    hidden_states = nn.functional.dropout(hidden_states, p=self.RATE, training=self.training)
    hidden_states = residual + hidden_states
    if encoder_hidden_states is not None:
        residual = hidden_states
        hidden_states = self.SECOND(hidden_states)
        hidden_states, _ = self.CROSS(
            hidden_states,
            key_value_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = nn.functional.dropout(hidden_states, p=self.RATE, training=self.training)
        hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.NORM(hidden_states)
    hidden_states = self.ACT(self.PRODUCT(hidden_states))
    hidden_states = nn.functional.dropout(hidden_states, p=self.ACT_RATE, training=self.training)
    hidden_states = self.PRODUCT_2(hidden_states)
    hidden_states = nn.functional.dropout(hidden_states, p=self.RATE, training=self.training)
    hidden_states = residual + hidden_states
    return hidden_states


@form("add_norm", layer="speech")
def _speech(self, hidden_states, attention_mask, **kwargs):
    residual = hidden_states
    hidden_states = self.FIRST(hidden_states)
    hidden_states, _ = self.ATTENTION(hidden_states=hidden_states, attention_mask=attention_mask, **kwargs)
    hidden_states = nn.functional.dropout(hidden_states, p=self.RATE, training=self.training)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.NORM(hidden_states)
    hidden_states = self.ACT(self.PRODUCT(hidden_states))
    hidden_states = nn.functional.dropout(hidden_states, p=self.ACT_RATE, training=self.training)
    hidden_states = self.PRODUCT_2(hidden_states)
    hidden_states = nn.functional.dropout(hidden_states, p=self.RATE, training=self.training)
    hidden_states = residual + hidden_states
    if hidden_states.dtype == torch.float16:
        clamp_value = torch.finfo(hidden_states.dtype).max - 1000
        hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)
    return hidden_states
