"""A file's time is whatever somebody has set it to: it costs the file its place in the order, and nothing else.

On memory's file system, which keeps any time; on a disk, the kernel brings most of these within its own limits.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs.directory import FilesDirectory
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, Footer, read_footer, write_footer
from kvtier_backends.fs.disk.temporaries import ABANDONED_S, TemporarySweep, Writer
from kvtier_backends.fs.files.index import FileEntry, FileIndex
from kvtier_backends.fs.segments.segment import Header, read_header
from tests.fs.conftest import scanned

DEADLINE_S = 20.0
FAR_S = 16_725_225_600  # The year 2500.
ODD_TIMES_S = [-1, -(1 << 33), 0, FAR_S, 1 << 40]  # The last takes more than 64 bits of ns.
HOUR_S = 3_600


@pytest.fixture
def root(tmp_path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as folder:
        yield Path(folder) / "tier"


def date(path: Path, time_s: int) -> None:
    os.utime(path, ns=(time_s * 10**9, time_s * 10**9))


@pytest.mark.parametrize("time_s", ODD_TIMES_S)
async def test_a_file_of_any_date_is_a_chunk_like_any_other(open_tier, lender, path_of, time_s) -> None:
    first = await open_tier()
    await lender.keep(first, keys_of(3))
    await first.aclose(DEADLINE_S)
    date(path_of(key_of(1)), time_s)
    for _ in range(2):
        tier = await open_tier()
        await scanned(tier)
        assert list(await tier.probe(keys_of(3))) == [True] * 3
        assert await lender.recall(tier, keys_of(3)) == [label(key) for key in keys_of(3)]
        await tier.aclose(DEADLINE_S)
        assert tier.counters().scan_failed == 0


async def test_a_file_from_before_1970_goes_first(open_tier, lender, path_of) -> None:
    capacity_bytes = 16 * (8_192 + 4_096)
    first = await open_tier(capacity_bytes=capacity_bytes)
    await lender.keep(first, keys_of(4))
    await first.aclose(DEADLINE_S)
    date(path_of(key_of(0)), -HOUR_S)
    tier = await open_tier(capacity_bytes=capacity_bytes)
    await scanned(tier)
    number = 100
    while path_of(key_of(0)).exists():
        await lender.keep(tier, [key_of(number)])
        number += 1
    assert await lender.recall(tier, keys_of(4)) == ["ChunkMissing", *(label(key) for key in keys_of(3, start=1))]


async def test_a_file_from_the_future_was_used_when_it_was_first_seen(open_tier, lender, path_of) -> None:
    """And its time says so from then on, or every start would take it for the newest."""
    first = await open_tier()
    await lender.keep(first, keys_of(2))
    await first.aclose(DEADLINE_S)
    date(path_of(key_of(0)), FAR_S)
    tier = await open_tier()
    await scanned(tier)
    assert path_of(key_of(0)).stat().st_mtime <= time.time()
    assert await lender.recall(tier, keys_of(2)) == [label(key) for key in keys_of(2)]


async def test_a_file_from_the_future_expires(open_tier, lender, path_of) -> None:
    first = await open_tier()
    await lender.keep(first, keys_of(1))
    await first.aclose(DEADLINE_S)
    date(path_of(key_of(0)), FAR_S)
    tier = await open_tier(ttl_s=0.05)
    async with asyncio.timeout(DEADLINE_S):
        while path_of(key_of(0)).exists():
            await asyncio.sleep(0.01)
    assert tier.counters().expired == 1


@pytest.mark.parametrize("year", [1969, 1997, 2011, 2200])
def test_a_use_is_written_down_whatever_the_file_said_before(year) -> None:
    """Minutes are kept modulo 31 years: an hour's difference counts round the corner, too."""
    index, now_ns = FileIndex(), 1_795_000_000 * 10**9
    index.scanned([FileEntry(key_of(0), 4_096, (year - 1970) * 31_556_952 * 10**9)])
    assert index.refresh_due(key_of(0), now_ns)
    assert not index.refresh_due(key_of(0), now_ns + 60 * 10**9)


