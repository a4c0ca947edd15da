"""Tiers that each break a promise: the conformance suite must reject them.

This is a catalogue: each class differs from an honest tier in a few lines, and names the promises that those break.
`test_conformance_rejects.py` runs these promises, and no others, against it.
"""

import asyncio
import ctypes
import os
import threading
import time
from contextlib import suppress
from itertools import count
from typing import ClassVar

import pytest
from msgspec.structs import replace

from kvtier.backend import (
    Abandoned,
    Added,
    Advised,
    Durability,
    Inventory,
    Measured,
    Read,
    Removed,
    ScanDone,
    Wrapper,
    Write,
)
from kvtier.errors import BackendClosed, BackendUnavailable, ChunkMissing, NoSpace
from kvtier.settings.hints import Advice, Hint
from kvtier.testing.conformance import (
    AdvisedConformance,
    BackendConformance,
    BoundedConformance,
    CountedConformance,
    DescribedConformance,
    DurableBackendConformance,
    InventoryConformance,
    Lender,
    MeasuredConformance,
    NamespacedConformance,
    WrapperConformance,
    keys_of,
    tier_context,
)
from kvtier_backends.dummy import DummyBackend, DummyOptions, forget_store


class Tier(DummyBackend):
    """Honest: breaks nothing."""

    breaks: ClassVar[tuple[str, ...]] = ()
    real_time: ClassVar[bool] = False
    opened_before = 0  # How many tiers were open over the same storage before this one.

    def __init_subclass__(cls, breaks=()):
        super().__init_subclass__()
        cls.breaks = (breaks,) if isinstance(breaks, str) else breaks

    def __init__(self, options, context):
        super().__init__(options, context)
        self.context = context
        self.missed = 0

    async def load(self, reads):
        outcomes = await super().load(reads)
        self.missed += len(outcomes) - outcomes.count(None)
        return outcomes

    def counts(self):
        return {"missed": self.missed}

    def description(self):
        return {"store": "suite", "row": f"{self.context.row_bytes:,} bytes"}

    @staticmethod
    def wrap(inner):
        return Around(inner)


class Around(Wrapper):
    """A wrapper that changes nothing."""

    options_type = DummyOptions

    @classmethod
    async def open(cls, options, context):
        return cls(DummyBackend(options, context))


# What goes in comes out.


class Forgets(Tier, breaks="test_what_was_stored_is_loaded_bit_for_bit"):
    async def store(self, writes):
        return [None] * len(writes)


class FlipsABit(Tier, breaks="test_what_was_stored_is_loaded_bit_for_bit"):
    async def load(self, reads):
        outcomes = await super().load(reads)
        for _, into in reads:
            into[-1] ^= 1
        return outcomes


class UsesUp(Tier, breaks="test_what_was_loaded_can_be_loaded_again"):
    async def load(self, reads):
        outcomes = await super().load(reads)
        await super().delete([read.key for read in reads])
        return outcomes


class MakesUp(Tier, breaks="test_what_was_never_stored_is_missing"):
    async def load(self, reads):
        await super().load(reads)
        return [None] * len(reads)


class Guesses(Tier, breaks="test_a_probe_says_what_a_load_would_find"):
    async def probe(self, keys):
        return [True] * len(keys)


class KeepsTheFirst(Tier, breaks="test_the_last_store_of_a_key_counts"):
    async def store(self, writes):
        present = await self.probe([write.key for write in writes])
        await super().store([write for write, there in zip(writes, present, strict=True) if not there])
        return [None] * len(writes)


class Renames(Tier):
    """Base of tiers that take several keys for one."""

    def name(self, key):
        return key

    async def probe(self, keys):
        return await super().probe([self.name(key) for key in keys])

    async def load(self, reads):
        return await super().load([Read(self.name(read.key), read.into) for read in reads])

    async def store(self, writes):
        return await super().store([Write(self.name(write.key), write.row) for write in writes])

    async def delete(self, keys):
        await super().delete([self.name(key) for key in keys])


class NamesByText(Renames, breaks="test_an_odd_key_is_a_key_like_any_other"):
    def name(self, key):
        return key.decode("ascii").encode()


class FoldsCase(Renames, breaks="test_keys_that_look_alike_are_different_chunks"):
    def name(self, key):
        return key.lower()


class NamesByTheFirstHalf(Renames, breaks="test_keys_that_look_alike_are_different_chunks"):
    def name(self, key):
        return key[:16] + key[-4:]


