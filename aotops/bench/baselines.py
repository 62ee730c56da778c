"""The implementations to compare with, as forward functions of the operator's inputs; frameworks differentiate them.

An implementation that cannot be imported is absent. It lists the operators that it has as something to call, and is
called as its own users would call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from .. import registry
from ..library import Library
from ..op import Op
from ..ops import OPS
from ..spec import DEVICES
from .cases import Case, row
from .work import LN_EPS, RMS_EPS, Convolution, Elements, Shape, conv2d_arguments

LIGER_ROW = 4096
"""Liger's elementwise kernels use a block per row: flat tensors are passed in rows of this length."""

Make = Callable[[Shape, str], Callable[..., Any]]
"""Takes the shape and the variant."""


class Unavailable(Exception):
    """The implementation does not have this case."""


@dataclass(frozen=True)
class Impl:
    name: str
    framework: str
    """The framework of its tensors: torch, mindspore or numpy."""
    functions: Mapping[str, Make]
    """By the names that the registry knows the operators by, as all here."""
    modules: Mapping[str, Any] = field(default_factory=dict)
    """For more operators, each a module that has it, with our arguments."""
    adapt: Callable[[Case, list[Any]], list[Any]] = lambda case, inputs: inputs
    """Converts the inputs."""
    synchronizes: frozenset[str] = frozenset()
    """Operators that synchronize with the device, so that a CUDA graph cannot record them."""
    forward_only: frozenset[str] = frozenset()
    """Operators whose forward computes the gradient as well."""
    dtypes: tuple[str, ...] | None = None

    def has(self, case: Case) -> bool:
        if case.pass_ == "backward" and case.work.op in self.forward_only:
            return False
        module = self.modules.get(case.work.op)
        has = case.work.op in self.functions or hasattr(module, case.work.plain_name)
        return has and (self.dtypes is None or case.dtype in self.dtypes)

    def function(self, case: Case) -> Callable[..., Any]:
        make = self.functions.get(case.work.op)
        return (
            make(case.shape, case.work.variant) if make else case.work.function(self.modules[case.work.op], case.shape)
        )


def available(device: str, names: list[str] | None, operators: Sequence[str] = tuple(OPS)) -> list[Impl]:
    """The implementations of ``names`` that can be imported; by default those usual for the device."""
    impls = []
    for name in names if names is not None else _KNOWN[device]:
        try:
            impls.append(MAKERS[name](operators))
        except ImportError as error:
            if names is not None:
                print(f"{name} is left out: {error}")
    return impls


# ------------------------------------------------------------------------------------------------------------- aotops


def _aotops(operators: Sequence[str]) -> Impl:
    framework = next(_importable("torch", "mindspore", "numpy"))
    f = import_module(f"aotops.frontends.{framework}")

    # the loss with its gradient is not one operator
    losses = {
        "cross_entropy": lambda shape, variant: _own_loss_and_dx(f) if variant else f.cross_entropy,
        "linear_cross_entropy": lambda shape, variant: (
            _loss_and_gradients(f.linear_cross_entropy) if variant else f.linear_cross_entropy
        ),
    }
    modules = {name: f if name in OPS else _namespace(f, registry.get(name).library) for name in operators}
    return Impl("aotops", framework, losses, modules)


@cache
def _namespace(frontend: Any, library: Library) -> SimpleNamespace:
    return SimpleNamespace(**frontend.functions(library))


def _naive(operators: Sequence[str]) -> Impl:
    """Entries ``aot_<op>_naive_<device>`` that a library has beside those of an operator, with the same arguments."""
    framework = next(_importable("torch", "mindspore", "numpy"))
    f = import_module(f"aotops.frontends.{framework}")
    modules = {}
    for name in operators:
        op = registry.get(name)
        if op.foreign:  # its entries have names of their own
            continue
        naive = _naive_library(op)
        if any(registry.has_entry(one, device) for one in naive.ops.values() for device in DEVICES):
            modules[name] = SimpleNamespace(**{op.name: _namespace(f, naive).__dict__[f"{op.name}_naive"]})
    return Impl("naive", framework, {}, modules, forward_only=frozenset(modules))


