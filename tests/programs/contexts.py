"""Everything that can change what a call means in torch, and every operator beside torch's own.

A context is a function of an operator, as a function of tensors, and of those tensors; it gives what there is to
compare: results, gradients, whatever. It is tried with ours and with torch's, and then

- both give the same numbers, dtypes and shapes; or
- ours raises an error that names the operator, where the context says that it may (``refused``); or
- both raise.

``python tests/programs/contexts.py`` prints what each context gives for each operator.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from aotops.frontends import torch as ours
from aotops.ops import OPS
from aotops.testing import cases
from aotops.testing.cases import CASES

Function = Callable[..., Any]

# ------------------------------------------------------------------------------------------------------------ operators


DIFFERENTIABLE = [name for name, row in CASES.items() if row.gradient]
"""The operators to try: a context compares gradients."""


@dataclass(frozen=True)
class Operator:
    """One of ours, as torch has it: both functions take the same tensors."""

    name: str
    ours: Function
    theirs: Function
    shapes: tuple[tuple[int, ...], ...]
    case: cases.Case = field(default_factory=lambda: cases.Case({}))
    """Which of the tensors have a dtype of their own."""
    scalars: bool = False
    """Takes tensors without axes."""

    @property
    def saves_inputs(self) -> bool:
        return bool(set(OPS[self.name].saved) & set(OPS[self.name].inputs))

    def tensors(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        return tuple(tensor(self.case, i, s, dtype, generator).to(device) for i, s in enumerate(self.shapes))


def tensor(case: cases.Case, i: int, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """The tensor of an input that is given: integers, bools, or of this dtype."""
    slot = list(case.given)[i]
    if case.classes.get(slot):
        t = torch.randint(case.classes[slot], shape, generator=generator)
        return t.sort()[0] if slot in case.ascending else t
    if case.dtypes.get(slot) == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def of_tensors(function: Function, slots: list[str], attrs: dict[str, Any] | None = None) -> Function:
    """The function of these inputs alone, by position."""

    def of(first, *others, **more):
        return function(first, **dict(zip(slots[1:], others, strict=True)), **(attrs or {}), **more)

    return of


def _operator(name: str, case: cases.Case) -> Operator:
    slots, shapes = list(case.given), tuple(case.given.values())
    # torch takes no integer there
    attrs = {key: (value,) if key == "normalized_shape" and value == 6 else value for key, value in case.attrs.items()}
    functions = (of_tensors(f, slots, attrs) for f in (getattr(ours, name), CASES[name].in_torch(torch, name)))
    scalars = any(not any(case.given.values()) for case in CASES[name].cases)
    return Operator(name, *functions, shapes, case, scalars)


def _samples() -> Iterator[tuple[str, Operator]]:
    for name in DIFFERENTIABLE:
        for suffix, case in cases.row_samples(name).items():
            yield f"{name}_{suffix}" if suffix else name, _operator(name, case)


def _variants() -> Iterator[tuple[str, Operator]]:
    """Operators without some of their optional tensors, and products and sums that broadcast."""

    def kind(case: cases.Case) -> tuple[Any, ...]:
        return *case.given, name in ("add", "matmul") and len(set(map(len, case.given.values()))) > 1

    for name in DIFFERENTIABLE:
        row = CASES[name]
        seen = {kind(case) for case in cases.row_samples(name).values()}
        for case in row.cases:
            if kind(case) not in seen:
                seen.add(kind(case))
                yield f"{name}-{'-'.join(case.given)}", _operator(name, case)


OPERATORS = dict(_samples())
VARIANTS = dict(_variants())
"""A few contexts are tried with these (FOR_VARIANTS)."""


# ------------------------------------------------------------------------------------------------------------- contexts


@dataclass(frozen=True)
class Context:
    name: str
    apply: Callable[..., Any]
    """Takes a function and its tensors."""
    refused: bool = False
    """Ours may raise, if it names the operator, where torch has an answer."""
    dtype: torch.dtype = torch.float64
    works: torch.dtype | None = None
    """The dtype of the computation where it is not the tensors'."""
    scalars: bool = False
    """For operators that take tensors without axes."""
    only: tuple[str, ...] = ()
    """The operators to try, where all would take too long."""
    without: tuple[str, ...] = ()
    """Operators whose torch version does not do this, or does it otherwise than everywhere else."""
    drawn: bool = False
    """Cheap, and for tensors of any shape: for the differential tester."""
    gpu: bool = False
    crashes: bool = False
    """torch's own ends the process, some of it: ours is tried alone, and must raise."""

    def operators(self) -> list[str]:
        names = [name for name, op in OPERATORS.items() if op.scalars or not self.scalars]
        return [name for name in names if name not in self.without and (not self.only or name in self.only)]


CONTEXTS: dict[str, Context] = {}
FEW = ("gelu", "layer_norm", "linear_gelu", "cross_entropy")
LAYER_NORMS = ("layer_norm", "add_layer_norm")
"""torch 2.13 has wrong tangents of dweight (functional.hessian of the same function differs from func.hessian)."""


def context(name: str, **options: Any) -> Callable[[Function], Function]:
    def define(apply: Function) -> Function:
        assert name not in CONTEXTS
        CONTEXTS[name] = Context(name, apply, **options)
        return apply

    return define


def floating(args) -> tuple[int, ...]:
    return tuple(i for i, t in enumerate(args) if t.is_floating_point())


def leaves(args, wanted: Callable[[int], bool] = lambda i: True) -> list[Tensor]:
    """Tensors of the same memory that require gradients, where they may."""
    return [t.detach().requires_grad_(t.is_floating_point() and wanted(i)) for i, t in enumerate(args)]


def results(y) -> tuple[Tensor, ...]:
    return tuple(y) if isinstance(y, (tuple, list)) else (y,)


def weighted(y: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64, device=y.device).to(y.dtype).reshape(y.shape)


def loss(y) -> Tensor:
    """Whose gradient depends on the results: it is no constant."""
    return sum((t * t * weighted(t)).sum() for t in results(y))


