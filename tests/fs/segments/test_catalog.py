"""The catalog and the disk's footers say the same, whatever is stored, deleted, evicted and cut short at any moment."""

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.backend import Advice, OffloadKey
from kvtier.policies import LRU
from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.segments.catalog import Catalog, FreeSlots, Recalled, SlotEntry

FILE_SLOTS = 8
KEYS = 3  # Few, and hardly fewer slots: they are fought over.


class Disk:
    """Footers by slot, as they outlive a process."""

    def __init__(self):
        self.footers = {}

    def newest(self):
        newest = {}
        for footer in self.footers.values():
            if footer is not None:
                newest[footer[0]] = max(newest.get(footer[0], 0), footer[1])
        return newest


class CatalogMachine(RuleBasedStateMachine):
    """A tier's life: what the catalog is told is done to the disk in steps of its own, and a kill may come between."""

    def __init__(self):
        super().__init__()
        self.disk = Disk()
        self.clock = 1_000
        self.stores = []  # Key, slot, sequence number, whether written.
        self.least = {}  # The oldest that may be found: what a store has answered None for.
        self.deleting = set()
        self.policy = False
        self.checkpoint = []  # Written at an earlier moment.
        self.in_use = {}  # By the slot that is stored to.
        self.catalog = self.started()

    def started(self):
        """Recall a checkpoint and read the footers of a disk, as a start does."""
        catalog = Catalog(LRU(100) if self.policy else None)
        catalog.add(len(self.disk.footers))
        if self.checkpoint:
            keys, *columns = zip(*self.checkpoint, strict=True)
            slots, sequences, used_at_ns = map(np.array, columns)
            flags = np.ones(len(keys), np.uint8)
            catalog.recall(Recalled(list(keys), slots, sequences.astype(np.uint64), used_at_ns, flags))
        for slot, footer in self.disk.footers.items():
            catalog.looked(slot, 1, [] if footer is None else [SlotEntry(footer[0], slot, footer[1], footer[1])])
            if footer is None:
                catalog.free.add(slot)
        catalog.scan_ended(complete=True)
        return catalog

    @initialize(slots=st.integers(2, 5), policy=st.booleans())
    def make(self, slots, policy):
        self.policy = policy
        self.disk.footers = dict.fromkeys(range(slots))
        self.catalog = self.started()

    @rule(numbers=st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=4))
    def begin_store(self, numbers):
        keys = [key_of(number) for number in numbers]
        in_use = [self.catalog.in_use([key]) for key in keys]
        for one in in_use:
            one.__enter__()
        slots = self.catalog.take_free(len(keys))
        slots += self.catalog.evict(len(keys) - len(slots), keys)
        for one in in_use[len(slots) :]:
            one.__exit__(None, None, None)
        self.in_use.update(zip(slots, in_use, strict=False))
        self.clock += 1
        first = self.catalog.next_sequences(len(slots), self.clock)
        for key, slot, sequence in zip(keys, slots, range(first, first + len(slots)), strict=False):
            self.stores.append((key, slot, sequence, False))

    @rule(number=st.integers(0, KEYS - 1))
    def store(self, number):
        earlier = len(self.stores)
        self.begin_store([number])
        for key, slot, sequence, _ in self.stores[earlier:]:
            self.disk.footers[slot] = key, sequence
            self.catalog.stored(key, slot, sequence, sequence)
            self.least[key] = max(self.least.get(key, 0), sequence)
            self.in_use.pop(slot).__exit__(None, None, None)
        del self.stores[earlier:]

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def write(self, data):
        index = data.draw(st.integers(0, len(self.stores) - 1))
        key, slot, sequence, _ = self.stores[index]
        assert self.catalog.slot(self.key_at(slot)) != slot, "a held slot was given out"
        self.disk.footers[slot] = key, sequence
        self.stores[index] = key, slot, sequence, True

    def key_at(self, slot):
        footer = self.disk.footers[slot]
        return footer[0] if footer is not None else OffloadKey(b"nobody's")

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def end_store(self, data):
        """It may also fail when everything is written, as where a sync fails or the call is cancelled."""
        key, slot, sequence, written = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        if written and data.draw(st.booleans()):
            self.catalog.stored(key, slot, sequence, sequence)
            self.least[key] = max(self.least.get(key, 0), sequence)
        elif written or data.draw(st.booleans()):
            self.catalog.failed(key, slot)
        else:
            self.catalog.give_back([slot])
        self.in_use.pop(slot).__exit__(None, None, None)

    @rule(number=st.integers(0, KEYS - 1))
    def use(self, number):
        self.clock += 1
        self.catalog.index.use([key_of(number)], self.clock)

    @rule(numbers=st.lists(st.integers(0, KEYS - 1), max_size=4))
    def rank(self, numbers):
        self.catalog.index.advise(Advice("rank", [key_of(number) for number in numbers]), self.clock, 0)

    @rule(number=st.integers(0, KEYS - 1))
    def delete(self, number):
        self.catalog.remove([key_of(number)])
        self.least.pop(key_of(number), None)
        self.deleting.add(key_of(number))

    @rule(data=st.data())
    def wipe(self, data):
        due = self.catalog.outdated.take_due()
        failed = data.draw(st.sets(st.sampled_from(due))) if due else set[int]()
        for slot in set(due) - failed:
            self.disk.footers[slot] = None
            self.catalog.outdated.clear(slot)
            self.catalog.free.add(slot)
        self.catalog.outdated.still_due(failed)

    @rule()
    def deletes_return(self):
        """A delete has returned when nothing outdated of its key is left: then the key may not come back."""
        under_way = {key for key, *_ in self.stores}
        for key in list(self.deleting):
            if key not in self.catalog.outdated:
                self.deleting.discard(key)
                if key not in self.catalog and key not in under_way:
                    assert key not in self.disk.newest(), "a deleted key would come back"

    @rule()
    def remember(self):
        self.checkpoint = list(self.catalog.snapshot().entries())

    @rule()
    def kill(self):
        """Whatever was under way is cut short; a start finds footers and nothing else."""
        newest = self.disk.newest()
        before = {
            key: self.catalog.sequence(slot) for key in keys_of(KEYS) if (slot := self.catalog.slot(key)) is not None
        }
        for key, sequence in before.items():
            assert newest[key] >= sequence, "an older chunk would come back"
        self.catalog, self.stores, self.deleting, self.in_use = self.started(), [], set(), {}
        for key in keys_of(KEYS):
            slot = self.catalog.slot(key)
            assert (None if slot is None else self.catalog.sequence(slot)) == newest.get(key)
            if key in newest and key in self.least:
                assert newest[key] >= self.least[key], "what was stored later was lost to what was before"

    @invariant()
    def every_slot_is_one_thing(self):
        held = {slot for key in keys_of(KEYS) if (slot := self.catalog.slot(key)) is not None}
        under_way = {slot for _, slot, _, _ in self.stores}
        due = {slot for slot in self.catalog.outdated.slots() if slot not in under_way}
        assert not held & under_way
        assert not held & due
        assert self.catalog.free.count == len(self.disk.footers) - len(held) - len(under_way) - len(due)

    @invariant()
    def what_is_held_is_on_the_disk(self):
        for key in keys_of(KEYS):
            slot = self.catalog.slot(key)
            if slot is not None:
                assert self.disk.footers[slot] == (key, self.catalog.sequence(slot))
                assert self.catalog.sequence(slot) >= self.least.get(key, 0), "an older chunk has replaced a later one"


