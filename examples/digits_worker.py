"""Trains the digits classifier in one framework, in a separate process: `digits_worker.py FRAMEWORK TASK RESULT`.

digits_<framework>.py has the model. TASK and RESULT are .npz files, the only data exchanged between the processes.
"""

import sys
from importlib import import_module

import numpy as np

WEIGHTS = ("w1", "b1", "gamma", "beta", "w2", "b2")  # matrices are (out, in)


def report(epoch: int, loss: float) -> None:
    print(f"progress {epoch} {loss}", flush=True)


if __name__ == "__main__":
    framework, task, result = sys.argv[1:]
    with np.load(task) as arrays:
        device, losses, weights, logits = import_module(f"digits_{framework}").train(report, **arrays)
    np.savez(result, device=device, losses=losses, logits=logits, **dict(zip(WEIGHTS, weights, strict=True)))
