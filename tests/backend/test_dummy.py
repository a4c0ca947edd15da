import asyncio
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backend.contract import Occupancy, backend_class
from kvtier.errors import ConfigError
from kvtier.settings import decode
from kvtier.testing.conformance import (
    AdvisedConformance,
    BackendConformance,
    BoundedConformance,
    DurableBackendConformance,
    Follower,
    InventoryConformance,
    Lender,
    MeasuredConformance,
    NamespacedConformance,
    key_of,
    keys_of,
    label,
    tier_context,
)
from kvtier_backends.dummy import DummyBackend, DummyOptions, forget_store
from kvtier_backends.dummy.store import BURST_SHARE, INFLOW_SHARE, DummyDevice
from kvtier_backends.fs.disk import write_budget as of_fs

DEVICE = DummyOptions(latency_s=0.001, bandwidth_bytes_per_s=200_000_000, concurrency=4)


class Suites(
    BackendConformance,
    DurableBackendConformance,
    NamespacedConformance,
    InventoryConformance,
    MeasuredConformance,
    BoundedConformance,
    AdvisedConformance,
):
    """Every suite there is, over one named store; a subclass says how fast the device is."""

    chunk_bytes = 8_192
    options: DummyOptions

    @pytest.fixture
    async def reopen(self):
        forget_store("suite")
        opened = []

        async def reopen():
            if opened:
                await opened[-1].aclose(10)
            opened.append(DummyBackend(self.named(), tier_context(self.chunk_bytes)))
            return opened[-1]

        yield reopen
        for tier in opened:
            await tier.aclose(10)

    @pytest.fixture
    async def backend(self, reopen):
        return await reopen()

    @pytest.fixture
    async def neighbour(self, backend):
        tier = DummyBackend(self.named(), tier_context(self.chunk_bytes, model_name="other"))
        yield tier
        await tier.aclose(10)

    @pytest.fixture
    async def small(self):
        capacity_bytes = self.room_chunks * self.chunk_bytes
        context = tier_context(self.chunk_bytes)
        return DummyBackend(self.named(store=None, capacity_bytes=capacity_bytes), context)

    def named(self, **changes):
        return msgspec.structs.replace(self.options, **{"store": "suite", **changes})


class TestAnInstantDummy(Suites):
    options = DummyOptions()


@pytest.mark.virtual_time
class TestADeviceInVirtualTime(Suites):
    options = DEVICE


class TestADeviceInRealTime(BackendConformance):
    chunk_bytes = 8_192

    @pytest.fixture
    async def backend(self):
        tier = DummyBackend(DEVICE, tier_context(self.chunk_bytes))
        yield tier
        await tier.aclose(10)


ROW_BYTES = 4_096


@pytest.fixture
def lender():
    return Lender(ROW_BYTES)


def dummy(name="0:dummy", model_name="m", **options) -> DummyBackend:
    return DummyBackend(DummyOptions(**options), tier_context(ROW_BYTES, name=name, model_name=model_name))


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_an_instant_tier_never_waits(lender):
    keys = keys_of(4)

    def at_once(call):
        with pytest.raises(StopIteration) as ended:
            call.send(None)
        return ended.value.value

    tier = dummy()
    assert at_once(tier.store(lender.writes(keys))) == [None] * 4
    assert at_once(tier.probe(keys)) == [True] * 4
    reads = lender.reads(keys)
    assert lender.told(reads, at_once(tier.load(reads))) == [label(key) for key in keys]
    at_once(tier.delete(keys))


