"""attention beside torch's own, what it reads and keeps, and the order of its sums."""

from __future__ import annotations

import gc
import re
import weakref
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ours = pytest.importorskip("aotops.frontends.torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

from aotops.frontends.torch.mathematics import Mathematics  # noqa: E402
from aotops.ops.attention import _numbers  # noqa: E402

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]
PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=ON_GPU)])


def _heads(*shape, dtype=torch.float64, device="cpu", seed=0):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype).requires_grad_()


def _theirs(*inputs, **attrs):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*inputs, **attrs)


def _gradients(y, inputs):
    return torch.autograd.grad((y * y.detach().sin()).sum(), inputs)


def _same(inputs, found, expected):
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(_gradients(found, inputs), _gradients(expected, inputs))


@PLACES
def test_beside_torch(place):
    q, k, v = (_heads(2, 4, n, 16, seed=n, device=place) for n in (33, 70, 70))
    _same((q, k, v), ours.attention(q, k, v, layout="BHSD"), _theirs(q, k, v))
    _same((q, k, v), ours.attention(q, k, v, scale=0.7, layout="BHSD"), _theirs(q, k, v, scale=0.7))
    _same((q, k, v), ours.attention(q, k, v, causal=True, layout="BHSD"), _theirs(q, k, v, causal_lower_right(33, 70)))
    _same(
        (q, k),
        ours.attention(q, q, k[:, :, :33], causal=True, layout="BHSD"),
        _theirs(q, q, k[:, :, :33], is_causal=True),
    )


@PLACES
def test_heads_are_shared_as_torch_shares_them(place):
    q, k, v = (_heads(2, 21, n, 8, seed=n, device=place) for n in (6, 2, 2))
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    _same((q, k, v), ours.attention(q, k, v), _theirs(*swapped, enable_gqa=True).transpose(1, 2))


