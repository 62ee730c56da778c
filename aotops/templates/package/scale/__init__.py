"""The operator scale: ``from scale.frontends import torch as F``, or jax, mindspore, cupy, numpy."""

from pathlib import Path

from aotops import Library

from .ops import scale

library = Library("scale", [scale], Path(__file__).with_name("libscale.so"), cases="scale.cases")
