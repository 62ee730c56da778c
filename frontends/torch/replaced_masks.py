"""The masks of transformers' models, which are None in compiled code where they are in eager mode.

Transformers leaves a mask out that masks nothing, or no more than torch's causal attention does. It asks the values of
the positions and of the mask of a call for that, and makes a whole mask wherever it is traced, because it cannot ask
there: torch's attention then takes a slower kernel, for all of the square. Here it is left out as well where there is
nothing to ask: a call gives no mask, and no positions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .known_masks import CAUSAL, knows_positions, passes_positions
from .replaced_globals import CALLED, Called, exchanged, undecorated
from .tensors import is_compiling

_BIDIRECTIONAL = "create_bidirectional_mask"
_CAUSAL_ARGUMENTS = (
    *("config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids", "or_mask_function"),
    *("and_mask_function", "block_sequence_ids", "layer_idx", "allow_is_causal_skip"),
)
_ARGUMENTS = dict.fromkeys(CAUSAL, _CAUSAL_ARGUMENTS) | {
    _BIDIRECTIONAL: (
        *("config", "inputs_embeds", "attention_mask", "encoder_hidden_states", "past_key_values"),
        *("or_mask_function", "and_mask_function", "allow_is_bidirectional_skip", "kwargs"),
    ),
}
"""The arguments that are known: those of transformers 5.17 to 5.23."""


def _is_known(value: Any) -> bool:
    """Whether it is transformers' own function, which asks transformers' own one for the masks of torch's attention."""
    name, place = getattr(value, "__name__", ""), "transformers.masking_utils"
    if getattr(value, "__module__", "") != place or name not in _ARGUMENTS:
        return False
    masks = value.__globals__
    table = masks.get("ALL_MASK_ATTENTION_FUNCTIONS", {"sdpa": None})
    return (
        masks.get(name) is value
        and getattr(table["sdpa"], "__module__", "") == place
        and tuple(inspect.signature(value).parameters) == _ARGUMENTS[name]
    )


def _ours(is_rising: bool, theirs: Any) -> Callable[..., Any]:
    if theirs.__name__ == _BIDIRECTIONAL:
        return functools.partial(_bidirectional, theirs)
    return functools.partial(_causal, theirs, theirs.__name__ == CAUSAL[1], is_rising)


def _causal(
    theirs, slides, is_rising, config, inputs_embeds, attention_mask, past_key_values, position_ids=None, **options
):
    """``is_rising``: whether the positions are known to rise by one. They are not asked where there is a cache."""
    rows = inputs_embeds.shape[1]
    if (
        is_compiling()
        and attention_mask is None
        and not options
        and config._attn_implementation == "sdpa"
        and getattr(config, "is_causal", True)
        and (is_rising or position_ids is None if past_key_values is None else _is_empty(past_key_values))
        and (not slides or (config.sliding_window is not None and rows < config.sliding_window))
    ):
        return None
    return theirs(config, inputs_embeds, attention_mask, past_key_values, position_ids, **options)


def _is_empty(cache):
    name = type(cache).__module__, type(cache).__name__
    return name == ("transformers.cache_utils", "DynamicCache") and cache.get_seq_length() == 0


def _bidirectional(theirs, config, inputs_embeds, attention_mask, encoder_hidden_states=None, **options):
    plain = attention_mask is None and not options
    if is_compiling() and plain and config._attn_implementation == "sdpa":
        return None
    return theirs(config, inputs_embeds, attention_mask, encoder_hidden_states, **options)


def _unknown(function: Any) -> str:
    return "position_ids" if passes_positions(function) and not knows_positions(function) else ""


CALLED["mask"] = Called(
    (*CAUSAL, _BIDIRECTIONAL),
    _is_known,
    functools.partial(_ours, False),
    ("forward", "_create_attention_masks"),
    _unknown,
)
_RISING = CALLED["mask"]._replace(ours=functools.partial(_ours, True))


def without_positions(cls: type, kinds: tuple[str, ...], methods: dict[str, Any]) -> dict[str, Any]:
    """The methods, with another forward for calls without positions, where it makes ones that rise by one."""
    function: Any = undecorated(getattr(cls, "forward", None))
    if "mask" not in kinds or "forward" not in methods or not knows_positions(function):
        return methods
    theirs, given = cls.forward, methods["forward"]  # type: ignore[attr-defined]
    rising = exchanged(theirs, [_RISING if kind == "mask" else CALLED[kind] for kind in kinds])
    place = function.__code__.co_varnames.index("position_ids") - 1

    @functools.wraps(theirs)
    def forward(self, *args, **kwargs):
        positions = kwargs.get("position_ids", args[place] if len(args) > place else None)
        return (rising if is_compiling() and positions is None else given)(self, *args, **kwargs)

    return methods | {"forward": forward}
