"""CUDA and CPU kernels in one plain shared library, callable and differentiable in every framework.

Use them through a frontend: ``from aotops.frontends import torch`` (or numpy, cupy, jax, mindspore).
"""

__version__ = "0.1.0"
