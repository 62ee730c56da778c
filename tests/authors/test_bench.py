"""aotops bench: what it counts, and that a short run writes what it says."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from aotops import registry
from aotops.bench import baselines, measure, report
from aotops.bench.cases import Case, cases, find, rows, use, works
from aotops.bench.measure import Cpu, Cuda, samples, spread, wait_asleep
from aotops.bench.run import Bench
from aotops.bench.tensors import FRAMEWORKS
from aotops.bench.turns import Turns
from aotops.bench.work import (
    Along,
    Attention,
    Cell,
    Convolution,
    Decoding,
    Elements,
    Head,
    OddRows,
    Product,
    Projections,
    Rotations,
    Rows,
)
from aotops.cli import main as command
from aotops.library import LibraryError
from aotops.ops import OPS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200.json"
TINY = {
    Rows: (4, 6),
    OddRows: (4, 7),
    Along: (2, 5, 3),
    Elements: (24,),
    Product: (4, 6, 5),
    Head: (4, 6, 5),
    Convolution: (2, 6, 5, 4, 3, 2, 2),
    Cell: (3, 4, 5),
    Rotations: (2, 3, 2, 4),
    Projections: (2, 3, 2, 1, 4),
    Attention: (2, 3, 2, 1, 4),
    Decoding: (2, 3, 2, 1, 4),
}
ROW = {"op", "variant", "pass", "shape", "dtype", "impl", "us", "gbs", "of_copy", "date"}
X, N = 1024 * 4096, 4096
WORKS = works()


@pytest.fixture(autouse=True)
def _copies_are_small(monkeypatch):
    """Copies of 256 MiB would be most of what a run takes here. That of test_waiting_threads_sleep has them."""
    monkeypatch.setattr(Cpu, "COPIED", 1 << 22)


def main(arguments):
    command(arguments, standalone_mode=False)


def work_of(name):
    return next(work for work in WORKS if work.name == name)


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
    work = work_of(name)
    assert work.bytes(pass_, (1024, 4096), "bfloat16") == 2 * elements
    assert work.bytes(pass_, (1024, 4096), "float32") == 4 * elements


def test_bytes_of_cross_entropy():
    plain, fused = (work for work in WORKS if work.op == "cross_entropy")
    classes, scalar = 1024 * 8, 2
    assert plain.bytes("forward", (1024, 4096), "bfloat16") == 2 * X + classes + scalar
    assert plain.bytes("backward", (1024, 4096), "bfloat16") == 4 * X + classes + scalar
    assert fused.bytes("forward", (1024, 4096), "bfloat16") == 4 * X + classes + scalar


def test_bytes_and_operations_of_products():
    matmul, linear = work_of("matmul"), work_of("linear gelu")
    m, n, k = shape = (8, 4, 2)
    assert matmul.bytes("forward", shape, "bfloat16") == 2 * (m * k + k * n + m * n)
    assert linear.bytes("backward", shape, "bfloat16") == 2 * (2 * m * n + 2 * m * k + 2 * n * k + n)
    assert (matmul.flops("forward", shape), matmul.flops("backward", shape)) == (2 * m * n * k, 4 * m * n * k)
    assert work_of("gelu none").flops("forward", (8, 4)) == 0


def test_bytes_and_operations_of_convolutions():
    nhwc, nchw = work_of("conv2d nhwc"), work_of("conv2d nchw")
    x, w, y = 32 * 64 * 56 * 56, 128 * 64 * 3 * 3, 32 * 128 * 28 * 28
    shape = (32, 64, 56, 128, 3, 2)
    assert nhwc.bytes("forward", shape, "bfloat16") == 2 * (x + w + y)
    assert nchw.bytes("backward", shape, "float32") == 4 * (2 * x + 2 * w + y)
    assert nhwc.flops("forward", shape) == nchw.flops("backward", shape) / 2 == 2 * y * 64 * 3 * 3
    assert nhwc.tensors(shape)["x"] == (32, 56, 56, 64)
    assert nchw.tensors(shape)["w"] == (128, 64, 3, 3)
    grouped = (*shape, 4)
    assert nhwc.bytes("forward", grouped, "bfloat16") == 2 * (x + w // 4 + y)
    assert nhwc.flops("forward", grouped) == 2 * y * 16 * 3 * 3
    assert nhwc.tensors(grouped) == nhwc.tensors(shape) | {"w": (128, 3, 3, 16)}


def test_bytes_and_operations_of_a_cell():
    lltm, (batch, features, state) = work_of("lltm"), (16, 32, 128)
    weights, h = 3 * state * (state + features), batch * state
    forward = batch * features + weights + 3 * state + 4 * h
    assert lltm.bytes("forward", (batch, features, state), "float32") == 4 * forward
    # besides: the gradients of both results, those of the inputs, and the gates; but not the bias
    backward = 2 * batch * features + 2 * weights + 3 * state + 6 * h + 3 * h
    assert lltm.bytes("backward", (batch, features, state), "float32") == 4 * backward
    assert lltm.flops("forward", (batch, features, state)) == 2 * batch * weights


def test_shapes_on_a_gpu():
    of_norm = list(cases("cuda", ["bfloat16"], ["layer_norm"], passes=["forward"]))
    found = [case.shape for case in of_norm if not case.work.variant]
    assert found[0] == (8, 256)
    assert {m * n for m, n in found[1:]} == {1 << 26, (1 << 26) // 768 * 768}
    assert {n * 2 % 16 > 0 for _, n in (case.shape for case in of_norm if case.work.variant == "odd")} == {True}
    assert [case.shape for case in cases("cuda", ["float32"], ["add"])] == [(8, 256), (1 << 26,)]


def test_shapes_that_are_given_are_for_operators_that_have_such():
    given = [(4, 6), (1024,), (4, 6, 5), (4, 6, 5, 2, 3, 1), (4, 6, 5, 2, 3, 1, 2)]
    found = cases("cuda", ["float32"], ["gelu", "softmax", "linear", "lltm", "conv2d"], given, ["forward"])
    shapes = {}
    for case in found:
        shapes.setdefault(case.work.op, {})[case.shape] = None
    assert {op: list(of_op) for op, of_op in shapes.items()} == {
        "gelu": [(4, 6), (1 << 26,)],
        "softmax": [(4, 6), (1 << 16, 1024)],
        "linear": [(4, 6, 5)],
        "lltm": [(4, 6, 5)],
        "conv2d": [(4, 6, 5, 2, 3, 1), (4, 6, 5, 2, 3, 1, 2)],
    }


def test_variants_have_their_dtypes():
    def variants(device):
        found = cases(device, ["bfloat16", "float32"], ["matmul", "conv2d"], passes=["forward"], quick=True)
        return list(dict.fromkeys((case.work.name, case.dtype) for case in found))

    on_cpu = [("matmul", "bfloat16"), ("matmul", "float32"), ("conv2d nhwc", "bfloat16"), ("conv2d nchw", "float32")]
    assert sorted(variants("cpu")) == sorted(on_cpu)
    assert sorted({*variants("cuda")} - {*on_cpu}) == [("conv2d nchw tf32", "float32"), ("matmul tf32", "float32")]


def test_what_is_on_record_is_still_measured():
    """So that a new result replaces it."""
    keys = {
        (case.work.op, case.work.variant, case.pass_, case.shape, case.dtype)
        for case in cases("cuda", ["bfloat16", "float16", "float32"])
    }
    for row in json.loads(RESULTS.read_text())["rows"]:
        assert (row["op"], row["variant"], row["pass"], tuple(row["shape"]), row["dtype"]) in keys


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_implementations_compute_the_same(work):
    """Each is given the same tensors as it wants them: what is compared are equals."""
    torch = pytest.importorskip("torch")
    framework, case = FRAMEWORKS["torch"]("cpu"), Case(work, "forward", TINY[type(work)], "float32")
    inputs = framework.inputs(case)
    results = []
    with framework.settings(case), framework.recording(False):
        for impl in baselines.available("cpu", ["aotops", "torch", "numpy"]):
            if not impl.has(case):
                continue
            given = [t.detach().numpy() for t in inputs] if impl.framework == "numpy" else impl.adapt(case, inputs)
            try:
                found = impl.function(case)(*given)
            except baselines.Unavailable:
                continue
            found = [torch.as_tensor(y) for y in (found if isinstance(found, tuple) else (found,))]
            nhwc = isinstance(work, Convolution) and work.nhwc and impl.name == "torch"
            results.append([y.permute(0, 2, 3, 1) for y in found] if nhwc else found)
    assert len(results) > 1
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-4, check_dtype=False)


def test_a_run_writes_what_it_says(tmp_path, capsys):
    file = tmp_path / "out" / "bench.json"
    main(f"bench add --device cpu --quick --impls aotops,numpy --shapes 8x256,64x128 --json {file}".split())
    result = json.loads(file.read_text())
    assert {"device", "copy_gbs", "versions", "date", "command", "rows"} <= result.keys()
    assert result["copy_gbs"] > 0
    assert result["versions"]["aotops"]
    shapes_and_impls = [(row["shape"], row["impl"]) for row in result["rows"]]
    assert shapes_and_impls == [(s, i) for s in ([8, 256], [64, 128]) for i in ("aotops", "numpy")]
    for row in result["rows"]:
        own = {"version", "kernel"} if row["impl"] == "aotops" else set()
        small = {"host_us"} if row["shape"] == [8, 256] else set()
        assert row.keys() - {"host_us_grad", "spread"} == ROW | own | small
        assert row["spread"] >= 1
        assert row["us"] > 0
        assert row["gbs"] > 0
        assert row.get("host_us", 1) > 0
    assert "add" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "path", "message"),
    [
        ("--json", "file/bench.json", "file/bench.json, but .*file is a file"),
        ("--plots", "/proc/plots", "which cannot be written: Permission denied"),
    ],
)
def test_what_cannot_be_written_is_told_before_a_run(tmp_path, monkeypatch, option, path, message):
    (tmp_path / "file").touch()
    monkeypatch.setattr("aotops.bench.run._measured", lambda *args: pytest.fail("it ran"))
    monkeypatch.setattr("os.access", lambda where, mode: not str(where).startswith("/proc"))  # root may write anywhere
    with pytest.raises(ValueError, match=f"bench: {option} is .*{message}"):
        main(["bench", "add", "--quick", "--device", "cpu", option, str(tmp_path / path)])


def test_without_a_framework_of_gradients_forward_passes_are_timed(capsys):
    options = ["softmax", "--device", "cpu", "--quick", "--impls", "numpy", "--shapes", "8x256"]
    main(["bench", *options])
    printed = capsys.readouterr().out
    assert "measure   1/1" in printed
    assert "left out: the backward passes, which numpy has none of; torch has\n" in printed
    with pytest.raises(ValueError, match="bench: nothing is left to measure but the backward passes"):
        main(["bench", *options, "--passes", "backward"])


def test_a_run_of_products(tmp_path, capsys):
    pytest.importorskip("torch")
    file = tmp_path / "bench.json"
    shapes = "8x6x4,2x3x5x4x3x2"
    main(
        f"bench matmul conv2d lltm --device cpu --quick --impls aotops,torch --shapes {shapes} "
        f"--dtypes bfloat16,float32 --json {file}".split()
    )
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 2 * (2 + 2 + 2)  # passes, implementations, and the dtypes of each operator
    for row in rows:
        own = {"version", "kernel"} if row["impl"] == "aotops" else set()
        assert row.keys() - {"host_us", "host_us_grad", "spread"} == ROW | own | {"tflops", "of_peer", "peer"}
        assert row["peer"] == "torch"
        assert row["of_peer"] == 1 if row["impl"] == "torch" else row["of_peer"] > 0
    told = capsys.readouterr().out
    for words in ("M x N x K", "batch x channels x size", "batch x features x state", "of torch", "left out"):
        assert (words in told) == (words != "left out")


def test_waiting_threads_sleep(tmp_path, monkeypatch):
    """The runtime of OpenMP that torch brings says so itself, as it is loaded; unless the user has said otherwise."""
    pytest.importorskip("torch")
    bench = [sys.executable, "-m", "aotops", "bench", "add", "--quick", "--device", "cpu", "--impls", "aotops,torch"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true", "OMP_NUM_THREADS": "2"}
    command = [*bench, "--shapes", "8x16", "--passes", "forward"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
    assert ", 2 threads; " in done.stdout
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    wait_asleep()
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_on_a_cpu_the_fastest_repeat_counts():
    """Contenders that are interrupted in most turns, as on a busy machine, have the times of those that are not."""
    turns = {name: iter([9e-3, slow, 2e-4, slow, slow]).__next__ for name, slow in (("a", 8e-3), ("b", 3e-4))}
    taken = samples(turns, 5)
    assert {name: Cpu.figure(times) for name, times in taken.items()} == {"a": 2e-4, "b": 2e-4}
    assert [round(spread(times), 1) for times in taken.values()] == [40, 1.5]
    assert Cuda.figure(taken["a"]) == 8e-3


def test_on_a_cpu_contenders_have_inputs_of_their_own(monkeypatch):
    """Inputs that they share would be in a cache for all but the first."""
    pytest.importorskip("torch")
    impls = baselines.available("cpu", ["aotops", "torch"], ["add"])
    bench = Bench(Cpu(quick=True, seconds=0.01), impls, "cpu", Turns(None))
    framework = bench.frameworks["torch"]
    given_to: dict[str, list[object]] = {}

    def noted(impl, case, given, call=framework.call):
        given_to.setdefault(impl.name, []).extend(given)
        return call(impl, case, given)

    monkeypatch.setattr(framework, "call", noted)
    bench.rows(next(cases("cpu", ["float32"], ["add"], quick=True)))
    ours, theirs = ({id(x) for x in given_to[name]} for name in ("aotops", "torch"))
    assert ours
    assert not ours & theirs


def test_on_a_cpu_long_calls_have_few_inputs(monkeypatch):
    """The turns that fit the budget use no more; to make them, and a warm-up with each, takes longer than the turns."""
    machine = Cpu(quick=True, seconds=0.02)
    machine.cache = 300 << 20
    assert [machine.sets(nbytes) for nbytes in (1 << 10, 64 << 20, 1 << 30)] == [16, 8, 2]
    called = []
    for seconds, sets in ((0.05, 2), (0.002, 10), (0.001, 16)):
        monkeypatch.setattr(measure, "_seconds", lambda call, n, seconds=seconds: call() or seconds)
        assert machine.enough(16, lambda: called.append(1)) == sets
    machine.turn([partial(called.append, f"inputs {i}") for i in range(16)])
    assert called == [1] * 6 + ["inputs 14", "inputs 15"]


def test_on_a_cpu_numbers_repeat_and_rows_differ():
    """To draw all of them takes longer than the turns do."""
    torch = pytest.importorskip("torch")
    tensor = FRAMEWORKS["torch"]("cpu").normal((100, 2048), "float32", 0.5)
    assert tensor.requires_grad
    assert abs(tensor.std().item() - 0.5) < 0.01
    assert len(torch.unique(tensor.detach(), dim=0)) == 100
    assert len(torch.unique(tensor.detach())) < tensor.numel() / 2
    assert FRAMEWORKS["torch"]("cpu").normal((3, 0), "bfloat16", 1.0).shape == (3, 0)


def test_a_busy_machine_is_told(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    result = _result("aotops", 3.0)
    report.show(result)
    assert "warning" not in capsys.readouterr().out
    result["rows"] = [row | {"spread": wide} for row, wide in zip(result["rows"] * 3, (1.0, 1.4, 31.2), strict=True)]
    report.show(result)
    assert (
        "\nwarning: the machine was busy: in 1 of 3 measurements the median is 1.5 to 31.2 times the fastest repeat"
    ) in capsys.readouterr().out


@pytest.mark.parametrize("dtypes", [["float32"], ["float32", "bfloat16"]], ids=len)
def test_tables_fit_the_terminal(capsys, monkeypatch, dtypes):
    rows = []
    for impl in ("aotops", "torch", "torch.compile", "numpy"):
        (row,) = _result(impl, 1234.5)["rows"]
        rows += [row | {"dtype": dtype, "variant": variant} for dtype in dtypes for variant in ("tanh", "none")]
        rows += [row | {"dtype": dtypes[0], "shape": [8, 256]}]  # with a title of more than 70 characters
    monkeypatch.setenv("COLUMNS", "70")
    report.show(_result("aotops", 3.0) | {"rows": rows})
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 70
    words = " ".join(told.split())
    for dtype in dtypes:
        assert (
            f"gelu tanh forward 67108864{f' {dtype}' if len(dtypes) > 1 else ''} us 1,234.5 aotops 0.95 torch" in words
        )
    monkeypatch.delenv("COLUMNS")
    report.show(_result("aotops", 3.0) | {"rows": rows})
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("gelu tanh  forward  67108864") for line in lines) == len(dtypes)


def _result(impl, us):
    row = {"op": "gelu", "variant": "tanh", "pass": "forward", "shape": [1 << 26], "dtype": "bfloat16", "impl": impl}
    row |= {"us": us, "gbs": 4000.0, "of_copy": 0.95, "host_us": 5.0}
    head = {"device": "a GPU", "command": f"measure {impl}", "copy_gbs": 4200.0, "versions": {impl: "1"}}
    return head | {"rows": [row]}


def test_results_are_merged(tmp_path, capsys):
    files = []
    for name, result in (("a", _result("aotops", 3.0)), ("b", _result("quack", 4.0)), ("c", _result("aotops", 2.0))):
        files.append(tmp_path / name)
        report.save(result, files[-1])
    merge = [word for file in files for word in ("--merge", str(file))]
    main(["bench", "--impls", "none", "--json", str(tmp_path / "all"), *merge])
    merged = json.loads((tmp_path / "all").read_text())
    assert [(row["impl"], row["us"]) for row in merged["rows"]] == [("aotops", 2.0), ("quack", 4.0)]
    assert merged["versions"] == {"aotops": "1", "quack": "1"}
    assert merged["command"] == "measure aotops; measure quack"
    with pytest.raises(ValueError, match="two devices: a GPU and another"):
        report.merged(merged, _result("aotops", 1.0) | {"device": "another"})


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    rows = _result("aotops", 3.0)["rows"]
    rows += [rows[0] | {"op": "softmax", "variant": "", "shape": [(1 << 26) // n, n]} for n in (1024, 4096)]
    rate = {"tflops": 300.0, "of_peer": 1.1, "peer": "torch (cuDNN)"}
    rows += [rows[0] | rate | {"op": "conv2d", "variant": "nhwc", "shape": [32, 64, n, 64, 3, 1]} for n in (28, 56)]
    report.draw(_result("aotops", 3.0) | {"rows": rows}, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["conv2d.png", "gelu.png", "softmax.png"]


def test_rows_elsewhere(tmp_path, capsys):
    """A package of one operator's row, and a folder that has none."""
    (tmp_path / "__init__.py").write_text(
        "from types import SimpleNamespace\n"
        "from aotops.bench.work import Elements\n"
        "CASES = {'add': SimpleNamespace(bench=(Elements('xx', 'x', variant='mine'),))}\n"
    )
    options = ["bench", "--device", "cpu", "--quick", "--impls", "aotops", "--shapes", "8x256", "--cases"]
    try:
        main([*options, str(tmp_path)])
        assert "add mine" in capsys.readouterr().out
        with pytest.raises(LookupError, match=f"bench: there are no rows in {tmp_path / 'none'}; --cases names"):
            main([*options, str(tmp_path / "none")])
    finally:
        use(None)


