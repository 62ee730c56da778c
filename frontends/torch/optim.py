"""torch.optim's AdamW on the library's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .optim_step import MASTER, MOMENTS, Plan, state_dtype_of

STATE_DTYPES = (None, torch.float32, torch.bfloat16)


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` on the library's kernel: the same arguments, state and state_dict, as with fused=True. A
    step takes one launch for each 77 tensors, and one that counts steps; its results are deterministic to the bit.

    Args:
        foreach: as fused, it selects one of torch's implementations and has no effect.
        capturable: True if a CUDA graph captures ``step``, as in torch.
        differentiable: False.
        state_dtype: the dtype of exp_avg, exp_avg_sq and max_exp_avg_sq: None (each parameter's), torch.float32 or
            torch.bfloat16. Parameters in float64 keep theirs.
        master_weights: whether float16 and bfloat16 parameters have a copy in float32, ``master_param`` of the state,
            which is made at the first step, is what steps change, and is rounded to the parameter. A parameter that is
            changed otherwise, as by ``load_state_dict`` of the module, is overwritten at the next step.

    Parameters and gradients are float16, bfloat16, float32 or float64, or complex; of a DTensor each process updates
    its shard. A loaded state is converted to the state_dtype.

    Raises:
        NotImplementedError: differentiable=True.
        TypeError: another state_dtype, or a gradient of another dtype than its parameter.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        *,
        maximize=False,
        foreach=None,
        capturable=False,
        differentiable=False,
        fused=None,
        state_dtype=None,
        master_weights=False,
    ):
        if fused and foreach:
            raise RuntimeError("AdamW: fused and foreach are True, expected one of them at most")
        self._own = {"state_dtype": state_dtype, "master_weights": bool(master_weights)}
        options = {"maximize": maximize, "foreach": foreach, "capturable": capturable}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, differentiable=differentiable, **options)
        self.defaults |= self._own | {"fused": True}
        del self._own

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        own: dict[str, Any] = self.__dict__.get("_own") or self.defaults
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1], own)
        except Exception:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.pop("_plans", None)  # which keeps the state that was
        for group in self.param_groups:
            _check_group(group, self.defaults)
            for p in group["params"]:
                if own := self.state.get(p):
                    own["step"] = own["step"].to(p.device, torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the state becomes state_dtype without being rounded to the parameter's dtype."""
        loaded: dict[str, Any] = {}
        hook = self.register_load_state_dict_pre_hook(lambda _, given: loaded.update(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        for saved, group in zip(loaded["param_groups"], self.param_groups, strict=True):
            for name, p in zip(saved["params"], group["params"], strict=True):
                if name in loaded["state"]:
                    _restore(group, p, self.state[p], loaded["state"][name])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._step)(closure)
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaling = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        plans = self.__dict__.setdefault("_plans", {})
        for i, group in enumerate(self.param_groups):
            if i not in plans or not plans[i].holds(group, self.state):
                plans.pop(i, None)
                plans[i] = Plan(group, self.state)
            for batch in plans[i].batches:
                batch.run(scaling)
        return loss


# --------------------------------------------------------------------------------------------------------------- state


def _check_group(group: dict[str, Any], own: dict[str, Any]) -> None:
    """Checks and completes the options of a group."""
    group["fused"] = True
    for name in ("state_dtype", "master_weights"):
        group.setdefault(name, own[name])
    if group["differentiable"]:
        raise NotImplementedError("AdamW: differentiable is True, expected False: a step has no derivative")
    if group["state_dtype"] not in STATE_DTYPES:
        raise TypeError(
            f"AdamW: state_dtype is {group['state_dtype']!r}, expected None, torch.float32 or torch.bfloat16"
        )


def _restore(group: dict[str, Any], p: Tensor, state: dict[str, Any], saved: dict[str, Any]) -> None:
    """Takes what torch has rounded to the parameter's dtype from the loaded state itself."""
    dtypes = dict.fromkeys(MOMENTS, state_dtype_of(group, p)) | {MASTER: torch.float32}
    for key, dtype in dtypes.items():
        if isinstance(saved.get(key), Tensor) and state[key].dtype != dtype:
            state[key] = saved[key].detach().to(p.device, dtype)
