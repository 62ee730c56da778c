"""What is measured: operators and their tensors, shapes, and the bytes that cannot be avoided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..ops import OPS

Shape = tuple[int, ...]

ELEMENTS = 1 << 26
"""M * N on a GPU: twice the L2 cache of an H200 in bfloat16."""
LENGTHS = (256, 768, 1024, 4096, 8192, 32768, 131072)
SMALL = (8, 256)
"""Done in no time: here the call is what is measured."""

PRODUCTS = (
    *((n, n, n) for n in (1024, 2048, 4096, 8192)),
    (4096, 16384, 4096),
    (8192, 4096, 1024),
    (2048, 3072, 768),
)
"""M, N, K of matrix products: cubes, and the first linear layer of three transformers."""

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Work:
    """A tensor is a letter: x has M rows of N, w is one row (a weight or its gradient), t has a class for each row, and
    s is a scalar; of a product, a is (M, K), b (K, N), c (N, K), y (M, N) and v (N,). Bytes are the fewest that can be
    moved: what is read is read once, what is written is written once, and neither statistics nor scratch count."""

    op: str
    reads: str
    """The operator's inputs, in order."""
    writes: str
    backward: tuple[str, str] | None = None
    """What the backward must read and write; None where there is nothing to do."""
    variant: str = ""
    rows: bool = True
    """Whether N is the length of a row; an elementwise operator takes one axis."""
    product: bool = False
    """Whether it is a product of matrices, whose shapes are M, N, K and whose operations count too."""

    @property
    def name(self) -> str:
        return f"{self.op} {self.variant}".rstrip()

    @property
    def passes(self) -> tuple[str, ...]:
        return ("forward", "backward") if self.backward else ("forward",)

    def shapes(self, shape: Shape) -> list[Shape]:
        """The shapes of the inputs."""
        return [_shape(letter, shape) for letter in self.reads]

    def flops(self, pass_: str, shape: Shape) -> int:
        """Those of the products: of a forward one, of a backward two."""
        return 2 * math.prod(shape) * (1 if pass_ == "forward" else 2) if self.product else 0

    def bytes(self, pass_: str, shape: Shape, dtype: str) -> int:
        reads, writes = (self.reads, self.writes) if pass_ == "forward" or not self.backward else self.backward
        return sum(
            math.prod(_shape(letter, shape)) * (8 if letter == "t" else ITEMSIZE[dtype]) for letter in reads + writes
        )


def _shape(letter: str, shape: Shape) -> Shape:
    if letter in "abcyv":
        m, n, k = shape
        return {"a": (m, k), "b": (k, n), "c": (n, k), "y": (m, n), "v": (n,)}[letter]
    return {"x": shape, "w": shape[-1:], "t": shape[:-1], "s": ()}[letter]


WORKS = (
    Work("add", "xx", "x", rows=False),  # its gradient is the one that comes in
    Work("gelu", "x", "x", ("xx", "x"), variant="none", rows=False),
    Work("gelu", "x", "x", ("xx", "x"), variant="tanh", rows=False),
    Work("swiglu", "xx", "x", ("xxx", "xx"), rows=False),
    Work("layer_norm", "xww", "x", ("xxw", "xww")),
    Work("rms_norm", "xw", "x", ("xxw", "xw")),
    # both results are used, so two gradients come in; those of x and of residual are one tensor
    Work("add_layer_norm", "xxww", "xx", ("xxxw", "xww")),
    Work("add_rms_norm", "xxw", "xx", ("xxxw", "xw")),
    Work("softmax", "x", "x", ("xx", "x")),
    Work("cross_entropy", "xt", "s", ("xts", "x")),
    Work("matmul", "ab", "y", ("yab", "ab"), rows=False, product=True),
    Work("linear", "acv", "y", ("yac", "acv"), rows=False, product=True),
    Work("linear", "acv", "y", ("yyac", "acv"), variant="gelu", rows=False, product=True),
    Work("cross_entropy", "xt", "sx", variant="fused_dx"),  # the loss and its gradient, as a training step wants them
)


@dataclass(frozen=True)
class Case:
    work: Work
    pass_: str
    shape: Shape
    dtype: str

    @property
    def bytes(self) -> int:
        return self.work.bytes(self.pass_, self.shape, self.dtype)

    @property
    def flops(self) -> int:
        return self.work.flops(self.pass_, self.shape)

    @property
    def small(self) -> bool:
        return math.prod(self.shape) <= math.prod(SMALL)

    def __str__(self) -> str:
        return f"{self.work.name} {self.pass_} {'x'.join(map(str, self.shape))} {self.dtype}"


def cases(
    device: str,
    dtypes: list[str],
    ops: list[str] | None = None,
    shapes: list[Shape] | None = None,
    passes: list[str] | None = None,
    quick: bool = False,
) -> Iterator[Case]:
    """Operators that the library does not define are left out."""
    for work in WORKS:
        if work.op not in (ops or OPS) or work.op not in OPS:
            continue
        for shape in dict.fromkeys(_shapes(work, device, shapes, quick)):
            for dtype in dtypes:
                for pass_ in work.passes:
                    if pass_ in (passes or work.passes):
                        yield Case(work, pass_, shape, dtype)


def _shapes(work: Work, device: str, shapes: list[Shape] | None, quick: bool) -> Iterator[Shape]:
    if work.product:
        few = ((256,) * 3, (1024,) * 3)
        yield from [s for s in shapes or [] if len(s) == 3] or (few if quick or device == "cpu" else PRODUCTS)
        return
    shapes = None if shapes is None else [s for s in shapes if len(s) < 3]
    if shapes is None:
        yield SMALL
        if device == "cpu":
            shapes = [(512, 1024) if quick else (8192, 4096)]
        else:
            shapes = [(n,) for n in ((1024, 8192) if quick else LENGTHS)]
    for shape in shapes:
        if device == "cpu" or len(shape) > 1:
            yield shape
        else:
            yield (ELEMENTS // shape[0], shape[0]) if work.rows else (ELEMENTS,)