def total(y) -> Tensor:
    """Whose gradient is ones, handed back as a view of one number."""
    return sum(t.sum() for t in results(y))


def scalar(f: Function) -> Function:
    return lambda *args: loss(f(*args))


def gradients(f: Function, args, of: Function = loss, **options):
    """Results, and the gradients of all that is floating."""
    given = leaves(args)
    y = f(*given)
    return y, torch.autograd.grad(of(y), [given[i] for i in floating(given)], **options)


# Recording, or not.


@context("requires_grad of none", drawn=True)
def _(f, args):
    return f(*args)


@context("requires_grad of all", drawn=True)
def plain_gradients(f, args):
    return gradients(f, args)


@context("requires_grad of some", drawn=True)
def _(f, args):
    """Any of them, but not all."""
    found = []
    for n in range(1, len(floating(args))):
        for some in combinations(floating(args), n):
            given = leaves(args, lambda i, some=some: i in some)
            found.append(torch.autograd.grad(loss(f(*given)), [given[i] for i in some]))
    return found


@context("gradient of a sum", drawn=True)
def _(f, args):
    return gradients(f, args, total)


@context("no_grad", drawn=True)
@torch.no_grad()
def _(f, args):
    y = f(*leaves(args))
    return y, [torch.tensor(t.requires_grad) for t in results(y)]


@context("enable_grad in no_grad", drawn=True)
@torch.no_grad()
def _(f, args):
    with torch.enable_grad():
        return gradients(f, args)


@context("set_grad_enabled between")
def _(f, args):
    given = leaves(args)
    torch.set_grad_enabled(False)
    y = f(*given)
    torch.set_grad_enabled(True)
    z = f(*given)
    return y, z, [torch.tensor(t.requires_grad) for t in (*results(y), *results(z))], gradients(f, args)


@context("inference_mode", drawn=True)
@torch.inference_mode()
def _(f, args):
    y = f(*args)
    return y, [torch.tensor(t.is_inference()) for t in results(y)]


@context("inference_mode, tensors made inside")
@torch.inference_mode()
def _(f, args):
    return f(*(t.clone() for t in args))


@context("inference tensors outside", drawn=True)
def _(f, args):
    with torch.inference_mode():
        made = [t.clone() for t in args]
    return f(*made)


@context("an inference tensor where a gradient is recorded", refused=True)
def _(f, args):
    with torch.inference_mode():
        first = args[0].clone()
    given = first, *leaves(args[1:])
    y = f(*given)
    return y, torch.autograd.grad(loss(y), [t for t in given if t.requires_grad])


@context("inference_mode(False) in inference_mode")
@torch.inference_mode()
def _(f, args):
    with torch.inference_mode(False):
        return gradients(f, [t.clone() for t in args])


# Backward, and what it may be asked for.


@context("a second backward, retained", drawn=True)
def _(f, args):
    given = leaves(args)
    y, wanted = loss(f(*given)), [given[i] for i in floating(given)]
    return [torch.autograd.grad(y, wanted, retain_graph=True) for _ in range(2)]


@context("a second backward, not retained")
def _(f, args):
    given = leaves(args)
    y = loss(f(*given))
    y.backward()
    y.backward()


@context("backward into .grad, twice", drawn=True)
def _(f, args):
    given = leaves(args)
    for _ in range(2):
        loss(f(*given)).backward()
    return [given[i].grad for i in floating(given)]


@context("a result used twice", drawn=True)
def _(f, args):
    given = leaves(args)
    y = f(*given)
    return torch.autograd.grad(loss(y) + total(y) * total(y), [given[i] for i in floating(given)])


@context("create_graph, of squares")
def _(f, args):
    y, found = gradients(f, args, create_graph=True)
    return y, found, [torch.tensor(g.requires_grad) for g in found]


@context("gradient penalty, of a sum")
def penalty(f, args, of=total):
    given = leaves(args)
    wanted = [given[i] for i in floating(given)]
    y = f(*given)
    first = torch.autograd.grad(of(y), wanted, create_graph=True)
    return torch.autograd.grad(loss(first) + loss(y), wanted)


# torch's own layer_norm has no second derivative if it has a bias and no weight
@context("gradient penalty, of squares", without=("layer_norm-x-bias", "add_layer_norm-x-residual-bias"))
def _(f, args):
    return penalty(f, args, loss)


@context("gradient penalty, by backward(create_graph=True)")
def _(f, args):
    given = leaves(args)
    wanted = [given[i] for i in floating(given)]
    y = f(*given)
    total(y).backward(create_graph=True)
    return torch.autograd.grad(loss([t.grad for t in wanted]) + loss(y), wanted)


@context("is_grads_batched")
def _(f, args):
    given = leaves(args)
    y = f(*given)
    dys = tuple(torch.stack([weighted(t), t.detach()]) for t in results(y))
    return torch.autograd.grad(results(y), [given[i] for i in floating(given)], dys, is_grads_batched=True)


def of_floating(f: Function, args) -> tuple[Function, tuple[Tensor, ...]]:
    """The function of its floating tensors alone."""
    wanted = floating(args)

    def function(*some):
        given = list(args)
        for i, t in zip(wanted, some, strict=True):
            given[i] = t
        return f(*given)

    return function, tuple(args[i].detach() for i in wanted)


@context("functional.jacobian")
def _(f, args):
    return torch.autograd.functional.jacobian(*of_floating(f, args))


@context("functional.jacobian(vectorize=True)")
def _(f, args):
    return torch.autograd.functional.jacobian(*of_floating(f, args), vectorize=True)


@context("functional.jacobian, forward mode")
def _(f, args):
    return torch.autograd.functional.jacobian(*of_floating(f, args), vectorize=True, strategy="forward-mode")


