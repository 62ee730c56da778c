"""replace: modules of models that exist, on the library's kernels, and back."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import json
import math
import types

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import known_heads as heads  # noqa: E402
from aotops.frontends.torch import known_modules as known  # noqa: E402
from aotops.frontends.torch import known_rotations as rotations  # noqa: E402
from aotops.frontends.torch.bytecode import named  # noqa: E402
from benchmarks import replaced  # noqa: E402

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


@functools.cache
def package(name):
    """One that imports torchvision. That may be built for another torch, which then lacks the operators that it
    declares at import; nothing here calls them. torchvision's own library aborts where they are declared before."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError:
        for operator in ("nms", "qnms"):
            LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return pytest.importorskip(name)


LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def transformers():
    return package("transformers")


def timm():
    return package("timm")


# -------------------------------------------------------------------------------------------------------------- models

SIZE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = SIZE | {"num_key_value_heads": 1, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2():
    t = transformers()
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=97, **size, **dropout))


def llama():
    t = transformers()
    return t.LlamaForCausalLM(t.LlamaConfig(**GROUPED))


def qwen():
    t = transformers()
    return t.Qwen3ForCausalLM(t.Qwen3Config(**GROUPED))


def gemma2():
    t = transformers()
    return t.Gemma2ForCausalLM(t.Gemma2Config(**GROUPED, final_logit_softcapping=0.5, query_pre_attn_scalar=16))


def gpt_neox():
    """Its heads are rotated in part."""
    t = transformers()
    return t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SIZE, bos_token_id=0, eos_token_id=0, pad_token_id=0))


def bert():
    t = transformers()
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return t.BertForMaskedLM(t.BertConfig(**SIZE, **dropout))


def vit():
    t = transformers()
    size = {k: v for k, v in SIZE.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 4, "num_labels": 7}
    return t.ViTForImageClassification(t.ViTConfig(**size))


def timm_vit():
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 7}
    return timm().create_model("vit_tiny_patch16_224", pretrained=False, **size)


def timm_resnet():
    return timm().create_model("resnet18", pretrained=False, num_classes=7)


def timm_mobilenet():
    return timm().create_model("mobilenetv3_small_050", pretrained=False, num_classes=7)


MODELS = {
    gpt2: {"layer_norm": 5, "linear": 2, "gelu": 2, "cross_entropy": 1, "mask": 1},
    llama: {"add_norm": 2, "rms_norm": 5, "swiglu": 2, "cross_entropy": 1, "rope": 2, "mask": 1},
    qwen: {"add_norm": 2, "rms_norm": 9, "swiglu": 2, "cross_entropy": 1, "rope": 2, "mask": 1},
    gemma2: {"rms_norm": 9, "gelu": 2, "cross_entropy": 1, "rope": 2, "mask": 1},
    gpt_neox: {"layer_norm": 5, "linear": 2, "gelu": 2, "cross_entropy": 1, "rope": 2, "mask": 1},
    bert: {"add_norm": 4, "layer_norm": 6, "linear": 3, "gelu": 3, "cross_entropy": 1, "mask": 1},
    vit: {"add_norm": 2, "layer_norm": 5, "linear": 2, "gelu": 2, "conv2d": 1, "mask": 1},
    timm_vit: {"layer_norm": 5, "linear": 2, "gelu": 2, "conv2d": 1},
    timm_resnet: {"conv2d": 20, "batch_norm": 28},
    timm_mobilenet: {"conv2d": 53, "batch_norm": 34},
}


def made(build):
    torch.manual_seed(0)
    return build()


def loss_of(model, build, **options):
    generator, parameter = torch.Generator().manual_seed(1), next(model.parameters())
    if build in (vit, timm_vit, timm_resnet, timm_mobilenet):
        side = 64 if build in (timm_resnet, timm_mobilenet) else 16
        result = model(torch.randn(3, 3, side, side, generator=generator).to(parameter))
        logits = result.logits if build is vit else result
        return nn.functional.cross_entropy(logits.float(), torch.tensor([1, 0, 5], device=parameter.device))
    tokens = torch.randint(0, 97, (2, 11), generator=generator)
    labels = tokens.masked_fill(torch.rand(2, 11, generator=generator) < 0.2, -100)
    return model(input_ids=tokens.to(parameter.device), labels=labels.to(parameter.device), **options).loss


def trained(model, build, **options):
    """The loss and all gradients, as one vector in float64."""
    model.zero_grad()
    loss = loss_of(model, build, **options)
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach().double(), torch.cat(gradients).double()


