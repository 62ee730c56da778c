"""A definition is in the keys of torch's caches by the digest of its code, and of all that it reaches."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections import defaultdict, deque
from dataclasses import replace
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from aotops.frontends.torch import cached, reached  # noqa: E402
from aotops.hosting import Foreign  # noqa: E402
from aotops.op import Rule  # noqa: E402
from aotops.ops import OPS  # noqa: E402


def made(source, **known):
    """The function f of the source, whose globals these are. It has no file."""
    exec(source, scope := {"__name__": "theirs"} | known)
    return scope["f"]


def module(source):
    found = types.ModuleType("helpers")
    exec(source, found.__dict__)
    return found


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


class Tripled(Scaled):
    def __call__(self, x):
        return x * 3


class Wrapped(Scaled):
    def __init__(self, function, factor):
        functools.update_wrapper(self, function)
        super().__init__(factor)


class Missing(dict):
    def __missing__(self, name):
        return 1


class OtherMissing(dict):
    def __missing__(self, name):
        return 2


def named_tuple(k):
    class Pair(NamedTuple):
        a: int

        def scale(self, k=k):
            return k

    return Pair(1)


def with_attribute(k):
    function = made("def f(x): return x * f.k")
    function.k = k
    return function


def importing(monkeypatch, source, k):
    """A function that imports a module when it is called."""
    found = module(f"def scale(x): return x * {k}")
    monkeypatch.setitem(sys.modules, "helpers", found)
    return made(source)


def enclosing(value):
    return lambda x: value(x) if callable(value) else x * value


def defaulted(value):
    return made("def f(x, y=y): return x * y", y=value)


def decorated(function):
    return functools.wraps(torch.relu)(lambda x: function(x))


CALL = "def f(x): return helpers.scale(x)"
IMPORTED = "def f(x):\n    g = lambda x: scale(x)\n    return g(x)"
ONE, TWO = "def f(x): return x * 1", "def f(x): return x * 2"
PAIRS = {
    "its code": (made(ONE), made(TWO)),
    "a global": (made("def f(x): return x * k", k=2), made("def f(x): return x * k", k=3)),
    "a function of a module": (
        made(CALL, helpers=module("def scale(x): return x")),
        made(CALL, helpers=module("def scale(x): return -x")),
    ),
    "a value of a module": (
        made(CALL, helpers=module("k = 1\ndef scale(x): return x * k")),
        made(CALL, helpers=module("k = 2\ndef scale(x): return x * k")),
    ),
    "an imported function": (made(IMPORTED, scale=made(ONE)), made(IMPORTED, scale=made(TWO))),
    "what it encloses": (enclosing(2), enclosing(2.0)),
    "a function that it encloses": (enclosing(made(ONE)), enclosing(made(TWO))),
    "a default": (defaulted(1), defaulted(2)),
    "an attribute of an instance": (Scaled(1), Scaled(2)),
    "the class of an instance": (Scaled(1), Tripled(1)),
    "a bound method": (Scaled(1).__call__, Scaled(2).__call__),
    "an argument of a partial": (functools.partial(made(ONE), 1), functools.partial(made(ONE), 2)),
    "a function with a cache": (functools.cache(made(ONE)), functools.cache(made(TWO))),
    "a function that has the name of torch's": (decorated(made(ONE)), decorated(made(TWO))),
    "the values of a mapping": ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    "a regular container": ((1, (2, 3)), (1, 2, 3)),
    "an attribute of an instance that wraps a function": (Wrapped(made(ONE), 1), Wrapped(made(ONE), 2)),
    "the class of a mapping": (Missing(), OtherMissing()),
    "the default of a mapping": (defaultdict(made(ONE)), defaultdict(made(TWO))),
    "the methods of a named tuple": (named_tuple(1), named_tuple(2)),
    "an attribute of a function": (with_attribute(1), with_attribute(2)),
}


@pytest.mark.parametrize("what", PAIRS)
def test_what_is_reached_has_a_digest(what):
    first, second = map(reached.digest, PAIRS[what])
    assert first is not None
    assert second is not None
    assert first != second
    assert [*map(reached.digest, PAIRS[what])] == [first, second]


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    import helpers\n    return helpers.scale(x)",
        "def f(x):\n    from helpers import scale\n    return (lambda: scale(x))()",
        "def f(x):\n    def g():\n        import helpers as h\n        return h.scale(x)\n    return g()",
    ],
)
def test_what_a_function_imports_has_a_digest(monkeypatch, source):
    one, other, two = (reached.digest(importing(monkeypatch, source, k)) for k in (1, 1, 2))
    assert one is not None
    assert one == other != two
    monkeypatch.delitem(sys.modules, "helpers")
    assert reached.digest(made(source)) is None


def test_modules_that_import_each_other_have_a_digest():
    inner = module("def scale(x): return x")
    outer = module("")
    outer.inner, inner.outer = inner, outer
    assert reached.digest(made("def f(x): return outer.inner.scale(x)", outer=outer)) is not None


def test_a_module_that_has_the_name_of_one_of_pythons_is_read(monkeypatch):
    own = types.ModuleType("antigravity")
    own.__file__ = "/a/folder/antigravity.py"
    monkeypatch.setitem(sys.modules, "antigravity", own)
    reached._is_known.cache_clear()
    digests = {reached.digest(made(source, __name__="antigravity")) for source in (ONE, TWO)}
    reached._is_known.cache_clear()
    assert len(digests) == 2


class Queue(deque):
    pass


@pytest.mark.parametrize("value", [torch.ones(2), object(), lambda: unknown, Queue([1])])
def test_what_has_no_digest_is_unknown(value):
    assert reached.digest(enclosing(value)) is None


unknown = iter(())


@pytest.mark.parametrize(
    "value",
    [
        "globals()['k']",
        "vars(helpers)['k']",
        "eval('k')",
        "float(os.environ['K'])",
        "f.__globals__['k']",
        "getattr(helpers, 'k')",
        "operator.attrgetter('k')(helpers)",
        "float(path.read_text())",
        "np.load(path)",
    ],
)
def test_a_function_that_reads_what_its_names_do_not_tell_is_unknown(value):
    assert reached.digest(made(f"def f(x): return x * {value}", k=1, helpers=module("k = 1"), os=os)) is None


@pytest.mark.parametrize("slot", ["rule", "shapes", "keeps", "product", "foreign", "formula"])
def test_each_function_of_a_definition_is_in_its_digest(slot):
    def definition(function):
        parts = {
            "rule": Rule(function, ()),
            "shapes": {"y": function},
            "keeps": function,
            "formula": function,
            "product": replace(OPS["linear"].product, fused=function),
            "foreign": Foreign({}, function),
        }
        return replace(OPS["linear"], library=None, **{slot: parts[slot]})

    digests = [reached.digest(definition(made(source))) for source in (ONE, ONE, TWO)]
    assert None not in digests
    assert digests[0] == digests[1] != digests[2]


def test_every_definition_has_a_digest_which_another_process_finds(python):
    program = """
from aotops.frontends.torch import reached
from aotops.ops import OPS
print([(reached.digest(op) or b"unknown").hex() for op in OPS.values()])
"""
    first, second = (python(program, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert first == second
    assert b"unknown".hex() not in first


def test_a_definition_that_is_unknown_is_of_this_process(monkeypatch, python):
    monkeypatch.setattr(cached, "dispatched", found := {})  # those of other tests may be unknown
    before = cached.version()
    found[replace(OPS["gelu"], library=None, formula=enclosing(made(ONE)))] = None
    known = cached.version()
    found[replace(OPS["gelu"], library=None, formula=lambda: unknown)] = None
    assert len({before, known, cached.version()}) == 3
    assert cached.version().endswith(cached._of_process())
    assert cached._of_process() not in python("from aotops.frontends.torch import cached; print(cached._of_process())")
