"""Measurement: the time of a call on its device and on the host, and of the copy that it is compared with.

A contender is a *turn*: a function that runs its calls once more and gives the seconds of one. Contenders take turns,
so that whatever the machine does meanwhile meets all alike. Of a contender's turns the median counts on a GPU, and on a
CPU, which other processes use too, the fastest.

On a CPU, threads that wait for each other sleep (``wait_asleep``). A thread that spins instead keeps its core, on which
another one that it waits for cannot go on: on a busy machine each call then takes a slice of the scheduler's time, some
8 ms, whatever it computes.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from .tensors import Call

Turn = Callable[[], float]

HOST_CALLS = 100
"""Small calls per turn: within a time slice, and fewer than a GPU's queue holds, so that the host never waits."""
WARM_UP = 30
"""Small calls before them, since other contenders ran in between."""
MOST_SETS = 16


def wait_asleep() -> None:
    """To be called before an OpenMP runtime is loaded, which reads it then."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def samples(turns: Mapping[str, Turn], repeats: int, budget: float = math.inf) -> dict[str, list[float]]:
    """Seconds of a call, by contender, in each turn. ``budget``: in seconds, after which no more than three turns each
    are needed."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    start = time.perf_counter()
    for i in range(repeats):
        if i >= 3 and time.perf_counter() - start > budget:
            break
        for name, turn in turns.items():
            found[name].append(turn())
    return found


def spread(times: Sequence[float]) -> float:
    """The median over the fastest: 1 on a machine that does nothing else."""
    return statistics.median(times) / min(times)


class _Machine:
    figure: Callable[[Sequence[float]], float]
    """The one of the times of a contender's turns that counts."""

    def __init__(self, name: str, cache: int, repeats: int, host_repeats: int, budget: float) -> None:
        self.name, self.cache = name, cache
        self.repeats, self.host_repeats, self.budget = repeats, host_repeats, budget
        self.copies: dict[int, float] = {}

    def sets(self, nbytes: int) -> int:
        """The number of sets of inputs that exceeds three times the cache, so that it serves none."""
        return min(MOST_SETS, math.ceil(3 * self.cache / nbytes) + 1)

    def enough(self, sets: int, call: Call) -> int:
        """The number of these sets of inputs that turns of such a call use."""
        return sets

    def host_turn(self, call: Call) -> Turn:
        """The host's time of a small call: kernels are queued, and synchronized between turns only."""

        def turn() -> float:
            for _ in range(WARM_UP):
                call()
            seconds = _seconds(call, HOST_CALLS)
            self.synchronize()
            return seconds

        return turn

    def copy_gbs(self, nbytes: int) -> float:
        """GB/s of a copy that reads half of the bytes and writes half: the faster of two implementations."""
        half = max(nbytes >> 21, 1) << 20  # one copy for similar sizes
        if half not in self.copies:
            taken = samples(self._copy_turns(half, self.sets(half)), self.repeats, self.budget)
            self.copies[half] = 2 * half / min(map(self.figure, taken.values())) / 1e9
        return self.copies[half]

    def _copy_turns(self, half: int, sets: int) -> dict[str, Turn]:
        raise NotImplementedError

    def synchronize(self) -> None:
        """Waits for the device."""

    def free(self) -> None:
        """Gives back memory that is kept for later calls."""


