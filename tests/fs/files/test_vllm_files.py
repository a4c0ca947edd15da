"""A directory that vLLM's own file tier wrote can be read, and vLLM can read ours.

vLLM 0.32's reader opens a chunk's file, with O_DIRECT where it can, reads one row's length from the start, and takes a
shorter file for damage. Its writer writes the row and nothing else.
"""

import json
import mmap
import os
from pathlib import Path

import pytest

from kvtier.testing.conformance.lender import chunk, key_of, keys_of, label
from tests.fs.conftest import taken_bytes


def read_as_vllm(path: Path, row_bytes: int, flags: int) -> bytes:
    row = mmap.mmap(-1, row_bytes)
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        assert os.readv(fd, [row]) == row_bytes
    finally:
        os.close(fd)
    return row[:]


def write_as_vllm(path: Path, block: bytes, flags: int) -> None:
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
async def test_vllm_reads_our_chunks(open_tier, lender, path_of, io, flags, row_bytes) -> None:
    tier = await open_tier(io=io)
    await lender.keep(tier, keys_of(3))
    for key in keys_of(3):
        assert read_as_vllm(path_of(key), row_bytes, flags) == chunk(key, 0, row_bytes)


async def test_vllm_finds_its_config(open_tier, root, mapper) -> None:
    await open_tier()
    config = json.loads((root / mapper.config_name).read_bytes())
    assert config["model_name"] == "org/model"
    assert config["inference_engine"] == "vllm"


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("flags", [os.O_DIRECT, 0])
async def test_vllms_chunks_are_read_if_they_are_accepted(open_tier, lender, path_of, io, flags, row_bytes) -> None:
    for key in keys_of(3):
        write_as_vllm(path_of(key), chunk(key, 0, row_bytes), flags)
        lender.chunk(key)
    tier = await open_tier(io=io, unverified="accept")
    assert list(await tier.probe(keys_of(4))) == [True, True, True, False]
    assert await lender.recall(tier, keys_of(3)) == [label(key) for key in keys_of(3)]
    assert tier.counters().unverified_accepted == 3
    assert tier.occupancy().used_bytes >= 3 * row_bytes


async def test_vllms_chunks_are_refused_by_default_and_left_alone(open_tier, lender, path_of, row_bytes) -> None:
    for key in keys_of(3):
        write_as_vllm(path_of(key), chunk(key, 0, row_bytes), 0)
    tier = await open_tier()
    assert list(await tier.probe(keys_of(3))) == [False, False, False]
    assert await lender.recall(tier, keys_of(3)) == ["ChunkMissing"] * 3
    assert tier.counters().unverified_refused == 3
    assert tier.counters().corrupt == {}
    assert read_as_vllm(path_of(key_of(0)), row_bytes, 0) == chunk(key_of(0), 0, row_bytes)


async def test_a_chunk_of_vllms_in_place_of_ours_takes_its_room_until_it_goes_for_it(
    open_tier, lender, path_of, root, row_bytes
) -> None:
    """Refused, it is there all the same: what is stored after it has no more room than before."""
    capacity_bytes = 1 << 20
    tier = await open_tier(capacity_bytes=capacity_bytes)
    keys = keys_of(16)
    await lender.keep(tier, keys)
    for key in keys:
        write_as_vllm(path_of(key), chunk(key, 0, row_bytes), 0)
    assert await lender.recall(tier, keys) == ["ChunkMissing"] * 16
    for start in range(100, 180, 10):
        await lender.keep(tier, keys_of(10, start=start))
        assert taken_bytes(root) <= capacity_bytes
    assert not any(path_of(key).exists() for key in keys)


@pytest.mark.parametrize("unverified", ["accept", "refuse"])
async def test_a_store_of_ours_makes_vllms_chunk_a_verified_one(
    open_tier, lender, path_of, unverified, row_bytes
) -> None:
    write_as_vllm(path_of(key_of(0)), b"\x01" * row_bytes, 0)
    tier = await open_tier(unverified=unverified)
    await lender.keep(tier, [key_of(0)])
    assert await lender.recall(tier, [key_of(0)]) == [label(key_of(0))]
    assert tier.counters().unverified_accepted == tier.counters().unverified_refused == 0


async def test_a_torn_chunk_of_vllms_is_a_miss(open_tier, lender, path_of, row_bytes) -> None:
    write_as_vllm(path_of(key_of(0)), bytes(row_bytes - 4_096), 0)
    tier = await open_tier(unverified="accept")
    assert await lender.recall(tier, [key_of(0)]) == ["ChunkCorrupt"]


async def test_vllms_temporaries_are_no_chunks(open_tier, path_of, row_bytes) -> None:
    path = path_of(key_of(0))
    path.parent.mkdir(parents=True)
    path.with_name(f"{path.name}_1234567890.tmp").write_bytes(bytes(row_bytes))
    tier = await open_tier(unverified="accept")
    assert list(await tier.probe([key_of(0)])) == [False]
    assert tier.occupancy().chunks == 0
