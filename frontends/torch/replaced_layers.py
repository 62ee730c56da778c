"""The forwards of layers that add a residual before a norm, as those of replaced_forwards.py: both are one operator.

A call does what the original's does, in its order, but for that sum: it and the norm are apart again where the norm has
hooks, is not replaced or takes a call that is not plain (``Call`` in replaced_calls.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import known_layers  # noqa: F401  its forms
from .bytecode import Form, Names
from .known_modules import ORIGINAL, form_of, plain_method
from .replaced_calls import Call, call_of_sum, is_called_as_modules
from .replaced_children import child, is_bare
from .tensors import READS_TENSORS, is_known

NORMS = ("layer_norm", "rms_norm")
Activated = Callable[..., Tensor | None]
_CALLS: dict[type, Call | None] = {}


def note(norm: type[nn.Module], original: type[nn.Module], kinds: tuple[str, ...]) -> None:
    """Keeps the call of a replaced norm with a sum before it, by the norm's class."""
    known = is_called_as_modules(original) and kinds[0] in NORMS
    _CALLS[norm] = call_of_sum(norm, *form_of(original)) if known else None  # type: ignore[misc]


def _norm_of_sum(norm: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the sum, and the sum. The order is the original's: the first decides the sum's strides."""
    call = _CALLS.get(type(norm))
    if call is not None and is_bare(norm):
        both = call.run(norm, a, b)
        if both is not None:
            return both
    h = a + b
    return norm(h), h


def _post_norm(names: Names, self: Any, /, hidden_states, input_tensor):
    x = child(self, names["DROPOUT"])(child(self, names["PRODUCT"])(hidden_states))
    return _norm_of_sum(child(self, names["NORM"]), x, input_tensor)[0]


def _encoder(names: Names, self: Any, /, hidden_states, attention_mask, **kwargs):
    x = child(self, names["FIRST"])(hidden_states)
    x, _ = child(self, names["ATTENTION"])(hidden_states=x, attention_mask=attention_mask, **kwargs)
    x, h = _norm_of_sum(child(self, names["NORM"]), hidden_states, x)
    return h + child(self, names["MLP"])(x)


def _decoder(
    names: Names,
    self: Any,
    /,
    hidden_states,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    use_cache=False,
    position_embeddings=None,
    **kwargs,
):
    return _encoder(
        names,
        self,
        hidden_states,
        attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )


def _image(names: Names, self: Any, /, hidden_states, attention_mask=None, **kwargs):
    x = child(self, names["FIRST"])(hidden_states)
    x, _ = child(self, names["ATTENTION"])(x, attention_mask, **kwargs)
    x = child(self, names["DROPOUT"])(x)
    x, h = _norm_of_sum(child(self, names["NORM"]), x, hidden_states)
    return child(self, names["DROPOUT"])(child(self, names["MLP"])(x)) + h


def _modern(names: Names, self: Any, /, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
    x = child(self, names["FIRST"])(hidden_states)
    x, _ = child(self, names["ATTENTION"])(
        x, position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs
    )
    x, h = _norm_of_sum(child(self, names["NORM"]), hidden_states, x)
    return h + child(self, names["MLP"])(x)


def _cross(
    names: Names,
    activated: Activated,
    self: Any,
    /,
    hidden_states,
    attention_mask=None,
    encoder_hidden_states=None,
    encoder_attention_mask=None,
    past_key_values=None,
    use_cache=True,
    **kwargs,
):
    x = child(self, names["FIRST"])(hidden_states)
    x, _ = child(self, names["ATTENTION"])(x, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs)
    x, h = _dropped(self, x, names["RATE"]), hidden_states
    if encoder_hidden_states is not None:
        x, h = _norm_of_sum(child(self, names["SECOND"]), h, x)
        x, _ = child(self, names["CROSS"])(
            x,
            key_value_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        x = _dropped(self, x, names["RATE"])
    return _with_network(names, activated, self, x, h)


def _speech(names: Names, activated: Activated, self: Any, /, hidden_states, attention_mask, **kwargs):
    x = child(self, names["FIRST"])(hidden_states)
    x, _ = child(self, names["ATTENTION"])(hidden_states=x, attention_mask=attention_mask, **kwargs)
    y = _with_network(names, activated, self, _dropped(self, x, names["RATE"]), hidden_states)
    if y.dtype == torch.float16:
        most = torch.finfo(y.dtype).max - 1000
        y = torch.clamp(y, min=-most, max=most)
    return y


def _with_network(names: Names, activated: Activated, self: Any, x: Tensor, h: Tensor) -> Tensor:
    x, h = _norm_of_sum(child(self, names["NORM"]), h, x)
    product, act, last = (child(self, names[name]) for name in ("PRODUCT", "ACT", "PRODUCT_2"))
    is_plain = isinstance(act, nn.Module) and isinstance(x, Tensor) and is_known(x)
    y = activated(product, act, x, (last,)) if is_plain and hasattr(type(product), ORIGINAL) else None
    x = _dropped(self, act(product(x)) if y is None else y, names["ACT_RATE"])
    return h + _dropped(self, last(x), names["RATE"])


def _dropped(self: Any, x: Tensor, rate: str) -> Tensor:
    return nn.functional.dropout(x, p=getattr(self, rate), training=self.training)


_LAYERS: dict[str, Callable[..., Any]] = {
    "post_norm": _post_norm,
    "encoder": _encoder,
    "decoder": _decoder,
    "image": _image,
    "modern": _modern,
}
_WITH_NETWORKS = {"cross": _cross, "speech": _speech}


def add_norm(activated: Activated, names: Names, layer: str) -> Callable[..., Any]:
    """``activated``: a replaced product and its activation as one operator, or None where that does not pay."""
    if layer in _WITH_NETWORKS:
        return partial(_WITH_NETWORKS[layer], names, activated)
    return partial(_LAYERS[layer], names)


def refusal(module: Any, form: Form, names: Names) -> str | None:
    """None too where arguments have other names than the known forward's, by which they may be given, and where no call
    is plain, so that nothing would become one."""
    own, known = (_arguments(f) for f in (plain_method(type(module), "forward"), form.methods["forward"]))
    norm = type(getattr(module, names["NORM"]))
    found = form_of(getattr(norm, ORIGINAL, norm))
    is_known_norm = found is not None and found[0].kind in NORMS
    return "" if READS_TENSORS and own == known and is_known_norm else None


def _arguments(function: Any) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
