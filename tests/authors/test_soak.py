"""The soak: built-in operators pass it, and it finds kernels that are wrong under load alone (racing.cpp, racing.cu).

The kernels of the soak on a GPU are also run on the host, by a stand-in for CUDA's runtime (host_cuda/)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

import aotops
from aotops import toolchain
from aotops.cli import main
from aotops.ops import BUILTIN
from aotops.testing import soak, soaking
from aotops.testing.frameworks import requested
from aotops.testing.soaking import cuda, steps
from aotops.testing.soaking.calls import repeated
from aotops.testing.subject import elements

PROGRAMS = Path(__file__).parents[1] / "programs"
ROWS = [(5,), (64, 1024)]
OPERATORS = "add_layer_norm", "cross_entropy"


def scaled(x):
    return 2 * x + 1


def scaled_and_cleared(x):
    return 2 * x + 1, 0 * x


@pytest.fixture(scope="module")
def racing():
    library = aotops.load(PROGRAMS / "racing.cpp", name="racing_on_cpu")
    for name in ("own_scratch", "shared_scratch", "writes_its_input", "writes_past_the_end"):
        library.op(name, inputs=("x",), outputs=("y",), same_spec_as={"y": "x"})
    return library


def soaked(op, reference, cases=ROWS, **arguments):
    return soak([op], reference=reference, cases=cases, dtypes=["float32"], models=False, **arguments)


# ----------------------------------------------------------------------------------------------------------- on the CPU


@pytest.mark.parametrize("threads", ["", "own"])
def test_built_in_operators_hold(threads, tmp_path):
    """From several threads at once, with the threads of OpenMP and with the library's own."""
    file = tmp_path / "record.json"
    command = ["check", "--soak", *OPERATORS, "--devices", "cpu", "--dtypes", "float32", "--seconds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "aotops", *command, "--record", file],
        env={**os.environ, "AOTOPS_THREADS": threads},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    assert record["ok"]
    assert record["command"] == f"aotops {' '.join(command)} --record {file}"
    assert record["versions"]["threads"] == (threads or "OpenMP")
    found = {(row["operator"], row["pass"]) for row in record["operators"]}
    assert found == set(product(OPERATORS, ("forward", "backward")))
    assert all(row["least"] >= 24 and row["repeats"] >= row["least"] * row["calls"] for row in record["operators"])
    assert max(map(len, done.stdout.splitlines())) < 80


def test_a_race_between_calls_is_found(racing):
    right = soaked(racing.ops["own_scratch"], scaled, devices=["cpu"], seconds=5.0, repeats=100)
    assert right.ok, right.render()
    wrong = soaked(racing.ops["shared_scratch"], scaled, ROWS[1:], devices=["cpu"], seconds=60.0)
    assert not wrong.ok
    assert "y differ from a call in quiet" in wrong.render()
    assert "(64, 1024)" in wrong.rows[0].wrong[0]


@pytest.mark.skipif("torch" not in requested(), reason="without torch")
def test_steps_of_models_are_equal():
    """From several threads at once; and another gradient is seen."""
    found = list(steps.soak("cpu", 3, 2, ("float32",), 0, soaking._beside("cpu", 0)))
    assert [run.wrong for run in found] == [""] * 4
    assert {run.model for run in found} == {"transformer", "convolutions"}
    assert all(run.gradients > 8 for run in found)

    import torch

    expected = steps._hashes(steps.transformer, "float32", "cpu", 3, 0, synchronize=False)
    assert steps._difference(expected, expected) == ""
    x = torch.randn(5, 3)
    swapped, flipped = x.clone(), x.clone()
    swapped[0], swapped[1] = x[1], x[0]
    flipped.view(torch.int32)[4, 2] ^= 1
    assert len({int(steps._hash(torch, each)) for each in (x, swapped, flipped)}) == 3


def test_the_record_is_written_before_the_end(racing, monkeypatch):
    monkeypatch.setattr(soaking, "EVERY", 0.05)
    seen = []
    record = soaked(racing.ops["own_scratch"], scaled, devices=["cpu"], seconds=1.0, so_far=seen.append)
    assert record.ok, record.render()
    assert seen[-1].rows[0].repeats > 0
    assert not any(each.ok or json.loads(each.to_json())["ended"] for each in seen)


@pytest.mark.skipif("torch" not in requested(), reason="without torch")
def test_steps_end_with_the_time():
    found = list(steps.soak("cpu", 1_000_000, 2, ("float32",), 0, soaking._beside("cpu", 0), 0.2))
    assert [run.wrong for run in found] == [""] * 4
    assert all(1 <= run.steps < 1_000_000 for run in found)


def test_the_command_refuses_what_is_not_for_it():
    result = CliRunner().invoke(main, ["check", "--soak", "add", "--quick"], obj=["aotops"])
    assert result.exit_code != 0
    assert "--soak does not take --quick" in str(result.output) + str(result.exception)


@pytest.mark.skipif(bool(toolchain.gpu_archs()), reason="there is a GPU")
def test_a_gpu_that_is_not_here_is_refused():
    with pytest.raises(ValueError, match="nvidia-smi finds no GPU"):
        soaked(aotops.get("gelu"), None, devices=["cuda"])


def test_without_nvcc_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(toolchain, "gpu_archs", lambda: ("90",))
    monkeypatch.setattr(toolchain, "nvcc", lambda: None)
    with pytest.raises(toolchain.CompileError, match="no CUDA compiler: nvcc"):
        soaked(aotops.get("gelu"), None)


# --------------------------------------------------------------------------------------- the GPU's kernels, on the host


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A stream whose kernels run on the host."""
    library = tmp_path_factory.mktemp("soak") / "libsoak.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-x", "c++", f"-I{PROGRAMS / 'host_cuda'}"]
    subprocess.run(["g++", *flags, Path(cuda.__file__).with_name("kernels.cu"), "-o", library], check=True)
    stream = cuda.Stream(cuda.Kernels(library), seed=0)
    stream.device = "cpu"
    yield stream
    stream.close()


def on_host(host, op, reference=None):
    """The findings of each call of an operator."""
    subject = soaking._of(op, reference, ROWS if reference else None, ["float32"], 0)
    small = [case for case in subject.cases if elements(case) <= 1 << 16]
    calls = list(repeated(replace(subject, cases=tuple(small)), "cpu"))
    for one in calls + [replace(one, shifted=True) for one in calls if one.case.shapes == subject.plain.shapes]:
        assert host.repeat(one, host.quiet(one), 3, 0, 0) == 3
        yield str(one), one.wrong


@pytest.mark.parametrize("name", ["add_layer_norm", "cross_entropy", "lltm"])
def test_right_calls_pass_between_the_kernels(host, name):
    """Forward, backward and in place; empty inputs too."""
    found = dict(on_host(host, aotops.get(name)))
    assert not any(found.values()), found
    assert any("backward" in call for call in found)
    assert any("shifted" in call for call in found)
    assert ("slope over x" in str(found)) == ("dx over slope" in str(found)) == (name == "cross_entropy")


def test_the_kernels_find_what_is_wrong(host, racing):
    """A write behind an output, to an input, and another result than in quiet."""
    assert not any(wrong for _, wrong in on_host(host, racing.ops["own_scratch"], scaled))
    (_, behind), (_, right), *_ = on_host(host, racing.ops["writes_past_the_end"], scaled)
    assert "y: 3 pieces of 16 bytes differ from a call in quiet" in behind
    assert not right
    with pytest.raises(AssertionError, match="the call writes to its input x"):
        list(on_host(host, racing.ops["writes_its_input"], scaled))
    one = next(repeated(soaking._of(racing.ops["own_scratch"], scaled, ROWS, ["float32"], 0), "cpu"))
    known = host.quiet(one)
    flipped = bytes([known.after["y"][0] ^ 1]) + known.after["y"][1:]
    host.repeat(one, replace(known, after={**known.after, "y": flipped}), 3, 0, 0)
    assert "y: 3 pieces of 16 bytes differ from a call in quiet" in one.wrong
    assert f"first in repeat 1, piece 0: {known.after['y'][:16].hex()}, expected {flipped[:16].hex()}" in one.wrong
    assert "has changed" not in one.wrong


def test_a_write_to_the_copies_of_the_soak_is_told(host, racing, monkeypatch):
    """It is another call's, or the soak's own."""
    one = next(repeated(soaking._of(racing.ops["own_scratch"], scaled, ROWS, ["float32"], 0), "cpu"))
    known, before = host.quiet(one), host._known.before

    def changed(plan, *to):
        host._known.set(plan.slots[0].before, 0, 4, 0)
        before(plan, *to)

    monkeypatch.setattr(host._known, "before", changed)
    host.repeat(one, known, 2, 0, 0)
    assert "x: the device's copy of what is written before each repeat has changed" in one.wrong
    assert "expected after it" not in one.wrong


@pytest.mark.parametrize("op", BUILTIN.ops.values(), ids=lambda op: op.name)
def test_only_what_has_the_same_spec_is_written_over(op):
    """A residual that is not kept has no elements, and no room for a gradient."""
    subject = soaking._of(op, None, None, ["float32"], 0)
    small = tuple(case for case in subject.cases if elements(case) < 100)
    calls = list(repeated(replace(subject, cases=small, from_row=False), "cpu"))
    assert all(one.call.specs[y] == one.call.specs[x] for one in calls for y, x in one.shared.items())
    assert any(one.shared for one in calls) == any(one.overwrites for one in (op, op.backward) if one)


def test_there_is_room_for_every_tensor_of_a_call():
    """attention's backward has 18."""
    most = max(len(x.inputs) + len(x.outputs) for op in BUILTIN.ops.values() for x in (op, op.backward) if x)
    assert f"kSlots = {cuda.SLOTS}," in Path(cuda.__file__).with_name("kernels.cu").read_text()
    assert most <= cuda.SLOTS


def test_a_late_write_is_found(host, racing, monkeypatch):
    """One that comes after the kernel that follows the call."""
    one = next(repeated(soaking._of(racing.ops["own_scratch"], scaled, ROWS, ["float32"], 0), "cpu"))
    known = host.quiet(one)
    run, after, given = host._bound(one), host._known.after, []
    monkeypatch.setattr(host, "_bound", lambda one: lambda *to: (given.append(to), run(*to)))
    monkeypatch.setattr(host._known, "after", lambda *to: (after(*to), host._known.set(given[-1][-1], 0, 4, 0)))
    host.repeat(one, known, 2, 0, 0)
    assert "were written late" in one.wrong


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.fixture(scope="module")
def racing_on_gpu():
    if not toolchain.gpu_archs() or toolchain.nvcc() is None:
        pytest.skip("there is no GPU, or no nvcc")
    library = aotops.load(PROGRAMS / "racing.cu", name="racing_on_gpu")
    for name in ("waits", "triggers_early"):
        library.op(name, inputs=("x",), outputs=("y",), same_spec_as={"y": "x"}, mutates=("x",))
    library.op("does_not_wait", inputs=("x",), outputs=("y",), same_spec_as={"y": "x"})
    return library


SHAPES = [(256, 1024)]


@pytest.mark.gpu
def test_a_kernel_that_waits_passes(racing_on_gpu):
    record = soaked(
        racing_on_gpu.ops["waits"], scaled_and_cleared, SHAPES, devices=["cuda"], seconds=20, repeats=10_000
    )
    assert record.ok, record.render()
    assert record.rows[0].least >= 10_000


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "reference"), [("does_not_wait", scaled), ("triggers_early", scaled_and_cleared)])
def test_a_race_between_kernels_is_found(racing_on_gpu, name, reference):
    record = soaked(racing_on_gpu.ops[name], reference, SHAPES, devices=["cuda"], seconds=20)
    assert not record.ok, record.render()
    assert record.rows[0].wrong