@PLACES
def test_a_window_and_lengths_are_a_mask(place):
    q, k, v = (_heads(3, 2, n, 8, seed=n, device=place) for n in (40, 50, 50))
    lengths = torch.tensor([50, 31, 12], device=place)
    after = torch.arange(50)[None] - torch.arange(40)[:, None] - 10
    mask = ((after >= -7) & (after <= 3)).to(place) & (torch.arange(50, device=place) < lengths[:, None, None, None])
    found = ours.attention(q, k, v, lengths, window=(7, 3), layout="BHSD")
    sees = mask.any(-1, keepdim=True).expand_as(found)
    assert not sees.all()
    assert (found[~sees] == 0).all()
    _same((q, k, v), found, torch.where(sees, _theirs(q, k, v, mask), 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@PLACES
def test_keys_after_the_lengths_are_not_read(place, dtype):
    q, k, v = (_heads(2, n, 2, 32, seed=n, device=place, dtype=dtype) for n in (20, 90, 90))
    lengths = torch.tensor([37, 0], dtype=torch.int32, device=place)
    cut = [x.detach().clone().requires_grad_() for x in (k, v)]
    with torch.no_grad():
        for x in (k, v):
            for i, n in enumerate((37, 0)):
                x[i, n:] = float("nan")
    found, expected = ours.attention(q, k, v, lengths), ours.attention(q, *cut, lengths)
    assert torch.equal(found, expected)
    assert (found[1] == 0).all()
    for got, right in zip(_gradients(found, (q, k, v)), _gradients(expected, (q, *cut)), strict=True):
        assert torch.equal(got, right)
        assert (got[1] == 0).all()


def _pictures():
    """The pictures of the documentation: the arguments of a call, and which keys a query sees."""
    text = (Path(__file__).parents[2] / "docs" / "index.md").read_text().split("### attention\n")[1].split("\n### ")[0]
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        calls, *rows = (re.split(r" {2,}", line.strip()) for line in block.splitlines())
        for i, call in enumerate(calls):
            if "=" in call:
                yield call, [[cell == "x" for cell in row[i].split()] for row in rows]


@pytest.mark.parametrize(("call", "seen"), [pytest.param(*picture, id=picture[0]) for picture in _pictures()])
def test_pictures_of_what_a_query_sees(call, seen):
    attrs = eval(f"dict({call})")
    attrs |= {name: torch.tensor(attrs[name]) for name in ("lengths", "cu_seqlens", "cu_seqlens_k") if name in attrs}
    queries, keys = len(seen), len(seen[0])
    y = ours.attention(torch.zeros(queries, 1, 1), torch.zeros(keys, 1, 1), torch.eye(keys)[:, None], **attrs)
    assert (y[:, 0] > 0).tolist() == seen


@PLACES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_bias_of_minus_infinity_is_a_mask(place, dtype):
    q, k, v = (_heads(2, n, 2, 16, seed=n, device=place, dtype=dtype) for n in (20, 90, 90))
    mask = torch.rand(2, 1, 20, 90, generator=torch.Generator().manual_seed(0)).to(place) > 0.5
    mask[0, :, 3] = False
    bias = torch.zeros(mask.shape, dtype=dtype, device=place).masked_fill(~mask, -torch.inf).requires_grad_()
    found, expected = ours.attention(q, k, v, bias=bias), ours.attention(q, k, v, mask=mask)
    assert torch.equal(found, expected)
    assert (found[0, 3] == 0).all()
    *same, dbias = _gradients(found, (q, k, v, bias))
    assert all(map(torch.equal, same, _gradients(expected, (q, k, v))))
    assert (dbias[~mask] == 0).all()
    assert dbias.isfinite().all()


@PLACES
def test_masks_and_biases_are_torchs(place):
    q, k, v = (_heads(2, 4, n, 16, seed=n, device=place) for n in (33, 70, 70))
    bias = _heads(4, 1, 70, seed=1, device=place)
    _same((q, k, v, bias), ours.attention(q, k, v, bias=bias, layout="BHSD"), _theirs(q, k, v, bias.expand(4, 33, 70)))
    mask = bias.detach() > -1
    _same((q, k, v), ours.attention(q, k, v, mask=mask, layout="BHSD"), _theirs(q, k, v, mask.expand(4, 33, 70)))


@PLACES
@pytest.mark.parametrize("attrs", [{}, {"causal": True}, {"window": (9, 4)}], ids=str)
def test_packed_sequences_are_calls_of_their_own(place, attrs):
    q, k, v = (_heads(150, n, 16, seed=n, device=place) for n in (4, 2, 3))
    k, v = k.expand(150, 2, 16), v[:, :2]
    ends = [0, 40, 40, 41, 130]
    found = ours.attention(q, k, v, cu_seqlens=torch.tensor(ends, device=place), **attrs)
    parts = [ours.attention(q[a:b], k[a:b], v[a:b], **attrs) for a, b in pairwise(ends)]
    expected = torch.cat([*parts, torch.zeros_like(q[ends[-1] :])])
    _same((q, k, v), found, expected)


@PLACES
@pytest.mark.parametrize("attrs", [{}, {"causal": True}, {"window": (9, 4)}, {"window": (-1, 30)}], ids=str)
def test_sequences_of_queries_and_of_keys(place, attrs):
    q, k, v = (_heads(n, heads, 16, seed=n, device=place) for n, heads in ((150, 4), (230, 2), (231, 2)))
    v = v[:230]
    ends, key_ends = [0, 40, 40, 41, 130], [3, 30, 60, 200, 210]
    found = ours.attention(
        q, k, v, cu_seqlens=torch.tensor(ends, device=place), cu_seqlens_k=torch.tensor(key_ends, device=place), **attrs
    )
    parts = [
        ours.attention(q[a:b], k[c:d], v[c:d], **attrs)
        for (a, b), (c, d) in zip(pairwise(ends), pairwise(key_ends), strict=True)
    ]
    _same((q, k, v), found, torch.cat([*parts, torch.zeros_like(q[ends[-1] :])]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@PLACES
def test_sequences_of_keys_in_16_bits(place, dtype, causal):
    wide = [_heads(n, heads, 64, seed=n, device=place) for n, heads in ((300, 4), (500, 2), (501, 2))]
    wide[2] = wide[2][:500].detach().requires_grad_()
    narrow = [x.detach().to(dtype).requires_grad_() for x in wide]
    ends, key_ends = [torch.tensor(x, device=place) for x in ([0, 128, 131, 300], [0, 200, 333, 500])]
    y, expected = (ours.attention(*x, cu_seqlens=ends, cu_seqlens_k=key_ends, causal=causal) for x in (narrow, wide))
    dy = torch.ones_like(expected).cumsum(0).sin()
    results = [y, *torch.autograd.grad(y, narrow, dy.to(dtype))]
    for found, right in zip(results, [expected, *torch.autograd.grad(expected, wide, dy)], strict=True):
        assert (found.double() - right).norm() <= 4 * torch.finfo(dtype).eps * right.norm()


@pytest.mark.parametrize("ends", [[0, 3, 2, 7], [0, 8, 8, 8], [-1, 5, 6, 7]])
def test_sequences_of_keys_that_there_are_not(ends):
    x, y = _heads(5, 1, 4), _heads(7, 1, 4)
    with pytest.raises(
        ValueError, match=r"attention: cu_seqlens_k\[\d\] is -?\d, expected ascending numbers from 0 to 7, .* of keys"
    ):
        ours.attention(x, y, y, cu_seqlens=torch.tensor([0, 1, 2, 5]), cu_seqlens_k=torch.tensor(ends))


@pytest.mark.parametrize("ends", [[0, 3, 2, 5], [0, 6], [-1, 5]])
def test_sequences_that_there_are_not(ends):
    x = _heads(5, 1, 4)
    with pytest.raises(
        ValueError, match=r"attention: cu_seqlens\[\d\] is -?\d, expected ascending numbers from 0 to 5"
    ):
        ours.attention(x, x, x, cu_seqlens=torch.tensor(ends))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("ends", [[0, 3, 2, 5], [0, 6], [-1, 5]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_their_results_are_nan(ends, dtype, of_keys):
    x, ends = _heads(5, 1, 8, dtype=dtype, device="cuda"), torch.tensor(ends, device="cuda")
    right = torch.arange(len(ends), device="cuda")
    of_keys = {"cu_seqlens": right, "cu_seqlens_k": ends} if of_keys else {"cu_seqlens": ends}
    y = ours.attention(x, x, x, **of_keys)
    assert y.isnan().all()
    assert torch.autograd.grad(y.sum(), x)[0].isnan().all()


def test_sinks_are_a_key_without_a_value():
    q, k, v = (_heads(3, 2, 5, 8, seed=i) for i in range(3))
    sinks = torch.tensor([0.5, -torch.inf], dtype=torch.float64)
    scores = (q @ k.mT * 8**-0.5).masked_fill(~torch.ones(5, 5, dtype=bool).tril(), -torch.inf)
    share = torch.sigmoid(scores.logsumexp(-1) - sinks[:, None])
    found, plain = (ours.attention(q, k, v, sinks=s, layout="BHSD", causal=True) for s in (sinks, None))
    torch.testing.assert_close(found, plain * share[..., None])
    assert torch.equal(found[:, 1], plain[:, 1])


@pytest.mark.parametrize("length", [-1, 6])
def test_a_length_that_there_is_not(length):
    x = _heads(2, 5, 1, 4)
    with pytest.raises(ValueError, match=rf"attention: lengths\[1\] is {length}, expected 0 to 5, the number of keys"):
        ours.attention(x, x, x, torch.tensor([5, length]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_its_results_are_nan(dtype):
    q, k, v = (_heads(3, 5, 1, 8, device="cuda", dtype=dtype, seed=i) for i in range(3))
    y = ours.attention(q, k, v, torch.tensor([5, 6, -1], device="cuda"))
    assert y[1:].isnan().all()
    assert y[0].isfinite().all()
    for gradient in torch.autograd.grad(y, (q, k, v), torch.ones_like(y)):
        assert gradient[1:].isnan().all()
        assert gradient[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_bits_do_not_depend_on_the_threads(dtype):
    """With one thread a task has a head, with more threads than heads a block."""
    q, k, v = (_heads(1, n, heads, 24, dtype=dtype, seed=n) for n, heads in ((300, 4), (520, 2), (520, 2)))
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 8):
            torch.set_num_threads(n)
            y = ours.attention(q, k, v, torch.tensor([511]), causal=True)
            found.append((y, *_gradients(y, (q, k, v))))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_that_are_not_wanted_are_not_computed(wanted):
    q, k, v = (_heads(2, n, 2, 8, seed=n) for n in (9, 13, 13))
    y, inputs = ours.attention(q, k, v), [(q, k, v)[i] for i in wanted]
    every = _gradients(ours.attention(q, k, v), (q, k, v))
    for got, i in zip(_gradients(y, inputs), wanted, strict=True):
        assert torch.equal(got, every[i])


def test_what_is_kept_is_linear_in_the_lengths():
    """q, k, v, the result, and a number for each query of a head."""
    q, k, v = (_heads(1, 300, 2, 8, dtype=torch.float32, seed=i) for i in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        ours.attention(q, k, v)
    assert sorted(map(tuple, kept)) == [(1, 2, 300), *[(1, 300, 2, 8)] * 4]


def test_a_result_that_is_dropped_drops_what_was_kept():
    q = _heads(1, 30, 2, 8)
    k = q * 2
    seen = weakref.ref(k)
    y = ours.attention(q, k, k)
    del k
    gc.collect()
    assert seen() is not None
    del y
    gc.collect()
    assert seen() is None


def test_the_numbers_of_dropout_are_philoxs():
    """Random123's first known answer of Philox4x32-10: a counter and a key of zeros."""
    numbers = [int(x) for x in _numbers(Mathematics(None), torch.zeros(2, dtype=torch.int64), 1, 1, 1)]
    assert [low + 2**16 * high for low, high in zip(numbers[::2], numbers[1::2], strict=True)] == [
        *(0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ]


@PLACES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [8, 64, 128, 136])
@pytest.mark.parametrize(
    ("dropout", "more"),
    [(0.25, {}), (0.7, {}), (0.25, {"softcap": 3.0}), (0.25, {"mask": torch.ones(1, 200, dtype=torch.bool)})],
)
def test_what_dropout_keeps_is_the_same_in_every_kernel(place, dtype, dim, dropout, more):
    """Forward and backward, for a seed of more than 32 bits and with a sign. Without scores the probabilities are
    1 / 200, and the result those of the first keys. A softcap and a mask have kernels of their own."""
    seed = torch.tensor([-5, 2**40 + 7])
    numbers = torch.stack(_numbers(Mathematics(None), seed, 8, 70, 25), -1).flatten(-2)
    kept = (numbers >= int(dropout * 2**16)).view(2, 4, 70, 200)
    more = {name: x.to(place) if name == "mask" else x for name, x in more.items()}
    q, k, v = torch.zeros(2, 70, 4, dim), torch.zeros(2, 200, 2, dim), torch.zeros(2, 200, 2, dim)
    v[:, :dim] = torch.eye(dim)[:, None]
    q, k, v = (x.to(place, dtype).requires_grad_() for x in (q, k, v))
    y = ours.attention(q, k, v, seed=seed.to(place), dropout=dropout, **more)
    assert torch.equal((y != 0).cpu(), kept[..., :dim].transpose(1, 2))
    (dv,) = torch.autograd.grad(y.sum(), v)
    sums = kept.view(2, 2, 2, 70, 200).sum((2, 3)).transpose(1, 2) / (200 * (1 - dropout))
    torch.testing.assert_close(dv[..., 0].float().cpu(), sums, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=0)
