"""Tiers that each break a promise: the conformance suite must reject them.

Each liar is the honest `Tier` with one seam changed, and names the promises that it breaks.
`test_conformance_rejects.py` runs these, and no others, against it.
"""

import asyncio
import ctypes
import os
import threading
from collections import Counter
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from kvtier.backend import Abandoned, Added, Durability, Read, Removed, ScanDone, Wrapper, Write
from kvtier.errors import BackendClosed, BackendUnavailable, ChunkMissing, NoSpace
from kvtier.settings.hints import Advice, Hint
from kvtier.testing import conformance
from kvtier.testing.conformance import Lender, keys_of, tier_context
from kvtier_backends.dummy import DummyBackend, DummyOptions, forget_store
from tests.testing.suites import Promises

ROUND_TRIP = "test_what_was_stored_is_loaded_bit_for_bit_again_and_again"
MISSING = "test_what_was_never_stored_is_missing"
ODD_KEYS = "test_odd_keys_are_keys_like_any_other"
ORDER = "test_outcomes_come_in_the_order_of_the_batch"
TWICE = "test_a_key_twice_in_a_batch_is_answered_twice"
LENGTH = "test_a_buffer_of_the_wrong_length_is_refused"
UNFIT = "test_a_key_that_a_tier_cannot_hold_costs_its_neighbours_nothing"
NOTHING_ELSE = "test_deleting_takes_nothing_else"
DELETED = "test_a_deleted_key_is_missing_and_can_be_stored_again"
BESIDE = "test_a_load_beside_a_store_or_a_delete_is_whole_or_missing"
THRONG = "test_in_a_throng_every_chunk_is_whole"
CANCELLED_LOAD = "test_a_cancelled_load_leaves_its_buffers_alone"
CANCELLED_STORE = "test_a_cancelled_store_leaves_its_buffers_alone"
CANCELLED_TWICE = "test_a_call_cancelled_again_and_again_still_waits"
CANCELLED_THRONG = "test_in_a_throng_of_cancelled_calls_every_chunk_is_whole"
STORED_COPY = "test_what_is_stored_is_a_copy"
KEPT = "test_no_buffer_is_kept_and_nothing_beside_it_is_written"
CLOSED = "test_a_closed_tier_refuses_every_call"
CLOSING = "test_closing_waits_for_what_is_under_way_and_refuses_new_calls"
SCAN = "test_what_is_there_is_reported_before_the_scan_is_done"
REPORT = "test_a_report_is_true_until_it_ends_with_the_tier"
COUNTED_ONCE = "test_every_chunk_is_counted_once"
SESSION = "test_of_a_session_that_is_over_goes_what_no_other_has_used"
PRIORITY = "test_a_higher_priority_takes_the_place_of_a_lower_one"
COUNTS = "test_what_happens_is_counted_in_whole_numbers"
DESCRIPTION = "test_a_description_is_one_line_and_stays_the_same"
OFFERS = "test_a_wrapper_offers_exactly_what_it_wraps"
PASSES_ON = "test_a_wrapper_passes_on_reports_and_advice"
ANY_BYTES = "test_any_bytes_come_back"
EVICTIONS = "test_what_went_for_room_is_reported"
HEAD = "test_a_request_that_is_over_leaves_its_head_newest"
RANKED = "test_what_was_ranked_goes_after_what_was_not"
DEMOTED = "test_what_was_demoted_goes_first"
RETAINED = "test_what_is_retained_stays_while_others_come"
TIME = "test_what_was_retained_goes_when_its_time_is_over"
ROOM = "test_deleting_makes_room"
HARMLESS = "test_advice_changes_nothing_that_is_there"
DURABILITY = "test_a_wrapper_promises_no_more_than_what_it_wraps"


