"""Torch's settings of TF32, older and newer ones."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import precision  # noqa: E402

newer = pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="this torch has the older settings alone")


@pytest.fixture(autouse=True)
def as_before():
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    if hasattr(torch.backends.cudnn, "conv"):
        torch.backends.cudnn.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "none"
        torch.backends.cudnn.rnn.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul


@pytest.mark.parametrize("compiled", [False, True])
def test_older_settings(compiled):
    def both(x):
        return x + precision.convolutions_allow_tf32() + 2 * precision.products_allow_tf32()

    run = torch.compile(both, backend="eager", fullgraph=True) if compiled else both
    for cudnn in (True, False):
        for matmul in (True, False):
            torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul
            assert run(torch.zeros(())) == cudnn + 2 * matmul


@newer
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("value", ["ieee", "tf32"])
def test_settings_of_one_operator(value, compiled):
    """The older setting raises an error if it is read."""
    torch.backends.cudnn.conv.fp32_precision = value
    torch.backends.cudnn.rnn.fp32_precision = "ieee" if value == "tf32" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = "ieee" if value == "tf32" else "tf32"
    with pytest.raises(RuntimeError, match="allow_tf32"):
        _ = torch.backends.cudnn.allow_tf32

    def both(x):
        return x + precision.convolutions_allow_tf32() + 2 * precision.products_allow_tf32()

    torch._dynamo.reset()
    run = torch.compile(both, backend="eager", fullgraph=True) if compiled else both
    assert run(torch.zeros(())) == (1 if value == "tf32" else 2)
    module = ours.Conv2d(3, 4, 3)
    assert module(torch.randn(1, 3, 5, 5)).shape == (1, 4, 3, 3)


@newer
def test_settings_of_all_operators():
    torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
    assert precision.convolutions_allow_tf32()
    assert precision.products_allow_tf32()
    torch.backends.cudnn.fp32_precision = "ieee"
    assert not precision.convolutions_allow_tf32()