for _name in ("hessian", "hvp", "vhp"):

    def _second(f, args, name=_name):
        function, given = of_floating(lambda *a: total(f(*a)) + loss(f(*a)), args)
        v = () if name == "hessian" else (tuple(map(weighted, given)),)
        return getattr(torch.autograd.functional, name)(function, given, *v)

    context(f"functional.{_name}")(_second)


@context("functional.jvp")
def _(f, args):
    function, given = of_floating(f, args)
    return torch.autograd.functional.jvp(function, given, tuple(map(weighted, given)))


@context("functional.vjp")
def _(f, args):
    function, given = of_floating(scalar(f), args)
    return torch.autograd.functional.vjp(function, given)


# Forward mode.


def tangents(f, args, make=lambda t: t, of=lambda i: True):
    with forward_ad.dual_level():
        given = [
            forward_ad.make_dual(make(t), weighted(t)) if t.is_floating_point() and of(i) else t
            for i, t in enumerate(args)
        ]
        duals = [forward_ad.unpack_dual(t) for t in results(f(*given))]
        return [(d.primal, torch.zeros_like(d.primal) if d.tangent is None else d.tangent) for d in duals]


@context("dual_level", drawn=True)
def _(f, args):
    return tangents(f, args)


@context("dual_level, the last alone")
def _(f, args):
    return tangents(f, args, of=lambda i: i == floating(args)[-1])


@context("dual_level, with requires_grad")
def _(f, args):
    return tangents(f, args, lambda t: t.detach().requires_grad_())


@context("dual_level, in no_grad")
@torch.no_grad()
def _(f, args):
    return tangents(f, args)


@context("dual_level without a dual")
def _(f, args):
    with forward_ad.dual_level():
        return gradients(f, args)


@context("a dual as the incoming gradient", without=("linear_silu", "swiglu"))
def _(f, args):
    given = leaves(args)
    y = results(f(*given))
    with forward_ad.dual_level():
        dys = [forward_ad.make_dual(weighted(t), weighted(t) + 1) for t in y]
        found = torch.autograd.grad(y, [given[i] for i in floating(given)], dys)
        return [tuple(forward_ad.unpack_dual(g)) for g in found]


# torch.func.


def func(name: str, **options: Any):
    """Contexts of a transform of the scalar loss of all floating tensors."""

    def define(transform: Function) -> Function:
        return context(f"func.{name}", **options)(lambda f, args: transform(f, args, floating(args)))

    return define


@func("grad")
def func_grad(f, args, wanted):
    return torch.func.grad(scalar(f), wanted)(*args)


@func("grad_and_value")
def _(f, args, wanted):
    return torch.func.grad_and_value(scalar(f), wanted)(*args)


@func("grad in no_grad")
@torch.no_grad()
def _(f, args, wanted):
    return torch.func.grad(scalar(f), wanted)(*args)


@func("vjp")
def _(f, args, wanted):
    function, given = of_floating(f, args)
    y, back = torch.func.vjp(function, *given)
    return y, back(pytree.tree_map(weighted, y))


@func("jvp")
def _(f, args, wanted):
    function, given = of_floating(f, args)
    return torch.func.jvp(function, given, tuple(map(weighted, given)))


@func("linearize")
def _(f, args, wanted):
    function, given = of_floating(f, args)
    y, along = torch.func.linearize(function, *given)
    return y, along(*map(weighted, given))


@func("jacrev")
def _(f, args, wanted):
    return torch.func.jacrev(f, wanted)(*args)


@func("jacrev, in chunks of 1")
def _(f, args, wanted):
    return torch.func.jacrev(f, wanted, chunk_size=1)(*args)


@func("jacfwd")
def _(f, args, wanted):
    return torch.func.jacfwd(f, wanted)(*args)


@func("hessian", without=LAYER_NORMS)
def _(f, args, wanted):
    return torch.func.hessian(lambda *a: total(f(*a)), wanted)(*args)


@func("hessian, of squares", without=LAYER_NORMS)
def _(f, args, wanted):
    return torch.func.hessian(scalar(f), wanted)(*args)


@func("grad of grad")
def _(f, args, wanted):
    return torch.func.grad(lambda *a: loss(torch.func.grad(lambda *b: total(f(*b)), wanted)(*a)), wanted)(*args)


@func("jacrev of jacrev")
def _(f, args, wanted):
    return torch.func.jacrev(torch.func.jacrev(lambda *a: total(f(*a)), 0), 0)(*args)


@func("functionalize", drawn=True)
def _(f, args, wanted):
    return torch.func.functionalize(f)(*args)


@func("functionalize of grad")
def _(f, args, wanted):
    return torch.func.functionalize(torch.func.grad(scalar(f), wanted))(*args)


@func("functional_call")
def _(f, args, wanted):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Parameter(torch.zeros_like(args[0]))

        def forward(self):
            return f(self.first, *args[1:])

    module = Module()
    return torch.func.grad(lambda p: loss(torch.func.functional_call(module, p, ())))({"first": args[0]})


# vmap.


def stacked(args, dim: int, n: int = 3) -> list[Tensor]:
    """n examples along an axis; of integers the same ones."""
    return [torch.stack([t * (i + 1) if t.is_floating_point() else t for i in range(n)], dim) for t in args]


for _dim in (0, 1, -1):

    def _along(f, args, dim=_dim):
        return torch.vmap(f, dim)(*stacked(args, dim))

    def _first_along(f, args, dim=_dim):
        return torch.vmap(f, (dim, *[None] * (len(args) - 1)))(stacked(args[:1], dim)[0], *args[1:])

    context(f"vmap, axis {_dim}", drawn=_dim == 0)(_along)
    context(f"vmap, axis {_dim} of the first alone")(_first_along)


@context("vmap of each alone, and of all others")
def _(f, args):
    found = []
    for i in range(len(args)):
        for alone in (True, False):
            dims = [0 if (i == j) == alone else None for j in range(len(args))]
            if any(dim is not None for dim in dims):
                given = [t if dim is None else stacked([t], 0)[0] for t, dim in zip(args, dims, strict=True)]
                found.append(torch.vmap(f, tuple(dims))(*given))
    return found


