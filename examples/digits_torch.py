"""The digits classifier in PyTorch."""

import torch
from torch import nn

from aotops import library
from aotops.frontends.torch import GELU, LayerNorm


def train(report, x, y, x_test, batches, learning_rate, momentum, **weights):
    torch.use_deterministic_algorithms(True)
    device = "cuda" if torch.cuda.is_available() and library.has_cuda() else "cpu"
    x, y, x_test, batches = (torch.from_numpy(a).to(device) for a in (x, y, x_test, batches))

    hidden, features = weights["w1"].shape
    classes = len(weights["b2"])
    model = nn.Sequential(nn.Linear(features, hidden), LayerNorm(hidden), GELU(), nn.Linear(hidden, classes)).to(device)
    with torch.no_grad():
        for parameter, initial in zip(model.parameters(), weights.values(), strict=True):
            parameter.copy_(torch.from_numpy(initial))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(learning_rate), momentum=float(momentum))

    losses = []
    for epoch, order in enumerate(batches, start=1):
        for batch in order:
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        report(epoch, loss.item())

    with torch.no_grad():
        logits = model(x_test)
    trained = [p.detach().cpu().numpy() for p in model.parameters()]
    return device, torch.stack(losses).cpu().numpy(), trained, logits.cpu().numpy()
