"""The table and the disk's footers say the same, whatever is stored, deleted, evicted and cut short at any moment."""

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.backend import Advice, OffloadKey
from kvtier.policies import LRU
from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.segments.table import FreeSlots, Recalled, SlotEntry, SlotTable

FILE_SLOTS = 8
KEYS = 3  # Few, and hardly fewer slots: they are fought over.


class Disk:
    def __init__(self):
        self.footers = {}

    def newest(self):
        newest = {}
        for footer in self.footers.values():
            if footer is not None:
                newest[footer[0]] = max(newest.get(footer[0], 0), footer[1])
        return newest


class CatalogMachine(RuleBasedStateMachine):
    """A tier's life: what the table is told is done to the disk in steps of its own, and a kill may come between."""

    def __init__(self):
        super().__init__()
        self.disk, self.clock = Disk(), 1_000
        self.stores = []  # Key, slot, sequence number, whether written.
        self.least = {}  # The oldest that may be found: what a store has answered None for.
        self.deleting, self.policy = set(), False
        self.checkpoint = []  # Written at an earlier moment.
        self.in_use = {}  # By the slot that is stored to.
        self.table = self.started()

    def started(self):
        table = SlotTable(LRU(100) if self.policy else None)
        table.add(len(self.disk.footers))
        if self.checkpoint:
            keys, *columns = zip(*self.checkpoint, strict=True)
            slots, sequences, used_at_ns = map(np.array, columns)
            flags = np.ones(len(keys), np.uint8)
            table.recall(Recalled(list(keys), slots, sequences.astype(np.uint64), used_at_ns, flags))
        for slot, footer in self.disk.footers.items():
            table.looked(slot, 1, [] if footer is None else [SlotEntry(footer[0], slot, footer[1], footer[1])])
            if footer is None:
                table.free.add(slot)
        table.scan_ended(complete=True)
        return table

    @initialize(slots=st.integers(2, 5), policy=st.booleans())
    def make(self, slots, policy):
        self.policy = policy
        self.disk.footers = dict.fromkeys(range(slots))
        self.table = self.started()

    @rule(numbers=st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=4))
    def begin_store(self, numbers):
        keys = [key_of(number) for number in numbers]
        in_use = [self.table.in_use([key]) for key in keys]
        for one in in_use:
            one.__enter__()
        slots = self.table.take_free(len(keys))
        slots += self.table.evict(len(keys) - len(slots), keys)
        for one in in_use[len(slots) :]:
            one.__exit__(None, None, None)
        self.in_use.update(zip(slots, in_use, strict=False))
        self.clock += 1
        first = self.table.next_sequences(len(slots), self.clock)
        for key, slot, sequence in zip(keys, slots, range(first, first + len(slots)), strict=False):
            self.stores.append((key, slot, sequence, False))

    @rule(number=st.integers(0, KEYS - 1))
    def store(self, number):
        earlier = len(self.stores)
        self.begin_store([number])
        for key, slot, sequence, _ in self.stores[earlier:]:
            self.disk.footers[slot] = key, sequence
            self.table.stored(key, slot, sequence, sequence)
            self.least[key] = max(self.least.get(key, 0), sequence)
            self.in_use.pop(slot).__exit__(None, None, None)
        del self.stores[earlier:]

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def write(self, data):
        index = data.draw(st.integers(0, len(self.stores) - 1))
        key, slot, sequence, _ = self.stores[index]
        assert self.table.slot(self.key_at(slot)) != slot, "a held slot was given out"
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
            self.table.stored(key, slot, sequence, sequence)
            self.least[key] = max(self.least.get(key, 0), sequence)
        elif written or data.draw(st.booleans()):
            self.table.failed(key, slot)
        else:
            self.table.give_back([slot])
        self.in_use.pop(slot).__exit__(None, None, None)

    @rule(number=st.integers(0, KEYS - 1))
    def use(self, number):
        self.clock += 1
        self.table.index.use([key_of(number)], self.clock)

    @rule(numbers=st.lists(st.integers(0, KEYS - 1), max_size=4))
    def rank(self, numbers):
        self.table.index.advise(Advice("rank", [key_of(number) for number in numbers]), self.clock, 0)

    @rule(number=st.integers(0, KEYS - 1))
    def delete(self, number):
        self.table.remove([key_of(number)])
        self.least.pop(key_of(number), None)
        self.deleting.add(key_of(number))

    @rule(data=st.data())
    def wipe(self, data):
        due = self.table.outdated.take_due()
        failed = data.draw(st.sets(st.sampled_from(due))) if due else set[int]()
        for slot in set(due) - failed:
            self.disk.footers[slot] = None
            self.table.outdated.clear(slot)
            self.table.free.add(slot)
        self.table.outdated.still_due(failed)

    @rule()
    def deletes_return(self):
        """A delete has returned when nothing outdated of its key is left: then the key may not come back."""
        under_way = {key for key, *_ in self.stores}
        for key in list(self.deleting):
            if key not in self.table.outdated:
                self.deleting.discard(key)
                if key not in self.table and key not in under_way:
                    assert key not in self.disk.newest(), "a deleted key would come back"

    @rule()
    def remember(self):
        self.checkpoint = list(self.table.snapshot().entries())

    @rule()
    def kill(self):
        """Whatever was under way is cut short; a start finds footers and nothing else."""
        newest = self.disk.newest()
        of, sequences = self.table.index.of, self.table.sequences
        before = {key: sequences[of[key]] for key in keys_of(KEYS) if key in of}
        for key, sequence in before.items():
            assert newest[key] >= sequence, "an older chunk would come back"
        self.table, self.stores, self.deleting, self.in_use = self.started(), [], set(), {}
        for key in keys_of(KEYS):
            slot = self.table.slot(key)
            assert (None if slot is None else self.table.sequences[slot]) == newest.get(key)
            if key in newest and key in self.least:
                assert newest[key] >= self.least[key], "what was stored later was lost to what was before"

    @invariant()
    def every_slot_is_one_thing(self):
        held = {slot for key in keys_of(KEYS) if (slot := self.table.slot(key)) is not None}
        under_way = {slot for _, slot, _, _ in self.stores}
        due = {slot for slot in self.table.outdated.slots() if slot not in under_way}
        assert not held & under_way
        assert not held & due
        assert self.table.free.count == len(self.disk.footers) - len(held) - len(under_way) - len(due)

    @invariant()
    def what_is_held_is_on_the_disk(self):
        for key in keys_of(KEYS):
            slot = self.table.slot(key)
            if slot is not None:
                assert self.disk.footers[slot] == (key, self.table.sequences[slot])
                assert self.table.sequences[slot] >= self.least.get(key, 0), "an older chunk has replaced a later one"


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