@pytest.mark.parametrize("time_s", ODD_TIMES_S)
async def test_a_segment_of_any_date_is_read_and_in_the_checkpoint(open_tier, lender, root, time_s) -> None:
    first = await open_tier(layout="segments", capacity_bytes="1MiB")
    await lender.keep(first, keys_of(3))
    await first.aclose(DEADLINE_S)
    (segment,) = root.glob("*_segments/*.seg")
    for _ in range(2):
        date(segment, time_s)
        tier = await open_tier(layout="segments", capacity_bytes="1MiB")
        await scanned(tier)  # Before that, closing leaves the last checkpoint.
        assert await lender.recall(tier, keys_of(3)) == [label(key) for key in keys_of(3)]
        await tier.aclose(DEADLINE_S)
        assert tier.counters().checkpoints_written == 1


def renumber(segment: Path, key: bytes, sequence: int) -> None:
    """Date a slot's footer to another time."""
    with segment.open("r+b") as file:
        header = read_header(file.read(4_096))
        assert isinstance(header, Header)
        for place in range(header.slots):
            file.seek(header.footer_offset(place))
            footer = read_footer(memoryview(page := bytearray(file.read(FOOTER_BYTES))))
            if isinstance(footer, Footer) and footer.key == key:
                write_footer(memoryview(page), footer._replace(sequence=sequence))
                file.seek(header.footer_offset(place))
                file.write(page)


@pytest.mark.parametrize("sequence", [(1 << 64) - 1, 1 << 63, 7_258_118_400 * 10**9])
async def test_a_slot_numbered_in_the_future_costs_nothing_but_itself(open_tier, lender, root, sequence) -> None:
    """What is stored later is used now, and expires: a number that orders chunks is no time."""
    first = await open_tier(layout="segments", capacity_bytes="1MiB", checkpoint_s=0)
    await lender.keep(first, keys_of(3))
    await first.aclose(DEADLINE_S)
    (segment,) = root.glob("*_segments/*.seg")
    renumber(segment, key_of(1), sequence)
    tier = await open_tier(layout="segments", capacity_bytes="1MiB", checkpoint_s=0, ttl_s=0.1)
    await scanned(tier)
    await lender.keep(tier, keys_of(2, start=5))
    async with asyncio.timeout(DEADLINE_S):
        while any(await tier.probe(keys_of(8))):
            await asyncio.sleep(0.01)
    await tier.aclose(DEADLINE_S)


@pytest.mark.parametrize("layout", ["files", "segments"])
async def test_what_people_see_of_a_file_from_the_future_is_no_later_than_now(
    open_tier, lender, path_of, root, layout
) -> None:
    first = await open_tier(layout=layout, capacity_bytes="1MiB")
    await lender.keep(first, keys_of(1))
    await first.aclose(DEADLINE_S)
    if layout == "files":
        date(path_of(key_of(0)), ODD_TIMES_S[-1])
    else:
        renumber(next(root.glob("*_segments/*.seg")), key_of(0), (1 << 64) - 1)
    contents = FilesDirectory.open(str(root))
    (place,) = contents.places()
    (file,) = (file for part in contents.parts(place) for file in contents.files(place, part) if file.key)
    assert file.used_at_ns <= time.time_ns()
    assert contents.remove(file)
    contents.close()


def test_a_temporary_from_the_future_is_swept_like_an_old_one(tmp_path) -> None:
    """Of another machine, where nobody can be asked who lives."""
    sweep = TemporarySweep(-1, Writer.this_process(), 1_700_000_000.0)
    name = ".00000000-1-1-1.tmp"
    assert not sweep.is_abandoned(name, 1_700_000_000.0 + ABANDONED_S / 2)
    assert sweep.is_abandoned(name, 1_700_000_000.0 + 2 * ABANDONED_S)