@cache  # a framework registers it once
def _naive_library(op: Op) -> Library:
    definition = replace(op, name=f"{op.name}_naive", backward=None)
    return Library(f"{op.library.name}_naive_{op.name}", [definition], op.library.path)


def _importable(*names: str) -> Iterator[str]:
    for name in names:
        try:
            import_module(name)
        except ImportError:
            continue
        yield name


def _own_loss_and_dx(f: Any) -> Callable[..., Any]:
    """On a GPU the forward computes the gradient too, if one is recorded and x is not small."""
    if not hasattr(f, "KEEP_RESIDUALS_FROM"):
        raise Unavailable("another frontend than torch's has no call that gives both")
    import torch

    full = _loss_and_gradients(f.cross_entropy)

    def run(x, target):
        if not x.is_cuda or x.numel() <= f.KEEP_RESIDUALS_FROM:
            return full(x, target)
        with torch.enable_grad():
            return f.cross_entropy(x, target)

    return run


def _loss_and_gradients(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss and its gradients, as a training step needs them."""
    import torch

    ones: dict[Any, Any] = {}  # so that autograd does not create one

    def run(*inputs):
        with torch.enable_grad():
            value = loss(*inputs)
            one = ones.get(value.dtype)
            if one is None:
                one = ones[value.dtype] = torch.ones_like(value)
            return torch.autograd.grad(value, [t for t in inputs if t.requires_grad], one)

    return run


# -------------------------------------------------------------------------------------------------------------- torch


def _torch(operators: Sequence[str]) -> Impl:
    import torch

    functions = _torch_functions()
    modules = {name: _row_in_torch(torch, name) for name in operators if name not in functions}
    return Impl("torch", "torch", functions, modules, adapt=_channels_last)


def _row_in_torch(torch: Any, name: str) -> SimpleNamespace:
    """The function of torch that the operator's row names."""
    plain, found = registry.get(name).name, row(name)
    try:
        return SimpleNamespace(**{plain: found.in_torch(torch, plain)})
    except AttributeError:  # torch.nn.functional has none of the name, and the row says nothing
        return SimpleNamespace()


def _torch_functions() -> dict[str, Make]:
    import torch
    from torch.nn import functional as F

    def conv2d(shape: Shape, variant: str) -> Callable[..., Any]:
        arguments = conv2d_arguments(shape)
        return lambda x, w: F.conv2d(x, w, None, *arguments)

    def lltm(input, weights, bias, old_h, old_cell):
        gates = F.linear(torch.cat([old_h, input], 1), weights, bias)
        i, o, candidate = gates.chunk(3, 1)
        new_cell = old_cell + F.elu(candidate) * torch.sigmoid(i)
        return torch.tanh(new_cell) * torch.sigmoid(o), new_cell

    def head(x, w, target):
        return F.cross_entropy(F.linear(x, w), target)

    def head_lse(x, w, target):
        logits = F.linear(x, w)
        return F.cross_entropy(logits, target), logits.logsumexp(-1)

    def rope(shape: Shape, variant: str) -> Callable[..., Any]:
        def halves(x, cos, sin):
            a, b = x.chunk(2, -1)
            c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
            return torch.cat([a * c - b * s, b * c + a * s], -1)

        def interleaved(x, cos, sin):
            a, b = x[..., 0::2], x[..., 1::2]
            c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
            return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)

        return interleaved if variant else halves

    def qkv_rope(shape: Shape, variant: str) -> Callable[..., Any]:
        _, _, heads, kv_heads, dim = shape

        def split(p, cos, sin):
            q, k, v = p.unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], -2)
            return rope(shape, "")(q, cos, sin), rope(shape, "")(k, cos, sin), v.contiguous()

        return split

    def attention(shape: Shape, variant: str) -> Callable[..., Any]:
        _, _, heads, kv_heads, _ = shape
        attrs = {"is_causal": variant == "causal", "enable_gqa": heads != kv_heads}

        def attend(q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, **attrs).transpose(1, 2)

        return attend

    def qkv_attention(shape: Shape, variant: str) -> Callable[..., Any]:
        _, _, heads, kv_heads, dim = shape

        def attend(p):
            parts = p.unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], -2)
            return attention(shape, variant)(*parts).flatten(-2)

        return attend

    def paged_attention(shape: Shape, variant: str) -> Callable[..., Any]:
        attend = attention(shape, variant)
        return lambda q, k, v, n: attend(q, k, v)

    return {
        "rope": rope,
        "qkv_rope": qkv_rope,
        "attention": attention,
        "qkv_attention": qkv_attention,
        "paged_attention": paged_attention,
        "add": lambda shape, variant: torch.add,
        "gelu": lambda shape, variant: lambda x: F.gelu(x, approximate=variant),
        "swiglu": lambda shape, variant: lambda gate, up: F.silu(gate) * up,
        "matmul": lambda shape, variant: torch.matmul,
        "linear": lambda shape, variant: (lambda x, w, b: F.gelu(F.linear(x, w, b))) if "gelu" in variant else F.linear,
        "conv2d": conv2d,
        "lltm": lambda shape, variant: lltm,
        "layer_norm": lambda shape, variant: lambda x, w, b: F.layer_norm(x, shape[-1:], w, b, LN_EPS),
        "rms_norm": lambda shape, variant: lambda x, w: F.rms_norm(x, shape[-1:], w, RMS_EPS),
        "add_layer_norm": lambda shape, variant: (
            lambda x, r, w, b: (F.layer_norm(h := x + r, shape[-1:], w, b, LN_EPS), h)
        ),
        "add_rms_norm": lambda shape, variant: lambda x, r, w: (F.rms_norm(h := x + r, shape[-1:], w, RMS_EPS), h),
        "softmax": lambda shape, variant: lambda x: F.softmax(x, 1 if variant == "axis" else -1),
        "cross_entropy": lambda shape, variant: _loss_and_gradients(F.cross_entropy) if variant else F.cross_entropy,
        "linear_cross_entropy": lambda shape, variant: _loss_and_gradients(head) if variant else head,
        "linear_cross_entropy_lse": lambda shape, variant: head_lse,
        "cross_entropy_lse": lambda shape, variant: lambda x, t: (F.cross_entropy(x, t), x.logsumexp(-1), x.argmax(-1)),
    }


