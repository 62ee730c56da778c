"""The launches of the operators' kernels."""

from aotops.triton import Config, Entry, Launch

HALF = ("float16", "bfloat16")
FLOATS = {"T": (*HALF, "float32")}


def rows(blocks):
    """A configuration for each width of a row."""
    return [Config(f"N <= {block}", BLOCK=block, num_warps=max(1, min(16, block // 256))) for block in blocks]


add = Entry(
    "vector_add",
    inputs={"x": "T[*n]", "y": "T[*n]"},
    outputs={"out": "T[*n]"},
    dtypes=FLOATS,
    launches=Launch(
        "kernels.py:add_kernel",
        arguments={"x_ptr": "x", "y_ptr": "y", "out_ptr": "out", "n": "n"},
        grid=["cdiv(n, BLOCK)"],
        configs=[Config("n >= 65536", BLOCK=1024), Config(BLOCK=256, num_warps=2)],
    ),
)

softmax = Entry(
    "row_softmax",
    inputs={"x": "T[*M, N]"},
    outputs={"y": "T[*M, N]"},
    dtypes=FLOATS,
    launches=Launch(
        "kernels.py:softmax_kernel",
        arguments={"y_ptr": "y", "x_ptr": "x", "stride": "N", "columns": "N"},
        grid=["M"],
        configs=rows([128, 1024, 8192]),
    ),
)

dropout = Entry(
    "seeded_dropout",
    inputs={"x": "T[*n]"},
    outputs={"y": "T[*n]"},
    attrs={"p": "float", "seed": "int"},
    dtypes={"T": ("float32",)},
    launches=Launch(
        "kernels.py:dropout_kernel",
        arguments={"x_ptr": "x", "y_ptr": "y", "n": "n", "p": "p", "seed": "seed"},
        grid=["cdiv(n, BLOCK)"],
        configs=[Config(BLOCK=1024)],
        hints=[{"pointers": 16, "n": 16}, {"pointers": 16}, {}],
    ),
)

norm = Entry(
    "norm",
    inputs={"x": "T[*M, N]", "weight": "T[N]", "bias": "T[N]"},
    outputs={"y": "T[*M, N]"},
    residuals={"mean": "float32[*M]", "rstd": "float32[*M]"},
    attrs={"eps": "float"},
    dtypes=FLOATS,
    launches=Launch(
        "kernels.py:norm_kernel",
        arguments={
            "x_ptr": "x", "weight_ptr": "weight", "bias_ptr": "bias", "y_ptr": "y", "mean_ptr": "mean",
            "rstd_ptr": "rstd", "columns": "N", "eps": "eps",
        },
        grid=["M"],
        configs=rows([1024, 8192]),
    ),
)  # fmt: skip

norm_backward = Entry(
    "norm_backward",
    inputs={
        "dy": "T[*M, N]", "x": "T[*M, N]", "weight": "T[N]",
        "mean": "float32[*M]", "rstd": "float32[*M]",
    },
    outputs={"dx": "T[*M, N]", "dweight": "T[N]", "dbias": "T[N]"},
    attrs={"eps": "float"},
    dtypes=FLOATS,
    sizes={"G": "max(1, min(M, 64))"},
    scratch={"partial_dweight": "float32[G, N]", "partial_dbias": "float32[G, N]"},
    launches=[
        Launch(
            "kernels.py:norm_backward_kernel",
            arguments={
                "dy_ptr": "dy", "x_ptr": "x", "weight_ptr": "weight", "mean_ptr": "mean", "rstd_ptr": "rstd",
                "dx_ptr": "dx", "partial_dweight_ptr": "partial_dweight", "partial_dbias_ptr": "partial_dbias",
                "rows": "M", "columns": "N", "groups": "G",
            },
            grid=["G"],
            configs=rows([1024, 8192]),
            hints=[{"pointers": 16, "columns": 16}, {}],
        ),
        Launch(
            "kernels.py:column_sums_kernel",
            arguments={
                "partial_dweight_ptr": "partial_dweight", "partial_dbias_ptr": "partial_dbias",
                "dweight_ptr": "dweight", "dbias_ptr": "dbias", "groups": "G", "columns": "N",
            },
            grid=["cdiv(N, COLUMNS)"],
            configs=[Config(ROWS=32, COLUMNS=64)],
            hints=[{}],
        ),
    ],
)  # fmt: skip

product = Entry(
    "product",
    inputs={"a": "T[M, K]", "b": "T[K, N]"},
    outputs={"c": "T[M, N]"},
    dtypes={"T": HALF},
    launches=Launch(
        "kernels.py:product_kernel",
        arguments={
            "a_ptr": "a", "b_ptr": "b", "c_ptr": "c", "M": "M", "N": "N", "K": "K", "stride_am": "K", "stride_ak": 1,
            "stride_bk": "N", "stride_bn": 1, "stride_cm": "N", "stride_cn": 1,
        },
        grid=["cdiv(M, BLOCK_M)", "cdiv(N, BLOCK_N)"],
        configs=[
            Config("M >= 512 and N >= 512", BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3,
                   archs=["90", "100"]),
            Config("M >= 512 and N >= 512", BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, num_warps=4, num_stages=4),
            Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=3),
        ],
        hints=[{"pointers": 16, "integers": 16}, {}],
    ),
)  # fmt: skip

attention = Entry(
    "attend",
    inputs={"q": "T[*H, L, 64]", "k": "T[*H, L, 64]", "v": "T[*H, L, 64]"},
    outputs={"o": "T[*H, L, 64]"},
    attrs={"causal": "bool", "scale": "float"},
    dtypes={"T": HALF},
    launches=Launch(
        "kernels.py:attention_kernel",
        arguments={"q_ptr": "q", "k_ptr": "k", "v_ptr": "v", "o_ptr": "o", "length": "L", "scale": "scale"},
        grid=["cdiv(L, BLOCK_M)", "H"],
        configs=[
            Config("causal", CAUSAL=True, D=64, BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
            Config("not causal", CAUSAL=False, D=64, BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
        ],
        hints=[{"pointers": 16, "length": 16}, {"pointers": 16}, {}],
    ),
)

ENTRIES = [add, softmax, dropout, norm, norm_backward, product, attention]
