"""The launches of the kernels. The library has code for every dtype, configuration and hint, and takes the first ones
that are for a call."""

from aotops.triton import Config, Entry, Launch

FLOATS = {"T": ("float16", "bfloat16", "float32")}

swish = Entry(
    "swish",
    inputs={"x": "T[*n]"},  # any number of axes; n elements
    outputs={"y": "T[*n]"},
    attrs={"beta": "float"},
    dtypes=FLOATS,
    launches=Launch(
        "kernel.py:swish_kernel",
        arguments={"x_ptr": "x", "y_ptr": "y", "n": "n: i64", "beta": "beta"},
        grid=["cdiv(n, BLOCK)"],
        configs=[Config("n >= 65536", BLOCK=1024), Config(BLOCK=256)],
        hints=[{"pointers": 16, "n": 16}, {}],
    ),
)

swish_backward = Entry(
    "swish_backward",
    inputs={"dy": "T[*n]", "x": "T[*n]"},
    outputs={"dx": "T[*n]"},
    attrs={"beta": "float"},
    dtypes=FLOATS,
    launches=Launch(
        "kernel.py:swish_backward_kernel",
        arguments={"dy_ptr": "dy", "x_ptr": "x", "dx_ptr": "dx", "n": "n: i64", "beta": "beta"},
        grid=["cdiv(n, BLOCK)"],
        configs=[Config(BLOCK=1024)],
        hints=[{"pointers": 16, "n": 16}, {}],
    ),
)

ENTRIES = [swish, swish_backward]
