"""``scaled_dot_product_attention`` and ``MultiheadAttention`` beside torch's own."""

from __future__ import annotations

import functools
import math

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402

theirs = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def only_ours(monkeypatch):
    """Makes a call of torch's own function an error; ``theirs`` still is that function."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)


@pytest.fixture
def only_our_module(monkeypatch):
    """Makes a call of torch's own module an error; ``FORWARD`` still is its function."""
    monkeypatch.setattr(torch.nn.MultiheadAttention, "forward", refuse)


def refuse(*args, **kwargs):
    raise AssertionError("torch's own")


def drawn(*shapes, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def gradients(function, tensors, *args, **kwargs):
    """The result and the gradients of the tensors that have one."""
    y = function(*tensors, *args, **kwargs)
    dy = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).to(y.dtype).view(y.shape)
    given = [x for x in (*tensors, *args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    return y, *torch.autograd.grad(y, given, dy)


def compare(tensors, **kwargs):
    mine, its = (gradients(function, tensors, **kwargs) for function in (ours.scaled_dot_product_attention, theirs))
    for a, b in zip(mine, its, strict=True):
        torch.testing.assert_close(a, b)
    return mine[0]


def inputs(queries, keys, heads=4, kv_heads=4, lead=(2,), dtype=torch.float64):
    depths = ((heads, queries, 8), (kv_heads, keys, 8), (kv_heads, keys, 6))
    return drawn(*((*lead, *shape) for shape in depths), dtype=dtype)


LENGTHS = pytest.mark.parametrize(("queries", "keys"), [(5, 7), (7, 5), (6, 6), (1, 9)])


@LENGTHS
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": -0.3}, {"is_causal": True, "scale": 0.7}], ids=str
)
def test_values_and_gradients_are_torchs(only_ours, queries, keys, options):
    compare(inputs(queries, keys), **options)


@LENGTHS
@pytest.mark.parametrize("shape", ["lk", "b1lk", "1hlk", "bhlk", "b11k", "bhl1"])
def test_masks_are_torchs(only_ours, queries, keys, shape):
    """Boolean and added ones, with their gradients; the first query sees nothing."""
    sizes = {"b": 2, "h": 4, "l": queries, "k": keys, "1": 1}
    mask = torch.rand([sizes[axis] for axis in shape], dtype=torch.float64)
    seen = mask > 0.4
    seen[..., 0, :] = False
    y = compare(inputs(queries, keys), attn_mask=seen)
    assert seen.shape[-2] == 1 or (y[..., 0, :] == 0).all()
    compare(inputs(queries, keys), attn_mask=mask.requires_grad_())
    compare(inputs(queries, keys), attn_mask=mask.detach().masked_fill(~seen, -math.inf))


def test_heads_are_shared(only_ours):
    compare(inputs(5, 7, kv_heads=2), enable_gqa=True)
    compare(inputs(5, 7, kv_heads=1), enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_leading_axes(only_ours, lead):
    compare(inputs(5, 7, lead=lead), is_causal=True)
    compare(inputs(5, 7, lead=lead), attn_mask=torch.rand(5, 7) > 0.4)
    compare([x[0] for x in inputs(5, 7, lead=())])  # (L, E)


def test_a_projections_layout_is_kept(only_ours):
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs(5, 7))
    y = compare([q, k, v], attn_mask=torch.rand(4, 5, 7) > 0.4)
    assert y.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(only_ours, dtype):
    tensors = inputs(5, 7, dtype=dtype)
    for mask in (torch.randn(5, 7), torch.randn(5, 7).to(dtype), None):
        mine = ours.scaled_dot_product_attention(*tensors, attn_mask=mask)
        wide = theirs(*(x.double() for x in tensors), attn_mask=None if mask is None else mask.double())
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), wide, rtol=0.02, atol=0.02)


