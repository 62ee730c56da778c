"""benchmarks/models: GPT-2 has the same losses in every framework, and what is merged and reported of them."""

from importlib import import_module

import pytest

from aotops.testing.frameworks import requested
from benchmarks.models.spec import IMPLS, Spec

LOSSES = [5.35485, 5.33801, 5.35546, 5.35077]
"""Of the first steps of the tiny model, in float32."""

TRIED = [
    (name, impl)
    for name in IMPLS
    if name in requested()
    for impl in IMPLS[name]
    if impl in ("torch", "jax", "aotops")  # MindSpore takes ten seconds to compile its own
]


@pytest.mark.parametrize(("name", "impl"), TRIED)
def test_losses_are_the_same_in_every_framework(name, impl):
    train = import_module(f"benchmarks.models.{name}_train")
    row = train.measure(Spec("gpt2", impl, "float32", timed=2, tiny=True, framework=name))
    assert row["losses"] == pytest.approx(LOSSES, abs=1e-4)
    assert row["loss"] == pytest.approx(5.352438, abs=1e-4)
    assert min(row[key] for key in ("ms", "wall_ms", "host_ms", "tokens_per_s")) > 0
