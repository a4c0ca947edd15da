"""The engine over one tier has exactly the hits that the tiered study says, request by request.

For every policy, every cascade and every hint.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.answers import LookupResult
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.steps import Inside
from kvtier.hints import Hint
from kvtier.policies import known_policies, policy_class
from kvtier.testing.virtual_time import VirtualTimeLoop
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.tiered import CASCADES, TieredCache
from kvtier.tools.replay.traces import BLOCK_TOKENS, Request, Trace
from kvtier.tools.replay.workload import GeneratedTrace
from tests.tools.replay.told import KINDS, told

CHUNK_BYTES = 4_096
TIER = "slow"
TURNS = 10_000  # Of the loop: what is under way ends in fewer.
REAL = ["mooncake_conversation.jsonl.gz", "agentic_local_b512.jsonl.zst", "lmcache_miniswe_b16.jsonl.gz"]


def key_of(block: int) -> OffloadKey:
    return make_offload_key(block.to_bytes(8, "big"))


class Driver:
    """One engine over a dummy tier, driven as the study describes; after each step it waits for all that was moved.

    Runner and tier share the loop of the engine, and its time.
    """

    def __init__(self, manager: TieringOffloadingManager, capacity: int) -> None:
        self._manager = manager
        self._capacity = capacity
        self.engine = manager.steps
        self._ledger = Inside(self.engine).ledger

    async def started(self) -> None:
        await self._until(lambda: self._ledger.tiers[0].authoritative)

    async def hits(self, number: int, request: Request, study: TieredCache) -> int:
        """Serve one request, which the study has served; the tier's contents must be the study's, too."""
        keys, name, engine = list(map(key_of, request.hash_ids[: self._capacity])), str(number), self.engine
        at_end = number % 2 == 1 and may_be_said_at_the_end(request.hint) and self._ledger.primary.takes_hints
        engine.end_step()
        engine.on_new_request(name, hint=None if at_end else request.hint)
        while LookupResult.HIT_PENDING in (found := self._found(keys, name)):
            await self._settle()
        hits = len(found)
        engine.prepare_load(keys[:hits], name)
        engine.complete_load(keys[:hits], name)
        plan = engine.prepare_store(keys, name)
        assert plan is not None
        engine.complete_store(plan.keys, name)
        await self._settle()
        engine.on_request_finished(name, hint=request.hint if at_end else None)
        await self._settle()
        await self._until(lambda: len(self._ledger.locations.mask) == len(study.tier.blocks))
        assert self._ledger.locations.mask.keys() == set(map(key_of, study.tier.blocks))
        return hits

    def _found(self, keys: Sequence[OffloadKey], name: str) -> list[LookupResult]:
        found: list[LookupResult] = []
        for key in keys:
            result = self.engine.lookup(key, name)
            if result is LookupResult.MISS:
                break
            found.append(result)
        return found

    async def _settle(self) -> None:
        assert await self._manager.drain()

    async def _until(self, condition: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            if condition():
                return
            self.engine.end_step()
            await asyncio.sleep(0)
        pytest.fail("the tier does not hold what the study says")


def may_be_said_at_the_end(hint: Hint | None) -> bool:
    """Say whether it makes no difference when this is said: nothing is stored at a request's end."""
    return hint is not None and not hint.no_store


def config_of(policy: str, capacity: int, tier_capacity: int, cascade: str) -> EngineConfig:
    tier = {"type": "dummy", "name": TIER, "capacity_bytes": tier_capacity * CHUNK_BYTES, "cascade": cascade}
    described = {
        "cpu_bytes_to_use": capacity * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "eviction_policy": policy,
        "runner": "inline",
        "namespace": {"model_name": "study", "tokens_per_hash": BLOCK_TOKENS, "blocks_per_chunk": 1},
        "secondary_tiers": [tier],
        "limits": {"lease_share": 1.0, "cascade_share": 1.0},
    }
    return EngineConfig.from_dict(described)


def compare(
    requests: Iterable[Request], policy: str, capacity: int, tier_capacity: int, cascade: str
) -> tuple[int, int]:
    """Serve all by both, and return the hits, and what was written."""

    async def run() -> tuple[int, int]:
        study = TieredCache(policy_class(policy)(capacity), capacity, tier_capacity, cascade, tier_name=TIER)
        total = written = 0
        clock = asyncio.get_running_loop().time
        async with TieringOffloadingManager.open(config_of(policy, capacity, tier_capacity, cascade)) as manager:
            driver = Driver(manager, capacity)
            await driver.started()
            for number, request in enumerate(requests):
                await asyncio.sleep(request.timestamp_ms / 1_000 - clock())
                now_s = clock()
                served = study.serve(request.hash_ids, request.hint, now_s)
                hits = await driver.hits(number, request, study)
                assert (number, hits) == (number, served.hits)
                assert clock() == now_s, "a step takes no time"
                total += hits
                written += served.written
            assert driver.engine.stats().tiers[0].stored == written
        return total, written

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run())


def small(limit: int) -> Iterator[Request]:
    return iter(GeneratedTrace(limit=limit))


@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("policy", known_policies())
def test_on_the_generated_trace_under_every_policy_and_cascade(policy: str, cascade: str) -> None:
    extent = measure(small(250))
    assert compare(small(250), policy, extent.capacity(0.05), extent.capacity(0.1), cascade)[0] > 0


@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("policy", known_policies())
@pytest.mark.parametrize("share", [0.002, 0.05])
def test_with_hints_of_all_kinds_under_every_policy_and_cascade(policy: str, cascade: str, share: float) -> None:
    trace = GeneratedTrace(limit=250)
    extent = measure(trace)
    sizes = extent.capacity(share), extent.capacity(2 * share)
    figures = compare(told(trace, tiers=(TIER,)), policy, *sizes, cascade)
    if share > 0.01:
        assert figures != compare(trace, policy, *sizes, cascade)


@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("kind", KINDS)
def test_with_hints_of_one_kind(kind: str, cascade: str) -> None:
    trace = GeneratedTrace(limit=250)
    extent = measure(trace)
    policy = "density" if kind in ("returns_in_s", "class") else "lru"
    compare(told(trace, [kind], tiers=(TIER,)), policy, extent.capacity(0.05), extent.capacity(0.08), cascade)


@pytest.mark.parametrize("cascade", CASCADES)
def test_where_a_request_is_larger_than_the_cache_and_the_tier_smaller(cascade: str) -> None:
    extent = measure(small(120))
    compare(small(120), "lru", extent.capacity(0.001), extent.capacity(0.0005), cascade)


@pytest.mark.parametrize("cascade", CASCADES)
def test_on_the_beginning_of_a_real_trace(traces, cascade: str) -> None:
    trace = Trace(traces / REAL[0], limit=400)
    extent = measure(trace)
    assert compare(trace, "lru", extent.capacity(0.05), extent.capacity(0.1), cascade)[0] > 0


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("policy", known_policies())
def test_with_hints_on_real_chats_under_every_policy_and_cascade(traces, policy: str, cascade: str) -> None:
    trace = Trace(traces / REAL[0], limit=500)
    extent = measure(trace)
    assert compare(told(trace, tiers=(TIER,)), policy, extent.capacity(0.05), extent.capacity(0.1), cascade)[0] > 0


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("name", REAL)
def test_on_whole_real_traces(traces, name: str, cascade: str) -> None:
    trace = Trace(traces / name, limit=1_500)
    extent = measure(trace)
    assert compare(trace, "lru", extent.capacity(0.05), extent.capacity(0.1), cascade)[0] > 0