def test_compiled(only_ours):
    def call(q, k, v, mask):
        function = ours.scaled_dot_product_attention
        return function(q, k, v, mask) + function(q, k, v, is_causal=True, scale=0.2)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for queries, keys in ((5, 7), (7, 5)):
        tensors = (*inputs(queries, keys), torch.randn(queries, keys, dtype=torch.float64, requires_grad=True))
        for a, b in zip(gradients(compiled, tensors), gradients(call, tensors), strict=True):
            torch.testing.assert_close(a, b)


def test_autocast(only_ours):
    q, k, v = inputs(5, 7, dtype=torch.float32)
    mask = torch.randn(5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        for given in ((q, k, v), (q, k.bfloat16(), v)):
            mine, its = (function(*given, attn_mask=mask) for function in (ours.scaled_dot_product_attention, theirs))
            assert mine.dtype == its.dtype == torch.bfloat16
            torch.testing.assert_close(mine, its, rtol=0.03, atol=0.03)


def test_torchs_own_where_ours_takes_it_not():
    function, tensors = ours.scaled_dot_product_attention, inputs(6, 6)
    assert (function(*tensors, dropout_p=1.0) == 0).all()
    q, k, v = tensors
    for given, options in (
        ((q, k[:1], v[:1]), {}),
        ((q, k[:, :1], v[:, :1]), {}),
        ((q, k, v), {"attn_mask": causal_lower_right(6, 6)}),
        ((q, k, v), {"attn_mask": torch.randn(6, 6)}),  # float32, added to float64
    ):
        assert torch.equal(function(*given, **options), theirs(*given, **options))
    nested = [torch.nested.nested_tensor([x[0].detach(), x[1, :, :3].detach()]) for x in tensors]
    assert function(*nested).is_nested


def identity(queries, keys):
    """q, k of zeros, and v of which each row is a key's: the result is the probabilities."""
    q, k = torch.zeros(2, 4, queries, 8), torch.zeros(2, 4, keys, 8)
    return q, k, torch.eye(keys).expand(2, 4, keys, keys)


def test_dropout_of_torchs_generator(only_ours):
    """Its rate, its factor, and its numbers: another call has others, the same seed the same."""
    call = functools.partial(ours.scaled_dot_product_attention, *identity(300, 400), dropout_p=0.3)
    torch.manual_seed(3)
    first, second = call() * 400, call() * 400
    torch.manual_seed(3)
    assert torch.equal(call() * 400, first)
    assert not torch.equal(first, second)
    for y in (first, second):
        torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / 0.7))
        kept = (y != 0).double()
        assert abs(kept.mean() - 0.7) < 4 * (0.21 / kept.numel()) ** 0.5
        for axes in ((0, 1, 2), (0, 1, 3), (2, 3)):  # of each key, query and head
            n = kept.numel() / kept.mean(axes).numel()
            assert ((kept.mean(axes) - 0.7).abs() < 5 * (0.21 / n) ** 0.5).all()
    both = ((first != 0) == (second != 0)).double().mean()
    assert abs(both - 0.58) < 0.005  # as of independent ones: 0.7 * 0.7 + 0.3 * 0.3


MASK = torch.arange(12).reshape(3, 4) * 3 % 10 > 2


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": MASK}], ids=["plain", "causal", "mask"])
def test_gradients_with_dropout(only_ours, options):
    """gradcheck calls the function again and again, twice for each element."""

    def call(*tensors):
        torch.manual_seed(5)
        return ours.scaled_dot_product_attention(*tensors, dropout_p=0.4, **options)

    tensors = drawn((1, 2, 3, 3), (1, 2, 4, 3), (1, 2, 4, 2))
    assert not torch.equal(call(*tensors), theirs(*tensors, **options))
    torch.autograd.gradcheck(call, tensors)
    torch.autograd.gradgradcheck(call, tensors)