class Tier(DummyBackend):
    """Honest: breaks nothing. Its seams are the methods that a liar changes."""

    breaks: ClassVar[tuple[str, ...]] = ()
    real_time: ClassVar[bool] = False

    state: ClassVar[dict[str, Any]] = {}  # What makes each of a liar's own attributes.

    def __init_subclass__(cls, breaks=(), **state):
        cls.breaks, cls.state = (breaks,) if isinstance(breaks, str) else breaks, cls.state | state

    def __init__(self, options, context):
        super().__init__(options, context)
        self.context, self.totals = context, {"missed": 0, "stored": 0}
        self.heard = Counter()  # Keys of advice, by its kind.
        self.dead = []  # Keys that were deleted.
        vars(self).update({name: make() for name, make in self.state.items()})

    def name(self, key):
        return key

    probed = deleted = reads = writes = measured = lambda self, given: given  # Given: a batch, or an occupancy.
    loaded = stored = lambda self, batch, outcomes: outcomes
    reported = advised = lambda self, given: [given]

    async def probe(self, keys):
        return await super().probe([self.name(key) for key in self.probed(keys)])

    async def load(self, reads):
        outcomes = await super().load([Read(self.name(key), into) for key, into in self.reads(reads)])
        self.totals["missed"] += len(outcomes) - outcomes.count(None)
        return self.loaded(reads, outcomes)

    async def store(self, writes):
        outcomes = await super().store([Write(self.name(key), row) for key, row in self.writes(writes)])
        self.totals["stored"] += len(writes)
        return self.stored(writes, outcomes)

    async def delete(self, keys):
        self.dead += keys
        await super().delete([self.name(key) for key in self.deleted(keys)])

    async def watch(self):
        async for event in super().watch():
            for told in self.reported(event):
                yield told

    def occupancy(self):
        return self.measured(super().occupancy())

    def advise(self, advice):
        self.heard[advice.kind] += len(advice.keys)
        for told in self.advised(advice):
            super().advise(told)

    def counts(self):
        return dict(self.totals)

    def description(self):
        return {"store": "suite", "row": f"{self.context.row_bytes:,} bytes"}

    @staticmethod
    def wrap(inner):
        return Around(inner)


class Around(Wrapper):
    options_type = DummyOptions

    @classmethod
    async def open(cls, options, context):
        return cls(DummyBackend(options, context))


def lie(liar, /, *breaks, **seams):
    globals()[liar] = type(liar, (Tier,), {"__module__": __name__, **seams}, breaks=breaks)


def all_well(_tier, chunks, _outcomes):
    return [None] * len(chunks)


def raise_the_first(_tier, _chunks, outcomes):
    for outcome in filter(None, outcomes):
        raise outcome
    return outcomes


def once(_tier, chunks):
    return list({chunk.key: chunk for chunk in chunks}.values())


def flip_a_bit(_tier, chunks, outcomes):
    for _, buffer in chunks:
        buffer[-1] ^= 1
    return outcomes


def refuse(when):
    def seam(tier, chunks):
        if when(tier, chunks):
            raise BackendUnavailable("this batch is refused")
        return chunks

    return seam


def refuse_length(tier, chunks):
    return any(len(buffer) != tier.context.row_bytes for _, buffer in chunks)


def around(change):
    def wrap(inner):
        wrapper = Around(inner)
        change(wrapper, inner)
        return wrapper

    return staticmethod(wrap)


lie("Forgets", ROUND_TRIP, writes=lambda *_: [], stored=all_well)
lie("FlipsABit", ROUND_TRIP, loaded=flip_a_bit)
lie("MakesUp", MISSING, loaded=all_well)
lie("Guesses", MISSING, probe=lambda _, keys: answer([True] * len(keys)))
lie("NamesByText", ODD_KEYS, name=lambda _, key: key.decode("ascii").encode())
lie("FoldsCase", ODD_KEYS, name=lambda _, key: key.lower())
lie("NamesByTheFirstHalf", ODD_KEYS, name=lambda _, key: key[:16] + key[-4:])
lie("IgnoresGroups", ODD_KEYS, NOTHING_ELSE, name=lambda _, key: key[:-4] + bytes(4))
lie("SkipsZeros", ANY_BYTES, writes=lambda _, writes: [write for write in writes if any(write.row)], stored=all_well)
lie("SaysNothing", "test_a_tier_says_what_it_promises_and_takes", durability="safe")


async def answer(given):
    return given


class KeepsTheFirst(Tier, breaks="test_the_last_store_of_a_key_counts"):
    async def store(self, writes):
        present = await self.probe([write.key for write in writes])
        await super().store([write for write, there in zip(writes, present, strict=True) if not there])
        return [None] * len(writes)


