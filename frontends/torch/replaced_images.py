"""The forwards of modules of networks of images, as those of replaced_forwards.py: convolutions, batch norms by the
statistics of their input, and what follows these in one operator: a residual's sum and an activation.

A norm and what follows are apart where one of them has hooks, or was exchanged by what is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import (
    batch_norms,
    known_images,  # noqa: F401  its forms
)
from . import functional as F
from .bytecode import Form, Names
from .known_modules import ORIGINAL, form_of
from .precision import convolutions_allow_tf32
from .replaced_children import child, is_bare
from .replaced_dtypes import autocasts, product_dtype
from .tensors import is_compiling, is_known

FEW_CHANNELS = 8
"""Torch's convolutions of images of up to so many channels take several times as long."""
_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish"}
"""Modules whose call is an activation that a batch norm's operator has."""

# -------------------------------------------------------------------------------------------------------- convolutions


def conv2d(names: Names, **_: Any) -> Callable[..., Any]:
    def serve(self, x):
        dtype = product_dtype(x, self.weight)
        is_image = x.is_cuda and x.dim() == 4 and x.is_floating_point()
        if not is_image or dtype is None or dtype.itemsize > 4 or self.padding_mode != "zeros":
            return NotImplemented
        if x.shape[2] * x.shape[3] == 1:  # compiled, a product, which decides on no other's layout
            pays = is_compiling()
        else:
            pays = x.shape[1] <= FEW_CHANNELS or (self.training and (self.groups > 1 or _pays(x, self.weight)))
        if not pays:
            return NotImplemented
        options = self.stride, self.padding, self.dilation, self.groups
        return F.conv2d(x, self.weight, self.bias, *options, allow_tf32=convolutions_allow_tf32())

    return serve