def test_dropout_in_a_checkpoint_and_compiled(only_ours):
    tensors = inputs(6, 9)

    def call(q, k, v):
        return ours.scaled_dot_product_attention(q, k, v, dropout_p=0.5).sin()

    def checkpointed(q, k, v):
        return checkpoint(call, q, k, v, use_reentrant=False)

    results = []
    for function in (call, checkpointed, torch.compile(call, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(2)
        results.append(gradients(function, tensors))
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            torch.testing.assert_close(a, b)


def test_a_checkpoint_of_numbers_that_are_new(only_ours):
    """torch stops what it calls again by an exception, as soon as all is there, and that comes out of the call."""
    for i in range(12):  # more than are bound at their first use
        call = functools.partial(ours.scaled_dot_product_attention, scale=0.1 + i / 64)
        tensors = inputs(5, 7)
        again = gradients(functools.partial(checkpoint, call, use_reentrant=False), tensors)
        for a, b in zip(again, gradients(call, tensors), strict=True):
            torch.testing.assert_close(a, b)


def test_dropout_under_vmap(only_ours):
    """vmap's ``randomness`` decides, as of torch's random functions."""
    tensors = [x.detach().expand(3, *x.shape) for x in identity(5, 40)]
    call = functools.partial(ours.scaled_dot_product_attention, dropout_p=0.5)
    same = torch.vmap(call, randomness="same")(*tensors)
    assert torch.equal(same[0], same[1])
    different = torch.vmap(call, randomness="different")(*tensors)
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(*tensors)


def test_a_modules_dropout(only_our_module):
    _, mine = modules(8, 2, batch_first=True, dropout=0.5)
    x = rows(True, 3, 4, 8)
    first, second = (mine(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(first, second)
    mine.eval()
    first, second = (mine(x, x, x, need_weights=False)[0] for _ in range(2))
    assert torch.equal(first, second)


WRONG = [
    (lambda q, k, v: (q, k[..., :4], v), {}),
    (lambda q, k, v: (q, k, v[:, :, :3]), {}),
    (lambda q, k, v: (q, k.float(), v), {}),
    (lambda q, k, v: (q, k[:, :3], v[:, :3]), {}),
    (lambda q, k, v: (q, k[:, :3], v[:, :3]), {"enable_gqa": True}),
    (lambda q, k, v: (q, k, v), {"attn_mask": torch.ones(3, 3, dtype=torch.bool)}),
    (lambda q, k, v: (q, k, v), {"attn_mask": torch.ones(5, 7, dtype=torch.int32)}),
    (lambda q, k, v: (q, k, v), {"attn_mask": torch.ones(5, 7, dtype=torch.bool), "is_causal": True}),
    (lambda q, k, v: (q, k, v), {"dropout_p": 2.0}),
    (lambda q, k, v: (q[0, 0, 0], k, v), {}),
    (lambda q, k, v: (q, k, None), {}),
    (lambda q, k, v: (q, k.to("meta"), v), {}),
]


@pytest.mark.parametrize(("changed", "options"), WRONG)
def test_a_wrong_call_raises_as_torchs(changed, options):
    given = changed(*inputs(5, 7))
    with pytest.raises((RuntimeError, TypeError, ValueError)) as its:
        theirs(*given, **options)
    with pytest.raises(its.type):
        ours.scaled_dot_product_attention(*given, **options)


# ------------------------------------------------------------------------------------------------- MultiheadAttention


def modules(*args, **kwargs):
    """torch's module and ours, of the same parameters, none of which is 0."""
    its, mine = (kind(*args, dtype=torch.float64, **kwargs) for kind in (torch.nn.MultiheadAttention, MULTIHEAD))
    with torch.no_grad():
        for p in its.parameters():
            p.normal_()
    mine.load_state_dict(its.state_dict())
    its.load_state_dict(mine.state_dict())
    assert [n for n, _ in mine.named_parameters()] == [n for n, _ in its.named_parameters()]
    return its, mine


MULTIHEAD = ours.MultiheadAttention
FORWARD = torch.nn.MultiheadAttention.forward


def compare_modules(its, mine, tensors, **options):
    results = []
    for module, call in ((mine, mine), (its, lambda *args, **kwargs: FORWARD(its, *args, **kwargs))):
        y, weights = call(*tensors, need_weights=False, **options)
        given = [*{id(x): x for x in tensors}.values(), *module.parameters()]
        given += [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        results.append((y, *torch.autograd.grad(y.sin().sum(), given)))
        assert weights is None
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def rows(batch_first, batch, seq, size):
    lead = (seq,) if batch is None else (batch, seq) if batch_first else (seq, batch)
    return torch.randn(*lead, size, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 6}], ids=str)
def test_a_modules_results_are_torchs(only_our_module, batch, batch_first, options):
    its, mine = modules(8, 2, batch_first=batch_first, dropout=0.0, **options)
    query = rows(batch_first, batch, 4, 8)
    key, value = (rows(batch_first, batch, 6, options.get(name, 8)) for name in ("kdim", "vdim"))
    compare_modules(its, mine, (query, key, value))
    if "kdim" not in options:
        compare_modules(its, mine, (query, query, query))
        compare_modules(its, mine, (query, key, key))


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_a_modules_masks_are_torchs(only_our_module, batch, batch_first, added):
    its, mine = modules(8, 2, batch_first=batch_first)
    query, key = rows(batch_first, batch, 4, 8), rows(batch_first, batch, 6, 8)
    hidden = torch.rand(4, 6) > 0.6
    of_heads = torch.rand((batch or 1) * 2, 4, 6) > 0.6
    padding = torch.rand(*([] if batch is None else [batch]), 6) > 0.5
    padding[..., 0] = False
    if added:
        hidden, of_heads = (torch.randn(x.shape, dtype=torch.float64, requires_grad=True) for x in (hidden, of_heads))
        padding = torch.zeros(padding.shape, dtype=torch.float64).masked_fill_(padding, -math.inf)
    for masks in (
        {"attn_mask": hidden},
        {"attn_mask": of_heads},
        {"key_padding_mask": padding},
        {"attn_mask": hidden, "key_padding_mask": padding},
        {"attn_mask": of_heads, "key_padding_mask": padding},
    ):
        compare_modules(its, mine, (query, key, key), **masks)
    causal = torch.ones(4, 6).triu(1).bool()
    compare_modules(its, mine, (query, key, key), attn_mask=causal, is_causal=True)
    compare_modules(its, mine, (query, key, key), attn_mask=causal, is_causal=True, key_padding_mask=padding)


def test_a_module_is_torchs_own_where_ours_takes_it_not():
    x = rows(True, 3, 4, 8)
    for options in ({}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"dropout": 1.0}):
        its, mine = modules(8, 2, batch_first=True, **options)
        for more in ({}, {"average_attn_weights": False}, {"need_weights": False}):
            results = []
            for module in (its, mine):
                torch.manual_seed(1)
                results.append(module(x, x, x, **more))
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b)


def test_a_module_compiled_and_in_autocast(only_our_module):
    _, mine = modules(8, 2, batch_first=True)
    x, padding = rows(True, 3, 4, 8), torch.tensor([[False, False, False, True]] * 3)

    def call(x):
        return mine(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients(compiled, [x]), gradients(call, [x]), strict=True):
        torch.testing.assert_close(a, b)
    mine, narrow = mine.float(), x.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        y = call(narrow)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), call(narrow), rtol=0.1, atol=0.5)


