"""The private names of torch that the frontend uses, all of them.

Without a required name the import of the frontend fails. Without an optional one the frontend does less, as ``LACKS``
says of this version: it is empty for torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn._reduction import legacy_get_string as legacy_get_string

LACKS: dict[str, str] = {}
"""By name, what the frontend does not do because this torch lacks it."""
_lacking: list[str] = []


def _required(name: str) -> Any:
    found = _find(name)
    if found is None:
        _lacking.append(f"torch.{name}")
    return found


def _optional(name: str, without: str) -> Any:
    found = _find(name)
    if found is None:
        LACKS[f"torch.{name}"] = without
    return found


def optional_of(module: str, name: str, without: str) -> Any:
    """An optional name of a module that is imported when needed, as soon as it is."""
    found = getattr(import_module(module), name, None)
    if found is None:
        LACKS[f"{module}.{name}"] = without
    return found


def _find(name: str) -> Any:
    return functools.reduce(lambda owner, part: getattr(owner, part, None), name.split("."), torch)


# ---------------------------------------------------------------------------------------------------------- dispatcher

DispatchKey, DispatchKeySet = _required("_C.DispatchKey"), _required("_C.DispatchKeySet")
BelowAutograd, after_autograd = _required("_C._AutoDispatchBelowAutograd"), _required("_C._after_autograd_keyset")
BelowVersions = _required("_C._AutoDispatchBelowADInplaceOrView")
after_versions = _required("_C._after_ADInplaceOrView_keyset")
ExcludeKeys = _required("_C._ExcludeDispatchKeyGuard")
has_kernel, get_schema = _required("_C._dispatch_has_kernel"), _required("_C._get_schema")
RecordFunction = _required("_C._profiler._RecordFunctionFast")
has_storage = _required("_C._has_storage")

# ----------------------------------------------------------------------------------------- torch.func and forward mode

transforms_are_active = _required("_C._are_functorch_transforms_active")
is_batched, level_of = _required("_C._functorch.is_batchedtensor"), _required("_C._functorch.maybe_get_level")
current_level = _required("_C._functorch.maybe_current_level")
get_one_level = _required("_C._functorch.get_single_level_autograd_function_allowed")
set_one_level = _required("_C._functorch.set_single_level_autograd_function_allowed")
records_tangents = _required("autograd.forward_ad._set_fwd_grad_enabled")
LEVEL, NO_LEVEL = "_current_level", -1
"""The variable of ``torch.autograd.forward_ad`` that is the level of forward mode, and its value outside."""
_required(f"autograd.forward_ad.{LEVEL}")
level_facts = vars(forward_ad)
"""Where LEVEL is found."""


def forward_level() -> int:
    return level_facts[LEVEL]


def unpack_dual(t: Tensor) -> Any:
    """The primal and the tangent, or None, of the level that is open."""
    return forward_ad.unpack_dual(t, level=forward_level())


def _count_levels() -> None:
    """A graph of Dynamo's, as it is traced, run or exported, enters a level without that variable. Where torch's entry
    can be seen, levels are counted here."""
    global level_facts
    try:
        from torch._functorch import predispatch

        enter, leave = predispatch._enter_dual_level_impl, predispatch._exit_dual_level_impl
        if predispatch.__name__ not in forward_ad.enter_dual_level.__code__.co_names:  # eager calls have another entry
            raise AttributeError
    except (AttributeError, ImportError):
        LACKS["torch._functorch.predispatch._enter_dual_level_impl"] = "what is compiled loses tangents"
        return
    level_facts = {LEVEL: level_facts[LEVEL]}

    @functools.wraps(enter)
    def enter_and_count() -> int:
        level_facts[LEVEL] = enter()
        return level_facts[LEVEL]

    @functools.wraps(leave)
    def leave_and_count(*, level: int) -> None:
        leave(level=level)
        level_facts[LEVEL] = level - 1

    predispatch._enter_dual_level_impl, predispatch._exit_dual_level_impl = enter_and_count, leave_and_count


_count_levels()

# ---------------------------------------------------------------------------------------------------------- plain calls

_BY_DISPATCHER = "every call goes through the dispatcher"
exchange_table = _optional("Tensor.__dlpack_c_exchange_api__", _BY_DISPATCHER)  # from torch 2.10 on
keys_of = _optional("_C._dispatch_keys", _BY_DISPATCHER)
neg_view = _optional("_neg_view", _BY_DISPATCHER)
zero_tensor = _optional("_efficientzerotensor", _BY_DISPATCHER)
FunctionBase = _optional("_C._FunctionBase", "a recorded call takes 2 to 3 us more")


# -------------------------------------------------------------------------------------------------------- saved tensors

_NOT_OVER = "no gradient is written over a saved tensor"
graph_task = _optional("_C._current_graph_task_id", _NOT_OVER)
keeps_graph = _optional("_C._autograd._get_current_graph_task_keep_graph", _NOT_OVER)
storage_use_count = _optional("_C._storage_Use_Count", _NOT_OVER)
_optional("Tensor._use_count", _NOT_OVER)
_optional("autograd.graph.increment_version", _NOT_OVER)
saved_tensor_hooks = _optional("_C._autograd._top_saved_tensors_default_hooks", "no residual stands for an input")
CAN_OVERWRITE = _NOT_OVER not in LACKS.values()

# ------------------------------------------------------------------------------------------------------------ backwards

will_run = _required("_C._will_engine_execute_node")
disable_dynamo = _required("_disable_dynamo")  # it imports Dynamo at the first call
queue_callback = _required("autograd.Variable._execution_engine.queue_callback")

# ---------------------------------------------------------------------------------------------- settings, and forwards

precision_of = _find("_C._get_fp32_precision_getter")
"""The setting of TF32 of a backend's operator, from torch 2.9 on; None before."""
assertion = _required("_assert")


