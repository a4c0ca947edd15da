"""The tiered study: its instant tier equals a dummy tier, so the engine over one has the study's hits."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import pytest

from kvtier.backend.namespace import OffloadKey, make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.answers import LookupResult
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.policies import known_policies
from kvtier.settings.hints import Hint
from kvtier.testing.virtual_time import VirtualTimeLoop
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.tiered import CASCADES, DISK_NAME, CascadeName, TieredStudy, tiered_hits
from kvtier.tools.replay.traces import BLOCK_TOKENS, Trace, TraceRequest
from kvtier.tools.replay.workload import AnyTrace, GeneratedTrace
from tests.tools.replay.real import CONVERSATION, Traces
from tests.tools.replay.told import KINDS, told

CHUNK_BYTES = 4_096
TURNS = 10_000  # Of the loop: whatever is in flight ends in fewer.


def key_of(block: int) -> OffloadKey:
    return make_offload_key(b"%d" % block)


class Driver:
    """One engine over a dummy tier, which waits for all transfers after each step, as the study does."""

    def __init__(self, manager: TieringOffloadingManager, capacity: int) -> None:
        self._manager = manager
        self._capacity = capacity
        self.engine = manager.steps
        self._ledger = self.engine.ledger

    async def started(self) -> None:
        await self._until(lambda: self._ledger.tiers[0].authoritative)

    async def hits(self, number: int, request: TraceRequest, study: TieredStudy) -> int:
        """Serve one request that the study has served; the tier's contents must be the study's, too."""
        keys, name, engine = list(map(key_of, request.hash_ids[: self._capacity])), str(number), self.engine
        at_end = number % 2 == 1 and may_come_at_the_end(request.hint) and self._ledger.primary.takes_hints
        engine.end_step()
        engine.on_new_request(name, hint=None if at_end else request.hint)
        while LookupResult.HIT_PENDING in (found := self._found(keys, name)):
            assert await self._manager.drain()
        hits = len(found)
        engine.prepare_load(keys[:hits], name)
        engine.complete_load(keys[:hits], name)
        plan = engine.prepare_store(keys, name)
        assert plan is not None
        engine.complete_store(plan.keys, name)
        assert await self._manager.drain()
        engine.on_request_finished(name, hint=request.hint if at_end else None)
        assert await self._manager.drain()
        await self._until(lambda: len(self._ledger.locations.mask) == len(study.tier.keys))
        assert self._ledger.locations.mask.keys() == study.tier.keys.keys()
        return hits

    def _found(self, keys: Sequence[OffloadKey], name: str) -> list[LookupResult]:
        found: list[LookupResult] = []
        for key in keys:
            result = self.engine.lookup(key, name)
            if result is LookupResult.MISS:
                break
            found.append(result)
        return found

    async def _until(self, condition: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            if condition():
                return
            self.engine.end_step()
            await asyncio.sleep(0)
        pytest.fail("the tier's contents differ from the study's")


def may_come_at_the_end(hint: Hint | None) -> bool:
    """Return True if the hint has the same effect at a request's end: nothing is stored after it."""
    return hint is not None and not hint.no_store


def config_of(policy: str, capacity: int, tier_capacity: int, cascade: str) -> EngineConfig:
    tier = {"type": "dummy", "name": DISK_NAME, "capacity_bytes": tier_capacity * CHUNK_BYTES, "cascade": cascade}
    described = {
        "cpu_bytes_to_use": capacity * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "namespace": {"model_name": "study", "tokens_per_hash": BLOCK_TOKENS},
        "eviction_policy": policy,
        "runner": "inline",
        "secondary_tiers": [tier],
        "limits": {"lease_share": 1.0, "cascade_share": 1.0},
    }
    return EngineConfig.from_dict(described)


