"""The index errs on the side of "there", forgets nothing it must tell, and stays small."""

import random
import tracemalloc

import pytest

from kvtier.backend import Advice
from kvtier.backend.contract import INVENTORY_BATCH_KEYS, Added, InventoryEvent, Removed, ScanDone
from kvtier.backend.namespace import OffloadKey, make_offload_key
from kvtier.policies import LRU
from kvtier_backends.fs.files.index import FileEntry, FileIndex

A, B, C, D = (make_offload_key(name * 32) for name in (b"a", b"b", b"c", b"d"))


@pytest.fixture
def index() -> FileIndex:
    return FileIndex()


def events(index: FileIndex) -> list[InventoryEvent]:
    told: list[InventoryEvent] = []
    while (event := index.inventory.next_event()) is not None:
        told.append(event)
    return told


def scanned(index: FileIndex) -> FileIndex:
    index.inventory.begin()
    index.scan_ended(complete=True)
    assert events(index) == [ScanDone(complete=True)]
    return index


def test_what_was_removed_gives_back_its_room(index) -> None:
    index.stored(FileEntry(A, 12_288))
    index.stored(FileEntry(B, 4_096))
    index.removed(A)
    index.removed(C)
    assert index.used_bytes == 4_096
    assert gone_from(index) == [B]


def test_keys_stand_in_the_order_of_their_last_use(index) -> None:
    for key in (A, B, C):
        index.stored(FileEntry(key, 512))
    index.used([A])
    index.stored(FileEntry(B, 512))
    index.used([make_offload_key(b"unknown")])
    assert gone_from(index) == [C, A, B]


def test_what_the_scan_finds_is_older_than_what_was_used_since_the_start(index) -> None:
    index.stored(FileEntry(A, 512))
    index.found(FileEntry(B, 512))
    index.scanned([FileEntry(B, 512), FileEntry(C, 512, 2), FileEntry(D, 512, 1)])
    assert gone_from(index) == [D, C, A, B]


def test_a_later_scan_renews_the_chunks_that_other_processes_used(index) -> None:
    index.scanned([FileEntry(A, 512, 1_000), FileEntry(B, 512, 1_010)])
    index.scanned([FileEntry(A, 512, 1_100)])
    index.scan_ended(complete=True)
    assert [file.key for file in index.unused_since(1_050)] == [B]
    assert gone_from(index) == [A]


def test_a_removal_does_not_reach_what_was_stored_after_it_began(index) -> None:
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


def test_the_scan_does_not_bring_back_what_was_removed_beside_it(index) -> None:
    index.removed(A)
    index.removed(B)
    index.stored(FileEntry(B, 512))
    index.scanned([FileEntry(A, 512), FileEntry(B, 512), FileEntry(C, 512)])
    index.scan_ended(complete=True)
    assert (A in index, B in index, C in index) == (False, True, True)


def test_only_a_complete_scan_makes_it_the_authority(index) -> None:
    assert not index.authoritative
    index.scan_ended(complete=False)
    assert not index.authoritative
    index.inventory.begin()
    assert events(index) == [ScanDone(complete=False)]
    index.scan_ended(complete=True)
    assert index.authoritative


def test_a_report_begins_with_what_is_there(index) -> None:
    index.stored(FileEntry(A, 512))
    index.scanned([FileEntry(B, 512)])
    index.inventory.begin()
    index.scanned([FileEntry(B, 512), FileEntry(C, 512)])
    index.scan_ended(complete=True)
    assert events(index) == [Added([A, B, C]), ScanDone(complete=True)]


def test_only_what_no_call_explains_is_reported(index) -> None:
    scanned(index)
    index.stored(FileEntry(A, 512))
    index.stored(FileEntry(B, 512))
    index.removed(A)
    assert events(index) == []
    index.lost(A)  # Nobody thinks that it is there.
    index.lost(B)
    index.found(FileEntry(C, 512))
    assert events(index) == [Added([C]), Removed([B])]


def test_an_event_is_true_when_it_is_told(index) -> None:
    scanned(index)
    for key in (A, B):
        index.found(FileEntry(key, 512))
    index.lost(A)
    index.lost(B)
    index.stored(FileEntry(B, 512))
    assert events(index) == [Added([B]), Removed([A])]


