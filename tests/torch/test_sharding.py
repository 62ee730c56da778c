"""DTensor: strategies follow from the statements, and sharded calls are the whole ones (sharded.py, once, in four
processes)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch has no distributed", allow_module_level=True)

import sharded  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch.sharding import _strategies, register  # noqa: E402
from aotops.ops import OPS  # noqa: E402

PROGRAM = Path(__file__).parents[1] / "programs" / "sharded.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed" / "train_torch.py"


def test_sharded_calls_are_those_of_whole_tensors(tmp_path):
    """One test, so that workers of pytest start the processes once."""
    results = tmp_path / "results.json"
    done = subprocess.run([sys.executable, PROGRAM, results], capture_output=True, text=True, timeout=900)
    found = json.loads(results.read_text()) if results.exists() else {}
    failed = [f"{check}: {error}" for check, error in found.items() if error]
    assert not failed, "\n\n".join(failed)
    assert set(found) == set(sharded.CHECKS), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_operator_that_states_axes_is_checked():
    assert {name for name, op in OPS.items() if op.dims} <= set(sharded.CASES)


def test_distributed_is_not_imported(python):
    program = "import sys; from aotops.frontends import torch; print('torch.distributed.tensor' in sys.modules)"
    assert python(program).strip() == "False"


@pytest.mark.parametrize("first", ["aotops.frontends.torch", "torch.distributed.tensor"])
def test_strategies_are_registered_in_either_order(python, first):
    program = f"""
import {first}, torch.distributed.tensor
from aotops.frontends import torch as ours
known = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
without = (op.name for op, overload in ours.registered.dispatched.items() if overload not in known and not op.mutates)
print(*sorted(without), "and no other")
"""
    assert python(program).strip() == "and no other"


def test_dtensor_comes_up_without_register_sharding(monkeypatch):
    """A torch whose DTensor is not as it was is none the worse for us."""
    from torch.distributed.tensor import experimental

    monkeypatch.setattr(experimental, "register_sharding", lambda: None)
    with pytest.warns(UserWarning, match="DTensor of torch .* took no strategies: TypeError"):
        register([(op, op, overload) for op, overload in ours.registered.dispatched.items()])


def test_the_example_trains_as_one_process():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, EXAMPLE, "--steps", "4", "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w+) +(\w+) +loss .* in one process .* relative distance (\S+)$", done.stdout, re.M)
    ways = ("ddp", "fsdp", "tensor")
    assert [row[:2] for row in rows] == [(model, way) for model in ("digits", "transformer") for way in ways]
    assert all(float(distance) < 1e-5 for *_, distance in rows)


def test_attention_over_a_split_sequence():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = EXAMPLE.with_name("sequence_torch.py")
    done = subprocess.run(
        [*command, program, "--tokens", "150", "--device", "cpu"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w+) +(\w+) +300 tokens in 2 parts: y .*, dq .*, dk .*, dv .*$", done.stdout, re.M)
    assert rows == [(way, kind) for way in ("ring", "gather") for kind in ("full", "causal")]


def test_an_operator_that_states_nothing_is_whole():
    from torch.distributed.tensor import Replicate

    class Spec:
        shape = (4, 6)

    stated = _strategies(OPS["softmax"], Spec, -1)
    assert len(stated) == 2
    assert _strategies(replace(OPS["softmax"], dims=None), Spec, -1) == [([Replicate()], [Replicate(), None])]
