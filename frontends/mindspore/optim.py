"""AdamW as an optimizer of MindSpore's, on the library's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, nn, ops

from aotops.ops import BUILTIN
from aotops.ops._adamw import adamw
from aotops.spec import TensorSpec

from .primitives import primitive_of
from .specs import spec_of

_OP = adamw.bound_to(BUILTIN)
_NUMBER = TensorSpec((), "float32")


class AdamW(nn.Optimizer):
    """AdamW on the library's kernel, which reads and writes each number once, in PyNative and in graph mode. The
    formula is that of ``torch.optim.AdamW``: it corrects the bias, which ``mindspore.nn.AdamWeightDecay`` does not.

    Args:
        params: Parameters, or groups of them with ``params``, ``lr`` and ``weight_decay``, as MindSpore's optimizers
            take them. float16, bfloat16, float32 or float64; gradients of the same dtype.
        learning_rate: a number, a Tensor, an iterable or a LearningRateSchedule; float32.
        beta1: a number in [0, 1), as beta2.
        eps: a number of at least 0, as weight_decay.
        weight_decay: as of MindSpore's optimizers, not for parameters with "beta" or "gamma" in their name that are
            in no group.
        maximize: whether the steps follow the gradient, not its negative.
        state_dtype: of the moments: ``mindspore.float32``, ``bfloat16``, or None for that of each parameter. float64
            keeps its own.
        master_weights: whether parameters of 16 bits are kept in float32 too, where they are updated.

    Arithmetic is in float32, float64 for float64.

    Raises:
        TypeError: a dtype other than these.
        ValueError: numbers that are out of range; gradients whose shapes differ.
        NotImplementedError: a weight_decay that changes from step to step.
    """

    def __init__(
        self,
        params: Sequence[Any],
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        maximize: bool = False,
        state_dtype: Any = None,
        master_weights: bool = False,
    ) -> None:
        super().__init__(learning_rate, params, weight_decay)
        if self.dynamic_weight_decay:
            raise NotImplementedError("AdamW: weight_decay is a Cell, expected numbers: it may not change")
        self._masters = tuple(
            _copy(p, "adamw_master", ms.float32, init=p) if master_weights and _is_narrow(p) else None
            for p in self._parameters
        )
        self.master_weights = ParameterTuple([p for p in self._masters if p is not None])
        updated = [p if master is None else master for p, master in zip(self._parameters, self._masters, strict=True)]
        self.exp_avg, self.exp_avg_sq = (
            ParameterTuple([_copy(p, name, _dtype_of_state(p, state_dtype)) for p in updated])
            for name in ("adamw_exp_avg", "adamw_exp_avg_sq")
        )
        decays = self.weight_decay if self.is_group else [self.weight_decay] * len(updated)
        self._steps = tuple(
            _kernel(p, state, (float(beta1), float(beta2), float(eps), float(decay) if on else 0.0, maximize))
            for p, state, decay, on in zip(updated, self.exp_avg, decays, self.decay_flags, strict=True)
        )
        self._updated = tuple(updated)

    def construct(self, gradients):
        lr = self.get_lr()
        before = self.global_step.reshape(()).astype(ms.float32)
        results: tuple[Any, ...] = ()
        for i in range(len(self._steps)):
            rate = lr[i] if self.is_group_lr else lr
            p = self._updated[i]
            state = self.exp_avg[i], self.exp_avg_sq[i]
            step = self._steps[i](p, gradients[i].astype(p.dtype), *state, before, rate)
            if self._masters[i] is not None:
                step = ops.depend(step, ops.assign(self._parameters[i], p.astype(self._parameters[i].dtype)))
            results = (*results, step)
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        return results


def _is_narrow(p: Any) -> bool:
    return p.dtype in (ms.float16, ms.bfloat16)


def _dtype_of_state(p: Any, asked: Any) -> Any:
    return p.dtype if asked is None or p.dtype == ms.float64 else asked


def _copy(p: Any, name: str, dtype: Any, init: Any = None) -> Parameter:
    """A Parameter of p's shape: zeros, or the values of ``init``."""
    value = ops.zeros(p.shape, dtype) if init is None else init.value().astype(dtype)
    return Parameter(value, name=f"{name}.{p.name}", requires_grad=False)


def _kernel(p: Any, state: Any, attrs: tuple[Any, ...]) -> ops.Custom:
    of_p, of_state = spec_of(_OP, "param", p), spec_of(_OP, "exp_avg", state)
    return primitive_of(_OP, attrs, (of_p, of_p, of_state, of_state, _NUMBER, _NUMBER, None, None))
