import asyncio

import pytest

from kvtier.backend.contract import Abandoned, backend_class
from kvtier.errors import BackendClosed, BackendUnavailable, ConfigError
from kvtier.settings import decode
from kvtier.testing import conformance, virtual_time
from kvtier.testing.conformance import Lender, key_of, keys_of, label, tier_context
from kvtier.testing.faults import Fault, Faults, FaultyBackend
from kvtier_backends.dummy import DummyBackend, DummyOptions

pytestmark = pytest.mark.virtual_time

ROW_BYTES = 4_096
TYPE = "kvtier.testing.faults:FaultyBackend"


class WithoutFaults(
    conformance.BackendConformance,
    conformance.InventoryConformance,
    conformance.MeasuredConformance,
    conformance.BoundedConformance,
):
    chunk_bytes = ROW_BYTES
    device = DummyOptions()
    faults = Faults()

    @pytest.fixture
    async def backend(self):
        tier = FaultyBackend(DummyBackend(self.device, tier_context(ROW_BYTES)), self.faults)
        yield tier
        await tier.aclose(10)

    @pytest.fixture
    async def small(self):
        options = DummyOptions(capacity_bytes=self.room_chunks * ROW_BYTES)
        return FaultyBackend(DummyBackend(options, tier_context(ROW_BYTES)), self.faults)


class TestOffers(conformance.WrapperConformance):
    @pytest.fixture
    def wrap(self):
        return FaultyBackend


class TestAroundADevice(WithoutFaults):
    device = DummyOptions(latency_s=0.001, concurrency=4)


class TestWithDelays(WithoutFaults):
    faults = Faults(delay=1, delay_s=0.01)


@pytest.fixture
def lender():
    return Lender(ROW_BYTES)


def tier(seed=0, **faults):
    return FaultyBackend(DummyBackend(DummyOptions(), tier_context(ROW_BYTES)), Faults(**faults), seed)


@pytest.fixture
def faulty():
    return tier()


def now():
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("kind", "error"), [("failed", "TransferFailed"), ("missing", "ChunkMissing"), ("corrupt", "ChunkCorrupt")]
)
async def test_a_load_made_to_fail_writes_over_its_buffer_and_costs_its_neighbours_nothing(faulty, lender, kind, error):
    keys = keys_of(4)
    await lender.keep(faulty, keys)
    faulty.script("load", Fault(kind, keys=frozenset(keys[1:3])))
    reads = lender.reads(keys)
    assert lender.told(reads, await faulty.load(reads)) == [label(keys[0]), error, error, label(keys[3])]
    assert bytes(reads[1].into) == b"\xdb" * ROW_BYTES
    assert await lender.recall(faulty, keys) == [label(key) for key in keys]
    assert faulty.met == {kind: 2}


@pytest.mark.parametrize(("kind", "error"), [("failed", "TransferFailed"), ("no_space", "NoSpace")])
async def test_a_store_that_is_made_to_fail_leaves_the_old_chunk(faulty, lender, kind, error):
    await lender.keep(faulty, [key_of(1)])
    faulty.script("store", kind)
    outcomes = await faulty.store(lender.writes([key_of(1)], version=1))
    assert [type(outcome).__name__ for outcome in outcomes] == [error]
    assert await lender.recall(faulty, [key_of(1)]) == [label(key_of(1))]


async def test_an_unavailable_tier_does_nothing_and_a_late_one_all(faulty, lender):
    faulty.script("store", "unavailable", "late_unavailable")
    for key in keys_of(2):
        with pytest.raises(BackendUnavailable):
            await faulty.store(lender.writes([key]))
    assert await lender.recall(faulty, keys_of(2)) == ["ChunkMissing", label(key_of(1))]


@pytest.mark.parametrize("operation", ["probe", "load", "store", "delete"])
async def test_every_operation_can_be_unavailable(lender, operation):
    batch = {"load": lender.reads, "store": lender.writes}.get(operation, list)(keys_of(2))
    with pytest.raises(BackendUnavailable):
        await getattr(tier(unavailable=1), operation)(batch)


async def test_a_delay_is_waited_out_and_a_hang_may_end_by_itself(faulty, lender):
    faulty.script("load", "delay", None)
    for _ in range(2):
        await lender.recall(faulty, keys_of(2))
        assert now() == 1.0
    await lender.keep(tier(hang=1, hang_s=60), [key_of(1)])
    assert now() == 61


