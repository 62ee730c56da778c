"""qkv_attention beside attention of the parts, and the module that calls it."""

import pytest

torch = pytest.importorskip("torch")

from aotops.frontends import torch as ours  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {
    "equal heads": ((2, 197), 3, 3, 64, {}),
    "causal": ((2, 300), 4, 4, 64, {"causal": True}),
    "heads in groups": ((2, 140), 8, 2, 128, {"causal": True, "scale": 0.1}),
    "one head of keys": ((3, 133), 4, 1, 80, {"window": (40, 3), "softcap": 3.0}),
    "no leading axes": ((70,), 2, 2, 96, {}),
    "heads that are not whole vectors": ((2, 90), 3, 1, 20, {"causal": True}),
    "large heads": ((1, 70), 2, 1, 192, {}),
}


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_results_are_those_of_attention_to_the_bit(size, dtype, with_lengths, where):
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    (*lead, seq), heads, kv_heads, dim, attrs = SIZES[size]
    torch.manual_seed(0)
    qkv = torch.randn(*lead, seq, (heads + 2 * kv_heads) * dim, device=where, dtype=dtype).requires_grad_()
    lengths = torch.randint(0, seq + 1, lead, device=where) if with_lengths else None
    y = ours.qkv_attention(qkv, heads, kv_heads, lengths, **attrs)
    parts = [part.detach().clone().requires_grad_() for part in ours.qkv_rope(qkv, None, None, heads, kv_heads)]
    expected = ours.attention(*parts, lengths, **attrs)
    assert torch.equal(y, expected.flatten(-2))
    dy = torch.randn_like(y)
    (dqkv,) = torch.autograd.grad(y, qkv, dy)
    slopes = torch.autograd.grad(expected, parts, dy.unflatten(-1, (heads, dim)))
    assert torch.equal(dqkv, torch.cat([slope.flatten(-2) for slope in slopes], -1))


def test_wrong_lengths_name_the_operator():
    with pytest.raises(ValueError, match=r"qkv_attention: lengths\[1\] is 9, expected 0 to 8, the number of keys"):
        ours.qkv_attention(torch.randn(2, 8, 12), 2, lengths=torch.tensor([3, 9]))


@pytest.mark.parametrize("causal", [False, True])
def test_a_module_whose_parts_are_packed(causal, monkeypatch):
    """Self-attention without masks; what else there is has the parts."""
    calls = []
    found = ours.functional.qkv_attention
    monkeypatch.setattr(ours.functional, "qkv_attention", lambda *args, **kw: calls.append(1) or found(*args, **kw))
    torch.manual_seed(0)
    layer = ours.MultiheadAttention(24, 3, batch_first=True)
    theirs = torch.nn.MultiheadAttention(24, 3, batch_first=True)
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 24)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5) if causal else None
    options = {"need_weights": False, "attn_mask": mask, "is_causal": causal}
    for given, packed in ((x, 1), (x[0], 1), (x.transpose(0, 1), 0)):
        calls.clear()
        layer.batch_first = theirs.batch_first = packed == 1
        torch.testing.assert_close(layer(*[given] * 3, **options)[0], theirs(*[given] * 3, **options)[0])
        assert len(calls) == packed
    calls.clear()
    layer(x, x.clone(), x, need_weights=False)
    assert not calls
