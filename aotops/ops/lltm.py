"""The LLTM: the recurrent cell of PyTorch's C++ extension tutorial."""

from __future__ import annotations

from ..op import operator


def _dims(call):
    """Of the inputs and gates. A row's gates are a product of all features with all weights."""
    bias = "G" if len(call.bias) == 1 else "ONE G"
    state = dict.fromkeys(("old_h", "old_cell"), "... H")
    return {"input": "... F", "weights": "G K", "bias": bias, "gates": "... G"} | state


def _gradients(axes):
    return {f"d{slot}": axes[slot] for slot in ("input", "weights", "bias", "old_h", "old_cell")}


@operator(
    inputs=("dnew_h", "dnew_cell", "input", "weights", "bias", "old_h", "old_cell", "gates"),
    outputs=("dinput", "dweights", "dbias", "dold_h", "dold_cell"),
    workspace=("workspace",),
    optional=("gates", "dinput", "dweights", "dbias", "dold_h", "dold_cell"),
    accepts_scalar=("dnew_h", "dnew_cell"),
    same_spec_as={
        "dinput": "input",
        "dweights": "weights",
        "dbias": "bias",
        "dold_h": "old_h",
        "dold_cell": "old_cell",
    },
    dims=lambda call: _dims(call) | {"dnew_h": "... H", "dnew_cell": "... H"} | _gradients(_dims(call)),
    vmappable=("dnew_h", "dnew_cell", "input", "old_h", "old_cell", "gates", "dinput", "dold_h", "dold_cell"),
)
def lltm_backward(dnew_h, dnew_cell, input, weights, bias, old_h, old_cell, gates):
    return (dnew_h, dnew_cell, input, weights, bias, old_h, old_cell, gates), ()


@operator(
    inputs=("input", "weights", "bias", "old_h", "old_cell"),
    outputs=("new_h", "new_cell"),
    residuals=("gates",),
    workspace=("workspace",),
    shapes={"gates": lambda call: (*call.old_h[:-1], 3 * call.old_h[-1])},
    backward=lltm_backward,
    same_spec_as={"new_h": "old_h", "new_cell": "old_cell"},
    dims=lambda call: _dims(call) | {"new_h": "... H", "new_cell": "... H"},
    vmappable=("input", "old_h", "old_cell", "new_h", "new_cell", "gates"),
    always_save_residuals=True,
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
