"""The parameters ``framework``, ``device`` and ``dtype`` of a test, and what a subprocess is run with.

A test that takes ``framework`` runs for every adapter under test (aotops.testing.frameworks); with ``device`` also, for
each device of each. What is for a GPU is marked ``gpu`` and skipped, with the reason, where there is none.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from aotops.testing.cases import DTYPES
from aotops.testing.frameworks import FRONTENDS, frameworks, requested

# Every run has the same examples; the profile fuzz draws many new ones. No test depends on the time.
SLOW = [HealthCheck.too_slow]
settings.register_profile("test", max_examples=100, derandomize=True, deadline=None, suppress_health_check=SLOW)
settings.register_profile("fuzz", max_examples=10_000, print_blob=True, deadline=None, suppress_health_check=SLOW)
settings.load_profile(os.environ.get("AOTOPS_TEST_PROFILE", "test"))

HERE = Path(__file__).parent


def pytest_configure(config):
    try:
        requested()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """The framework is the last parameter, and varies fastest: a reference is computed once, for all frameworks. Of
    thousands of tests, to make each takes seconds: those for a GPU are not made where they are deselected, nor what a
    test spares by its attribute ``spares``, a function of its parameters."""
    names = metafunc.fixturenames
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    without_gpu = metafunc.config.option.markexpr == "not gpu"
    pairs = [(f, d) for f in frameworks() for d in f.devices if not (d == "cuda" and without_gpu)]
    marks = {"cuda": [pytest.mark.gpu], "cpu": []}
    if spares := getattr(metafunc.function, "spares", None):
        each = [
            pytest.param(*case.values, dtype, f, d, id=f"{case.id}-{dtype}-{f.name}-{d}", marks=marks[d])
            for case in metafunc.function.each
            for dtype in DTYPES
            for f, d in pairs
            if not spares(f, dtype, *case.values)
        ]
        metafunc.parametrize(("name", "i", "dtype", "framework", "device"), each)
        return
    if "dtype" in names and "dtype" not in own:
        metafunc.parametrize("dtype", DTYPES)
    if "device" in names:
        values = [pytest.param(f, d, id=f"{f.name}-{d}", marks=marks[d]) for f, d in pairs]
        metafunc.parametrize(("framework", "device"), values)
    elif "framework" in names:
        metafunc.parametrize("framework", [pytest.param(f, id=f.name) for f in frameworks() if "cpu" in f.devices])


@pytest.fixture(autouse=True)
def _seeded():
    """A test draws the same numbers whichever tests this process ran before, which pytest-xdist decides by the time."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _is_here(request):
    """Skips a test whose device or dtype is not here."""
    arguments = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    framework, device, dtype = (arguments.get(key) for key in ("framework", "device", "dtype"))
    if framework is None:
        return
    if device is not None and (reason := framework.missing(device)):
        pytest.skip(reason)
    if dtype is not None and not framework.has_dtype(dtype):
        pytest.skip(f"{framework.name} has no bfloat16 without ml_dtypes")


def pytest_ignore_collect(collection_path):
    """A folder or a file named as a framework is for a session that tests it."""
    frontend = collection_path.stem.removeprefix("test_")
    others = set(FRONTENDS) - set(requested())
    return True if collection_path != HERE and frontend in others else None


def pytest_collection_finish():
    """The tests themselves, a million objects, are not looked at by each garbage collection of a test. Collections are
    rarer than by default, with which they take up to a tenth of the time, as compiled code piles up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_terminal_summary(terminalreporter):
    """How many tests were skipped, by reason."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section(f"{reasons.total()} skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:6} {reason}")


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory):
    """MindSpore writes down, where it runs, every graph that it refuses to compile."""
    os.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture(scope="module")
def collected():
    """A garbage collection looks at nothing that this process has by now. After JAX's tests, one takes two seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def python():
    """Runs a program in a fresh interpreter, with these changes of the environment, and gives what it printed."""

    def run(program: str, expect: int = 0, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environment},
            cwd=HERE / "programs",  # not a folder that has folders named as frameworks are
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout if expect == 0 else done.stderr

    return run
