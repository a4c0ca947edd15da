import asyncio
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backend.contract import Occupancy
from kvtier.errors import ConfigError
from kvtier.testing.conformance import Follower, Lender, key_of, keys_of, label, tier_context
from kvtier_backends.dummy import DummyBackend, DummyDevice, DummyOptions, forget_store
from tests.testing.suites import Promises

DEVICE = DummyOptions(latency_s=0.001, bandwidth_bytes_per_s=200_000_000, concurrency=4)


class Suites(Promises):
    """Every suite there is, over one named store; a subclass says how fast the device is."""

    chunk_bytes = 8_192
    options: DummyOptions

    @pytest.fixture
    def open_tier(self):
        forget_store("suite")

        async def open_tier(**context):
            options = msgspec.structs.replace(self.options, store="suite")
            return DummyBackend(options, tier_context(self.chunk_bytes, **context))

        return open_tier

    @pytest.fixture
    async def small(self):
        options = msgspec.structs.replace(self.options, capacity_bytes=self.room_chunks * self.chunk_bytes)
        return DummyBackend(options, tier_context(self.chunk_bytes))


class TestAnInstantDummy(Suites):
    options = DummyOptions()


@pytest.mark.virtual_time
class TestADeviceInVirtualTime(Suites):
    options = DEVICE


ROW_BYTES = 4_096


@pytest.fixture
def lender():
    return Lender(ROW_BYTES)


def dummy(**options):
    return DummyBackend(DummyOptions(**options), tier_context(ROW_BYTES, name="0:dummy", model_name="m"))


def now():
    return asyncio.get_running_loop().time()


async def test_an_instant_tier_never_waits(lender):
    keys = keys_of(4)

    def at_once(call):
        with pytest.raises(StopIteration) as ended:
            call.send(None)
        return ended.value.value

    tier = dummy()
    assert (at_once(tier.store(lender.writes(keys))), at_once(tier.probe(keys))) == ([None] * 4, [True] * 4)
    reads = lender.reads(keys)
    assert lender.told(reads, at_once(tier.load(reads))) == [label(key) for key in keys]
    at_once(tier.delete(keys))


