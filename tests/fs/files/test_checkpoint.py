"""What a tier knew, the next start knows at once; whatever is wrong with that, the scan corrects."""

import asyncio
import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.backend.contract import Added, InventoryEvent, Removed, ScanDone, TierContext
from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.errors import ConfigError
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.counters import Counters
from kvtier_backends.fs.disk.checkpoint import KEY_BYTES_MAX
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.files.checkpoint import Checkpoint
from kvtier_backends.fs.files.index import Held, Snapshot
from kvtier_backends.fs.files.recency import Idle
from tests.fs.conftest import MakeSystemCall

DEADLINE_S = 20.0
NOW_NS = 1_700_000_000_000_000_000


@pytest.fixture
def index_file(root: Path, mapper: FileMapper) -> Path:
    return root / mapper.folder / "index_r0"


@pytest.fixture
def checkpoint(open_folder: Callable[..., Folder], mapper: FileMapper, row_bytes: int) -> Checkpoint:
    return Checkpoint(open_folder(), mapper, Counters(), row_bytes)


def snapshot(chunks: list[Held]) -> Snapshot:
    """Return an index in which these chunks were found at the start."""
    entries = [chunk.allocated_bytes // 512 for chunk in chunks]
    idle = Idle()
    idle.add((chunk.used_at_ns, chunk.key) for chunk in chunks)
    return Snapshot([chunk.key for chunk in chunks], entries, idle, {})


def read(checkpoint: Checkpoint) -> list[Held]:
    return [chunk for batch in checkpoint.read() for chunk in batch]


def content_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def checkpoints_below(root: Path) -> set[str]:
    return {path.name for path in root.glob("*/index*")}


async def next_of(report: AsyncIterator[InventoryEvent]) -> InventoryEvent:
    async with asyncio.timeout(DEADLINE_S):
        return await anext(report)


async def scanned(tier: FsBackend) -> set[OffloadKey]:
    """Wait for the scan; return what is there then."""
    there: set[OffloadKey] = set()
    async with asyncio.timeout(DEADLINE_S):
        async for event in tier.watch():
            match event:
                case Added(keys):
                    there |= set(keys)
                case Removed(keys):
                    there -= set(keys)
                case ScanDone():
                    return there
    raise AssertionError("the report ended")


HELD = st.builds(
    Held,
    key=st.builds(make_offload_key, st.binary(max_size=KEY_BYTES_MAX - 4), st.integers(0, 2**32 - 1)),
    allocated_bytes=st.integers(0, (1 << 24) - 1).map(lambda sectors: sectors * 512),
    used_at_ns=st.integers(0, 2**62),
    loadable=st.just(True),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(HELD, unique_by=lambda chunk: chunk.key, max_size=20))
def test_what_was_written_is_read_newest_first(checkpoint: Checkpoint, chunks: list[Held]) -> None:
    checkpoint.write(snapshot(chunks), NOW_NS)
    assert sorted(read(checkpoint)) == sorted(chunks)
    times = [chunk.used_at_ns for chunk in read(checkpoint)]
    assert times == sorted(times, reverse=True)


def test_keys_that_are_too_long_are_left_to_the_scan(checkpoint: Checkpoint) -> None:
    chunks = [Held(OffloadKey(bytes(KEY_BYTES_MAX + 1)), 512, 1), Held(OffloadKey(bytes(KEY_BYTES_MAX)), 512, 2)]
    checkpoint.write(snapshot(chunks), NOW_NS)
    assert read(checkpoint) == chunks[1:]


def test_a_checkpoint_has_a_limit_and_keeps_the_newest(
    open_folder: Callable[..., Folder],
    mapper: FileMapper,
    row_bytes: int,
    index_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_backends.fs.files.checkpoint.BYTES_MAX", 1_000)
    checkpoint = Checkpoint(open_folder(), mapper, Counters(), row_bytes)
    chunks = [Held(key_of(number), 512, number) for number in range(100)]
    checkpoint.write(snapshot(chunks), NOW_NS)
    assert index_file.stat().st_size <= 1_000
    kept = read(checkpoint)
    assert kept == chunks[: -len(kept) - 1 : -1]
    assert 10 < len(kept) < 100


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_checkpoint_is_none(checkpoint: Checkpoint, index_file: Path, data: st.DataObject) -> None:
    checkpoint.write(snapshot([Held(key, 512, 1) for key in keys_of(3)]), NOW_NS)
    content = bytearray(index_file.read_bytes())
    match data.draw(st.sampled_from(["flip", "cut", "extend", "zero"])):
        case "flip":
            bit = data.draw(st.integers(0, 8 * len(content) - 1))
            content[bit // 8] ^= 1 << bit % 8
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "extend":
            content += data.draw(st.binary(min_size=1, max_size=200))
        case "zero":
            start = data.draw(st.integers(0, 60))
            content[start:] = bytes(len(content) - start)
    index_file.write_bytes(content)
    assert read(checkpoint) == []


def test_another_versions_checkpoint_is_none(checkpoint: Checkpoint, index_file: Path) -> None:
    from xxhash import xxh3_64_intdigest

    checkpoint.write(snapshot([Held(key_of(0), 512, 1)]), NOW_NS)
    content = bytearray(index_file.read_bytes())
    struct.pack_into("<I", content, 8, 2)
    struct.pack_into("<Q", content, len(content) - 8, xxh3_64_intdigest(content[:-8]))
    index_file.write_bytes(content)
    assert read(checkpoint) == []


def test_another_layouts_or_row_lengths_checkpoint_is_none(
    open_folder: Callable[..., Folder], mapper: FileMapper, row_bytes: int
) -> None:
    folder, chunks = open_folder(), [Held(key_of(0), 512, 1)]
    Checkpoint(folder, mapper, Counters(), row_bytes).write(snapshot(chunks), NOW_NS)
    other = FileMapper(Namespace(model_name="org/model", layout="LBHNC"))
    counters = Counters()
    assert read(Checkpoint(folder, other, counters, row_bytes)) == []
    assert read(Checkpoint(folder, mapper, counters, 2 * row_bytes)) == []
    assert counters.totals().checkpoints_ignored == 2
    assert read(Checkpoint(folder, mapper, counters, row_bytes)) == chunks


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_one_that_cannot_be_written_leaves_the_last(
    open_folder: Callable[..., Folder], mapper: FileMapper, row_bytes: int, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, chunks = Counters(), [Held(key_of(0), 512, 1)]
    checkpoint = Checkpoint(open_folder(), mapper, counters, row_bytes)
    checkpoint.write(snapshot(chunks), NOW_NS)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        checkpoint.write(snapshot([]), NOW_NS)
    assert read(checkpoint) == chunks
    assert (counters.totals().checkpoints_written, counters.totals().checkpoints_failed) == (1, 1)


async def test_the_tier_answers_from_it_before_it_has_scanned_anything(
    open_tier, lender: Lender, system_call: MakeSystemCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await open_tier()
    await lender.keep(before, keys_of(3))
    occupied = before.occupancy()
    await before.aclose(DEADLINE_S)
    listing = system_call("scandir", sticks=True)
    tier = await open_tier()
    report = tier.watch()
    assert set((await next_of(report)).keys) == set(keys_of(3))  # type: ignore[union-attr]

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("asked the file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        assert list(await tier.probe(keys_of(3))) == [True] * 3
    assert list(await tier.probe(keys_of(4))) == [True, True, True, False]
    assert tier.occupancy().chunks == 3
    assert await lender.recall(tier, keys_of(3)) == [label(key) for key in keys_of(3)]
    listing.let_go()
    assert await next_of(report) == ScanDone(complete=True)
    assert tier.occupancy() == occupied
    assert tier.counters().checkpoint_chunks == 3
    await report.aclose()


async def test_the_scan_corrects_it(
    open_tier, lender: Lender, system_call: MakeSystemCall, path_of, row_bytes: int
) -> None:
    """Of five chunks, one is gone, one cut off, one grown on the disk; and there is one more."""
    before = await open_tier()
    await lender.keep(before, keys_of(6))
    path_of(key_of(5)).rename(path_of(key_of(5)).with_suffix(".aside"))
    assert await lender.recall(before, [key_of(5)]) == ["ChunkMissing"]
    await before.aclose(DEADLINE_S)
    path_of(key_of(0)).unlink()
    os.truncate(path_of(key_of(1)), 100)
    path_of(key_of(5)).with_suffix(".aside").rename(path_of(key_of(5)))
    listing = system_call("scandir", sticks=True)
    tier = await open_tier()
    report = tier.watch()
    assert set((await next_of(report)).keys) == set(keys_of(5))  # type: ignore[union-attr]
    listing.let_go()
    assert await next_of(report) == Added([key_of(5)])
    assert await next_of(report) == ScanDone(complete=True)
    gone = await next_of(report)
    assert isinstance(gone, Removed)
    assert set(gone.keys) == {key_of(0), key_of(1)}
    await report.aclose()
    assert list(await tier.probe(keys_of(6))) == [False, False, True, True, True, True]
    found = tier.occupancy()
    await tier.aclose(DEADLINE_S)
    fresh = await open_tier(checkpoint_s=0)
    assert await scanned(fresh) == set(keys_of(6)[2:])
    assert fresh.occupancy() == found


async def test_what_happens_beside_the_scan_is_not_corrected(
    open_tier, lender: Lender, hurry, system_call: MakeSystemCall
) -> None:
    before = await open_tier()
    await lender.keep(before, keys_of(4))
    await before.aclose(DEADLINE_S)
    hurry()
    listing = system_call("scandir", sticks=True)
    tier = await open_tier()
    report = tier.watch()
    await next_of(report)
    await tier.delete([key_of(0), key_of(1)])
    await lender.keep(tier, [key_of(1)], version=1)
    await lender.keep(tier, [key_of(2)], version=1)
    listing.let_go()
    assert await next_of(report) == ScanDone(complete=True)
    await report.aclose()
    assert list(await tier.probe(keys_of(4))) == [False, True, True, True]
    expected = ["ChunkMissing", label(key_of(1), 1), label(key_of(2), 1), label(key_of(3))]
    assert await lender.recall(tier, keys_of(4)) == expected


async def test_a_checkpoint_that_lies_costs_a_miss(
    open_tier, lender: Lender, system_call: MakeSystemCall, path_of
) -> None:
    before = await open_tier()
    await lender.keep(before, keys_of(2))
    await before.aclose(DEADLINE_S)
    path_of(key_of(0)).unlink()
    system_call("scandir", sticks=True)
    tier = await open_tier()
    report = tier.watch()
    await next_of(report)
    assert await lender.recall(tier, keys_of(2)) == ["ChunkMissing", label(key_of(1))]
    assert list(await tier.probe(keys_of(2))) == [False, True]
    await report.aclose()


async def test_the_order_of_use_survives(open_tier, lender: Lender, index_file: Path, mapper, row_bytes: int) -> None:
    first = await open_tier()
    for number in range(4):
        await lender.keep(first, [key_of(number)])
    await lender.recall(first, [key_of(1)])
    await first.aclose(DEADLINE_S)
    second = await open_tier()
    await scanned(second)
    await lender.recall(second, [key_of(0)])
    await second.aclose(DEADLINE_S)
    options = FsOptions(root=str(index_file.parents[1]), layout="files").chosen()
    folder = Folder(options, TierContext("0:fs", mapper, row_bytes))
    await asyncio.to_thread(folder.open)
    kept = read(Checkpoint(folder, mapper, Counters(), row_bytes))
    folder.close()
    assert [chunk.key for chunk in kept] == [key_of(number) for number in (0, 1, 3, 2)]


async def test_one_is_written_every_so_often(
    open_tier, lender: Lender, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, published = Folder.publish, threading.Semaphore(0)

    def publish_and_say(folder: Folder, name: str, pieces: Iterable[bytes]) -> None:
        publish(folder, name, pieces)
        published.release()

    tier = await open_tier(checkpoint_s=0.01)
    await scanned(tier)
    await lender.keep(tier, keys_of(3))
    monkeypatch.setattr(Folder, "publish", publish_and_say)
    for _ in range(2):  # The first may have begun before the chunks were stored.
        assert await asyncio.to_thread(published.acquire, timeout=DEADLINE_S)
    copy = shutil.copytree(root, root.with_name("copy"))  # As after a kill: the first has not closed.
    another = await open_tier(root=str(copy))
    await scanned(another)
    assert another.counters().checkpoint_chunks == 3


async def test_none_is_written_or_read_if_it_is_switched_off(open_tier, lender: Lender, index_file: Path) -> None:
    tier = await open_tier(checkpoint_s=0)
    await lender.keep(tier, keys_of(2))
    await tier.aclose(DEADLINE_S)
    assert content_of(index_file) is None
    on = await open_tier()
    await scanned(on)
    await on.aclose(DEADLINE_S)
    assert content_of(index_file)
    off = await open_tier(checkpoint_s=0)
    assert await scanned(off) == set(keys_of(2))
    assert off.counters().checkpoint_chunks == 0


async def test_closing_in_no_time_leaves_the_last_one(open_tier, lender: Lender, index_file: Path) -> None:
    before = await open_tier()
    await lender.keep(before, keys_of(2))
    await before.aclose(DEADLINE_S)
    content = content_of(index_file)
    tier = await open_tier()
    await tier.delete(keys_of(2))
    await tier.aclose(0)
    assert await tier.aclose(DEADLINE_S) == (0,)
    assert content is not None
    assert content_of(index_file) == content


async def test_a_start_that_is_cut_short_leaves_the_last_one(
    open_tier, lender: Lender, system_call: MakeSystemCall
) -> None:
    """What was recalled is written again, with what has changed since."""
    before = await open_tier()
    await lender.keep(before, keys_of(3))
    await before.aclose(DEADLINE_S)
    listing = system_call("scandir", sticks=True)
    tier = await open_tier()
    report = tier.watch()
    await next_of(report)
    await report.aclose()
    await tier.delete([key_of(0)])
    closing = asyncio.create_task(tier.aclose(DEADLINE_S))
    await asyncio.sleep(0)
    listing.let_go()
    assert await closing == (0,)
    again = await open_tier()
    assert await scanned(again) == set(keys_of(3)[1:])
    assert again.counters().checkpoint_chunks == 2


async def test_two_ranks_and_two_namings_have_checkpoints_of_their_own(
    root: Path, lender: Lender, row_bytes: int
) -> None:
    for rank, naming in ((0, "vllm"), (1, "vllm"), (0, "flat")):
        mapper = FileMapper(Namespace(model_name="org/model", rank=rank))
        options = FsOptions(root=str(root), naming=naming)  # type: ignore[arg-type]
        for _ in range(2):
            tier = await FsBackend.open(options, TierContext("0:fs", mapper, row_bytes))
            await scanned(tier)
            await lender.keep(tier, [key_of(rank)])
            await tier.aclose(DEADLINE_S)
        assert tier.counters().checkpoint_chunks == 1
    assert checkpoints_below(root) == {"index_r0", "index_r1", "index_r0_flat"}


async def test_a_bad_interval_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint_s: -1 given"):
        FsOptions(root="/x", checkpoint_s=-1)


@pytest.mark.usefixtures("outside")
async def test_a_writer_that_is_killed_while_it_checkpoints_leaves_a_whole_one(
    open_tier, lender: Lender, root: Path, row_bytes: int
) -> None:
    before = await open_tier()
    await lender.keep(before, keys_of(3))
    await before.aclose(DEADLINE_S)
    program = f"""
import os, signal, sys
from kvtier.backend import TierContext
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier_backends.fs import FsOptions
from kvtier_backends.fs.files.checkpoint import Checkpoint
from kvtier_backends.fs.counters import Counters
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.files.index import Snapshot
from kvtier_backends.fs.files.recency import Idle
mapper = FileMapper(Namespace(model_name="org/model"))
folder = Folder(FsOptions(root=sys.argv[1], layout="files").chosen(), TierContext("0:fs", mapper, 4_096))
folder.open()
os.rename = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
Checkpoint(folder, mapper, Counters(), {row_bytes}).write(Snapshot([], [], Idle(), {{}}), 0)
"""
    command = [sys.executable, "-c", program, str(root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = await asyncio.to_thread(subprocess.run, command, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    tier = await open_tier()
    assert await scanned(tier) == set(keys_of(3))
    assert tier.counters().checkpoint_chunks == 3
    assert tier.counters().scan_swept == 1