def compare(
    requests: Iterable[TraceRequest], policy: str, capacity: int, tier_capacity: int, cascade: CascadeName
) -> tuple[int, int]:
    """Serve all requests by both; return the hits and the chunks written."""

    async def run() -> tuple[int, int]:
        study = TieredStudy(policy, capacity, tier_capacity, cascade)
        total = written = 0
        clock = asyncio.get_running_loop().time
        async with TieringOffloadingManager.open(config_of(policy, capacity, tier_capacity, cascade)) as manager:
            driver = Driver(manager, capacity)
            await driver.started()
            for number, request in enumerate(requests):
                await asyncio.sleep(request.timestamp_ms / 1_000 - clock())
                served = study.serve(request)
                assert (number, await driver.hits(number, request, study)) == (number, served.hits)
                total += served.hits
                written += served.written
            assert driver.engine.stats().tiers[0].stored == written
        return total, written

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run())


@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("policy", known_policies())
def test_the_engine_has_the_studys_hits_under_every_policy_and_cascade(policy: str, cascade: CascadeName) -> None:
    trace = GeneratedTrace(limit=250)
    extent = measure(trace)
    sizes = extent.capacity(0.05), extent.capacity(0.1)
    without_hints = compare(trace, policy, *sizes, cascade)
    assert without_hints[0] > 0
    assert compare(told(trace, tiers=(DISK_NAME,)), policy, *sizes, cascade) != without_hints


@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_has_the_studys_hits_with_hints_of_one_kind(kind: str, cascade: CascadeName) -> None:
    trace = GeneratedTrace(limit=250)
    extent = measure(trace)
    policy = "density" if kind in ("returns_in_s", "class") else "lru"
    compare(told(trace, [kind], tiers=(DISK_NAME,)), policy, extent.capacity(0.05), extent.capacity(0.08), cascade)


@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize(("share", "tier_share"), [(0.001, 0.0005), (0.002, 0.004)])
def test_the_engine_has_the_studys_hits_if_requests_are_larger_than_the_cache(
    cascade: CascadeName, share: float, tier_share: float
) -> None:
    trace = GeneratedTrace(limit=120)
    extent = measure(trace)
    for requests in (trace, told(trace, tiers=(DISK_NAME,))):
        compare(requests, "lru", extent.capacity(share), extent.capacity(tier_share), cascade)


@pytest.mark.parametrize("cascade", CASCADES)
def test_the_engine_has_the_studys_hits_on_a_real_trace(traces: Traces, cascade: CascadeName) -> None:
    """Request 193 ranks chunks of the tier in the step that stores others: advice is applied before the store."""
    trace = Trace(traces / CONVERSATION, limit=400)
    extent = measure(trace)
    assert compare(trace, "lru", extent.capacity(0.05), extent.capacity(0.1), cascade)[0] > 0


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("policy", known_policies())
def test_the_engine_has_the_studys_hits_with_hints_on_real_chats(
    traces: Traces, policy: str, cascade: CascadeName
) -> None:
    trace: AnyTrace = Trace(traces / CONVERSATION, limit=500)
    extent = measure(trace)
    sizes = extent.capacity(0.05), extent.capacity(0.1)
    assert compare(told(trace, tiers=(DISK_NAME,)), policy, *sizes, cascade)[0] > 0


# The worth of each cascade on real chats.


@pytest.mark.usefixtures("thorough")
def test_evict_has_more_hits_than_store_and_second_use_writes_a_quarter(traces: Traces) -> None:
    extent = traces.extent(CONVERSATION)
    sizes = extent.capacity(0.05), extent.capacity(0.10)
    trace = Trace(traces / CONVERSATION, checked=True)
    hit_ratio, written = dict[str, float](), dict[str, float]()
    for cascade in CASCADES:
        served = list(tiered_hits(trace, "lru", *sizes, cascade))
        hit_ratio[cascade] = extent.hit_ratio(sum(each.hits for each in served))
        written[cascade] = extent.hit_ratio(sum(each.written for each in served))
    assert hit_ratio["store"] == pytest.approx(0.279, abs=0.0005)
    assert hit_ratio["evict"] >= 0.310
    assert written["evict"] < written["store"]
    assert hit_ratio["second_use"] >= hit_ratio["store"]
    assert written["second_use"] <= written["store"] / 4
