"""Calls of replaced modules that are calls of operators, as builtins: what a ``serve`` function asks, and the arguments
that it gives, are read in C (``run_module`` in cuda_src/host/torch.cpp). In Python that takes half as long as the call.

A builtin returns None for a call that it leaves to Python, as for any that is not plain, and False for one that is the
original's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from ctypes import addressof, c_void_p
from inspect import signature
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional

from aotops.call import builtin, pointer_of, struct_capsule
from aotops.op import Op
from aotops.ops import OPS

from . import structs
from .attributes import are_instances
from .bytecode import Form, Names
from .call import install_call
from .precision import convolutions_allow_tf32
from .registered import builtins
from .replaced_children import GLOBAL_HOOKS
from .replaced_images import FEW_CHANNELS
from .replaced_products import LARGE_WEIGHT, MANY_ROWS


class Call(NamedTuple):
    """A builtin, which takes the module and its argument, and its struct, which is told the made class."""

    run: Callable[..., Any]
    struct: structs.Module


def is_called_as_modules(original: type[nn.Module]) -> bool:
    """Whether nn.Module's `__call__` calls the forward of an instance."""
    ways: Any = original.__call__, original._call_impl
    return ways == (nn.Module.__call__, nn.Module._call_impl)


def call_without_frames(made: type[nn.Module], original: type[nn.Module], call: Call) -> None:
    """Lets CPython 3.12 and later call an instance without nn.Module's two frames and that of its forward."""
    if not is_called_as_modules(original):
        return
    ways: Any = nn.Module.__call__, nn.Module._call_impl

    def __call__(self, *args, **kwargs):
        return super(made, self).__call__(*args, **kwargs)  # type: ignore[misc]

    struct = structs.ModuleCall(
        module=addressof(call.struct),
        original=id(original),
        ways=(c_void_p * 2)(*map(id, ways)),
        forward=id(original.forward),
        replaced=id(made.forward),
        hooks=(c_void_p * 4)(*map(id, GLOBAL_HOOKS)),
    )
    if install_call(__call__, struct_capsule(struct, call, original, ways, original.forward, made.forward)):
        made.__call__ = __call__


Source = tuple[str, Any]
"""Where an argument comes from, and its name there, or a constant (``Module`` in cuda_src/host/torch.cpp)."""
X, LAST_SIZE = ("x", None), ("n", None)

CUDA = 2
"""DLPack's number."""
LARGE_NORM = {"device": CUDA, "elements": 1 << 20, "rows": 1 << 10}
LARGE_GELU = {"device": CUDA, "elements": 1 << 23, "rows": 1 << 23}
"""Sizes of an x on a GPU. From one of them on a module in training is served in eager mode, where torch's operator is
one kernel. For a smaller x the library's kernels save less than its node, of ``autograd.Function``, costs the host
(docs/lab_notes.md)."""
PRODUCT = {
    "wide_in_autocast": True,
    "device": CUDA,
    "product_bits": 16,
    "uneven_weight": LARGE_WEIGHT,
    "fewest_rows": MANY_ROWS,
}
"""Which products alone are served (``Module`` in cuda_src/host/torch.cpp)."""
IMAGE = {
    "device": CUDA,
    "image_bits": 32,
    "few_channels": FEW_CHANNELS,
    "held_name": "padding_mode",
    "held": "zeros",
}
"""Which convolutions are served, likewise. A string that is written in code is interned, as torch's is."""


def call_of(original: type, form: Form, names: Names) -> Call | None:
    """The call of a module whose class is made of ``original``; None if Python serves it."""
    make = _FORMS.get(form.kind)
    found = make(names, **form.options) if make else None
    op = OPS["linear" if form.kind == "matrix" else form.kind] if found else None
    plain = builtins.get(op) if op else None
    if found is None or op is None or plain is None:
        return None
    sources, options = found
    read = [name for source, name in sources.values() if source in "pa"] + [options.get("held_name")]
    if not are_instances(original, *filter(None, read)):
        return None
    return _call(op, plain, sources, options)


