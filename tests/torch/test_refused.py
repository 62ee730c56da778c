"""Calls that torch's own functions take and these refuse, by an error that names the operator, the argument, what was
expected and what came. docs/frontends/torch.md has the table."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import private  # noqa: E402

X, TARGET = torch.arange(16.0).reshape(4, 4), torch.tensor([0, 3, 1, 2])
CALLS = {
    "add": (lambda x: ours.add(x, x), "a"),
    "conv2d": (lambda x: ours.conv2d(x, x), "x"),
    "cross_entropy": (lambda x: ours.cross_entropy(x, TARGET), "x"),
    "gelu": (ours.gelu, "x"),
    "layer_norm": (lambda x: ours.layer_norm(x, 4), "x"),
    "linear": (lambda x: ours.linear(x, x), "x"),
    "matmul": (lambda x: ours.matmul(x, x), "a"),
    "rms_norm": (lambda x: ours.rms_norm(x, 4), "x"),
    "softmax": (ours.softmax, "x"),
    "swiglu": (lambda x: ours.swiglu(x, x), "gate"),
}
FLOATING = "expected float16, bfloat16, float32 or float64"
DTYPES = ["complex64", "int64", "int32", "uint8", "bool", "float8_e4m3fn"]
KINDS = {
    "nested": (lambda: torch.nested.nested_tensor([X, X]), "a nested tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([X, X], layout=torch.jagged), "a nested tensor"),
    "mkldnn": (X.to_mkldnn, r"a tensor of layout torch\._mkldnn"),
    "sparse": (X.to_sparse, r"a tensor of layout torch\.sparse_coo"),
    "quantized": (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "a quantized tensor"),
}
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of prototypes


@pytest.mark.parametrize("name", CALLS)
def test_dtypes(name):
    call, slot = CALLS[name]
    for dtype in DTYPES:
        with pytest.raises(TypeError, match=f"^{name}: {slot} has dtype {dtype}, {FLOATING}$"):
            call((X[None] if name == "conv2d" else X).to(getattr(torch, dtype)))


@pytest.mark.parametrize("name", CALLS)
def test_kinds_of_tensors(name):
    call, slot = CALLS[name]
    for make, kind in KINDS.values():
        if kind.endswith("mkldnn") and not torch.backends.mkldnn.is_available():
            continue
        with pytest.raises(TypeError, match=f"^{name}: {slot} is {kind}, expected a strided tensor$"):
            call(make())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ours.add(1, 2), TypeError, r"add: a is 1, expected a torch\.Tensor"),
        (
            lambda: ours.cross_entropy(X, TARGET.short()),
            TypeError,
            "cross_entropy: target has dtype int16, expected int32 or int64",
        ),
        (
            lambda: ours.cross_entropy(X, TARGET, torch.ones(4)),
            TypeError,
            r"cross_entropy: ignore_index is tensor\(.*\), expected an integer of 64 bits",
        ),
        (
            lambda: ours.rms_norm(X, 4, torch.ones(4).bfloat16()),
            TypeError,
            "rms_norm: weight has dtype bfloat16, expected float32",
        ),
        (
            lambda: ours.add_rms_norm(X, X, 4, residual_dtype=torch.float32),
            TypeError,
            r"add_rms_norm\(\) .* keyword argument 'residual_dtype'",
        ),
        (
            lambda: ours.cross_entropy(X, TARGET, return_lse=True),
            TypeError,
            r"cross_entropy\(\) .* keyword argument 'return_lse'",
        ),
    ],
    ids=["numbers", "int16", "weight", "narrow", "residual_dtype", "return_lse"],
)
def test_arguments(call, error, words):
    with pytest.raises(error, match=f"^{words}$"):
        call()


@pytest.mark.parametrize("dim", [1, -2])
def test_vmap_adds_no_axis_that_an_example_lacks(dim):
    rows = torch.ones(3, 2)
    with pytest.raises(ValueError, match=rf"^softmax: dim is {dim}, expected an axis of x, which has shape \(2,\)"):
        torch.vmap(lambda x: ours.softmax(x, dim))(rows)
    with pytest.raises(ValueError, match=r"^rms_norm: x has shape \(\), expected its trailing axes"):
        torch.vmap(lambda x: ours.rms_norm(x, (3,)))(torch.ones(3))


LEARNED = torch.ones(4, requires_grad=True)  # then the loss is composed


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (ValueError, "weight has shape", {"weight": torch.ones(3, requires_grad=True)}),
        (ValueError, "label_smoothing is nan, expected 0 to 1", {"label_smoothing": float("nan")}),
        (TypeError, r"z_loss is \[1, 1\], expected a number", {"z_loss": [1, 1]}),
        (TypeError, "softcap is None, expected a number", {"softcap": None}),
        (TypeError, r"ignore_index is \[1\], expected an integer", {"ignore_index": [1]}),
        (TypeError, "target has dtype", {"target": TARGET.to(torch.complex64)}),
        (TypeError, "target has dtype", {"target": TARGET.bool()}),
        (ValueError, "target has shape", {"target": TARGET[:3]}),
        (ValueError, "target is on meta", {"target": TARGET.to("meta")}),
    ],
)
def test_a_loss_whose_class_weights_learn(error, words, options):
    for loss in (ours.cross_entropy, ours.cross_entropy_lse):
        with pytest.raises(error, match=f"^{loss.__name__}: {words}"):
            loss(X, **({"target": TARGET, "weight": LEARNED} | options))
    for loss in (ours.linear_cross_entropy, ours.linear_cross_entropy_lse):
        renamed = {"class_weight" if key == "weight" else key: value for key, value in options.items()}
        with pytest.raises(error, match=f"^{loss.__name__}: {words.replace('weight', '(class_)?weight')}"):
            loss(X, X, **({"target": TARGET, "class_weight": LEARNED} | renamed))


def test_integers_whose_class_weights_learn():
    with pytest.raises(TypeError, match=f"^cross_entropy: x has dtype int64, {FLOATING}$"):
        ours.cross_entropy(X.long(), TARGET, weight=LEARNED)


def test_a_tensor_that_has_left_its_vmap():
    kept = []
    torch.vmap(lambda x: (kept.append(x), x * 1)[1])(X)
    for call in (lambda: ours.gelu(kept[0]), lambda: ours.gelu(kept[0], out=torch.empty(4))):
        with pytest.raises(RuntimeError, match=r"^gelu: x is a tensor of a vmap that has ended"):
            call()
    with pytest.raises(RuntimeError, match=r"^linear: bias is a tensor of a vmap that has ended"):
        ours.linear(X, X, kept[0])


def test_torchscript_takes_the_operators_of_the_dispatcher():
    def scripted(x: torch.Tensor):
        return torch.ops.aotops.gelu(x, "none")

    assert torch.equal(torch.jit.script(scripted)(X), ours.gelu(X))


@pytest.mark.skipif(not private.CAN_OVERWRITE, reason="this torch cannot tell who reads a tensor")
@pytest.mark.skipif(not ours.tensors.READS_TENSORS, reason="a backward overwrites nothing without the call path")
def test_a_hook_after_the_node_cannot_read_what_was_overwritten():
    """torch's count of versions tells it."""
    x = torch.randn(600, 1000, requires_grad=True)
    loss = ours.cross_entropy(x, torch.zeros(600, dtype=torch.int64))
    node, read = loss.grad_fn, []

    def hook(*_):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            read.append(node.saved_tensors)
        read.append(None)

    node.register_hook(hook)
    loss.backward()
    assert read == [None]


