from aotops.frontends.cupy import functions

from .. import library

globals().update(functions(library, __name__))
