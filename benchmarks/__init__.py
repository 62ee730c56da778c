"""``python -m benchmarks.<name>``, from the repository's root."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # here, because it is read once, when torch loads OpenMP