@pytest.mark.gpu
def test_built_in_operators_hold_on_a_gpu():
    if not toolchain.gpu_archs() or toolchain.nvcc() is None:
        pytest.skip("there is no GPU, or no nvcc")
    operators = [aotops.get(name) for name in ("softmax", "cross_entropy", "rms_norm")]
    record = soak(operators, devices=["cuda"], seconds=60, repeats=1_000)
    assert record.ok, record.render()


def words(profile):
    """The words in the names of the kernels that ran."""
    found = profile.profiler.kineto_results.events()  # profile.events() takes minutes for so many
    return {word for name in {event.name() for event in found} for word in re.findall(r"\w+", name)}


OF_OTHER_GPUS = {"attention_float_dq_kernel", "attention_float_dkv_kernel"}
"""The kernels that no call takes on 9.0, where the kernels of a file named _sm90 serve every call that would."""


@pytest.mark.gpu
def test_every_kernel_of_the_library_is_run():
    """By the calls of the soak and its steps of models, which the optimizer's kernels are in."""
    if toolchain.gpu_archs() != ("90",) or toolchain.nvcc() is None:
        pytest.skip("there is no GPU of compute capability 9.0, or no nvcc")
    torch = pytest.importorskip("torch")
    torch.cuda.init()
    kernel = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\(")
    sources = [file.read_text() for file in (PROGRAMS.parents[1] / "cuda_src").rglob("*.cu*")]
    names = [name for source in sources for name in kernel.findall(source)]
    assert len(names) == sum(source.count("__global__") for source in sources) > 40
    expected = {*names}
    stream, ran = cuda.Stream(cuda.kernels(), 0), set()
    for op in BUILTIN.ops.values():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for one in repeated(soaking._of(op, None, None, None, 0), "cuda"):
                stream.quiet(one)
        ran |= words(profile)
    stream.close()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for make in steps.MODELS.values():
            steps._hashes(make, "float32", "cuda", 1, 0, synchronize=False)
    ran |= words(profile)
    assert not ran & OF_OTHER_GPUS
    missing = sorted(expected - ran - OF_OTHER_GPUS)
    assert not missing, f"never run: {' '.join(missing)}"
    assert expected >= OF_OTHER_GPUS
