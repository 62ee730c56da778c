"""The operator swish: ``from swish.frontends import torch as F``, or jax, mindspore, cupy."""

from pathlib import Path

from aotops import Library

from .ops import swish

library = Library("swish", [swish], Path(__file__).with_name("libswish.so"), cases="swish.cases", triton="swish.launch")