@pytest.mark.virtual_time
class TestTime:
    """A device's time, to the bit: batches of 8 chunks of 4,096 bytes."""

    async def test_latency_is_paid_once_by_what_fits_into_the_slots(self, lender):
        tier = dummy(latency_s=0.5, concurrency=8)
        await lender.keep(tier, keys_of(8))
        assert now() == 0.5

    async def test_what_does_not_fit_into_the_slots_waits_its_turn(self, lender):
        tier = dummy(latency_s=0.5, concurrency=3)
        await lender.keep(tier, keys_of(8))
        assert now() == 1.5

    async def test_the_link_sends_one_byte_after_the_other(self, lender):
        tier = dummy(bandwidth_bytes_per_s=ROW_BYTES)
        await lender.keep(tier, keys_of(8))
        assert now() == 8
        await lender.recall(tier, keys_of(8))
        assert now() == 16

    async def test_stores_may_be_slower_than_loads_and_share_their_link(self, lender):
        tier = dummy(bandwidth_bytes_per_s=ROW_BYTES, store_bandwidth_bytes_per_s=ROW_BYTES // 4)
        await lender.keep(tier, keys_of(8))
        assert now() == 32
        await lender.recall(tier, keys_of(8))
        assert now() == 40
        await asyncio.gather(lender.keep(tier, keys_of(1)), lender.recall(tier, keys_of(8)))
        assert now() == 52

    async def test_a_write_budget_allows_a_burst_and_then_its_daily_rate(self, lender):
        """As an fs tier's: an eighth of the day's chunks at once, 27 of 32 of them evenly over the day."""
        day_chunks = 320
        tier = dummy(write_budget_bytes_per_day=day_chunks * ROW_BYTES, bandwidth_bytes_per_s=ROW_BYTES)
        outcomes = await tier.store(lender.writes(keys_of(50)))
        assert [outcome is None for outcome in outcomes] == [True] * 40 + [False] * 10
        assert "the day's write budget is used up" in str(outcomes[-1])
        assert now() == 40  # What is not written takes no time.
        await asyncio.sleep(86_400 / 10)
        outcomes = await tier.store(lender.writes(keys_of(50, start=50)))
        assert [outcome is None for outcome in outcomes] == [True] * 27 + [False] * 23

    async def test_latency_overlaps_with_others_bytes(self, lender):
        tier = dummy(latency_s=0.5, bandwidth_bytes_per_s=ROW_BYTES, concurrency=2)
        await lender.keep(tier, keys_of(8))
        assert now() == 8.5

    async def test_calls_at_once_share_the_device(self, lender):
        tier = dummy(bandwidth_bytes_per_s=ROW_BYTES)
        ended_at = []

        async def store(start):
            await lender.keep(tier, keys_of(4, start))
            ended_at.append(now())

        await asyncio.gather(store(0), store(10), store(20))
        assert ended_at == [4, 8, 12]

    async def test_an_idle_device_owes_nothing(self, lender):
        tier = dummy(latency_s=1, bandwidth_bytes_per_s=ROW_BYTES)
        await lender.keep(tier, keys_of(1))
        await asyncio.sleep(100)
        await lender.keep(tier, keys_of(1))
        assert now() == 104

    async def test_a_miss_costs_its_latency_and_no_bytes(self, lender):
        tier = dummy(latency_s=0.5, bandwidth_bytes_per_s=1)
        await lender.recall(tier, keys_of(8))
        assert now() == 0.5

    async def test_probing_and_deleting_cost_a_latency_a_batch(self):
        tier = dummy(latency_s=0.5, concurrency=1, bandwidth_bytes_per_s=1)
        await tier.probe(keys_of(8))
        await tier.delete(keys_of(8))
        assert now() == 1

    async def test_a_cancelled_call_has_used_the_device_all_the_same(self, lender):
        tier = dummy(bandwidth_bytes_per_s=ROW_BYTES)
        call = asyncio.create_task(lender.keep(tier, keys_of(8)))
        await asyncio.sleep(1)
        call.cancel()
        await asyncio.wait({call})
        await lender.keep(tier, keys_of(1))
        assert now() == 9


def test_a_write_budget_has_the_shares_of_an_fs_tiers():
    assert (BURST_SHARE, INFLOW_SHARE) == (of_fs.BURST_PARTS / 32, of_fs.INFLOW_PARTS / 32)


@given(
    latency_s=st.sampled_from([0.0, 0.5, 3.0]),
    seconds_per_chunk=st.sampled_from([0.0, 0.25, 2.0]),
    slots=st.integers(1, 5),
    calls=st.lists(st.tuples(st.sampled_from([0.0, 0.1, 10.0]), st.integers(0, 12)), max_size=8),
)
def test_a_device_is_never_faster_than_its_figures(latency_s, seconds_per_chunk, slots, calls):
    bandwidth_bytes_per_s = ROW_BYTES / seconds_per_chunk if seconds_per_chunk else None
    device = DummyDevice(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s, slots=slots)
    begun_at, booked, time_s = None, 0, 0.0
    for pause_s, chunks in calls:
        time_s += pause_s
        begun_at = time_s if begun_at is None else begun_at
        booked += chunks
        ends_at = device.book(time_s, [ROW_BYTES] * chunks)
        alone_s = math.ceil(chunks / slots) * latency_s
        assert ends_at >= time_s + max(alone_s, chunks * seconds_per_chunk) - 1e-9
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

    async def test_a_prefix_outlives_its_continuation(self, lender):
        tier = dummy(capacity_bytes=4 * ROW_BYTES)
        await lender.keep(tier, keys_of(4))
        await lender.recall(tier, keys_of(4))
        await lender.keep(tier, keys_of(2, start=10))
        assert await tier.probe(keys_of(4)) == [True, True, False, False]

    async def test_a_batch_without_room_is_kept_from_its_beginning(self, lender):
        tier = dummy(capacity_bytes=4 * ROW_BYTES)
        await lender.keep(tier, keys_of(3, start=10))
        outcomes = await tier.store(lender.writes(keys_of(6)))
        assert [type(outcome).__name__ for outcome in outcomes] == ["NoneType"] * 4 + ["NoSpace"] * 2
        assert "4,096 bytes into tier 0:dummy, 16,384 of 16,384 bytes used" in str(outcomes[-1])

    async def test_from_halfway_to_the_low_water_mark_chunks_go_down_to_it(self, lender):
        tier = dummy(capacity_bytes=20 * ROW_BYTES, low_water=0.8)
        await lender.keep(tier, keys_of(18))
        assert tier.occupancy().chunks == 18
        await lender.keep(tier, [key_of(18)])
        assert tier.occupancy().chunks == 16
        assert await tier.probe(keys_of(19)) == [True] * 15 + [False] * 3 + [True]

    async def test_a_batch_that_is_above_the_low_water_mark_by_itself_is_kept(self, lender):
        tier = dummy(capacity_bytes=4 * ROW_BYTES, low_water=0.25)
        await lender.keep(tier, keys_of(4))
        assert tier.occupancy().chunks == 4

    async def test_a_tier_smaller_than_a_chunk_holds_none(self, lender):
        tier = dummy(capacity_bytes=ROW_BYTES - 1)
        outcomes = await tier.store(lender.writes(keys_of(2)))
        assert [type(outcome).__name__ for outcome in outcomes] == ["NoSpace"] * 2
        assert tier.occupancy() == Occupancy(0, 0, ROW_BYTES - 1)


class TestNamedStores:
    @pytest.fixture(autouse=True)
    def new_store(self):
        forget_store("shelf")
        yield
        forget_store("shelf")

    async def test_a_store_with_a_name_outlives_its_tier(self, lender):
        first = dummy(store="shelf")
        await lender.keep(first, keys_of(2))
        await first.aclose(1)
        assert await lender.recall(dummy(store="shelf"), keys_of(2)) == [label(key) for key in keys_of(2)]

    async def test_without_a_name_it_does_not(self, lender):
        await lender.keep(dummy(), keys_of(2))
        assert await dummy().probe(keys_of(2)) == [False, False]

    async def test_one_namespace_has_one_user(self):
        first = dummy(store="shelf")
        with pytest.raises(ConfigError, match=r"^store: in use"):
            dummy(store="shelf")
        with pytest.raises(ConfigError, match=r"^store: in use"):
            dummy(store="shelf", shared=True)
        await first.aclose(1)
        dummy(store="shelf", shared=True)

    async def test_users_who_share_see_each_others_chunks_and_claim_no_completeness(self, lender):
        first, second = (dummy(store="shelf", shared=True) for _ in range(2))
        await lender.keep(first, keys_of(2))
        follower = Follower(second)
        await follower.until(lambda: follower.scanned)
        assert (follower.held, follower.complete) == (set(keys_of(2)), False)
        await lender.keep(first, keys_of(2, start=10))
        assert await lender.recall(second, [key_of(10)]) == [label(key_of(10))]
        await second.aclose(1)

    async def test_room_is_shared_and_every_eviction_is_reported(self, lender):
        first = dummy(store="shelf", capacity_bytes=4 * ROW_BYTES)
        other = dummy(store="shelf", capacity_bytes=4 * ROW_BYTES, model_name="other")
        await lender.keep(first, keys_of(3))
        follower = Follower(first)
        await follower.until(lambda: follower.scanned)
        await lender.keep(other, keys_of(3))
        await follower.until(lambda: follower.held == {key_of(0)})
        assert other.occupancy() == first.occupancy() == Occupancy(4, 4 * ROW_BYTES, 4 * ROW_BYTES)
        await first.aclose(1)

    async def test_a_store_has_one_capacity(self):
        dummy(store="shelf", capacity_bytes=4 * ROW_BYTES)
        with pytest.raises(ConfigError, match="capacity_bytes: 8,192 given, 16,384"):
            dummy(store="shelf", capacity_bytes=2 * ROW_BYTES, model_name="other")

    async def test_rows_of_another_length_are_misses(self, lender):
        first = dummy(store="shelf")
        await lender.keep(first, keys_of(1))
        await first.aclose(1)
        longer = Lender(2 * ROW_BYTES)
        tier = DummyBackend(DummyOptions(store="shelf"), tier_context(2 * ROW_BYTES, model_name="m"))
        assert await longer.recall(tier, keys_of(1)) == ["ChunkMissing"]


async def test_a_tier_is_opened_by_configuration(lender):
    tier_type = backend_class("dummy")
    given = {"latency_s": "1ms", "bandwidth_bytes_per_s": "1GiB", "capacity_bytes": "16KiB", "concurrency": 2}
    tier = await tier_type.open(decode(tier_type.options_type, given), tier_context(ROW_BYTES))
    await lender.keep(tier, keys_of(1))
    assert tier.occupancy() == Occupancy(1, ROW_BYTES, 16_384)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("latency_s", -1),
        ("latency_s", "fast"),
        ("bandwidth_bytes_per_s", 0),
        ("concurrency", 0),
        ("capacity_bytes", "16 pages"),
        ("colour", "blue"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(field, value):
    with pytest.raises(ConfigError, match=f"^tiers.{field}: "):
        decode(DummyOptions, {field: value}, "tiers")
