"""The index errs on the side of "there", forgets nothing it must tell, and stays small."""

import random
import tracemalloc

import pytest

from kvtier.backend import Advice
from kvtier.backend.contract import INVENTORY_BATCH_KEYS, Added, InventoryEvent, Removed, ScanDone
from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.policies import LRU
from kvtier_backends.fs.files.index import Held, Index
from kvtier_backends.fs.files.recency import ColdEnd

A, B, C, D = (make_offload_key(name * 32) for name in (b"a", b"b", b"c", b"d"))

NOW_NS = 1_700_000_000_000_000_000


@pytest.fixture
def index() -> Index:
    return Index()


def events(index: Index) -> list[InventoryEvent]:
    told: list[InventoryEvent] = []
    while (event := index.inventory.next_event()) is not None:
        told.append(event)
    return told


def scanned(index: Index) -> Index:
    index.inventory.begin()
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
    index.removed(A)
    index.removed(C)
    assert [chunk.key for chunk in index.snapshot().newest_first(NOW_NS)][::-1] == [B]
    assert index.used_bytes == 4_096


def test_keys_stand_in_the_order_of_their_last_use(index: Index) -> None:
    for key in (A, B, C):
        index.stored(Held(key, 512))
    index.used(A)
    index.stored(Held(B, 512))
    index.used(make_offload_key(b"unknown"))
    assert [chunk.key for chunk in index.snapshot().newest_first(NOW_NS)][::-1] == [C, A, B]


def test_what_the_scan_finds_is_older_than_what_was_used_since_the_start(index: Index) -> None:
    index.stored(Held(A, 512))
    index.found(Held(B, 512))
    index.scanned([Held(B, 512), Held(C, 512, 2), Held(D, 512, 1)])
    assert [chunk.key for chunk in index.snapshot().newest_first(NOW_NS)][::-1] == [D, C, A, B]


def test_a_removal_does_not_reach_what_was_stored_after_it_began(index: Index) -> None:
    index.stored(Held(A, 512))
    index.stored(Held(B, 512))
    with index.call([A, B]) as early, index.call([A]) as other:
        index.stored(Held(A, 512))
        with index.call([A, C]) as late:
            assert (early, other, late) == ({B}, set(), {A, C})
            index.stored(Held(C, 512))
        assert (early, late) == ({B}, {A})
    index.stored(Held(B, 512))
    assert early == {B}  # It is over.


def test_the_scan_does_not_bring_back_what_was_removed_beside_it(index: Index) -> None:
    index.removed(A)
    index.removed(B)
    index.stored(Held(B, 512))
    index.scanned([Held(A, 512), Held(B, 512), Held(C, 512)])
    index.scan_ended(complete=True)
    assert (A in index, B in index, C in index) == (False, True, True)


def test_only_a_complete_scan_makes_it_the_authority(index: Index) -> None:
    assert not index.authoritative
    index.scan_ended(complete=False)
    assert not index.authoritative
    index.inventory.begin()
    assert events(index) == [ScanDone(complete=False)]
    index.scan_ended(complete=True)
    assert index.authoritative


def test_a_report_begins_with_what_is_there(index: Index) -> None:
    index.stored(Held(A, 512))
    index.scanned([Held(B, 512)])
    index.inventory.begin()
    index.scanned([Held(B, 512), Held(C, 512)])
    index.scan_ended(complete=True)
    assert events(index) == [Added([A, B, C]), ScanDone(complete=True)]


def test_a_later_consumer_hears_everything_again(index: Index) -> None:
    first = scanned(index).inventory.begin()
    index.stored(Held(A, 512))
    index.inventory.begin()
    index.inventory.end(first)  # The one that has gone is not the one that listens.
    index.found(Held(B, 512))
    assert events(index) == [Added([A, B]), ScanDone(complete=True)]


def test_only_what_no_call_explains_is_reported(index: Index) -> None:
    scanned(index)
    index.stored(Held(A, 512))
    index.stored(Held(B, 512))
    index.removed(A)
    assert events(index) == []
    index.lost(A)  # Nobody thinks that it is there.
    index.lost(B)
    index.found(Held(C, 512))
    assert events(index) == [Added([C]), Removed([B])]


def test_an_event_is_true_when_it_is_told(index: Index) -> None:
    scanned(index)
    for key in (A, B):
        index.found(Held(key, 512))
    index.lost(A)
    index.lost(B)
    index.stored(Held(B, 512))
    assert events(index) == [Added([B]), Removed([A])]


