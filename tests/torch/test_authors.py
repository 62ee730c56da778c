"""An author's operators, built with aot.h, have the dispatcher's kernel in C, as the built-in ones do."""

from __future__ import annotations

import shutil
from textwrap import dedent

import pytest

import aotops
from aotops.library import Library
from aotops.op import operator
from aotops.testing.frameworks import requested

torch = pytest.importorskip("torch")
ours = pytest.importorskip("aotops.frontends.torch")

pytestmark = [
    pytest.mark.skipif("torch" not in requested(), reason="torch is not under test"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
    pytest.mark.skipif(not ours.registered.in_c, reason="this torch has no kernels of the dispatcher in C"),
]

# `pick` has every kind of attribute, an optional input, a result that is not floating, and a workspace of integers that
# is longer than what is on the stack.
SOURCE = r"""
#include "aot.h"
using namespace aot;
struct Scale {
  static constexpr const char *name = "scale";
  static constexpr Slot inputs[] = {{"x"}};
  static constexpr Slot outputs[] = {{"y"}};
  double factor = 1;
  Status init(const Attrs &attrs) { return attrs.get("factor", &factor); }
  Status infer(const Tensor *in, Spec *out) const { return out[0] = in[0], check_floating(name, "x", in[0]); }
};
struct ScaleBackward : Scale {
  static constexpr const char *name = "scale_backward";
  static constexpr Slot inputs[] = {{"dy"}};
  static constexpr Slot outputs[] = {{"dx"}};
};
static Status scale(const Scale &op, const Tensor *in, const Tensor *out, void *) {
  for (int64_t i = 0; i < in[0].size(); ++i) out[0].as<float>()[i] = in[0].as<float>()[i] * (op.factor * TIMES);
  return kOk;
}
static Status scale_backward(const ScaleBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  return scale(op, in, out, stream);
}
AOT_ENTRY(Scale, aot_scale_cpu, scale)
AOT_ENTRY(ScaleBackward, aot_scale_backward_cpu, scale_backward)

struct Pick {
  static constexpr const char *name = "pick";
  static constexpr Slot inputs[] = {{"x"}, {"w", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"n"}};
  int64_t by = 0;
  double shift = -1;
  bool negate = false;
  int mode = 0;
  Ints dims;
  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("by", &by));
    AOT_TRY(attrs.get("shift", &shift));
    AOT_TRY(attrs.get("negate", &negate));
    AOT_TRY(attrs.get("mode", {"once", "twice"}, &mode));
    return attrs.get("dims", &dims);
  }
  double value(const Tensor *in, int64_t i) const {
    const double x = in[0].as<float>()[i] * (mode + 1) + by + shift;
    return (negate ? -x : x) * (in[1] ? in[1].as<float>()[i] : 1);
  }
  Status infer(const Tensor *in, Spec *out) const {
    return out[0] = in[0], out[1] = Spec::vector(DType::int64, dims.n), kOk;
  }
};
static Status pick(const Pick &op, const Tensor *in, const Tensor *out, void *) {
  for (int64_t i = 0; i < in[0].size(); ++i) out[0].as<float>()[i] = op.value(in, i);
  for (int i = 0; i < op.dims.n; ++i) out[1].as<int64_t>()[i] = op.dims.value[i];
  return kOk;
}
AOT_ENTRY(Pick, aot_pick_cpu, pick)

struct Share {
  static constexpr const char *name = "share";
  static constexpr Slot inputs[] = {{"dy"}};
  static constexpr Slot outputs[] = {{"da", optional}, {"db", optional}, {"workspace", workspace}};
  Status init(const Attrs &) { return kOk; }
  Status infer(const Tensor *in, Spec *out) const {
    return out[0] = out[1] = in[0], out[2] = Spec::vector(DType::int64, 5000), kOk;
  }
};
static Status share(const Share &, const Tensor *in, const Tensor *out, void *) {
  for (int64_t i = 0; i < 5000; ++i) out[2].as<int64_t>()[i] = i;
  for (int64_t i = 0; i < in[0].size(); ++i) {
    const float half = in[0].as<float>()[i] * 0.5f + (out[2].as<int64_t>()[4999] - 4999);
    if (out[0]) out[0].as<float>()[i] = half;
    if (out[1]) out[1].as<float>()[i] = -half;
  }
  return kOk;
}
AOT_ENTRY(Share, aot_share_cpu, share)
"""


def definitions():
    attrs, same = {"factor": "float"}, {"elementwise": True, "vmappable": ("x", "y", "dx", "dy")}

    @operator(inputs=("dy",), outputs=("dx",), attrs=attrs, same_spec_as={"dx": "dy"}, **same)
    def scale_backward(dy, factor=2.0):
        return (dy,), (factor,)

    @operator(inputs=("x",), outputs=("y",), attrs=attrs, same_spec_as={"y": "x"}, backward=scale_backward, **same)
    def scale(x, factor=2.0):
        return (x,), (factor,)

    kinds = {"by": "int", "shift": "float?", "negate": "bool", "mode": "str", "dims": "int[]"}

    @operator(inputs=("x", "w"), outputs=("y", "n"), optional=("w",), attrs=kinds, same_spec_as={"y": "x"})
    def pick(x, w=None, by=0, shift=None, negate=False, mode="once", dims=()):
        return (x, w), (by, shift, negate, mode, dims)

    @operator(inputs=("dy",), outputs=("da", "db"), optional=("da", "db"), workspace=("workspace",))
    def share(dy):
        return (dy,), ()

    return scale, pick, share


@pytest.fixture(scope="module")
def libraries():
    """Two packages, each with an operator ``scale``: that of the second one multiplies by 3 more."""
    made = []
    for name, times in (("authors_one", 1), ("authors_two", 3)):
        file = aotops.compile(SOURCE, name=name, flags=["-O0", f"-DTIMES={times}"])
        made.append(Library(name, definitions(), file))
        ours.functions(made[-1])
    return made


def test_their_kernels_are_in_c(libraries):
    for library in libraries:
        for op in (*library.ops.values(), library.ops["scale"].backward):
            assert op in ours.registered.in_c
            table = torch._C._dispatch_dump(f"{library.name}::{op.name}").splitlines()
            assert "torch_stable.cpp" in next(line for line in table if line.startswith("CPU: "))


@pytest.mark.parametrize("mode", ["recorded", "no_grad", "compiled", "vmap"])
def test_two_packages_have_an_operator_of_one_name(libraries, mode):
    for library, times in zip(libraries, (1, 3), strict=True):
        scale = getattr(torch.ops, library.name).scale
        x = torch.randn(3, 4, requires_grad=mode != "no_grad")
        if mode == "compiled":
            call = torch.compile(lambda x, scale=scale: scale(x, 0.5), backend="aot_eager", fullgraph=True)
        elif mode == "vmap":
            call = torch.vmap(lambda x, scale=scale: scale(x, 0.5))
        else:
            call = lambda x, scale=scale: scale(x, 0.5)  # noqa: E731
        with torch.set_grad_enabled(mode != "no_grad"):
            y = call(x)
        torch.testing.assert_close(y, x * 0.5 * times)
        if mode != "no_grad":
            (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 2.0))
            torch.testing.assert_close(dx, torch.full_like(x, times))


