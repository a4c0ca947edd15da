"""A replaced runner takes over its predecessor's segments once the kernel has released their locks."""

import errno
import fcntl
import os

import pytest

from kvtier.backend import EngineId
from kvtier.errors import NoSpace
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs.segments import recovery
from kvtier_backends.fs.segments.folder import SegmentFolder
from tests.fs.conftest import (
    DEADLINE_S,
    FOOTER_BYTES,
    ROW_BYTES,
    segments,
    taken_bytes,
    until_probed,
    until_stored,
    whole,
)

ENGINE = EngineId(os.getpid(), 7)
CAPACITY_BYTES = 1 << 20
OURS = {"layout": "segments", "capacity_bytes": CAPACITY_BYTES, "engine": ENGINE}
OLD = keys_of(40)
NEW = keys_of(200, start=1_000)  # More than the capacity holds.


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(recovery, "AGAIN_S", 0.02)


async def test_a_replaced_runner_stores_again_once_its_predecessor_is_dead(launch, open_tier, lender, root):
    predecessor = launch("obey", engine=ENGINE, options={"capacity_bytes": CAPACITY_BYTES})
    predecessor.begin()
    assert predecessor.ask(f"store {len(OLD)} 0") == len(OLD)
    predecessor.stop()  # It hangs.
    tier, new = await open_tier(**OURS), NEW[:10]
    for key in OLD:
        lender.chunk(key)  # As its predecessor stored it.
    assert await lender.recall(tier, OLD) == whole(OLD)  # Read from the locked segments.
    refused = await tier.store(lender.writes(NEW))
    assert any(isinstance(outcome, NoSpace) and "others" in str(outcome) for outcome in refused)
    predecessor.kill()
    await until_stored(tier, lender, new)
    assert await lender.recall(tier, new + OLD) == whole(new + OLD)
    await lender.keep(tier, NEW[:60])  # Evicts what was taken over.
    assert taken_bytes(root) <= CAPACITY_BYTES
    await tier.aclose(DEADLINE_S)
    assert await lender.recall(await open_tier(**OURS), NEW[:60]) == whole(NEW[:60])


async def test_a_segment_is_taken_over_as_its_footers_say(open_tier, stored, lender, root, place_of):
    kept, deleted, again, wiped = keys = keys_of(4)
    await stored(keys, layout="segments")
    (segment,) = segments(root)
    with segment.open("r+b") as pruned:
        fcntl.flock(pruned, fcntl.LOCK_EX)
        second = await open_tier(layout="segments", capacity_bytes="4MiB", checkpoint_s=0)
        await lender.keep(second, [again], version=1)
        await second.delete([deleted])
        place_of(wiped).overwrite(ROW_BYTES, bytes(FOOTER_BYTES))
        assert await lender.recall(second, [kept]) == [label(kept)]
    await until_probed(second, [wiped], there=False)
    expected = [label(kept), "ChunkMissing", label(again, 1), "ChunkMissing"]
    assert await lender.recall(second, keys) == expected
    await second.aclose(DEADLINE_S)
    third = await open_tier(layout="segments", capacity_bytes="4MiB")
    assert (await lender.recall(third, keys), third.counters().corrupt) == (expected, {})


def test_a_segment_is_taken_over_from_the_dead_alone_and_only_if_it_is_there(open_folder, root, mapper):
    folder = open_folder(layout="segments", capacity_bytes=CAPACITY_BYTES)
    about = {"row_bytes": ROW_BYTES, "fingerprint": mapper.fingerprint, "fsync": False}
    first, second = (SegmentFolder(folder, **about) for _ in range(2))
    made = first.create(4)
    seen = second.open(made.name)
    assert (seen.own, second.take_over(seen)) == (False, False)
    made.close()
    assert second.take_over(seen)
    (root / seen.name).unlink()
    assert not second.take_over(seen)
    seen.close()


async def test_a_segment_that_cannot_be_opened_is_read_once_it_can(open_tier, stored, lender, monkeypatch):
    keys = keys_of(20)
    await stored(keys, layout="segments")

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as erring:
        erring.setattr(SegmentFolder, "open", fails)
        erring.setattr(SegmentFolder, "strangers", fails)
        tier = await open_tier(layout="segments")
        assert list(await tier.probe(keys)) == [False] * 20
    await until_probed(tier, keys, there=True)
    assert await lender.recall(tier, keys) == whole(keys)
    await tier.aclose(DEADLINE_S)
    assert await lender.recall(await open_tier(layout="segments"), keys) == whole(keys)
