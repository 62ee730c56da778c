"""Whole training steps in torch: a hash of every gradient of every step is the same whether the device is synchronized
after each module or never, and from several threads at once, each with a stream of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

Beside = Callable[[], AbstractContextManager[Any]]
"""The load on the device during the runs that are not synchronized."""

BATCHES = 4
"""Different inputs, which the steps take in turn."""
NO_END = float("inf")


class Sizes(NamedTuple):
    batch: int
    tokens: int
    width: int
    heads: int
    classes: int
    image: int


SMALL = Sizes(2, 9, 32, 2, 11, 6)
LARGE = Sizes(4, 128, 256, 4, 1000, 16)


@dataclass
class Steps:
    """A model's runs, each compared with the one that is synchronized."""

    model: str
    dtype: str
    device: str
    run: str
    steps: int
    """In each thread."""
    gradients: int
    seconds: float
    wrong: str = ""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.dtype}, {self.device}, {self.run}"


def soak(
    device: str, steps: int, threads: int, dtypes: Sequence[str], seed: int, beside: Beside, seconds: float = NO_END
) -> Iterator[Steps]:
    """Fewer ``steps`` where ``seconds`` end before: each run has its share of what is left, by its threads."""
    ends = time.monotonic() + seconds
    models = list(product(MODELS, dtypes))
    for i, (name, dtype) in enumerate(models):
        left = (ends - time.monotonic()) / (len(models) - i)
        yield from _of_model(name, dtype, device, steps, threads, seed, beside, left)


def _of_model(
    name: str, dtype: str, device: str, steps: int, threads: int, seed: int, beside: Beside, seconds: float
) -> Iterator[Steps]:
    runs = [("not synchronized", 1)] * (device == "cuda") + [(f"{threads} threads", threads)]
    share = seconds / (1 + sum(n for _, n in runs))
    started = time.monotonic()
    expected = _hashes(MODELS[name], dtype, device, steps, seed, True, started + share)
    steps, gradients = expected.shape
    yield Steps(name, dtype, device, "synchronized", steps, gradients, time.monotonic() - started)
    for run, n in runs:
        started = time.monotonic()
        with beside():
            found = _at_once(n, partial(_hashes, MODELS[name], dtype, device, steps, seed, False, started + n * share))
        ran = min((len(each) for each in found if not isinstance(each, Exception)), default=0)
        wrong = next(filter(None, (_difference(each, expected) for each in found)), "")
        yield Steps(name, dtype, device, run, ran, gradients, time.monotonic() - started, wrong)


def _difference(found: Any, expected: Any) -> str:
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {found}"
    steps, gradients = (found != expected[: len(found)]).nonzero(as_tuple=True)
    if not len(steps):
        return ""
    first = int(steps.min())
    which = sorted({int(g) for s, g in zip(steps.tolist(), gradients.tolist(), strict=True) if s == first})
    return (
        f"step {first + 1}: other bits in {len(which)} of {expected.shape[1]} gradients, the first is number {which[0]}"
    )


def _at_once(threads: int, work: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work) for _ in range(threads)]
    return [future.exception() or future.result() for future in futures]


_making = threading.Lock()


def _hashes(make: Any, dtype: str, device: str, steps: int, seed: int, synchronize: bool, ends: float = NO_END) -> Any:
    """(steps, gradients), at least one step: the loss counts as a gradient."""
    import torch

    from aotops.frontends.torch import AdamW

    sizes = LARGE if device == "cuda" else SMALL
    with _making:  # the numbers are drawn from torch's generator, which the threads share
        torch.manual_seed(seed)
        model = make(sizes).to(getattr(torch, dtype))
        batches = [model.batch() for _ in range(BATCHES)]
    stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
    with stream:
        model = model.to(device)
        batches = [[x.to(device) for x in batch] for batch in batches]
        if synchronize and device == "cuda":
            for module in model.modules():
                module.register_forward_hook(lambda *_: torch.cuda.synchronize())
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: torch.cuda.synchronize())
        parameters = list(model.parameters())
        optimizer = AdamW(parameters, lr=1e-3)
        hashes = torch.zeros(steps, len(parameters) + 1, dtype=torch.int64, device=device)
        done = 0
        while done < steps and (done == 0 or time.monotonic() < ends):
            loss = model(*batches[done % BATCHES])
            loss.backward()
            for i, tensor in enumerate((*(p.grad for p in parameters), loss.detach())):
                hashes[done, i] = _hash(torch, tensor)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        return hashes[:done].cpu()


