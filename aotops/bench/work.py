"""The work that is measured: operators with their tensors, shapes, minimum bytes and FLOPs.

Here are the kinds of operators. An operator's row says of what kind it is: its ``bench`` are Works. Without any, one of
its cases is enlarged (enlarged.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from .. import registry
from ..flops import backward_flops, flops

Shape = tuple[int, ...]

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
DTYPES = tuple(ITEMSIZE)
LN_EPS, RMS_EPS = 1e-5, 1e-6

# --------------------------------------------------------------------------------------------------- kinds of operators


@dataclass(frozen=True)
class Work:
    """A tensor is a letter. A subclass, a kind of operator, defines the shape of a case and the shapes of the letters
    have then. w is always the weight, and n the most that ``n_classes`` says. Bytes are the fewest that can be moved:
    what is read is read once, what is written is written once; statistics and scratch are not counted."""

    reads: str
    """The operator's inputs, in order."""
    writes: str
    backward: tuple[str, str] | None = None
    """The bytes that the backward must read and write; None if it does nothing."""
    variant: str = ""
    """Words. tf32: float32 products use TF32 on a GPU."""
    dtypes: tuple[str, ...] = DTYPES
    call: Callable[[Any, Shape], Callable[..., Any]] | None = None
    """Takes a module of operators and a shape; returns a function of the inputs. None: the operator itself."""
    op: str = ""
    """The name that the registry knows the operator by; set by ``works``."""

    AXES: ClassVar[tuple[str, ...]]
    """The meaning of a shape's numbers."""
    SHAPES: ClassVar[tuple[Shape, ...]]
    FEW: ClassVar[tuple[Shape, ...]]
    """Instead, with --quick and on a CPU."""
    CONSTANTS: ClassVar[str] = ""
    """Letters whose gradients nobody wants."""
    SMALL: ClassVar[int] = 0
    """For shapes of at most this product, the call itself is measured."""
    LIBRARY: ClassVar[str] = ""
    """The library behind torch's function on a GPU."""

    @property
    def name(self) -> str:
        return f"{self.op} {self.variant}".rstrip()

    @property
    def plain_name(self) -> str:
        """Without the library."""
        return self.op.rpartition(".")[2]

    @property
    def passes(self) -> tuple[str, ...]:
        return ("forward", "backward") if self.backward else ("forward",)

    @property
    def tf32(self) -> bool:
        return "tf32" in self.variant.split()

    def function(self, module: Any, shape: Shape) -> Callable[..., Any]:
        return self.call(module, shape) if self.call else getattr(module, self.plain_name)

    def tensors(self, shape: Shape) -> dict[str, Shape]:
        """The shape of each letter."""
        raise NotImplementedError

    def n_classes(self, shape: Shape) -> int:
        """The number of classes of t, or n."""
        return shape[-1]

    def length(self, shape: Shape) -> int:
        """The length of a row, over which rates are plotted."""
        return shape[-1]

    def shapes(self, device: str, given: Sequence[Shape] | None, quick: bool) -> Sequence[Shape]:
        """The shapes to measure: ``given``, if they are of this kind."""
        if given is not None:
            return [shape for shape in given if len(shape) == len(self.AXES)]
        return self.FEW if quick or device == "cpu" else self.SHAPES

    def small(self, shape: Shape) -> bool:
        return math.prod(shape) <= self.SMALL

    def flops(self, pass_: str, shape: Shape) -> int:
        """FLOPs of the operator's products (``Product.flops``), with all gradients in a backward."""
        op, tensors = registry.get(self.op), self.tensors(shape)
        if op.product is None:
            return 0
        function = self.function(SimpleNamespace(**{self.plain_name: op.bind}), shape)
        given = (SimpleNamespace(shape=tensors[letter], ndim=len(tensors[letter])) for letter in self.reads)
        inputs, attrs = function(*given)
        call = op, op.canonical(attrs), [None if x is None else x.shape for x in inputs]
        return flops(*call) if pass_ == "forward" else backward_flops(*call, {f"d{slot}" for slot in op.inputs})

    def bytes(self, pass_: str, shape: Shape, dtype: str) -> int:
        reads, writes = (self.reads, self.writes) if pass_ == "forward" or not self.backward else self.backward
        tensors = self.tensors(shape)
        return sum(math.prod(tensors[letter]) * (8 if letter in "tn" else ITEMSIZE[dtype]) for letter in reads + writes)


