"""The core of the table in the environment that runs it, for one frontend: each operator's first case, values and
gradients, in float32 and a 16-bit dtype; calls from several threads; and a transform of the framework. Prints JSON.

    python packaging/compatibility_cell.py torch
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Check = tuple[str, Callable[[], None]]


def main() -> None:
    name = sys.argv[1]
    found: dict[str, Any] = {"python": platform.python_version(), "versions": versions(name), "checks": 0, "failed": []}
    try:
        import_module(f"aotops.frontends.{name}")
    except ImportError as error:
        print(json.dumps(found | {"refused": first_line(error).partition(" (/")[0]}))
        return
    for what, check in checks(name):
        found["checks"] += 1
        try:
            check()
        except Exception as error:
            found["failed"].append(f"{what}: {type(error).__name__}: {first_line(error)}")
    from aotops import call

    found["call_path"] = call.call_path()
    # importing a module that is not marked for it turns the GIL on again
    found["gil"] = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(json.dumps(found))


def versions(name: str) -> dict[str, str]:
    """The versions of the packages that a call involves, as far as they are installed."""
    found = {}
    for package in dict.fromkeys((name, "numpy", "jaxlib", "ml_dtypes")):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]


def checks(name: str) -> Iterator[Check]:
    from aotops.testing.frameworks import adapters

    for framework in adapters(name):
        for dtype in dtypes(framework):
            yield from table(framework, dtype)
        if name != "mindspore":  # its graph mode is a framework of its own here
            yield f"{framework.name} threads", partial(threads, framework)
    yield from ((f"{name} {what}", check) for what, check in TRANSFORMS.get(name, dict)().items())


def dtypes(framework: Any) -> tuple[str, str]:
    return "float32", "bfloat16" if framework.has_dtype("bfloat16") else "float16"


# ----------------------------------------------------------------------------------------------------------- the table


def table(framework: Any, dtype: str) -> Iterator[Check]:
    from aotops.testing.cases import CASES

    for name in CASES:
        label = f"{framework.name} {name} {dtype}"
        yield f"{label} values", partial(values, framework, name, dtype)
        yield f"{label} gradients", partial(gradients, framework, name, dtype)


def values(framework: Any, name: str, dtype: str) -> None:
    from aotops.testing import cases

    i, inputs, attrs = arguments(framework, name, dtype)
    cases.assert_values(tuple(map(framework.numpy, framework.results(name, inputs, attrs))), name, i, dtype)


def gradients(framework: Any, name: str, dtype: str) -> None:
    from aotops.ops import OPS
    from aotops.testing import cases

    i, inputs, attrs = arguments(framework, name, dtype)
    dtypes = cases.dtypes(name, i, dtype)
    given = zip(OPS[name].outputs, cases.output_gradients(name, i, dtype), strict=True)
    dys = tuple(None if dy is None else framework.make(dy, dtypes[y], "cpu") for y, dy in given)
    found = framework.gradients(name, inputs, attrs, dys)
    numbers = {slot: framework.numpy(g) for slot, g in found.items() if g is not None}
    cases.assert_gradients(numbers, name, i, dtype)


def arguments(framework: Any, name: str, dtype: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    from aotops.testing import cases

    i = cases.first_case(name)
    arrays, dtypes = cases.inputs(name, i, dtype), cases.dtypes(name, i, dtype)
    inputs = {s: framework.make(x, cases.dtype_of(x, dtypes[s]), "cpu") for s, x in arrays.items() if x is not None}
    return i, inputs, cases.CASES[name].cases[i].attrs


def threads(framework: Any) -> None:
    """Four threads call every operator on inputs that they share, and find the same bits."""
    import numpy as np

    from aotops.testing.cases import CASES
    from aotops.testing.frameworks import race

    given = {name: arguments(framework, name, "float32")[1:] for name in CASES}

    def results(name: str) -> list[Any]:
        return list(map(framework.numpy, framework.results(name, *given[name])))

    expected = {name: results(name) for name in given}

    def work(i: int) -> int:
        names = list(given)[i:] + list(given)[:i]
        return sum(not all(map(np.array_equal, results(n), expected[n])) for _ in range(20) for n in names)

    assert race(work) == 0, "a result differs between threads"


# ---------------------------------------------------------------------------------------------------------- transforms


def of_torch() -> dict[str, Callable[[], None]]:
    import torch

    from aotops.frontends import torch as F

    x = torch.linspace(-2, 2, 24).reshape(4, 6)
    weight = torch.linspace(-1, 1, 30).reshape(5, 6)

    def function(x: Any) -> Any:
        return F.gelu(F.linear(F.layer_norm(x, 6), weight)).sum()

    def gradient(function: Callable[[Any], Any]) -> Any:
        leaf = x.clone().requires_grad_()
        function(leaf).backward()
        return leaf.grad

    def compiled() -> None:
        got = gradient(torch.compile(function, backend="aot_eager", fullgraph=True))
        torch.testing.assert_close(got, gradient(function))

    def opcheck() -> None:
        torch.library.opcheck(torch.ops.aotops.gelu.default, (x.clone().requires_grad_(), "tanh"))

    def second_order() -> None:
        leaf = x.double().requires_grad_()
        torch.autograd.gradgradcheck(lambda x: F.layer_norm(F.gelu(x), 6), leaf)

    return {"torch.compile": compiled, "opcheck": opcheck, "gradgradcheck": second_order}


def of_jax() -> dict[str, Callable[[], None]]:
    import jax
    import numpy as np

    from aotops.frontends import jax as F

    x = jax.numpy.linspace(-2, 2, 24, dtype="float32").reshape(4, 6)

    def function(x: Any) -> Any:
        return F.gelu(F.layer_norm(x, 6))

    def close(got: Any, expected: Any, atol: float = 1e-6) -> None:
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-5, atol=atol)

    def total(x: Any) -> Any:
        return (function(x) * jax.numpy.arange(6, dtype=x.dtype)).sum()

    def finite_differences() -> Any:
        direction, step = np.cos(np.arange(24.0)).reshape(4, 6).astype("float32"), 1e-2
        slope = (total(x + step * direction) - total(x - step * direction)) / (2 * step)
        along = (jax.grad(total)(x) * direction).sum()
        np.testing.assert_allclose(float(along), float(slope), rtol=2e-2)

    def second_order() -> None:
        """The product of the Hessian with a vector, in forward mode and in reverse mode."""
        direction = jax.numpy.cos(jax.numpy.arange(24, dtype=x.dtype)).reshape(4, 6)
        forward = jax.jvp(jax.grad(total), (x,), (direction,))[1]
        close(forward, jax.grad(lambda x: (jax.grad(total)(x) * direction).sum())(x), 1e-4)  # of numbers up to 16

    return {
        "jit": lambda: close(jax.jit(function)(x), function(x)),
        "grad": finite_differences,
        "jit of grad": lambda: close(jax.jit(jax.grad(total))(x), jax.grad(total)(x)),
        "vmap": lambda: close(jax.vmap(function)(x), function(x)),
        "second order": second_order,
    }


TRANSFORMS: dict[str, Callable[[], dict[str, Callable[[], None]]]] = {"torch": of_torch, "jax": of_jax}

if __name__ == "__main__":
    main()
