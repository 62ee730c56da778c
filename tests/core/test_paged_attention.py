"""paged_attention beside attention: what it reads, the order of its sums, and what it refuses."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
ours = pytest.importorskip("aotops.frontends.torch")

from aotops.testing.tolerances import PRECISION, STEPS, allowed_sum  # noqa: E402

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]
PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=ON_GPU)])


def _heads(*shape, dtype=torch.float64, device="cpu", seed=0):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype)


def _paged(k, v, block_size):
    """The keys and values in blocks, in an order of their own, and the table of these."""
    batch, keys = k.shape[:2]
    blocks = -(-keys // block_size)
    table = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(3)).view(batch, blocks).to(k.device)
    caches = []
    for x in (k, v):
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, blocks * block_size - keys), value=float("nan"))
        cache = torch.empty_like(padded).view(-1, block_size, *x.shape[2:])
        cache[table] = padded.view(batch, blocks, block_size, *x.shape[2:])
        caches.append(cache)
    return *caches, table.int()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("queries", "group", "dim"), [(1, 4, 128), (1, 1, 64), (7, 4, 80), (16, 4, 128), (3, 2, 256)])
@PLACES
def test_beside_attention(place, queries, group, dim, dtype):
    """Each example with as many keys as there are is a call of attention."""
    lengths = torch.tensor([900, 37, 513], device=place)
    q = _heads(3, queries, 2 * group, dim, device=place, dtype=dtype)
    k, v = (_heads(3, 900, 2, dim, seed=i, device=place, dtype=dtype) for i in (1, 2))
    k_cache, v_cache, table = _paged(k, v, 16)
    close = {} if dtype in (torch.float64, torch.float32) else {"rtol": 0.02, "atol": 0.02 if dtype.itemsize < 4 else 0}
    for attrs in ({}, {"scale": 0.3, "softcap": 3.0}):
        found = ours.paged_attention(q, k, v, lengths, **attrs)
        in_blocks = ours.paged_attention(q, k_cache, v_cache, lengths, table, **attrs)
        torch.testing.assert_close(found, in_blocks, **close)
        for i, n in enumerate(lengths.tolist()):
            given = (x[i : i + 1] for x in (q, k[:, :n], v[:, :n]))
            torch.testing.assert_close(found[i : i + 1], ours.attention(*given, causal=True, **attrs), **close)
    found = ours.paged_attention(q, k_cache, v_cache, lengths, table, window=100)
    for i, n in enumerate(lengths.tolist()):
        given = (x[i : i + 1] for x in (q, k[:, :n], v[:, :n]))
        torch.testing.assert_close(found[i : i + 1], ours.attention(*given, window=(100, 0)), **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@PLACES
def test_what_no_query_sees_is_not_read(place, dtype):
    """Blocks before the window and after the length may have any number, and keys there any value."""
    q, k, v = (_heads(2, n, 2, 64, seed=n, device=place, dtype=dtype) for n in (2, 320, 320))
    lengths = torch.tensor([320, 70], device=place)
    k_cache, v_cache, table = _paged(k, v, 16)
    expected = ours.paged_attention(q, k, v, lengths, window=40)
    in_blocks = ours.paged_attention(q, k_cache, v_cache, lengths, table, window=40)
    table[0, :17] = 10**9  # the keys before 320 - 2 - 40
    table[1, :1], table[1, 5:] = -1, 10**9
    assert torch.equal(ours.paged_attention(q, k_cache, v_cache, lengths, table, window=40), in_blocks)
    k[0, :278], k[1, 70:], v[0, :278], v[1, 70:] = (float("nan"),) * 4
    assert torch.equal(ours.paged_attention(q, k, v, lengths, window=40), expected)


def test_a_length_and_a_block_that_there_are_not():
    q, k = _heads(2, 1, 1, 4), _heads(5, 3, 1, 4)
    table = torch.tensor([[0, 4], [3, 5]])
    with pytest.raises(ValueError, match=r"paged_attention: lengths\[1\] is 7, expected 0 to 6, the number of keys"):
        ours.paged_attention(q, k, k, torch.tensor([6, 7]), table)
    text = r"paged_attention: block_table\[1, 1\] is 5, expected 0 to 4, a block of the cache"
    with pytest.raises(ValueError, match=text):
        ours.paged_attention(q, k, k, torch.tensor([6, 4]), table)
    assert ours.paged_attention(q, k, k, torch.tensor([6, 3]), table).isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_its_results_are_nan(dtype):
    q, k = _heads(4, 2, 4, 64, device="cuda", dtype=dtype), _heads(12, 16, 2, 64, device="cuda", dtype=dtype)
    table = torch.arange(12, device="cuda").view(4, 3)
    table[3, 1] = 12
    y = ours.paged_attention(q, k, k, torch.tensor([48, 49, -1, 40], device="cuda"), table)
    assert y[1:].isnan().all()
    assert y[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_rows_on_the_cpu_round_the_result_alone(dtype):
    """Rounded probabilities would have errors of the size of the values, where these cancel."""
    q, k, v = (_heads(16, n, 2, 40, dtype=dtype, seed=n) for n in (1, 3, 4))
    v = torch.cat([v[:, :2], -(v[:, :1] + v[:, 1:2]) / 2], 1)
    found, lengths = ours.paged_attention(q, k, v, torch.full((16,), 3)), torch.full((16,), 3)
    exact = ours.paged_attention(q.double(), k.double(), v.double(), lengths)
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=3e-5)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_bits_do_not_depend_on_the_threads(dtype, heads):
    q, k, v = (_heads(1, n, h, 24, dtype=dtype, seed=n) for n, h in ((3, 4), (3000, heads), (3000, heads)))
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 8):
            torch.set_num_threads(n)
            found.append(ours.paged_attention(q, k, v, torch.tensor([2900])))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_gradient_is_refused():
    q, k, lengths = _heads(2, 1, 2, 4).requires_grad_(), _heads(2, 5, 1, 4), torch.tensor([5, 2])
    y = ours.paged_attention(q, k, k, lengths)
    with pytest.raises(NotImplementedError, match="paged_attention has no derivative"):
        y.sum().backward()
    with pytest.raises(NotImplementedError, match="paged_attention"):
        torch.func.jvp(lambda q: ours.paged_attention(q, k, k, lengths), (q.detach(),), (q.detach(),))


def test_in_a_compiled_step():
    """A cache that is written to and then read, in one graph."""
    q, k, lengths = _heads(2, 1, 2, 4), _heads(2, 5, 1, 4), torch.tensor([3, 1])

    def step(q, k, row, lengths):
        k = k.index_put((torch.arange(2), lengths - 1), row)
        return ours.paged_attention(q, k, k, lengths) * 2

    row = _heads(2, 1, 4, seed=5)
    found = torch.compile(step, fullgraph=True)(q, k, row, lengths)
    torch.testing.assert_close(found, step(q, k, row, lengths))


def test_vmap():
    q, k, lengths = _heads(3, 2, 1, 2, 4), _heads(3, 2, 5, 1, 4), torch.tensor([[5, 1], [0, 3], [4, 4]])
    found = torch.vmap(lambda q, k, lengths: ours.paged_attention(q, k, k, lengths))(q, k, lengths)
    for y, one, keys, n in zip(found, q, k, lengths, strict=True):
        assert torch.equal(y, ours.paged_attention(one, keys, keys, n))


def assert_right(y, q, k, v, lengths, examples=slice(None)):
    """Beside float64. In 16 bits y is rounded, and so are probabilities and, as these, their sum. Scores are sums of
    head_dim terms in float32, whose errors are relative ones of the probabilities, which weigh v of any sign."""
    wide = [x.double() for x in (q, k, v)]
    exact = ours.paged_attention(*wide, lengths)
    spread = ours.paged_attention(*wide[:2], wide[2].abs(), lengths)
    precision = PRECISION[str(y.dtype).removeprefix("torch.")]
    inner = 2 * precision.result + STEPS * precision.work + allowed_sum(q.shape[-1], "float32")
    allowed = precision.result * exact.abs() + inner * spread
    assert ((y.double() - exact).abs() <= allowed)[examples].all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("queries", "group"), [(1, 1), (1, 8), (9, 3)])
def test_one_chunk_is_one_kernel(queries, group, dtype):
    """y is written by the kernel that has all keys: right values, zeros of rows that see nothing, NaN of no length."""
    q = _heads(4, queries, 2 * group, 64, device="cuda", dtype=dtype)
    k, v = (_heads(4, 200, 2, 64, seed=i, device="cuda", dtype=dtype) for i in (1, 2))
    lengths = torch.tensor([200, 3, 0, 201], device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        y = ours.paged_attention(q, k, v, lengths)
        torch.cuda.synchronize()
    if not profile.events():
        pytest.skip("the profiler finds nothing")
    names = [event.name for event in profile.events() if "paged_attention" in event.name]
    assert len(names) == 1, names
    by_tma = queries * group <= 8 and torch.cuda.get_device_capability()[0] == 9
    assert f"paged_attention_{'float' if dtype == torch.float32 else 'tma' if by_tma else 'mma'}_kernel" in names[0]
    assert_right(y, q, k, v, lengths, slice(3))
    assert (y[2] == 0).all()
    assert y[3].isnan().all()
    assert y[:3].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_heads_of_few_keys_are_one_kernel(dtype):
    """96 heads of k keep a GPU's memory busy: keys that would be several chunks are one."""
    q = _heads(48, 1, 4, 64, device="cuda", dtype=dtype)
    k, v = (_heads(48, 1000, 2, 64, seed=i, device="cuda", dtype=dtype) for i in (1, 2))
    lengths = torch.arange(0, 1001, 21, device="cuda")[:48]
    k_cache, v_cache, table = _paged(k, v, 32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        y = ours.paged_attention(q, k_cache, v_cache, lengths, table)
        torch.cuda.synchronize()
    if not profile.events():
        pytest.skip("the profiler finds nothing")
    names = [event.name for event in profile.events() if "paged_attention" in event.name]
    assert len(names) == 1, names
    assert_right(y, q, k, v, lengths)
    assert torch.equal(y, ours.paged_attention(q, k_cache, v_cache, lengths, table))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("queries", "group", "dim"), [(1, 4, 128), (1, 8, 128), (2, 4, 64), (1, 1, 64)])