def _channels_last(case: Case, inputs: list[Any]) -> list[Any]:
    """torch's view of NHWC."""
    if not isinstance(case.work, Convolution) or not case.work.nhwc:
        return inputs
    return [t.detach().permute(0, 3, 1, 2).requires_grad_() for t in inputs]


def _torch_compile(operators: Sequence[str]) -> Impl:
    import torch
    from torch._functorch import config

    config.donated_buffer = False  # a retained graph is differentiated repeatedly

    def compiled(make: Make) -> Make:
        def function(shape: Shape, variant: str) -> Callable[..., Any]:
            torch._dynamo.reset()  # each shape compiled counts towards the recompile limit
            return torch.compile(make(shape, variant), dynamic=False)

        return function

    functions = {op: compiled(make) for op, make in _torch_functions().items()}

    def with_gradients(loss: Make) -> Make:
        return lambda shape, variant: _loss_and_gradients(loss(shape, "")) if variant else loss(shape, "")

    functions |= {op: with_gradients(functions[op]) for op in ("cross_entropy", "linear_cross_entropy")}
    return Impl("torch.compile", "torch", functions, adapt=_channels_last)


# -------------------------------------------------------------------------------------------------------------- quack


def _quack(operators: Sequence[str]) -> Impl:
    from quack.cross_entropy import cross_entropy, cross_entropy_fwd
    from quack.rmsnorm import rmsnorm
    from quack.softmax import softmax

    layer_norm = _quack_layer_norm()

    def with_gradient(x, target):
        """The mean, as aotops returns it, and the gradient of the sum, which quack does not divide."""
        losses, dx = cross_entropy_fwd(x.detach(), target, return_dx=True)
        return losses.mean(), dx

    return Impl("quack", "torch", {
        "layer_norm": lambda shape, variant: layer_norm,
        "rms_norm": lambda shape, variant: lambda x, w: rmsnorm(x, w, eps=RMS_EPS),
        "add_rms_norm": lambda shape, variant: lambda x, r, w: rmsnorm(x, w, residual=r, eps=RMS_EPS, prenorm=True),
        "softmax": lambda shape, variant: _along_rows(softmax, variant),
        "cross_entropy": lambda shape, variant: with_gradient if variant else cross_entropy,
    }, adapt=_with_float32_weights)  # fmt: skip