@context("vmap of no examples", without=("conv2d",))
def _(f, args):
    return torch.vmap(f)(*(t[:0] for t in stacked(args, 0)))


@context("vmap, out_dims=-1")
def _(f, args):
    return torch.vmap(f, out_dims=-1)(*stacked(args, 0))


@context("vmap in chunks")
def _(f, args):
    return torch.vmap(f, chunk_size=2)(*stacked(args, 0))


@context("vmap of vmap")
def _(f, args):
    return torch.vmap(torch.vmap(f, 0), 1)(*stacked(stacked(args, 0), 1, 2))


@context("vmap of scalars", scalars=True)
def _(f, args):
    return torch.vmap(f)(*(t[0] for t in args))


@context("vmap of vmap of scalars", scalars=True)
def _(f, args):
    return torch.vmap(torch.vmap(f))(*args)


@context("vmap of grad of scalars", scalars=True)
def _(f, args):
    return torch.vmap(torch.func.grad(scalar(f)))(*(t[0] for t in args))


@context("vmap of grad: per-sample gradients")
def per_sample(f, args):
    wanted = floating(args)
    return torch.vmap(torch.func.grad(scalar(f), wanted), (0, *[None] * (len(args) - 1)))(
        stacked(args[:1], 0)[0], *args[1:]
    )


@context("vmap of grad")
def _(f, args):
    return torch.vmap(torch.func.grad(scalar(f), floating(args)))(*stacked(args, 0))


@context("grad of vmap")
def _(f, args):
    return torch.func.grad(lambda *a: loss(torch.vmap(f)(*a)), floating(args))(*stacked(args, 0))


@context("backward through vmap")
def _(f, args):
    return gradients(torch.vmap(f), stacked(args, 0))


@context("vmap of jacrev")
def _(f, args):
    return torch.vmap(torch.func.jacrev(f))(*stacked(args, 0, 2))


# Compiled.

_is_reference = False
"""Whether torch's own operator is tried."""


def compiled(f: Function, backend: str = "aot_eager", **options) -> Function:
    """With what comes before Inductor, which takes its operators as this leaves them (tests/torch/test_inductor.py).
    torch's own is the reference as it is: compiling it would take as long again."""
    if _is_reference:
        return f
    torch._dynamo.reset()
    return torch.compile(f, backend=backend, fullgraph=True, **options)


@context("compile, eager")
def _(f, args):
    return gradients(compiled(f, "eager"), args)


@context("compile, aot_eager")
def _(f, args):
    return gradients(compiled(f), args)


@context("compile, aot_eager, dynamic")
def _(f, args):
    """The first axis, and that of others which is as long, in two lengths."""
    function, rows = compiled(f, dynamic=True), args[0].shape[:1]
    return [
        gradients(function, [torch.cat([t] * n) if rows and t.shape[:1] == rows else t for t in args]) for n in (1, 3)
    ]


@context("compile, in no_grad")
@torch.no_grad()
def _(f, args):
    return compiled(f)(*leaves(args))


@context("compile of func.grad", only=FEW)
def _(f, args):
    return compiled(lambda *a: torch.func.grad(scalar(f), floating(args))(*a))(*args)


@context("compile of vmap of grad", only=FEW)
def _(f, args):
    return compiled(lambda *a: per_sample(f, a))(*args)


@context("compile of jacrev", only=("gelu", "layer_norm"))
def _(f, args):
    return compiled(lambda *a: torch.func.jacrev(f)(*a))(*args)


@context("compile of vmap", only=FEW)
def _(f, args):
    return compiled(lambda *a: torch.vmap(f)(*a))(*stacked(args, 0))


@context("compile of func.jvp")
def _(f, args):
    """A result beside which another has a tangent, too."""
    function, given = of_floating(f, args)
    along = tuple(map(weighted, given))
    return compiled(lambda *a: torch.func.jvp(lambda *b: (function(*b), b[0] * 2), a, along))(*given)


@context("compile of func.hessian", only=("gelu", "softmax", "linear_gelu", "cross_entropy"))
def _(f, args):
    function, given = of_floating(lambda *a: total(f(*a)), args)
    return compiled(torch.func.hessian(function, tuple(range(len(given)))))(*given)


for _backend in ("eager", "aot_eager"):

    def _dual_inside(f, args, backend=_backend):
        def inside(*given):
            with forward_ad.dual_level():
                duals = [forward_ad.make_dual(t, t * 2) if t.is_floating_point() else t for t in given]
                y = [t + t.new_ones(()) * total(duals[:1]) for t in results(f(*duals))]
                return [tuple(forward_ad.unpack_dual(t)) for t in y]

        return compiled(inside, backend)(*args)

    context(f"compile of a dual level, {_backend}", only=(*FEW, "add", "rms_norm"))(_dual_inside)


@context("compile of create_graph", refused=True, only=FEW)
def _(f, args):
    torch._dynamo.reset()
    return penalty(torch.compile(f, backend="aot_eager", fullgraph=True), args)


@context("compile, then forward mode", only=FEW)
def _(f, args):
    return tangents(compiled(f), args)


@context("export")
def _(f, args):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return f(*args)

    return torch.export.export(Module(), tuple(args)).module()(*args)


@context("make_fx")
def _(f, args):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda *a: f(*a))(*args)(*args)


@context("make_fx of func.grad", only=FEW)
def _(f, args):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(torch.func.grad(scalar(f), floating(args)))(*args)(*args)


@context("jit.trace")
def _(f, args):
    traced = torch.jit.trace(lambda *a: f(*a), tuple(args), check_trace=False)
    return traced(*(t + 1 if t.is_floating_point() else t for t in args))


@context("fx.symbolic_trace", refused=True)
def _(f, args):
    class Module(torch.nn.Module):
        def forward(self, x):
            return f(x, *args[1:])

    return torch.fx.symbolic_trace(Module())(args[0])


# Autocast.