class Rows(Work):
    """x has M rows of N, w is one row (a weight or its gradient), t has a class for each row, and s is a scalar."""

    AXES = ("M", "N")
    ELEMENTS: ClassVar[int] = 1 << 26
    """M * N on a GPU: twice the L2 cache of an H200 in bfloat16."""
    SHAPES: ClassVar[tuple[Shape, ...]] = ((8, 256), (256,), (768,), (1024,), (4096,), (8192,), (32768,), (131072,))
    FEW: ClassVar[tuple[Shape, ...]] = ((8, 256), (1024,), (8192,))
    SMALL = 8 * 256

    def tensors(self, shape):
        return {"x": shape, "w": shape[-1:], "t": shape[:-1], "s": ()}

    def shapes(self, device, given, quick):
        """On a GPU, N alone stands for ELEMENTS / N rows; a CPU has its own shapes."""
        if given is None and device == "cpu":
            return [(8, 256), (512, 1024) if quick else (8192, 4096)]
        shapes = (self.FEW if quick else self.SHAPES) if given is None else [s for s in given if len(s) < 3]
        return [self.filled(s) if len(s) == 1 and device != "cpu" else s for s in shapes]

    def filled(self, shape: Shape) -> Shape:
        return self.ELEMENTS // shape[0], shape[0]


class OddRows(Rows):
    """The rows are no whole vectors of 16 bytes in 16 bits. Their lengths are those of windows, of a class token and
    patches, and of word vectors."""

    SHAPES = ((49,), (197,), (300,), (1023,), (4097,))
    FEW = ()

    def shapes(self, device, given, quick):
        return [] if given is not None or device == "cpu" else super().shapes(device, given, quick)


class Along(Work):
    """x is (B, N, I), along N: 21 classes of a segmentation, 49 positions of 768 channels, and four of eight."""

    AXES = ("B", "N", "I")
    SHAPES = ((8, 21, 262144), (1024, 49, 768), (1 << 20, 4, 8))
    FEW = ()

    def shapes(self, device, given, quick):
        return [] if given is not None else super().shapes(device, given, quick)

    def tensors(self, shape):
        return {"x": shape}

    def length(self, shape):
        return shape[1]


class Elements(Rows):
    """The work without rows: x has one axis."""

    def filled(self, shape):
        return (self.ELEMENTS,)


class Product(Work):
    """a is (M, K), b (K, N), w (N, K), y (M, N) and v (N,)."""

    AXES = ("M", "N", "K")
    # cubes, and the first linear layer of three transformers
    SHAPES = (
        *((n, n, n) for n in (1024, 2048, 4096, 8192)),
        (4096, 16384, 4096),
        (8192, 4096, 1024),
        (2048, 3072, 768),
    )
    FEW = ((256, 256, 256), (1024, 1024, 1024))
    LIBRARY = "cuBLAS"

    def tensors(self, shape):
        m, n, k = shape
        return {"a": (m, k), "b": (k, n), "w": (n, k), "y": (m, n), "v": (n,)}


class Head(Work):
    """The loss of a model's head: a is (M, K), w has a row of K for each of N classes, t the class of each row, and s
    is a scalar. With a variant, the loss and its gradients."""

    AXES = ("M", "N", "K")
    # GPT-2 with its vocabulary padded, and as it is; a model of 8 billion parameters
    SHAPES = ((16384, 50304, 768), (16384, 50257, 768), (8192, 131072, 4096))
    FEW = ((512, 2048, 256),)
    LIBRARY = "cuBLAS"

    def tensors(self, shape):
        m, n, k = shape
        return {"a": (m, k), "w": (n, k), "t": (m,), "s": ()}

    def n_classes(self, shape):
        return shape[1]

    def flops(self, pass_, shape):
        return super().flops(pass_, shape) * (3 if self.variant else 1)