TIMES = {
    "latency is paid once by transfers that fit the slots": ({"latency_s": 0.5, "concurrency": 8}, 0.5),
    "transfers beyond the slots wait": ({"latency_s": 0.5, "concurrency": 3}, 1.5),
    "the link sends one byte after the other": ({"bandwidth_bytes_per_s": ROW_BYTES}, 8),
    "stores may be slower": ({"bandwidth_bytes_per_s": ROW_BYTES, "store_bandwidth_bytes_per_s": ROW_BYTES // 4}, 32),
    "latency overlaps with bytes": ({"latency_s": 0.5, "bandwidth_bytes_per_s": ROW_BYTES, "concurrency": 2}, 8.5),
}


@pytest.mark.virtual_time
class TestTime:
    @pytest.mark.parametrize(("options", "seconds"), TIMES.values(), ids=TIMES)
    async def test_eight_chunks_take_the_time_of_the_device(self, lender, options, seconds):
        await lender.keep(dummy(**options), keys_of(8))
        assert now() == seconds

    async def test_loads_go_before_stores_that_wait_and_share_their_link(self, lender):
        tier = dummy(bandwidth_bytes_per_s=ROW_BYTES, store_bandwidth_bytes_per_s=ROW_BYTES // 4)
        await lender.keep(tier, keys_of(8))
        await lender.recall(tier, keys_of(8))
        assert now() == 40
        storing = asyncio.create_task(lender.keep(tier, keys_of(2)))
        await asyncio.sleep(1)
        await lender.recall(tier, keys_of(8))
        assert now() == 49
        await storing
        assert now() == 56

    async def test_calls_at_once_share_an_idle_device_that_owes_nothing(self, lender):
        tier = dummy(bandwidth_bytes_per_s=ROW_BYTES)
        await asyncio.sleep(100)
        ended_at = []

        async def store(start):
            await lender.keep(tier, keys_of(4, start))
            ended_at.append(now())

        await asyncio.gather(store(0), store(10), store(20))
        assert ended_at == [104, 108, 112]

    async def test_misses_probes_and_deletions_cost_a_latency_and_no_bytes(self, lender):
        tier = dummy(latency_s=0.5, bandwidth_bytes_per_s=1)
        await lender.recall(tier, keys_of(8))
        await tier.probe(keys_of(8))
        await tier.delete(keys_of(8))
        assert now() == 1.5

    async def test_a_cancelled_call_has_used_the_device_all_the_same(self, lender):
        tier = dummy(bandwidth_bytes_per_s=ROW_BYTES)
        call = asyncio.create_task(lender.keep(tier, keys_of(8)))
        await asyncio.sleep(1)
        call.cancel()
        await asyncio.wait({call})
        await lender.keep(tier, keys_of(1))
        assert now() == 9


@given(
    latency_s=st.sampled_from([0.0, 0.5, 3.0]),
    seconds_per_chunk=st.sampled_from([0.0, 0.25, 2.0]),
    slots=st.integers(1, 5),
    calls=st.lists(st.tuples(st.sampled_from([0.0, 0.1, 10.0]), st.integers(0, 12)), max_size=8),
)
def test_a_device_is_never_faster_than_its_figures(latency_s, seconds_per_chunk, slots, calls):
    bandwidth_bytes_per_s = int(ROW_BYTES / seconds_per_chunk) if seconds_per_chunk else None
    options = DummyOptions(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s, concurrency=slots)
    device = DummyDevice(options)
    begun_at, booked, time_s = None, 0, 0.0
    for pause_s, chunks in calls:
        time_s += pause_s
        begun_at = time_s if begun_at is None else begun_at
        booked += chunks
        ends_at = device.load(time_s, [ROW_BYTES] * chunks)
        assert ends_at >= time_s + max(math.ceil(chunks / slots) * latency_s, chunks * seconds_per_chunk) - 1e-9
        if chunks:
            assert ends_at <= begun_at + sum(p for p, _ in calls) + booked * (latency_s + seconds_per_chunk) + 1e-9
            assert ends_at >= begun_at + (latency_s if booked else 0.0) + booked * seconds_per_chunk - 1e-9


class TestRoom:
    async def test_the_least_recently_used_chunk_makes_room(self, lender):
        tier = dummy(capacity_bytes=4 * ROW_BYTES)
        for key in keys_of(4):
            await lender.keep(tier, [key])
        await lender.recall(tier, [key_of(0)])
        await lender.keep(tier, [key_of(4)])
        assert await tier.probe(keys_of(5)) == [True, False, True, True, True]

    async def test_a_batch_without_room_is_kept_from_its_beginning(self, lender):
        tier = dummy(capacity_bytes=4 * ROW_BYTES)
        await lender.keep(tier, keys_of(3, start=10))
        outcomes = await tier.store(lender.writes(keys_of(6)))
        assert [type(outcome).__name__ for outcome in outcomes] == ["NoneType"] * 4 + ["NoSpace"] * 2
        assert "4,096 bytes into tier 0:dummy, 16,384 of 16,384 bytes used" in str(outcomes[-1])

    async def test_a_tier_smaller_than_a_chunk_holds_none(self, lender):
        tier = dummy(capacity_bytes=ROW_BYTES - 1)
        outcomes = await tier.store(lender.writes(keys_of(2)))
        assert [type(outcome).__name__ for outcome in outcomes] == ["NoSpace"] * 2
        assert tier.occupancy() == Occupancy(0, 0, ROW_BYTES - 1)


@pytest.fixture
def shelf():
    forget_store("shelf")
    yield "shelf"
    forget_store("shelf")


async def test_only_a_store_with_a_name_outlives_its_tier(lender, shelf):
    for options, outcome in (({"store": shelf}, label(key_of(0))), ({}, "ChunkMissing")):
        first = dummy(**options)
        await lender.keep(first, keys_of(1))
        await first.aclose(1)
        assert await lender.recall(dummy(**options), keys_of(1)) == [outcome]


async def test_tiers_that_share_a_store_see_each_others_chunks_and_claim_no_completeness(lender, shelf):
    first, second = (dummy(store=shelf, shared=True, capacity_bytes=4 * ROW_BYTES) for _ in range(2))
    await lender.keep(first, keys_of(2))
    follower = Follower(second)
    await follower.until(lambda: follower.scanned)
    assert (follower.held, follower.complete) == (set(keys_of(2)), False)
    await lender.keep(first, keys_of(3, start=10))
    await follower.until(lambda: follower.held == {key_of(0)})  # An eviction is reported to every user.
    assert await lender.recall(second, [key_of(10)]) == [label(key_of(10))]
    assert second.occupancy() == first.occupancy() == Occupancy(4, 4 * ROW_BYTES, 4 * ROW_BYTES)
    await second.aclose(1)


async def test_a_store_has_one_capacity(shelf):
    dummy(store=shelf, capacity_bytes=4 * ROW_BYTES)
    with pytest.raises(ConfigError, match="capacity_bytes: another given"):
        dummy(store=shelf, capacity_bytes=8 * ROW_BYTES)


async def test_rows_of_another_length_are_misses(lender, shelf):
    await lender.keep(dummy(store=shelf), keys_of(1))
    longer = Lender(2 * ROW_BYTES)
    tier = DummyBackend(DummyOptions(store=shelf), tier_context(2 * ROW_BYTES, model_name="m"))
    assert await longer.recall(tier, keys_of(1)) == ["ChunkMissing"]
