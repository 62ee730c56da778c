"""The LLTM: the recurrent cell of PyTorch's C++ extension tutorial."""

from __future__ import annotations

from math import prod

from ..op import Autocast, Product, operator


def _dims(call):
    """The axes of the inputs and gates. A row's gates are a product of all features with all weights."""
    bias = "G" if len(call.bias) == 1 else "ONE G"
    state = dict.fromkeys(("old_h", "old_cell"), "... H")
    return {"input": "... F", "weights": "G K", "bias": bias, "gates": "... G"} | state


def _gradients(axes):
    return {f"d{slot}": axes[slot] for slot in ("input", "weights", "bias", "old_h", "old_cell")}


def _gates(m, input, weights, bias, old_h):
    """[old_h, input], and the gates before their activations, wide: input gate, output gate, candidate."""
    both, n = m.concatenate((old_h, input)), old_h.shape[-1]
    gates = m.wide(m.ops.linear(both, weights, m.reshape(bias, (3 * n,))))
    return both, gates[..., :n], gates[..., n : 2 * n], gates[..., 2 * n :]


def _candidate(m, c):
    """elu(c), and its slope."""
    negative = m.where(c > 0, m.zeros(c), c)
    return m.where(c > 0, c, m.expm1(negative)), m.exp(negative)


def _formula(m, input, weights, bias, old_h, old_cell):
    _, i, o, c = _gates(m, input, weights, bias, old_h)
    new_cell = m.wide(old_cell) + _candidate(m, c)[0] * m.sigmoid(i)
    return m.tanh(new_cell) * m.sigmoid(o), new_cell


def _backward_formula(m, dnew_h, dnew_cell, input, weights, bias, old_h, old_cell):
    both, i, o, c = _gates(m, input, weights, bias, old_h)
    candidate, candidate_slope = _candidate(m, c)
    i, o = m.sigmoid(i), m.sigmoid(o)
    t = m.tanh(m.wide(old_cell) + candidate * i)
    dnew_h = m.wide(dnew_h)
    dcell = m.wide(dnew_cell) + dnew_h * o * (1 - t * t)
    d = m.concatenate((dcell * candidate * i * (1 - i), dnew_h * t * o * (1 - o), dcell * i * candidate_slope))
    d_rows = m.matrix(m.like(d, input))
    dboth = m.reshape(m.ops.matmul(d_rows, weights), both.shape)
    n = old_h.shape[-1]
    dweights = m.ops.matmul(d_rows, m.matrix(both), True)
    dbias = m.reshape(m.sum(m.matrix(d), (0,)), bias.shape)
    return dboth[..., n:], dweights, dbias, dboth[..., :n], dcell


@operator(
    inputs=("input", "weights", "bias", "old_h", "old_cell"),
    outputs=("new_h", "new_cell"),
    residuals=("gates",),
    workspace=("workspace",),
    shapes={"gates": lambda call: (*call.old_h[:-1], 3 * call.old_h[-1])},
    same_spec_as={"new_h": "old_h", "new_cell": "old_cell"},
    dims=lambda call: _dims(call) | {"new_h": "... H", "new_cell": "... H"},
    formula=_formula,
    vmappable=("input", "old_h", "old_cell", "new_h", "new_cell", "gates"),
    product=Product(
        factors=(("input", "old_h"), "weights"),
        flops=lambda call: 2 * prod(call.input[:-1]) * prod(call.weights),
        bilinear=False,
    ),
    always_save_residuals=True,
    autocast=Autocast.FLOAT32_ON_CUDA,
    backward={
        "inputs": ("dnew_h", "dnew_cell", "input", "weights", "bias", "old_h", "old_cell", "gates"),
        "outputs": ("dinput", "dweights", "dbias", "dold_h", "dold_cell"),
        "workspace": ("workspace",),
        "optional": ("gates", "dinput", "dweights", "dbias", "dold_h", "dold_cell"),
        "accepts_scalar": ("dnew_h", "dnew_cell"),
        "same_spec_as": {
            "dinput": "input",
            "dweights": "weights",
            "dbias": "bias",
            "dold_h": "old_h",
            "dold_cell": "old_cell",
        },
        "dims": lambda call: _dims(call) | {"dnew_h": "... H", "dnew_cell": "... H"} | _gradients(_dims(call)),
        "formula": _backward_formula,
        "vmappable": ("dnew_h", "dnew_cell", "input", "old_h", "old_cell", "gates", "dinput", "dold_h", "dold_cell"),
    },
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
