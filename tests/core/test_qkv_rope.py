"""qkv_rope beside the code of its users, and what is saved for its backward."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")
ours = pytest.importorskip("aotops.frontends.torch")

BATCH, SEQ, HEADS, DIM = 2, 7, 4, 16


def _qkv(heads):
    x = torch.randn(BATCH, SEQ, heads * DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x.requires_grad_()


def _tables(rotary_dim=DIM):
    half = rotary_dim // 2
    angles = torch.outer(torch.arange(SEQ).double(), 10000.0 ** -(torch.arange(half).double() / half))
    return angles.cos(), angles.sin()


def _rotated(x, cos, sin):
    """``apply_rotary_pos_emb`` of Llama, of (batch, heads, sequence, rotary_dim)."""
    a, b = x.chunk(2, -1)
    return x * torch.cat([cos, cos], -1) + torch.cat((-b, a), -1) * torch.cat([sin, sin], -1)


def _same(qkv, found, expected):
    """Values, and the gradient of qkv."""
    for got, exact in zip(found, expected, strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, exact)
    gradients = [torch.autograd.grad(sum((y * y.detach().sin()).sum() for y in ys), qkv) for ys in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_gpt_2():
    qkv = _qkv(3 * HEADS)
    parts = (t.view(BATCH, SEQ, HEADS, DIM).transpose(1, 2) for t in qkv.split(HEADS * DIM, dim=2))
    _same(qkv, ours.qkv_rope(qkv, None, None, HEADS, layout="BHSD"), list(parts))


def test_llama():
    qkv, kv_heads, tables = _qkv(HEADS + 4), 2, _tables()
    counts = [HEADS, kv_heads, kv_heads]
    parts = qkv.split([n * DIM for n in counts], -1)
    q, k, v = (t.view(BATCH, SEQ, n, DIM).transpose(1, 2) for t, n in zip(parts, counts, strict=True))
    expected = _rotated(q, *tables), _rotated(k, *tables), v
    _same(qkv, ours.qkv_rope(qkv, *tables, HEADS, kv_heads, layout="BHSD"), expected)


def test_gpt_neox():
    """A q, a k and a v for each head, of which a quarter is rotated."""
    qkv, tables = _qkv(3 * HEADS), _tables(DIM // 4)
    q, k, v = qkv.view(BATCH, SEQ, HEADS, 3 * DIM).transpose(1, 2).chunk(3, dim=-1)
    n = DIM // 4
    q, k = (torch.cat([_rotated(x[..., :n], *tables), x[..., n:]], -1) for x in (q, k))
    found = ours.qkv_rope(qkv, *tables, HEADS, layout="BHSD", rotary_dim=n, grouped=True)
    _same(qkv, found, (q, k, v))


def test_megatron():
    """(sequence, batch) there; by groups of query heads."""
    qkv, groups = _qkv(HEADS + 4), 2
    mixed = qkv.view(BATCH, SEQ, groups, (HEADS // groups + 2) * DIM)
    q, k, v = mixed.split([HEADS // groups * DIM, DIM, DIM], dim=3)
    expected = q.reshape(BATCH, SEQ, HEADS, DIM), k, v
    _same(qkv, ours.qkv_rope(qkv, None, None, HEADS, groups, grouped=True), expected)


def test_qkv_is_kept_for_the_gradients_of_tables_alone():
    cos, sin = _tables()

    def lives(cos):
        product = _qkv(3 * HEADS) * 1
        seen = weakref.ref(product)
        q, k, v = ours.qkv_rope(product, cos, sin, HEADS)
        del product
        gc.collect()
        alive = seen() is not None
        (q.sum() + k.sum() + v.sum()).backward()
        return alive

    assert not lives(cos)
    assert lives(cos.clone().requires_grad_())


def test_an_output_that_nobody_reads_has_a_gradient_of_0():
    qkv = _qkv(3 * HEADS)
    q, k, _ = ours.qkv_rope(qkv, *_tables(), HEADS)
    (d,) = torch.autograd.grad(q.sum() + k.sum(), qkv)
    assert not d[..., 2 * HEADS * DIM :].any()
    assert d[..., : 2 * HEADS * DIM].all()


@pytest.mark.parametrize("position", [-1, SEQ])
def test_a_position_without_a_row_is_named(position):
    positions = torch.arange(SEQ)
    positions[1] = position
    with pytest.raises(ValueError, match=rf"qkv_rope: positions\[1\] is {position}, expected 0 to {SEQ - 1}"):
        ours.qkv_rope(_qkv(3 * HEADS), *_tables(), HEADS, positions=positions)


def test_a_call_is_one_call_in_compiled_code():
    """Without breaks of the graph, forward and backward."""
    pytest.importorskip("torch._inductor")
    qkv, tables = _qkv(HEADS + 4), _tables()

    def function(qkv):
        q, k, v = ours.qkv_rope(qkv * 2, *tables, HEADS, 2, layout="BHSD")
        return q + 1, k, v * 3

    _same(qkv, [y.contiguous() for y in torch.compile(function, fullgraph=True)(qkv)], function(qkv))