lie("AnswersOutOfOrder", ORDER, loaded=lambda _, __, outcomes: sorted(outcomes, key=lambda each: each is not None))
lie("RaisesForOne", ORDER, loaded=raise_the_first)
lie("ForgetsDuplicateKeys", TWICE, probed=lambda _, keys: list(dict.fromkeys(keys)))
lie("ForgetsDuplicateReads", TWICE, reads=once)
lie("ForgetsDuplicateWrites", TWICE, writes=once)
lie(
    "TakesTheFirstOfMany",
    "test_a_large_batch_moves_as_a_small_one_does",
    writes=lambda _, writes: writes[:256],
    stored=lambda _, writes, outcomes: outcomes + [None] * len(writes[256:]),
)
lie("TakesAnyKey", UNFIT, writes=lambda _, given: [one for one in given if 4 <= len(one.key) < 256], stored=all_well)
lie("WantsLists", "test_a_batch_is_any_sequence", reads=lambda _, reads: reads[:1] + reads[1:] + [])
lie("RefusesEmptyBatches", "test_an_empty_batch_is_answered_with_nothing", reads=refuse(lambda _, reads: not reads))
lie("RefusesTheBatchForAKey", UNFIT, writes=refuse(lambda _, writes: any(len(write.key) > 255 for write in writes)))
lie("RefusesTheReadsForALength", LENGTH, reads=refuse(refuse_length))
lie("RefusesTheWritesForALength", LENGTH, writes=refuse(refuse_length))


def fitting(tier, block=b""):
    return memoryview(bytearray(bytes(block).ljust(tier.context.row_bytes, b"\0")[: tier.context.row_bytes]))


lie("WritesAnyLength", LENGTH, writes=lambda tier, writes: [Write(key, fitting(tier, row)) for key, row in writes])


lie("DeletesNothing", DELETED, deleted=lambda _, keys: [])
lie(
    "Overreaches", NOTHING_ELSE, deleted=lambda _, keys: [key[:-1] + bytes([last]) for key in keys for last in range(4)]
)


class RefusesUnknownKeys(Tier, breaks=NOTHING_ELSE):
    async def delete(self, keys):
        if not all(await self.probe(keys)):
            raise KeyError(keys)
        await super().delete(keys)


lie("Mourns", DELETED, writes=lambda tier, given: [one for one in given if one.key not in tier.dead], stored=all_well)


class Watched(Tier, under_way=list):
    async def store(self, writes):
        self.under_way.append(asyncio.current_task())
        try:
            return await super().store(writes)
        finally:
            self.ended()

    def ended(self):
        self.under_way.remove(asyncio.current_task())


class TakesOneCallAtATime(Watched, breaks="test_stores_at_once_all_arrive"):
    writes = refuse(lambda tier, _: len(tier.under_way) > 1)


class InPlace(Tier, shelf=dict, turns=count):
    """Base of tiers that change what they hold where it lies, in steps."""

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


class TearsChunks(InPlace, breaks=("test_of_stores_of_one_key_at_once_one_whole_chunk_wins", BESIDE, THRONG)):
    pass


class DeletesInPieces(InPlace, breaks=BESIDE):
    async def delete(self, keys):
        for key in keys:
            self.shelf.get(key, bytearray(1))[:1] = b"\0"
        await asyncio.sleep(0.002)
        await super().delete(keys)


class LoadsAKeyOnce(Tier, breaks="test_one_chunk_goes_into_many_buffers_at_once", loading=set):
    async def load(self, reads):
        if self.loading.issuperset(read.key for read in reads):
            return [None] * len(reads)
        self.loading |= {read.key for read in reads}
        outcomes = await super().load(reads)
        self.loading.clear()
        return outcomes


class AbandonsThreads(InPlace, breaks=(CANCELLED_LOAD, CANCELLED_STORE, CANCELLED_TWICE, CANCELLED_THRONG)):
    """The mistake that `kvtier.backend.lending` mends: a cancelled call returns while its thread goes on."""

    real_time = True

    async def load(self, reads):
        return await self.go_on(self.load_one, reads)

    async def store(self, writes):
        return await self.go_on(lambda key, row: self.shelf.update({key: bytearray(row)}), writes)

    async def go_on(self, move, chunks):
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


class WaitsOnce(Tier, breaks=CANCELLED_TWICE):
    async def load(self, reads):
        call = asyncio.ensure_future(super().load(reads))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.shield(call)
            raise