def _hash(torch: Any, tensor: Any) -> Any:
    """A sum of integers, exact in any order, that depends on each bit and its place."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.contiguous().view(integers).flatten().to(torch.int64)
    places = torch.arange(bits.numel(), device=bits.device)
    return ((bits + 1) * (places * 2_654_435_761 + 1)).sum()


# -------------------------------------------------------------------------------------------------------------- models


def transformer(sizes: Sizes) -> Any:
    """A block with attention and a gated layer, on the library's operators alone."""
    import torch

    from aotops.frontends import torch as F

    class Transformer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            n = sizes.width
            self.norm, self.into, self.out = F.RMSNorm(n), F.Linear(n, 3 * n), F.Linear(n, n)
            self.weight = torch.nn.Parameter(torch.ones(n))
            self.bias = torch.nn.Parameter(torch.zeros(n))
            self.gate, self.up = F.Linear(n, 4 * n, bias=False), F.Linear(n, 4 * n, activation="gelu")
            self.down, self.last = F.Linear(4 * n, n), F.LayerNorm(n)
            self.head = F.Linear(n, sizes.classes)
            self.loss = F.CrossEntropyLoss(label_smoothing=0.1)

        def batch(self) -> list[Any]:
            dtype = self.weight.dtype
            x = torch.randn(sizes.batch, sizes.tokens, sizes.width).to(dtype)
            return [x, torch.randint(sizes.classes, (sizes.batch * sizes.tokens,))]

        def forward(self, x: Any, target: Any) -> Any:
            batch, tokens, n = x.shape
            q, k, v = (
                part.reshape(batch, tokens, sizes.heads, -1).transpose(1, 2).contiguous()
                for part in self.into(self.norm(x)).chunk(3, -1)
            )
            scores = F.softmax(F.matmul(q, k.transpose(-1, -2)) * (n / sizes.heads) ** -0.5, -1)
            attended = F.matmul(scores, v).transpose(1, 2).reshape(batch, tokens, n)
            h, x = F.add_layer_norm(self.out(attended), x, n, self.weight, self.bias)
            x = F.add(x, self.down(F.swiglu(self.gate(h), self.up(h))))
            return self.loss(self.head(self.last(x)).flatten(0, 1), target)

    return Transformer()


def convolutions(sizes: Sizes) -> Any:
    """Two convolutions, a batch norm, a recurrent cell and a loss."""
    import torch

    from aotops.frontends import torch as F

    class Convolutions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            n = sizes.width // 4
            self.first, self.second = F.Conv2d(3, n, 3, padding=1), F.Conv2d(n, n, 3, stride=2, padding=1)
            self.norm, self.act, self.cell = F.BatchNorm2d(n), F.GELU(), F.LLTM(n, n)
            self.weight = torch.nn.Parameter(torch.ones(n))
            self.head, self.loss = F.Linear(n, sizes.classes), F.CrossEntropyLoss()

        def batch(self) -> list[Any]:
            x = torch.randn(sizes.batch, 3, sizes.image, sizes.image).to(self.weight.dtype)
            return [x, torch.randint(sizes.classes, (sizes.batch,))]

        def forward(self, x: Any, target: Any) -> Any:
            x = self.act(self.second(self.act(self.norm(self.first(x))))).flatten(2).transpose(1, 2).contiguous()
            h = c = x[:, 0].contiguous()
            for i in range(1, 4):
                h, c = self.cell(x[:, i].contiguous(), (h, c))
            h, _ = F.add_rms_norm(h, c, h.shape[-1], self.weight)
            return self.loss(self.head(h), target)

    return Convolutions()


MODELS = {"transformer": transformer, "convolutions": convolutions}
