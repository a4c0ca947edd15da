"""The memory tier keeps the contract, takes its memory as it needs it, and gives all of it back."""

import os
from contextlib import suppress

import pytest

from kvtier.errors import ConfigError
from kvtier.policies import known_policies
from kvtier.testing import conformance
from kvtier.testing.conformance import Lender, keys_of, tier_context
from kvtier_backends.fs import MemoryBackend, MemoryOptions
from kvtier_backends.fs.segments import pool
from tests.fs.conftest import DEADLINE_S, kinds, whole
from tests.testing.suites import Reopened, open_with

__all__ = ["open_with"]

ROW_BYTES = 65_536


class TestMemory(
    Reopened,
    conformance.BackendConformance,
    conformance.InventoryConformance,
    conformance.MeasuredConformance,
    conformance.DescribedConformance,
):
    chunk_bytes = 8_192

    @pytest.fixture
    def open_tier(self, open_with):
        async def open_tier(**context):
            return await open_with(MemoryBackend, capacity_bytes="256MiB", chunk_bytes=self.chunk_bytes, **context)

        return open_tier


class Small:
    chunk_bytes = ROW_BYTES

    @pytest.fixture
    def policy(self):
        return "lru"

    @pytest.fixture
    async def small(self, open_with, policy):
        room_bytes = 4_096 + 24 * (ROW_BYTES + 4_096)  # For 16 chunks, and 8 more that are being written.
        return await open_with(MemoryBackend, capacity_bytes=room_bytes, eviction_policy=policy, chunk_bytes=ROW_BYTES)


@pytest.mark.parametrize("policy", known_policies())
class TestMemoryWithinACapacity(Small, conformance.BoundedConformance):
    pass


class TestMemoryByAdvice(Small, conformance.AdvisedConformance):
    pass


def pools():
    """Yield the descriptors of this process's segments in memory."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if "kvtier-pool" in os.readlink(f"/proc/self/fd/{fd}"):
                yield int(fd)


def pool_bytes():
    return sum(os.fstat(fd).st_blocks * 512 for fd in pools())


async def test_memory_is_taken_as_it_is_needed_never_above_the_capacity_and_given_back(open_with):
    before_bytes, lender = pool_bytes(), Lender(ROW_BYTES)
    tier = await open_with(MemoryBackend, capacity_bytes="40MiB", chunk_bytes=ROW_BYTES)
    assert pool_bytes() == before_bytes
    sizes = []
    for start in range(0, 1_000, 50):
        await lender.keep(tier, keys_of(50, start=start))
        sizes.append(pool_bytes() - before_bytes)
    assert sizes[0] <= 17 << 20
    assert 36 << 20 < max(sizes) <= 40 << 20
    assert tier.occupancy().used_bytes <= 40 << 20
    await tier.aclose(DEADLINE_S)
    assert pool_bytes() == before_bytes


async def test_without_memory_for_a_segment_chunks_are_refused_and_the_rest_stays(open_with, monkeypatch):
    lender = Lender(ROW_BYTES)
    tier = await open_with(MemoryBackend, capacity_bytes="1GiB", chunk_bytes=ROW_BYTES)
    await lender.keep(tier, keys_of(20))

    def none_is_free(size_bytes):
        raise ConfigError(f"{size_bytes:,} bytes of host memory were asked for and 0 are free")

    monkeypatch.setattr(pool, "require_free", none_is_free)
    outcomes = kinds(await tier.store(lender.writes(keys_of(300, start=100))))
    stored = outcomes.count("NoneType")
    assert outcomes == ["NoneType"] * stored + ["NoSpace"] * (300 - stored)
    assert 16 << 20 >= stored * ROW_BYTES > 14 << 20  # The coldest chunks have gone for the new ones.
    assert await lender.recall(tier, keys_of(50, start=100)) == whole(keys_of(50, start=100))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"capacity_bytes": 4_096}, "capacity_bytes: 4,096 bytes given, at least one chunk's"),
        ({"capacity_bytes": "1GiB", "eviction_policy": "newest"}, "eviction_policy: 'newest' is no policy"),
    ],
)
async def test_options_that_hold_no_chunk_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        await MemoryBackend.open(MemoryOptions(**options), tier_context(ROW_BYTES))


async def test_a_chunk_that_was_overwritten_in_memory_is_corrupt_and_dropped(open_with):
    lender, (key,) = Lender(ROW_BYTES), keys_of(1)
    tier = await open_with(MemoryBackend, capacity_bytes="16MiB", chunk_bytes=ROW_BYTES)
    await lender.keep(tier, [key])
    chunk = lender.chunk(key)
    for fd in pools():
        if (at := os.pread(fd, 32 << 20, 0).find(chunk)) >= 0:
            os.pwrite(fd, bytes([chunk[7] ^ 1]), at + 7)
    assert await lender.recall(tier, [key]) == ["ChunkCorrupt"]
    assert await lender.recall(tier, [key]) == ["ChunkMissing"]
    assert tier.counters().corrupt == {"payload": 1}
