"""Layers that add a residual before a norm: replaced, both are one operator, and all else is what it was."""

from __future__ import annotations

import copy
import functools
import io

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import known_layers, replaced_calls, replaced_classes, replaced_forwards  # noqa: E402
from aotops.frontends.torch.known_modules import form_of  # noqa: E402
from aotops.frontends.torch.tensors import READS_TENSORS  # noqa: E402

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
ON = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
plain_calls = pytest.mark.skipif(not READS_TENSORS, reason="this torch has no plain calls")
N = 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.given = nn.Linear(N, N), []

    def forward(self, hidden_states, *args, **kwargs):
        self.given.append((args, kwargs))
        return self.product(hidden_states), None


class Layer(nn.Module):
    """The modules that the known forwards call, by their names."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.FIRST, self.SECOND, self.NORM = norm(N), norm(N), norm(N)
        self.ATTENTION, self.CROSS, self.DROPOUT = Attention(), Attention(), nn.Dropout(0.3)
        self.PRODUCT, self.PRODUCT_2, self.MLP, self.ACT = nn.Linear(N, N), nn.Linear(N, N), nn.Linear(N, N), nn.Tanh()
        self.RATE, self.ACT_RATE = 0.2, 0.4


class PostNorm(Layer):
    forward = known_layers._post_norm
    given, sums = (lambda x: (x, 2 * x)), 1


class Decoder(Layer):
    forward = known_layers._decoder
    given, named, sums = (
        (lambda x: (x, "mask", "positions")),
        {"use_cache": True, "position_embeddings": 1, "more": 2},
        1,
    )


class Encoder(Layer):
    forward = known_layers._encoder
    given, named, sums = (lambda x: (x,)), {"attention_mask": "mask", "more": 2}, 1


class Image(Layer):
    forward = known_layers._image
    given, named, sums = (lambda x: (x, "mask")), {"more": 2}, 1


class Modern(Layer):
    forward = known_layers._modern
    given, named, sums = (lambda x: (x, "mask", "positions")), {"more": 2}, 1


class Cross(Layer):
    forward = known_layers._cross
    given, named, sums = (lambda x: (x, "mask", 3 * x, "other mask")), {"past_key_values": "cache", "more": 2}, 2


class Uncrossed(Cross):
    given, named, sums = (lambda x: (x, "mask")), {"use_cache": False}, 1


class Speech(Layer):
    forward = known_layers._speech
    given, named, sums = (lambda x: (x, "mask")), {"more": 2}, 1


LAYERS = (PostNorm, Decoder, Encoder, Image, Modern, Cross, Uncrossed, Speech)
EVERY = pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.__name__)


def pair(cls, where="cpu", dtype=torch.float64, **options):
    torch.manual_seed(0)
    theirs = cls(**options).to(where, dtype)
    mine = copy.deepcopy(theirs)
    record = ours.replace(mine)
    assert (record.rows[0].operator == "add_norm") is READS_TENSORS
    return theirs, mine


def called(layer, x, run=None):
    torch.manual_seed(1)
    return (run or layer)(*type(layer).given(x), **getattr(type(layer), "named", {}))


def nodes(y):
    found, left = [], [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.append(node)
            left += [of for of, _ in node.next_functions]
    return [node.name() for node in found]


def compare(theirs, mine, where="cpu", dtype=torch.float64, run=None, tolerance=1e-9):
    """Results, gradients and what children are given. Returns how many sums are one operator with their norms."""
    results = []
    for layer in (theirs, mine):
        layer.ATTENTION.given, layer.CROSS.given = [], []
        x = torch.linspace(-1, 1, 6 * N, device=where, dtype=dtype).sin().reshape(2, 3, N).requires_grad_()
        y = called(layer, x, run and functools.partial(run, layer))
        inputs = [x, *layer.parameters()]
        sums = sum(name.startswith(("AddLayerNorm", "AddRmsNorm")) for name in nodes(y))
        results.append((y, *torch.autograd.grad(y, inputs, y.detach().cos(), allow_unused=True)))
    for a, b in zip(*results, strict=True):
        assert (a is None) is (b is None)
        if a is None:
            continue
        assert a.dtype is b.dtype
        assert (a - b).norm() <= tolerance * (1 + a.norm())
    for name in ("ATTENTION", "CROSS"):
        given = [[(args, sorted(named.items())) for args, named in getattr(of, name).given] for of in (theirs, mine)]
        assert str(given[0]) == str(given[1])
    return sums


@ON
@EVERY
@pytest.mark.parametrize("norm", [nn.LayerNorm, functools.partial(nn.RMSNorm, eps=1e-5)])
def test_results_and_gradients(cls, where, norm):
    theirs, mine = pair(cls, where, norm=norm)
    # small norms in training are the original's on a GPU
    assert compare(theirs, mine, where) == (cls.sums if READS_TENSORS and where == "cpu" else 0)
    assert compare(theirs.eval(), mine.eval(), where) == (cls.sums if READS_TENSORS else 0)


@plain_calls
@EVERY
def test_the_sum_before_a_small_norm_in_training_is_apart(cls, monkeypatch):
    for elements, sums in ((6 * N, cls.sums), (6 * N + 1, 0)):
        monkeypatch.setattr(replaced_classes, "_MADE", {})
        for name, value in {"device": 1, "elements": elements, "rows": 7}.items():  # as on a GPU
            monkeypatch.setitem(replaced_calls.LARGE_NORM, name, value)
        theirs, mine = pair(cls)
        assert compare(theirs, mine) == sums
        assert compare(theirs.eval(), mine.eval()) == cls.sums


@ON
@EVERY
def test_dtypes(cls, where):
    for dtype, tolerance in ((torch.bfloat16, 6e-2), (torch.float32, 1e-5)):
        theirs, mine = pair(cls, where, dtype)
        compare(theirs, mine, where, dtype, tolerance=tolerance)
    for layer in (theirs, mine):
        layer.float()
    with torch.autocast(where, torch.bfloat16):
        compare(theirs, mine, where, torch.float32, tolerance=6e-2)


def test_half_precision_is_clamped():
    theirs, mine = pair(Speech, dtype=torch.float16)
    with torch.no_grad():
        for layer in (theirs, mine):
            layer.PRODUCT_2.bias.fill_(6e4)
        x = torch.full((1, N), 6e4, dtype=torch.float16)
        a, b = (layer.eval()(x, None) for layer in (theirs, mine))
    assert a.isfinite().all()
    torch.testing.assert_close(a, b)


@plain_calls
def test_the_sum_and_the_norm_are_apart_where_the_norm_is_not_a_plain_call():
    def with_hook(theirs, mine):
        for layer in (theirs, mine):
            layer.NORM.register_forward_hook(lambda module, args, y: 2 * y)

    def exchanged(theirs, mine):
        for layer in (theirs, mine):
            layer.NORM = nn.LayerNorm(N, eps=0.5, dtype=torch.float64)

    def restored(theirs, mine):
        ours.restore(mine.NORM)

    def given_a_forward(theirs, mine):
        for layer in (theirs, mine):
            layer.NORM.forward = lambda x: 3 * x

    for change in (with_hook, exchanged, restored, given_a_forward):
        theirs, mine = pair(Encoder)
        assert compare(theirs, mine) == 1
        change(theirs, mine)
        assert compare(theirs, mine) == 0
    theirs, mine = pair(Encoder)
    product = nn.Linear(N, 1, dtype=torch.float64)
    for layer in (theirs, mine):
        layer.ATTENTION.product = product  # its results are broadcast
    assert compare(theirs, mine) == 0
    torch.manual_seed(0)
    theirs = Encoder().double()
    mine = copy.deepcopy(theirs)
    ours.replace(mine, without="layer_norm")
    assert compare(theirs, mine) == 0


@pytest.mark.parametrize("cls", [Cross, Speech])
def test_a_product_and_its_activation(cls, monkeypatch):
    monkeypatch.setattr(replaced_classes, "_MADE", {})
    monkeypatch.setitem(replaced_forwards._CHECKS, "matrix", lambda *_: "")  # replaces a product, as on a GPU
    torch.manual_seed(0)
    theirs = cls().double()
    theirs.ACT = nn.GELU()
    mine = copy.deepcopy(theirs)
    ours.replace(mine)

    def is_fused():
        compare(theirs, mine)
        return not any(name.startswith("Gelu") for name in nodes(called(mine, torch.randn(2, N).double())))

    assert is_fused()
    hook = mine.PRODUCT.register_forward_hook(lambda module, args, y: None)
    assert not is_fused()
    hook.remove()
    assert is_fused()
    ours.restore(mine.PRODUCT)
    assert not is_fused()


def test_each_class_is_compiled_by_itself():
    """Dynamo counts what it has compiled of a code, and stops at eight."""
    codes = {id(type(pair(cls)[1]).forward.__code__) for cls in LAYERS}
    assert len(codes) == len(LAYERS)


@EVERY
def test_other_ways_to_run_a_layer(cls):
    theirs, mine = pair(cls)
    for run in (
        lambda layer, *args, **named: torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False, **named),
        lambda layer, *args, **named: torch.compile(layer, backend="eager", fullgraph=True)(*args, **named),
        lambda layer, *args, **named: torch.func.functional_call(layer, dict(layer.named_parameters()), args, named),
    ):
        compare(theirs, mine, run=run)


@EVERY
def test_copies_and_files(cls):
    theirs, mine = pair(cls)
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    for again in (copy.deepcopy(mine), torch.load(file, weights_only=False)):
        assert type(again) is type(mine)
        assert compare(theirs, again) == (cls.sums if READS_TENSORS else 0)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    assert repr(mine) == repr(theirs)
    ours.restore(mine)
    assert type(mine) is cls
    ours.replace(mine, only="layer_norm")  # and then the rest
    assert (ours.replace(mine).rows[0].operator == "add_norm") is READS_TENSORS


@plain_calls
def test_a_call_of_the_norms_class_is_kept():
    class Doubled(nn.LayerNorm):
        def __call__(self, x):
            return 2 * super().__call__(x)

    assert compare(*pair(Encoder, norm=Doubled)) == 0


@EVERY
def test_a_sum_apart_has_the_originals_strides(cls):
    theirs, mine = pair(cls)
    found = []
    for layer in (theirs, mine):
        seen = []
        for norm in (layer.SECOND, layer.NORM):
            norm.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].stride()))
        called(layer, torch.randn(2, N, 3, dtype=torch.float64).mT)
        found.append(seen)
    assert found[0] == found[1]


def test_an_argument_may_have_any_name():
    for cls in (Encoder, Decoder, Image, Modern, Speech):
        theirs, mine = pair(cls)
        compare(theirs, mine, run=lambda layer, *args, **named: layer(*args, **named, names=3, activated=4))


def test_what_an_activation_may_be(monkeypatch):
    monkeypatch.setattr(replaced_classes, "_MADE", {})
    monkeypatch.setitem(replaced_forwards._CHECKS, "matrix", lambda *_: "")
    theirs, mine = pair(Speech)
    for layer in (theirs, mine):
        del layer.ACT
        layer.ACT = torch.tanh
    compare(theirs, mine)


@plain_calls
def test_a_layer_is_left_if_its_norm_is():
    for options in ({"only": "add_norm"}, {"without": "layer_norm"}):
        assert ours.replace(Encoder(), **options).rows[0].reason == "its norm is not selected"


def test_layers_that_are_left():
    class Renamed(Layer):
        def forward(self, hidden_states, mask, **kwargs):
            residual = hidden_states
            hidden_states = self.FIRST(hidden_states)
            hidden_states, _ = self.ATTENTION(hidden_states=hidden_states, attention_mask=mask, **kwargs)
            hidden_states = residual + hidden_states
            residual = hidden_states
            hidden_states = self.NORM(hidden_states)
            hidden_states = self.MLP(hidden_states)
            hidden_states = residual + hidden_states
            return hidden_states

    class Scaled(Layer):
        def forward(self, hidden_states, attention_mask, **kwargs):
            residual = hidden_states
            hidden_states = self.FIRST(hidden_states)
            hidden_states, _ = self.ATTENTION(hidden_states=hidden_states, attention_mask=attention_mask, **kwargs)
            hidden_states = residual + hidden_states * 0.5
            residual = hidden_states
            hidden_states = self.NORM(hidden_states)
            hidden_states = self.MLP(hidden_states)
            hidden_states = residual + hidden_states
            return hidden_states

    assert form_of(Renamed) is not None
    assert form_of(Scaled) is None
    for layer in (Renamed(), Scaled(), Encoder(norm=lambda n: nn.Linear(n, n))):
        assert "add_norm" not in [row.operator for row in ours.replace(layer)]
    own = Encoder()
    own.forward = lambda *args: None
    assert ours.replace(own).rows[0].reason == "its forward is the instance's own"
    assert ours.replace(Encoder(), without="add_norm").rows[0].reason == "not selected"