def test_a_module_within_torchs_layers():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=torch.float64)
    x, padding = rows(True, 3, 4, 8), torch.tensor([[False, False, False, True]] * 3)
    expected = gradients(layer, [x], src_key_padding_mask=padding)
    mine = MULTIHEAD(8, 2, 0.0, batch_first=True, dtype=torch.float64)
    mine.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = mine
    for a, b in zip(gradients(layer, [x], src_key_padding_mask=padding), expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(layer.eval()(x, src_key_padding_mask=padding)[:, :3], expected[0][:, :3])


@pytest.mark.parametrize("options", [
    {"is_causal": True},  # without an attn_mask
    {"attn_mask": torch.ones(3, 3, dtype=torch.bool)},
    {"attn_mask": torch.ones(4, 4, dtype=torch.int32)},
    {"key_padding_mask": torch.ones(4, 3, dtype=torch.bool)},
])  # fmt: skip
def test_a_wrong_call_of_a_module_raises_as_torchs(options):
    its, mine = modules(8, 2, batch_first=True)
    x = rows(True, 3, 4, 8)
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        its(x, x, x, need_weights=False, **options)
    with pytest.raises(theirs.type):
        mine(x, x, x, need_weights=False, **options)
    with pytest.raises((AssertionError, RuntimeError)):
        mine(x[..., :7], x, x, need_weights=False)


# --------------------------------------------------------------------------------------- attention in torch's programs


class Layer(torch.nn.Module):
    def forward(self, q, k, v, bias):
        return ours.attention(q, k, v, bias=bias, causal=True).sin()


def layer_inputs(batch, queries, keys):
    shapes = ((batch, queries, 4, 8), (batch, keys, 2, 8), (batch, keys, 2, 6), (4, 1, keys))
    return drawn(*shapes, dtype=torch.float32)


@pytest.mark.parametrize("kept", [True, False])
def test_selective_checkpoints_keep_attention_by_its_name(kept):
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen, name = [], torch.ops.aotops.attention.default
    policies = (
        CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    )

    def contexts():
        return create_selective_checkpoint_contexts(lambda _, operator, *args, **kwargs: policies[operator is not name])

    tensors = layer_inputs(2, 5, 7)
    y = checkpoint(Layer(), *tensors, use_reentrant=False, context_fn=contexts)
    with Calls():
        found = torch.autograd.grad(y.sum(), tensors)
    assert (name in seen) != kept
    assert torch.ops.aotops.attention_backward.default in seen
    assert all(map(torch.equal, found, torch.autograd.grad(Layer()(*tensors).sum(), tensors)))


def test_one_graph_of_any_batch_and_lengths():
    torch._dynamo.reset()
    compiled = torch.compile(Layer(), fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for sizes in ((3, 5, 7), (7, 9, 3), (10, 130, 131)):
            tensors = layer_inputs(*sizes)
            for a, b in zip(*(gradients(f, tensors) for f in (compiled, Layer())), strict=True):
                torch.testing.assert_close(a, b)


def test_exported_and_compiled_ahead_of_time(tmp_path):
    from torch.export import Dim, export

    batch, queries, keys = Dim("batch", min=2), Dim("queries", min=2), Dim("keys", min=2)
    tensors = [x.detach() for x in layer_inputs(2, 5, 7)]
    shapes = ({0: batch, 1: queries}, {0: batch, 1: keys}, {0: batch, 1: keys}, {2: keys})
    program = export(Layer(), tuple(tensors), dynamic_shapes=shapes)
    file = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    run = torch._inductor.aoti_load_package(file)
    for sizes in ((2, 5, 7), (3, 9, 4)):
        given = [x.detach() for x in layer_inputs(*sizes)]
        expected = Layer()(*given)
        assert torch.equal(program.module()(*given), expected)
        torch.testing.assert_close(run(*given), expected)


def test_vmap_over_the_batch_and_heads():
    tensors = drawn((3, 5, 4, 8), (3, 7, 4, 8), (3, 7, 4, 6))

    def whole(q, k, v):
        return ours.attention(q, k, v, causal=True)

    def head(q, k, v):
        return whole(*(x.unsqueeze(-2) for x in (q, k, v))).squeeze(-2)

    expected = gradients(whole, tensors)
    for mapped in (torch.vmap(whole), torch.vmap(head, -2, -2), torch.vmap(torch.vmap(head, -2, -2))):
        for a, b in zip(gradients(mapped, tensors), expected, strict=True):
            torch.testing.assert_close(a, b)
