"""The calls that are repeated: entries, on the cases of an operator's row, on empty ones and on large ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

from ..calls import POISON, EntryCall, Runner, calls_of, filled
from ..dtypes import ITEMSIZE
from ..inputs import unusual_cases
from ..row import Case
from ..search import described, resized
from ..subject import Subject, elements
from ..trial import Trial

LARGE = 1 << 20
"""Elements of a large case: its kernels take longer than a launch."""


@dataclass(frozen=True)
class Quiet:
    """The contents of the slots before a call and after it, in quiet. Outputs and workspace hold poison before, and
    nothing is expected of a workspace."""

    before: Mapping[str, bytes]
    after: Mapping[str, bytes]


@dataclass(eq=False)
class Repeated:
    """A call, and what is known of it."""

    operator: str
    pass_: str
    """"forward" or "backward"."""
    case: Case
    dtype: str
    make: Callable[[], EntryCall]
    shared: Mapping[str, str] = field(default_factory=dict)
    """By output, the input over which it is written."""
    shifted: bool = False
    """Whether inputs and outputs are aligned to their dtype alone."""
    repeats: int = 0
    wrong: str = ""
    """How the first wrong repeat differed."""

    @cached_property
    def call(self) -> EntryCall:
        return self.make()

    def __str__(self) -> str:
        how = [f"{y} over {x}" for y, x in self.shared.items()] + ["shifted"] * self.shifted
        return ", ".join([f"{self.call.op.name} of {described(self.case)}", self.dtype, *how])

    def addresses(self, places: Mapping[str, int]) -> tuple[int, ...]:
        """The places of the slots given, in the entry's order."""
        return tuple(places[self.shared.get(slot, slot)] for slot in self.call.given)

    def kept(self) -> set[str]:
        """The inputs that the call does not write to."""
        return set(self.call.op.inputs) - set(self.call.op.mutates) - set(self.shared.values())

    def offset(self, place: str) -> int:
        """Bytes behind an aligned address at which a place begins. What the library itself allocates is aligned."""
        call = self.call
        kept = {*call.op.workspace, *call.op.residuals, *(call.forward.op.residuals if call.forward else ())}
        return ITEMSIZE[call.given[place].dtype] if self.shifted and place not in kept else 0

    def results(self) -> dict[str, str]:
        """By result, the slot whose memory it is in: outputs, residuals, and the inputs, which must not change unless
        the operator writes to them."""
        slots = [slot for slot in self.call.given if slot not in self.call.op.workspace]
        over = set(self.shared.values())
        return {slot: self.shared.get(slot, slot) for slot in slots if slot not in over}


def quiet(one: Repeated, run: Callable[[Repeated, Mapping[str, bytes]], dict[str, bytes]], entry: Runner) -> Quiet:
    """``run`` makes one call on memory of these bytes, and returns what each place holds after it."""
    before = {slot: data for slot, data in filled(one.call, entry, POISON).items() if slot not in one.shared}
    held = run(one, before)
    after = {place: held[place] for place in one.results().values()}
    for place in one.kept() & set(after):
        if after[place] != before[place]:
            raise AssertionError(f"{one}: the call writes to its input {place}")
    again = run(one, before)
    for slot, place in one.results().items():
        if again[place] != after[place]:
            raise AssertionError(f"{one}: two calls in quiet differ in {slot}")
    return Quiet(before, after)


def repeated(subject: Subject, device: str, every_dtype: bool = True) -> Iterator[Repeated]:
    """Each call of an operator. Not ``every_dtype``: large cases in one."""
    tried = [(case, False) for case in cases_of(subject, large=device == "cuda")]
    tried += [(case, True) for case in _shifted(subject)] if device == "cuda" else []
    for case, shifted in tried:
        for dtype in subject.dtypes if every_dtype else subject.dtypes_for(case):
            if subject.refusal(case, dtype) is None:
                for one in _of_trial(subject, subject.trial(case, dtype), device):
                    yield replace(one, shifted=shifted)


def other_numbers(one: Repeated, subject: Subject, device: str) -> Repeated:
    """A call like this one on other numbers."""
    of = subject.trial(one.case, one.dtype)
    trial = Trial(of.row, of.case, of.dtype, f"{of.seed} again")
    return next(
        each for each in _of_trial(subject, trial, device) if (each.pass_, each.shared) == (one.pass_, one.shared)
    )


def cases_of(subject: Subject, large: bool) -> list[Case]:
    """The subject's, and empty and large ones like its plain case."""
    cases = [*subject.cases]
    if subject.from_row:
        cases += unusual_cases(subject)["empty"]
    if subject.from_row and large:
        cases += filter(None, (_long(subject), _wide(subject)))
        cases += subject.row.under_load
    return list({repr(case): case for case in cases}.values())


def _lengths(case: Case) -> list[int]:
    return list(dict.fromkeys(dim for shape in case.given.values() for dim in shape if dim > 1))


def _long(subject: Subject) -> Case | None:
    """The plain case with a longer first axis."""
    plain, dtype = subject.plain, subject.dtypes[0]
    for old in _lengths(plain):
        if case := resized(subject, plain, old, -(-LARGE * old // max(elements(plain), 1)), dtype, True):
            return case
    return None


def _wide(subject: Subject) -> Case | None:
    """The plain case with every axis longer, and aligned; None if its axes depend on each other."""
    case = subject.plain
    rank = max(map(len, case.given.values()), default=0)
    if rank not in _WIDE:
        return None
    for old in _lengths(case):
        longer = resized(subject, case, old, _WIDE[rank], subject.dtypes[0], True)
        if longer is None:
            return None
        case = longer
    return case


def _shifted(subject: Subject) -> Iterator[Case]:
    """The calls that are tried at addresses which kernels for vectors do not take."""
    yield subject.plain
    if subject.from_row and (case := _wide(subject)):
        yield case


_WIDE = {1: LARGE, 2: 1024, 3: 128}
"""The length of every axis, by the number of axes."""


def _of_trial(subject: Subject, trial: Trial, device: str) -> Iterator[Repeated]:
    made = cache(partial(calls_of, subject.op, trial, device))
    backward = subject.op.backward
    passes = {"forward": subject.op} | ({"backward": backward} if backward and backward.has_kernel else {})
    for i, (pass_, op) in enumerate(passes.items()):
        one = Repeated(subject.op.name, pass_, trial.case, trial.dtype, partial(lambda i: made()[i], i))
        yield one
        # residuals that are not kept have no elements: what is written over one would be written behind it
        given = one.call.given if op.overwrites else {}
        over = {y: x for y, x in op.overwrites.items() if y in given and given[y] == given.get(x)}
        if over:
            yield replace(one, shared=over)


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs ``work`` in a thread of its own. It returns when the event is set, at the end of the context."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
