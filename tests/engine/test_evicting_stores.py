"""Stores over a tier that is written when chunks leave: none waits, and none is refused for it, in virtual time."""

import pytest

from kvtier.tools.replay.workload import GeneratedTrace
from tests.benchmarks.evicting_stores import CHUNK_BYTES, Stores, described, stored

TRACE = list(GeneratedTrace(limit=150))
KEEPS_UP = CHUNK_BYTES * 10_000  # A second: all that may have left the order is written long before the next step.
SHORT = 6 * CHUNK_BYTES  # Of seventy chunks that are stored a second.


def over(rows: int, bytes_per_s: int) -> Stores:
    return stored(TRACE, described(rows, "evict", bandwidth_bytes_per_s=bytes_per_s))


EACH_SPEED = pytest.mark.parametrize("bytes_per_s", [KEEPS_UP, SHORT], ids=["keeps up", "slower than the stores"])


@EACH_SPEED
@pytest.mark.parametrize("rows", [100, 800])
def test_every_store_that_has_room_without_tiers_has_it_in_the_same_step(rows: int, bytes_per_s: int) -> None:
    without, found = stored(TRACE, described(rows)), over(rows, bytes_per_s)
    assert without.refused == found.refused == 0
    assert without.granted.keys() <= found.granted.keys()


def test_a_fast_tier_gets_every_evicted_chunk_and_a_slow_one_a_part() -> None:
    found = over(1_200, KEEPS_UP)
    assert found.unwritten == 0
    short = over(1_200, SHORT)
    assert 0 < short.written < short.unwritten


@EACH_SPEED
@pytest.mark.parametrize("rows", [24, 40])
def test_where_requests_want_more_than_the_primary_few_stores_more_are_refused(rows: int, bytes_per_s: int) -> None:
    """Each asks for sixteen rows at a time and keeps them for a step; a twentieth of the rows may be being written."""
    without, found = stored(TRACE, described(rows)), over(rows, bytes_per_s)
    assert without.refused > 0
    lost = [at for at, granted in without.granted.items() if granted and not found.granted[at]]
    assert len(lost) < 0.05 * len(without.granted)
