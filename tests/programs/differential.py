"""Calls that nobody thought of, of ours and of torch's operator: hypothesis draws them, contexts.py compares.

A call starts as a valid one: shapes (0-dim, empty, odd, broadcast), strides, dtype, device, attributes and a context.
Such a call must be served as torch serves it. Then, sometimes, one thing about it is made odd, and then ours may raise
an error that names the operator where torch has an answer: it takes less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from contexts import CONTEXTS, LAYOUTS, Context, Operator, attempt, judge, of_tensors, tensor
from hypothesis import strategies as st
from torch import Tensor

from aotops.frontends import torch as ours
from aotops.ops import OPS
from aotops.testing import cases
from aotops.testing.cases import CASES

Draw = Callable[..., Any]
Shape = tuple[int, ...]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@dataclass
class Call:
    """Two functions of tensors and attributes, and a shape for each tensor."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    shapes: list[Shape]
    attrs: dict[str, Any]
    case: cases.Case
    """Which of the tensors have a dtype of their own."""


def drawn(draw: Draw, name: str) -> Call:
    case = CASES[name].draw(cases.Draw(draw))
    required = [key for key, known in signature(OPS[name].bind).parameters.items() if known.default is known.empty]
    none = {slot: None for slot in required if slot in case.shapes and slot not in case.given}
    functions = (partial(f, **none) for f in (getattr(ours, name), CASES[name].in_torch(torch, name)))
    functions = (of_tensors(f, list(case.given)) for f in functions)
    return Call(*functions, list(case.given.values()), case.attrs, case)


TORCHS_OWN = "not implemented for", "INTERNAL ASSERT FAILED"
"""Errors of what torch cannot do and ours may: some dtypes, and functional tensors where it asserts that they are."""
MORE = (
    "mixed dtype (CPU)", "expected scalar type",  # weights of float32 beside 16 bits, on any device
    "Expected weight to be of same shape",  # weights of more axes than are normalized
    "Only zero batch or zero channel inputs",  # images without pixels, which are padded
    "without overflow", "int too big to convert",  # numbers that 16 bits, or a 64-bit integer, do not hold
)  # fmt: skip
"""Errors of what torch refuses and ours serves."""

# ---------------------------------------------------------------------------------------------------------- what is odd

ODD_ATTRIBUTES = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 7, 2**63, 2**64, -(2**63), 10**400, 0.0, 1.0, 0.5, -1.0, math.nan, math.inf,
        1 + 0j, Fraction(1), "", "none", "tanh\0", "1", b"none", (), (1,), [1, 1], (1.0, 1), (1, 2, 3), ("1",),
        np.int64(1), np.float32(1), np.bool_(True), np.ones(1), np.ones(2), torch.tensor(1), torch.tensor(1.0),
        torch.tensor([1, 2]), object(),
    ]
)  # fmt: skip
ODD_DTYPES = st.sampled_from([*DTYPES, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64])
ODD_TENSORS = st.sampled_from([None, 1, 1.0, [1.0], np.ones(3), "x"])


def is_no_class(dtype: torch.dtype) -> bool:
    """Ours takes classes of these, which torch takes for masks, or not at all."""
    return dtype not in (torch.int32, torch.uint8)


def _odd_shape(draw: Draw, call: Call) -> None:
    i = draw(st.integers(0, len(call.shapes) - 1))
    call.shapes = [draw(SHAPES) if i == j else shape for j, shape in enumerate(call.shapes)]


def _odd_attribute(draw: Draw, call: Call) -> None:
    if call.attrs:
        name = draw(st.sampled_from(sorted(call.attrs)))
        call.attrs = call.attrs | {name: draw(ODD_ATTRIBUTES)}


# ------------------------------------------------------------------------------------------------------------- the rule


def layouts(t: Tensor) -> list[str]:
    return ["contiguous", *(LAYOUTS if t.dim() and t.numel() and t.is_floating_point() else ())]


