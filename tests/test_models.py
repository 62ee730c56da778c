"""The models of benchmarks/models: both flavours compute the same, and the command writes what it measures."""

import json

import pytest

torch = pytest.importorskip("torch")

from benchmarks.models import __main__ as command  # noqa: E402
from benchmarks.models import data, kernels, train  # noqa: E402
from benchmarks.models.operators import FLAVOURS  # noqa: E402
from benchmarks.models.torch_models import MODELS, build  # noqa: E402


def gradients(name, flavour, compiled):
    """The loss and the gradients of the tiny model."""
    size = MODELS[name][2]
    model = build(name, FLAVOURS[flavour], size, torch.float32, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():  # no gradient that is lost beside others, and norms of weight other than 1
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    batch = [torch.from_numpy(array) for array in data.batches(name, size, 1)[0]]
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
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def spec_of(impl):
    return train.Spec("gpt2", impl, "bfloat16", timed=4, tiny=True)


def test_a_row():
    rows = {
        flavour: [train.measure(spec_of(flavour), "cpu") | {"cold": True} for _ in range(2)] for flavour in FLAVOURS
    }
    merged = command.merged_rounds(spec_of("aotops"), rows["aotops"])
    assert merged["same_bits"]
    assert len(merged["rounds"]) == 2
    assert len(merged["losses"]) == train.TRAINED_TINY
    assert merged["losses"][-1] < merged["losses"][0]
    assert min(merged[key] for key in ("ms", "wall_ms", "host_ms", "tokens_per_s")) > 0
    assert abs(merged["loss"] - rows["torch"][0]["loss"]) < 0.02
    other = command.merged_rounds(spec_of("torch"), [rows["torch"][0], rows["aotops"][0]])
    assert not other["same_bits"]


def test_command(tmp_path):
    file = tmp_path / "models.json"
    kept = {"model": "bert", "impl": "torch", "precision": "autocast", "deterministic": False}
    command.save({"device": "cpu", "command": "an earlier one", "versions": {"jax": "0"}, "rows": [kept]}, file)
    command.main(["gpt2", "--tiny", "--steps", "4", "--impls", "aotops", "--json", str(file), "--merge"])
    result = json.loads(file.read_text())
    assert [(row["model"], row["impl"]) for row in result["rows"]] == [("bert", "torch"), ("gpt2", "aotops")]
    assert result["command"].startswith("an earlier one; python -m benchmarks.models gpt2")
    assert result["versions"]["torch"] == torch.__version__
    assert result["versions"]["jax"] == "0"


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