def error(found, expected):
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", MODELS)
def test_losses_and_gradients_are_within_the_errors_of_the_model_as_it_was(build, dtype):
    model = made(build).to(dtype)
    exact = trained(copy.deepcopy(model).double(), build)
    before = trained(model, build)
    record = ours.replace(model)
    counts = {}
    for row in record:
        if row.operator:
            counts[row.operator] = counts.get(row.operator, 0) + 1
    assert counts == MODELS[build]
    after = trained(model, build)
    for mine, its in zip(error(after, exact), error(before, exact), strict=True):
        assert mine <= 1.5 * its + TOLERANCE[dtype]
    record.restore()
    assert all(torch.equal(a, b) for a, b in zip(trained(model, build), before, strict=True))


# ------------------------------------------------------------------------------------------- the head, and attention

ALSO = ("linear_cross_entropy", "attention")
WITH_A_HEAD = {llama: 2, qwen: 2, gemma2: 2, gpt2: 2}
"""Models whose head is known, and the number of their attentions."""


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=["mean", "number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("build", WITH_A_HEAD)
def test_a_head_without_logits(build, dtype, items):
    options = {} if items is None else {"num_items_in_batch": items}
    model = made(build).to(dtype).train()
    exact = trained(copy.deepcopy(model).double(), build, **options)
    before = trained(model, build, **options)
    record = ours.replace(model, also=ALSO)
    operators = [row.operator for row in record]
    assert [operators.count(kind) for kind in ALSO] == [1, WITH_A_HEAD[build]]
    after = trained(model, build, **options)
    for mine, its in zip(error(after, exact), error(before, exact), strict=True):
        assert mine <= 1.5 * its + TOLERANCE.get(dtype, 1e-6)
    assert loss_of(model, build, **options).dtype is torch.float32
    record.restore()
    assert all(torch.equal(a, b) for a, b in zip(trained(model, build, **options), before, strict=True))


def test_logits_are_left_out_in_training_with_labels_alone():
    model, tokens = made(llama), torch.arange(8).view(1, 8)
    expected = model(input_ids=tokens, labels=tokens)
    ours.replace(model, also="linear_cross_entropy")

    def check(has_logits, **options):
        result = model(**{"input_ids": tokens, "labels": tokens} | options)
        found = result if isinstance(result, tuple) else result.to_tuple()
        assert any(t.shape == (1, 8, 97) for t in found if isinstance(t, torch.Tensor)) == has_logits
        if options.get("labels", tokens) is not None:
            torch.testing.assert_close(found[0], expected.loss)

    model.train()
    check(False)
    check(False, shift_labels=torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], 1))
    check(False, output_hidden_states=True)
    check(True, labels=None)
    check(True, return_dict=False)
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    check(True)
    handle.remove()
    check(False)
    model.eval()
    check(True)
    assert model.generate(tokens, max_new_tokens=2).shape == (1, 10)


def test_what_is_asked_for():
    rows = {row.operator or row.reason for row in ours.replace(made(llama))}
    assert {
        "linear_cross_entropy: also='linear_cross_entropy' replaces it",
        "attention: also='attention' replaces it",
    } <= rows
    rows = ours.replace(made(llama), also="linear_cross_entropy", without="cross_entropy")
    assert rows.rows[0].reason == "linear_cross_entropy: its loss is not selected"
    assert [row.operator for row in ours.replace(made(llama), only="attention") if row.operator] == ["attention"] * 2
    model = made(gpt2)
    model.lm_head = nn.Sequential(model.lm_head)
    rows = ours.replace(model, also="linear_cross_entropy")
    assert rows.rows[0].reason == "linear_cross_entropy: its head is a Sequential, expected Linear"


def test_what_is_asked_for_and_not_found_has_a_row():
    rows = ours.replace(nn.Linear(4, 4), also=("attention", "linear_cross_entropy"))
    why = "asked for, and no module's forward is known to compute it"
    assert [row.reason for row in rows][1:] == [f"attention: {why}", f"linear_cross_entropy: {why}"]
    assert len(ours.replace(nn.Linear(4, 4), also="attention", without="attention")) == 1
    model = made(llama)
    ours.replace(model, also="attention")
    assert not [row for row in ours.replace(model, also="attention") if "asked for" in row.reason]


def test_rotary_embeddings_and_heads_of_other_versions_are_known():
    """Each reference, as a method of a class, with a name for the one in capitals."""
    for maker in rotations._MAKERS:
        rotary = type("Rotary", (nn.Module,), {"forward": torch.no_grad()(renamed(maker))})
        assert rotations.without_halves(rotary()) == ""
    for form in heads.HEADS:
        forward = renamed(form.methods["forward"], MODEL="model", HEAD="lm_head")
        found, names = heads.head_of(type("Model", (nn.Module,), {"forward": forward}))
        assert found.options == form.options
        assert dict(names) == {"MODEL": "model", "HEAD": "lm_head"}
        clipped = renamed(forward, hidden_states="attentions")
        assert heads.head_of(type("Model", (nn.Module,), {"forward": clipped})) is None


