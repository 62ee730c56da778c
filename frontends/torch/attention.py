"""torch's interfaces of attention on the library's kernel: ``scaled_dot_product_attention`` and ``MultiheadAttention``.

What the kernel does not take is torch's own call: weights as a result, nested tensors, axes that broadcast, other
devices, DTensors with dropout, and every call that is wrong, so that the errors are torch's.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from . import functional as F
from . import packed_heads
from .tensors import is_compiling, is_plain

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` on the kernel of ``attention``, with torch's rules.

    Args:
        query: (..., heads, L, E), or (L, E); float16, bfloat16, float32 or float64.
        key: (..., heads, S, E), of query's dtype and leading axes.
        value: (..., heads, S, any size), likewise.
        attn_mask: of a shape that broadcasts to (..., heads, L, S): bool, whether a query sees a key; or of query's
            dtype, or float32 where that has 16 bits, added to the scores. The latter has a gradient.
        dropout_p: the part of the probabilities that is dropped, with or without training. Two numbers of torch's
            generator, that of query's device, say which: others than torch's own kernels drop, each of which differs
            too. With ``torch.manual_seed``, in a checkpoint and under ``torch.compile`` they are the same again. Where
            it is 1, torch's own function is called.
        is_causal: query i sees the keys up to key i, of whatever lengths L and S are.
        scale: None for ``E ** -0.5``.
        enable_gqa: key and value may have fewer heads, each of which is shared by adjacent ones of query.

    Returns:
        (..., heads, L, size of value), of query's dtype. A query that sees no key has a result of 0, as it has from
        torch's functions on a CPU and in C++. Where query is a transposed (..., L, heads, E), or a part of one, the
        result is a transposed one too. Parts of one packed projection are read where they are.

    Raises:
        RuntimeError, ValueError, TypeError: those of torch's function, which is what such a call is given to.
    """
    tensors = query, key, value
    if not (_is_taken(*tensors, attn_mask, is_causal, scale, enable_gqa) and _drop_is_taken(query, dropout_p)):
        return torch.nn.functional.scaled_dot_product_attention(
            *tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if query.ndim == 2:
        return _attend(query[None], key[None], value[None], attn_mask, is_causal, scale, dropout_p)[0]
    return _attend(query, key, value, attn_mask, is_causal, scale, dropout_p)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    window = (-1, -1)
    if is_causal:
        queries = query.shape[-2]
        if key.shape[-2] > queries:  # no query sees a later key
            key, value = key[..., :queries, :], value[..., :queries, :]
        window = (-1, queries - key.shape[-2])  # the operator places the last query beside the last key
    is_bare = attn_mask is None and dropout_p == 0
    if is_bare and (y := packed_heads.attention(query, key, value, scale, window)) is not None:
        return y
    options = {"scale": scale, "window": window, **_masking(attn_mask), **_dropping(query, dropout_p)}
    if query.is_contiguous() or query.stride(-3) > query.stride(-2):
        return F.attention(query, key, value, layout="BHSD", **options)
    moved = (x.transpose(-3, -2) for x in (query, key, value))  # as a projection leaves them
    return F.attention(*moved, layout="BSHD", **options).transpose(-3, -2)


def _masking(attn_mask: Tensor | None) -> dict[str, Any]:
    if attn_mask is None:
        return {}
    return {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}


def _dropping(query: Tensor, dropout_p: float) -> dict[str, Any]:
    if dropout_p == 0:
        return {}
    seed = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=query.device)
    return {"seed": seed, "dropout": dropout_p}


def _drop_is_taken(query: Tensor, dropout_p: float) -> bool:
    """A DTensor's seed would be a plain tensor."""
    if not isinstance(dropout_p, int | float) or not 0 <= dropout_p < 1:
        return False
    return dropout_p == 0 or not _is_of("torch.distributed.tensor", "DTensor", query)


