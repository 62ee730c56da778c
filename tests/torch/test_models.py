"""benchmarks/models in torch: both flavours compute the same, and the command writes what it measures."""

import json
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import aotops  # noqa: E402
from benchmarks.models import __main__ as command  # noqa: E402
from benchmarks.models import data, kernels, parameters, spec, torch_train  # noqa: E402
from benchmarks.models.operators import FLAVOURS  # noqa: E402
from benchmarks.models.torch_models import MODELS, build  # noqa: E402


def gradients(name, flavour, compiled):
    """The loss and the gradients of the tiny model."""
    size = spec.SIZES[name][1]
    model = build(name, FLAVOURS[flavour], size, torch.float64, "cpu")  # batch norm of a tiny batch magnifies rounding
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # no gradient that is lost beside others, and norms of weight other than 1
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    (batch,) = torch_train.on_device(data.batches(name, size, 1), model)
    loss = (torch.compile(model, backend="aot_eager") if compiled else model)(*batch)
    loss.backward()
    return {"loss": loss.detach()} | {key: p.grad for key, p in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_flavours_agree(name):
    expected = gradients(name, "torch", compiled=False)
    assert expected["loss"] > 1
    assert all(grad.abs().max() > 1e-4 for grad in expected.values())
    for compiled in (False, True):
        found = gradients(name, "aotops", compiled)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}")


def spec_of(impl):
    return spec.Spec("gpt2", impl, "bfloat16", timed=10, tiny=True)


def test_a_row():
    rows = {flavour: [torch_train.measure(spec_of(flavour)) | {"cold": True} for _ in range(2)] for flavour in FLAVOURS}
    merged = command.merged_rounds(spec_of("aotops"), rows["aotops"])
    assert merged["same_bits"]
    assert len(merged["rounds"]) == 2
    assert len(merged["losses"]) == spec_of("aotops").trained == 12
    assert merged["losses"][-1] < merged["losses"][0]
    assert min(merged[key] for key in ("ms", "wall_ms", "host_ms", "tokens_per_s")) > 0
    assert abs(merged["loss"] - rows["torch"][0]["loss"]) < 0.02
    other = command.merged_rounds(spec_of("torch"), [rows["torch"][0], rows["aotops"][0]])
    assert not other["same_bits"]


def test_a_step_holds_the_loss_of_the_one_before(monkeypatch):
    """As a user's loop does: what a loss keeps after its backward is part of the peak."""
    losses, alive, build_model = [], [], torch_train.build_model

    def watched(*args):
        model = build_model(*args)
        model.register_forward_pre_hook(lambda *_: alive.append([one() is not None for one in losses]))
        model.register_forward_hook(lambda model, given, loss: losses.append(weakref.ref(loss)))
        return model

    monkeypatch.setattr(torch_train, "build_model", watched)
    torch_train.measure(spec.Spec("gpt2", "aotops", "float32", timed=2, tiny=True))
    assert len(alive) > 3
    assert all(held == [False] * (len(held) - 1) + [True] for held in alive[1:])


def test_command(tmp_path):
    file = tmp_path / "models.json"
    kept = {"framework": "torch", "model": "bert", "impl": "torch", "precision": "autocast", "tiny": False}
    kept["deterministic"] = False
    head = {"device": "a GPU", "date": "then", "command": "an earlier one", "versions": {"jax": "0", "python": "3"}}
    command.save(head | {"rows": [kept]}, file)
    command.main(["gpt2", "--tiny", "--steps", "4", "--impls", "aotops", "--json", str(file), "--merge"])
    result = json.loads(file.read_text())
    assert [(row["model"], row["impl"]) for row in result["rows"]] == [("bert", "torch"), ("gpt2", "aotops")]
    assert result["command"].startswith("an earlier one; python -m benchmarks.models gpt2")
    assert result["versions"] == head["versions"] | {"torch": torch.__version__, "aotops": aotops.__version__}
    assert (result["device"], result["date"]) == ("a GPU", "then")  # tiny rows' do not count
    large = result | {"device": "cpu", "rows": [kept]}
    with pytest.raises(ValueError, match="two devices: a GPU and cpu"):
        command.merge(result, large)


def test_rows_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # restored, whatever the command sets
    file = tmp_path / "models.json"
    command.main(["gpt2", "--tiny", "--steps", "4", "--impls", "torch,aotops", "--at-once", "2", "--json", str(file)])
    result = json.loads(file.read_text())
    assert {row["impl"] for row in result["rows"]} == {"torch", "aotops"}
    assert result["command"].count("--at-once") == 1  # a run is one command, however many jobs it has
    assert not any("first_step_s" in row for row in result["rows"])  # another process ran beside it


def test_parameters_are_those_of_the_model():
    size = spec.SIZES["gpt2"][1]
    model = build("gpt2", FLAVOURS["torch"], size, torch.float32, "cpu")
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameters.gpt2_shapes(size)


def test_adamw_in_jax_is_that_of_torch():
    jax_gpt2 = pytest.importorskip("benchmarks.models.jax_gpt2", exc_type=ImportError)
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 100.0]))
    optimizer = torch.optim.AdamW([p], spec.LEARNING_RATE, weight_decay=spec.WEIGHT_DECAY)
    found, m, v = p.detach().numpy().copy(), np.zeros(3, np.float32), np.zeros(3, np.float32)
    for step in (1, 2, 3):
        p.grad = torch.tensor([0.5, -1e-3, 0.0]) * step
        optimizer.step()
        found, m, v = jax_gpt2.adamw(step, found, m, v, p.grad.numpy())
    np.testing.assert_allclose(found, p.detach().numpy(), rtol=5e-7)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT", "products"),
        ("void aot::baseline::gemm_kernel<float>(aot::Problem)", "products"),
        ("void pytorch_flash::flash_bwd_kernel<Flash_bwd_kernel_traits<64, cutlass::bfloat16_t>>", "attention"),
        ("triton_red_fused_native_layer_norm_3", "triton"),
        ("void aot::baseline::norm_kernel<float, 4>(float const*)", "aotops"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, aot_other>", "other"),
    ],
)
def test_classes_of_kernels(kernel, expected):
    assert kernels.class_of(kernel) == expected
