"""A file's time is whatever somebody has set it to: it costs the file its place in the order, and nothing else.

On memory's file system, which keeps any time; on a disk, the kernel brings most of these within its own limits.
"""

import os
import tempfile
import time
from pathlib import Path

import pytest

from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.directory import FilesDirectory
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, read_footer, write_footer
from kvtier_backends.fs.files.index import FileEntry, FileIndex
from tests.fs.conftest import DEADLINE_S, ROW_BYTES, SLOT_BYTES, scanned, segments, until, until_probed, whole

FAR_S = 16_725_225_600  # The year 2500.
ODD_TIMES_S = [-1, -(1 << 33), 0, FAR_S, 1 << 40]  # The last takes more than 64 bits of ns.


@pytest.fixture
def root(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as folder:
        yield Path(folder) / "tier"


def date(path, time_s):
    os.utime(path, ns=(time_s * 10**9, time_s * 10**9))


@pytest.mark.parametrize("time_s", ODD_TIMES_S)
async def test_a_file_of_any_date_is_a_chunk_like_others(open_tier, stored, lender, place_of, layout, time_s):
    await stored(keys_of(3), layout=layout)
    for _ in range(2):
        date(place_of(key_of(1)).path, time_s)
        tier = await open_tier(layout=layout)
        await scanned(tier)  # Before that, closing leaves the last checkpoint.
        assert list(await tier.probe(keys_of(3))) == [True] * 3
        assert await lender.recall(tier, keys_of(3)) == whole(keys_of(3))
        await tier.aclose(DEADLINE_S)
        assert tier.counters().scan_failed == 0
        assert tier.counters().checkpoints_written == (1 if layout == "segments" else 0)


async def test_a_file_from_before_1970_goes_first(open_tier, stored, lender, path_of):
    await stored(keys_of(4))
    date(path_of(key_of(0)), -3_600)
    tier, number = await open_tier(capacity_bytes=16 * SLOT_BYTES), 100
    await scanned(tier)
    while path_of(key_of(0)).exists():
        await lender.keep(tier, [key_of(number := number + 1)])
    assert await lender.recall(tier, keys_of(4)) == ["ChunkMissing", *whole(keys_of(3, start=1))]


async def test_a_file_from_the_future_was_used_when_it_was_first_seen(open_tier, stored, lender, path_of):
    await stored(keys_of(2))
    date(path_of(key_of(0)), FAR_S)
    tier = await open_tier(scanned=True)
    assert path_of(key_of(0)).stat().st_mtime <= time.time()
    assert await lender.recall(tier, keys_of(2)) == whole(keys_of(2))


async def test_a_file_from_the_future_expires(open_tier, stored, path_of):
    await stored(keys_of(1))
    date(path_of(key_of(0)), FAR_S)
    tier = await open_tier(ttl_s=0.05)
    await until(lambda: not path_of(key_of(0)).exists())
    assert tier.counters().expired == 1


@pytest.mark.parametrize("year", [1969, 1997, 2011, 2200])
def test_a_use_is_written_down_whatever_the_file_said_before(year):
    """Minutes are kept modulo 31 years: an hour's difference counts round the corner, too."""
    index, now_ns = FileIndex(), 1_795_000_000 * 10**9
    index.scanned([FileEntry(key_of(0), 4_096, (year - 1970) * 31_556_952 * 10**9)])
    assert index.refresh_due(key_of(0), now_ns)
    assert not index.refresh_due(key_of(0), now_ns + 60 * 10**9)


@pytest.fixture
def renumber(place_of):
    def renumber(key, sequence):
        place, page = place_of(key), memoryview(bytearray(FOOTER_BYTES))
        write_footer(page, read_footer(memoryview(place.read()[ROW_BYTES:]))._replace(sequence=sequence))
        place.overwrite(ROW_BYTES, bytes(page))

    return renumber


@pytest.mark.parametrize("sequence", [(1 << 64) - 1, 1 << 63, 7_258_118_400 * 10**9])
async def test_a_slot_numbered_in_the_future_costs_only_itself(open_tier, stored, lender, renumber, sequence):
    """What is stored later is used now, and expires: a number that orders chunks is no time."""
    await stored(keys_of(3), layout="segments", checkpoint_s=0)
    renumber(key_of(1), sequence)
    tier = await open_tier(layout="segments", checkpoint_s=0, ttl_s=0.1, scanned=True)
    await lender.keep(tier, keys_of(2, start=5))
    await until_probed(tier, keys_of(8), there=False)


async def test_commands_see_a_file_from_the_future_no_later_than_now(stored, path_of, renumber, root, layout):
    await stored(keys_of(1), layout=layout)
    if segments(root):
        renumber(key_of(0), (1 << 64) - 1)
    else:
        date(path_of(key_of(0)), ODD_TIMES_S[-1])
    contents = FilesDirectory.open(str(root))
    (place,) = contents.places()
    (file,) = (file for part in contents.parts(place) for file in contents.files(place, part) if file.key)
    assert file.used_at_ns <= time.time_ns()
    assert contents.remove(file)
    contents.close()
