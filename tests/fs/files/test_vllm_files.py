"""A directory that vLLM's own file tier wrote can be read, and vLLM can read ours.

vLLM 0.32's reader opens a chunk's file, with O_DIRECT where it can, reads one row's length from the start, and takes a
shorter file for damage. Its writer writes the row and nothing else.
"""

import mmap
import os

import pytest

from kvtier.testing.conformance.lender import chunk, key_of, keys_of
from tests.fs.conftest import ROW_BYTES, taken_bytes, whole

KEYS = keys_of(3)


def read_as_vllm(path, flags=0):
    row, fd = mmap.mmap(-1, ROW_BYTES), os.open(path, os.O_RDONLY | flags)
    try:
        assert os.readv(fd, [row]) == ROW_BYTES
    finally:
        os.close(fd)
    return row[:]


def write_as_vllm(path, block, flags=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    row = mmap.mmap(-1, len(block))
    row[:] = block
    aside = f"{path}_1234567890.tmp"
    fd = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC | flags, 0o644)
    try:
        assert os.write(fd, row) == len(block)
    finally:
        os.close(fd)
    os.replace(aside, path)


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("flags", [os.O_DIRECT, 0])
async def test_vllm_reads_our_chunks(open_tier, lender, path_of, io, flags):
    await lender.keep(await open_tier(io=io), KEYS)
    for key in KEYS:
        assert read_as_vllm(path_of(key), flags) == chunk(key, 0, ROW_BYTES)


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("flags", [os.O_DIRECT, 0])
async def test_vllms_chunks_are_read_if_they_are_accepted(open_tier, lender, path_of, io, flags):
    for key in KEYS:
        write_as_vllm(path_of(key), chunk(key, 0, ROW_BYTES), flags)
        lender.chunk(key)
    tier = await open_tier(io=io, unverified="accept")
    assert list(await tier.probe(keys_of(4))) == [True, True, True, False]
    assert await lender.recall(tier, KEYS) == whole(KEYS)
    assert tier.counters().unverified_accepted == 3
    assert tier.occupancy().used_bytes >= 3 * ROW_BYTES


async def test_vllms_chunks_are_refused_by_default_and_left_alone(open_tier, lender, path_of):
    for key in KEYS:
        write_as_vllm(path_of(key), chunk(key, 0, ROW_BYTES))
    tier = await open_tier()
    assert list(await tier.probe(KEYS)) == [False, False, False]
    assert await lender.recall(tier, KEYS) == ["ChunkMissing"] * 3
    assert (tier.counters().unverified_refused, tier.counters().corrupt) == (3, {})
    assert read_as_vllm(path_of(KEYS[0])) == chunk(KEYS[0], 0, ROW_BYTES)


async def test_a_chunk_of_vllms_in_place_of_ours_takes_its_room_until_it_goes(open_tier, lender, path_of, root):
    tier, keys = await open_tier(capacity_bytes=1 << 20), keys_of(16)
    await lender.keep(tier, keys)
    for key in keys:
        write_as_vllm(path_of(key), chunk(key, 0, ROW_BYTES))
    assert await lender.recall(tier, keys) == ["ChunkMissing"] * 16
    for start in range(100, 160, 10):
        await lender.keep(tier, keys_of(10, start=start))
        assert taken_bytes(root) <= 1 << 20
    assert not any(path_of(key).exists() for key in keys)


@pytest.mark.parametrize("unverified", ["accept", "refuse"])
async def test_a_store_of_ours_makes_vllms_chunk_a_verified_one(open_tier, lender, path_of, unverified):
    write_as_vllm(path_of(key_of(0)), b"\x01" * ROW_BYTES)
    tier = await open_tier(unverified=unverified, holds=keys_of(1))
    assert await lender.recall(tier, keys_of(1)) == whole(keys_of(1))
    assert tier.counters().unverified_accepted == tier.counters().unverified_refused == 0


async def test_a_torn_chunk_of_vllms_is_a_miss_and_its_temporaries_are_no_chunks(open_tier, lender, path_of):
    path = path_of(key_of(0))
    path.parent.mkdir(parents=True)
    path.with_name(f"{path.name}_1234567890.tmp").write_bytes(bytes(ROW_BYTES))
    tier = await open_tier(unverified="accept")
    assert (list(await tier.probe(keys_of(1))), tier.occupancy().chunks) == ([False], 0)
    path.write_bytes(bytes(ROW_BYTES - 4_096))
    assert await lender.recall(tier, keys_of(1)) == ["ChunkCorrupt"]
