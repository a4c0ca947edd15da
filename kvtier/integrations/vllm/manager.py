"""The scheduler's side: vLLM's OffloadingManager in front of kvtier's step protocol.

It translates and decides nothing, with one exception. After a reset vLLM 0.32 does not report when its workers have
released the rows. But it drops the reports of transfers from before the reset, and makes every worker finish these
before later ones. So they have finished if there were none, or when all workers have reported the first later transfer.

Weights may change while vLLM runs, as in reinforcement learning. Each key then carries a mark of their revision, which
a reset reads again. No request finds chunks of another revision; tiers evict them in their time.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.backend.namespace import GROUP_BYTES
from kvtier.engine.answers import Event
from kvtier.engine.answers import LookupResult as Answer
from kvtier.engine.requests import Position, by_position
from kvtier.engine.steps import StepManager
from kvtier.engine.tier import TierMatcher
from kvtier.integrations.vllm.stats import Media, Stats, config_info, engine_series, offloading_events

_RESULTS = {answer: LookupResult[answer.name] for answer in Answer}
HINT = "kvtier"  # In a request's `kv_transfer_params`.
LOOKUP_HIT = LookupResult.HIT  # A constant: an enum's member look-up costs a call.
_CHUNK_LEVEL = RequestOffloadingContext(OffloadPolicy.CHUNK_LEVEL)


class VllmManager(OffloadingManager):
    """One engine, as vLLM's scheduler calls it. All calls belong to the scheduler's thread; none waits.

    `reset_cache` and `shutdown` are the exceptions: they wait for transfers in flight, within the engine's `close_s`.
    """

    def __init__(self, engine: StepManager, stats: Stats, read_mark: Callable[[], bytes] = bytes) -> None:
        """Own an engine, which `stats` observes; `shutdown` closes it. `read_mark` returns the weights' mark."""
        self.engine = engine
        self._read_mark, self._mark = read_mark, read_mark()  # Empty if weights never change.
        self._ledger = engine.ledger
        self._ready = self._ledger.primary.ready
        self._hits: list[OffloadKey] = []  # One request's hits in this step: the ledger's own list.
        self._hits_of: ReqContext | None = None  # The request of these hits; None while there are none.
        self._media = Media(self._ledger.tiers)
        self._stats = stats
        stats.watch(engine_series(self._ledger))
        self._copying = 0  # Chunks that workers are copying, by their reports since the last reset.
        self._flushing = False  # Workers may still use rows of before a reset.
        self._calls = 0  # Calls that may have changed a count.
        self._reported = (-1, -1)  # Calls and messages at the last report.
        self._report_again = False

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._calls += 1
        chosen = req_context.load_tier_filter
        matchers = None if chosen is TierFilter.ALL else _matchers(chosen)
        position, hint = self._position(req_context), hint_in(req_context)
        self.engine.on_new_request(req_context.req_id, load_matchers=matchers, position=position, hint=hint)
        return _CHUNK_LEVEL

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._calls += 1
        self._hits_of = None
        self.engine.on_request_finished(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if req_context is self._hits_of and key in self._ready:  # Inlined: runs thousands of times a step.
            self._hits.append(key)
            return LOOKUP_HIT
        return self._look_up(key, req_context)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return self._media.source(self.engine.source(self._marked(key), req_context.req_id))

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._calls += 1
        rows = self.engine.prepare_load(self._keys(keys), req_context.req_id)
        self._copying += len(rows)
        return CPULoadStoreSpec(rows)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._calls += 1
        self._completed(len(keys))
        self.engine.complete_load(self._keys(keys), req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.engine.touch(self._keys(keys), req_context.req_id)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        self._calls += 1
        self._hits_of = None  # Room may be made, which empties hits.
        if (plan := self.engine.prepare_store(self._keys(keys), req_context.req_id)) is None:
            return None
        self._copying += len(plan.keys)
        return PrepareStoreOutput(self._bare(plan.keys), CPULoadStoreSpec(plan.rows), self._bare(plan.evicted))

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self._calls += 1
        self._completed(len(keys))
        stored = by_position(self._keys(keys), self._position(req_context))  # They come as a set.
        self.engine.complete_store(stored, req_context.req_id, success=success)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._hits_of = None
        self.engine.end_step()

    def has_pending_work(self) -> bool:
        return self.engine.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        row, events = self._ledger.primary.row, iter(self.engine.take_events())
        events = self._of_these_weights(events) if self._mark else events
        return offloading_events(events, self._media, absent=lambda key: row(self._marked(key)) is None)

    def get_stats(self) -> OffloadingConnectorStats | None:
        # Called once a step, and most steps change nothing. Changes of a step's end are reported in the next step.
        seen = self._calls, self.engine.messages_received
        changed = seen != self._reported
        if not (changed or self._report_again):
            return None
        self._reported, self._report_again = seen, changed
        return self._stats.take()

    def config_info(self) -> Sequence[dict[str, str | int]]:  # vLLM 0.33's.
        """Return one mapping of labels to values for each tier."""
        return config_info(self.engine.config)

    def reset_cache(self) -> None:
        mark = self._read_mark()  # Nothing is reset if it cannot be read.
        self._calls += 1
        self._hits_of = None
        self.engine.reset()
        self._mark = mark
        self._flushing |= self._copying > 0
        self._copying = 0
        if not self._flushing:
            self.engine.on_reset_flushed()

    def on_reset_flushed(self) -> None:  # vLLM 0.33's.
        """Let tiers fill rows again: no worker uses rows of before the reset any more."""
        self._flushing = False
        self.engine.on_reset_flushed()

    def shutdown(self) -> None:
        self.engine.close()

    def _look_up(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Ask the engine, and keep the request whose hits `lookup` may append to."""
        request_id = req_context.req_id
        found = self.engine.lookup(self._marked(key), request_id)
        if req_context is not self._hits_of:
            self._hits = self.engine.hits(request_id)  # pyright: ignore[reportAttributeAccessIssue]  # Both are bytes.
        self._hits_of = req_context if self._hits else None  # Empty if room was made in vain.
        return _RESULTS[found]

    def _completed(self, chunks: int) -> None:
        self._copying -= chunks
        if self._flushing:
            self.on_reset_flushed()

    # Keys with the mark of the weights: between hash and group, because tiers spread chunks by the hash's beginning.

    def _marked(self, key: OffloadKey) -> OffloadKey:
        return OffloadKey(key[:-GROUP_BYTES] + self._mark + key[-GROUP_BYTES:]) if self._mark else key

    def _keys(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        if self._mark:
            return list(map(self._marked, keys))
        return keys if isinstance(keys, list) else list(keys)

    def _bare(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        if not self._mark:
            return keys
        end = -len(self._mark) - GROUP_BYTES
        return [OffloadKey(key[:end] + key[-GROUP_BYTES:]) for key in keys]

    def _position(self, req_context: ReqContext) -> Position:
        position = req_context.get_offload_key_position
        return (lambda key: position(*self._bare([key]))) if self._mark else position

    def _of_these_weights(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events of chunks that requests can find. vLLM reports at a reset that all others are gone."""
        for event in events:
            if keys := [key for key in event.keys if key[:-GROUP_BYTES].endswith(self._mark)]:
                yield event._replace(keys=self._bare(keys))


def hint_in(req_context: ReqContext) -> object:
    """Return a request's hint as the client sent it, unread; None if there is none."""
    params: object = req_context.kv_transfer_params
    return params.get(HINT) if isinstance(params, Mapping) else None


def _matchers(chosen: TierFilter) -> list[TierMatcher]:
    return [
        TierMatcher(each.medium and each.medium.value, each.locality and each.locality.value)
        for each in chosen.matchers
    ]
