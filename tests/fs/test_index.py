"""The index errs on the side of "there", forgets nothing it must tell, and stays small."""

import tracemalloc

import pytest

from kvtier.backend import INVENTORY_BATCH_KEYS, Added, InventoryEvent, Removed, ScanDone
from kvtier.keys import OffloadKey, make_offload_key
from kvtier_backends.fs.index import Held, Index

A, B, C = (make_offload_key(name * 32) for name in (b"a", b"b", b"c"))


@pytest.fixture
def index() -> Index:
    return Index()


def events(index: Index) -> list[InventoryEvent]:
    told: list[InventoryEvent] = []
    while (event := index.next_event()) is not None:
        told.append(event)
    return told


def scanned(index: Index) -> Index:
    index.begin_report()
    index.scan_ended(complete=True)
    assert events(index) == [ScanDone(complete=True)]
    return index


def test_what_was_stored_is_there_once(index: Index) -> None:
    index.stored(Held(A, 12_288))
    index.stored(Held(A, 16_384))
    assert A in index
    assert B not in index
    assert (len(index), index.used_bytes) == (1, 16_384)


def test_what_was_removed_gives_back_its_room(index: Index) -> None:
    index.stored(Held(A, 12_288))
    index.stored(Held(B, 4_096))
    index.removed(A, index.mark())
    index.removed(C, index.mark())
    assert list(index.oldest_first()) == [B]
    assert index.used_bytes == 4_096


def test_keys_stand_in_the_order_of_their_last_use(index: Index) -> None:
    for key in (A, B, C):
        index.stored(Held(key, 512))
    index.used(A)
    index.stored(Held(B, 512))
    index.used(make_offload_key(b"unknown"))
    assert list(index.oldest_first()) == [C, A, B]


def test_what_the_scan_finds_is_older_than_what_was_used_since_the_start(index: Index) -> None:
    index.stored(Held(A, 512))
    index.found(Held(B, 512))
    index.scanned([Held(B, 512), Held(C, 512)])
    assert list(index.oldest_first()) == [C, A, B]


def test_a_removal_does_not_reach_what_was_stored_after_it_began(index: Index) -> None:
    index.stored(Held(A, 512))
    began = index.mark()
    index.stored(Held(A, 512))
    index.removed(A, began)
    index.lost(A, began)
    assert A in index
    index.removed(A, index.mark())
    assert A not in index


def test_the_scan_does_not_bring_back_what_was_removed_beside_it(index: Index) -> None:
    index.removed(A, index.mark())
    index.removed(B, index.mark())
    index.stored(Held(B, 512))
    index.scanned([Held(A, 512), Held(B, 512), Held(C, 512)])
    index.scan_ended(complete=True)
    assert (A in index, B in index, C in index) == (False, True, True)


def test_only_a_complete_scan_makes_it_the_authority(index: Index) -> None:
    assert not index.authoritative
    index.scan_ended(complete=False)
    assert not index.authoritative
    index.begin_report()
    assert events(index) == [ScanDone(complete=False)]
    index.scan_ended(complete=True)
    assert index.authoritative


def test_a_report_begins_with_what_is_there(index: Index) -> None:
    index.stored(Held(A, 512))
    index.scanned([Held(B, 512)])
    index.begin_report()
    index.scanned([Held(B, 512), Held(C, 512)])
    index.scan_ended(complete=True)
    assert events(index) == [Added([B, A, C]), ScanDone(complete=True)]


def test_a_later_consumer_hears_everything_again(index: Index) -> None:
    first = scanned(index).begin_report()
    index.stored(Held(A, 512))
    index.begin_report()
    index.end_report(first)  # The one that has gone is not the one that listens.
    index.found(Held(B, 512))
    assert events(index) == [Added([A, B]), ScanDone(complete=True)]


def test_only_what_no_call_explains_is_reported(index: Index) -> None:
    scanned(index)
    index.stored(Held(A, 512))
    index.stored(Held(B, 512))
    index.removed(A, index.mark())
    assert events(index) == []
    index.lost(A, index.mark())  # Nobody thinks that it is there.
    index.lost(B, index.mark())
    index.found(Held(C, 512))
    assert events(index) == [Added([C]), Removed([B])]


def test_an_event_is_true_when_it_is_told(index: Index) -> None:
    scanned(index)
    for key in (A, B):
        index.found(Held(key, 512))
    index.lost(A, index.mark())
    index.lost(B, index.mark())
    index.stored(Held(B, 512))
    assert events(index) == [Added([B]), Removed([A])]


def test_batches_have_a_limit(index: Index) -> None:
    keys = [make_offload_key(number.to_bytes(32, "big")) for number in range(2 * INVENTORY_BATCH_KEYS + 1)]
    index.begin_report()
    index.scanned([Held(key, 512) for key in keys])
    index.scan_ended(complete=True)
    batches = [list(event.keys) for event in events(index) if isinstance(event, Added)]
    assert [len(batch) for batch in batches] == [INVENTORY_BATCH_KEYS, INVENTORY_BATCH_KEYS, 1]
    assert [key for batch in batches for key in batch] == keys
    for key in keys:
        index.lost(key, index.mark())
    for key in keys[1:]:
        index.stored(Held(key, 512))
    assert events(index) == [Removed([keys[0]])]  # Whole batches may have become untrue.


def test_nobody_listening_costs_nothing(index: Index) -> None:
    report = index.begin_report()
    index.end_report(report)
    index.found(Held(A, 512))
    index.lost(A, index.mark())
    assert [type(event) for event in events(index)] == []


def test_a_chunk_takes_about_two_hundred_bytes() -> None:
    count = 100_000
    tracemalloc.start()
    try:
        index = Index()
        for number in range(count):
            index.stored(Held(OffloadKey(number.to_bytes(36, "big")), 20_480))
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes / count < 230
    assert len(index) == count