# ------------------------------------------------------------------------------------------------------ padding "same"


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("size", [2, 3])
def test_padding_same_names_a_weight_that_does_not_fit(size, layout):
    x = torch.ones(1, 1, 4, 4)
    for axes in (3, 5):
        weight = torch.ones((1,) * (axes - 2) + (size, size))
        with pytest.raises(ValueError, match=r"^conv2d: weight has shape \(1, .*\), expected \(O, "):
            ours.conv2d(x, weight, padding="same", layout=layout)
    with pytest.raises(TypeError, match=r"^conv2d: weight is 3, expected a torch\.Tensor"):
        ours.conv2d(x, 3, padding="same", layout=layout)
    for dilation in ((), (1, 1, 1)):
        with pytest.raises(ValueError, match=r"^conv2d: dilation is \(.*\), expected two integers"):
            ours.conv2d(x, torch.ones(1, 1, size, size), padding="same", dilation=dilation)


# ---------------------------------------------------------------------------------------------------------------- out


@pytest.mark.parametrize("bytes_left", [0, 4, 63])
def test_a_storage_that_is_too_small_is_not_written_to(bytes_left):
    """torch's own functions write there: a crash, or a corrupted heap."""
    calls = {
        "gelu": lambda out: ours.gelu(X, out=out),
        "softmax": lambda out: ours.softmax(X.t(), out=out),  # copied
        "conv2d": lambda out: ours.conv2d(X[None], torch.ones(1, 1, 1, 1), out=out),
    }
    for name, call in calls.items():
        out = torch.zeros(1, 4, 4) if name == "conv2d" else torch.zeros(4, 4)
        out.untyped_storage().resize_(bytes_left)
        with pytest.raises(
            RuntimeError, match=f"^{name}: out has a storage of {bytes_left} bytes, expected at least 64"
        ):
            call(out)


def test_a_storage_that_is_large_enough():
    """A view with gaps and an offset needs memory to its last element; one without elements needs none."""
    base = torch.zeros(9, 9)
    view = base[1:5, 1:5]
    base.untyped_storage().resize_(4 * (10 + 3 * 9 + 4))
    ours.gelu(X, out=view)
    torch.testing.assert_close(view, F.gelu(X))
    base.untyped_storage().resize_(4 * (10 + 3 * 9 + 4) - 1)
    with pytest.raises(RuntimeError, match=r"^gelu: out has a storage of 163 bytes, expected at least 164"):
        ours.gelu(X, out=view)
    assert ours.gelu(X, out=torch.empty(0)).shape == X.shape
