"""Tensor descriptors, early starts, clusters, cooperative grids, large shared memory, zeroed results,
programs that loop over rows."""

from aotops.triton import Config, Entry, Launch

copied = Entry(
    "copied",
    inputs={"x": "float32[M, N]"},
    outputs={"y": "float32[M, N]"},
    workspace=True,
    launches=Launch(
        "kernel.py:copy_kernel",
        {"x_ptr": "x", "y_ptr": "y", "M": "M", "N": "N"},
        ["cdiv(M, B)", "cdiv(N, B)"],
        [Config("M > 64", B=32, EARLY=True, launch_pdl=True, archs=["90"]), Config(B=16, EARLY=False)],
        hints=[{"pointers": 16, "N": 16}, {}],
    ),
)

doubled = Entry(
    "doubled",
    inputs={"x": "float32[*n]"},
    outputs={"y": "float32[*n]"},
    zeroed=["y"],
    launches=Launch(
        "kernel.py:twice_kernel",
        {"x_ptr": "x", "y_ptr": "y", "n": "n"},
        ["cdiv(n, B)"],
        [Config("n > 4096", B=2048, num_ctas=2), Config(B=16, launch_cooperative_grid=True)],
        hints=[{}],
    ),
)

large = Entry(
    "large",
    inputs={"a": "float16[128, K]", "b": "float16[K, 128]"},
    outputs={"c": "float32[128, 128]"},
    launches=Launch(
        "kernel.py:large_kernel",
        {"a_ptr": "a", "b_ptr": "b", "c_ptr": "c", "K": "K"},
        [1],
        [Config("K % 128 == 0", B=128, num_stages=3)],
        hints=[{"pointers": 16, "K": 16}],
    ),
)

looped = Entry(
    "looped",
    inputs={"x": "float32[M, N]"},
    outputs={"y": "float32[M, N]"},
    launches=Launch(
        "kernel.py:rows_kernel",
        {"x_ptr": "x", "y_ptr": "y", "M": "M", "N": "N"},
        ["min(M, 2 * multiprocessors)"],
        [Config(B=64, num_stages=2)],
        hints=[{}],
    ),
)

copied_rows = Entry(
    "copied_rows",
    inputs={"x": "float32[M, N]"},
    outputs={"y": "float32[M, N]"},
    workspace=True,
    launches=Launch(
        "kernel.py:copy_rows_kernel",
        {"x_ptr": "x", "y_ptr": "y", "M": "M", "N": "N"},
        ["min(M, multiprocessors)"],
        [Config(B=64)],
        hints=[{"pointers": 16, "N": 16}],
    ),
)

ENTRIES = [copied, doubled, large, looped, copied_rows]
