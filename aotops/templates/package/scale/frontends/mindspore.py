from aotops.frontends.mindspore import functions

from .. import library

globals().update(functions(library, __name__))
