"""torch's operators and ours on drawn calls (differential.py). ``make fuzz`` draws a hundred times as many."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from differential import check  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from aotops.ops import OPS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.has_gradient])  # it draws contexts of those
@given(data=st.data())
def test_as_torch(data, name):
    check(data.draw, name)
