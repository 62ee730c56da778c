"""aotops bench: what it counts, and that a short run writes what it says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from aotops.bench import report
from aotops.bench.work import WORKS, cases
from aotops.cli import main

ROW = {"op", "variant", "pass", "shape", "dtype", "impl", "us", "gbs", "of_copy", "host_us"}
X, N = 1024 * 4096, 4096


@pytest.mark.parametrize(
    ("name", "pass_", "elements"),
    [
        ("add", "forward", 3 * X),
        ("gelu tanh", "forward", 2 * X),
        ("gelu none", "backward", 3 * X),
        ("swiglu", "forward", 3 * X),
        ("swiglu", "backward", 5 * X),
        ("layer_norm", "forward", 2 * X + 2 * N),
        ("layer_norm", "backward", 3 * X + 3 * N),
        ("rms_norm", "forward", 2 * X + N),
        ("rms_norm", "backward", 3 * X + 2 * N),
        ("add_rms_norm", "forward", 4 * X + N),
        ("add_layer_norm", "backward", 4 * X + 3 * N),
        ("softmax", "backward", 3 * X),
    ],
)
def test_bytes_are_the_fewest(name, pass_, elements):
    work = next(work for work in WORKS if work.name == name)
    assert work.bytes(pass_, (1024, 4096), "bfloat16") == 2 * elements
    assert work.bytes(pass_, (1024, 4096), "float32") == 4 * elements


def test_bytes_of_cross_entropy():
    plain, fused = (work for work in WORKS if work.op == "cross_entropy")
    classes, scalar = 1024 * 8, 2
    assert plain.bytes("forward", (1024, 4096), "bfloat16") == 2 * X + classes + scalar
    assert plain.bytes("backward", (1024, 4096), "bfloat16") == 4 * X + classes + scalar
    assert fused.bytes("forward", (1024, 4096), "bfloat16") == 4 * X + classes + scalar


def test_bytes_and_operations_of_products():
    matmul, linear = (next(w for w in WORKS if w.name == name) for name in ("matmul", "linear gelu"))
    m, n, k = shape = (8, 4, 2)
    assert matmul.bytes("forward", shape, "bfloat16") == 2 * (m * k + k * n + m * n)
    assert linear.bytes("backward", shape, "bfloat16") == 2 * (2 * m * n + 2 * m * k + 2 * n * k + n)
    assert (matmul.flops("forward", shape), matmul.flops("backward", shape)) == (2 * m * n * k, 4 * m * n * k)
    assert WORKS[0].flops("forward", (8, 4)) == 0


def test_shapes_on_a_gpu():
    found = [case.shape for case in cases("cuda", ["bfloat16"], ["layer_norm"], passes=["forward"])]
    assert found[0] == (8, 256)
    assert {m * n for m, n in found[1:]} == {1 << 26, (1 << 26) // 768 * 768}
    assert [case.shape for case in cases("cuda", ["float32"], ["add"])] == [(8, 256), (1 << 26,)]


def test_a_run_writes_what_it_says(tmp_path, capsys):
    file = tmp_path / "out" / "bench.json"
    main(f"bench --device cpu --quick --ops add --impls aotops,numpy --shapes 8x256,64x128 --json {file}".split())
    result = json.loads(file.read_text())
    assert {"device", "copy_gbs", "versions", "date", "command", "rows"} <= result.keys()
    assert result["copy_gbs"] > 0
    assert result["versions"]["aotops"]
    shapes_and_impls = [(row["shape"], row["impl"]) for row in result["rows"]]
    assert shapes_and_impls == [(s, i) for s in ([8, 256], [64, 128]) for i in ("aotops", "numpy")]
    for row in result["rows"]:
        assert row.keys() - {"host_us_grad"} == ROW
        assert row["us"] > 0
        assert row["gbs"] > 0
        assert row["host_us"] > 0
    assert "add" in capsys.readouterr().out


def _result(impl, us):
    row = {"op": "gelu", "variant": "tanh", "pass": "forward", "shape": [1 << 26], "dtype": "bfloat16", "impl": impl}
    row |= {"us": us, "gbs": 4000.0, "of_copy": 0.95, "host_us": 5.0}
    return {"device": "a GPU", "copy_gbs": 4200.0, "versions": {impl: "1"}, "rows": [row]}


def test_results_are_merged(tmp_path, capsys):
    files = []
    for name, result in (("a", _result("aotops", 3.0)), ("b", _result("quack", 4.0)), ("c", _result("aotops", 2.0))):
        files.append(tmp_path / name)
        report.save(result, files[-1])
    main(["bench", "--impls", "none", "--json", str(tmp_path / "all"), "--merge", *map(str, files)])
    merged = json.loads((tmp_path / "all").read_text())
    assert [(row["impl"], row["us"]) for row in merged["rows"]] == [("aotops", 2.0), ("quack", 4.0)]
    assert merged["versions"] == {"aotops": "1", "quack": "1"}
    with pytest.raises(SystemExit):
        report.merged(merged, _result("aotops", 1.0) | {"device": "another"})


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    rows = _result("aotops", 3.0)["rows"]
    rows += [rows[0] | {"op": "softmax", "variant": "", "shape": [(1 << 26) // n, n]} for n in (1024, 4096)]
    report.draw(_result("aotops", 3.0) | {"rows": rows}, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gelu.png", "softmax.png"]


def test_the_command_needs_no_package_to_be_imported():
    heavy = "[m for m in ('numpy', 'torch', 'rich', 'matplotlib') if m in sys.modules]"
    code = f"import sys, aotops, aotops.cli; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