class IgnoresGroups(
    Renames, breaks=("test_keys_that_look_alike_are_different_chunks", "test_deleting_takes_nothing_else")
):
    def name(self, key):
        return key[:-4] + bytes(4)


class SkipsZeros(Tier, breaks="test_any_bytes_come_back"):
    async def store(self, writes):
        await super().store([write for write in writes if any(write.row)])
        return [None] * len(writes)


class SaysNothing(Tier, breaks="test_a_tier_says_what_it_promises_and_takes"):
    durability = "safe"


# Batches.


class RefusesEmptyBatches(Tier, breaks="test_an_empty_batch_is_answered_with_nothing"):
    async def load(self, reads):
        if not reads:
            raise ValueError("nothing to load")
        return await super().load(reads)


class AnswersOutOfOrder(Tier, breaks="test_outcomes_come_in_the_order_of_the_batch"):
    async def load(self, reads):
        return sorted(await super().load(reads), key=lambda outcome: outcome is not None)


class RaisesForOne(Tier, breaks="test_a_missing_chunk_costs_its_neighbours_nothing"):
    async def load(self, reads):
        outcomes = await super().load(reads)
        for outcome in filter(None, outcomes):
            raise outcome
        return outcomes


class ForgetsDuplicates(
    Tier,
    breaks=(
        "test_a_key_twice_in_a_load_fills_both_buffers",
        "test_a_key_twice_in_a_store_leaves_one_whole_chunk",
        "test_a_key_twice_in_a_probe_or_a_delete_is_nothing_special",
    ),
):
    async def probe(self, keys):
        return await super().probe(list(dict.fromkeys(keys)))

    async def load(self, reads):
        return await super().load(list({read.key: read for read in reads}.values()))

    async def store(self, writes):
        return await super().store(list({write.key: write for write in writes}.values()))


class FillsOneOfTwo(Tier, breaks="test_a_key_twice_in_a_load_fills_both_buffers"):
    async def load(self, reads):
        outcomes = await super().load(list({read.key: read for read in reads}.values()))
        by_key = dict(zip(dict.fromkeys(read.key for read in reads), outcomes, strict=True))
        return [by_key[read.key] for read in reads]


class TakesTheFirstOfMany(Tier, breaks="test_a_large_batch_moves_as_a_small_one_does"):
    async def store(self, writes):
        return await super().store(writes[:256]) + [None] * len(writes[256:])


class TakesAnyLength(
    Tier,
    breaks=(
        "test_a_load_into_a_buffer_of_the_wrong_length_is_refused",
        "test_a_store_from_a_buffer_of_the_wrong_length_is_refused",
    ),
):
    def row(self, block=b""):
        return memoryview(bytearray(bytes(block).ljust(self.context.row_bytes, b"\0")[: self.context.row_bytes]))

    async def load(self, reads):
        rows = [self.row() for _ in reads]
        outcomes = await super().load([Read(read.key, row) for read, row in zip(reads, rows, strict=True)])
        for read, row in zip(reads, rows, strict=True):
            read.into[: len(row)] = row[: len(read.into)]
        return outcomes

    async def store(self, writes):
        return await super().store([Write(write.key, self.row(write.row)) for write in writes])


class RefusesTheBatchForAKey(Tier, breaks="test_a_key_that_a_tier_cannot_hold_costs_its_neighbours_nothing"):
    async def store(self, writes):
        if any(len(write.key) > 255 for write in writes):
            raise BackendUnavailable("a key is too long")
        return await super().store(writes)


class SaysItTookAnyKey(Tier, breaks="test_a_key_that_a_tier_cannot_hold_costs_its_neighbours_nothing"):
    async def store(self, writes):
        fit = [write for write in writes if 4 <= len(write.key) <= 255]
        await super().store(fit)
        return [None] * len(writes)


class RefusesTheBatchForALength(
    Tier,
    breaks=(
        "test_a_load_into_a_buffer_of_the_wrong_length_is_refused",
        "test_a_store_from_a_buffer_of_the_wrong_length_is_refused",
    ),
):
    def check(self, buffers):
        if any(len(buffer) != self.context.row_bytes for buffer in buffers):
            raise ValueError("a buffer of the wrong length")

    async def load(self, reads):
        self.check(read.into for read in reads)
        return await super().load(reads)

    async def store(self, writes):
        self.check(write.row for write in writes)
        return await super().store(writes)