def _is_taken(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Whether a call is a right one that the operator takes, but for its dropout."""
    tensors = (query, key, value)
    if attn_mask is None and scale is None and _are_alike(*tensors):
        return True
    if any(not isinstance(x, Tensor) or x.is_nested or x.ndim < 2 or x.ndim != query.ndim for x in tensors):
        return False
    (*lead, queries, depth), (*of_key, keys, key_depth), (*of_value, values, _) = (x.shape for x in tensors)
    if depth == 0 or depth != key_depth or keys != values or of_key != of_value or lead[:-1] != of_key[:-1]:
        return False
    if lead != of_key and not (enable_gqa and of_key[-1] > 0 and lead[-1] % of_key[-1] == 0):
        return False
    if not _dtypes_are_taken(*tensors) or not (scale is None or math.isfinite(scale)):
        return False
    return attn_mask is None or (not is_causal and _mask_is_taken(attn_mask, query, (*lead, queries, keys)))


def _are_alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether they are plain tensors of one shape, dtype and device that the operator takes: 1 us, not the 5 of all."""
    given = query is not None and key is not None and value is not None
    if is_compiling() or is_plain is None or not (given and is_plain(query, key, value)):
        return False
    shape, dtype, device = query.shape, query.dtype, query.get_device()  # plain ones are on a GPU, or on the CPU: -1
    alike = key.shape == shape == value.shape and key.dtype == dtype == value.dtype and dtype in _FLOATING
    return alike and len(shape) > 1 and shape[-1] > 0 and key.get_device() == device == value.get_device()


def _dtypes_are_taken(*tensors: Tensor) -> bool:
    """On one device, and of one dtype but where autocast makes it so."""
    device, dtype = tensors[0].device, tensors[0].dtype
    if device.type not in ("cpu", "cuda", "meta") or any(x.device != device for x in tensors):
        return False
    if any(x.dtype not in _FLOATING for x in tensors):
        return False
    if all(x.dtype == dtype for x in tensors):
        return True
    return torch.is_autocast_enabled(device.type) and all(x.dtype != torch.float64 for x in tensors)


def _is_of(module: str, name: str, x: Tensor) -> bool:
    """Whether x is of a class of a module that imports torch.distributed, and that such an x has imported."""
    found = sys.modules.get(module)
    return found is not None and isinstance(x, getattr(found, name))


def _mask_is_taken(attn_mask: Tensor, query: Tensor, scores: tuple[int, ...]) -> bool:
    if (
        not isinstance(attn_mask, Tensor)
        or _is_of("torch.nn.attention.bias", "CausalBias", attn_mask)
        or attn_mask.is_nested
    ):
        return False
    if attn_mask.device != query.device or not 2 <= attn_mask.ndim <= len(scores) or len(scores) > 5:
        return False
    last = scores[len(scores) - attn_mask.ndim :]
    if any(n != 1 and n != of for n, of in zip(attn_mask.shape, last, strict=True)):
        return False
    dtypes = (torch.bool, query.dtype, *([torch.float32] if query.dtype.itemsize == 2 else []))
    return attn_mask.dtype in dtypes


class MultiheadAttention(torch.nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` on the library's kernels: the same arguments, parameters and state. A call with
    ``need_weights=False`` runs the products and ``attention`` of the library. One that asks for the weights, as torch's
    default does, is torch's own, as are ``add_bias_kv`` and ``add_zero_attn``."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if need_weights or not self._takes(query, key, value, key_padding_mask, attn_mask, is_causal):
            more = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return super().forward(query, key, value, *more)
        if is_causal and key_padding_mask is None:  # then attn_mask is what is_causal says, and is not read
            attn_mask = None
        else:
            is_causal = False
        joined = self._joined_mask(query, key_padding_mask, attn_mask)
        dropped = self.dropout if self.training else 0.0
        is_packed = query is key and key is value and self._qkv_same_embed_dim and not dropped
        if is_packed and joined is None and (query.ndim == 2 or self.batch_first):
            qkv = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            y = F.qkv_attention(qkv, self.num_heads, causal=is_causal)
            return F.linear(y, self.out_proj.weight, self.out_proj.bias), None
        q, k, v = self._projected(query, key, value)
        if query.ndim == 2 or self.batch_first:  # (N, L, heads, head_dim), or without N
            q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2) for x in (q, k, v))
            y = _attend(q, k, v, joined, is_causal, None, dropped).transpose(-3, -2).flatten(-2)
        else:  # (L, N * heads, head_dim): nothing is copied
            q, k, v = (x.reshape(x.shape[0], -1, self.head_dim).transpose(0, 1) for x in (q, k, v))
            y = _attend(q, k, v, joined, is_causal, None, dropped).transpose(0, 1).reshape(query.shape)
        return F.linear(y, self.out_proj.weight, self.out_proj.bias), None

    def _takes(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> bool:
        if self.bias_k is not None or self.bias_v is not None or self.add_zero_attn:
            return False
        if is_causal and attn_mask is None:  # torch refuses it
            return False
        if self.training and not _drop_is_taken(query, self.dropout):
            return False
        if any(not isinstance(x, Tensor) or x.is_nested or x.ndim != query.ndim for x in (query, key, value)):
            return False
        if query.ndim not in (2, 3) or not _dtypes_are_taken(query, key, value, self.out_proj.weight):
            return False
        sizes = (query.shape[-1], key.shape[-1], value.shape[-1])
        batch, queries, keys = self._sizes(query, key)
        if sizes != (self.embed_dim, self.kdim, self.vdim) or key.shape[:-1] != value.shape[:-1]:
            return False
        if batch != self._sizes(key, key)[0]:
            return False
        of_padding, of_heads = ((keys,) if query.ndim == 2 else (batch, keys)), (batch * self.num_heads, queries, keys)
        return _is_mask(key_padding_mask, query, of_padding) and _is_mask(attn_mask, query, of_heads, of_heads[1:])

    def _sizes(self, query: Tensor, key: Tensor) -> tuple[int, int, int]:
        """The batch, queries and keys."""
        if query.ndim == 2:
            return 1, query.shape[0], key.shape[0]
        batch, seq = (0, 1) if self.batch_first else (1, 0)
        return query.shape[batch], query.shape[seq], key.shape[seq]

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        bias = self.in_proj_bias
        if not self._qkv_same_embed_dim:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        elif query is key and key is value:
            return list(F.linear(query, self.in_proj_weight, bias).chunk(3, -1))
        else:
            weights = list(self.in_proj_weight.chunk(3))
        biases = [None] * 3 if bias is None else bias.chunk(3)
        return [F.linear(x, *parts) for x, *parts in zip((query, key, value), weights, biases, strict=True)]

    def _joined_mask(self, query: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
        """Both masks as one of ``scaled_dot_product_attention``'s, whose booleans mean the opposite."""
        masks = []
        if attn_mask is not None:  # (L, S) or (N * heads, L, S)
            of_heads = attn_mask.ndim == 3 and query.ndim == 3
            masks.append(attn_mask.unflatten(0, (-1, self.num_heads)) if of_heads else attn_mask)
        if key_padding_mask is not None:  # (N, S) or (S,)
            masks.append(key_padding_mask[..., None, None, :] if query.ndim == 3 else key_padding_mask[None])
        if not masks:
            return None
        if all(mask.dtype == torch.bool for mask in masks):
            joined = ~masks[0] if len(masks) == 1 else ~(masks[0] | masks[1])
        else:
            added = [_additive(mask, query.dtype) for mask in masks]
            joined = added[0] if len(added) == 1 else added[0] + added[1]
        if joined.ndim < 4 or self.batch_first:
            return joined
        batch, _, *rest = joined.shape
        return joined.expand(batch, self.num_heads, *rest).flatten(0, 1)


def _is_mask(mask: Tensor | None, query: Tensor, *shapes: tuple[int, ...]) -> bool:
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or mask.is_nested or mask.device != query.device:
        return False
    return tuple(mask.shape) in shapes and mask.dtype in (torch.bool, query.dtype)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
