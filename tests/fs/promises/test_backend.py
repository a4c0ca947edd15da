"""What the file tier promises beyond the contract, and what it makes of the contract's errors."""

import asyncio
import errno
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from kvtier.backend.contract import (
    Added,
    Durability,
    Inventory,
    Measured,
    Occupancy,
    Removed,
    ScanDone,
    TierContext,
    backend_class,
)
from kvtier.backend.namespace import FileMapper, OffloadKey, make_offload_key
from kvtier.errors import BackendClosed, BackendUnavailable, ChunkMissing, ConfigError, TransferFailed
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsBackend, FsCounters, FsOptions
from kvtier_backends.fs.disk.lanes import SHARE_BYTES_MAX, SHARE_CHUNKS_MAX, share_chunks, share_least, share_out
from tests.fs.conftest import MakeSystemCall

DEADLINE_S = 20.0


def allocated_bytes(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*.bin"))


def put_another_in_place_of(root: Path) -> None:
    """As when a mount goes away: the path then leads to another disk."""
    root.rename(root.with_name("elsewhere"))
    root.mkdir()


def is_empty(root: Path) -> bool:
    return next(root.iterdir(), None) is None


def held_below(root: Path) -> list[str]:
    """Return what this process has open of the directory, itself and what is in it."""
    held = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    paths = [os.readlink(fd) for fd in held if os.path.lexists(fd)]
    return [path for path in paths if path == str(root) or path.startswith(f"{root}/")]


def ended(threads: Iterable[threading.Thread]) -> None:
    """Wait for threads of the tier's; the loop's own threads for blocking calls go on."""
    for thread in threads:
        if thread.name.startswith("kvtier-"):
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), thread.name


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def test_the_registry_finds_it() -> None:
    tier = backend_class("fs")
    assert tier is FsBackend
    assert tier.durability is Durability.HOST


@pytest.mark.parametrize("layout", ["files", "segments"])
async def test_a_tier_that_syncs_promises_that_chunks_survive_a_power_cut(open_tier, tmp_path, layout) -> None:
    tiers = [await open_tier(root=str(tmp_path / f"{fsync}"), fsync=fsync, layout=layout) for fsync in (False, True)]
    assert [tier.durability for tier in tiers] == [Durability.HOST, Durability.POWER]


async def test_it_says_what_it_holds_and_how_much(open_tier) -> None:
    tier = await open_tier()
    assert isinstance(tier, Inventory)
    assert isinstance(tier, Measured)


async def test_a_bad_root_is_refused_and_leaves_no_thread(tmp_path: Path, mapper: FileMapper, row_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"^root: "):
        await FsBackend.open(FsOptions(root=f"{tmp_path}/no/where"), TierContext("0:fs", mapper, row_bytes))
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier-0:fs"):
            await asyncio.to_thread(thread.join, DEADLINE_S)
            assert not thread.is_alive()


async def test_opening_and_closing_do_not_block_the_loop(open_tier) -> None:
    with blockbuster_ctx():
        tier = await open_tier()
        await tier.aclose(DEADLINE_S)


@pytest.mark.parametrize("call", ["pwritev", "fpathconf"])
async def test_opening_on_a_mount_that_hangs_can_be_given_up(
    mapper: FileMapper, root: Path, row_bytes: int, system_call: MakeSystemCall, call: str
) -> None:
    """No buffer is lent yet, so nobody need wait for the thread; it cleans up after itself."""
    stuck = system_call(call, sticks=True)
    opening = asyncio.create_task(
        FsBackend.open(FsOptions(root=str(root), layout="files"), TierContext("hung", mapper, row_bytes))
    )
    await stuck.wait_entered()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert str(root) in held_below(root)
    stuck.let_go()
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier-hung"):
            await asyncio.to_thread(thread.join, DEADLINE_S)
    assert held_below(root) == []


