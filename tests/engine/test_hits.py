"""Whatever a step finds, and whoever makes room meanwhile: what was answered HIT lies where it lay until the step ends.

The machine plays the ledger: it looks up, makes room, has promises come or fail, and ends steps.
"""

import string
import weakref
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.engine.primary import Primary
from kvtier.engine.requests import Leases, Request, StepHits
from kvtier.policies import policy_class

ROWS = 3
LEASED_MAX = 2

letters = st.sampled_from(string.ascii_lowercase[:5])
which = st.integers(0, 2)


def key_of(name: str) -> OffloadKey:
    return make_offload_key(name.encode())


class Parts:
    """A step's hits, and what they stand on."""

    def __init__(self, rows: int = ROWS, leased_max: int = LEASED_MAX) -> None:
        self.primary = Primary(rows, policy_class("lru")(rows))
        self.leases = Leases(self.primary, leased_max, lease_s=1.0)
        self.hits = StepHits(self.primary, self.leases)

    def reserve(self, *keys: OffloadKey) -> Sequence[OffloadKey] | None:
        self.hits.hold()
        return self.primary.reserve(keys)

    def store(self, names: str) -> bool:
        keys = list(map(key_of, names))
        stored = self.reserve(*keys) is not None
        self.primary.publish(keys)
        return stored

    def find(self, request: Request, names: str) -> None:
        for name in names:
            self.hits.note(request, key_of(name))


@pytest.fixture
def parts() -> Parts:
    return Parts(rows=2, leased_max=1)


class CountedRow(int):
    """A row that says how often anybody looked for it."""

    looks = 0

    def __hash__(self) -> int:
        CountedRow.looks += 1
        return int(self)


def test_whether_more_may_be_leased_is_known_without_a_look_at_what_others_have() -> None:
    """It is asked for each key that a look-up finds in a tier, and thousands of rows may be leased."""
    parts = Parts(rows=1_000, leased_max=900)
    for row in range(800):
        assert parts.leases.take(CountedRow(row), Request("waiting"), now=0.0)
    CountedRow.looks = 0
    assert parts.leases.room([CountedRow(799), CountedRow(900)], 99)
    assert not parts.leases.room([CountedRow(799), CountedRow(900)], 100)
    assert CountedRow.looks <= 8


def test_what_was_found_stays_until_the_step_ends_and_no_longer(parts):
    assert parts.store("ab")
    parts.find(Request("r"), "ab")
    assert not parts.store("c")
    parts.hits.end(now=0.0)
    assert parts.store("c")


def test_what_is_found_after_room_was_made_stays_as_well(parts):
    request = Request("r")
    assert parts.store("ab")
    parts.find(request, "b")
    assert parts.store("c")
    parts.find(request, "c")
    assert not parts.store("d")


def test_whoever_has_found_a_key_may_append_those_it_finds_next(parts):
    request = Request("r")
    hits = request.hits
    assert parts.store("ab")
    parts.find(request, "a")
    hits.append(key_of("b"))
    assert not parts.store("c")
    assert hits == []  # From now on it is to note again.
    assert request.hits is hits


def test_only_a_request_that_waits_keeps_what_it_found_and_of_too_much_the_head(parts):
    waiting, satisfied = Request("waiting"), Request("satisfied")
    assert parts.store("ab")
    parts.find(satisfied, "b")
    parts.find(waiting, "ab")
    waiting.waits = True
    parts.hits.end(now=0.0)
    assert (waiting.leased, satisfied.leased) == ({parts.primary.row(key_of("a"))}, set())
    assert parts.store("c")
    assert key_of("a") in parts.primary.ready


def test_a_request_that_has_finished_keeps_nothing_of_what_it_found(parts):
    request = Request("r")
    assert parts.store("ab")
    parts.find(request, "ab")
    request.waits = request.finished = True
    parts.hits.end(now=0.0)
    assert request.leased == set()
    assert parts.store("cd")