def check(draw: Draw, name: str) -> None:
    call = drawn(draw, name)
    odd = draw(st.sampled_from(["", "", "", "", "shape", "attribute", "dtype", "device", "tensor"]), label="odd")
    if odd == "shape":
        _odd_shape(draw, call)
    if odd == "attribute":
        _odd_attribute(draw, call)
    dtype, device = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DEVICES))
    tensors = made(draw, call, dtype, device)
    i = draw(st.integers(0, len(tensors) - 1))
    if odd == "dtype":
        tensors[i] = tensors[i].to(draw(ODD_DTYPES if not call.case.classes else ODD_DTYPES.filter(is_no_class)))
    if odd == "device":
        tensors[i] = tensors[i].to(draw(st.sampled_from(["meta", *DEVICES])))
    if odd == "tensor":
        given = draw(ODD_TENSORS)
        return compare_odd_tensor(name, call, tensors, i, given)
    context = CONTEXTS[draw(st.sampled_from([c.name for c in CONTEXTS.values() if c.drawn]), label="context")]
    compare(name, call, context, tensors, odd)


def made(draw: Draw, call: Call, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9), label="seed"))
    found = []
    for i, shape in enumerate(call.shapes):
        t = tensor(call.case, i, shape, dtype, generator)
        lay = draw(st.sampled_from(layouts(t)), label="layout")
        found.append(LAYOUTS.get(lay, Tensor.contiguous)(t).to(device))
    return found


def compare(name: str, call: Call, context: Context, tensors: list[Tensor], odd: str) -> None:
    def with_attrs(f):
        return lambda *args: f(*args, **call.attrs)

    operator = Operator(name, with_attrs(call.ours), with_attrs(call.theirs), ())
    if odd and out_of_bounds(call, context, operator, tensors):
        attempt(context.apply, operator.ours, tensors)
        return torch.cuda.synchronize()
    with torchs_kernels():
        expected, got = (attempt(context.apply, f, tensors) for f in (operator.theirs, operator.ours))
    served = not isinstance(got, Exception)
    works = max((t.dtype for t in tensors if t.is_floating_point()), key=lambda d: torch.finfo(d).eps, default=None)
    if isinstance(expected, Exception) and any(text in str(expected) for text in TORCHS_OWN):
        return
    if served and odd == "attribute" and is_no_number_to_torch(expected, call.attrs):
        kinds = OPS[name].attrs
        attrs = {key: canonical(value, kinds[key]) if key in kinds else value for key, value in call.attrs.items()}
        expected = attempt(context.apply, lambda *args: call.theirs(*args, **attrs), tensors)
    if served and odd and isinstance(expected, Exception) and any(text in str(expected) for text in MORE):
        return
    if served and (odd == "dtype" or context.name == "dual_level"):
        expected = of_dtypes(got, expected)
    if served and (is_only_row_ignored(name, call, tensors) or is_huge(name, call.attrs)):
        return
    rule = Context(context.name, context.apply, context.refused or bool(odd), works or torch.float64)
    judge(rule, operator, expected, got, magnified=magnitude(tensors))
    if served and not odd:
        lies_as_torchs(name, operator, tensors)


@contextmanager
def torchs_kernels() -> Iterator[None]:
    """torch runs those that are right. oneDNN's convolutions of bfloat16 in tile registers read memory that nobody
    wrote, of 4 channels in 2 groups, with a stride of 3. cuDNN's of float32 use TF32."""
    cuda = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with torch.backends.mkldnn.flags(enabled=False), cuda:
        yield


def out_of_bounds(call: Call, context: Context, operator: Operator, tensors: list[Tensor]) -> bool:
    """Whether a class, position or length is none that there is, which on a GPU is an assertion of torch's, which ends
    the process, and NaN of ours. On a CPU both raise."""
    devices = {t.device.type for t in tensors}
    if not call.case.classes or "cuda" not in devices or "meta" in devices:
        return False
    here = [t.cpu() for t in tensors]
    theirs, mine = (attempt(context.apply, f, here) for f in (operator.theirs, operator.ours))
    return isinstance(theirs, IndexError) or "out of" in str(theirs) or isinstance(mine, Exception)


def is_huge(name: str, attrs: dict[str, Any]) -> bool:
    """A number beyond 16 bits. A softcap errs by a part of itself, and a norm's deviation of an eps of inf is NaN, both
    as documented."""
    numbers = (value for key, value in attrs.items() if OPS[name].attrs.get(key, "").startswith("float"))
    return any(isinstance(value, (int, float)) and abs(value) > torch.finfo(torch.float16).max for value in numbers)