for _low in (torch.bfloat16, torch.float16):
    _on = partial(torch.autocast, "cpu", _low)
    _options = {"dtype": torch.float32, "works": _low}
    _title = f"autocast, {str(_low).removeprefix('torch.')}"

    def _cast(f, args, on=_on):
        with on():
            return f(*args)

    def _cast_gradients(f, args, on=_on):
        given = leaves(args)
        with on():
            y = f(*given)
        return y, torch.autograd.grad(loss(y), [given[i] for i in floating(given)])

    def _cast_low_first(f, args, on=_on, low=_low):
        with on():
            return f(args[0].to(low), *args[1:])

    def _cast_double(f, args, on=_on):
        with on():
            return f(*(t.double() if t.is_floating_point() else t for t in args))

    def _cast_off(f, args, on=_on):
        with on(), torch.autocast("cpu", enabled=False):
            y = f(*args)
        with on(), torch.autocast("cpu", enabled=False), on():
            return y, f(*args)

    def _cast_compiled(f, args, on=_on):
        def inside(*given):
            with on():
                return f(*given)

        return compiled(inside)(*args)

    def _cast_outside(f, args, on=_on):
        with on():
            return compiled(f)(*args)

    def _cast_func(f, args, on=_on):
        with on():
            return torch.func.grad(scalar(f), floating(args))(*args)

    def _cast_vmap(f, args, on=_on):
        with on():
            return torch.vmap(f)(*stacked(args, 0))

    context(_title, **_options)(_cast)
    context(f"{_title}, gradients", **_options)(_cast_gradients)
    # beside a residual in float32, theirs has the dtype of the sum, and beside tables that of the product
    _sums = tuple(name for name in OPERATORS if name.startswith(("add_", "rope", "qkv_rope")))
    context(f"{_title}, a first tensor of that dtype", refused=True, without=_sums, **_options)(_cast_low_first)
    context(f"{_title}, float64", dtype=torch.float32, works=torch.float32)(_cast_double)
    context(f"{_title}, switched off within", **_options)(_cast_off)
    # either with one: which dtype it is, is read from torch as in the contexts above, and a graph takes half a second
    if _low is torch.bfloat16:
        context(f"{_title}, within compile", **_options)(_cast_compiled)
    else:
        context(f"{_title}, around compile", **_options)(_cast_outside)
    context(f"{_title}, around func.grad", **_options)(_cast_func)
    # there torch takes linear and conv2d apart, and adds a bias of float32 to a product of 16 bits
    _apart = ("conv2d", *(name for name in OPERATORS if name.startswith("linear")))
    context(f"{_title}, around vmap", without=_apart, **_options)(_cast_vmap)


@context("autocast of another device", dtype=torch.float32)
def _(f, args):
    with torch.autocast("cuda", torch.bfloat16):
        return gradients(f, args)


# Modes.


@contextmanager
def logged_dispatch() -> Iterator[list[str]]:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        yield seen


@contextmanager
def logged_functions() -> Iterator[list[Any]]:
    from torch.overrides import TorchFunctionMode

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        yield seen


@context("TorchDispatchMode", drawn=True)
def _(f, args):
    with logged_dispatch() as seen:
        y = f(*args)
    return y, torch.tensor(bool(seen))


@context("TorchDispatchMode, gradients", drawn=True)
def _(f, args):
    given = leaves(args)
    with logged_dispatch():
        y = f(*given)
        return y, torch.autograd.grad(loss(y), [given[i] for i in floating(given)])


@context("TorchDispatchMode, backward alone")
def _(f, args):
    given = leaves(args)
    y = loss(f(*given))
    with logged_dispatch() as seen:
        found = torch.autograd.grad(y, [given[i] for i in floating(given)])
    return found, torch.tensor(bool(seen))


@context("TorchFunctionMode", drawn=True)
def _(f, args):
    with logged_functions() as seen:
        y = f(*args)
    return y, torch.tensor(bool(seen))


@context("TorchFunctionMode, gradients")
def _(f, args):
    with logged_functions():
        return gradients(f, args)


@context("a device context of meta")
def _(f, args):
    with torch.device("meta"):
        return f(*args)


@context("set_default_device(meta)")
def _(f, args):
    torch.set_default_device("meta")
    try:
        return f(*args), f(*leaves(args))
    finally:
        torch.set_default_device(None)


@context("set_default_dtype(float16)")
def _(f, args):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        return gradients(f, args)
    finally:
        torch.set_default_dtype(before)


@context("FakeTensorMode")
def _(f, args):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        y, grads = gradients(f, [mode.from_tensor(t) for t in args])
    return [describe(t) for t in (*results(y), *grads)]


@context("FakeTensorMode, real tensors")
def _(f, args):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return f(*args)


@context("meta tensors")
def _(f, args):
    y, grads = gradients(f, [t.to("meta") for t in args])
    return [describe(t) for t in (*results(y), *grads)]


@context("one meta tensor", refused=True)
def _(f, args):
    return f(args[0].to("meta"), *args[1:])


def describe(t: Tensor) -> tuple:
    return type(t).__name__, tuple(t.shape), t.dtype, t.device.type, t.requires_grad


@context("flop counter")
def _(f, args):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return gradients(f, args)


@context("deterministic algorithms", drawn=True)
def _(f, args):
    torch.use_deterministic_algorithms(True)
    try:
        return gradients(f, args)
    finally:
        torch.use_deterministic_algorithms(False)


@context("anomaly mode")
def _(f, args):
    with torch.autograd.detect_anomaly():
        return gradients(f, args)


@context("profiler")
def _(f, args):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]):
        return f(*args), gradients(f, args)


@context("profiler of autograd")
def _(f, args):
    with torch.autograd.profiler.profile():
        return f(*args), gradients(f, args)


# Kinds of tensors.


