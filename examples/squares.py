"""Minimizes a*a + b*b by gradient descent in PyTorch, with ``add`` from aotops as the custom operator."""

import torch

from aotops import library
from aotops.frontends import torch as aotops

EPOCHS = 500

device = "cuda" if torch.cuda.is_available() and library.has_cuda() else "cpu"
a = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], device=device))
b = torch.nn.Parameter(torch.tensor([-1.5, 2.5, 0.5], device=device))
optimizer = torch.optim.SGD([a, b], lr=0.01)

print(f"a*a + b*b, PyTorch on {device}, SGD, {EPOCHS} epochs")
for epoch in range(1, EPOCHS + 1):
    loss = aotops.add(a * a, b * b).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 25 == 0:
        print(f"epoch {epoch:3}   loss {loss.item():.3f}")
