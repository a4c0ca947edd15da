"""Chunks come back bit for bit, however few rows there are. Each bridge has such tests in tests/runner."""

import pytest

from kvtier.backend.namespace import make_offload_key
from tests.engine.kit import at_rest, chunk, found, key, ledger_in, put

DUMMY = {"type": "dummy"}


async def test_a_primary_of_one_row_works(open_engine):
    engine = await open_engine(1, DUMMY)
    for number in range(5):
        assert await put(engine, [number]) == 1
    assert await put(engine, [1, 2]) == 1
    assert await engine.put([key(1)], [chunk(9)]) == 1  # A second put of a key keeps the first chunk.
    for number in range(5):
        assert await found(engine, [number]) == 1
    assert await at_rest(engine)


async def test_a_tier_lets_a_long_requests_tail_go_before_its_head(open_engine, tmp_path):
    """Its chunks came in pieces, the head first, and the tier sees each piece alone."""
    tier = {"type": "fs", "root": str(tmp_path / "tier"), "capacity_bytes": "1MiB", "naming": "flat"}
    engine = await open_engine(8, tier, events=True)
    prefix = [key(number) for number in range(6)]
    engine.steps.on_new_request("long")
    for start in range(0, 6, 2):
        chunks = [chunk(start), chunk(start + 1)]
        assert await engine.put(prefix[start : start + 2], chunks, request_id="long") == 2
        assert await engine.drain()
    engine.steps.on_request_finished("long")
    gone = []
    for newer in range(1_000, 9_000):
        await put(engine, [newer])
        assert await engine.drain()
        removed = [event for event in engine.take_events() if (event.kind.value, event.tier) == ("removed", "0:fs")]
        gone += [one for event in removed for one in event.keys if one in prefix]
        if gone:
            break
    assert gone
    assert sorted(gone) == prefix[-len(gone) :]


@pytest.mark.promise("The key is too long for the tier, or the row has a wrong length")
@pytest.mark.parametrize("layout", ["files", "segments"])
async def test_keys_that_are_too_long_cost_their_own_chunks_and_open_no_breaker(open_engine, tmp_path, layout):
    tier = {"type": "fs", "root": str(tmp_path / "tier"), "layout": layout, "limits": {"breaker_failures": 1}}
    engine = await open_engine(8, tier)
    for number in range(4):
        keys = [key(number), make_offload_key(number.to_bytes(8, "big") * 1_000)]
        assert await engine.put(keys, [chunk(number)] * 2) == 2
    assert await engine.reset()
    assert await found(engine, range(4)) == 4
    (disk,) = ledger_in(engine).tiers
    assert (disk.counters.stored, disk.counters.failed, disk.counters.dropped) == (4, {"no_space": 4}, {})