@pytest.mark.parametrize(
    ("field", "value"), [("load_lanes", 0), ("store_lanes", 65), ("io", "fast"), ("unverified", True), ("fsync", "no")]
)
def test_a_bad_option_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        FsOptions(root="/x", **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chunks", "lanes", "most", "shares"),
    [
        (0, 4, 32, []),
        (1, 4, 32, [1]),
        (3, 4, 32, [1, 1, 1]),
        (8, 4, 32, [2, 2, 2, 2]),
        (9, 4, 32, [3, 3, 3]),
        (128, 4, 32, [32, 32, 32, 32]),
        (130, 4, 32, [32, 32, 32, 32, 2]),
        (5, 1, 2, [2, 2, 1]),
    ],
)
def test_a_batch_is_shared_out_over_the_lanes(chunks: int, lanes: int, most: int, shares: list[int]) -> None:
    parts = share_out(range(chunks), lanes, most)
    assert [len(part) for part in parts] == shares
    assert [number for part in parts for number in part] == list(range(chunks))


@pytest.mark.parametrize(
    ("chunks", "lanes", "least", "shares"),
    [
        (0, 4, 8, []),
        (3, 4, 8, [3]),
        (9, 4, 8, [5, 4]),
        (17, 4, 8, [6, 6, 5]),
        (32, 4, 8, [8, 8, 8, 8]),
        (64, 4, 8, [16, 16, 16, 16]),
    ],
)
def test_no_more_lanes_are_taken_than_have_enough_to_do(chunks: int, lanes: int, least: int, shares: list[int]) -> None:
    parts = share_out(range(chunks), lanes, 32, least)
    assert [len(part) for part in parts] == shares
    assert [number for part in parts for number in part] == list(range(chunks))


@pytest.mark.parametrize(
    ("row_bytes", "queue_bytes", "chunks"),
    [(4_096, 8 << 20, 32), (128 << 10, 8 << 20, 32), (2 << 20, 8 << 20, 2), (8 << 20, 8 << 20, 1), (4_096, 0, 1)],
)
def test_a_lane_that_reads_ahead_is_worth_half_its_queue(row_bytes: int, queue_bytes: int, chunks: int) -> None:
    assert share_least(row_bytes, queue_bytes) == chunks


@pytest.mark.parametrize("row_bytes", [4_096, 1 << 20, SHARE_BYTES_MAX, 10 * SHARE_BYTES_MAX])
def test_a_share_is_bounded_in_chunks_and_bytes(row_bytes: int) -> None:
    chunks = share_chunks(row_bytes)
    assert 1 <= chunks <= SHARE_CHUNKS_MAX
    assert chunks == 1 or chunks * row_bytes <= SHARE_BYTES_MAX


async def test_loads_and_stores_have_lanes_of_their_own(open_tier, lender: Lender, system_call: MakeSystemCall) -> None:
    """A load never queues behind stores, even if all of these hang."""
    tier = await open_tier(load_lanes=1, store_lanes=2)
    await lender.keep(tier, [key_of(0)])
    stuck = system_call("pwritev", sticks=True)
    stores = [asyncio.create_task(tier.store(lender.writes(keys_of(9, start=10 * number)))) for number in range(1, 4)]
    await stuck.wait_entered(2)
    assert await lender.recall(tier, [key_of(0)]) == [label(key_of(0))]
    stuck.let_go()
    assert [outcome for store in stores for outcome in await store] == [None] * 27


async def test_stores_go_on_beside_a_load_that_hangs(open_tier, lender: Lender, system_call: MakeSystemCall) -> None:
    """One lane at a time, for as long as it lasts."""
    tier = await open_tier(load_lanes=1)
    await lender.keep(tier, keys_of(1))
    stuck = system_call("preadv", sticks=True)
    load = asyncio.create_task(lender.recall(tier, keys_of(1)))
    await stuck.wait_entered(1)
    async with asyncio.timeout(DEADLINE_S):
        assert list(await tier.store(lender.writes(keys_of(16, start=10)))) == [None] * 16
    stuck.let_go()
    assert await load == [label(key_of(0))]


async def test_occupancy_is_what_the_file_system_counts(open_tier, lender: Lender, root: Path) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(20))
    await lender.keep(tier, keys_of(5), version=1)
    await tier.delete(keys_of(3, start=10))
    assert tier.occupancy() == Occupancy(17, allocated_bytes(root), None)