class WantsLists(Tier, breaks="test_a_batch_is_any_sequence"):
    async def load(self, reads):
        return await super().load([*reads[:1]] + reads[1:])  # noqa: RUF005


# Deleting.


class DeletesNothing(Tier, breaks="test_a_deleted_key_is_missing_and_can_be_stored_again"):
    async def delete(self, keys):
        pass


class DeletesTheWholeHash(Tier, breaks="test_deleting_takes_nothing_else"):
    async def delete(self, keys):
        await super().delete([key[:-1] + bytes([group]) for key in keys for group in range(4)])


class RefusesUnknownKeys(Tier, breaks="test_unknown_keys_are_ignored"):
    async def delete(self, keys):
        if not all(await self.probe(keys)):
            raise KeyError(keys)
        await super().delete(keys)


class RemembersTheDead(Tier, breaks="test_a_deleted_key_is_missing_and_can_be_stored_again"):
    dead = frozenset()

    async def delete(self, keys):
        self.dead |= set(keys)
        await super().delete(keys)

    async def store(self, writes):
        await super().store([write for write in writes if write.key not in self.dead])
        return [None] * len(writes)


# Concurrency.


class TakesOneCallAtATime(Tier, breaks="test_stores_at_once_all_arrive"):
    busy = False

    async def store(self, writes):
        if self.busy:
            raise BackendUnavailable("busy")
        self.busy = True
        try:
            return await super().store(writes)
        finally:
            self.busy = False