def is_no_number_to_torch(expected: Any, attrs: dict[str, Any]) -> bool:
    """Ours takes what stands for a number, and an int for one axis. Torch computes with a tensor in its own dtype."""
    numbers = isinstance(expected, (TypeError, OverflowError))
    return numbers or any(isinstance(value, Tensor) for value in attrs.values())


def canonical(value: Any, kind: str) -> Any:
    kind = kind.removesuffix("?")
    if isinstance(value, complex):
        value = value.real  # an attribute that is compared with a number
    if isinstance(value, (bool, str, tuple, type(None))) or getattr(value, "ndim", 0):
        return value
    if kind == "float" and hasattr(value, "__float__"):
        return float(value)
    if hasattr(value, "__index__") or isinstance(value, float):
        return int(value) if kind == "int" else (int(value),)
    return value


def of_dtypes(got: Any, expected: Any) -> Any:
    """What is expected, in the dtypes of what came where these are narrower. Of tensors of two dtypes torch's functions
    make the wider one, and some of its tangents are wider than their results; ours has x's."""
    if isinstance(expected, (tuple, list)) and isinstance(got, type(expected)) and len(got) == len(expected):
        return type(expected)(map(of_dtypes, got, expected))
    both = all(isinstance(t, Tensor) and t.is_floating_point() for t in (got, expected))
    is_wider = both and torch.finfo(expected.dtype).eps < torch.finfo(got.dtype).eps
    return expected.to(got.dtype) if is_wider else expected


def is_only_row_ignored(name: str, call: Call, tensors: list[Tensor]) -> bool:
    """The mean of a row without its example is 0 by torch's kernel for a GPU, and NaN by that for a CPU and ours."""
    target = tensors[-1]
    if "cross_entropy" not in name or not tensors[0].is_cuda or target.numel() != 1 or target.is_meta:
        return False
    return target.item() == call.attrs["ignore_index"]


def magnitude(tensors: list[Tensor]) -> float:
    """A gradient is a sum of products of the inputs and of what comes in, and may itself be small."""
    here = [t for t in tensors if t.is_floating_point() and t.numel() and t.device.type != "meta"]
    largest = (float(t.abs().max()) for t in here)
    return 4 * math.prod(max(1.0, x) for x in largest)


def lies_as_torchs(name: str, operator: Operator, tensors: list[Tensor]) -> None:
    """A result of an elementwise operator has the strides that torch's has; any other is contiguous, or as torch's."""
    if name == "swiglu" and len({t.stride() for t in tensors}) > 1:
        return  # torch's is two operators, of which the second follows the first one's result
    if name == "conv2d" and tensors[0].is_cuda and tensors[0].dtype == torch.float64:
        return  # cuDNN has no float64 whose channels are last
    with torch.no_grad():
        mine, theirs = (f(*tensors) for f in (operator.ours, operator.theirs))
    pairs = zip(mine, theirs, strict=True) if isinstance(mine, tuple) else [(mine, theirs)]
    for a, b in pairs:
        if a.numel() and (OPS[name].elementwise or not a.is_contiguous()):
            axes = [i for i, size in enumerate(a.shape) if size > 1]
            strides = [[t.stride(i) for i in axes] for t in (a, b)]
            assert strides[0] == strides[1], f"strides {a.stride()}, expected {b.stride()}"


def compare_odd_tensor(name: str, call: Call, tensors: list[Any], i: int, given: Any) -> None:
    """An argument that is no tensor is refused, or taken as torch takes it."""
    args = [given if i == j else t for j, t in enumerate(tensors)]
    if call.case.classes and tensors[0].is_cuda:
        return  # positions that there are not: out_of_bounds
    expected, got = (attempt(lambda f, args: f(*args, **call.attrs), f, args) for f in (call.theirs, call.ours))
    works = next(t.dtype for t in tensors if t.is_floating_point())
    rule = Context("odd tensor", attempt, True, works)
    judge(rule, Operator(name, call.ours, call.theirs, ()), expected, got, magnified=4)
