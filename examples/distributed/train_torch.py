"""Trains two models with aotops' modules on several devices, beside the same training in one process:

    torchrun --nproc-per-node 2 examples/distributed/train_torch.py

- digits: the classifier of examples/digits.py, linear - LayerNorm - GELU - linear.
- transformer: a decoder of two layers (RMSNorm, attention, SwiGLU) that continues sequences of numbers.

Each is trained with DistributedDataParallel (ddp), with fully_shard (fsdp), whose processes take a part of each batch,
and with tensor parallelism (tensor), whose processes take a part of each product, of the sequence, and of the classes
of the loss. Processes use CUDA and NCCL where there is a GPU for each of them, else the CPU and gloo. Exits with 1 if a
loss is not the one of one process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from aotops import library
from aotops.frontends import torch as F

MAX_DISTANCE = 1e-4  # relative, between the losses of several processes and of one
Batches = Iterator[tuple[Tensor, Tensor]]


# -------------------------------------------------------------------------------------------------------------- models


def digits(hidden: int = 128) -> nn.Module:
    return nn.Sequential(F.Linear(64, hidden), F.LayerNorm(hidden), F.GELU(), F.Linear(hidden, 10))


def digits_batches() -> Batches:
    """Batches of images and their classes, as in examples/digits.py."""
    sys.path.append(str(Path(__file__).parents[1]))
    from digits import make_task

    task, _ = make_task()
    x, y = torch.from_numpy(task["x"]), torch.from_numpy(task["y"])
    for order in task["batches"]:
        for batch in order:
            yield x[batch], y[batch]


def digits_plan() -> dict:
    """The pixels are split, then the rows, for LayerNorm needs all hidden features, and then the classes."""
    return {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False),
        "1": SequenceParallel(sequence_dim=0),
        "3": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=False),
    }


class Attention(nn.Module):
    """Causal. Heads are independent: a process may have a part of them."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.out = (F.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(linear(x)) for linear in (self.q, self.k, self.v))
        scores = F.matmul(q, k.mT) / self.head**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        mixed = F.matmul(F.softmax(scores.masked_fill(later, -torch.inf), -1), v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """(batch, heads, sequence, head)."""
        return x.unflatten(-1, (-1, self.head)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = F.Linear(width, hidden), F.Linear(width, hidden)
        self.down = F.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.swiglu(self.gate(x), self.up(x)))


class Layer(nn.Module):
    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = F.RMSNorm(width), Attention(width, head)
        self.ffn_norm, self.ffn = F.RMSNorm(width), FeedForward(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.add(x, self.attention(self.attention_norm(x)))
        return F.add(x, self.ffn(self.ffn_norm(x)))


class Transformer(nn.Module):
    def __init__(self, tokens: int = 64, width: int = 64, head: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Layer(width, head) for _ in range(depth))
        self.norm, self.logits = F.RMSNorm(width), F.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm(x))


def transformer_batches(tokens: int = 64, length: int = 32, batch: int = 16) -> Batches:
    """Sequences that count up by a number of their own, from 1 to 4, and what follows each element."""
    generator = torch.Generator().manual_seed(0)
    while True:
        start, step = (torch.randint(low, high, (batch, 1), generator=generator) for low, high in ((0, tokens), (1, 5)))
        sequence = (start + step * torch.arange(length + 1)) % tokens
        yield sequence[:, :-1], sequence[:, 1:]


def transformer_plan() -> dict:
    """Heads and hidden features are split within attention and the feed-forward part, the sequence between them."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "logits": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for layer in ("layers.0", "layers.1"):
        plan |= {f"{layer}.{norm}": SequenceParallel() for norm in ("attention_norm", "ffn_norm")}
        plan |= {f"{layer}.{part}": whole for part in ("attention", "ffn")}
        plan |= {f"{layer}.{column}": ColwiseParallel() for column in ("attention.q", "attention.k", "attention.v")}
        plan |= {f"{layer}.{column}": ColwiseParallel() for column in ("ffn.gate", "ffn.up")}
        plan |= {f"{layer}.{row}": RowwiseParallel(output_layouts=Shard(1)) for row in ("attention.out", "ffn.down")}
    return plan


@dataclass
class Task:
    model: Callable[[], nn.Module]
    batches: Callable[[], Batches]
    plan: Callable[[], dict]


TASKS = {
    "digits": Task(digits, digits_batches, digits_plan),
    "transformer": Task(Transformer, transformer_batches, transformer_plan),
}


# ------------------------------------------------------------------------------------------------------------ training


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], part: slice, place: Callable[[Tensor], Tensor]):
    """The losses of the steps, of a part of each batch. ``place`` gives the targets the model's placement."""
    # In torch 2.11 updates of all tensors at once (foreach, the default on CUDA) add partial gradients of replicated
    # parameters unreduced, those of torch's own LayerNorm too.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    losses = []
    for x, target in batches:
        loss = F.cross_entropy(model(x[part]).flatten(0, -2), place(target[part].flatten()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss.detach())
    return torch.stack(losses)


def in_parallel(model: nn.Module, way: str, plan: dict, batches: list, mesh: DeviceMesh) -> Tensor:
    """The losses of the steps in all processes."""
    if way == "tensor":
        sharded = parallelize_module(model, mesh, plan)
        return train(sharded, batches, slice(None), lambda t: DTensor.from_local(t, mesh, [Replicate()])).detach()
    if way == "fsdp":
        for layer in getattr(model, "layers", ()):
            fully_shard(layer, mesh=mesh)
        sharded = fully_shard(model, mesh=mesh)
    else:
        sharded = nn.parallel.DistributedDataParallel(model)
    losses = train(sharded, batches, slice(mesh.get_rank(), None, mesh.size()), lambda t: t) / mesh.size()
    dist.all_reduce(losses)
    return losses


def compare(name: str, ways: list[str], steps: int, mesh: DeviceMesh) -> bool:
    """Trains in one process and in each way; prints the losses. Returns whether they are equal."""
    task, device = TASKS[name], mesh.device_type
    torch.manual_seed(0)
    model = task.model().to(device)
    batches = [(x.to(device), target.to(device)) for x, target in islice(task.batches(), steps)]
    one = train(deepcopy(model), batches, slice(None), lambda t: t)
    equal = True
    for way in ways:
        many = in_parallel(deepcopy(model), way, task.plan(), batches, mesh)
        distance = ((many - one).abs() / one.abs()).max().item()
        equal &= distance <= MAX_DISTANCE
        if mesh.get_rank() == 0:
            print(
                f"{name:11} {way:6}  loss {many[0]:.6f} to {many[-1]:.6f}, in one process {one[0]:.6f} to "
                f"{one[-1]:.6f}; relative distance {distance:.1e}",
                flush=True,
            )
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(TASKS), help="some of: %(default)s")
    parser.add_argument("--ways", default="ddp,fsdp,tensor", help="some of: %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if each process has a GPU, else cpu")
    args = parser.parse_args()

    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = library.has_cuda() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = args.device or ("cuda" if gpus else "cpu")
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (size,))
    if mesh.get_rank() == 0:
        print(f"{size} processes, {device}, {dist.get_backend()}", flush=True)
    equal = [compare(name, args.ways.split(","), args.steps, mesh) for name in args.models.split(",")]
    dist.destroy_process_group()
    return not all(equal)


if __name__ == "__main__":
    sys.exit(main())
