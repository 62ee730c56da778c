"""The LLTM: the recurrent cell of PyTorch's C++ extension tutorial."""

from __future__ import annotations

from ..matrix import library_workspace, workspace_elements
from ..op import operator
from ..spec import TensorSpec, accumulate_dtype, check_dtype, check_floating, check_like, shape_text, size


def _check(op, input, weights, bias, old_h, old_cell):
    check_floating(op, "input", input)
    for slot, spec in (("weights", weights), ("bias", bias), ("old_h", old_h)):
        check_floating(op, slot, spec)
        check_dtype(op, slot, spec, input.dtype)
    given = f"input {shape_text(input.shape)} and old_h {shape_text(old_h.shape)}"
    if not input.shape or len(old_h.shape) != len(input.shape) or old_h.shape[:-1] != input.shape[:-1]:
        raise ValueError(f"{op}: {given} do not fit, expected (..., features) and (..., state)")
    check_like(op, "old_cell", old_cell, "old_h", old_h)
    features, state = input.shape[-1], old_h.shape[-1]
    expected = (3 * state, state + features)
    if tuple(weights.shape) != expected:
        raise ValueError(
            f"{op}: weights has shape {shape_text(weights.shape)}, expected {shape_text(expected)}, "
            f"(3 * state, state + features) of {given}"
        )
    if tuple(bias.shape) not in ((1, 3 * state), (3 * state,)):
        raise ValueError(
            f"{op}: bias has shape {shape_text(bias.shape)}, expected {shape_text((1, 3 * state))} or "
            f"{shape_text((3 * state,))}"
        )


def _gates(old_h):
    return TensorSpec((*old_h.shape[:-1], 3 * old_h.shape[-1]), accumulate_dtype(old_h.dtype))


def _scratch(input, old_h, kept):
    """As cuda_src/lltm.h has it: dpre, absent gates, partial sums of dbias, and cuBLASLt's."""
    rows, state, n = size(old_h.shape[:-1]), old_h.shape[-1], 3 * size(old_h.shape)
    dtype = accumulate_dtype(old_h.dtype)
    parts = min(max(rows // 64, 1), 64) if isinstance(rows, int) else 64
    work = workspace_elements(n, old_h.dtype) + (0 if kept else workspace_elements(n, dtype))
    work += workspace_elements(parts * 3 * state, dtype)
    return TensorSpec((work + library_workspace(n, state + input.shape[-1]),), dtype)


def _infer(input, weights, bias, old_h, old_cell):
    _check("lltm", input, weights, bias, old_h, old_cell)
    gates, terms = 3 * size(old_h.shape), old_h.shape[-1] + input.shape[-1]
    # as cuda_src/lltm.h has it: where cuBLASLt leaves its sums
    work = gates if terms >= 512 and library_workspace(gates, terms) else 0
    return old_h, old_cell, _gates(old_h), TensorSpec((work,), accumulate_dtype(old_h.dtype))


def _infer_backward(dnew_h, dnew_cell, input, weights, bias, old_h, old_cell, gates):
    op = "lltm_backward"
    _check(op, input, weights, bias, old_h, old_cell)
    for slot, spec in (("dnew_h", dnew_h), ("dnew_cell", dnew_cell)):
        check_like(op, slot, spec, "old_h", old_h if spec.shape else TensorSpec((), old_h.dtype))
    if gates is not None:
        check_like(op, "gates", gates, "the three gates of old_h", _gates(old_h))
    return input, weights, bias, old_h, old_cell, _scratch(input, old_h, gates is not None)


@operator(
    inputs=("dnew_h", "dnew_cell", "input", "weights", "bias", "old_h", "old_cell", "gates"),
    outputs=("dinput", "dweights", "dbias", "dold_h", "dold_cell"),
    workspace=("workspace",),
    infer=_infer_backward,
    optional=("gates", "dinput", "dweights", "dbias", "dold_h", "dold_cell"),
    uniform=("dnew_h", "dnew_cell"),
    like={"dinput": "input", "dweights": "weights", "dbias": "bias", "dold_h": "old_h", "dold_cell": "old_cell"},
    batched=("dnew_h", "dnew_cell", "input", "old_h", "old_cell", "gates", "dinput", "dold_h", "dold_cell"),
)
def lltm_backward(dnew_h, dnew_cell, input, weights, bias, old_h, old_cell, gates):
    return (dnew_h, dnew_cell, input, weights, bias, old_h, old_cell, gates), ()


@operator(
    inputs=("input", "weights", "bias", "old_h", "old_cell"),
    outputs=("new_h", "new_cell"),
    residuals=("gates",),
    workspace=("workspace",),
    infer=_infer,
    backward=lltm_backward,
    like={"new_h": "old_h", "new_cell": "old_cell"},
    batched=("input", "old_h", "old_cell", "new_h", "new_cell", "gates"),
    costly=True,
    autocast={"cuda": "float32"},
)
def lltm(input, weights, bias, old_h, old_cell):
    """One step of the LLTM, a long short-term memory without a forget gate whose candidate is an ELU. With
    ``i, o, c = split(cat(old_h, input) @ weights.T + bias)``:
    ``new_cell = old_cell + elu(c) * sigmoid(i)`` and ``new_h = tanh(new_cell) * sigmoid(o)``.

    Args:
        input: (..., features); float16, bfloat16, float32 or float64, and so all the others.
        weights: (3 * state, state + features): rows of the input gate, the output gate and the candidate; columns of
            old_h, then of input.
        bias: (1, 3 * state) or (3 * state,).
        old_h, old_cell: (..., state).

    Returns:
        new_h and new_cell, tensors like old_h. Sums are taken in float32 (float64 for float64).

    Raises:
        TypeError: a dtype that is not floating, or two dtypes.
        ValueError: shapes that do not fit; tensors on different devices.

    Source: PyTorch's tutorial "Custom C++ and CUDA Extensions".
    """
    return (input, weights, bias, old_h, old_cell), ()