class Watching(Tensor):
    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Silent(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


@context("a subclass with __torch_function__")
def _(f, args):
    first = args[0].as_subclass(Watching)
    Watching.seen.clear()
    y = f(first, *args[1:])
    return [type(t).__name__ for t in results(y)], bool(Watching.seen), y


@context("a subclass with __torch_function__, gradients")
def _(f, args):
    return gradients(f, [t.as_subclass(Watching) for t in args])


@context("a subclass without __torch_function__")
def _(f, args):
    return gradients(f, [args[0].as_subclass(Silent), *args[1:]])


@context("a subclass with __torch_dispatch__")
def _(f, args):
    from torch.testing._internal.two_tensor import TwoTensor

    y = results(f(TwoTensor(args[0], args[0] + 1), *args[1:]))
    return [(t.a, t.b) if isinstance(t, TwoTensor) else t for t in y]


@context("a subclass with __torch_dispatch__, gradients")
def _(f, args):
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(args[0], args[0] + 1).requires_grad_()
    (dx,) = torch.autograd.grad(total(f(x, *args[1:])), x)
    return dx.a, dx.b


@context("Parameter")
def _(f, args):
    given = [torch.nn.Parameter(t) if t.is_floating_point() else t for t in args]
    y = f(*given)
    return [type(t).__name__ for t in results(y)], y, torch.autograd.grad(loss(y), [given[i] for i in floating(given)])


@context("Buffer")
def _(f, args):
    return f(*(torch.nn.Buffer(t) if t.is_floating_point() else t for t in args))


@context("functional tensors", drawn=True)
def _(f, args):
    y = results(f(*map(torch._to_functional_tensor, args)))
    for t in y:
        torch._sync(t)
    return [torch._from_functional_tensor(t) for t in y]


@context("one functional tensor")
def _(f, args):
    y = results(f(torch._to_functional_tensor(args[0]), *args[1:]))
    for t in y:
        torch._sync(t)
    return [torch._from_functional_tensor(t) for t in y]


def zero(t: Tensor) -> Tensor:
    return torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)


@context("a zero tensor", refused=True)
def _(f, args):
    return [t.clone() for t in results(f(zero(args[0]), *args[1:]))]


@context("zero tensors, gradients", refused=True)
def _(f, args):
    given = zero(args[0]), *leaves(args[1:])
    y = f(*given)
    wanted = [t for t in given if t.requires_grad]
    return y, torch.autograd.grad(loss(y), wanted) if wanted else ()


@context("a zero tensor as the incoming gradient")
def _(f, args):
    given = leaves(args)
    y = results(f(*given))
    found = torch.autograd.grad(y, [given[i] for i in floating(given)], [zero(t) for t in y])
    return [g.clone() for g in found]


def negated(t: Tensor) -> Tensor:
    """A view with equal numbers, whose memory has the other sign."""
    return torch._neg_view(-t) if t.is_floating_point() else t


@context("negated views", drawn=True)
def _(f, args):
    return f(*map(negated, args)), gradients(f, list(map(negated, args)))


@context("a negated view, in no_grad")
@torch.no_grad()
def _(f, args):
    return f(negated(args[0]), *args[1:])


@context("a negated view as the incoming gradient", drawn=True)
def _(f, args):
    given = leaves(args)
    y = results(f(*given))
    return torch.autograd.grad(y, [given[i] for i in floating(given)], [negated(weighted(t)) for t in y])


@context("imag of a conjugate")
def _(f, args):
    first = torch.complex(torch.zeros_like(args[0]), -args[0]).conj().imag
    return f(first, *args[1:]), gradients(f, [first, *args[1:]])


@context("complex tensors", refused=True)
def _(f, args):
    return f(*(t.to(torch.complex128) if t.is_floating_point() else t for t in args))


@context("integers", refused=True)
def _(f, args):
    return f(*(t.long() for t in args))


@context("sparse, coo", refused=True)
def _(f, args):
    return [t.to_dense() for t in results(f(args[0].to_sparse(), *args[1:]))]


@context("sparse, csr", refused=True)
def _(f, args):
    first = args[0].reshape(-1, args[0].shape[-1]).to_sparse_csr()
    return [t.to_dense() for t in results(f(first, *args[1:]))]


@context("sparse, coo, the last", refused=True)
def _(f, args):
    return [t.to_dense() for t in results(f(*args[:-1], args[-1].to_sparse()))]


@context("a sparse incoming gradient", refused=True)
def _(f, args):
    given = leaves(args)
    y = results(f(*given))
    found = torch.autograd.grad(y, [given[i] for i in floating(given)], [weighted(t).to_sparse() for t in y])
    return [g.to_dense() for g in found]


@context("mkldnn", refused=True, dtype=torch.float32)
def _(f, args):
    return [t.to_dense() for t in results(f(args[0].to_mkldnn(), *args[1:]))]


@context("nested", refused=True)
def _(f, args):
    first = torch.nested.nested_tensor([args[0], args[0]])
    return [t.to_padded_tensor(0.0) for t in results(f(first, *args[1:]))]


@context("nested, jagged", refused=True)
def _(f, args):
    first = torch.nested.nested_tensor([args[0], args[0][:1]], layout=torch.jagged)
    return [t.to_padded_tensor(0.0) for t in results(f(first, *args[1:]))]


@context("quantised", refused=True, dtype=torch.float32)
def _(f, args):
    first = torch.quantize_per_tensor(args[0], 0.1, 0, torch.qint8)
    return [t.dequantize() for t in results(f(first, *args[1:]))]


@context("storage without memory", crashes=True)
def _(f, args):
    first = args[0].clone()
    first.untyped_storage().resize_(0)
    return f(first, *args[1:])


@context("storage without memory, gradients", crashes=True)
def _(f, args):
    first = args[0].clone()
    first.untyped_storage().resize_(0)
    return gradients(f, [first, *args[1:]])


@context(
    "a saved tensor's storage without memory",
    crashes=True,
    without=tuple(name for name, operator in OPERATORS.items() if not operator.saves_inputs),
)
def _(f, args):
    given = [t.clone().requires_grad_(t.is_floating_point()) for t in args]
    y = total(f(*given))
    for t in given:
        t.untyped_storage().resize_(0)
    return torch.autograd.grad(y, [given[i] for i in floating(given)])


