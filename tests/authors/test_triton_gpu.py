"""Triton kernels compiled ahead of time, on a GPU: all checks of the operators of tests/programs/triton_package, bits
of Triton's own launches, and calls in a process that cannot import Triton. Triton is needed, and CUDA's torch."""

from __future__ import annotations

import importlib
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from aotops import toolchain
from aotops.build import build
from aotops.testing import check
from aotops.testing.frameworks import requested

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "programs" / "triton_package"
OPERATORS = ("vector_add", "row_softmax", "norm", "product", "attend")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not toolchain.gpu_archs(), reason="there is no GPU"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif("torch" not in requested(), reason="torch is not under test"),
]


@pytest.fixture(scope="module")
def package():
    folder = ROOT / "build" / "test_triton_gpu"
    shutil.copytree(PACKAGE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("build", "*.so", "__pycache__"))
    build(folder, arch=toolchain.gpu_archs())
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        library = importlib.import_module("tritons").library
        from aotops.frontends import torch as frontend

        yield SimpleNamespace(
            folder=folder,
            ops=library.ops,
            torch=torch,
            F=frontend.of(library),
            kernels=importlib.import_module("tritons.kernels"),
        )
        for name in [name for name in sys.modules if name.partition(".")[0] == "tritons"]:
            del sys.modules[name]


@pytest.mark.parametrize("name", OPERATORS)
def test_every_check_passes(package, name):
    frameworks = [each for each in requested() if each in ("torch", "jax", "cupy")]
    report = check(package.ops[name], frameworks=frameworks, devices=["cuda"])
    assert report.ok, report.render()
    assert {item.where for item in report.items if item.check == "values"} >= {f"{each} cuda" for each in frameworks}


def random(torch, *shape, dtype="float16"):
    return torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype))


def add(p):
    x, y = random(p.torch, 1000, 100), random(p.torch, 1000, 100)
    out = p.torch.empty_like(x)
    p.kernels.add_kernel[(98,)](x, y, out, x.numel(), BLOCK=1024)
    return p.F.vector_add(x, y), out


def odd_add(p):
    """An address and a length that are no multiples of 16."""
    x, y = random(p.torch, 1002)[1:], random(p.torch, 1002)[1:]
    out = p.torch.empty_like(x)
    p.kernels.add_kernel[(4,)](x, y, out, x.numel(), BLOCK=256, num_warps=2)
    return p.F.vector_add(x, y), out


def softmax(p):
    x = random(p.torch, 512, 781, dtype="float32")
    y = p.torch.empty_like(x)
    p.kernels.softmax_kernel[(512,)](y, x, 781, 781, BLOCK=1024, num_warps=4)
    return p.F.row_softmax(x), y


def dropout(p):
    x = random(p.torch, 4096, 33, dtype="float32")
    y = p.torch.empty_like(x)
    p.kernels.dropout_kernel[(132,)](x, y, x.numel(), 0.25, 1234, BLOCK=1024)
    got = p.F.seeded_dropout(x, p=0.25, seed=1234)
    assert 0.2 < (got == 0).float().mean() < 0.3
    return got, y


def product(p):
    a, b = random(p.torch, 1024, 256), random(p.torch, 256, 768)
    c = a.new_empty(1024, 768)
    large = p.torch.cuda.get_device_capability() in ((9, 0), (10, 0))
    block = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    if not large:
        block = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 4}
    grid = (1024 // block["BLOCK_M"], 768 // block["BLOCK_N"])
    p.kernels.product_kernel[grid](a, b, c, 1024, 768, 256, 256, 1, 768, 1, 768, 1, **block)
    return p.F.product(a, b), c


def attention(p):
    q, k, v = (random(p.torch, 2, 8, 500, 64) for _ in range(3))
    o = p.torch.empty_like(q)
    options = {"CAUSAL": True, "D": 64, "BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    p.kernels.attention_kernel[(8, 16)](q, k, v, o, 500, 0.125, **options)
    return p.F.attend(q, k, v, causal=True), o


@pytest.mark.parametrize("call", [add, odd_add, softmax, dropout, product, attention])
def test_the_bits_are_those_of_tritons_own_launch(package, call):
    package.torch.manual_seed(0)
    got, expected = call(package)
    assert package.torch.equal(got, expected)


def test_values_are_those_of_torch(package):
    torch, F = package.torch, package.F
    q, k, v = (random(torch, 2, 4, 300, 64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(F.attend(q, k, v, causal=True), expected, rtol=2e-3, atol=2e-3)
    x, w, b = (random(torch, *shape, dtype="float32").requires_grad_() for shape in ((500, 1000), (1000,), (1000,)))
    dy = torch.randn_like(x)
    expected = torch.autograd.grad(torch.nn.functional.layer_norm(x, (1000,), w, b), (x, w, b), dy)
    torch.testing.assert_close(torch.autograd.grad(F.norm(x, w, b), (x, w, b), dy), expected, rtol=1e-4, atol=1e-4)


def test_torch_compile_has_no_graph_break(package):
    torch, F = package.torch, package.F

    def function(x, w, b):
        return F.norm(F.norm(x, w, b) + x, w, b).square().sum()

    x, w, b = (random(torch, *shape, dtype="float32").requires_grad_() for shape in ((64, 512), (512,), (512,)))
    expected = torch.autograd.grad(function(x, w, b), (x, w, b))
    got = torch.autograd.grad(torch.compile(function, fullgraph=True)(x, w, b), (x, w, b))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
sys.path.insert(0, {folder!r})
import numpy as np
from tritons import library
x = np.random.default_rng(0).normal(size=(100, 300)).astype("float32")
e = np.exp(x - x.max(-1, keepdims=True))
expected = e / e.sum(-1, keepdims=True)
"""
FRAMEWORKS = {
    "torch": """
import torch
from aotops.frontends import torch as frontend
F = frontend.of(library)
got = F.row_softmax(torch.tensor(x, device="cuda")).cpu().numpy()
""",
    "jax": """
import jax
from aotops.frontends import jax as frontend
got = np.asarray(jax.jit(frontend.of(library).row_softmax)(jax.device_put(x, jax.devices("gpu")[0])))
""",
    "cupy": """
import cupy
from aotops.frontends import cupy as frontend
got = frontend.of(library).row_softmax(cupy.asarray(x)).get()
""",
    # the first call of the process is recorded: its Init, or the call itself, loads the code
    "a CUDA graph of torch": """
import torch
from aotops.frontends import torch as frontend
F = frontend.of(library)
given = torch.tensor(x, device="cuda")
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    y = F.row_softmax(given)
graph.replay()
torch.cuda.synchronize()
got = y.cpu().numpy()
""",
    "four threads of torch": """
import threading
import torch
from aotops.frontends import torch as frontend
F = frontend.of(library)
given = torch.tensor(x, device="cuda")
results = []
def work():
    with torch.cuda.stream(torch.cuda.Stream()):
        results.extend(F.row_softmax(given) for _ in range(100))
torch.cuda.synchronize()
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
torch.cuda.synchronize()
assert len(results) == 400 and all(torch.equal(y, results[0]) for y in results)
got = results[0].cpu().numpy()
""",
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_process_that_cannot_import_triton(package, python, name):
    framework = name.split()[-1]
    if framework not in requested() or not find_spec(framework):
        pytest.skip(f"{framework} is not under test")
    python(
        WITHOUT_TRITON.format(folder=str(package.folder))
        + FRAMEWORKS[name]
        + "\nnp.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)\nassert sys.modules['triton'] is None\n"
    )
