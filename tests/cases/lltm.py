"""lltm: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Cell
from aotops.testing import F32, F64, Bad, Case, Row

_GOOD = {
    "input": ((4, 3), F32),
    "weights": ((6, 5), F32),
    "bias": ((1, 6), F32),
    "old_h": ((4, 2), F32),
    "old_cell": ((4, 2), F32),
}


def lltm(input, weights, bias, old_h, old_cell):
    i, o, c = np.split(np.concatenate([old_h, input], -1) @ weights.T + bias.reshape(-1), 3, -1)
    i, o, c = 1 / (1 + np.exp(-i)), 1 / (1 + np.exp(-o)), np.where(c.real > 0, c, np.expm1(np.where(c.real > 0, 0, c)))
    new_cell = old_cell + c * i
    return np.tanh(new_cell) * o, new_cell


def _lltm(rows, features, state, scale=1.0, bias=None) -> Case:
    n, h = 3 * state, (*rows, state)
    shapes = {"input": (*rows, features), "weights": (n, state + features), "bias": bias or (1, n)}
    # the gradients are products with that of the gates, which is rounded
    return Case(shapes | {"old_h": h, "old_cell": h}, scale=scale, dtype_roundings=2)


def _draw(draw):
    state = draw.integer(0, 4)
    return _lltm(draw.shape(2), draw.integer(1, 4), state, bias=draw.choice(None, (3 * state,)))


def _in_torch(torch, input, weights, bias, old_h, old_cell):
    """As PyTorch's tutorial on extensions has it."""
    n = weights.shape[0]
    gates = torch.nn.functional.linear(torch.cat([old_h, input], -1), weights, bias.reshape(n))
    i, o, c = gates.split([n // 3] * 3, -1)
    new_cell = old_cell + torch.nn.functional.elu(c) * torch.sigmoid(i)
    return torch.tanh(new_cell) * torch.sigmoid(o), new_cell.clone()  # a clone of what autograd has saved


ROW = Row(
    lltm,
    cases=(
        _lltm((4,), 6, 5),
        _lltm((1,), 1, 1),
        _lltm((), 3, 2),
        _lltm((2, 3), 5, 4, bias=(12,)),
        _lltm((0,), 3, 2),  # no rows: dweights and dbias are 0
        _lltm((3,), 0, 4),  # nothing but the state
        _lltm((5,), 3, 7),
        _lltm((16,), 32, 128, scale=0.3),
        # one for each path of a kernel
        _lltm((70,), 33, 65, scale=0.3),
        _lltm((300,), 128, 96, scale=0.3),
        _lltm((520,), 67, 83, scale=0.3),
        _lltm((6144,), 8, 128, scale=0.3),
        _lltm((60,), 64, 448, scale=0.2),
        _lltm((33,), 36, 420, scale=0.2),
        _lltm((2, 64), 260, 164, scale=0.2),
        _lltm((600,), 32, 32, scale=0.3),
        _lltm((2050,), 300, 212, scale=0.2),
    ),
    under_load=(_lltm((600,), 32, 32, scale=0.3),),  # the gradients' products, too small for cuBLASLt's scratch
    draw=_draw,
    bad=(
        Bad(_GOOD | {"weights": ((6, 4), F32)}, {}, ValueError, "weights has shape (6, 4)", "(6, 5)", "(4, 3)"),
        Bad(_GOOD | {"bias": ((6, 1), F32)}, {}, ValueError, "bias has shape (6, 1)", "(1, 6) or (6,)"),
        Bad(_GOOD | {"old_h": ((3, 2), F32)}, {}, ValueError, "old_h (3, 2)", "input (4, 3)"),
        Bad(_GOOD | {"old_cell": ((4, 3), F32)}, {}, ValueError, "old_cell has shape (4, 3)", "(4, 2)"),
        Bad(_GOOD | {"bias": ((6,), F64)}, {}, TypeError, "bias has dtype float64", "expected float32"),
    ),
    torch=_in_torch,
    samples={"": _lltm((4,), 3, 2)},
    bench=(Cell("iwbhh", "hh", ("hhiwhhg", "iwbhh")),),
    complex=True,
)