def _quack_layer_norm() -> Callable[..., Any]:
    """An autograd function of quack's two passes."""
    import torch
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            if not any(ctx.needs_input_grad):
                return layernorm_fwd(x, weight, bias, LN_EPS)
            y, rstd, mean = layernorm_fwd(x, weight, bias, LN_EPS, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, weight, rstd, mean = ctx.saved_tensors
            return layernorm_bwd(x, weight, dy, rstd, mean)

    return LayerNorm.apply


def _along_rows(softmax: Callable[..., Any], variant: str) -> Callable[..., Any]:
    if variant == "axis":
        raise Unavailable("softmax of the last axis alone")
    return softmax


def _with_float32_weights(case: Case, inputs: list[Any]) -> list[Any]:
    """quack's LayerNorm requires float32 weights."""
    return [
        t.detach().float().requires_grad_() if letter == "w" else t
        for letter, t in zip(case.work.reads, inputs, strict=True)
    ]


# -------------------------------------------------------------------------------------------------------------- Liger


def _liger(operators: Sequence[str]) -> Impl:
    import torch
    from liger_kernel import ops

    layer_norm, rms_norm = ops.LigerLayerNormFunction.apply, ops.LigerRMSNormFunction.apply
    add_rms_norm, loss = ops.LigerFusedAddRMSNormFunction.apply, ops.LigerCrossEntropyFunction.apply

    # the forward computes the gradient, and writes it over x, if x requires one

    def cross_entropy(x, target):
        x = x if torch.is_grad_enabled() else x.detach()
        return loss(x, target, None, -100, 0.0, 0.0, "mean", None, False)[0]

    def loss_and_dx(x, target):
        with torch.enable_grad():
            return cross_entropy(x, target)

    def head(x, w, target):
        x, w = (x, w) if torch.is_grad_enabled() else (x.detach(), w.detach())
        return ops.LigerFusedLinearCrossEntropyFunction.apply(x, w, target)[0]

    return Impl("liger", "torch", {
        "swiglu": lambda shape, variant: ops.LigerSiLUMulFunction.apply,
        "layer_norm": lambda shape, variant: lambda x, w, b: layer_norm(x, w, b, LN_EPS),
        "rms_norm": lambda shape, variant: lambda x, w: rms_norm(x, w, RMS_EPS),
        "add_rms_norm": lambda shape, variant: lambda x, r, w: add_rms_norm(x, r, w, RMS_EPS),
        "softmax": lambda shape, variant: _along_rows(ops.LigerSoftmaxFunction.apply, variant),
        "cross_entropy": lambda shape, variant: loss_and_dx if variant else cross_entropy,
        "linear_cross_entropy": lambda shape, variant: _loss_and_gradients(head) if variant else head,
    }, adapt=_own_copies, synchronizes=frozenset({"cross_entropy", "linear_cross_entropy"}),
       forward_only=frozenset({"cross_entropy"}))  # fmt: skip


def _own_copies(case: Case, inputs: list[Any]) -> list[Any]:
    """Liger's backward overwrites its input, which others still read: a copy."""
    copies = [t.detach().clone() if t.is_floating_point() else t for t in inputs]
    if isinstance(case.work, Elements):
        copies = [t if t.dim() != 1 else t.view(-1, LIGER_ROW) for t in copies]
    return [t.requires_grad_(t.is_floating_point()) for t in copies]


# ---------------------------------------------------------------------------------------------- NumPy and MindSpore


def _numpy(operators: Sequence[str]) -> Impl:
    """The rows' references; forward only, without bfloat16. Of the built-in operators, what NumPy has functions for."""
    import numpy as np

    def cross_entropy(x, target):
        x = x - x.max(-1, keepdims=True)
        chosen = np.take_along_axis(x, target[:, None], -1)[:, 0]
        return (np.log(np.exp(x).sum(-1)) - chosen).mean()

    def linear(shape: Shape, variant: str) -> Callable[..., Any]:
        if variant:
            raise Unavailable("NumPy has no erf")
        return lambda x, w, b: x @ w.T + b

    def gelu(shape: Shape, variant: str) -> Callable[..., Any]:
        if variant != "tanh":
            raise Unavailable("NumPy has no erf")
        return lambda x: x / 2 * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))

    def without_gradients(loss: Callable[..., Any]) -> Make:
        def function(shape: Shape, variant: str) -> Callable[..., Any]:
            if variant:
                raise Unavailable("NumPy has no gradients")
            return loss

        return function

    functions: dict[str, Make] = {
        "add": lambda shape, variant: np.add,
        "gelu": gelu,
        "matmul": lambda shape, variant: np.matmul,
        "linear": linear,
        "cross_entropy": without_gradients(cross_entropy),
        "linear_cross_entropy": without_gradients(lambda x, w, target: cross_entropy(x @ w.T, target)),
    }
    modules = {name: _reference(name) for name in operators if name != "conv2d"}
    return Impl("numpy", "numpy", functions, modules, dtypes=("float16", "float32", "float64"))