@context("None for a tensor")
def _(f, args):
    return f(None, *args[1:])


@context("an array for a tensor", refused=True)
def _(f, args):
    return f(*args[:-1], args[-1].numpy())


@context("an array for a tensor, in no_grad", refused=True)
@torch.no_grad()
def _(f, args):
    return f(*args[:-1], args[-1].numpy())


# How they lie.


def strided(t: Tensor) -> Tensor:
    """Every second element of a wider one, one element into its memory."""
    wide = torch.zeros(*t.shape, 2, dtype=t.dtype, device=t.device)
    wide[..., 1] = t
    return wide[..., 1]


def transposed(t: Tensor) -> Tensor:
    axes = tuple(reversed(range(t.dim())))
    return t.permute(axes).contiguous().permute(axes)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": transposed,
    "strided": strided,
    "expanded": lambda t: t[:1].expand(t.shape) if t.dim() else t,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else transposed(t),
    "shifted": lambda t: torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[1:].reshape(t.shape) if t.numel() else t,
}

for _name, _lay in LAYOUTS.items():

    def _laid(f, args, lay=_lay):
        given = list(map(lay, args))
        with torch.no_grad():
            y = f(*given)
        return y, gradients(f, given)

    def _laid_incoming(f, args, lay=_lay):
        given = leaves(args)
        y = results(f(*given))
        return torch.autograd.grad(y, [given[i] for i in floating(given)], [lay(weighted(t)) for t in y])

    context(f"{_name} tensors")(_laid)
    context(f"{_name} incoming gradients")(_laid_incoming)


# Changes of tensors, hooks and graphs after the call.


@context("an input changed in place before backward", refused=True)
def _(f, args):
    given = [t.clone() for t in leaves(args)]
    y = total(f(*given))
    with torch.no_grad():
        for t in given:
            t.zero_()
    return torch.autograd.grad(y, [given[i] for i in floating(given)])


@context("a result changed in place before backward", refused=True)
def _(f, args):
    given = leaves(args)
    y = results(f(*given))
    for t in y:
        t.mul_(2)
    return y, torch.autograd.grad(total(y), [given[i] for i in floating(given)])


@context("an input changed in place after the call")
def _(f, args):
    given = [t.clone() for t in args]
    y = f(*given)
    for t in given:
        t.zero_()
    return y, f(*given)


@context("hooks of tensors")
def _(f, args):
    given = leaves(args)
    seen = []
    y = results(f(*given))
    for t in (*y, *(given[i] for i in floating(given))):
        t.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    found = torch.autograd.grad(total(y), [given[i] for i in floating(given)])
    return found, sorted(float(g.sum()) for g in seen)


@context("hooks after accumulation")
def _(f, args):
    given = leaves(args)
    seen = []
    for i in floating(given):
        given[i].register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    loss(f(*given)).backward()
    return sorted(float(g.sum()) for g in seen)


@context("hooks of several gradients")
def _(f, args):
    given = leaves(args)
    seen = []
    hook = torch.autograd.graph.register_multi_grad_hook([given[i] for i in floating(given)], lambda g: seen.extend(g))
    loss(f(*given)).backward()
    hook.remove()
    return seen


@context("hooks of the node")
def _(f, args):
    given = leaves(args)
    y = results(f(*given))
    hooks = [y[0].grad_fn.register_prehook(lambda dys: tuple(None if d is None else d * 3 for d in dys))]
    found = torch.autograd.grad(y[0].sum(), [given[i] for i in floating(given)], materialize_grads=True)
    for hook in hooks:
        hook.remove()
    return found


@context("hooks of saved tensors", drawn=True)
def _(f, args):
    def pack(t):
        packed.append(t)
        return t.clone()

    packed: list[Tensor] = []
    given = leaves(args)
    with torch.autograd.graph.saved_tensors_hooks(pack, Tensor.clone):
        y = f(*given)
    return y, bool(packed), torch.autograd.grad(total(y), [given[i] for i in floating(given)])


@context("gradient penalty, among hooks of saved tensors")
def _(f, args):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda packed: packed[0]):
        return penalty(f, args)


@context("save_on_cpu")
def _(f, args):
    with torch.autograd.graph.save_on_cpu():
        return gradients(f, args)


@context("hooks of saved tensors, disabled")
def _(f, args):
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        return gradients(f, args)


@context("mutation of saved tensors allowed")
def _(f, args):
    given = [t.clone() for t in leaves(args)]
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        y = total(f(*given))
        with torch.no_grad():
            for t in given:
                t.mul_(2)
        return torch.autograd.grad(y, [given[i] for i in floating(given)])


for _reentrant in (False, True):

    def _checkpointed(f, args, reentrant=_reentrant):
        from torch.utils.checkpoint import checkpoint

        given = leaves(args)
        y = checkpoint(f, *given, use_reentrant=reentrant)
        loss(y).backward()
        return y, [given[i].grad for i in floating(given)]

    context(f"checkpoint, {'' if _reentrant else 'not '}reentrant")(_checkpointed)


@context("another thread", drawn=True)
def _(f, args):
    found: list[Any] = []

    def work():
        try:
            found.append(gradients(f, args))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found


@context("no_grad here, recorded in another thread")
@torch.no_grad()
def _(f, args):
    return CONTEXTS["another thread"].apply(f, args)


# On a GPU.


@context("cuda, plain", gpu=True)
def _(f, args):
    return f(*args), gradients(f, args)


@context("cuda, a stream of its own", gpu=True)
def _(f, args):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        given = [torch.zeros_like(t) for t in args]
        torch.cuda._sleep(20_000_000)
        for t, value in zip(given, args, strict=True):
            t.copy_(value)
        found = gradients(f, given)
    side.synchronize()
    return found