@pytest.mark.parametrize("block_size", [None, 16, 64, 256])
def test_equal_pieces_of_ragged_keys(block_size, queries, group, dim, dtype):
    """Examples that a block has whole, that many share, and that have no key or one, in one call."""
    lengths = torch.tensor([2048, 0, 1, 700, 64, 2, 1999, 1024, 3, 1536], device="cuda")
    batch, keys = len(lengths), 2048
    q = _heads(batch, queries, 4 * group, dim, device="cuda", dtype=dtype)
    k, v = (_heads(batch, keys, 4, dim, seed=i, device="cuda", dtype=dtype) for i in (1, 2))
    unseen = torch.arange(keys, device="cuda") >= lengths[:, None]
    dense = [x.masked_fill(unseen[:, :, None, None], 0) for x in (k, v)]
    k, v = (x.masked_fill(unseen[:, :, None, None], float("nan")) for x in (k, v))
    table = ()
    if block_size:
        k, v, table = _paged(k, v, block_size)
        table[torch.arange(table.shape[1], device="cuda") >= (lengths[:, None] + block_size - 1) // block_size] = 10**9
        table = (table,)
    y = ours.paged_attention(q, k, v, lengths, *table)
    assert torch.equal(y, ours.paged_attention(q, k, v, lengths.int(), *(t.long() for t in table)))
    assert_right(y, q, *dense, lengths)
    q, long = q[:1].contiguous(), torch.tensor([batch * keys], device="cuda")
    k, v = (x.reshape(1, batch * keys, 4, dim) for x in dense)
    assert_right(ours.paged_attention(q, k, v, long), q, k, v, long)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("batch", [1, 33, 150])
def test_a_graph_with_other_lengths(batch, dim):
    """The lengths of a recorded call may change: the GPU finds the pieces, which examples of one length are."""
    q = _heads(batch, 1, 8, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (_heads(batch, 1200, 2, dim, seed=i, device="cuda", dtype=torch.bfloat16) for i in (1, 2))
    lengths = torch.full((batch,), 1200, device="cuda")
    ours.paged_attention(q, k, v, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ours.paged_attention(q, k, v, lengths)
    for seed in range(4):
        if seed:
            lengths.copy_(torch.randint(0, 1201, (batch,), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(y, ours.paged_attention(q, k, v, lengths))
        assert_right(y, q, k, v, lengths)