def test_opcheck_passes(libraries):
    x = torch.randn(4, 3, requires_grad=True)
    torch.library.opcheck(torch.ops.authors_one.scale, (x.t(), 2.0))


def test_results_of_elementwise_operators_have_torchs_strides(libraries):
    for x in (torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        y = torch.ops.authors_two.scale(x, 2.0)
        assert y.stride() == (x * 2).stride()
        torch.testing.assert_close(y, x * 6)


def test_each_kind_of_attribute_is_passed(libraries):
    x, w = torch.randn(2, 3), torch.randn(2, 3)
    pick = torch.ops.authors_one.pick
    y, n = pick(x, None, 3, None, False, "once", [])
    assert (n.dtype, n.tolist()) == (torch.int64, [])
    torch.testing.assert_close(y, x + 2)
    y, n = pick(x.t(), w.t(), -(2**40), 0.5, True, "twice", [4, -(2**40)])
    assert n.tolist() == [4, -(2**40)]
    torch.testing.assert_close(y, -(2 * x.t().double() - 2**40 + 0.5).mul(w.t()).float())


def test_a_gradient_that_is_not_wanted_is_none(libraries):
    dy = torch.randn(5)
    da, db = torch.ops.authors_one.share(dy, [False, True])
    assert da is None
    torch.testing.assert_close(db, dy / -2)


def test_errors_have_their_type_and_text(libraries):
    x, freed = torch.ones(3), torch.ones(4)
    freed.untyped_storage().resize_(0)
    scale, pick = torch.ops.authors_one.scale, torch.ops.authors_one.pick
    for kind, text, call in (
        (TypeError, "scale: x has dtype int64, expected float16, bfloat16", lambda: scale(x.long(), 2.0)),
        (RuntimeError, "scale: x has no memory: its storage was freed", lambda: scale(freed, 2.0)),
        (ValueError, "pick: mode is 'thrice', expected 'once' or 'twice'",
         lambda: pick(x, None, 0, None, False, "thrice", [])),
    ):  # fmt: skip
        with torch.inference_mode(), pytest.raises(kind, match=text):
            call()


EXHAUSTED = """
    import ctypes, torch
    from aotops import library
    from aotops.frontends import torch as ours
    lib, schema, status = library.load(), b"gelu(Tensor x, str approximate) -> Tensor", 0
    for i in range(1000):
        name = f"taken_{i}".encode()
        assert lib.aot_library(name, ctypes.c_void_p(lib._handle), 0) == 0
        status = status or lib.aot_torch_implement(name, schema, b"y", 1)
    print(status, library.last_error())
    from tests_of_authors import SOURCE, aotops, definitions, Library
    made = Library("late", definitions(), aotops.compile(SOURCE, name="authors_one", flags=["-O0", "-DTIMES=1"]))
    ours.functions(made)
    print(made.ops["scale"] in ours.registered.in_c, torch.ops.late.scale(torch.ones(2), 4.0).tolist())
"""


def test_more_operators_than_there_are_kernels_have_those_of_python(python, tmp_path, libraries):
    shutil.copy(__file__, tmp_path / "tests_of_authors.py")
    said = python(dedent(EXHAUSTED), PYTHONPATH=str(tmp_path)).splitlines()
    assert said[0] == "3 torch: there are kernels of 512 operators already, for more there is no place"
    assert said[-1] == "False [4.0, 4.0]"