class SwallowsCancellation(Tier, breaks=CANCELLED_LOAD):
    async def load(self, reads):
        with suppress(asyncio.CancelledError):
            return await super().load(reads)
        return [ChunkMissing("cancelled")] * len(reads)


class LeavesTheLockOfAProbe(
    Tier, breaks="test_a_cancelled_probe_or_delete_leaves_a_tier_that_works", lock=asyncio.Lock
):
    async def probe(self, keys):
        await self.lock.acquire()
        answer = await super().probe(keys)
        self.lock.release()
        return answer


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


class NeverForgetsACancelledCall(Watched, breaks=CANCELLED_THRONG):
    def ended(self):
        if not asyncio.current_task().cancelling():
            super().ended()

    async def aclose(self, deadline_s):
        await super().aclose(deadline_s)
        return Abandoned(len(self.under_way))


lie("Scribbles", STORED_COPY, stored=flip_a_bit)
lie("RemembersItsLastCall", KEPT, stored=lambda tier, writes, outcomes: vars(tier).update(last=writes) or outcomes)


class WritesOnTheLoop(Tier, breaks="test_no_call_blocks_the_loop"):
    async def store(self, writes):
        null = os.open(os.devnull, os.O_WRONLY)
        os.pwritev(null, [write.row for write in writes], 0)
        os.close(null)
        return await super().store(writes)


class KeepsTheLendersBuffer(InPlace, breaks=(STORED_COPY, KEPT)):
    async def store(self, writes):
        self.shelf.update(writes)
        return [None] * len(writes)


class KeepsTheBorrowersBuffer(Tier, breaks=("test_what_is_loaded_is_a_copy", KEPT), recent=dict):
    async def load(self, reads):
        if self.recent.keys() >= {read.key for read in reads}:
            for key, into in reads:
                into[:] = self.recent[key]
            return [None] * len(reads)
        outcomes = await super().load(reads)
        self.recent.update(reads)
        return outcomes


class WritesBesideTheRow(Tier, breaks=KEPT):
    def loaded(self, reads, outcomes):
        for _, into in reads:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(into)) + len(into), 0, 1)
        return outcomes


lie("NeverCloses", CLOSED, aclose=lambda *_: answer(Abandoned(0)))


class ClosesOnce(Tier, breaks=CLOSED):
    closed = False

    async def aclose(self, deadline_s):
        if self.closed:
            raise BackendClosed("closed already")
        self.closed = True
        return await super().aclose(deadline_s)


class CancelsWhatIsUnderWay(Watched, breaks=CLOSING):
    async def aclose(self, deadline_s):
        for task in self.under_way:
            task.cancel()
        return await super().aclose(deadline_s)


class ClosesAfterWaiting(Watched, breaks=(CLOSING, "test_a_cancelled_close_can_be_called_again")):
    async def aclose(self, deadline_s):
        while self.under_way:
            await asyncio.sleep(0.001)
        return await super().aclose(deadline_s)


class HidesWhatItLeaves(Tier, breaks="test_closing_without_patience_says_what_it_leaves"):
    async def aclose(self, deadline_s):
        await super().aclose(deadline_s)
        return Abandoned(0)


lie("Volatile", "test_chunks_outlive_the_tier", aclose=lambda *_: forget_store("suite") or answer(Abandoned(0)))


class BringsBackTheDead(Tier, breaks="test_the_last_store_or_delete_is_the_one_that_lasts", hidden=set):
    async def delete(self, keys):
        self.hidden |= set(keys)

    def loaded(self, reads, outcomes):
        return [ChunkMissing("") if key in self.hidden else out for (key, _), out in zip(reads, outcomes, strict=True)]


