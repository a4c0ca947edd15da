"""The hits that a step remembers: cheap to count during the step, and released at its end."""

import weakref
from collections.abc import Sequence

import pytest

from kvtier.backend.namespace import OffloadKey, make_offload_key
from kvtier.engine.primary import Primary
from kvtier.engine.requests import Leases, Request, StepHits
from kvtier.policies import policy_class

ROWS = 3
LEASED_MAX = 2


def key_of(name: str) -> OffloadKey:
    return make_offload_key(name.encode())


class Parts:
    """The hits of a step, with their primary and leases."""

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
            self.hits.add(request, key_of(name))


@pytest.fixture
def parts() -> Parts:
    return Parts(rows=2, leased_max=1)


class CountedRow(int):
    """A row that counts how often it is looked for."""

    looks = 0

    def __hash__(self) -> int:
        CountedRow.looks += 1
        return int(self)


def test_asking_for_a_lease_costs_the_same_however_many_there_are() -> None:
    """A look-up asks for each key that a tier holds, and thousands of rows may be leased."""
    parts = Parts(rows=1_000, leased_max=900)
    for row in range(800):
        assert parts.leases.take(CountedRow(row), Request("waiting"), now=0.0)
    CountedRow.looks = 0
    assert parts.leases.room([CountedRow(799), CountedRow(900)], 99)
    assert not parts.leases.room([CountedRow(799), CountedRow(900)], 100)
    assert CountedRow.looks <= 8


class Watched(Request):
    """A request that can be weakly referenced."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("over", [lambda parts: parts.hits.end(now=0.0), lambda parts: parts.hits.clear()])
@pytest.mark.parametrize("room_was_made", [False, True])
def test_a_finished_step_releases_its_requests(parts, room_was_made, over):
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