async def test_a_chunk_that_is_gone_is_missing_and_said_to_be(open_tier, lender: Lender, path_of) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(3))
    path_of(key_of(1)).unlink()
    assert list(await tier.probe(keys_of(3))) == [True, True, True]  # A hint.
    assert await lender.recall(tier, keys_of(3)) == [label(key_of(0)), "ChunkMissing", label(key_of(2))]
    assert list(await tier.probe(keys_of(3))) == [True, False, True]
    assert tier.occupancy().chunks == 2


async def test_a_removal_that_nobody_asked_for_is_reported(open_tier, lender: Lender, path_of) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(2))
    report = tier.watch()
    async with asyncio.timeout(DEADLINE_S):
        assert [await anext(report), await anext(report)] == [Added(keys_of(2)[::-1]), ScanDone(complete=True)]
        path_of(key_of(1)).unlink()
        await lender.recall(tier, keys_of(2))
        assert await anext(report) == Removed([key_of(1)])
    await report.aclose()


async def test_a_chunk_that_somebody_else_has_put_there_is_found_and_reported(
    open_tier, lender: Lender, root: Path
) -> None:
    tier, other = await open_tier(), await open_tier(root=str(root.with_name("other")))
    report = tier.watch()
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(report) == ScanDone(complete=True)
        await lender.keep(other, [key_of(5)])
        shutil.copytree(root.with_name("other"), root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.json"))
        assert await lender.recall(tier, [key_of(5)]) == [label(key_of(5))]
        assert await anext(report) == Added([key_of(5)])
    assert tier.occupancy() == other.occupancy()
    await report.aclose()


async def test_what_a_cancelled_store_has_stored_is_reported(
    open_tier, lender: Lender, system_call: MakeSystemCall
) -> None:
    tier = await open_tier(store_lanes=1)
    report = tier.watch()
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(report) == ScanDone(complete=True)
        stuck = system_call("pwritev", sticks=True)
        store = asyncio.create_task(tier.store(lender.writes(keys_of(2))))
        await stuck.wait_entered()
        store.cancel()
        stuck.let_go()
        with pytest.raises(asyncio.CancelledError):
            await store
        assert await anext(report) == Added(keys_of(2)[::-1])
    assert await lender.recall(tier, keys_of(2)) == [label(key) for key in keys_of(2)]
    await report.aclose()


async def test_a_hung_transfer_is_left_behind_and_its_buffer_stays_lent(
    open_tier, lender: Lender, system_call: MakeSystemCall
) -> None:
    tier = await open_tier(load_lanes=2, queue_bytes=0)
    await lender.keep(tier, keys_of(4))
    stuck = system_call("preadv", sticks=True)
    load = asyncio.create_task(tier.load(lender.reads(keys_of(4))))
    await stuck.wait_entered(2)
    assert await tier.aclose(0) == (1,)
    assert not load.done()
    with pytest.raises(BackendClosed):
        await tier.load([])
    stuck.let_go()
    assert list(await load) == [None] * 4
    assert await tier.aclose(DEADLINE_S) == (0,)


async def test_closing_fails_what_waits_behind_a_hung_transfer(
    open_tier, lender: Lender, system_call: MakeSystemCall
) -> None:
    tier = await open_tier(store_lanes=1)
    stuck = system_call("pwritev", sticks=True)
    hung = asyncio.create_task(tier.store(lender.writes([key_of(0)])))
    await stuck.wait_entered()
    waiting = asyncio.create_task(tier.store(lender.writes([key_of(1)])))
    await asyncio.sleep(0)
    assert await tier.aclose(0) == (1,)
    with pytest.raises(BackendClosed):
        await waiting
    stuck.let_go()
    assert list(await hung) == [None]


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"layout": "files"}, "pwritev"),
        ({"layout": "files", "shared": True, "write_budget_bytes_per_day": "1GiB"}, "pwritev"),
        ({"layout": "segments", "write_budget_bytes_per_day": "1GiB"}, "pwritev"),
        ({"layout": "segments"}, "posix_fallocate"),  # A segment that is made when its tier has closed.
    ],
)
async def test_a_descriptor_is_given_up_when_the_thread_that_uses_it_has_ended_and_not_before(
    open_tier, lender: Lender, system_call: MakeSystemCall, root: Path, options: dict[str, Any], call: str
) -> None:
    """Its number would be another file's, and the thread would go on there."""
    others = set(threading.enumerate())
    tier = await open_tier(**options)
    stuck = system_call(call, sticks=True)
    store = asyncio.create_task(tier.store(lender.writes([key_of(0)])))
    await stuck.wait_entered()
    await tier.aclose(0)
    assert str(root) in held_below(root)
    stuck.let_go()
    await asyncio.gather(store, return_exceptions=True)
    await asyncio.to_thread(ended, set(threading.enumerate()) - others)
    assert held_below(root) == []
    await tier.aclose(DEADLINE_S)


