"""The operators for JAX: each is one XLA custom call, with derivatives of any mode and order, batched by vmap.

They work under jit, grad, vmap, scan, cond, checkpoint and shard_map. A program exported with ``jax.export`` needs
``disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in (TARGET, SCRATCH_TARGET)]``, and
``register()`` in the process that loads it. Limits:

- XLA partitions a call over several devices as its definition states (``Op.dims``), and gathers the axes that the
  kernel takes whole. An operator without such a statement gathers its inputs, and each device computes all of the
  result: the first such call of a process gives a ``ShardingWarning``, except if only the ``in_shardings`` of jit name
  the devices, which JAX's types do not show. A program of several devices that ``jax.export`` writes does so too:
  JAX cannot export how it is partitioned.
- Gradients are computed by the backward kernels; forward mode and the derivatives of a backward by the operators'
  formulas, of which products are kernels again. An operator without a formula, such as a hosted one, has a gradient
  alone: forward mode is a TypeError, and a second order a NotImplementedError.
- Attributes, and so the axes normalized over, are constants of the program: they can be neither traced nor symbolic in
  an export. Other dimensions can.
"""

from __future__ import annotations

from aotops.ops import BUILTIN, OPS

from . import derivatives  # noqa: F401  gives the primitive its rule for derivatives
from .custom_call import SCRATCH_TARGET, TARGET, ShardingWarning, register
from .modules import LLTM
from .optim import AdamW, AdamWState
from .public import functions, of

__all__ = [
    "LLTM", "SCRATCH_TARGET", "TARGET", "AdamW", "AdamWState", "ShardingWarning", "functions", "of", "register", *OPS,
]  # fmt: skip

globals().update(functions(BUILTIN))