class InPlace(Tier):
    """Base of tiers that change what they hold where it lies, in steps."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self.shelf = {}
        self.turns = count()

    async def probe(self, keys):
        return [key in self.shelf for key in keys]

    async def load(self, reads):
        await asyncio.sleep(0.0005)
        return [self.load_one(*read) for read in reads]

    def load_one(self, key, into):
        if key not in self.shelf:
            return ChunkMissing(key.hex())
        into[:] = self.shelf[key]
        return None

    async def store(self, writes):
        half = self.context.row_bytes // 2
        for key, block in writes:
            self.shelf.setdefault(key, bytearray(block))[:half] = block[:half]
        await asyncio.sleep(0.001 * (3 - next(self.turns) % 3))
        for key, block in writes:
            self.shelf.setdefault(key, bytearray(block))[half:] = block[half:]
        return [None] * len(writes)

    async def delete(self, keys):
        for key in keys:
            self.shelf.pop(key, None)


class TearsChunks(
    InPlace,
    breaks=(
        "test_of_stores_of_one_key_at_once_one_whole_chunk_wins",
        "test_a_load_beside_a_store_is_old_or_new_or_missing",
        "test_in_a_throng_every_chunk_is_whole",
    ),
):
    pass


class DeletesInPieces(InPlace, breaks="test_a_load_beside_a_delete_is_whole_or_missing"):
    async def delete(self, keys):
        for key in keys:
            self.shelf.get(key, bytearray(1))[:1] = b"\0"
        await asyncio.sleep(0.002)
        await super().delete(keys)


class LoadsAKeyOnce(Tier, breaks="test_one_chunk_goes_into_many_buffers_at_once"):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.loading = set()

    async def load(self, reads):
        if self.loading.issuperset(read.key for read in reads):
            return [None] * len(reads)
        self.loading |= {read.key for read in reads}
        outcomes = await super().load(reads)
        self.loading.clear()
        return outcomes


class SharesOneBuffer(Tier, breaks="test_in_a_throng_every_chunk_is_whole"):
    async def load(self, reads):
        self.scratch = memoryview(bytearray(self.context.row_bytes))
        outcomes = []
        for key, into in reads:
            outcomes += await super().load([Read(key, self.scratch)])
            await asyncio.sleep(0.001)
            into[:] = self.scratch
        return outcomes


# Cancellation.


class AbandonsThreads(
    InPlace,
    breaks=(
        "test_a_cancelled_load_leaves_its_buffers_alone",
        "test_a_cancelled_store_leaves_its_buffers_alone",
        "test_a_call_cancelled_again_and_again_still_waits",
        "test_in_a_throng_of_cancelled_calls_every_chunk_is_whole",
    ),
):
    """The mistake that `kvtier.backend.lending` mends: a cancelled call returns while its thread goes on."""

    real_time = True

    async def load(self, reads):
        return await self.in_thread(self.load_one, reads)

    async def store(self, writes):
        return await self.in_thread(self.store_one, writes)

    def store_one(self, key, block):
        self.shelf[key] = bytearray(block)

    async def in_thread(self, move, chunks):
        """Do what `asyncio.to_thread` does: whoever cancels goes on, and so does the thread, on a busy machine, too."""
        loop, outcomes, owner_went_on = asyncio.get_running_loop(), [], threading.Event()
        ended = loop.create_future()

        def work():
            owner_went_on.wait(0.05)  # So long a call takes that nobody cancels.
            outcomes.extend(move(*chunk) for chunk in chunks)
            with suppress(RuntimeError):  # The loop was closed meanwhile.
                loop.call_soon_threadsafe(lambda: ended.cancelled() or ended.set_result(outcomes))

        threading.Thread(target=work, daemon=True).start()
        try:
            return await ended
        except asyncio.CancelledError:
            loop.call_later(0.002, owner_went_on.set)  # By then the buffers are in use for something else.
            raise


class AwaitsItsClient(InPlace, breaks=AbandonsThreads.breaks):
    """The mistake that `in_task` mends: a client's coroutine is cancelled, and its transport goes on with rows."""

    async def load(self, reads):
        return await self.by_transport(self.load_one, reads)

    async def store(self, writes):
        return await self.by_transport(self.store_one, writes)

    def store_one(self, key, row):
        self.shelf[key] = bytearray(row)

    async def by_transport(self, move, chunks):
        """Do what clients do: the loop moves the bytes, and whoever waits for them may go away."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def arrived():
            outcomes = [move(*chunk) for chunk in chunks]
            if not ended.cancelled():
                ended.set_result(outcomes)

        loop.call_later(0.005, arrived)
        return await ended


class WaitsOnce(Tier, breaks="test_a_call_cancelled_again_and_again_still_waits"):
    async def load(self, reads):
        call = asyncio.ensure_future(super().load(reads))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.shield(call)
            raise


class SwallowsCancellation(
    Tier, breaks=("test_a_cancelled_load_leaves_its_buffers_alone", "test_a_cancelled_store_leaves_its_buffers_alone")
):
    async def load(self, reads):
        try:
            return await super().load(reads)
        except asyncio.CancelledError:
            return [ChunkMissing("cancelled")] * len(reads)

    async def store(self, writes):
        try:
            return await super().store(writes)
        except asyncio.CancelledError:
            return [NoSpace("cancelled")] * len(writes)


class LeavesItsLock(
    Tier,
    breaks=("test_a_cancelled_delete_has_deleted_each_key_or_not", "test_a_cancelled_probe_leaves_a_tier_that_works"),
):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.lock = asyncio.Lock()

    async def probe(self, keys):
        await self.lock.acquire()
        present = await super().probe(keys)
        self.lock.release()
        return present

    async def delete(self, keys):
        await self.lock.acquire()
        await super().delete(keys)
        self.lock.release()

    async def load(self, reads):
        async with self.lock:
            return await super().load(reads)


class JoinsCalls(Tier, breaks="test_a_cancelled_call_costs_the_others_nothing"):
    """Two loads at once become one, and whoever cancels one cancels both."""

    joined = None

    async def load(self, reads):
        if self.joined is None or self.joined[0].done():
            self.joined = asyncio.ensure_future(super().load(reads)), reads
        call, first = self.joined
        outcomes = await call
        for read, other in zip(reads, first, strict=True):
            read.into[:] = other.into
        return outcomes


class NeverForgetsACall(Tier, breaks="test_a_tier_ends_as_usual_after_cancelled_calls"):
    under_way = 0

    async def store(self, writes):
        self.under_way += 1
        outcomes = await super().store(writes)
        self.under_way -= 1
        return outcomes

    async def aclose(self, deadline_s):
        await super().aclose(deadline_s)
        return Abandoned(self.under_way)


# Good manners.


class SleepsOnTheLoop(Tier, breaks="test_no_call_blocks_the_loop"):
    async def probe(self, keys):
        time.sleep(0.001)  # noqa: ASYNC251
        return await super().probe(keys)


class WritesOnTheLoop(Tier, breaks="test_no_call_blocks_the_loop"):
    async def store(self, writes):
        null = os.open(os.devnull, os.O_WRONLY)
        os.pwritev(null, [write.row for write in writes], 0)
        os.close(null)
        return await super().store(writes)


class Scribbles(Tier, breaks="test_a_store_changes_nothing_in_the_buffers"):
    async def store(self, writes):
        outcomes = await super().store(writes)
        for _, block in writes:
            block[0] ^= 0xFF
        return outcomes


class KeepsTheLendersBuffer(InPlace, breaks=("test_what_is_stored_is_a_copy", "test_no_buffer_is_kept")):
    async def store(self, writes):
        self.shelf.update(writes)
        return [None] * len(writes)


class KeepsTheBorrowersBuffer(Tier, breaks=("test_what_is_loaded_is_a_copy", "test_no_buffer_is_kept")):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.recent = {}

    async def load(self, reads):
        if self.recent.keys() >= {read.key for read in reads}:
            for key, into in reads:
                into[:] = self.recent[key]
            return [None] * len(reads)
        outcomes = await super().load(reads)
        self.recent.update(reads)
        return outcomes


class WritesBesideTheRow(Tier, breaks="test_nothing_beside_the_lent_rows_is_written"):
    async def load(self, reads):
        outcomes = await super().load(reads)
        for _, into in reads:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(into)) + len(into), 0, 1)
        return outcomes


class RemembersItsLastCall(Tier, breaks="test_no_buffer_is_kept"):
    async def store(self, writes):
        self.last = writes
        return await super().store(writes)


# The end.


class NeverCloses(Tier, breaks="test_a_closed_tier_refuses_every_call"):
    async def aclose(self, deadline_s):
        return Abandoned(0)


class ClosesOnce(Tier, breaks="test_closing_again_is_no_error"):
    closed = False

    async def aclose(self, deadline_s):
        if self.closed:
            raise BackendClosed("closed already")
        self.closed = True
        return await super().aclose(deadline_s)


class CancelsWhatIsUnderWay(Tier, breaks="test_what_is_under_way_is_waited_for"):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.under_way = set()

    async def store(self, writes):
        self.under_way.add(asyncio.current_task())
        return await super().store(writes)

    async def aclose(self, deadline_s):
        for task in self.under_way:
            task.cancel()
        return await super().aclose(deadline_s)


class ClosesAfterWaiting(
    Tier, breaks=("test_new_calls_are_refused_while_closing_waits", "test_a_cancelled_close_can_be_called_again")
):
    under_way = 0

    async def store(self, writes):
        self.under_way += 1
        try:
            return await super().store(writes)
        finally:
            self.under_way -= 1

    async def aclose(self, deadline_s):
        while self.under_way:
            await asyncio.sleep(0.001)
        return await super().aclose(deadline_s)


class HidesWhatItLeaves(Tier, breaks="test_closing_without_patience_says_what_it_leaves"):
    async def aclose(self, deadline_s):
        await super().aclose(deadline_s)
        return Abandoned(0)


# Durability.


class Volatile(Tier, breaks="test_chunks_outlive_the_tier"):
    async def aclose(self, deadline_s):
        forget_store("suite")
        return await super().aclose(deadline_s)


class ReadsNamesBackWrongly(Renames, breaks="test_chunks_outlive_the_tier"):
    def name(self, key):
        return key if not self.opened_before else key.lower()


class ReplaysTheFirstStore(Tier, breaks="test_the_last_store_is_the_one_that_lasts"):
    async def store(self, writes):
        present = await self.probe([b"first" + write.key for write in writes])
        firsts = [
            Write(b"first" + key, block) for (key, block), there in zip(writes, present, strict=True) if not there
        ]
        await super().store(firsts)
        return await super().store(writes)

    async def load(self, reads):
        return await super().load([Read(b"first" + key if self.opened_before else key, into) for key, into in reads])


class BringsBackTheDead(Tier, breaks="test_what_was_deleted_stays_deleted"):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.hidden = set()

    async def delete(self, keys):
        self.hidden |= set(keys)

    async def load(self, reads):
        outcomes = await super().load(reads)
        return [ChunkMissing("") if key in self.hidden else out for (key, _), out in zip(reads, outcomes, strict=True)]


class StoresInTwoSteps(Tier, breaks="test_a_store_cut_short_leaves_whole_chunks"):
    async def store(self, writes):
        halves = [bytearray(write.row) for write in writes]
        for half in halves:
            half[len(half) // 2 :] = bytes(len(half) // 2)
        await super().store([Write(write.key, memoryview(half)) for write, half in zip(writes, halves, strict=True)])
        return await super().store(writes)


# Namespaces.


class IgnoresNamespaces(Tier, breaks=("test_namespaces_share_no_chunk", "test_deleting_stays_in_its_namespace")):
    def __init__(self, options, context):
        same = tier_context(context.row_bytes).mapper
        super().__init__(replace(options, shared=True), context._replace(mapper=same))


# Inventory.


class ReportsTheDead(Tier, breaks="test_what_is_there_is_reported_before_the_scan_is_done"):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.dead = []

    async def delete(self, keys):
        self.dead += keys
        await super().delete(keys)

    async def watch(self):
        yield Added(self.dead)
        async for event in super().watch():
            yield event


class ReportsNothing(Tier, breaks="test_what_is_there_is_reported_before_the_scan_is_done"):
    async def watch(self):
        async for event in super().watch():
            if not isinstance(event, Added):
                yield event


class SaysNothingWhenEmpty(Tier, breaks="test_what_is_there_is_reported_before_the_scan_is_done"):
    async def watch(self):
        before = None
        async for event in super().watch():
            if not isinstance(event, ScanDone) or before is not None:
                yield event
            before = event


class ReportsAllAtOnce(Tier, breaks="test_reports_come_in_batches"):
    async def watch(self):
        keys = []
        async for event in super().watch():
            if isinstance(event, Added):
                keys += event.keys
                continue
            if isinstance(event, ScanDone):
                yield Added(keys)
            yield event


class ReportsForEver(Tier, breaks="test_the_report_ends_with_the_tier"):
    async def watch(self):
        async for event in super().watch():
            yield event
        await asyncio.Event().wait()


class ReportsWhatItWasTold(Tier, breaks="test_what_is_there_is_not_reported_as_removed"):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.deleted = asyncio.Queue()

    async def delete(self, keys):
        await super().delete(keys)
        self.deleted.put_nowait(keys)

    async def watch(self):
        async for event in super().watch():
            yield event
            if isinstance(event, ScanDone):
                break
        while True:
            keys = await self.deleted.get()
            await asyncio.sleep(0.005)
            yield Removed(keys)


class DiesWithItsListener(Tier, breaks="test_a_consumer_may_go_away"):
    async def watch(self):
        try:
            async for event in super().watch():
                yield event
        finally:
            await self.aclose(0)


# Occupancy.


class StartsFull(Tier, breaks="test_every_chunk_is_counted_once"):
    def occupancy(self):
        return super().occupancy()._replace(used_bytes=4_096)


class CountsStores(Tier, breaks="test_every_chunk_is_counted_once"):
    stored = 0

    async def store(self, writes):
        self.stored += len(writes)
        return await super().store(writes)

    def occupancy(self):
        return super().occupancy()._replace(chunks=self.stored)


class NeverShrinks(Tier, breaks="test_what_was_deleted_uses_nothing"):
    most = 0

    def occupancy(self):
        now = super().occupancy()
        self.most = max(self.most, now.used_bytes)
        return now._replace(used_bytes=self.most)


class CountsMisses(Tier, breaks="test_loading_and_probing_change_nothing"):
    def occupancy(self):
        now = super().occupancy()
        return now._replace(chunks=now.chunks + self.missed)


# Capacity.


class Overflows(Tier, breaks="test_the_capacity_is_never_exceeded"):
    def __init__(self, options, context):
        super().__init__(replace(options, capacity_bytes=None), context)
        self.capacity_bytes = options.capacity_bytes

    def occupancy(self):
        return super().occupancy()._replace(capacity_bytes=self.capacity_bytes)


class RefusesWhenFull(Tier, breaks="test_the_newest_chunks_are_there"):
    async def store(self, writes):
        now = self.occupancy()
        if now.used_bytes == now.capacity_bytes:
            return [NoSpace("full")] * len(writes)
        return await super().store(writes)


class FailsTheBatchForOne(Tier, breaks="test_a_batch_that_does_not_fit_is_stored_in_part"):
    async def store(self, writes):
        outcomes = await super().store(writes)
        for outcome in filter(None, outcomes):
            raise outcome
        return outcomes


class LeaksRoom(Tier, breaks="test_deleting_makes_room"):
    def occupancy(self):
        now = super().occupancy()
        return now._replace(used_bytes=now.used_bytes + 64) if self.leaked else now

    leaked = False

    async def delete(self, keys):
        self.leaked = True
        await super().delete(keys)


class TakesASecondPlace(Tier, breaks="test_storing_again_takes_no_second_place"):
    async def store(self, writes):
        await super().store([Write(b"new" + write.key, write.row) for write in writes])
        outcomes = await super().store(writes)
        await super().delete([b"new" + write.key for write in writes])
        return outcomes


class EvictsInSilence(Tier, breaks="test_what_went_for_room_is_reported"):
    async def watch(self):
        async for event in super().watch():
            if not isinstance(event, Removed):
                yield event


# Renews recency.


class RanksHeadFirst(Tier, breaks="test_a_request_that_is_over_leaves_its_head_newest"):
    def advise(self, advice):
        super().advise(advice.of(advice.keys[::-1]))


class IgnoresRenewals(Tier, breaks="test_what_was_ranked_goes_after_what_was_not"):
    def advise(self, advice):
        if advice.is_hint:
            super().advise(advice)


class CountsWhatIsRanked(Tier, breaks="test_advice_changes_nothing_that_is_there"):
    ranked = 0

    def advise(self, advice):
        self.ranked += len(advice.keys)
        super().advise(advice)

    def occupancy(self):
        now = super().occupancy()
        return now._replace(chunks=now.chunks + self.ranked)


# Takes hints.


class IgnoresDemotions(Tier, breaks="test_what_was_demoted_goes_first"):
    def advise(self, advice):
        if advice.kind != "demote":
            super().advise(advice)


class DemotesForEver(Tier, breaks="test_what_was_demoted_and_is_used_again_is_as_any_other"):
    demoted = ()

    def advise(self, advice):
        super().advise(advice)
        if advice.kind == "demote":
            self.demoted = advice.keys
        else:
            super().advise(Advice("demote", [key for key in advice.keys if key in self.demoted]))


class DemotesWhatOthersUse(Tier, breaks="test_of_a_session_that_is_over_goes_what_no_other_has_used"):
    def advise(self, advice):
        super().advise(advice)
        if advice.hint is not None:
            super().advise(Advice("demote", advice.keys))


class TakesRenewalsForEnds(Tier, breaks="test_of_a_session_that_is_over_goes_what_no_other_has_used"):
    def advise(self, advice):
        super().advise(advice if advice.is_hint else Advice("rank", advice.keys, Hint()))


class RetainsNothing(
    Tier,
    breaks=("test_what_is_retained_stays_while_others_come", "test_a_higher_priority_takes_the_place_of_a_lower_one"),
):
    def advise(self, advice):
        if advice.kind != "retain":
            super().advise(advice)


class RetainsForEver(Tier, breaks="test_what_was_retained_goes_when_its_time_is_over"):
    def advise(self, advice):
        super().advise(replace(advice, seconds=1e9))


class IgnoresPriorities(Tier, breaks="test_a_higher_priority_takes_the_place_of_a_lower_one"):
    def advise(self, advice):
        super().advise(replace(advice, priority=0))


class KeepsRoomForWhatIsRetained(Tier, breaks="test_a_store_finds_as_much_room_whatever_is_retained"):
    retained = 0

    def advise(self, advice):
        self.retained += len(advice.keys) if advice.kind == "retain" else 0
        super().advise(advice)

    async def store(self, writes):
        outcomes = list(await super().store(writes))
        return outcomes if self.retained < 8 else [NoSpace("retained")] * len(writes)


class CountsWhatIsRetained(Tier, breaks="test_advice_changes_nothing_that_is_there"):
    retained = 0

    def advise(self, advice):
        self.retained += len(advice.keys) if advice.kind == "retain" else 0
        super().advise(advice)

    def occupancy(self):
        now = super().occupancy()
        return now._replace(chunks=now.chunks + self.retained)


# Counts, and describes itself.


class CountsNothing(Tier, breaks=("test_what_happens_is_counted", "test_counts_are_whole_numbers_by_words")):
    def counts(self):
        return {}


class CountsSinceItWasAsked(Tier, breaks="test_what_happens_is_counted"):
    def counts(self):
        told, self.missed = self.missed, 0
        return {"missed": told}


class CountsWhatIsThere(Tier, breaks="test_a_total_never_falls"):
    turn = 0

    def counts(self):
        self.turn += 1
        return {"missed": self.missed, "held": 1_000 - self.turn}


class LendsItsCounts(Tier, breaks="test_what_happens_is_counted"):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.totals = {}

    async def load(self, reads):
        outcomes = await super().load(reads)
        self.totals["missed"] = self.missed
        return outcomes

    def counts(self):
        return self.totals


class CountsInSentences(Tier, breaks="test_counts_are_whole_numbers_by_words"):
    def counts(self):
        return {"chunks that were not there": self.missed}


class CountsInHalves(Tier, breaks="test_counts_are_whole_numbers_by_words"):
    def counts(self):
        return {"missed": self.missed / 2}


class DescribesItselfInLines(Tier, breaks="test_a_description_is_one_line_and_stays_the_same"):
    def description(self):
        return {"store": "suite\nrow: any"}


class DescribesItsContents(Tier, breaks="test_a_description_is_one_line_and_stays_the_same"):
    def description(self):
        return {"chunks": str(self.occupancy().chunks)}


# Wrappers.


class ForgetsCounts(Around):
    def __init__(self, inner):
        super().__init__(inner)
        vars(self).pop("counts", None)


class WrapsWithoutCounts(Tier, breaks="test_a_wrapper_offers_what_it_wraps"):
    wrap = staticmethod(ForgetsCounts)


class ClaimsCounts(Around):
    def counts(self):
        return {}


class WrapsWithCountsOfItsOwn(Tier, breaks="test_a_wrapper_offers_nothing_else"):
    wrap = staticmethod(ClaimsCounts)


class MeasuresItself(Around):
    def __init__(self, inner):
        super().__init__(inner)
        if isinstance(inner, Measured):
            self.occupancy = lambda: inner.occupancy()._replace(chunks=0, used_bytes=0)


class WrapsAndSaysItIsEmpty(Tier, breaks="test_a_wrapper_passes_on_reports_and_advice"):
    wrap = staticmethod(MeasuresItself)


class DoesNotPassOnEvents(Around):
    def __init__(self, inner):
        super().__init__(inner)
        if isinstance(inner, Inventory):
            self.watch = self._watch

    async def _watch(self):
        async for _ in self._inner.watch():
            yield ScanDone(complete=False)


class WrapsAndReportsAnotherScan(Tier, breaks="test_a_wrapper_passes_on_reports_and_advice"):
    wrap = staticmethod(DoesNotPassOnEvents)


class DoesNotPassOnAdvice(Around):
    def __init__(self, inner):
        super().__init__(inner)
        if isinstance(inner, Advised):
            self.advise = lambda advice: None


class WrapsAndKeepsAdvice(Tier, breaks="test_a_wrapper_passes_on_reports_and_advice"):
    wrap = staticmethod(DoesNotPassOnAdvice)


class PromisesTheMost(Around):
    def __init__(self, inner):
        super().__init__(inner)
        self.durability = Durability.POWER


class WrapsAndPromisesMore(Tier, breaks="test_a_wrapper_promises_no_more_than_what_it_wraps"):
    wrap = staticmethod(PromisesTheMost)


class Everything(
    BackendConformance,
    DurableBackendConformance,
    NamespacedConformance,
    InventoryConformance,
    MeasuredConformance,
    BoundedConformance,
    AdvisedConformance,
    CountedConformance,
    DescribedConformance,
    WrapperConformance,
):
    """All promises, made by a device in a named store that is slow enough for calls to meet."""

    chunk_bytes = 4_096
    tier: ClassVar[type[Tier]]

    def open(self, model_name="conformance", **options):
        options = DummyOptions(**{"latency_s": 0.001, "store": "suite", **options})
        return self.tier(options, tier_context(self.chunk_bytes, model_name=model_name))

    @pytest.fixture
    async def reopen(self):
        forget_store("suite")
        opened = []

        async def reopen():
            if opened:
                await opened[-1].aclose(10)
            opened.append(self.open())
            opened[-1].opened_before = len(opened) - 1
            return opened[-1]

        return reopen

    @pytest.fixture
    async def backend(self, reopen):
        return await reopen()

    @pytest.fixture
    async def neighbour(self, backend):
        return self.open(model_name="other")

    @pytest.fixture
    async def small(self):
        return self.open(store=None, capacity_bytes=self.room_chunks * self.chunk_bytes)

    @pytest.fixture
    def provoke(self, backend):
        lender = Lender(self.chunk_bytes)

        async def provoke():
            await lender.recall(backend, keys_of(2, start=1_000))

        return provoke

    @pytest.fixture
    def wrap(self):
        return self.tier.wrap


def all_tiers(base: type[Tier] = Tier) -> list[type[Tier]]:
    return [base, *(tier for subclass in base.__subclasses__() for tier in all_tiers(subclass))]


for _tier in all_tiers():
    _suite = type(f"Test{_tier.__name__}", (Everything,), {"tier": _tier, "__module__": __name__})
    globals()[_suite.__name__] = _suite if _tier.real_time else pytest.mark.virtual_time(_suite)