async def test_a_file_that_has_a_given_up_descriptors_number_is_left_alone_by_a_second_end(
    open_tier, lender: Lender, system_call: MakeSystemCall, root: Path, tmp_path: Path
) -> None:
    others = set(threading.enumerate())
    tier = await open_tier(layout="segments")
    stuck = system_call("pwritev", sticks=True)
    store = asyncio.create_task(tier.store(lender.writes([key_of(0)])))
    await stuck.wait_entered()
    await tier.aclose(0)
    stuck.let_go()
    await asyncio.gather(store, return_exceptions=True)
    await asyncio.to_thread(ended, set(threading.enumerate()) - others)
    with ExitStack() as files:
        opened = [files.enter_context((tmp_path / str(number)).open("wb")) for number in range(16)]
        await tier.aclose(DEADLINE_S)
        assert [os.fstat(file.fileno()).st_nlink for file in opened] == [1] * 16


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.EACCES])
async def test_an_error_of_the_disk_is_one_chunks_and_leaves_its_file_alone(
    open_tier, lender: Lender, path_of, error: int, system_call: MakeSystemCall
) -> None:
    tier = await open_tier(queue_bytes=0)
    await lender.keep(tier, keys_of(2))
    failing = system_call("preadv", error=error)
    reads = lender.reads(keys_of(2))
    outcomes = await tier.load(reads)
    assert [type(outcome) for outcome in outcomes] == [TransferFailed] * 2
    assert os.strerror(error) in str(outcomes[0])
    assert key_of(0).hex() in str(outcomes[0])
    del reads
    failing.let_go()
    assert all(path_of(key).exists() for key in keys_of(2))
    assert await lender.recall(tier, keys_of(2)) == [label(key) for key in keys_of(2)]
    assert tier.counters() == FsCounters()


@pytest.mark.parametrize("call", ["load", "store"])
async def test_a_file_system_that_is_away_is_the_whole_calls(
    open_tier, lender: Lender, call: str, system_call: MakeSystemCall
) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(2))
    reads, writes = lender.reads(keys_of(2)), lender.writes(keys_of(2))
    move = partial(tier.load, reads) if call == "load" else partial(tier.store, writes)
    failing = system_call("open", error=errno.ESTALE)
    with pytest.raises(BackendUnavailable, match="Stale file handle"):
        await move()
    failing.let_go()
    assert await lender.recall(tier, keys_of(2)) == [label(key) for key in keys_of(2)]


async def test_a_delete_that_fails_says_how_much_of_it(
    open_tier, lender: Lender, path_of, system_call: MakeSystemCall
) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(3))
    kept = path_of(key_of(1)).name
    refused = system_call("unlink", error=errno.EPERM, only=lambda name, **kwargs: name.endswith(kept))
    with pytest.raises(BackendUnavailable, match="1 of 3"):
        await tier.delete(keys_of(3))
    refused.let_go()
    assert await lender.recall(tier, keys_of(3)) == ["ChunkMissing", label(key_of(1)), "ChunkMissing"]
    assert list(await tier.probe(keys_of(3))) == [False, True, False]


