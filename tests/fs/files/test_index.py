"""The index errs on the side of "there", forgets nothing it must tell, and stays small."""

import asyncio
import random
import tracemalloc

import pytest

from kvtier.backend import Added, Advice, InventoryEvent, OffloadKey, Removed, ScanDone
from kvtier.policies import LRU
from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.files.index import FileEntry, FileIndex
from kvtier_backends.fs.segments.table import SlotEntry, SlotTable

A, B, C, D = keys_of(4)


@pytest.fixture
def index():
    return FileIndex()


@pytest.fixture
async def told(index):
    """Return what the index's report has told since the last call; the first one begins it."""
    heard, listening = list[InventoryEvent](), list[asyncio.Task[None]]()

    async def listen():
        async for event in index.inventory.watch():
            heard.append(event)

    async def told():
        if not listening:
            listening.append(asyncio.create_task(listen()))
        for _ in range(5):
            await asyncio.sleep(0)
        news, heard[:] = list(heard), []
        return news

    yield told
    index.inventory.close()
    await asyncio.gather(*listening)


def gone_from(index):
    return [victim.key for victim in index.victims(len(index))]


@pytest.fixture
async def followed(index, told):
    index.scan_ended(complete=True)
    assert await told() == [ScanDone(complete=True)]
    return index


def test_what_the_scan_finds_is_older_than_what_was_used_since_the_start(index):
    index.stored(FileEntry(A, 512))
    index.found(FileEntry(B, 512))
    index.scanned([FileEntry(B, 512), FileEntry(C, 512, 2), FileEntry(D, 512, 1)])
    assert gone_from(index) == [D, C, A, B]


def test_a_later_scan_renews_the_chunks_that_other_processes_used(index):
    index.scanned([FileEntry(A, 512, 1_000), FileEntry(B, 512, 1_010)])
    index.scanned([FileEntry(A, 512, 1_100)])
    index.scan_ended(complete=True)
    assert ([file.key for file in index.unused_since(1_050)], gone_from(index)) == ([B], [A])


def test_a_removal_does_not_reach_what_was_stored_after_it_began(index):
    index.stored(FileEntry(A, 512))
    index.stored(FileEntry(B, 512))
    with index.call([A, B]) as early, index.call([A]) as other:
        index.stored(FileEntry(A, 512))
        with index.call([A, C]) as late:
            assert (early, other, late) == ({B}, set(), {A, C})
            index.stored(FileEntry(C, 512))
        assert (early, late) == ({B}, {A})
    index.stored(FileEntry(B, 512))
    assert early == {B}  # It is over.


async def test_a_report_begins_with_what_is_there_and_not_with_what_was_removed(index, told):
    index.removed(A)
    index.removed(B)
    index.stored(FileEntry(B, 512))
    assert await told() == [Added([B])]
    index.scanned([FileEntry(A, 512), FileEntry(B, 512), FileEntry(C, 512)])
    index.scan_ended(complete=True)
    assert await told() == [Added([C]), ScanDone(complete=True)]


async def test_only_what_no_call_explains_is_reported(followed, told):
    followed.stored(FileEntry(A, 512))
    followed.stored(FileEntry(B, 512))
    followed.removed(A)
    assert await told() == []
    followed.lost(A)  # Nobody thinks that it is there.
    followed.lost(B)
    followed.found(FileEntry(C, 512))
    assert await told() == [Added([C]), Removed([B])]


async def test_an_event_is_true_when_it_is_told(followed, told):
    for key in (A, B):
        followed.found(FileEntry(key, 512))
    followed.lost(A)
    followed.lost(B)
    followed.stored(FileEntry(B, 512))
    assert await told() == [Added([B]), Removed([A])]


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("how", ["stored", "scanned", "found in slots"])
def test_a_chunk_takes_two_hundred_bytes_at_most(how):
    count, now_ns = 90_000, 1_700_000_000_000_000_000
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        index = SlotTable(None) if how == "found in slots" else FileIndex()
        if how == "found in slots":
            index.add(count)
        for number in range(count):
            key = OffloadKey(number.to_bytes(36, "big"))
            match how:
                case "stored":
                    index.stored(FileEntry(key, 20_480, now_ns + number * 1_000_000))
                case "scanned":
                    index.scanned([FileEntry(key, 20_480, now_ns + number * 1_000_000)])
                case _:
                    index.found(SlotEntry(key, number, number + 1, number + 1))
        index.scan_ended(complete=True)
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == count
    assert (used_bytes - before_bytes) / count <= 200


def test_without_a_policy_it_evicts_as_lru_does():
    dice, ours, theirs = random.Random(5), FileIndex(), FileIndex(LRU(1 << 20))
    keys = keys_of(1_005)
    for _ in range(8_000):
        number, what = dice.randrange(1_000), dice.random()
        for index in (ours, theirs):
            if what < 0.5:
                index.stored(FileEntry(keys[number], 512))
            elif what < 0.8:
                index.used([keys[number]])
            elif what < 0.85:
                index.removed(keys[number])
            elif what < 0.9:
                index.numbers.advise(Advice("rank", keys[number : number + 5]), 0, 0)
        if what >= 0.9:
            count = dice.randrange(1, 4)
            assert ours.victims(count) == theirs.victims(count)
    left = [gone_from(index) for index in (ours, theirs)]
    assert len(left[0]) > 200
    assert left[0] == left[1]


def test_chunks_in_use_at_the_cold_end_are_renewed_and_idle_ones_go_later_in_their_turn(index):
    keys = keys_of(6)
    for key in keys:
        index.stored(FileEntry(key, 512))
    with index.claims.in_use(keys):
        assert index.victims(3) == []
    with index.claims.in_use(keys[:2]):
        assert [victim.key for victim in index.victims(2)] == keys[2:4]
    assert gone_from(index) == [keys[number] for number in (4, 5, 0, 1)]
    index = FileIndex()
    index.scanned([FileEntry(key, 512, number) for number, key in enumerate(keys[:4], 1)])
    with index.claims.in_use(keys[:2]):
        assert [victim.key for victim in index.victims(1)] == keys[2:3]
    assert gone_from(index) == [keys[0], keys[1], keys[3]]


def test_chunks_from_before_the_start_go_by_their_last_use_whatever_batch_they_came_in(index):
    uses = [(time_ns, key_of(number)) for number, time_ns in enumerate(random.Random(7).sample(range(10_000), 2_000))]
    for start in range(0, len(uses), 300):
        index.scanned([FileEntry(key, 512, time_ns) for time_ns, key in uses[start : start + 300]])
    assert [victim.key for _ in range(200) for victim in index.victims(10)] == [key for _, key in sorted(uses)]
