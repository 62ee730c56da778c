"""The forwards of replaced modules: ``serve`` functions, which return NotImplemented for a call that is the original
forward's.

They ask what may have changed since ``replace``: dtypes, autocast, children that were exchanged or got hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import functional as F
from . import replaced_heads, replaced_images, replaced_layers, replaced_products
from .bytecode import Form, Names
from .known_modules import form_of, gelu_of
from .replaced_children import child, is_bare, parameter
from .replaced_dtypes import as_it_is, autocasts
from .tensors import is_compiling, is_number

Serve = Callable[..., Any]

MADE_FOR: dict[type, type] = {}
"""The class that each made class was made of."""
_FORMS: dict[type, tuple[Form, Names] | None] = {}
"""A dictionary, because a compiled function can read it."""


def learn(cls: type) -> tuple[Form, Names] | None:
    """``form_of`` the class, or of the one that it was made of, noted."""
    if cls not in _FORMS:
        _FORMS[cls] = form_of(MADE_FOR.get(cls, cls))
    return _FORMS[cls]


def _form(module: nn.Module) -> tuple[Form, Names] | None:
    return _FORMS.get(type(module)) if is_compiling() else learn(type(module))


def serve_of(form: Form, names: Names) -> Serve:
    return _SERVES[form.kind](names, **form.options)


def refusal(module: nn.Module, form: Form, names: Names) -> str | None:
    """Why a module of this form is left; "" if it is not, None if it computes something else."""
    check = _CHECKS.get(form.kind)
    return check(module, form, names) if check else ""


FUSED = ("layer_norm", "rms_norm", "softmax")
"""Kinds whose calls, compiled on a GPU, are left to the original: torch's compiler makes one kernel of what it computes
and of what stands around it, as a sum or a conversion, which is as fast as the library's kernel is alone."""


# ---------------------------------------------------------------------------------------------------------------- norms


def _layer_norm(names: Names, switch: str = "", **_: Any) -> Serve:
    def serve(self, x):
        weight, bias = self.weight, self.bias
        if not as_it_is(x, weight, bias) or (switch and getattr(self, switch)) or not is_number(self.eps):
            return NotImplemented
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    return serve


def _rms_norm(names: Names, torchs: Any = None, **options: Any) -> Serve:
    return _torchs_rms_norm if torchs else _rms_norm_of(names["EPS"], **options)


def _torchs_rms_norm(self, x):
    weight, eps = self.weight, self.eps
    if not as_it_is(x, weight) or _cannot_save(x) or not (eps is None or is_number(eps)):
        return NotImplemented
    if eps is None and x.element_size() == 2:  # torch's epsilon is x's
        return NotImplemented
    return F.rms_norm(x, self.normalized_shape, weight, eps)


def _rms_norm_of(eps: str, offset=0.0, weighted=True, like_weight=False, switch="") -> Serve:
    def serve(self, x):
        weight = self.weight if weighted and (not switch or getattr(self, switch)) else None
        if weight is not None and weight.dtype is not x.dtype:
            wide = weight.dtype is torch.float32 and x.element_size() == 2 and x.is_floating_point()
            if like_weight or not wide:
                return NotImplemented
        value = getattr(self, eps)
        if _cannot_save(x) or not is_number(value):
            return NotImplemented
        return F.rms_norm(x, x.shape[-1:], weight, value, offset)

    return serve


def _cannot_save(x: Tensor) -> bool:
    """Whether autograd may not save x for a backward. A composition of torch's operators saves its own results."""
    return not is_compiling() and x.is_inference() and torch.is_grad_enabled()


def _norm_refusal(module: Any, form: Form, names: Names) -> str:
    if form.options.get("torchs") or form.kind == "layer_norm":
        return ""
    eps, weight = getattr(module, names["EPS"]), getattr(module, "weight", None)
    if not isinstance(eps, float):
        return f"its {names['EPS']} is a {type(eps).__name__}, expected a float"
    if weight is not None and (weight.dim() != 1 or weight.numel() == 1):
        return f"its weight has shape {tuple(weight.shape)}, expected one axis"
    return ""


# ---------------------------------------------------------------------------------------------------------- activations


def _gelu(names: Names, widened: bool = False, **options: Any) -> Serve:
    def serve(self, x):
        activation = _which(self, names, **options)
        if activation is None or (widened and not as_it_is(x)) or not x.is_floating_point():
            return NotImplemented
        if not (x.is_contiguous() or is_compiling()):  # the kernel would read a copy of a part, as of half of a product
            return NotImplemented
        return F.gelu(x, "tanh" if activation == "gelu_tanh" else "none")

    return serve


def _which(module: Any, names: Names, activation: str | None = None, torchs: Any = None, **_: Any) -> str | None:
    """The activation of a module of that form."""
    if torchs is nn.GELU:
        return _GELUS.get(module.approximate)
    if torchs is not None:
        return _OTHERS.get(torchs)
    return gelu_of(getattr(module, names["FUNCTION"])) if "FUNCTION" in names else activation


_GELUS, _OTHERS = {"none": "gelu", "tanh": "gelu_tanh"}, {nn.SiLU: "silu", nn.ReLU: "relu"}


def _gelu_refusal(module: Any, form: Form, names: Names) -> str | None:
    return None if _which(module, names, **form.options) is None else ""


# ------------------------------------------------------------------------------------------------------------- networks