def test_a_table_of_attentions_that_is_read_by_its_keys():
    """As transformers before 5.0 does."""
    transformers()
    theirs = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    calls = importlib.import_module("aotops.frontends.torch.replaced_globals")
    assert calls.CALLED["attention"].ours(theirs)["sdpa"] is calls._attention


def test_rotary_embeddings_of_other_versions_make_equal_halves():
    rotary = types.SimpleNamespace(inv_freq=torch.tensor([1.0, 0.1, 0.01]), attention_scaling=0.5)
    x, positions = torch.zeros(2, 7, 6, dtype=torch.bfloat16), torch.arange(7).expand(2, 7)
    expected = rotations._cosines_and_sines(rotary, x, positions)
    for maker in rotations._MAKERS:
        forward = types.FunctionType(maker.__code__, maker.__globals__ | {"maybe_autocast": torch.autocast})
        for a, b in zip(forward(rotary, x, positions), expected, strict=True):
            torch.testing.assert_close(a, b)
            assert torch.equal(a[..., :3], a[..., 3:])


def renamed(function, **names):
    """A function with other names of attributes."""
    code = function.__code__.replace(co_names=tuple(names.get(n, n) for n in function.__code__.co_names))
    return types.FunctionType(code, function.__globals__, "forward", function.__defaults__)


def test_a_rotation_whose_cosines_are_not_known_is_left():
    layer = made(llama).model.layers[0]
    found = [row.reason for row in ours.replace(layer) if row.module == "LlamaAttention"]
    assert "rope: no rotary embedding that is known makes its cosines and sines" in found
    model = made(llama)

    class Rotary(type(model.model.rotary_emb)):
        def forward(self, x, position_ids):
            return tuple(t.clamp(-0.5, 0.5) for t in super().forward(x, position_ids))

    model.model.rotary_emb.__class__ = Rotary
    found = [row.reason for row in ours.replace(model) if row.module == "LlamaAttention"]
    assert "rope: the cosines and sines of Rotary may be others" in found


def test_a_rotation_that_is_not_known_is_left():
    layer = made(llama).model.layers[0].self_attn
    forward = type(layer).forward
    patched = types.FunctionType(
        forward.__code__, forward.__globals__ | {"apply_rotary_pos_emb": lambda *args: args[:2]}, "forward"
    )
    layer.__class__ = type("Patched", (type(layer),), {"forward": patched})
    assert "rope: its apply_rotary_pos_emb is not a known one" in [row.reason for row in ours.replace(layer)]


def test_rotations_of_all_calls():
    """Layouts, dtypes that are promoted, and calls that the original function serves."""
    transformers()
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    theirs = module.apply_rotary_pos_emb
    mine = importlib.import_module("aotops.frontends.torch.replaced_globals").CALLED["rope"].ours(theirs)
    torch.manual_seed(0)
    angles = torch.randn(2, 5, 4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    for dtypes in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        q, k = torch.randn(2, 5, 3, 8).to(dtypes[0]), torch.randn(2, 5, 1, 8).to(dtypes[0])
        table = cos.to(dtypes[1]), sin.to(dtypes[1])
        for given in (
            (q, k, *table, 2),
            (q.transpose(1, 2), k.transpose(1, 2), *table),
            (q.transpose(1, 2).contiguous(), k.transpose(1, 2), *(t[:1] for t in table), 1),
            (q, k, *(t[:1] for t in table), 2),
            (q[:, :, 0], k[:, :, 0], *(t[0] for t in table), 0),
            (q, k, *(t.requires_grad_() for t in table), 2),
        ):
            for a, b in zip(mine(*given), theirs(*given), strict=True):
                torch.testing.assert_close(a, b)
                assert a.stride() == b.stride()


def blocks():
    """A norm and a network of each model that has them."""
    block, layer, encoder = made(gpt2).transformer.h[0], made(llama).model.layers[0], made(bert).bert.encoder.layer[0]
    yield block.ln_1, block.mlp, {"layer_norm", "gelu"}
    yield layer.input_layernorm, layer.mlp, {"rms_norm", "swiglu"}
    yield encoder.attention.output.LayerNorm, encoder.intermediate, {"layer_norm", "linear"}


def test_replaced_modules_are_traced_as_operators():
    for norm, network, operators in blocks():
        model, x, seen = nn.Sequential(norm, network), torch.randn(2, 5, 32), set()
        before = model(x)
        ours.replace(model)

        def backend(graph, _, seen=seen):
            seen.update(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        torch._dynamo.reset()  # it compiles a function, such as a container's forward, eight times at most
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=backend)(x), before)
        assert {f"aotops.{name}.default" for name in operators} <= seen


