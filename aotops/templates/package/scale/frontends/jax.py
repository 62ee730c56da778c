from aotops.frontends.jax import functions

from .. import library

globals().update(functions(library, __name__))