async def test_a_hung_call_continues_when_it_is_released(faulty, lender):
    await lender.keep(faulty, [key_of(1)])
    faulty.script("load", "hang", "hang")
    hung = [asyncio.create_task(lender.recall(faulty, [key_of(1)])) for _ in range(2)]
    await faulty.until_hanging(2)
    assert await lender.recall(faulty, [key_of(1)]) == [label(key_of(1))]
    assert not any(call.done() for call in hung)
    faulty.release()
    assert (await asyncio.gather(*hung), faulty.hanging) == ([[label(key_of(1))]] * 2, 0)


async def test_a_hung_call_that_is_cancelled_ends(faulty, lender):
    faulty.script("store", "hang")
    hung = asyncio.create_task(lender.keep(faulty, [key_of(1)]))
    await faulty.until_hanging(1)
    hung.cancel()
    await asyncio.wait({hung})
    assert hung.cancelled()
    assert (faulty.hanging, await lender.recall(faulty, [key_of(1)])) == (0, ["ChunkMissing"])


async def test_closing_leaves_hung_calls_and_counts_them(faulty, lender):
    faulty.script("store", "hang", "hang")
    hung = [asyncio.create_task(faulty.store(lender.writes([key]))) for key in keys_of(2)]
    await faulty.until_hanging(2)
    assert (await faulty.aclose(5), now()) == (Abandoned(2), 5)
    with pytest.raises(BackendClosed):
        await faulty.probe([])
    faulty.release()
    for call in hung:
        with pytest.raises(BackendClosed):
            await call
    assert await faulty.aclose(5) == Abandoned(0)


async def throng(faulty):
    lender, story = Lender(ROW_BYTES), []

    async def act(number):
        keys = keys_of(4, start=number % 7)
        try:
            outcomes = list(map(repr, await faulty.store(lender.writes(keys)))) if number % 3 else []
            outcomes += await lender.recall(faulty, keys)
        except BackendUnavailable as error:
            outcomes = [str(error)]
        story.append(f"{now()} {number} {outcomes}")

    await asyncio.gather(*map(act, range(60)))
    return [*story, str(sorted(faulty.met.items()))]


KINDS = ("unavailable", "late_unavailable", "hang", "failed", "missing", "corrupt", "no_space")
FAULTS = {**dict.fromkeys(KINDS, 0.1), "delay": 0.5, "hang_s": 3}


def test_the_same_seed_tells_the_same_story():
    stories = [virtual_time.run(throng(tier(seed, **FAULTS))) for seed in (1, 1, 2)]
    assert stories[0] == stories[1] != stories[2]


def test_rates_are_met():
    faulty = tier(5, failed=0.5, missing=0.5)
    virtual_time.run(Lender(ROW_BYTES).recall(faulty, keys_of(1_000)))
    assert 450 < faulty.met["failed"] < 550
    assert 200 < faulty.met["missing"] < 300


async def test_a_faulty_tier_is_opened_by_configuration(lender):
    given = {
        "inner": {"type": "dummy", "latency_s": "2s"},
        "faults": {"hang": 0.0, "delay_s": "1min"},
        "script": {"load": ["delay", "none", "missing"]},
        "seed": 3,
    }
    options = decode(backend_class(TYPE).options_type, given)
    faulty = await backend_class(TYPE).open(options, tier_context(ROW_BYTES))
    await lender.keep(faulty, [key_of(1)])
    times = [now()]
    for expected in (label(key_of(1)), label(key_of(1)), "ChunkMissing", label(key_of(1))):
        assert await lender.recall(faulty, [key_of(1)]) == [expected]
        times.append(now())
    assert times == [2, 64, 66, 66, 68]


INNER = {"inner": {"type": "dummy"}}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, "inner"),
        ({"inner": {}}, "inner.type"),
        ({"inner": {"type": "dumy"}}, "inner.type"),
        ({"inner": {"type": "dummy", "latency": 1}}, "inner.latency"),
        ({"inner": {"type": "dummy", "limits": {"deadline_s": 1}}}, "inner.limits: .*move it next to inner"),
        (INNER | {"faults": {"hang": 2}}, "faults.hang"),
        (INNER | {"script": {"load": ["no_space"]}}, "script"),
        (INNER | {"script": {"load": ["hung"]}}, r"script\.load"),
        (INNER | {"seed": 1 << 63}, "seed"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(given, path):
    with pytest.raises(ConfigError, match=f"^tiers.{path}"):
        decode(backend_class(TYPE).options_type, given, "tiers")
