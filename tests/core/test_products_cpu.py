"""Products on the CPU whose tiles have several panels: no term, row or column is left out or taken twice."""

from __future__ import annotations

import numpy as np
import pytest

from aotops.frontends import numpy as arrays

# m beside the rows of a panel and of the tallest tile, n beside the columns of a block and of a tile, k of one panel,
# of several, and of several partial sums
SIZES = [(1300, 1100, 300), (1201, 33, 600), (241, 1030, 257), (490, 512, 256), (250, 70, 4100), (100, 65, 700)]


def whole(*shape, dtype):
    """Small numbers, whose products and sums every dtype here holds: the result is exact."""
    return np.random.default_rng(sum(shape)).integers(-3, 4, shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_whole_numbers_are_exact(size, dtype):
    m, n, k = size
    a, b, bias = whole(m, k, dtype=dtype), whole(k, n, dtype=dtype), whole(n, dtype=dtype)
    exact = a @ b
    at, bt = (np.ascontiguousarray(x.T) for x in (a, b))
    for transposed in ((False, False), (False, True), (True, False), (True, True)):
        left, right = (at if transposed[0] else a), (bt if transposed[1] else b)
        np.testing.assert_array_equal(arrays.matmul(left, right, *transposed), exact, str(transposed))
    np.testing.assert_array_equal(arrays.linear(a, bt), exact)
    np.testing.assert_array_equal(arrays.linear(a, bt, bias, activation="relu"), np.maximum(exact + bias, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_on_any_number_of_threads(dtype):
    torch = pytest.importorskip("torch")
    from aotops.frontends import torch as ours

    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    for m, n, k in SIZES:
        x, weight, bias = (
            torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for shape in ((m, k), (n, k), (n,))
        )
        found = []
        try:
            for count in (1, 2, 3, 16):
                torch.set_num_threads(count)
                found.append((ours.linear(x, weight, bias, "gelu"), ours.matmul(x, weight, False, True)))
        finally:
            torch.set_num_threads(threads)
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), (m, n, k)
