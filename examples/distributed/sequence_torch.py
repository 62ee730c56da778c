"""Attention over a sequence that is split over processes, beside the same call in one process:

    torchrun --nproc-per-node 2 examples/distributed/sequence_torch.py

- ring: keys and values go from process to process. Results for parts of the keys are merged by the logarithms of their
  sums, and the backward sends the gradients of keys and values along with them. A process has two parts at a time.
- gather: each process gathers all keys and values. Their gradients are summed and scattered.

Processes use CUDA and NCCL where there is a GPU for each of them, else the CPU and gloo. Exits with 1 if a result or a
gradient is not the one of one process.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aotops import library
from aotops.frontends import torch as F

MAX_DISTANCE = 1e-5  # of float32, relative to the largest element


# ---------------------------------------------------------------------------------------------------------------- ring


class Ring(torch.autograd.Function):
    """q, k, v: a process's part of each, (batch, queries, heads, head_dim); the parts are equal."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        y, lse, parts = None, None, (k, v)
        for step in range(size):
            of = (rank - step) % size  # the process whose keys are here
            if of <= rank or not causal:
                found = torch.ops.aotops.attention(q, *parts, *[None] * 7, *attributes(causal and of == rank))
                y, lse = found if y is None else merged(y, lse, *found)
            if step + 1 < size:
                parts = passed_on(parts)
        y = y.to(q.dtype)
        ctx.causal = causal
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        rank, size = dist.get_rank(), dist.get_world_size()
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for step in range(size):
            of = (rank - step) % size
            if of <= rank or not ctx.causal:
                # The result and the sums are those of all keys, so each part's gradients are summands of the whole.
                rows = dy, q, k, v, *[None] * 7, y, lse, *attributes(ctx.causal and of == rank)
                for to, part in zip((dq, dk, dv), torch.ops.aotops.attention_backward(*rows), strict=False):
                    to += part
            k, v, dk, dv = passed_on((k, v, dk, dv))  # after the last step everything is where it began
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None


def attributes(causal: bool) -> tuple:
    """causal, scale, window, softcap, layout, dropout."""
    return causal, None, (-1, -1), 0.0, "BSHD", 0.0


def merged(y: Tensor, lse: Tensor, more: Tensor, of_more: Tensor) -> tuple[Tensor, Tensor]:
    """The results of a softmax over two sets of keys, from those over each."""
    total = torch.logaddexp(lse, of_more)  # (batch, heads, queries)
    shares = ((x - total).exp().transpose(1, 2)[..., None] for x in (lse, of_more))
    return sum(x * share for x, share in zip((y, more), shares, strict=True)), total


def passed_on(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors of the process before, while those of this one go to the next."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors, received = [x.contiguous() for x in tensors], [torch.empty_like(x) for x in tensors]
    if size == 1:
        return tensors
    sent = [dist.P2POp(dist.isend, x, (rank + 1) % size, tag=i) for i, x in enumerate(tensors)]
    taken = [dist.P2POp(dist.irecv, x, (rank - 1) % size, tag=i) for i, x in enumerate(received)]
    for work in dist.batch_isend_irecv(sent + taken):
        work.wait()
    return received


def ring(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return Ring.apply(q, k, v, causal)


# -------------------------------------------------------------------------------------------------------------- gather


class Gathered(torch.autograd.Function):
    """The parts of all processes, one after the other along the sequence."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Tensor:
        dy = dy.contiguous()
        dist.all_reduce(dy)
        return dy.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def gather(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    k, v = Gathered.apply(k), Gathered.apply(v)
    if causal:  # the last query stands beside the last of the keys that it may see
        seen = (dist.get_rank() + 1) * q.shape[1]
        k, v = k[:, :seen], v[:, :seen]
    return F.attention(q, k, v, causal=causal)


# ---------------------------------------------------------------------------------------------------------- comparison

WAYS = {"ring": ring, "gather": gather}


def compare(way: str, causal: bool, length: int, device: str) -> bool:
    """Prints how far the results and gradients of this process's part are from those of the whole call."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = [(2, length, heads, 32) for heads in (4, 2, 2, 4)]
    *whole, dy = (torch.randn(shape, device=device) for shape in sizes)
    whole = [x.requires_grad_() for x in whole]
    y = F.attention(*whole, causal=causal)
    expected = [y, *torch.autograd.grad(y, whole, dy)]

    def part(x: Tensor) -> Tensor:
        return x.detach().chunk(size, 1)[rank].contiguous()

    own = [part(x).requires_grad_() for x in whole]
    y = WAYS[way](*own, causal)
    found = [y, *torch.autograd.grad(y, own, part(dy))]
    distances = [(a - part(b)).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
    farthest = torch.stack(distances).detach()
    dist.all_reduce(farthest, dist.ReduceOp.MAX)
    if rank == 0:
        told = ", ".join(f"{name} {x:.1e}" for name, x in zip(("y", "dq", "dk", "dv"), farthest.tolist(), strict=True))
        print(f"{way:6} {'causal' if causal else 'full':6} {length} tokens in {size} parts: {told}", flush=True)
    return bool(farthest.max() <= MAX_DISTANCE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of a process; default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if each process has a GPU, else cpu")
    args = parser.parse_args()

    gpus = library.has_cuda() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = args.device or ("cuda" if gpus else "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    length = args.tokens * dist.get_world_size()
    equal = [compare(way, causal, length, device) for way in WAYS for causal in (False, True)]
    dist.destroy_process_group()
    return not all(equal)


if __name__ == "__main__":
    sys.exit(main())
