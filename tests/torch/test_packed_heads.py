"""Attention of parts of one packed projection: read where they are, with the bits of copies of them."""

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import packed_heads  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.skipif(packed_heads.is_plain is None, reason="before torch 2.10 each part is copied")


@pytest.fixture
def calls(monkeypatch):
    """The calls that find parts."""
    seen, found = [], packed_heads._bound
    monkeypatch.setattr(packed_heads, "_bound", lambda *args: seen.append(args) or found(*args))
    torch.manual_seed(0)
    return seen


def unbound(qkv, heads, kv_heads):
    """As timm's vision transformers."""
    *lead, seq, row = qkv.shape
    n = len(lead)
    axes = (n + 1, *range(n), n + 2, n, n + 3)
    return qkv.reshape(*lead, seq, 3, heads, row // (3 * heads)).permute(*axes).unbind(0)


def split(qkv, heads, kv_heads):
    """As GPT-2, and with fewer heads of keys."""
    dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    parts = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    return tuple(part.unflatten(-1, (-1, dim)).transpose(-3, -2) for part in parts)


FORMS = {
    "unbound": (unbound, (2, 5), 3, 3),
    "unbound, one example": (unbound, (1, 5), 3, 3),
    "unbound, no leading axes": (unbound, (5,), 2, 2),
    "split": (split, (2, 5), 3, 3),
    "split, heads in groups": (split, (2, 7), 4, 2),
    "split, more leading axes": (split, (2, 3, 4), 2, 2),
    "split, one row": (split, (3, 1), 2, 2),
    "split, one head": (split, (3, 4), 1, 1),
}


def projection(form, where, dtype):
    _, rows, heads, kv_heads = FORMS[form]
    return torch.randn(*rows, (heads + 2 * kv_heads) * 8, device=where, dtype=dtype).requires_grad_()


def attend(form, function, qkv, copied=False, **options):
    parts_of, _, heads, kv_heads = FORMS[form]
    parts = parts_of(qkv * 1.5, heads, kv_heads)
    if copied:
        parts = [part.transpose(-3, -2).contiguous().transpose(-3, -2) for part in parts]
    return function(*parts, enable_gqa=heads != kv_heads, **options)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_parts_have_the_bits_of_their_copies(calls, form, options, dtype, where):
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    qkv = projection(form, where, dtype)
    y = attend(form, ours.scaled_dot_product_attention, qkv, **options)
    assert len(calls) == 1
    expected = attend(form, ours.scaled_dot_product_attention, qkv, copied=True, **options)
    assert len(calls) == 1
    dy = torch.randn_like(y)
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(result, qkv, dy)[0] for result in (y, expected)))
    with torch.no_grad():
        assert torch.equal(y, attend(form, ours.scaled_dot_product_attention, qkv, **options))
    assert y.transpose(-3, -2).is_contiguous()


@pytest.mark.parametrize("form", ["unbound", "split, heads in groups"])
def test_derivatives_are_torchs(calls, form):
    """The gradients have derivatives too, those of the parts."""
    qkv = projection(form, "cpu", torch.float64)
    found = []
    for function in (ours.scaled_dot_product_attention, F.scaled_dot_product_attention):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = attend(form, function, qkv, is_causal=True)
            (slope,) = torch.autograd.grad(y.sin().sum(), qkv, create_graph=True)
        found.append((y, slope, *torch.autograd.grad(slope.sin().sum(), qkv)))
    assert len(calls) == 1
    torch.testing.assert_close(*found)


def test_nothing_is_copied(calls):
    qkv = projection("split", "cpu", torch.float32)
    for recorded in (True, False):
        with torch.profiler.profile() as profile, torch.set_grad_enabled(recorded):
            ours.scaled_dot_product_attention(*split(qkv, 3, 3))
        seen = {event.name for event in profile.events()}
        assert "aotops::qkv_attention" in seen
        assert not {"aten::clone", "aten::contiguous", "aten::copy_"} & seen
    assert len(calls) == 2


def test_what_made_the_parts_stays_in_the_graph(calls):
    """Hooks of it are called, and a part that is detached has no gradient."""
    qkv, seen = projection("split", "cpu", torch.float64), []
    q, k, v = split(qkv, 3, 3)
    q.register_hook(lambda slope: seen.append(slope.shape))
    y = ours.scaled_dot_product_attention(q, k.detach(), v)
    dq, slope = torch.autograd.grad(y.sum(), (q, qkv))
    expected = F.scaled_dot_product_attention(q, k.detach(), v)
    torch.testing.assert_close((dq, slope), torch.autograd.grad(expected.sum(), (q, qkv)))
    assert (len(calls), len(seen)) == (1, 2)


def test_a_change_in_place_is_refused_in_the_backward(calls):
    qkv = projection("split", "cpu", torch.float32) * 1
    y = ours.scaled_dot_product_attention(*split(qkv, 3, 3))
    qkv.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        y.sum().backward()
    assert calls


@pytest.mark.parametrize("change", ["order", "rows", "memory", "mask", "dropout", "heads"])
def test_other_tensors_are_no_parts(calls, change):
    qkv = projection("split", "cpu", torch.float64)
    q, k, v = split(qkv, 3, 3)
    options = {}
    if change == "order":
        q, k = k, q
    elif change == "rows":
        q, k, v = split(qkv.expand(2, *qkv.shape), 3, 3)
    elif change == "memory":
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    elif change == "mask":
        options["attn_mask"] = torch.rand(5, 5) > 0.3
    elif change == "dropout":
        q, k, v, options["dropout_p"] = q, k, torch.zeros_like(v), 0.5
    else:
        q, k, v = (x[:, :2] for x in (q, k, v))
    y = ours.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, v, **options))
    assert not calls


def test_parts_of_numpys_memory_have_storages_of_their_own(calls):
    memory = np.random.default_rng(0).standard_normal((2, 5, 72))
    parts = [torch.from_numpy(memory[..., 24 * i :][..., :24]).unflatten(-1, (3, 8)).transpose(1, 2) for i in range(3)]
    torch.testing.assert_close(ours.scaled_dot_product_attention(*parts), F.scaled_dot_product_attention(*parts))
    assert not calls


def test_a_scale_of_another_type_is_read_at_each_call(calls):
    qkv, scale = projection("split", "cpu", torch.float64), np.array(0.5)
    for _ in range(2):
        options = {"scale": np.float64(scale)}
        y = attend("split", ours.scaled_dot_product_attention, qkv, **options)
        torch.testing.assert_close(y, attend("split", F.scaled_dot_product_attention, qkv, **options))
        scale *= 2
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(calls, dtype):
    """It has tensors of 32 bits copied to 16 anyway."""
    qkv = projection("unbound", "cpu", dtype)
    with torch.no_grad():
        parts = [x.contiguous() for x in unbound(qkv, 3, 3)]
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = (ours.scaled_dot_product_attention(*given) for given in (unbound(qkv, 3, 3), parts))
    assert len(calls) == (dtype == torch.bfloat16)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