class StoresInTwoSteps(Tier, breaks="test_a_store_cut_short_leaves_whole_chunks"):
    async def store(self, writes):
        halves = [bytearray(write.row) for write in writes]
        for half in halves:
            half[len(half) // 2 :] = bytes(len(half) // 2)
        await super().store([Write(write.key, memoryview(half)) for write, half in zip(writes, halves, strict=True)])
        return await super().store(writes)


class IgnoresNamespaces(Tier, breaks="test_namespaces_share_no_chunk"):
    def __init__(self, options, context):
        same = tier_context(context.row_bytes).mapper
        super().__init__(replace(options, shared=True), context._replace(mapper=same))


lie("ReportsNothing", SCAN, reported=lambda _, event: [] if isinstance(event, Added) else [event])
lie("EvictsInSilence", EVICTIONS, reported=lambda _, event: [] if isinstance(event, Removed) else [event])


class ReportsTheDead(Tier, breaks=SCAN):
    async def watch(self):
        yield Added(list(self.dead))
        async for event in super().watch():
            yield event


class SaysNothingWhenEmpty(Tier, breaks=SCAN):
    before = None

    def reported(self, event):
        before, self.before = self.before, event
        return [event] if before is not None or not isinstance(event, ScanDone) else []


class ReportsAllAtOnce(Tier, breaks="test_reports_come_in_batches", keys=list):
    def reported(self, event):
        if isinstance(event, Added):
            return self.keys.extend(event.keys) or []
        return [Added(self.keys), event] if isinstance(event, ScanDone) else [event]


class ReportsForEver(Tier, breaks=REPORT):
    async def watch(self):
        async for event in super().watch():
            yield event
        await asyncio.Event().wait()


class ReportsWhatIsThereAsGone(Tier, breaks=REPORT):
    async def watch(self):
        async for event in super().watch():
            yield event
            while isinstance(event, ScanDone):
                await asyncio.sleep(0.005)
                yield Removed(keys_of(6))


class DiesWithItsListener(Tier, breaks="test_a_consumer_may_go_away"):
    async def watch(self):
        try:
            async for event in super().watch():
                yield event
        finally:
            await self.aclose(0)


lie("StartsFull", COUNTED_ONCE, measured=lambda _, now: now._replace(used_bytes=4_096))
lie("CountsMisses", COUNTED_ONCE, measured=lambda tier, now: now._replace(chunks=now.chunks + tier.totals["missed"]))
lie("CountsStores", COUNTED_ONCE, measured=lambda tier, now: now._replace(chunks=tier.totals["stored"]))


class NeverShrinks(Tier, breaks="test_what_was_deleted_uses_nothing", most=int):
    def measured(self, now):
        self.most = max(self.most, now.used_bytes)
        return now._replace(used_bytes=self.most)


lie("FailsTheBatchForOne", "test_a_batch_that_does_not_fit_is_stored_in_part", stored=raise_the_first)


class Overflows(Tier, breaks="test_the_capacity_is_never_exceeded"):
    def __init__(self, options, context):
        super().__init__(replace(options, capacity_bytes=None), context)
        self.capacity_bytes = options.capacity_bytes

    def measured(self, now):
        return now._replace(capacity_bytes=self.capacity_bytes)


class RefusesWhenFull(Tier, breaks="test_the_newest_chunks_are_there"):
    async def store(self, writes):
        now = self.occupancy()
        if now.used_bytes == now.capacity_bytes:
            return [NoSpace("full")] * len(writes)
        return await super().store(writes)


lie("LeaksRoom", ROOM, measured=lambda tier, now: now._replace(used_bytes=now.used_bytes + 64 * bool(tier.dead)))


class TakesASecondPlace(Tier, breaks="test_storing_again_takes_no_second_place"):
    async def store(self, writes):
        await super().store([Write(b"new" + write.key, write.row) for write in writes])
        outcomes = await super().store(writes)
        await super().delete([b"new" + write.key for write in writes])
        return outcomes


lie("RanksHeadFirst", HEAD, advised=lambda _, advice: [advice.of(advice.keys[::-1])])
lie("IgnoresRenewals", RANKED, advised=lambda _, advice: [advice] if advice.is_hint else [])
lie("IgnoresDemotions", DEMOTED, advised=lambda _, advice: [] if advice.kind == "demote" else [advice])
lie(
    "DemotesWhatOthersUse",
    SESSION,
    advised=lambda _, advice: [advice, *([Advice("demote", advice.keys)] if advice.hint is not None else ())],
)
lie("RenewalsAreEnds", SESSION, advised=lambda _, told: [told if told.is_hint else Advice("rank", told.keys, Hint())])
lie("RetainsNothing", RETAINED, PRIORITY, advised=lambda _, advice: [] if advice.kind == "retain" else [advice])
lie("RetainsForEver", TIME, advised=lambda _, advice: [replace(advice, seconds=1e9)])
lie("IgnoresPriorities", PRIORITY, advised=lambda _, advice: [replace(advice, priority=0)])


class DemotesForEver(Tier, breaks="test_what_was_demoted_and_is_used_again_is_as_any_other", demoted=tuple):
    def advised(self, advice):
        if advice.kind == "demote":
            self.demoted = advice.keys
            return [advice]
        return [advice, Advice("demote", [key for key in advice.keys if key in self.demoted])]


lie("CountsRanks", HARMLESS, measured=lambda tier, now: now._replace(chunks=now.chunks + tier.heard["rank"]))
lie(
    "KeepsRoomForWhatIsRetained",
    "test_a_store_finds_as_much_room_whatever_is_retained",
    stored=lambda tier, writes, outcomes: outcomes if tier.heard["retain"] < 8 else [NoSpace("")] * len(writes),
)
lie("CountsNothing", COUNTS, counts=lambda _: {})
lie("CountsInSentences", COUNTS, counts=lambda tier: {"chunks that were not there": tier.totals["missed"]})
lie("CountsInHalves", COUNTS, counts=lambda tier: {"missed": tier.totals["missed"] / 2})
lie("LendsItsCounts", COUNTS, counts=lambda tier: tier.totals)
lie("DescribesItselfInLines", DESCRIPTION, description=lambda _: {"store": "suite\nrow: any"})
lie("DescribesItsContents", DESCRIPTION, description=lambda tier: {"chunks": str(tier.occupancy().chunks)})


class CountsSinceItWasAsked(Tier, breaks=COUNTS):
    def counts(self):
        told, self.totals = self.totals, dict.fromkeys(self.totals, 0)
        return told


class CountsWhatIsThere(Tier, breaks="test_a_total_never_falls", turns=count):
    def counts(self):
        return {**self.totals, "held": 1_000 - next(self.turns)}


async def another_scan():
    yield ScanDone(complete=False)


def say_it_is_empty(wrapper, inner):
    wrapper.occupancy = lambda: inner.occupancy()._replace(chunks=0, used_bytes=0)


lie("WrapsWithoutCounts", OFFERS, wrap=around(lambda wrapper, _: vars(wrapper).pop("counts", None)))
lie("WrapsWithCountsOfItsOwn", OFFERS, wrap=around(lambda wrapper, _: setattr(wrapper, "counts", dict)))
lie("WrapsAndSaysItIsEmpty", PASSES_ON, wrap=around(say_it_is_empty))
lie("WrapsAndReportsAnotherScan", PASSES_ON, wrap=around(lambda wrapper, _: setattr(wrapper, "watch", another_scan)))
lie("WrapsAndKeepsAdvice", PASSES_ON, wrap=around(lambda wrapper, _: setattr(wrapper, "advise", repr)))
lie("PromisesMore", DURABILITY, wrap=around(lambda wrapper, _: vars(wrapper).update(durability=Durability.POWER)))


class Everything(
    Promises, conformance.CountedConformance, conformance.DescribedConformance, conformance.WrapperConformance
):
    chunk_bytes = 4_096
    tier: ClassVar[type[Tier]]

    def open(self, model_name="conformance", **options):
        options = DummyOptions(**{"latency_s": 0.001, "store": "suite", **options})
        return self.tier(options, tier_context(self.chunk_bytes, model_name=model_name))

    @pytest.fixture
    def open_tier(self):
        forget_store("suite")

        async def open_tier(**context):
            return self.open(**context)

        return open_tier

    @pytest.fixture
    async def small(self):
        # Slow: few calls fill the time that a suite waits for what never comes.
        return self.open(store=None, latency_s=0.1, capacity_bytes=self.room_chunks * self.chunk_bytes)

    @pytest.fixture
    def provoke(self, backend):
        lender = Lender(self.chunk_bytes)

        async def provoke():
            await lender.recall(backend, keys_of(2, start=1_000))

        return provoke

    @pytest.fixture
    def wrap(self):
        return self.tier.wrap


def all_tiers(base=Tier):
    return [base, *(tier for subclass in base.__subclasses__() for tier in all_tiers(subclass))]


for _tier in all_tiers():
    _suite = type(f"Test{_tier.__name__}", (Everything,), {"tier": _tier, "__module__": __name__})
    globals()[_suite.__name__] = _suite if _tier.real_time else pytest.mark.virtual_time(_suite)