class Cuda(_Machine):
    """Calls are recorded in a CUDA graph, rotating over their inputs, and replayed, without Python between kernels."""

    HOST_IS_DEVICE = False
    COPIED = 4 << 30
    figure = staticmethod(statistics.median)
    GRAPH_SECONDS = 4e-3  # long enough that launching the graph is negligible

    def __init__(self, quick: bool) -> None:
        import torch

        self.torch = torch
        # one stream for all, not the default one: a backward runs on the stream of its forward
        torch.cuda.set_stream(torch.cuda.Stream())
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        super().__init__(properties.name, properties.L2_cache_size, 5 if quick else 15, 5 if quick else 15, 4.0)

    def turn(self, calls: Sequence[Call], small: bool = False, records: bool = True) -> Turn:
        seconds = self._estimate(calls)
        rounds = max(1, min(round(self.GRAPH_SECONDS / seconds / len(calls)), 2000 // len(calls)))
        if not records:
            return self._profiled(list(calls) * rounds)
        graph = self._graph(list(calls) * rounds)

        def replay(reads: Sequence[Call] = calls) -> None:
            """``reads``: objects that own the memory that the graph reads."""
            graph.replay()

        return self._timed(replay, rounds * len(calls))

    def _estimate(self, calls: Sequence[Call]) -> float:
        for call in (*calls, *calls[:2]):  # compiles, tunes and allocates
            call()
        return max(self._timed(lambda: [call() for call in calls], len(calls))(), 1e-6)

    def _graph(self, calls: Sequence[Call]) -> Any:
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        gc.disable()  # nothing is freed during the recording
        try:
            graph.capture_begin()
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        except Exception:
            torch.cuda.set_stream(torch.cuda.Stream())  # the other one may still be recording
            raise
        finally:
            gc.enable()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def _timed(self, run: Call, n: int) -> Turn:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))

        def turn() -> float:
            self.torch.cuda._sleep(200_000)  # while the calls are queued
            start.record()
            run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / n

        return turn

    def _profiled(self, calls: Sequence[Call]) -> Turn:
        """The time of the kernels alone, for calls that synchronize, whose own time includes the host's."""
        torch = self.torch
        calls = calls[:20]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for call in calls:
                call()
            torch.cuda.synchronize()
        on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        total = sum(event.time_range.elapsed_us() for event in on_device) / 1e6
        if not total:
            raise RuntimeError("the profiler saw no kernels")
        return lambda: total / len(calls)

    def _copy_turns(self, half: int, sets: int) -> dict[str, Turn]:
        pairs = [[self.torch.empty(half, dtype=self.torch.uint8, device="cuda") for _ in range(2)] for _ in range(sets)]
        calls = [partial(to.copy_, source) for to, source in pairs]
        rounds = calls * max(1, 20 // sets)
        queued = self._timed(lambda: [call() for call in rounds], len(rounds))
        return {"graph": self.turn(calls), "queue": queued}

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def free(self) -> None:
        self.torch.cuda.empty_cache()


class Cpu(_Machine):
    """The time of a call is that of the device and of the host."""

    HOST_IS_DEVICE = True
    COPIED = 1 << 28
    MOST_BYTES = 1 << 29
    figure = staticmethod(lambda times: min(times))

    def __init__(self, quick: bool, seconds: float | None = None) -> None:
        n = _threads()
        name = f"{processor()}, {n} thread{'s' if n != 1 else ''}"
        super().__init__(name, _cache_size(), 51, 11 if quick else 31, seconds or (2.0 if quick else 10.0))

    def sets(self, nbytes: int) -> int:
        """Fewer of large inputs: a virtual machine tells the whole cache that it has a share of, such as 300 MiB."""
        return min(super().sets(nbytes), max(2, self.MOST_BYTES // nbytes))

    def enough(self, sets: int, call: Call) -> int:
        """No more than fit the budget: the other sets would be made, and warmed up, for nothing."""
        call()
        return min(sets, max(2, math.ceil(self.budget / _seconds(call, 1))))

    def turn(self, calls: Sequence[Call], small: bool = False, records: bool = True) -> Turn:
        """An untimed call, which also wakes the threads of this contender, and a timed one on the next inputs."""
        for call in calls[-2:]:  # each would take longer than the turns, which would find the first ones in the cache
            call()
        if small:
            return self.host_turn(calls[0])
        at = 0

        def turn() -> float:
            nonlocal at
            calls[at % len(calls)]()
            at += 1
            return _seconds(calls[at % len(calls)], 1)

        return turn

    def _copy_turns(self, half: int, sets: int) -> dict[str, Turn]:
        """NumPy's copy, a memmove, on every thread, and torch's if it is installed."""
        import numpy as np

        threads = _threads()
        pool = ThreadPoolExecutor(threads)
        pairs = [(np.empty(half, np.uint8), np.ones(half, np.uint8)) for _ in range(sets)]
        pieces = [slice(half * i // threads, half * (i + 1) // threads) for i in range(threads)]

        def copy(to: Any, source: Any) -> None:
            list(pool.map(lambda piece: np.copyto(to[piece], source[piece]), pieces))

        turns = {"numpy": self.turn([partial(copy, *pair) for pair in pairs])}
        with suppress(ImportError):
            import torch

            tensors = [(torch.from_numpy(to), torch.from_numpy(source)) for to, source in pairs]
            turns["torch"] = self.turn([partial(to.copy_, source) for to, source in tensors])
        return turns


def _seconds(call: Call, n: int) -> float:
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n


def _threads() -> int:
    """The number of threads of a parallel region."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdigit() and int(given) else len(os.sched_getaffinity(0))


def processor() -> str:
    """The name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of aotops, Python and the packages that are installed."""
    found = {"aotops": __version__, "python": platform.python_version()}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version({"quack": "quack-kernels", "liger": "liger-kernel"}.get(name, name))
    return found


def _cache_size() -> int:
    """Bytes of the largest cache; 32 MiB if the system does not tell."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
    return max(sizes, default=32 << 20)
