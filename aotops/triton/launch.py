"""The launch of a kernel: its arguments, grid and configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HINTS: tuple[dict[str, int], ...] = ({"pointers": 16, "integers": 16}, {"pointers": 16}, {})
"""The specialisations of a launch that states none."""


_OPTIONS: dict[str, Any] = {
    "num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "launch_pdl": False,
    "launch_cooperative_grid": False,
}  # fmt: skip


class Config:
    """One way to compile a kernel. The first one whose conditions hold is launched.

    Args:
        when: an expression of dimensions, attributes and sizes that is true of the calls that it is for; every call
            without it.
        dtypes: the dtypes that it is for, by the name of a type: ``{"T": ("float16", "bfloat16")}``.
        archs: the GPUs that it is for, such as ("90", "100"); all that the package is built for without it.
        num_warps, num_stages, num_ctas, maxnreg, launch_pdl, launch_cooperative_grid: options of Triton's compiler; 4,
            3, 1, no limit, False and False without them. A ``tl.constexpr`` of the kernel that has the name of one is
            given its value, as Triton's launcher does.
        constexprs: the kernel's parameters that are ``tl.constexpr``: numbers, bools, strings or None.
    """

    def __init__(
        self,
        when: str | None = None,
        *,
        dtypes: Mapping[str, Sequence[str]] | None = None,
        archs: Sequence[str | int] | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
        num_ctas: int | None = None,
        maxnreg: int | None = None,
        launch_pdl: bool | None = None,
        launch_cooperative_grid: bool | None = None,
        **constexprs: Any,
    ) -> None:
        self.when, self.dtypes, self.constexprs = when, dict(dtypes or {}), constexprs
        self.archs = None if archs is None else tuple(map(str, archs))
        stated = {
            "num_warps": num_warps,
            "num_stages": num_stages,
            "num_ctas": num_ctas,
            "maxnreg": maxnreg,
            "launch_pdl": launch_pdl,
            "launch_cooperative_grid": launch_cooperative_grid,
        }
        self.stated = {name: value for name, value in stated.items() if value is not None}
        self.options = _OPTIONS | self.stated

    def __repr__(self) -> str:
        said = [repr(self.when)] if self.when else []
        said += [f"{name}={value!r}" for name, value in self.constexprs.items()]
        said += [f"{name}={self.options[name]}" for name in ("num_warps", "num_stages")]
        return f"Config({', '.join(said)})"


class Launch:
    """A launch of a kernel.

    Args:
        kernel: the file, beside the declaration, and the function: "kernel.py:add_kernel".
        arguments: by parameter of the kernel that is no constexpr: the name of a tensor, whose address is passed; or an
            expression of dimensions, attributes and sizes, such as "N" or "M * N". An integer is int32 unless it is
            written "M * N: i64", a number float32 unless it is "scale: fp64". None is an absent pointer.
        grid: one to three expressions, which have constexprs of the configuration too: ``["cdiv(n, BLOCK)"]``; and
            ``multiprocessors``, of the GPU: ``["min(M, 4 * multiprocessors)"]`` for programs that loop over rows.
        configs: one ``Config`` or more. The first one that is for a call is launched.
        hints: what the compiler may assume: by parameter 16 (a multiple) or 1 (equal to it), where "pointers" and
            "integers" stand for all of them. The first ones that hold are used. By default three: pointers and
            integers are multiples of 16; pointers are; neither.
    """

    def __init__(
        self,
        kernel: str,
        arguments: Mapping[str, Any],
        grid: Sequence[Any],
        configs: Sequence[Config],
        hints: Sequence[Mapping[str, int]] | None = None,
    ) -> None:
        self.kernel, self.arguments = kernel, dict(arguments)
        self.grid, self.configs = tuple(grid) if isinstance(grid, tuple | list) else (grid,), tuple(configs)
        self.hints = HINTS if hints is None else tuple(dict(hint) for hint in hints)