TestCatalog = CatalogMachine.TestCase


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "drop"]), st.integers(0, 39), st.integers(1, 12))))
def test_free_slots_are_a_set_that_is_given_out_in_runs(steps):
    """Five files of eight slots; what belongs to a dropped one is never given out again."""
    free, model, taken, dropped = FreeSlots(), set[int](), set(range(40)), set[int]()
    for step, at, count in steps:
        file = range(at // FILE_SLOTS * FILE_SLOTS, at // FILE_SLOTS * FILE_SLOTS + FILE_SLOTS)
        match step:
            case "add":
                run = list(takewhile(taken.__contains__, range(at, min(at + count, file.stop))))
                if run:
                    free.add(at, len(run))
                taken -= set(run)
                model |= set(run) - dropped
            case "take":
                longest = max((next(n for n in range(1, 42) if slot + n not in model) for slot in model), default=0)
                got = free.take(count)
                assert len(got) == len(set(got)) == min(count, len(model))
                assert set(got) <= model
                assert count > longest or got == list(range(got[0], got[0] + count))
                model -= set(got)
                taken |= set(got)
            case _:
                free.drop(file.start, FILE_SLOTS)
                model -= set(file)
                dropped |= set(file)
        assert free.count == len(model)


def held(catalog, count):
    first = catalog.add(count)
    catalog.free.add(first, count)
    catalog.scan_ended(complete=True)
    for key in keys_of(count):
        (slot,) = catalog.take_free(1)
        catalog.stored(key, slot, sequence := catalog.next_sequences(1, 1), sequence)
    return keys_of(count)


def test_what_a_call_is_at_does_not_go():
    catalog = Catalog(None)
    keys = held(catalog, 3)
    with catalog.in_use([keys[0], keys[0], keys[1]]):
        assert len(catalog.evict(3, ())) == 1
        assert [key in catalog for key in keys] == [True, True, False]
    assert len(catalog.evict(3, ())) == 2
    catalog = Catalog(None)
    first, *_ = keys = held(catalog, 3)
    catalog.free.add(catalog.add(1), 1)
    (slot,) = catalog.take_free(1)
    catalog.stored(first, slot, sequence := catalog.next_sequences(1, 1), sequence)
    with catalog.in_use([first]):
        assert len(catalog.evict(3, ())) == 2
    assert [key in catalog for key in keys] == [True, False, False]


def test_nothing_goes_before_every_footer_was_seen():
    catalog = Catalog(None)
    catalog.add(2)
    catalog.found(SlotEntry(key_of(0), 0, 5, 5))
    assert catalog.evict(1, ()) == []
    catalog.scan_ended(complete=True)
    assert catalog.evict(1, ()) == [0]


def test_sequence_numbers_rise_whatever_the_clock_does():
    catalog = Catalog(None)
    catalog.add(1)
    catalog.found(SlotEntry(key_of(0), 0, 10_000, 0))
    first = catalog.next_sequences(4, 50)
    assert first > 10_000
    assert catalog.next_sequences(1, 50) == first + 4


def test_slots_that_are_being_wiped_are_unsettled():
    catalog = Catalog(None)
    catalog.add(3)
    catalog.outdated.retire(1, None)
    catalog.scan_ended(complete=True)
    for _ in range(2):
        assert catalog.outdated.take_due() == [1]
        assert catalog.unsettled() == [1]
        assert catalog.clear_range(0, 3) is None
        catalog.outdated.still_due([1])
    assert catalog.outdated.take_due() == [1]
    catalog.outdated.clear(1)
    assert catalog.unsettled() == []
    assert catalog.clear_range(0, 3) == 0


def test_what_a_failed_store_may_have_left_is_waited_for():
    catalog = Catalog(None)
    (old,) = held(catalog, 1)
    (slot,) = catalog.evict(1, ())
    catalog.failed(key_of(7), slot)
    assert set(catalog.outdated.keys()) == {old, key_of(7)}
    assert catalog.outdated.take_due() == [slot]
    catalog.outdated.clear(slot)
    assert not [*catalog.outdated.keys(), *catalog.outdated.slots()]