class Watched(Request):
    """A request of which can be told whether somebody still knows it."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("over", [lambda parts: parts.hits.end(now=0.0), lambda parts: parts.hits.clear()])
@pytest.mark.parametrize("room_was_made", [False, True])
def test_when_a_step_is_over_nobody_knows_its_requests_any_more(parts, room_was_made, over):
    request = Watched("r")
    known = weakref.ref(request)
    assert parts.store("a")
    parts.find(request, "a")
    if room_was_made:
        assert not parts.store("bc")
        parts.find(request, "a")
    over(parts)
    del request
    assert known() is None


class Step(RuleBasedStateMachine):
    """Three requests at a time, and a step after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()
        self.primary, self.leases, self.hits = self.parts.primary, self.parts.leases, self.parts.hits
        self.ids = map(str, count())
        self.requests = [Request(next(self.ids)) for _ in range(3)]
        self.found: dict[Request, list[OffloadKey]] = {}
        self.refused: set[Request] = set()  # Whose leases were more than the share had left.
        self.answered: dict[OffloadKey, int] = {}  # HIT in this step, and the row that it was in.

    @rule(row=st.integers(0, ROWS - 1), which=which, shortcut=st.booleans())
    def look_up(self, row: int, which: int, shortcut: bool) -> None:
        key, request = self.primary.key(row), self.requests[which]
        if key is None:
            return
        if key in self.primary.ready:
            self.answered[key] = self.primary.ready[key]
        else:
            request.waits = True
        self.found.setdefault(request, []).append(key)
        if shortcut and request.hits and key in self.primary.ready:
            request.hits.append(key)
        else:
            self.hits.note(request, key)

    @rule(name=letters, at_once=st.booleans())
    def reserve(self, name: str, at_once: bool) -> None:
        if self.primary.row(key_of(name)) is None:
            evicted = self.parts.reserve(key_of(name))
            assert not set(evicted or ()) & self.answered.keys()
        if at_once:
            self.arrive(name)

    @rule(name=letters)
    def arrive(self, name: str) -> None:
        self.primary.publish([key_of(name)])

    @rule(name=letters)
    def fail(self, name: str) -> None:
        row = self.primary.filling.get(key_of(name))
        if row is not None:
            self.leases.end_row(row)
            self.primary.abandon(key_of(name), lent=False)
            self.lose(key_of(name))

    @rule(name=letters)
    def discard(self, name: str) -> None:
        if self.primary.discard(key_of(name)):
            self.lose(key_of(name))

    @rule(which=which)
    def lease(self, which: int) -> None:
        request = self.requests[which]
        fits = self.hits.leasable(request, 0)
        self.hits.lease(request, now=0.0)
        if not self.is_leased(request):
            assert not fits or request in self.refused
            self.refused.add(request)

    @rule(which=which)
    def finish(self, which: int) -> None:
        request, self.requests[which] = self.requests[which], Request(next(self.ids))
        request.finished = True
        self.leases.end_all(request)

    @rule()
    def end(self) -> None:
        waiting = [request for request in self.found if request.waits and not request.finished]
        self.hits.end(now=0.0)
        for request in waiting:
            assert request in self.refused or self.is_leased(request) or self.leases.rows == LEASED_MAX
        for request in self.found:
            assert not (request.finished and request.leased)
            assert (request.hits, request.held, request.leased_hits, request.waits) == ([], [], 0, False)
        self.forget()

    @rule(surely=st.integers(0, 9))
    def clear(self, surely: int) -> None:
        if surely:
            return
        self.hits.clear()
        self.leases.clear()
        self.primary.clear({})
        self.forget()

    @invariant()
    def what_was_answered_hit_lies_where_it_lay(self) -> None:
        assert self.answered.items() <= self.primary.ready.items()

    @invariant()
    def leases_keep_within_their_share(self) -> None:
        assert self.leases.rows <= LEASED_MAX

    def teardown(self) -> None:
        """When a step has ended, all but what is pinned may go."""
        self.end()
        rows = [row for row in range(ROWS) if not self.primary.pinned(row)]
        keys = [key_of(f"new {number}") for number in range(len(rows))]
        assert not keys or self.parts.reserve(*keys) is not None

    def lose(self, key: OffloadKey) -> None:
        """Expect nothing of a key that has lost its row, wherever it may lie next."""
        self.answered.pop(key, None)
        for request, keys in self.found.items():
            self.found[request] = [each for each in keys if each != key]

    def is_leased(self, request: Request) -> bool:
        return request.leased.issuperset(self.primary.rows_of(self.found.get(request, ())))

    def forget(self) -> None:
        self.found.clear()
        self.refused.clear()
        self.answered.clear()


TestStep = Step.TestCase
TestStep.settings = settings(max_examples=2 * settings().max_examples)