class Convolution(Work):
    """x has square images, w square filters, and y the results. Half of a filter's size is the padding; patches, whose
    stride is that size, have none. Without the number of groups there is one. The variant names the layout: nchw or
    nhwc."""

    AXES = ("batch", "channels", "size", "outputs", "kernel", "stride", "groups")
    # of ResNet-50
    SHAPES = (
        (32, 64, 56, 64, 3, 1),
        (32, 256, 56, 64, 1, 1),
        (32, 128, 28, 128, 3, 1),
        (32, 512, 7, 512, 3, 1),
        (32, 128, 56, 128, 3, 2),
        (32, 3, 224, 64, 7, 2),
        (64, 3, 224, 1024, 16, 16),  # a vision transformer's patches
        # of RegNetY-032
        (64, 216, 28, 216, 3, 1, 9),
        (64, 576, 14, 576, 3, 1, 24),
        (64, 72, 112, 72, 3, 2, 3),
        # of ResNeXt-50, 32 x 4d
        (64, 128, 56, 128, 3, 1, 32),
        (64, 512, 14, 512, 3, 1, 32),
        (64, 1024, 7, 1024, 3, 1, 32),
    )
    FEW = ((4, 32, 28, 64, 3, 1), (4, 64, 28, 32, 1, 2))
    LIBRARY = "cuDNN"

    @property
    def nhwc(self) -> bool:
        return "nhwc" in self.variant.split()

    def shapes(self, device, given, quick):
        if given is not None:
            return [shape for shape in given if len(self.AXES) - len(shape) in (0, 1)]
        return super().shapes(device, given, quick)

    def tensors(self, shape):
        batch, channels, size, outputs, kernel, stride = shape[:6]
        groups = conv2d_arguments(shape)[-1]

        def square(n: int, channels: int, size: int) -> Shape:
            return (n, size, size, channels) if self.nhwc else (n, channels, size, size)

        return {
            "x": square(batch, channels, size),
            "w": square(outputs, channels // groups, kernel),
            "y": square(batch, outputs, math.ceil(size / stride)),
        }


class Rotations(Work):
    """x has heads, each row of the sequence with a row of c, which is one of the tables."""

    AXES = ("batch", "sequence", "heads", "head_dim")
    # Llama's queries, and its keys; heads of GPT-J, and a decoder's step
    SHAPES = ((4, 4096, 32, 128), (4, 4096, 8, 128), (4, 2048, 16, 256), (64, 1, 32, 128))
    FEW = ((1, 1, 32, 128), (1, 2048, 32, 128))
    CONSTANTS = "c"
    SMALL = 64 * 32 * 128

    def tensors(self, shape):
        return {"x": shape, "c": (shape[1], shape[3] // 2)}


class Projections(Work):
    """p is the packed product of a projection, q and k what it is taken apart into, with a row of c, one of the tables,
    for each row of the sequence."""

    AXES = ("batch", "sequence", "heads", "kv_heads", "head_dim")
    # of Llama, of GPT-2's size, and a decoder's step
    SHAPES = ((8, 2048, 32, 8, 128), (16, 1024, 12, 12, 64), (64, 1, 32, 8, 128))
    FEW = ((1, 1, 32, 8, 128), (1, 1024, 12, 12, 64))
    CONSTANTS = "c"
    SMALL = 64 * 32 * 8 * 128

    def tensors(self, shape):
        batch, seq, heads, kv_heads, dim = shape
        return {
            "p": (batch, seq, (heads + 2 * kv_heads) * dim),
            "c": (seq, dim // 2),
            "q": (batch, seq, heads, dim),
            "k": (batch, seq, kv_heads, dim),
        }


class Attention(Work):
    """q has the queries' heads, k those of the keys, and of the values. The variant may be causal: its FLOPs count what
    no query sees too."""

    AXES = ("batch", "sequence", "heads", "kv_heads", "head_dim")
    # of GPT-2's size, of Llama, and heads of 256
    SHAPES = ((16, 1024, 12, 12, 64), (4, 2048, 32, 8, 128), (1, 8192, 32, 8, 128), (4, 2048, 16, 16, 256))
    FEW = ((1, 128, 12, 12, 64), (1, 1024, 12, 12, 64))
    SMALL = 128 * 12 * 12 * 64

    def tensors(self, shape):
        batch, seq, heads, kv_heads, dim = shape
        return {"q": (batch, seq, heads, dim), "k": (batch, seq, kv_heads, dim)}


class Decoding(Work):
    """q has the last query of each example, k all of its keys, and its values; n is how many there are."""

    AXES = ("batch", "keys", "heads", "kv_heads", "head_dim")
    # of Llama's sizes, and of one without shared heads
    SHAPES = ((8, 32768, 32, 8, 128), (1, 131072, 64, 8, 128), (64, 4096, 32, 8, 128), (16, 1024, 12, 12, 64))
    FEW = ((1, 1024, 12, 12, 64), (1, 4096, 32, 8, 128))
    CONSTANTS = "n"

    def tensors(self, shape):
        batch, keys, heads, kv_heads, dim = shape
        return {"q": (batch, 1, heads, dim), "k": (batch, keys, kv_heads, dim), "n": (batch,)}

    def n_classes(self, shape):
        return shape[1]


class Cell(Work):
    """A recurrent cell: i is its input, h a state, old or new, g what its three gates are before they are applied, w
    the weights of state and input, and b the bias."""

    AXES = ("batch", "features", "state")
    SHAPES = ((16, 32, 128), (64, 512, 512), (4096, 1024, 1024))
    FEW = SHAPES[:2]
    SMALL = 16 * 32 * 128

    def tensors(self, shape):
        batch, features, state = shape
        gates = 3 * state
        return {
            "i": (batch, features),
            "h": (batch, state),
            "g": (batch, gates),
            "w": (gates, state + features),
            "b": (1, gates),
        }


def conv2d_arguments(shape: Shape) -> tuple[int, int, int, int]:
    """Its stride, padding, dilation and groups."""
    kernel, stride, groups = (*shape[4:], 1)[:3]
    return stride, 0 if stride == kernel else kernel // 2, 1, groups
