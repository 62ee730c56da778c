from aotops.frontends.torch import functions

from .. import library

globals().update(functions(library, __name__))