def computed_by(module, *shape, device="cuda", dtype=torch.bfloat16):
    """The operators of the library that a call of a replaced module runs, without running it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.device("meta"):
        module = module().to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        module.to_empty(device=device)
        ours.replace(module)
        graph = make_fx(lambda x: module(x))(torch.empty(shape, device=device, dtype=dtype)).graph
    return [node.target.name() for node in graph.nodes if "aotops" in str(node.target)]


def test_products_of_uneven_sizes():
    def linear(inputs, outputs):
        return lambda: nn.Linear(inputs, outputs)

    assert computed_by(linear(768, 2001), 2, 64, 768) == ["aotops::linear"]
    assert computed_by(linear(1023, 2048), 64, 1023) == ["aotops::linear"]
    assert computed_by(linear(768, 2000), 128, 768) == []
    assert computed_by(linear(768, 1001), 128, 768) == []  # a small one
    assert computed_by(linear(768, 2001), 63, 768) == []
    assert computed_by(linear(768, 2001), 128, 768, dtype=torch.float32) == []
    assert computed_by(linear(768, 2001), 128, 768, device="cpu") == []
    (row,) = ours.replace(nn.Linear(768, 2001))
    assert row.operator == "linear"
    assert ours.replace(nn.Linear(768, 2001), without="linear").rows[0].reason == "not selected"


def test_activations_apart_from_products_where_that_is_faster(monkeypatch):
    """They are few rows, or a transposed weight, which the kernel would copy."""

    def mlp(build, place):
        return lambda: made(build).get_submodule(place)

    plain, transposed = mlp(bert, "bert.encoder.layer.0.intermediate"), mlp(gpt2, "transformer.h.0.mlp")
    assert computed_by(plain, 2, 32, device="cpu", dtype=torch.float32) == ["aotops::linear"]
    assert computed_by(plain, 1, 32, device="cpu", dtype=torch.float32) == ["aotops::gelu"]
    assert computed_by(transposed, 512, 32, device="cpu", dtype=torch.float32) == ["aotops::gelu"]
    assert computed_by(plain, 1, 32) == ["aotops::linear"]
    products = importlib.import_module("aotops.frontends.torch.replaced_products")
    with monkeypatch.context() as patch:
        patch.setattr(products, "is_compiling", lambda: True)
        assert computed_by(plain, 255, 32) == ["aotops::gelu"]
        assert computed_by(plain, 256, 32) == ["aotops::linear"]
    assert computed_by(transposed, 511, 32) == ["aotops::gelu"]
    assert computed_by(transposed, 2, 256, 32) == ["aotops::linear"]


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x, chosen):
        return self.mlp(x[chosen])


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_rows_that_no_trace_knows():
    x, chosen = torch.randn(8, 64), torch.arange(8) % 3 == 0
    model = Chosen()
    expected = model(x, chosen)
    ours.replace(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    exported = torch.export.export(model, (x, chosen), strict=False).module()
    for run in (model, compiled, exported):
        torch.testing.assert_close(run(x, chosen), expected)
    torch.testing.assert_close(exported(x, chosen & (torch.arange(8) < 1)), model(x, chosen & (torch.arange(8) < 1)))


def test_a_head_of_uneven_sizes_that_is_replaced():
    """It is known as a head, copied and restored."""
    model = made(llama).train()
    model.lm_head = nn.Linear(32, 40_001)
    model.config.vocab_size = 40_001
    with ours.replace(model) as record:
        assert ("lm_head", "linear") in [(row.name, row.operator) for row in record]
        tokens = torch.arange(8).view(1, 8)
        before = model(input_ids=tokens, labels=tokens)
        again = copy.deepcopy(model)
        ours.replace(again, also="linear_cross_entropy")
        after = again(input_ids=tokens, labels=tokens)
        torch.testing.assert_close(after.loss, before.loss)
        assert before.logits is not None
        assert after.logits is None
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("build", [llama, bert, vit])
def test_layers_that_are_checkpoints(build):
    """Transformers puts a checkpoint around the forward, or the call, of a layer: of a replaced one too, and once."""
    expected = trained(made(build).train(), build)
    model, runs = made(build).train(), []
    assert any(row.operator == "add_norm" for row in ours.replace(model))
    model.gradient_checkpointing_enable()
    for name, module in model.named_modules():
        if name.endswith(("mlp", "intermediate")):
            module.register_forward_pre_hook(lambda module, args: runs.append(module))
    torch.testing.assert_close(trained(model, build), expected, rtol=1e-4, atol=1e-6)
    assert len(runs) == 4  # two layers, each forward and again in the backward


def test_the_compiler_fuses_norms_on_a_gpu(monkeypatch):
    """It is left what it makes one kernel of with the sums around it."""
    classes = importlib.import_module("aotops.frontends.torch.replaced_classes")
    for module in (lambda: nn.LayerNorm(8), lambda: nn.RMSNorm(8, eps=1e-5), lambda: nn.Softmax(-1)):
        assert len(computed_by(module, 2, 8)) == 1
        with monkeypatch.context() as patch:
            patch.setattr(classes, "is_compiling", lambda: True)
            assert computed_by(module, 2, 8) == []
            assert len(computed_by(module, 2, 8, device="cpu")) == 1


def test_a_replaced_model_is_compiled():
    model = made(llama)
    del model.model.layers[1:]
    before = trained(model, llama)
    ours.replace(model)
    after = trained(torch.compile(model, fullgraph=True), llama)
    assert max(error(after, before)) < 1e-5


@pytest.mark.parametrize("build", [qwen, gpt2, bert])
def test_a_model_whose_forward_is_replaced_is_compiled(build):
    """The head and attention of qwen and gpt2, and the loss that bert makes at each call."""
    model = made(build).train()
    before = trained(model, build)
    ours.replace(model, also=ALSO)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert max(error(trained(compiled, build), before)) < 1e-5


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapper


def test_a_loss_that_a_forward_makes():
    """Decorators stay. One that holds what it wraps elsewhere is not known."""

    def forward(self, x, target):
        return CrossEntropyLoss(label_smoothing=self.smoothing)(x, target)  # noqa: F821

    forward = types.FunctionType(forward.__code__, {"CrossEntropyLoss": nn.CrossEntropyLoss}, "forward")
    x, target = torch.randn(4, 5), torch.tensor([0, 1, 2, -100])
    for wrapped, operator in ((decorated(decorated(forward)), "cross_entropy"), (functools.partial(forward), None)):
        model = type("Model", (nn.Module,), {"forward": wrapped})()
        model.smoothing = 0.1
        record = ours.replace(model)
        assert record.rows[0].operator == operator
        if operator:
            expected = 4 * nn.functional.cross_entropy(x, target, label_smoothing=0.1)
            torch.testing.assert_close(model(x, target), expected)
    assert ours.replace(made(bert), without="cross_entropy").rows[0].reason == "cross_entropy: not selected"


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_the_benchmark_runs(name, tmp_path, monkeypatch):
    transformers()
    monkeypatch.setattr(replaced, "WARM_UP", 1)
    impls, file = [i for i in replaced.IMPLS if i != "liger"], tmp_path / "rows.json"
    for _ in range(2):  # rows take the place of the same ones
        replaced.main(
            [name, "--tiny", "--modes", "eager", "--steps", "2", "--impls", ",".join(impls), "--json", str(file)]
        )
    found = json.loads(file.read_text())["rows"]
    has_head = name == "llama"
    assert [row["impl"] for row in found] == [i for i in impls if has_head or i != "aotops_head"]
    for row, ratio, apart, _ in replaced.differences(found):
        assert len(row["losses"]) == 4
        assert ratio > 0
        assert apart < 0.02 * row["losses"][0]  # a loss may have 16 bits


# --------------------------------------------------------------------------------------------------------------- forms


class Held(nn.Module):
    """A module of a form: the attributes of all, by the names that the references have."""

    def __init__(self, width=8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.bias = nn.Parameter(torch.randn(width))
        self.EPS = self.eps = 0.1
        self.normalized_shape = (width,)
        self.with_scale, self._fast_norm = True, False
        self.FUNCTION = functools.partial(nn.functional.gelu, approximate="tanh")


def of_form(form):
    return type("Held", (Held,), dict(form.methods))()


SINGLE = [f for f in known.FORMS if f.kind in ("rms_norm", "layer_norm", "gelu")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("form", SINGLE, ids=lambda form: form.methods["forward"].__name__)
def test_a_form_computes_what_its_reference_computes(form, wide_weight, dtype):
    if form.kind == "layer_norm" and wide_weight and dtype is torch.float16:
        pytest.skip("torch has no such mixture")
    torch.manual_seed(0)
    module = of_form(form)
    module = module if wide_weight else module.to(dtype)
    x = torch.randn(3, 4, 8).to(dtype).requires_grad_()
    given = [x, *(p for p in module.parameters())]

    def results():
        try:
            y = module(x)
        except RuntimeError as error:
            return str(error)
        return [y.detach(), *torch.autograd.grad(y.double().square().sum(), given, allow_unused=True)]

    before = results()
    record = ours.replace(module)
    assert [row.operator for row in record] == [form.kind]
    after = results()
    if isinstance(before, str):
        assert after == before
        return
    tolerance = {"rtol": 5e-2, "atol": 0.25} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-4}
    for a, b in zip(after, before, strict=True):
        if b is not None:  # dtypes too
            torch.testing.assert_close(a, b, **tolerance)


def llama_forward(self, hidden):
    """A docstring, types and other names of variables make no other form."""
    its_dtype: torch.dtype = hidden.dtype
    hidden = hidden.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden.to(its_dtype)


def another_constant(self, x):
    input_dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-2, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * x.to(input_dtype)


def another_function(self, x):
    input_dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.sqrt(variance + self.variance_epsilon)
    return self.weight * x.to(input_dtype)


def one_more(self, x, scale=1):
    input_dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * x.to(input_dtype)


def norm_class(forward):
    def init(self):
        nn.Module.__init__(self)
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    return type("LlamaRMSNorm", (nn.Module,), {"__init__": init, "forward": forward})


def elsewhere(function):
    """The function where ``torch`` means something else."""
    fake = types.SimpleNamespace(float32=torch.float32, rsqrt=torch.sqrt)
    return types.FunctionType(function.__code__, {"torch": fake})


def test_a_name_makes_no_form():
    assert ours.replace(norm_class(llama_forward)()).rows[0].operator == "rms_norm"
    for forward in (another_constant, another_function, one_more, elsewhere(llama_forward)):
        module = norm_class(forward)()
        cls = type(module)
        assert ours.replace(module).rows == [("", "LlamaRMSNorm", None, "no operator has its forward")]
        assert type(module) is cls


def difference(x, y):
    return x - y


def turned_difference(x, y):
    return y - x


def test_a_function_of_arguments_in_another_order_is_another():
    assert named(difference, lambda a, b: a - b) == {}
    assert named(turned_difference, difference) is None


class Doubled(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Clipped(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight, bias).clamp(-1, 1)


class Renamed(nn.GELU):
    pass


def test_a_subclass_is_known_by_its_forward():
    model = nn.Sequential(Doubled(8), Clipped(3, 4, 1), Renamed())
    assert [row.operator for row in ours.replace(model)] == [None, None, "gelu"]
    assert isinstance(model[2], Renamed)
    assert type(model[0]) is Doubled


# --------------------------------------------------------------------------------------------------------- what is left


def reasons(model, **options):
    return {row.module: row.reason for row in ours.replace(model, **options) if row.operator is None}


def test_what_is_left_and_why():
    transformers()
    clip = transformers().CLIPTextModel(
        transformers().CLIPTextConfig(**SIZE, hidden_act="quick_gelu", bos_token_id=0, eos_token_id=0, pad_token_id=0)
    )
    assert "QuickGELUActivation, or has hooks: expected GELU, SiLU or ReLU" in reasons(clip)["CLIPMLP"]
    module = nn.LayerNorm(4)
    module.forward = lambda x: x
    assert reasons(module) == {"LayerNorm": "its forward is the instance's own"}
    module = norm_class(llama_forward)()
    module.weight = nn.Parameter(torch.ones(1))  # broadcast
    assert reasons(module) == {"LlamaRMSNorm": "its weight has shape (1,), expected one axis"}
    module.variance_epsilon = nn.Parameter(torch.ones(8))
    assert reasons(module) == {"LlamaRMSNorm": "its variance_epsilon is a Parameter, expected a float"}
    assert reasons(nn.LayerNorm(4), without="layer_norm") == {"LayerNorm": "not selected"}
    assert reasons(nn.Sequential(nn.GELU(), nn.LayerNorm(4)), only=["gelu"]) == {"LayerNorm": "not selected"}
    assert reasons(nn.Linear(4, 4)) == {"Linear": "a product alone: torch's uses cuBLASLt too"}

    class Counted(nn.LayerNorm):
        def __init_subclass__(cls):
            raise AssertionError

    assert "in a way of its own" in reasons(Counted(4))["Counted"]


def test_lazy_modules_are_left_until_their_first_call():
    model = nn.Sequential(nn.LazyLinear(8), nn.GELU(), nn.LazyConv2d(2, 3))
    reasons = {row.name: row.reason for row in ours.replace(model)}
    assert reasons.keys() == {"0", "1", "2"}
    for name in ("0", "2"):
        assert reasons[name] == "its parameters are made at its first call: replace it after that"
    x = torch.randn(2, 3, 5, 5)
    y = model(x)
    assert [type(module) for module in model][::2] == [nn.Linear, nn.Conv2d]
    ours.restore(model)
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5)


def test_arguments():
    with pytest.raises(TypeError, match=r"replace: model has type list, expected torch\.nn\.Module"):
        ours.replace([])
    with pytest.raises(ValueError, match="replace: only has 'norms', expected layer_norm, rms_norm"):
        ours.replace(nn.GELU(), only=["norms"])
    with pytest.raises(ValueError, match="replace: without has 'gelus'"):
        ours.replace(nn.GELU(), without="gelus")


# ----------------------------------------------------------------------------------------- what stays, and the way back


def test_state_names_hooks_and_classes_stay():
    model = made(gpt2)
    before = {name: id(p) for name, p in model.named_parameters()}
    state, text, classes = [*model.state_dict()], repr(model), [type(m) for m in model.modules()]
    calls = []
    norm, mlp = model.transformer.h[0].ln_1, model.transformer.h[0].mlp
    norm.register_forward_hook(lambda *_: calls.append("norm"))
    with ours.replace(model) as record:
        assert (before, state, text) == (
            {name: id(p) for name, p in model.named_parameters()},
            [*model.state_dict()],
            repr(model),
        )
        assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes, strict=True))
        assert type(mlp) is not classes[0]
        loss_of(model, gpt2)
        assert calls == ["norm"]
        handles = [m.register_forward_hook(lambda *_: calls.append("inner")) for m in (mlp.c_fc, mlp.act)]
        loss_of(model, gpt2)
        assert calls == ["norm", "norm", "inner", "inner"]
        for handle in handles:
            handle.remove()
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, *_: calls.append("any") if m is mlp.c_fc else None
        )
        loss_of(model, gpt2)
        handle.remove()
        assert calls[4:] == ["norm", "any"]
        table = [line.split() for line in str(record).split("\n")]
        assert ["layer_norm", "2", "transformer.h.*.ln_1", "LayerNorm"] in table
    assert [type(m) for m in model.modules()] == classes
    assert "_loss_function" not in vars(model)
    record.restore()
    assert [type(m) for m in model.modules()] == classes


def test_a_child_that_is_exchanged_is_called():
    model = made(llama)
    ours.replace(model)
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 32)
    mlp.act_fn = nn.Tanh()
    expected = mlp.down_proj(torch.tanh(mlp.gate_proj(x)) * mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), expected)
    other = made(gpt2)
    ours.replace(other)
    mlp = other.transformer.h[0].mlp
    mlp.c_fc = nn.Sequential(nn.Linear(32, 128), nn.Tanh())
    torch.testing.assert_close(mlp(x), mlp.c_proj(mlp.act(mlp.c_fc(x))))


@pytest.mark.parametrize("also", [(), ALSO])
def test_dtypes_may_change_and_autocast_computes_in_the_dtypes_of_the_model(also):
    for build in (llama, bert, gpt2):
        model = made(build).train()
        with torch.autocast("cpu", torch.bfloat16):
            before = loss_of(model, build)
        ours.replace(model, also=also)
        with torch.autocast("cpu", torch.bfloat16):
            after = loss_of(model, build)
        assert after.dtype == before.dtype
        torch.testing.assert_close(after, before, rtol=0.02, atol=0.02)
        for dtype in (torch.float64, torch.bfloat16):
            assert abs(loss_of(model.to(dtype), build).item() - before.item()) < 0.05


def test_norms_have_the_dtypes_of_the_original_in_mixed_precision():
    """The weight of LlamaRMSNorm promotes, and torch's layer_norm takes float32 under autocast on a GPU."""
    module = norm_class(llama_forward)()
    ours.replace(module)
    assert module(torch.randn(3, 8, dtype=torch.bfloat16)).dtype == torch.float32
    assert module.bfloat16()(torch.randn(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("also", [(), ALSO])
def test_copies_and_files(also):
    model = made(llama).train()
    ours.replace(model, also=also)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert other.model.norm is not model.model.norm
        torch.testing.assert_close(loss_of(other, llama), loss_of(model, llama))
        ours.restore(other)
        assert type(other.model.norm) is type(model.model.norm).__mro__[1]
        assert "_loss_function" not in vars(other)
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"


def test_twice():
    model = nn.Sequential(nn.LayerNorm(4), nn.GELU())
    first = ours.replace(model, only="gelu")
    second = ours.replace(model)
    assert [row.operator for row in second] == ["layer_norm", None]
    assert second.rows[1].reason == "replaced already"
    second.restore()
    assert type(model[0]) is nn.LayerNorm
    assert type(model[1]) is not nn.GELU
    first.restore()
    assert type(model[1]) is nn.GELU
    ours.replace(model)
    first.restore()  # of its own replacement, which is over
    assert type(model[1]) is not nn.GELU


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_parametrizations():
    """Before and after: torch makes a subclass too, whose attribute is the weight."""
    x = torch.randn(3, 4)
    for before in (True, False):
        module = nn.LayerNorm(4)
        record = None if before else ours.replace(module)
        nn.utils.parametrize.register_parametrization(module, "weight", Halved())
        record = record or ours.replace(module)
        torch.testing.assert_close(module(x), nn.functional.layer_norm(x, (4,)) / 2)
        if not before:
            with pytest.raises(RuntimeError, match="ParametrizedLayerNorm, made of the replaced one"):
                record.restore()
            nn.utils.parametrize.remove_parametrizations(module, "weight")
        record.restore()
        assert type(module).__name__ == ("ParametrizedLayerNorm" if before else "LayerNorm")


def test_other_modules_of_torch():
    torch.manual_seed(0)
    x, target = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    weight = torch.rand(5)
    for module, given in (
        (nn.Softmax(-1), (x,)),
        (nn.RMSNorm(5), (x,)),
        (nn.RMSNorm(5).bfloat16(), (x.bfloat16(),)),
        (nn.CrossEntropyLoss(), (x, target)),
        (nn.CrossEntropyLoss(weight, ignore_index=2, label_smoothing=0.1), (x, target)),
    ):
        expected = module(*given)
        assert ours.replace(module).rows[0].operator
        torch.testing.assert_close(module(*given), expected)


class NewGELU(nn.Module):
    def forward(self, input):
        return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))))


