"""Times of steps for frameworks whose steps return arrays that can be waited for, and digests of results."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any


def times(step: Callable[[Any], Any], batches: list[Any], wait: Callable[[Any], None]) -> dict[str, float]:
    """Milliseconds of a step: ``ms``, the median from completion to completion; ``wall_ms``, the mean until all are
    done; ``host_ms``, the mean until ``step`` returns. A step is waited for after the next one was issued, so that the
    device always has work."""
    completions, host, pending = [time.perf_counter()], 0.0, None
    for batch in batches:
        began = time.perf_counter()
        issued = step(batch)
        host += time.perf_counter() - began
        if pending is not None:
            wait(pending)
            completions.append(time.perf_counter())
        pending = issued
    wait(pending)
    completions.append(time.perf_counter())
    return figures(
        [b - a for a, b in itertools.pairwise(completions)],
        (completions[-1] - completions[0]) / len(batches),
        host / len(batches),
    )


def figures(steps: list[float], wall: float, host: float) -> dict[str, float]:
    """From seconds."""
    ms = {"ms": statistics.median(steps), "wall_ms": wall, "host_ms": host}
    return {name: round(seconds * 1e3, 3) for name, seconds in ms.items()}


def digest(arrays: Iterable[Any]) -> str:
    """A hash of NumPy arrays: two runs have the same one only if all bits are the same."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(array.tobytes())
    return found.hexdigest()[:16]