def recorded(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the step, after a few to warm up, and the tensors that it writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Threads of other frameworks in this process may free memory meanwhile, which ends a capture of mode global.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        return graph, step()


@context("cuda, graph", gpu=True)
def _(f, args):
    static = [t.clone().requires_grad_(t.is_floating_point()) for t in args]

    def step():
        y = f(*static)
        return y, torch.autograd.grad(loss(y), [static[i] for i in floating(static)])

    graph, found = recorded(step)
    with torch.no_grad():
        for i in floating(static):
            static[i].mul_(0.5)
    graph.replay()
    return found


for _low in (torch.bfloat16, torch.float16):

    def _cuda_cast(f, args, low=_low):
        given = leaves(args)
        with torch.autocast("cuda", low):
            y = f(*given)
        return y, torch.autograd.grad(loss(y), [given[i] for i in floating(given)])

    _title = f"cuda, autocast, {str(_low).removeprefix('torch.')}"
    context(_title, gpu=True, dtype=torch.float32, works=_low)(_cuda_cast)


@context("cuda, one tensor on the CPU", gpu=True)
def _(f, args):
    return f(args[0].cpu(), *args[1:])


FOR_VARIANTS = (
    "requires_grad of some", "gradient penalty, of squares", "func.grad", "func.jvp", "vmap of grad",
    "compile, aot_eager", "make_fx", "meta tensors",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------- the rule


def attempt(apply: Callable[..., Any], f: Function, args) -> Any:
    """The result or the error; a warning is neither."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return apply(f, args)
        except Exception as error:
            return error


def same(got: Any, expected: Any, works: torch.dtype, magnified: float = 1.0) -> None:
    """Raises AssertionError where two results differ."""
    mine, how = pytree.tree_flatten(got)
    theirs, as_theirs = pytree.tree_flatten(expected)
    assert how == as_theirs, f"{how}, expected {as_theirs}"
    for a, b in zip(mine, theirs, strict=True):
        if not isinstance(b, Tensor):
            assert a == b or (isinstance(b, float) and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)), f"{a}, {b}"
            continue
        assert isinstance(a, Tensor), f"{a!r:.100}, expected a tensor"
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), f"{describe(a)}, expected {describe(b)}"
        if b.device.type != "meta":
            close(a, b, works if b.dtype.is_floating_point else torch.float64, magnified)


def close(a: Tensor, b: Tensor, works: torch.dtype, magnified: float) -> None:
    a, b = (t.detach().resolve_neg().to("cpu", torch.float64).numpy(force=True) for t in (a, b))
    assert np.array_equal(np.isfinite(a), np.isfinite(b)), f"{a}, expected {b}"
    odd = ~np.isfinite(b)
    assert np.array_equal(a[odd], b[odd], equal_nan=True)
    a, b = np.where(odd, 0, a), np.where(odd, 0, b)
    cases.assert_close(a, b, cases.apart(b, str(works).removeprefix("torch."), magnified))


def names(error: Exception, operator: Operator) -> bool:
    kinds = (NotImplementedError, RuntimeError, TypeError, ValueError)
    return isinstance(error, kinds) and operator.name in str(error)


AUTOGRADS = (
    "modified by an inplace operation",
    "backward through the graph a second time",
    "Inference tensors cannot be saved",
    "does not currently support double backward",
)
"""Messages of autograd itself, of any operator's graph."""


def judge(context: Context, operator: Operator, expected: Any, got: Any, magnified: float = 1.0) -> str:
    """Says whether ours was served or refused. Raises AssertionError if it is neither right nor a proper error."""
    if not isinstance(got, Exception):
        assert not isinstance(expected, Exception), f"torch raises {expected!r:.300}, ours gives {got!r:.300}"
        same(got, expected, context.works or context.dtype, magnified)
        return "served"
    proper = names(got, operator) or any(text in str(got) for text in AUTOGRADS)
    if isinstance(expected, Exception):
        alike = str(got) == str(expected) or (type(got) is type(expected) and operator.name in str(got))
        assert proper or alike, f"the error does not name {operator.name}: {got!r:.500}"
    else:
        assert proper, f"torch works, ours raises {got!r:.500}"
        assert context.refused, f"torch works, ours refuses: {got!r:.500}"
    return "refused"


def check(context: Context, name: str, device: str = "cpu") -> str:
    global _is_reference
    operator = (OPERATORS | VARIANTS)[name]
    with torch.random.fork_rng():
        expected: Any = RuntimeError("a crash")
        if not context.crashes:
            _is_reference = True
            expected = attempt(context.apply, operator.theirs, operator.tensors(context.dtype, device))
            _is_reference = False
        got = attempt(context.apply, operator.ours, operator.tensors(context.dtype, device))
    return judge(context, operator, expected, got, operator.case.magnified)


# ------------------------------------------------------------------------------------------------------------ the table


def way(context: Context, name: str) -> str:
    """The answer of ``check``, or "dispatched" where an operator of torch.ops.aotops was called on the way."""
    reached = []

    def watch(frame, event, arg):
        if event == "call" and frame.f_code.co_name == "__call__" and frame.f_code.co_filename.endswith("_ops.py"):
            reached.append(str(frame.f_locals.get("self")).startswith("aotops."))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        found = check(context, name, "cuda" if context.gpu else "cpu")
    except AssertionError:
        found = "WRONG"
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return "dispatched" if found == "served" and any(reached) else found


def main() -> None:
    """Prints a line for each context: what it gives, and for which operators, the most frequent first."""
    for context in CONTEXTS.values():
        if context.gpu and not torch.cuda.is_available():
            continue
        found: dict[str, list[str]] = {}
        for name in context.operators():
            found.setdefault(way(context, name), []).append(name)
        ordered = sorted(found.items(), key=lambda item: -len(item[1]))
        rest = [f"{way}: {', '.join(names)}" for way, names in ordered[1:]]
        print(f"{context.name}: {ordered[0][0]}" + (f" ({'; '.join(rest)})" if rest else ""))


if __name__ == "__main__":
    main()