async def test_a_root_that_is_removed_underfoot_costs_its_chunks_only(open_tier, lender: Lender, root: Path) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(2))
    shutil.rmtree(root)
    assert [type(outcome) for outcome in await tier.load(lender.reads(keys_of(2)))] == [ChunkMissing] * 2
    assert [type(outcome) for outcome in await tier.store(lender.writes(keys_of(2)))] == [TransferFailed] * 2
    assert list(await tier.probe(keys_of(2))) == [False, False]
    await tier.delete(keys_of(2))
    await lender.keep(tier, keys_of(2))  # It was made again.


async def test_a_root_that_is_replaced_underfoot_is_not_written_to(open_tier, lender: Lender, root: Path) -> None:
    tier = await open_tier()
    await lender.keep(tier, [key_of(0)])
    put_another_in_place_of(root)
    await lender.keep(tier, [key_of(1)])
    assert await lender.recall(tier, keys_of(2)) == [label(key_of(0)), label(key_of(1))]
    assert is_empty(root)


async def test_an_unmount_underfoot_is_no_exception(open_tier, lender: Lender, mount) -> None:
    root = mount("tmpfs", "size=1m")
    tier = await open_tier(root=str(root))
    await lender.keep(tier, [key_of(0)])
    run("umount", "-l", str(root))
    outcomes = await tier.store(lender.writes([key_of(1)]))
    assert outcomes[0] is None or isinstance(outcomes[0], TransferFailed)
    assert await lender.recall(tier, [key_of(0)]) in ([label(key_of(0))], ["ChunkMissing"])
    assert is_empty(root)
    run("mount", "-t", "tmpfs", "none", str(root))  # For the fixture to unmount.


async def test_where_direct_io_is_refused_and_blocks_are_not_counted_the_tier_works(
    open_tier, lender: Lender, mount, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(mount("ramfs", "size=1m"))
    tier = await open_tier(root=root)
    await lender.keep(tier, keys_of(5))
    assert list(await tier.probe(keys_of(6))) == [True] * 5 + [False]
    assert await lender.recall(tier, keys_of(5)) == [label(key) for key in keys_of(5)]
    assert tier.counters().buffered_fallback == 1
    assert [record.levelno for record in caplog.records if "no direct I/O" in record.getMessage()] == [logging.WARNING]
    await tier.aclose(DEADLINE_S)
    again = await open_tier(root=root)
    report = again.watch()
    assert set((await anext(report)).keys) == set(keys_of(5))
    await report.aclose()


async def test_memory_file_systems_work(open_tier, lender: Lender, mount) -> None:
    tier = await open_tier(root=str(mount("tmpfs", "size=4m")))
    await lender.keep(tier, keys_of(5))
    assert await lender.recall(tier, keys_of(5)) == [label(key) for key in keys_of(5)]


@pytest.mark.parametrize(
    ("options", "longest"), [({}, 125), ({"naming": "flat"}, 119), ({"layout": "segments"}, 4_012)]
)
async def test_the_longest_key_has_a_place_and_a_longer_one_costs_nobody_else(
    open_tier, lender: Lender, options: dict[str, str], longest: int
) -> None:
    """Of the group whose name is the longest; what is refused says how long keys may be, and moves no other chunk."""
    tier = await open_tier(**options)
    fits, long, short = (make_offload_key(b"l" * length, 0xFFFF_FFFF) for length in (longest, longest + 1, 0))
    keys = [long, fits, OffloadKey(short[:3]), key_of(0)]
    outcomes = list(await tier.store(lender.writes(keys)))
    assert [type(outcome).__name__ for outcome in outcomes] == ["NoSpace", "NoneType", "NoSpace", "NoneType"]
    assert f"a key of {longest + 5:,} bytes, 4 to {longest + 4:,} accepted" in str(outcomes[0])
    assert await lender.recall(tier, keys) == ["ChunkMissing", label(fits), "ChunkMissing", label(key_of(0))]
    assert tier.counters().evicted == tier.counters().disk_full == 0