def _reference(name: str) -> SimpleNamespace:
    return SimpleNamespace(**{registry.get(name).name: row(name).reference})


def _mindspore(operators: Sequence[str]) -> Impl:
    """MindSpore's own functions on a CPU; forward only."""
    from mindspore import ops

    def layer_norm(shape: Shape, variant: str) -> Callable[..., Any]:
        norm = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=LN_EPS)
        return lambda x, w, b: norm(x, w, b)[0]

    def no_dx(shape: Shape, variant: str) -> Callable[..., Any]:
        if variant:
            raise Unavailable("MindSpore has no fused loss and gradient")
        return ops.cross_entropy

    def linear(shape: Shape, variant: str) -> Callable[..., Any]:
        return (lambda x, w, b: ops.gelu(ops.dense(x, w, b), "none")) if "gelu" in variant else ops.dense

    def conv2d(shape: Shape, variant: str) -> Callable[..., Any]:
        if "nhwc" in variant:
            raise Unavailable("MindSpore has NCHW on a CPU")
        stride, *others = conv2d_arguments(shape)
        return lambda x, w: ops.conv2d(x, w, None, stride, "pad", *others)

    return Impl("mindspore", "mindspore", {
        "add": lambda shape, variant: ops.add,
        "gelu": lambda shape, variant: lambda x: ops.gelu(x, approximate=variant),
        "swiglu": lambda shape, variant: lambda gate, up: ops.silu(gate) * up,
        "matmul": lambda shape, variant: ops.matmul,
        "linear": linear,
        "conv2d": conv2d,
        "layer_norm": layer_norm,
        "softmax": lambda shape, variant: lambda x: ops.softmax(x, 1 if variant == "axis" else -1),
        "cross_entropy": no_dx,
    })  # fmt: skip


_KNOWN = {
    "cuda": ("aotops", "naive", "torch", "torch.compile", "quack", "liger"),
    "cpu": ("aotops", "naive", "torch", "mindspore", "numpy"),
}

MAKERS: dict[str, Callable[[Sequence[str]], Impl]] = {
    "aotops": _aotops,
    "naive": _naive,
    "torch": _torch,
    "torch.compile": _torch_compile,
    "quack": _quack,
    "liger": _liger,
    "mindspore": _mindspore,
    "numpy": _numpy,
}
