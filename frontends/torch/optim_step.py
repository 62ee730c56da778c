"""A step of AdamW (optim.py): the parameters' state, and the calls of the kernel."""

from __future__ import annotations

from array import array
from collections import defaultdict
from ctypes import c_int
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from aotops import adamw
from aotops.call import builtin, struct_capsule

from .tensors import READS_TENSORS, name_of

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
MASTER = "master_param"
_dtype, _layout, _grad = attrgetter("dtype"), attrgetter("layout"), attrgetter("grad")

# --------------------------------------------------------------------------------------------------------------- state


def state_dtype_of(group: dict[str, Any], p: Tensor) -> torch.dtype:
    return p.dtype if group["state_dtype"] is None or p.dtype not in _NARROWER else group["state_dtype"]


_NARROWER = (torch.float16, torch.bfloat16, torch.float32)


def _has_master(group: dict[str, Any], p: Tensor) -> bool:
    return group["master_weights"] and p.dtype in (torch.float16, torch.bfloat16)


def _complete(group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    """Adds what a parameter's state lacks."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
    for key in MOMENTS if group["amsgrad"] else MOMENTS[:2]:
        if key not in state:
            state[key] = torch.zeros_like(p, dtype=state_dtype_of(group, p), memory_format=torch.preserve_format)
    if _has_master(group, p) and MASTER not in state:
        state[MASTER] = p.detach().to(torch.float32, memory_format=torch.preserve_format)


# ------------------------------------------------------------------------------------------------------------- a step


class Plan:
    """The parameters of a group that have a gradient, in batches. It is kept for as long as ``holds`` is true."""

    def __init__(self, group: dict[str, Any], states: dict[Tensor, dict[str, Any]]) -> None:
        self.group, self.options = group, _options(group)
        self.params = list(group["params"])
        self.without = [p for p in self.params if p.grad is None]
        found: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for p in self.params:
            if p.grad is not None:
                _complete(group, p, states[p])
                found[p.device, p.dtype, states[p]["exp_avg"].dtype].append(p)
        self.batches = [_Batch(group, each, [states[p] for p in each]) for each in found.values()]
        self.is_kept = all(batch.is_plain for batch in self.batches)

    def holds(self, group: dict[str, Any], states: dict[Tensor, dict[str, Any]]) -> bool:
        """Whether nothing has changed but values. A changed state is found by the identity and address of its tensors,
        a parameter and a gradient by what they are."""
        params = group["params"]
        return (
            self.is_kept
            and group is self.group
            and len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and _options(group) == self.options
            and all(p.grad is None for p in self.without)
            and all(batch.holds(states) for batch in self.batches)
        )


def _options(group: dict[str, Any]) -> tuple[Any, ...]:
    return group["amsgrad"], group["master_weights"], group["state_dtype"]


class _Batch:
    """Parameters of the same device and dtypes, with their states."""

    def __init__(self, group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]]) -> None:
        self.group, self.params, self.states = group, params, states
        self.device, self.dtype, self.state_dtype = params[0].device, params[0].dtype, states[0]["exp_avg"].dtype
        if self.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"AdamW: a parameter is on {self.device}, expected cpu or cuda")
        self.lists = {"param": params}
        for key in ("exp_avg", "exp_avg_sq", "step", *(MOMENTS[2:] if group["amsgrad"] else ())):
            self.lists[key] = [state[key] for state in states]
        if _has_master(group, params[0]):
            self.lists["master"] = [state[MASTER] for state in states]
        self.keys = [MASTER if name == "master" else name for name in self.lists if name != "param"]
        self.grads: list[Tensor] = [p.grad for p in params]  # type: ignore[misc]
        orders = list(map(_order, params))
        like_params = (each for name, each in self.lists.items() if name != "step")
        self.is_plain = (
            self.dtype not in _REAL
            and _are_plain([*chain(*self.lists.values()), *self.grads])
            and None not in orders
            and all(list(map(_order, each)) == orders for each in (*like_params, self.grads))
        )
        if self.is_plain:
            self._check(self.lists, self.grads)
            self.sizes, self.addresses = _sizes(params), {n: _addresses(each) for n, each in self.lists.items()}
            (_, *self.form), (self.grad_addresses, *self.grad_form) = _facts(params), _facts(self.grads)

    def holds(self, states: dict[Tensor, dict[str, Any]]) -> bool:
        others = {name: each for name, each in self.lists.items() if name != "param"}
        try:
            self.grads = list(map(_grad, self.params))
            (addresses, *form), (self.grad_addresses, *grad_form) = _facts(self.params), _facts(self.grads)
            return (
                addresses == self.addresses["param"]
                and (form, grad_form) == (self.form, self.grad_form)
                and all(map(is_, map(states.get, self.params), self.states))
                and all(
                    all(map(is_, map(itemgetter(key), self.states), each)) and _addresses(each) == self.addresses[name]
                    for key, (name, each) in zip(self.keys, others.items(), strict=True)
                )
            )
        except (KeyError, AttributeError):  # of a state that lacks a tensor, of a parameter without a gradient
            return False

    def run(self, scaling: dict[str, Tensor | None]) -> None:
        try:
            if self.is_plain:
                addresses = {**self.addresses, "grad": self.grad_addresses}
                return self._launch(self.sizes, addresses, self.params, self.grads, scaling)
            writes_grad = scaling["grad_scale"] is not None
            laid_out, copies = _laid_out(self.lists, self.grads, writes_grad)
            grads, steps = laid_out.pop("grad"), {"step": self.lists["step"]}
            self._check(laid_out | steps, grads)
            addresses = {name: _addresses(each) for name, each in (laid_out | steps | {"grad": grads}).items()}
            self._launch(_sizes(laid_out["param"]), addresses, laid_out["param"], grads, scaling)
            for original, used in copies:
                original.copy_(used)
        finally:
            self.grads = []  # which the caller may free

    def _launch(self, sizes, addresses, params, grads, scaling) -> None:
        group, device = self.group, self.device
        numbers = {name: _number(t, device) for name, t in scaling.items()}
        lr, is_cuda = group["lr"], device.type == "cuda"
        if is_cuda and not group["capturable"] and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("AdamW: a CUDA graph captures step and capturable is False, expected True")
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            numbers["lr_number"] = _number(lr, device)
        scales = scaling["grad_scale"] is not None
        adamw.step(
            device.type,
            sizes,
            addresses,
            **{name: t.data_ptr() for name, t in numbers.items() if t is not None},
            lr=0.0 if "lr_number" in numbers else float(lr),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            dtype=_REAL.get(self.dtype) or name_of(self.dtype).encode(),
            state_dtype=_REAL.get(self.state_dtype) or name_of(self.state_dtype).encode(),
            unscale=scales,
            maximize=bool(group["maximize"]),
            device=device.index or 0,
            stream=torch.cuda.current_stream(device).cuda_stream if is_cuda else None,
        )
        torch.autograd.graph.increment_version([*params, *grads] if scales else params)

    def _check(self, lists: dict[str, list[Tensor]], grads: list[Tensor]) -> None:
        """Checks what a caller, or a loaded state, may have wrong. The kernel sees addresses alone."""
        shapes = [p.shape for p in lists["param"]]
        own, state = lists["param"][0].dtype, lists["exp_avg"][0].dtype
        dtypes = {"param": own, "grad": own, "step": torch.float32, "master": torch.float32}
        for name, each in (lists | {"grad": grads}).items():
            dtype = dtypes.get(name, state)
            for t, shape in zip(each, shapes, strict=True):
                what = f"AdamW: {name} of a parameter in {name_of(own)} on {self.device}"
                if t.dtype != dtype:
                    raise TypeError(f"{what} has dtype {name_of(t.dtype)}, expected {name_of(dtype)}")
                if t.device != self.device:
                    raise ValueError(f"{what} is on {t.device}")
                if t.shape != (shape if name != "step" else ()):
                    raise ValueError(f"{what} has shape {tuple(t.shape)}, expected {tuple(shape)}")
                if t.numel() and not t.data_ptr():
                    raise RuntimeError(f"{what} has no memory: its storage was freed, or is not its own")


_REAL = {torch.complex64: b"float32", torch.complex128: b"float64"}


def _sizes(tensors: list[Tensor]) -> array[int]:
    return array("q", map(Tensor.numel, tensors))


def _addresses(tensors: list[Tensor]) -> array[int]:
    return array("Q", found[0] if (found := _read(*tensors)) else map(Tensor.data_ptr, tensors))


def _facts(tensors: list[Tensor]) -> tuple[Any, ...]:
    """The addresses, and what else a step depends on: dtypes, sizes and orders. (None,) if not all are plain."""
    if READS_TENSORS:
        return (array("Q", found[0]), found[1]) if (found := _read(*tensors)) else (None,)
    own = _are_plain(tensors)
    return (_addresses(tensors), *(list(map(f, tensors)) for f in (_dtype, Tensor.numel, _order))) if own else (None,)


_read = builtin("facts", "aot_torch_facts", struct_capsule(c_int())) if READS_TENSORS else lambda *_: None


def _number(t: Tensor | None, device: torch.device) -> Tensor | None:
    return None if t is None else t.detach().to(device, torch.float32, non_blocking=True)


def _are_plain(tensors: list[Tensor]) -> bool:
    """Whether all have memory of their own that is read as it is."""
    return (
        {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, tensors))
        and {torch.strided}.issuperset(map(_layout, tensors))
        and not any(map(Tensor.is_neg, tensors))
    )


def _order(t: Tensor) -> tuple[int, ...] | None:
    """The order of the elements in memory, the same for tensors of a shape that are alike: the strides, () if it is
    contiguous. None if they do not fill their memory, each once."""
    if t.is_contiguous():
        return ()
    strides = _strides(t)
    return strides and tuple(stride if n != 1 else 0 for stride, n in zip(strides, t.shape, strict=True))


# ------------------------------------------------------------------------------------------------------- other tensors


def _laid_out(
    lists: dict[str, list[Tensor]], grads: list[Tensor], writes_grad: bool
) -> tuple[dict[str, list[Tensor]], list[Any]]:
    """The tensors, without the steps, as real ones whose memory has the same order, and the copies among them that are
    written to, each after its original."""
    laid_out: dict[str, list[Tensor]] = defaultdict(list)
    copies: list[tuple[Tensor, Tensor]] = []
    for i, p in enumerate(lists["param"]):
        p.grad = _resolved(grads[i], p)
        own = {name: each[i] for name, each in lists.items() if name != "step"} | {"grad": p.grad}
        strides = _strides(_real(p, p))
        for name, t in own.items():
            original = _real(t, p)
            used = _with_strides(original, strides)
            if used is not original and (name != "grad" or writes_grad):
                copies.append((original, used))
            laid_out[name].append(used)
    return laid_out, copies


def _resolved(grad: Tensor, p: Tensor) -> Tensor:
    """The gradient as a tensor that can be written to: in the placements of a DTensor, without a pending conjugation
    or negation."""
    if grad.layout != torch.strided:
        raise RuntimeError(f"AdamW: a gradient has layout {grad.layout}, expected torch.strided")
    if hasattr(p, "placements") and getattr(grad, "placements", p.placements) != p.placements:
        return grad.redistribute(placements=p.placements)
    return grad.resolve_conj().resolve_neg()


def _real(t: Tensor, p: Tensor) -> Tensor:
    """A view as a plain tensor: the local shard of a DTensor, complex numbers as pairs."""
    if hasattr(p, "placements"):
        if getattr(t, "placements", None) != p.placements:
            raise TypeError("AdamW: a parameter is a DTensor, expected its gradient and state in the same placements")
        t = t.to_local()  # type: ignore[attr-defined]
    elif type(t) not in (Tensor, torch.nn.Parameter):
        t = t.as_subclass(Tensor)
    return torch.view_as_real(t.detach()) if t.is_complex() else t.detach()


def _strides(t: Tensor) -> tuple[int, ...] | None:
    """The strides, if the elements fill their memory, each once."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1):
        if stride != expected:
            return None
        expected *= size
    return t.stride()


def _with_strides(t: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    if strides is None:
        return t.contiguous()
    if t.stride() == strides:
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