def test_a_case_is_pickled():
    """Processes that compile are given cases."""
    for case in cases("cpu", ["float32"], quick=True):
        again = pickle.loads(pickle.dumps(case))
        assert (str(again), again.bytes, again.work.call) == (str(case), case.bytes, case.work.call)


def test_the_command_needs_no_package_to_be_imported():
    heavy = "[m for m in ('numpy', 'torch', 'rich', 'matplotlib') if m in sys.modules]"
    code = f"import sys, aotops, aotops.cli; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -------------------------------------------------------------------------------------------------- another's operator

TWICE = """
#include <cstdint>
extern "C" int aot_twice_cpu(int, void **p, int *ndims, int64_t **shapes, const char **, void *, void *) {
  int64_t n = 1;
  for (int i = 0; i < ndims[0]; ++i) n *= shapes[0][i];
  for (int64_t i = 0; i < n; ++i) static_cast<float *>(p[1])[i] = 2 * static_cast<float *>(p[0])[i];
  return 0;
}
extern "C" int aot_twice_naive_cpu(int n, void **p, int *ndims, int64_t **shapes, const char **d, void *s, void *e) {
  return aot_twice_cpu(n, p, ndims, shapes, d, s, e);
}
"""
PACKAGE = """
from dataclasses import replace
from functools import partial
from pathlib import Path
from aotops import Library, operator

@operator(inputs=("x",), outputs=("y",), same_spec_as={"y": "x"}, elementwise=True)
def twice(x):
    return (x,), ()

library = Library("doubling", [twice], Path(__file__).with_name("libdoubling.so"), cases="doubling.cases")
"""
ROWS = """
from types import SimpleNamespace as Of

case = Of(given={"x": (3, 5)}, attrs={}, classes={})
row = Of(reference=lambda x: 2 * x, cases=(case,), in_torch=lambda torch, name: lambda x: 2 * x)
CASES = {"twice": row}
"""