def _activation(module: nn.Module) -> str | None:
    """The activation that a call of a module is; None if it is another thing, or has hooks."""
    found = _form(module)
    if found is None or found[0].kind not in ("gelu", "silu", "relu") or not is_bare(module):
        return None
    form, names = found
    return _which(module, names, **form.options)


def _matrix(module: Any) -> Tensor | None:
    """The weight, as linear's, of a module whose call is a product and no more."""
    if not _is_product(module) or not is_bare(module):
        return None
    form, _ = _form(module)  # type: ignore[misc]
    weight = module.weight if is_compiling() else parameter(module, "weight")
    return weight if form.kind == "matrix" else weight.t()


def _swiglu(names: Names, packed: bool = False) -> Serve:
    act, up, down, before = names["ACT"], names["UP"], names["DOWN"], names.get("GATE")

    def serve(self, x):
        get = getattr if is_compiling() else child
        if _activation(get(self, act)) != "silu":
            return NotImplemented
        if before is None:
            gate, raised = get(self, up)(x).chunk(2, dim=-1)
        else:
            gate, raised = get(self, before)(x), get(self, up)(x)
        if gate.dtype is not raised.dtype or gate.shape != raised.shape:
            return get(self, down)(get(self, act)(gate) * raised)
        return get(self, down)(F.swiglu(gate, raised))

    return serve


def _swiglu_refusal(module: Any, form: Form, names: Names) -> str | None:
    act = getattr(module, names["ACT"])
    if not isinstance(act, nn.Module):
        return None
    return "" if _activation(act) == "silu" else f"its activation is {type(act).__name__}, or has hooks: expected SiLU"


def _linear(names: Names, then: tuple[str, ...] = ()) -> Serve:
    first, act, then = names["FIRST"], names["ACT"], tuple(names[name] for name in then)

    def serve(self, x):
        get = getattr if is_compiling() else child
        y = _activated(get(self, first), get(self, act), x, [get(self, name) for name in then])
        if y is None:
            return NotImplemented
        for name in then:
            y = get(self, name)(y)
        return y

    return serve


def _activated(product: Any, activating: nn.Module, x: Tensor, then: Collection[nn.Module]) -> Tensor | None:
    """A product and its activation as one operator, where that pays. ``then``: modules that take its results."""
    activation, weight = _activation(activating), _matrix(product)
    if activation is None or weight is None or not replaced_products.pays(x, weight):
        return None
    if _is_widened(activating) and autocasts(x) and not any(map(_is_product, then)):
        return None
    bias = product.bias if is_compiling() else parameter(product, "bias")
    return F.linear(x, weight, bias, activation)


def _is_widened(act: nn.Module) -> bool:
    """Whether autocast on a GPU computes it in float32. A product after it casts its results."""
    found = _form(act)
    return found is not None and bool(found[0].options.get("widened"))


def _is_product(module: nn.Module) -> bool:
    found = _form(module)
    return found is not None and found[0].kind in ("matrix", "conv1d")


def _linear_refusal(module: Any, form: Form, names: Names) -> str | None:
    first, act = getattr(module, names["FIRST"]), getattr(module, names["ACT"])
    if not isinstance(first, nn.Module) or not _is_product(first) or not isinstance(act, nn.Module):
        return None
    if _activation(act) is None:
        return f"its activation is {type(act).__name__}, or has hooks: expected GELU, SiLU or ReLU"
    return "" if is_bare(first) else f"its {names['FIRST']} has hooks, or a forward of its own"


# --------------------------------------------------------------------------------------------------------------- others


def _cross_entropy(names: Names, **_: Any) -> Serve:
    def serve(self, x, target):
        options = self.ignore_index, self.reduction, self.label_smoothing
        return F.cross_entropy(x, target, *options, weight=self.weight)

    return serve


def _softmax(names: Names, **_: Any) -> Serve:
    def serve(self, x):
        return NotImplemented if self.dim is None or not x.is_floating_point() else F.softmax(x, self.dim)

    return serve


_SERVES: dict[str, Callable[..., Serve]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "gelu": _gelu,
    "swiglu": _swiglu,
    "linear": _linear,
    "matrix": replaced_products.alone,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "conv2d": replaced_images.conv2d,
    "add_norm": partial(replaced_layers.add_norm, _activated),
    "batch_norm": replaced_images.batch_norm,
    "linear_cross_entropy": partial(replaced_heads.causal_lm, _matrix),
}


def operator_of(form: Form) -> str:
    """The kind that a form is replaced as."""
    return "linear" if form.kind == "matrix" else form.kind


SERVED = tuple(kind for kind in _SERVES if kind != "matrix")


def _says(reason: str) -> Callable[..., str]:
    return lambda module, form, names: reason


_CHECKS: dict[str, Callable[[Any, Form, Names], str | None]] = {
    "layer_norm": _norm_refusal,
    "rms_norm": _norm_refusal,
    "gelu": _gelu_refusal,
    "swiglu": _swiglu_refusal,
    "linear": _linear_refusal,
    "conv2d": replaced_images.conv2d_refusal,
    "batch_norm": replaced_images.batch_norm_refusal,
    "add_norm": replaced_layers.refusal,
    "linear_cross_entropy": replaced_heads.refusal,
    "silu": _says("no operator computes it alone"),
    "relu": _says("no operator computes it alone"),
    "matrix": replaced_products.alone_refusal,
    "conv1d": _says(replaced_products.ALIKE),
}