def constant(function: Any) -> Any:
    """A function whose result a trace keeps: torch.compiler.assume_constant_result, which imports Dynamo."""
    function._dynamo_marked_constant = True
    return function


# ---------------------------------------------------------------------------------------------- the partition of graphs

CheckpointPolicy = optional_of("torch.utils.checkpoint", "CheckpointPolicy", "Inductor alone chooses what is kept")
"""From torch 2.5 on."""
POLICY = "recompute"
"""In the meta of a node: its policy."""

# ------------------------------------------------------------------------------- modules that are imported when needed

LOWERING, DECOMPOSITION, IR = "torch._inductor.lowering", "torch._inductor.decomposition", "torch._inductor.ir"
JOINT_GRAPH, PATTERNS = "torch._inductor.fx_passes.joint_graph", "torch._inductor.pattern_matcher"
FIRST_PASS = "canonicalize_aten_ir_passes"
"""The function by which Inductor edits a joint graph before it does anything else."""
CODE_CACHE, KEY_DETAILS = "torch._inductor.codecache", "FxGraphHashDetails"
"""The class whose attributes are the key of compiled code, in the cache of graphs and in autograd's."""
FLOP_COUNTER, DTENSOR = "torch.utils.flop_counter", "torch.distributed.tensor"
KNOWN_TENSORS = "torch._subclasses", "torch.distributed"
"""Where the classes of tensors are of which an operator is known: of traces, and those that are sharded."""


def donates_buffers() -> bool:
    """Whether compiled code may write over saved tensors."""
    from torch._functorch import config

    return getattr(config, "donated_buffer", True)


def elementwise_strides(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The strides that torch gives the result of an elementwise operator."""
    from torch._prims_common import compute_elementwise_output_strides  # slow to import, seldom needed

    return compute_elementwise_output_strides(*tensors)


def dtensor_dispatcher() -> tuple[Any, Any]:
    """DTensor's dispatcher, and the class of what it knows of an operator.

    Raises:
        ImportError: this torch has no public DTensor (before 2.5).
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    return DTensor._op_dispatcher, RuntimeSchemaInfo


def all_reduce(part: Tensor, how: str, group: Any) -> Tensor:
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(part, how, group)


if _lacking:
    raise ImportError(f"aotops: torch {torch.__version__} lacks {', '.join(_lacking)}, expected torch 2.4 or later")
