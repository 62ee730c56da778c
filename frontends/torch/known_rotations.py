"""Rotary embeddings of transformers' models, known by their bytecode: the functions that rotate queries and keys, and
the modules that make the cosines and sines, whose halves are equal."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from .bytecode import global_of, named


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _llama(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def _gpt_neox(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    q_embed = torch.cat([q_embed, q_pass], dim=-1)
    k_embed = torch.cat([k_embed, k_pass], dim=-1)
    return q_embed, k_embed


def is_rotation(function: Any) -> bool:
    """Whether a function rotates queries and keys, the first half of a head with the second."""
    known = named(function, _llama, but=("rotate_half",)) == {} or is_partial(function)
    return known and named(global_of(function, "rotate_half"), rotate_half) == {}


def is_partial(function: Any) -> bool:
    """Whether it rotates as many elements of a head as there are cosines, and accepts more."""
    return named(function, _gpt_neox, but=("rotate_half",)) == {}


def _cosines_and_sines(self, x, position_ids):
    freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
    emb = torch.cat((freqs, freqs), dim=-1)
    cos = emb.cos() * self.attention_scaling
    sin = emb.sin() * self.attention_scaling
    return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


# Transformers before 5.23 multiplies matrices outside autocast, by torch's context before 5.0 and by its own since.


def _by_torchs_autocast(self, x, position_ids):
    inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1).to(x.device)
    position_ids_expanded = position_ids[:, None, :].float()
    device_type = x.device.type if isinstance(x.device.type, str) and x.device.type != "mps" else "cpu"
    with torch.autocast(device_type=device_type, enabled=False):
        freqs = (inv_freq_expanded.float() @ position_ids_expanded.float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
    return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def _by_autocast(self, x, position_ids):
    inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1).to(x.device)
    position_ids_expanded = position_ids[:, None, :].float()
    device_type = x.device.type if isinstance(x.device.type, str) and x.device.type != "mps" else "cpu"
    with maybe_autocast(device_type=device_type, enabled=False):  # type: ignore[name-defined]  # noqa: F821
        freqs = (inv_freq_expanded.float() @ position_ids_expanded.float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
    return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def _by_autocast_of_floats(self, x, position_ids):
    inv_freq_expanded = (
        self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1).to(dtype=torch.float, device=x.device)
    )
    position_ids_expanded = position_ids[:, None, :].float()
    device_type = x.device.type if isinstance(x.device.type, str) and x.device.type != "mps" else "cpu"
    with maybe_autocast(device_type=device_type, enabled=False):  # type: ignore[name-defined]  # noqa: F821
        freqs = (inv_freq_expanded @ position_ids_expanded).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
    return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


_MAKERS = (_cosines_and_sines, _by_torchs_autocast, _by_autocast, _by_autocast_of_floats)


def without_halves(model: nn.Module) -> str:
    """Why a model's cosines and sines may have halves that differ, or "". Its rotary embeddings have such a name."""
    found = {type(module) for module in model.modules() if "rotary" in type(module).__name__.lower()}
    unknown = sorted(kind.__name__ for kind in found if not _has_halves(kind))
    if unknown:
        return f"the cosines and sines of {unknown[0]} may be others"
    return "" if found else "no rotary embedding that is known makes its cosines and sines"


def _has_halves(kind: type[nn.Module]) -> bool:
    forward: Any = inspect.unwrap(kind.forward)
    return any(named(forward, maker, but=("maybe_autocast",)) == {} for maker in _MAKERS)