def held(table, count):
    table.free.add(table.add(count), count)
    table.scan_ended(complete=True)
    for key in keys_of(count):
        (slot,) = table.take_free(1)
        table.stored(key, slot, sequence := table.next_sequences(1, 1), sequence)
    return keys_of(count)


def test_what_a_call_is_at_does_not_go():
    table = SlotTable(None)
    keys = held(table, 3)
    with table.in_use([keys[0], keys[0], keys[1]]):
        assert (len(table.evict(3, ())), [key in table for key in keys]) == (1, [True, True, False])
    assert len(table.evict(3, ())) == 2
    table = SlotTable(None)
    first, *_ = keys = held(table, 3)
    table.free.add(table.add(1), 1)
    (slot,) = table.take_free(1)
    table.stored(first, slot, sequence := table.next_sequences(1, 1), sequence)
    with table.in_use([first]):
        assert len(table.evict(3, ())) == 2
    assert [key in table for key in keys] == [True, False, False]


def test_nothing_goes_before_every_footer_was_seen():
    table = SlotTable(None)
    table.add(2)
    table.found(SlotEntry(key_of(0), 0, 5, 5))
    assert table.evict(1, ()) == []
    table.scan_ended(complete=True)
    assert table.evict(1, ()) == [0]


def test_sequence_numbers_rise_whatever_the_clock_does():
    table = SlotTable(None)
    table.add(1)
    table.found(SlotEntry(key_of(0), 0, 10_000, 0))
    first = table.next_sequences(4, 50)
    assert first > 10_000
    assert table.next_sequences(1, 50) == first + 4


def test_slots_that_are_being_wiped_are_unsettled():
    table = SlotTable(None)
    table.add(3)
    table.outdated.retire(1, None)
    table.scan_ended(complete=True)
    for _ in range(2):
        assert (table.outdated.take_due(), table.unsettled()) == ([1], [1])
        assert table.clear_range(0, 3) is None
        table.outdated.still_due([1])
    assert table.outdated.take_due() == [1]
    table.outdated.clear(1)
    assert table.unsettled() == []
    assert table.clear_range(0, 3) == 0


def test_what_a_failed_store_may_have_left_is_waited_for():
    table = SlotTable(None)
    (old,) = held(table, 1)
    (slot,) = table.evict(1, ())
    table.failed(key_of(7), slot)
    assert (set(table.outdated.keys()), table.outdated.take_due()) == ({old, key_of(7)}, [slot])
    table.outdated.clear(slot)
    assert not [*table.outdated.keys(), *table.outdated.slots()]


def test_a_slot_that_another_process_had_is_any_other_slot_once_it_is_taken_over():
    table = SlotTable(None)
    table.add(1)
    table.found(SlotEntry(key_of(0), 0, 1, 0), foreign=True)
    table.take_over(0, 1, [SlotEntry(key_of(1), 0, 2, 0)])
    table.scan_ended(complete=True)
    assert (table.is_foreign(0), table.evict(1, ())) == (False, [0])
