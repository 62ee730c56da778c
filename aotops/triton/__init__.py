"""Triton kernels compiled ahead of time: the declaration of how an operator calls them.

A file of a package (``triton`` in its [tool.aotops]) has ``ENTRIES``, a list of ``Entry``. ``aotops build`` compiles
the kernels without a GPU, embeds their code in the package's library, and makes the entries ``aot_<name>_cuda``. Calls
of these need neither Triton nor Python. This package does not import Triton.
"""

from .declaration import DeclarationError, Entry
from .launch import Config, Launch

__all__ = ["Config", "DeclarationError", "Entry", "Launch"]
