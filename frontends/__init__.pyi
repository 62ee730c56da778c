"""One module per framework: ``from aotops.frontends import torch`` (or numpy, cupy, jax, mindspore)."""

# A submodule is found without being named here. Naming them would make a type checker read every framework.

FRONTENDS: tuple[str, ...]
