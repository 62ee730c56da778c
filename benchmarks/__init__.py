"""``python -m benchmarks.<name>``, from the repository's root."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when a library with OpenMP loads: before torch, so here
