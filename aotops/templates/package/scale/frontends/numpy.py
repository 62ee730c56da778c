from aotops.frontends.numpy import functions

from .. import library

globals().update(functions(library, __name__))