def test_batches_have_a_limit(index) -> None:
    keys = [make_offload_key(number.to_bytes(32, "big")) for number in range(2 * INVENTORY_BATCH_KEYS + 1)]
    index.inventory.begin()
    index.scanned([FileEntry(key, 512) for key in keys])
    index.scan_ended(complete=True)
    batches = [list(event.keys) for event in events(index) if isinstance(event, Added)]
    assert [len(batch) for batch in batches] == [INVENTORY_BATCH_KEYS, INVENTORY_BATCH_KEYS, 1]
    assert [key for batch in batches for key in batch] == keys
    for key in keys:
        index.lost(key)
    for key in keys[1:]:
        index.stored(FileEntry(key, 512))
    assert events(index) == [Removed([keys[0]])]  # Whole batches may have become untrue.


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("naming", ["stored", "scanned"])
def test_a_chunk_takes_two_hundred_bytes_at_most(naming) -> None:
    """Key and order included, however full the dictionary happens to be."""
    count, now_ns = 100_000, 1_700_000_000_000_000_000
    tracemalloc.start()
    try:
        index = FileIndex()
        for start in range(0, count, 1_000):
            chunks = [
                FileEntry(OffloadKey(number.to_bytes(36, "big")), 20_480, now_ns + number * 1_000_000)
                for number in range(start, start + 1_000)
            ]
            if naming == "scanned":
                index.scanned(chunks)
            else:
                for chunk in chunks:
                    index.stored(chunk)
            del chunks
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes / count < 200
    assert len(index) == count


def key_of(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"))


def test_without_a_policy_it_evicts_as_lru_does() -> None:
    """Through thousands of uses, removals and evictions."""
    dice = random.Random(5)
    ours, theirs = FileIndex(), FileIndex(LRU(1 << 20))
    for _ in range(20_000):
        number, what = dice.randrange(3_000), dice.random()
        key = key_of(number)
        for index in (ours, theirs):
            if what < 0.5:
                index.stored(FileEntry(key, 512))
            elif what < 0.8:
                index.used([key])
            elif what < 0.85:
                index.removed(key)
            elif what < 0.9:
                index.advise(Advice("rank", [key_of(number + place) for place in range(5)]), 0)
        if what >= 0.9:
            count = dice.randrange(1, 4)
            assert ours.victims(count) == theirs.victims(count)
    left = [gone_from(index) for index in (ours, theirs)]
    assert len(left[0]) > 500
    assert left[0] == left[1]


def gone_from(index: FileIndex) -> list[OffloadKey]:
    """Evict all chunks; return their keys in that order."""
    return [victim.key for victim in index.victims(len(index))]


def test_chunks_in_use_at_the_cold_end_are_renewed() -> None:
    index, keys = FileIndex(), [key_of(number) for number in range(6)]
    for key in keys:
        index.stored(FileEntry(key, 512))
    with index.claims.in_use(keys):
        assert index.victims(3) == []
    with index.claims.in_use(keys[:2]):
        assert [victim.key for victim in index.victims(2)] == keys[2:4]
    assert gone_from(index) == [keys[number] for number in (4, 5, 0, 1)]


def test_chunks_from_before_the_start_go_by_their_last_use_whatever_batch_they_came_in() -> None:
    dice = random.Random(7)
    index = FileIndex()
    uses = [(time_ns, key_of(number)) for number, time_ns in enumerate(dice.sample(range(10_000), 2_000))]
    for start in range(0, len(uses), 300):
        index.scanned([FileEntry(key, 512, time_ns) for time_ns, key in uses[start : start + 300]])
    chosen = [victim.key for _ in range(200) for victim in index.victims(10)]
    assert chosen == [key for _, key in sorted(uses)]


def test_an_idle_chunk_in_use_stays_and_goes_later_in_its_turn() -> None:
    index, keys = FileIndex(), [key_of(number) for number in range(4)]
    index.scanned([FileEntry(key, 512, number) for number, key in enumerate(keys, 1)])
    with index.claims.in_use(keys[:2]):
        assert [victim.key for victim in index.victims(1)] == keys[2:3]
    assert gone_from(index) == [keys[0], keys[1], keys[3]]
