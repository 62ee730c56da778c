"""Modules of others that compute what an operator here computes, known by the bytecode of their forward.

A name or a base class does not say what a module computes: a subclass may clip, or scale by a head. So a class is known
only if its forward, compiled by the same interpreter, has the instructions of one of the references below. Names of
local variables may differ. A name in capitals stands for any other, the same at each place; other names of attributes,
constants, and what the global names mean must be the same. Nothing of a module is imported or run for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn import functional as F

from .bytecode import Form, Names, named
from .known_heads import head_of

ORIGINAL = "_aotops_original"
"""The attribute of a class that serves a known one, with the class that it was made of."""

FORMS: list[Form] = []


def form(kind: str, *also: Any, **options: Any) -> Callable[[Any], Any]:
    """Notes a reference of a forward. ``also``: references of methods that it calls."""

    def note(forward: Any) -> Any:
        methods = {"forward": forward} | {f.__name__.partition("__")[0]: f for f in also}
        FORMS.append(Form(kind, methods, options))
        return forward

    return note


# --------------------------------------------------------------------------------------------------------------- norms
# ``like_weight``: the result is promoted to the weight's dtype. Else it has that of x.


@form("rms_norm", like_weight=True)
def _llama_rms_norm(self, x):
    input_dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.EPS)
    return self.weight * x.to(input_dtype)


@form("rms_norm")
def _olmo_rms_norm(self, x):
    input_dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.EPS)
    return (self.weight * x).to(input_dtype)


@form("rms_norm")
def _helium_rms_norm(self, x):
    input_dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.EPS)
    return (self.weight.to(torch.float32) * x).to(input_dtype)


@form("rms_norm", like_weight=True)
def _t5_rms_norm(self, x):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.EPS)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        x = x.to(self.weight.dtype)
    return self.weight * x


def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.EPS)


def _norm__by_pow(self, x):
    mean_squared = x.pow(2).mean(-1, keepdim=True) + self.EPS
    return x * torch.pow(mean_squared, -0.5)


@form("rms_norm", _norm, offset=1.0)
def _gemma_rms_norm(self, x):
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)


@form("rms_norm", _norm)
def _moshi_rms_norm(self, x):
    output = self._norm(x.float())
    output = output * self.weight.float()
    return output.type_as(x)


@form("rms_norm", _norm, like_weight=True)
def _llama4_rms_norm(self, x):
    output = self._norm(x.float()).type_as(x)
    return output * self.weight


@form("rms_norm", _norm__by_pow, switch="with_scale")
def _gemma4_rms_norm(self, x):
    normed = self._norm(x.float())
    if self.with_scale:
        normed = normed * self.weight.float()
    return normed.type_as(x)


@form("rms_norm", _norm, weighted=False)
def _weightless_rms_norm(self, x):
    return self._norm(x.float()).type_as(x)


@form("layer_norm", switch="_fast_norm")
def _timm_layer_norm(self, x):
    if self._fast_norm:
        x = FAST_LAYER_NORM(x, self.normalized_shape, self.weight, self.bias, self.eps)  # type: ignore[name-defined] # noqa: F821
    else:
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
    return x


# --------------------------------------------------------------------------------------------------------- activations
# ``widened``: autocast on CUDA computes it in float32, because of pow. ``composed``: the original is many kernels.


@form("gelu", activation="gelu_tanh", widened=True, composed=True)
def _new_gelu(self, x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@form("gelu", activation="gelu_tanh", composed=True)
def _fast_gelu(self, x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


@form("gelu", activation="gelu")
def _functional_gelu(self, x):
    return F.gelu(x)


@form("gelu", activation="gelu_tanh")
def _functional_gelu_tanh(self, x):
    return F.gelu(x, approximate="tanh")


@form("silu", activation="silu")
def _functional_silu(self, x):
    return nn.functional.silu(x)


@form("gelu")
def _gelu_that_it_holds(self, x):
    return self.FUNCTION(x)


# ------------------------------------------------------------------------------------------------------------ networks


@form("conv1d")
def _conv1d(self, x):
    size_out = x.size()[:-1] + (self.nf,)  # noqa: RUF005
    x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
    x = x.view(size_out)
    return x


@form("swiglu")
def _gated(self, x):
    down = self.DOWN(self.ACT(self.GATE(x)) * self.UP(x))
    return down


@form("swiglu")
def _gated_at_once(self, x):
    return self.DOWN(self.ACT(self.GATE(x)) * self.UP(x))


@form("swiglu", packed=True)
def _gated_and_packed(self, x):
    up = self.UP(x)
    gate, up = up.chunk(2, dim=-1)
    up = up * self.ACT(gate)
    return self.DOWN(up)


@form("linear")
def _linear_and_activation(self, x):
    x = self.FIRST(x)
    x = self.ACT(x)
    return x


@form("linear", then=("SECOND",))
def _mlp(self, x):
    x = self.FIRST(x)
    x = self.ACT(x)
    x = self.SECOND(x)
    return x


@form("linear", then=("SECOND",))
def _mlp_at_once(self, x):
    return self.SECOND(self.ACT(self.FIRST(x)))


@form("linear", then=("SECOND", "DROPOUT"))
def _gpt2_mlp(self, x):
    x = self.FIRST(x)
    x = self.ACT(x)
    x = self.SECOND(x)
    x = self.DROPOUT(x)
    return x


@form("linear", then=("DROPOUT", "NORM", "SECOND", "DROPOUT_2"))
def _timm_mlp(self, x):
    x = self.FIRST(x)
    x = self.ACT(x)
    x = self.DROPOUT(x)
    x = self.NORM(x)
    x = self.SECOND(x)
    x = self.DROPOUT_2(x)
    return x


# -------------------------------------------------------------------------------------------------------------- classes

TORCHS: dict[type[nn.Module], str] = {
    nn.LayerNorm: "layer_norm",
    nn.GELU: "gelu",
    nn.Softmax: "softmax",
    nn.CrossEntropyLoss: "cross_entropy",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.Sequential: "batch_norm",
    nn.Conv2d: "conv2d",
    nn.Linear: "matrix",
    nn.SiLU: "silu",
    nn.ReLU: "relu",
}
if hasattr(nn, "RMSNorm"):
    TORCHS[nn.RMSNorm] = "rms_norm"
"""torch's own modules: a subclass is known if it has its forward."""
_CALLED = {nn.Conv2d: ("_conv_forward",), nn.Sequential: ("__iter__",)}
"""Other methods that a forward calls."""