@pytest.fixture
def doubling(tmp_path, monkeypatch):
    """An installed package of an operator, whose row does not say what is measured."""
    package, metadata = tmp_path / "doubling", tmp_path / "doubling-1.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (package / "cases.py").write_text(ROWS)
    (tmp_path / "twice.cpp").write_text(TWICE)
    command = ["g++", "-O2", "-shared", "-fPIC", tmp_path / "twice.cpp", "-o", package / "libdoubling.so"]
    subprocess.run(command, check=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[aotops.libraries]\ndoubling = doubling:library\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry._loaded.cache_clear()
    yield package
    registry._loaded.cache_clear()
    for name in ("doubling", "doubling.cases"):
        sys.modules.pop(name, None)


def test_an_operator_of_another_library(doubling, tmp_path, capsys):
    pytest.importorskip("torch")
    file, plots = tmp_path / "twice.json", tmp_path / "plots"
    impls = ["aotops", "naive", "torch", "numpy"]
    for _ in range(2):  # again in the same process
        main(f"bench twice --quick --device cpu --impls {','.join(impls)} --json {file} --plots {plots}".split())
    rows = json.loads(file.read_text())["rows"]
    assert [(row["shape"], row["impl"]) for row in rows] == [(s, i) for s in ([8, 256], [512, 1024]) for i in impls]
    assert all(row["op"] == "twice" and row["us"] > 0 for row in rows)
    case = Case(find("twice", ""), "forward", (512, 1024), "float32")
    assert case.bytes == 2 * 4 * 512 * 1024  # x is read and y written, once
    assert case.work.dtypes == ("float32",)  # the kernel, which infers nothing, would read others as float32 too
    assert [path.name for path in plots.iterdir()] == ["twice.png"]
    assert "left out" not in capsys.readouterr().out


def test_a_library_that_is_not_built(doubling):
    (doubling / "libdoubling.so").unlink()
    with pytest.raises(LibraryError, match=r"libdoubling\.so does not exist"):
        main(["bench", "twice", "--quick", "--device", "cpu"])


def test_the_case_that_is_enlarged():
    """Built-in operators have one without a statement in their rows."""
    from aotops.bench.enlarged import enlarged

    def shapes(name, device="cpu", quick=False):
        work = replace(enlarged(OPS[name], rows()[name].cases), op=name)
        return work, work.shapes(device, None, quick)[-1]

    work, large = shapes("swiglu")
    assert work.bytes("forward", large, "float32") == 3 * 4 * (1 << 25)
    work, large = shapes("matmul", "cuda")
    assert math.prod(large) == 1 << 26
    work, large = shapes("cross_entropy")
    assert work.tensors(large)["t"] == large[:1]
    assert work.n_classes(large) == large[1]
    assert work.dtypes == ("float16", "bfloat16", "float32", "float64")