class Quantized(torch.Tensor):
    """As others' weights: it gives torch's linear a meaning of its own, and no other operator."""

    @staticmethod
    def __new__(cls, integers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=torch.float32)

    def __init__(self, integers, scale):
        self.integers, self.scale = integers, scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, bias = args
            return function(x, weight.integers * weight.scale, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def with_a_weight(weight):
    network = Network()
    network.up.weight = nn.Parameter(weight, requires_grad=False)
    return network


def test_tensors_of_which_no_operator_is_known_are_the_originals():
    """Nested and quantized ones, integers, and weights that are sparse or of a class of others'."""
    torch.manual_seed(0)
    rows, integers = torch.randn(4, 5), torch.randint(-9, 9, (7, 5))
    nested = torch.nested.nested_tensor([rows, rows[:2]])
    ragged = torch.nested.nested_tensor([rows, rows[:2]], layout=torch.jagged)
    for module, x in (
        *((module, x) for module in (nn.LayerNorm(5), nn.GELU(), nn.Softmax(-1)) for x in (nested, ragged)),
        (nn.GELU(), torch.quantize_per_tensor(rows, 0.1, 0, torch.quint8)),
        (NewGELU(), integers),
        (norm_class(llama_forward)(), torch.arange(8, dtype=torch.int16)),
        (with_a_weight(Quantized(integers, 0.1)), rows),
        (with_a_weight((integers * 0.1).to_sparse_csr()), rows),
    ):
        with torch.no_grad():
            expected = module(x)
            with ours.replace(module) as record:
                assert record.rows[0].operator
                got = module(x)
        assert type(got) is type(expected)
        for a, b in zip(got.unbind(), expected.unbind(), strict=True) if got.is_nested else ((got, expected),):
            torch.testing.assert_close(a, b)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
def test_autocast_gives_the_dtypes_of_the_original(where):
    def dtypes(module):
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            try:
                with torch.autocast(where, torch.bfloat16):
                    found.append(module(torch.randn(2, 32, device=where, dtype=dtype)).dtype)
            except RuntimeError as error:
                found.append(str(error))
        return found

    half = made(bert).bert.encoder.layer[0].intermediate
    half.intermediate_act_fn = made(gpt2).transformer.h[0].mlp.act
    modules = [half, nn.LayerNorm(32), nn.RMSNorm(32), nn.Softmax(-1), nn.GELU()]
    for module in (*modules, *(module for block in blocks() for module in block[:2])):
        before = dtypes(module.to(where))
        ours.replace(module)
        assert dtypes(module) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("build", MODELS)
def test_on_a_gpu_in_16_bits(build, autocast):
    """Convolutions, and products with their activations, of 16 bits are replaced there alone."""
    model = made(build).cuda()
    model = model if autocast else model.bfloat16()
    exact = trained(copy.deepcopy(model).cpu().double(), build)

    def found():
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss, gradients = trained(model, build)
        return loss.cpu(), gradients.cpu()

    before = found()
    ours.replace(model)
    for mine, its in zip(error(found(), exact), error(before, exact), strict=True):
        assert mine <= 2 * its + TOLERANCE[torch.bfloat16]


SHARDED = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from aotops.frontends import torch as F


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.fc2(x)
        return x


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), Mlp())


def gradients(model):
    model(x).square().sum().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def shard(model):
    for layer in (model[1].fc1, *model, model):
        fully_shard(layer, mesh=mesh)


distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
mesh = distributed.init_device_mesh("cpu", (1,))
x = torch.randn(4, 8)
expected = gradients(model())
replaced = model()
F.replace(replaced)
before, after = model(), model()
assert [row.operator for row in F.replace(before)] == ["layer_norm", "linear", None, "gelu", None]
shard(before)
shard(after)
assert [row.operator for row in F.replace(after)][:2] == ["layer_norm", None], "a sharded fc1 has hooks"
for mine in (DistributedDataParallel(replaced), before, after):
    for a, b in zip(gradients(mine), expected, strict=True):
        torch.testing.assert_close(a, b)
"""


def test_data_parallel_and_sharded_models(python):
    if not torch.distributed.is_available():
        pytest.skip("torch has no distributed")
    python(SHARDED)