def test_batches_have_a_limit(index: Index) -> None:
    keys = [make_offload_key(number.to_bytes(32, "big")) for number in range(2 * INVENTORY_BATCH_KEYS + 1)]
    index.inventory.begin()
    index.scanned([Held(key, 512) for key in keys])
    index.scan_ended(complete=True)
    batches = [list(event.keys) for event in events(index) if isinstance(event, Added)]
    assert [len(batch) for batch in batches] == [INVENTORY_BATCH_KEYS, INVENTORY_BATCH_KEYS, 1]
    assert [key for batch in batches for key in batch] == keys
    for key in keys:
        index.lost(key)
    for key in keys[1:]:
        index.stored(Held(key, 512))
    assert events(index) == [Removed([keys[0]])]  # Whole batches may have become untrue.


def test_nobody_listening_costs_nothing(index: Index) -> None:
    consumer = index.inventory.begin()
    index.inventory.end(consumer)
    index.found(Held(A, 512))
    index.lost(A)
    assert [type(event) for event in events(index)] == []


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("naming", ["stored", "scanned"])
def test_a_chunk_takes_two_hundred_bytes_at_most(naming: str) -> None:
    """Key and order included, however full the dictionary happens to be."""
    count, now_ns = 100_000, 1_700_000_000_000_000_000
    tracemalloc.start()
    try:
        index = Index()
        for start in range(0, count, 1_000):
            chunks = [
                Held(OffloadKey(number.to_bytes(36, "big")), 20_480, now_ns + number * 1_000_000)
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
    ours, theirs = Index(), Index(LRU(1 << 20))
    for _ in range(20_000):
        number, what = dice.randrange(3_000), dice.random()
        key = key_of(number)
        for index in (ours, theirs):
            if what < 0.5:
                index.stored(Held(key, 512))
            elif what < 0.8:
                index.used(key)
            elif what < 0.85:
                index.removed(key)
            elif what < 0.9:
                index.advise(Advice("rank", [key_of(number + place) for place in range(5)]), 0)
        if what >= 0.9:
            count = dice.randrange(1, 4)
            assert ours.victims(count, nothing, 0) == theirs.victims(count, nothing, 0)
    left = [[chunk.key for chunk in index.snapshot().newest_first(NOW_NS)] for index in (ours, theirs)]
    assert len(left[0]) > 500
    assert left[0] == left[1]


def nothing(key: OffloadKey) -> bool:
    return False


def test_without_a_policy_what_is_kept_at_the_cold_end_is_renewed() -> None:
    index = Index()
    for number in range(6):
        index.stored(Held(key_of(number), 512))
    assert index.victims(3, lambda key: True, 6) == []
    assert [victim.key for victim in index.victims(2, {key_of(0), key_of(1)}.__contains__, 2)] == [key_of(2), key_of(3)]
    assert [victim.key for victim in index.victims(9, nothing, 0)] == [key_of(number) for number in (4, 5, 0, 1)]


def test_without_a_policy_a_search_for_the_coldest_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each steps over what was moved, and there may be millions of holes."""
    index, searches = Index(), list[None]()
    search = ColdEnd._search
    monkeypatch.setattr(ColdEnd, "_search", lambda self, passed: searches.append(None) or search(self, passed))
    for number in range(100_000):
        index.stored(Held(key_of(number), 512))
    for number in range(100_000, 110_000):
        index.stored(Held(key_of(number), 512))
        assert [victim.key for victim in index.victims(1, nothing, 0)] == [key_of(number - 100_000)]
    assert 1 <= len(searches) <= 8


def test_what_was_there_before_goes_by_its_last_use_whatever_batch_it_came_in() -> None:
    dice = random.Random(7)
    index = Index()
    uses = [(dice.randrange(10_000), key_of(number)) for number in range(2_000)]
    for start in range(0, len(uses), 300):
        index.scanned([Held(key, 512, time_ns) for time_ns, key in uses[start : start + 300]])
    snapshot = index.snapshot()
    chosen = [victim.key for _ in range(200) for victim in index.victims(10, lambda key: False, 0)]
    assert chosen == [key for _, key in sorted(uses)]
    times = [chunk.used_at_ns for chunk in snapshot.newest_first(NOW_NS)]  # As it was before.
    assert times == sorted((time_ns for time_ns, _ in uses), reverse=True)