def call_of_sum(norm: type, form: Form, names: Names) -> Call | None:
    """The call of the norm of x and a residual, which returns their sum too, of the parameters of a replaced norm, and
    for as large an x."""
    plain = builtins.get(OPS[f"add_{form.kind}"])
    found = _FORMS[form.kind](names, **form.options)
    if plain is None or found is None:
        return None
    sources, options = found
    if not are_instances(norm, *(name for source, name in sources.values() if source in "pa")):
        return None
    made = _call(OPS[f"add_{form.kind}"], plain, sources | {"residual": ("r", None)}, options)
    made.struct.type = id(norm)
    return made


def _call(op: Op, plain: Any, sources: Mapping[str, Source], options: Mapping[str, Any]) -> Call:
    handle, parameters = plain.__self__, signature(op.bind).parameters
    made, kept = structs.Module(function=pointer_of(handle)), [handle]
    slots = (*op.inputs, *op.public_attrs)
    ordered = [sources.get(slot) or ("c", parameters[slot].default) for slot in slots]
    for i, (source, value) in enumerate(ordered):
        kept.append(sys.intern(value) if source in "pa" else value)
        made.values[i] = id(kept[-1])
    made.sources = "".join(source for source, _ in ordered).encode()
    for option, value in options.items():
        kept.append(sys.intern(value) if option == "held_name" else value)
        setattr(made, option, id(kept[-1]) if option in ("held_name", "held") else value)
    return Call(builtin(op.name, "aot_torch_module", struct_capsule(made, kept)), made)


# --------------------------------------------------------------------------------------------------- sources, by kind

_Sources = tuple[dict[str, Source], dict[str, Any]] | None
_AFFINE: dict[str, Source] = {"x": X, "weight": ("p", "weight"), "bias": ("p", "bias")}


def _layer_norm(names: Names, switch: str = "", **_: Any) -> _Sources:
    held = {"held_name": switch, "held": False} if switch else {}
    sources = {"normalized_shape": ("a", "normalized_shape"), "eps": ("a", "eps")}
    return _AFFINE | sources, {"wide_in_autocast": True, **LARGE_NORM, **held}


def _rms_norm(
    names: Names, torchs: Any = None, offset=0.0, weighted=True, like_weight=False, switch="", **_: Any
) -> _Sources:
    weight: dict[str, Source] = {"weight": ("p", "weight")} if weighted else {}
    if torchs:
        sources = {"normalized_shape": ("a", "normalized_shape"), "eps": ("a", "eps")}
        return {"x": X, **weight, **sources}, {"wide_in_autocast": True, **LARGE_NORM}
    if switch:
        return None
    others: dict[str, Source] = {"normalized_shape": LAST_SIZE, "eps": ("a", names["EPS"])}
    return {"x": X, **weight, **others, "weight_offset": ("c", offset)}, {"widens": not like_weight}


def _gelu(names: Names, widened=False, composed=False, activation="", torchs: Any = None, **_: Any) -> _Sources:
    options: dict[str, Any] = {
        "reads_contiguous": True,
        "wide_in_autocast": widened,
        **({} if composed else LARGE_GELU),
    }
    if torchs:
        return {"x": X, "approximate": ("a", "approximate")}, options
    if "FUNCTION" in names:
        options |= {"held_name": names["FUNCTION"], "held": functional.gelu}
    return {"x": X, "approximate": ("c", "tanh" if activation == "gelu_tanh" else "none")}, options


def _matrix(names: Names, **_: Any) -> _Sources:
    return _AFFINE, PRODUCT


def _conv2d(names: Names, **_: Any) -> _Sources:
    options: dict[str, Source] = {name: ("a", name) for name in ("stride", "padding", "dilation", "groups")}
    return _AFFINE | options | {"allow_tf32": ("f", convolutions_allow_tf32)}, IMAGE


_FORMS: dict[str, Callable[..., _Sources]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "gelu": _gelu,
    "matrix": _matrix,
    "conv2d": _conv2d,
}
