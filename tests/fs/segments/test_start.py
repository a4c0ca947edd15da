"""Starts over segments that somebody may have written to since the checkpoint: it is a candidate's only witness."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.backend.contract import Added, Removed, ScanDone
from kvtier.backend.namespace import OffloadKey
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsBackend
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from tests.fs.conftest import ROW_BYTES, OpenTier, Place, SystemCall, segments

DEADLINE_S = 20.0
OPTIONS = {"layout": "segments", "capacity_bytes": "1MiB"}
PlaceOf = Callable[[OffloadKey], Place]


@pytest.fixture
def stop_the_walk(hurry, system_call):
    """Hold the next scan before the first footer; nobody waits for it."""

    def stop_the_walk(error: int = 0) -> SystemCall:
        hurry()
        return system_call("posix_fadvise", sticks=True, error=error)

    return stop_the_walk


async def stored(open_tier: OpenTier, lender: Lender, root: Path, chunks: int) -> bytes:
    """Store chunks and return the checkpoint that names them, of which the next start trusts no segment."""
    tier = await open_tier(**OPTIONS)
    await lender.keep(tier, keys_of(chunks))
    await tier.aclose(DEADLINE_S)
    touch(root)
    return index(root).read_bytes()


def touch(root: Path) -> None:
    for segment in segments(root):
        os.utime(segment, ns=(1, 1))


def index(root: Path) -> Path:
    (found,) = root.glob("*/index_*_segments")
    return found


async def told(tier: FsBackend, *, gone: int = 0, complete: bool = True) -> tuple[set[OffloadKey], set[OffloadKey]]:
    """Return the keys that the tier reports until its scan is done, and those that it then takes back."""
    added, removed, done = set[OffloadKey](), set[OffloadKey](), False
    async with asyncio.timeout(DEADLINE_S):
        async for event in tier.watch():
            match event:
                case Added(keys):
                    added.update(keys)
                case Removed(keys):
                    removed.update(keys)
                case ScanDone():
                    assert event.complete == complete
                    done = True
            if done and len(removed) >= gone:
                break
    return added, removed


async def test_all_that_the_checkpoint_names_is_a_hit_before_one_footer_was_read(
    open_tier, lender, root, stop_the_walk
) -> None:
    await stored(open_tier, lender, root, 40)
    walk = stop_the_walk()
    tier = await open_tier(**OPTIONS)
    assert all(await tier.probe(keys_of(40)))
    assert not any(await tier.probe(keys_of(3, start=40)))
    assert await lender.recall(tier, keys_of(40)) == [label(key) for key in keys_of(40)]
    await walk.wait_entered()
    walk.let_go()
    assert await told(tier) == (set(keys_of(40)), set())
    assert await lender.recall(tier, keys_of(40)) == [label(key) for key in keys_of(40)]


def nothing(place: Place) -> None:
    place.overwrite(ROW_BYTES, bytes(FOOTER_BYTES))


def half_a_footer(place: Place) -> None:
    place.overwrite(ROW_BYTES + 70, b"\xff")


def half_a_row(place: Place) -> None:
    place.overwrite(0, b"half of another chunk")


@pytest.mark.parametrize(
    ("damage", "afterwards"), [(nothing, "ChunkMissing"), (half_a_footer, "ChunkMissing"), (half_a_row, "ChunkCorrupt")]
)
async def test_a_candidate_that_is_not_there_is_a_miss_and_no_fault(
    open_tier, lender, root, place_of, stop_the_walk, damage, afterwards
) -> None:
    """Only the footer, once it has been read, makes a fault of it."""
    await stored(open_tier, lender, root, 3)
    damage(place_of(key_of(1)))
    touch(root)
    walk = stop_the_walk()
    tier = await open_tier(**OPTIONS)
    assert await lender.recall(tier, keys_of(3)) == [label(key_of(0)), "ChunkMissing", label(key_of(2))]
    assert list(await tier.probe(keys_of(3))) == [True, False, True]
    assert tier.counters().corrupt == {}
    walk.let_go()
    await told(tier)
    assert await lender.recall(tier, keys_of(3)) == [label(key_of(0)), afterwards, label(key_of(2))]


async def test_what_was_written_over_a_candidate_is_kept_whatever_comes_meanwhile(
    open_tier, lender, root, stop_the_walk
) -> None:
    """Neither a store of the candidate's key nor a failed load of it touches a slot that nobody has looked at."""
    old = await stored(open_tier, lender, root, 4)
    second = await open_tier(**OPTIONS)
    await second.delete(keys_of(4))
    await lender.keep(second, keys_of(4, start=10))
    await second.aclose(DEADLINE_S)
    index(root).write_bytes(old)
    walk = stop_the_walk()
    tier = await open_tier(**{**OPTIONS, "capacity_bytes": "4MiB"})
    assert await lender.recall(tier, keys_of(2)) == ["ChunkMissing"] * 2
    await lender.keep(tier, keys_of(3), version=1)
    walk.let_go()
    added, removed = await told(tier, gone=1)
    assert added >= set(keys_of(4, start=10))
    assert removed == {key_of(3)}
    expected = [*(label(key, 1) for key in keys_of(3)), "ChunkMissing", *map(label, keys_of(4, start=10))]
    assert await lender.recall(tier, [*keys_of(4), *keys_of(4, start=10)]) == expected


async def test_a_segment_that_went_after_the_checkpoint_has_no_candidates(
    open_tier, lender, root, stop_the_walk
) -> None:
    """Nor has one of another tier that has its name by now."""
    await stored(open_tier, lender, root, 4)
    (segment,) = segments(root)
    segment.write_bytes(b"\x89kvtseg\n" + bytes(segment.stat().st_size - 8))
    tier = await open_tier(**OPTIONS)
    assert await lender.recall(tier, keys_of(4)) == ["ChunkMissing"] * 4
    await tier.aclose(DEADLINE_S)
    segment.unlink()
    tier = await open_tier(**OPTIONS)
    assert not any(await tier.probe(keys_of(4)))


async def test_candidates_of_a_segment_that_cannot_be_read_are_taken_back(
    open_tier, lender, root, stop_the_walk
) -> None:
    await stored(open_tier, lender, root, 4)
    walk = stop_the_walk(errno.EIO)
    tier = await open_tier(**OPTIONS)
    assert all(await tier.probe(keys_of(4)))
    await walk.wait_entered()
    walk.let_go()
    assert await told(tier, complete=False, gone=4) == (set(keys_of(4)), set(keys_of(4)))