def form_of(kind: type) -> tuple[Form, Names] | None:
    """The form of a class of modules, and what its names in capitals stand for."""
    for base, name in TORCHS.items():
        methods = ("forward", *_CALLED.get(base, ()))
        if issubclass(kind, base) and all(getattr(kind, m) is getattr(base, m) for m in methods):
            return Form(name, {}, {"torchs": base}), {}
    for each in FORMS:
        found = [named(plain_method(kind, method), reference) for method, reference in each.methods.items()]
        if all(names is not None for names in found):
            merged = {key: value for names in found if names for key, value in names.items()}
            return each, merged
    return head_of(kind)


def plain_method(kind: type, name: str) -> Any:
    """A method without transformers' checkpoint around it, which it gives to each subclass of a layer as well."""
    function = getattr(kind, name, None)
    while isinstance(function, FunctionType) and function.__globals__.get("__name__") == _CHECKPOINTS[0]:
        if function.__code__.co_name != _CHECKPOINTS[1]:
            break
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


_CHECKPOINTS = "transformers.modeling_layers", "forward_with_checkpointing"


def gelu_of(function: Any) -> str | None:
    """Which GELU a callable is that a module holds."""
    if function is functional.gelu:
        return "gelu"
    if getattr(function, "func", None) is not functional.gelu or function.args:
        return None
    options = function.keywords
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(options["approximate"]) if [*options] == ["approximate"] else None
