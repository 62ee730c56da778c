"""Trains the digits classifier and writes what digits.cpp reads: an AOTInductor package of the model, and the test
images with their classes.

    python digits_package.py FOLDER
"""

import sys
from pathlib import Path

import torch
from torch import nn

from aotops.frontends.torch import GELU, LayerNorm

sys.path.insert(0, str(Path(__file__).parents[1]))
from digits import EPOCHS, accuracy, make_task
from digits_torch import train


def main(folder: Path, epochs: int = EPOCHS) -> None:
    task, classes = make_task()
    task["batches"] = task["batches"][:epochs]
    _, _, trained, logits = train(lambda epoch, loss: None, **task)
    model = make_model([torch.from_numpy(weight) for weight in trained])
    images = torch.from_numpy(task["x_test"])

    exported = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "digits.pt2"))
    task["x_test"].tofile(folder / "images.float32")
    classes.tofile(folder / "classes.int64")
    print(f"test accuracy {accuracy(logits, classes):.4f}")


def make_model(weights: list[torch.Tensor]) -> nn.Module:
    (hidden, features), classes = weights[0].shape, len(weights[-1])
    model = nn.Sequential(nn.Linear(features, hidden), LayerNorm(hidden), GELU(), nn.Linear(hidden, classes))
    model.requires_grad_(False)
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.copy_(weight)
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
