"""rope beside the formulas that its users come from, and what is saved for its backward."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ours = pytest.importorskip("aotops.frontends.torch")

BATCH, SEQ, HEADS, DIM = 2, 7, 3, 16


def _angles(rows, half, base=10000.0):
    return torch.outer(torch.arange(rows).double(), base ** -(torch.arange(half).double() / half))


def _x(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


def _rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _hugging_face(q, cos, sin):
    """``apply_rotary_pos_emb`` of Llama: q is (batch, heads, sequence, head_dim), cos (batch, sequence, head_dim)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin


def test_hugging_faces_tables_and_formula():
    q = _x(BATCH, HEADS, SEQ, DIM)
    angles = torch.cat([_angles(SEQ, DIM // 2)] * 2, -1)[None]
    cos, sin = angles.cos(), angles.sin()
    for tables in ((cos, sin), (cos[0], sin[0]), tuple(t.expand(BATCH, -1, -1) for t in (cos, sin))):
        torch.testing.assert_close(ours.rope(q, *tables, layout="BHSD"), _hugging_face(q, cos, sin))


def test_the_gradients_of_tables_with_equal_halves():
    """The sum over the halves is Hugging Face's."""
    q, found = _x(BATCH, HEADS, SEQ, DIM).requires_grad_(), []
    for function in (_hugging_face, lambda *args: ours.rope(*args, layout="BHSD")):
        angles = _angles(SEQ, DIM // 2).requires_grad_()
        tables = torch.cat([angles, angles], -1).expand(BATCH, -1, -1)
        y = function(q, tables.cos(), tables.sin())
        found.append(torch.autograd.grad((y * y.detach().sin()).sum(), (q, angles)))
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected)


def test_gpt_j_with_a_part_of_the_head_and_positions():
    rotary_dim, rows = 8, 32
    x, angles = _x(BATCH, SEQ, HEADS, DIM), _angles(rows, rotary_dim // 2)
    positions = torch.randint(0, rows, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    sin, cos = (t[positions].repeat_interleave(2, -1)[:, :, None] for t in (angles.sin(), angles.cos()))
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    every_two = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
    expected = torch.cat((rotated * cos + every_two * sin, rest), -1)
    got = ours.rope(x, angles.cos(), angles.sin(), True, positions.int(), rotary_dim=rotary_dim)
    torch.testing.assert_close(got, expected)


def test_torchtunes_cache():
    """(max_seq_len, head_dim / 2, 2), and interleaved pairs."""
    x, angles = _x(BATCH, SEQ, HEADS, DIM), _angles(2 * SEQ, DIM // 2)
    cache = torch.stack([angles.cos(), angles.sin()], -1)
    pairs, c = x.unflatten(-1, (-1, 2)), cache[:SEQ, None]
    a, b = pairs[..., 0] * c[..., 0] - pairs[..., 1] * c[..., 1], pairs[..., 1] * c[..., 0] + pairs[..., 0] * c[..., 1]
    torch.testing.assert_close(ours.rope(x, *cache.unbind(-1), interleaved=True), torch.stack([a, b], -1).flatten(-2))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_result_is_rounded_once(dtype, interleaved):
    """The tables are float32. A result is compared with that of float64."""
    x, angles = _x(BATCH, SEQ, HEADS, 64, dtype=dtype), _angles(SEQ, 32)
    tables = angles.cos().float(), angles.sin().float()
    exact = ours.rope(x.double(), *(t.double() for t in tables), interleaved)
    got = ours.rope(x, *tables, interleaved)
    assert got.dtype == dtype
    computed = 8 * 2**-24 * float(x.abs().max())  # the roundings of float32, and below float16's normal numbers
    limit = torch.finfo(dtype).eps / 2 * exact.abs() + computed
    assert ((got.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_a_rotation_back_is_the_gradient(layout):
    x, angles = _x(2, 5, 5, 8).requires_grad_(), _angles(5, 4)
    cos, sin = angles.cos(), angles.sin()
    y = ours.rope(x, cos, sin, layout=layout)
    (dx,) = torch.autograd.grad(y, x, y.detach())
    torch.testing.assert_close(dx, x.detach())  # rotations are orthogonal
    torch.testing.assert_close(ours.rope(y, cos, -sin, layout=layout), x)


def test_rows_in_pieces_are_the_whole():
    """A cache: each call has the positions of its own rows."""
    x, angles = _x(1, SEQ, HEADS, DIM), _angles(SEQ, DIM // 2)
    tables = angles.cos(), angles.sin()
    whole = ours.rope(x, *tables)
    for i in range(SEQ):
        one = ours.rope(x[:, i : i + 1], *tables, positions=torch.tensor([i]))
        assert torch.equal(one, whole[:, i : i + 1])


@pytest.mark.parametrize("position", [-1, SEQ])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_position_without_a_row_is_refused(position, dtype):
    x, angles = _x(1, 2, HEADS, DIM), _angles(SEQ, DIM // 2)
    positions = torch.tensor([[0, position]], dtype=dtype)
    with pytest.raises(ValueError, match=rf"rope: positions\[1\] is {position}, expected 0 to {SEQ - 1}"):
        ours.rope(x, angles.cos(), angles.sin(), positions=positions)


@pytest.mark.parametrize("plain", [True, False])
def test_x_is_kept_for_the_gradients_of_tables_alone(plain):
    x, angles = _x(BATCH, SEQ, HEADS, DIM).requires_grad_(), _angles(SEQ, DIM // 2)
    cos, sin = angles.cos(), angles.sin()
    function = ours.rope if plain else lambda *args: torch.ops.aotops.rope(*args, None, False, "BSHD", None)

    def lives(x, cos):
        product = x * 1
        seen = weakref.ref(product)
        y = function(product, cos, sin)
        del product
        gc.collect()
        alive = seen() is not None
        y.sum().backward()
        return alive

    assert not lives(x, cos)
    assert lives(x, cos.clone().requires_grad_())
    assert lives(x.detach().clone().requires_grad_(), cos.clone().requires_grad_())


def test_compiled_code_has_no_call():
    """In one graph, with positions, beside a product; the gradients of tables are the kernel's."""
    pytest.importorskip("torch._inductor")
    from torch._inductor.utils import run_and_get_code

    x, angles = _x(BATCH, SEQ, HEADS, DIM, dtype=torch.float32).requires_grad_(), _angles(9, DIM // 2).float()
    positions = torch.arange(SEQ).flip(0)

    def function(x, cos, sin, positions):
        return ours.rope(x * 2, cos, sin, positions=positions) + 1

    tables = angles.cos(), angles.sin()
    y, codes = run_and_get_code(torch.compile(function, fullgraph=True), x, *tables, positions)
    assert not any("aotops" in code for code in codes)
    expected = function(x, *tables, positions)
    torch.testing.assert_close(y, expected)
    (got,), (dx,) = torch.autograd.grad(y.square().sum(), x), torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(got, dx)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_an_array_reference_of_large_and_odd_shapes(layout):
    """NumPy's, over many heads and rows, in threads."""
    from aotops.testing.cases import CASES

    random = np.random.default_rng(0)
    x, half = random.standard_normal((3, 129, 67, 50)), 17
    rows = x.shape[1] if layout == "BSHD" else x.shape[2]
    cos, sin = random.standard_normal((2, rows, half))
    attrs = {"layout": layout, "rotary_dim": 2 * half}
    got = ours.rope(*map(torch.from_numpy, (x, cos, sin)), **attrs)
    np.testing.assert_allclose(got.numpy(), CASES["rope"].reference(x, cos, sin, **attrs), 1e-13, 1e-13)