def _pays(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution of many channels, without groups, is faster here. Where both are NCHW torch's of 16 bits
    take as long; under autocast torch casts a weight once, and calls here cost the host more."""
    return not autocasts(x) and (x.element_size() > 2 or not (x.is_contiguous() and weight.is_contiguous()))


def conv2d_refusal(module: Any, form: Form, names: Names) -> str:
    return "" if module.padding_mode == "zeros" else f"its padding_mode is {module.padding_mode!r}, expected 'zeros'"


# --------------------------------------------------------------------------------------------------------- batch norms


def batch_norm(names: Names, torchs: Any = None, layer: str = "") -> Callable[..., Any]:
    if layer:
        return partial(_LAYERS[layer], names)
    return _sequence if torchs is nn.Sequential else _batch_norm


def is_alone(form: Form) -> bool:
    """Whether a form of a batch norm is that, and an activation that it holds: not several modules."""
    return form.options.get("layer", "activated") == "activated" and form.options.get("torchs") is not nn.Sequential


def fuses(x: Tensor) -> bool:
    """Whether torch's compiler makes reductions of the library's batch norm, which it fuses with their neighbours."""
    return x.is_cuda and x.element_size() == 2


def batch_norm_refusal(module: Any, form: Form, names: Names) -> str | None:
    """None where no batch norm is followed by an activation."""
    if form.options.get("torchs") is nn.Sequential:
        children = [*module.children()]
        return "" if any(map(_are_known, children, children[1:])) else None
    norms = [getattr(module, name) for key, name in names.items() if key.startswith("NORM")]
    return "" if all(map(_is_batch_norm, norms)) else None


def _is_batch_norm(module: Any) -> bool:
    cls = type(module)
    if cls not in _ARE_NORMS:
        found = form_of(getattr(cls, ORIGINAL, cls)) if isinstance(module, nn.modules.batchnorm._BatchNorm) else None
        _ARE_NORMS[cls] = found is not None and found[0].kind == "batch_norm" and "torchs" in found[0].options
    return _ARE_NORMS[cls]


_ARE_NORMS: dict[type, bool] = {}


def _are_known(norm: Any, act: Any) -> bool:
    return type(act) in _ACTIVATIONS and _is_batch_norm(norm)


def _is_taken(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the library computes a call of a batch norm: on a CPU in float32 and float64, where it is faster."""
    given = [t for t in (x, weight, bias) if t is not None]
    if not is_known(*given) or not x.is_floating_point() or not (x.is_cuda or x.element_size() > 2):
        return False
    dtype = x.dtype if weight is None else weight.dtype
    is_wide = dtype is torch.float32 and x.element_size() == 2
    return (dtype is x.dtype or is_wide) and (bias is None or bias.dtype is dtype)


def _batch_norm(self: Any, x: Tensor) -> Any:
    return NotImplemented if is_compiling() and not fuses(x) else _normalized(self, x)


def _normalized(norm: Any, x: Tensor, residual: Tensor | None = None, activation: str | None = None) -> Any:
    state = batch_norms.state_of(norm)
    if not _is_taken(x, *state[:2]):
        return NotImplemented
    norm._check_input_dim(x)
    y = batch_norms.normalized(norm, state, x, residual, activation)
    return NotImplemented if y is None else y


def _activated(names: Names, self: Any, /, x: Tensor) -> Any:
    if x.dim() != 4 or (is_compiling() and not fuses(x)):
        return NotImplemented
    get = getattr if is_compiling() else child
    drop, act = get(self, names["DROPOUT"]), get(self, names["ACT"])
    is_followed = not is_compiling() and _is_nothing(drop) and is_bare(act)  # compiled, what follows is torch's
    activation = _ACTIVATIONS.get(type(act)) if is_followed else None
    y = _normalized(self, x, None, activation)
    return y if activation or y is NotImplemented else act(drop(y))


def _together(norm: Any, act: Any, x: Any, residual: Any = None) -> Any:
    """``act(norm(x) + residual)`` as one operator; NotImplemented where that is not the same."""
    if not _are_known(norm, act) or not (is_bare(norm) and is_bare(act)) or not isinstance(x, Tensor):
        return NotImplemented
    activation = _ACTIVATIONS[type(act)]
    if residual is not None:
        is_like = isinstance(residual, Tensor) and residual.dtype is x.dtype and residual.shape == x.shape
        if activation != "relu" or not is_like or residual.is_cuda is not x.is_cuda or not is_known(residual):
            return NotImplemented
    return _normalized(norm, x, residual, activation)


def _in_turn(modules: Iterable[Any], x: Any) -> Any:
    """The modules one after another, a batch norm and an activation after it together."""
    left = [each for each in modules if not _is_nothing(each)]
    while left:
        y = _together(left[0], left[1], x) if len(left) > 1 else NotImplemented
        x, left = (left[0](x), left[1:]) if y is NotImplemented else (y, left[2:])
    return x


def _is_nothing(module: Any) -> bool:
    return type(module) is nn.Identity and is_bare(module)


def _sum_and_activation(norm: Any, act: Any, x: Any, residual: Any) -> Any:
    y = _together(norm, act, x, residual)
    if y is NotImplemented:
        y = norm(x)
        y += residual
        y = act(y)
    return y


def _sequence(self: Any, /, input: Any) -> Any:
    return _in_turn(self._modules.values(), input)


def _of(module: Any, names: Names, keys: str) -> list[Any]:
    return [child(module, names[key]) for key in keys.split()]


def _shortcut(module: Any, names: Names, x: Any) -> Any:
    shortcut = child(module, names["SHORTCUT"])
    return x if shortcut is None else shortcut(x)


def _basic(names: Names, self: Any, /, x: Any) -> Any:
    norm, act = _of(self, names, "NORM_2 ACT")
    y = _in_turn(_of(self, names, "CONV NORM ACT CONV_2"), x)
    return _sum_and_activation(norm, act, y, _shortcut(self, names, x))


def _bottleneck(names: Names, self: Any, /, x: Any) -> Any:
    norm, act = _of(self, names, "NORM_3 ACT")
    y = _in_turn(_of(self, names, "CONV NORM ACT CONV_2 NORM_2 ACT CONV_3"), x)
    return _sum_and_activation(norm, act, y, _shortcut(self, names, x))


def _timm_block(before: str, norm: str, act: str, names: Names, self: Any, /, x: Any) -> Any:
    """``before``: what comes before the last norm. A gate or a path after it stands between it and the sum."""
    y = _in_turn(_of(self, names, before), x)
    last, then, gate, path = _of(self, names, f"{norm} {act} GATE PATH")
    if gate is None and path is None:
        return _sum_and_activation(last, then, y, _shortcut(self, names, x))
    y = last(y)
    for each in (gate, path):
        y = y if each is None else each(y)
    y += _shortcut(self, names, x)
    return then(y)


_LAYERS: dict[str, Callable[..., Any]] = {
    "activated": _activated,
    "basic": _basic,
    "bottleneck": _bottleneck,
    "timm_basic": partial(_timm_block, "CONV NORM DROPOUT ACT BLUR CONV_2", "NORM_2", "ACT_2"),
    "timm_bottleneck": partial(_timm_block, "CONV NORM ACT CONV_2 NORM_2 DROPOUT ACT_2 BLUR CONV_3", "NORM_3", "ACT_3"),
}
