"""benchmarks.attention: the committed record is whole, and the picture is drawn from it."""

from __future__ import annotations

import json

import pytest

from benchmarks import attention


def test_the_record_has_every_row_and_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    record = json.loads(attention.RESULT.read_text())
    found = {(row["head_dim"], row["causal"], row["length"]) for row in record["rows"]}
    assert found == {(d, causal, n) for d in (64, 128) for causal in (False, True) for n in attention.LENGTHS}
    assert all(row["batch"] * row["length"] == attention.TOKENS for row in record["rows"])
    attention.draw(record["rows"], tmp_path / "rates.png", record["device"])
    assert (tmp_path / "rates.png").stat().st_size > 10_000
    assert attention.RESULT.with_suffix(".png").exists()
