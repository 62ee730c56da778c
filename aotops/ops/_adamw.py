"""One step of AdamW on one tensor, whose parameter and state are written in place."""

from __future__ import annotations

from ..op import operator


@operator(
    inputs=("param", "grad", "exp_avg", "exp_avg_sq", "step", "lr", "grad_scale", "found_inf"),
    outputs=("next_step",),
    optional=("grad_scale", "found_inf"),
    attrs={"beta1": "float", "beta2": "float", "eps": "float", "weight_decay": "float", "maximize": "bool"},
    same_spec_as={"next_step": "step"},
    mutates=("param", "exp_avg", "exp_avg_sq"),
)
def adamw(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    step,
    lr,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.01,
    maximize=False,
    grad_scale=None,
    found_inf=None,
):
    """A step of AdamW, as ``torch.optim.AdamW``. It writes to param, exp_avg and exp_avg_sq; JAX's function returns
    their new values after next_step.

    Args:
        param: float16, bfloat16, float32 or float64; any shape.
        grad: of param's shape and dtype.
        exp_avg: of param's shape; float32, bfloat16 or param's dtype, which float64 must have.
        exp_avg_sq: as exp_avg.
        step: the number of steps before this one; float32, shape ().
        lr: the learning rate; float32, shape ().
        beta1: a number in [0, 1), as beta2.
        eps: a number of at least 0, as weight_decay.
        maximize: whether the steps follow the gradient, not its negative.
        grad_scale: what the gradient is divided by; float32, shape ().
        found_inf: a number other than 0 skips the step; float32, shape ().

    Returns:
        next_step, step + 1; where the step is skipped, step. Arithmetic is in float32, float64 for float64.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes that differ from param's, numbers that are no scalars or out of range.
    """
    return (param, grad, exp_avg, exp_avg_sq, step, lr, grad_scale, found_inf), (
        beta1,
        beta2,
        eps,
        weight_decay,
        maximize,
    )
