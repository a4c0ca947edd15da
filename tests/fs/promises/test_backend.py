"""What the file tier promises beyond the contract, and what it makes of the contract's errors."""

import asyncio
import errno
import logging
import os
import shutil
import threading
from contextlib import ExitStack
from functools import partial

import pytest
from blockbuster import blockbuster_ctx

from kvtier.backend import Added, Durability, OffloadKey, ScanDone, TierContext, backend_class, make_offload_key
from kvtier.errors import BackendClosed, BackendUnavailable
from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs import FsBackend, FsCounters, FsOptions
from kvtier_backends.fs.disk.lanes import share_chunks, share_least, share_out
from kvtier_backends.fs.layout import Background
from tests.fs.conftest import DEADLINE_S, ROW_BYTES, SECRETS, kinds, scanned, whole


def held_below(root):
    held = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    paths = [os.readlink(fd) for fd in held if os.path.lexists(fd)]
    return [path for path in paths if path == str(root) or path.startswith(f"{root}/")]


def ended(threads):
    """Wait for threads of the tier's; the loop's own threads for blocking calls go on."""
    for thread in threads:
        if thread.name.startswith("kvtier-"):
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), thread.name


async def test_chunks_survive_a_process_and_with_fsync_a_power_cut(open_tier, tmp_path, layout):
    assert backend_class("fs") is FsBackend
    tiers = [await open_tier(root=str(tmp_path / f"{fsync}"), fsync=fsync, layout=layout) for fsync in (False, True)]
    assert [tier.durability for tier in tiers] == [Durability.HOST, Durability.POWER]


async def test_opening_and_closing_do_not_block_the_loop(open_tier, layout):
    with blockbuster_ctx():
        tier = await open_tier(layout=layout)
        await tier.aclose(DEADLINE_S)


@pytest.mark.parametrize("call", ["pwritev", "fpathconf"])
async def test_opening_on_a_mount_that_hangs_can_be_given_up(mapper, root, system_call, call):
    """No buffer is lent yet, so nobody need wait for the thread; it cleans up after itself."""
    others, stuck = set(threading.enumerate()), system_call(call, sticks=True)
    opening = asyncio.create_task(
        FsBackend.open(FsOptions(root=str(root), layout="files"), TierContext("hung", mapper, ROW_BYTES))
    )
    await stuck.wait_entered()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert str(root) in held_below(root)
    stuck.let_go()
    await asyncio.to_thread(ended, set(threading.enumerate()) - others)
    assert held_below(root) == []


@pytest.mark.parametrize(
    ("chunks", "lanes", "most", "least", "shares"),
    [
        (0, 4, 32, 1, []),
        (3, 4, 32, 1, [1, 1, 1]),
        (8, 4, 32, 1, [2, 2, 2, 2]),
        (9, 4, 32, 1, [3, 3, 3]),
        (130, 4, 32, 1, [32, 32, 32, 32, 2]),
        (5, 1, 2, 1, [2, 2, 1]),
        (0, 4, 32, 8, []),
        (3, 4, 32, 8, [3]),
        (9, 4, 32, 8, [5, 4]),
        (17, 4, 32, 8, [6, 6, 5]),
        (64, 4, 32, 8, [16, 16, 16, 16]),
    ],
)
def test_a_batch_is_shared_out_over_the_lanes_that_have_enough_to_do(chunks, lanes, most, least, shares):
    parts = share_out(range(chunks), lanes, most, least)
    assert [len(part) for part in parts] == shares
    assert [number for part in parts for number in part] == list(range(chunks))


@pytest.mark.parametrize(
    ("row_bytes", "queue_bytes", "least", "most"),
    [
        (4_096, 8 << 20, 32, 32),
        (128 << 10, 8 << 20, 32, 32),
        (2 << 20, 8 << 20, 2, 8),
        (8 << 20, 8 << 20, 1, 2),
        (32 << 20, 8 << 20, 1, 1),
        (4_096, 0, 1, 32),
    ],
)
def test_a_lane_is_sent_half_its_queue_at_least_and_so_much_at_most(row_bytes, queue_bytes, least, most):
    assert (share_least(row_bytes, queue_bytes), share_chunks(row_bytes)) == (least, most)


async def test_loads_and_stores_have_lanes_of_their_own(open_tier, lender, system_call):
    """A load never queues behind stores, even if all of these hang; a store goes on beside a load that hangs."""
    tier = await open_tier(load_lanes=1, store_lanes=2, holds=keys_of(1))
    stuck = system_call("pwritev", sticks=True)
    stores = [asyncio.create_task(tier.store(lender.writes(keys_of(9, start=10 * number)))) for number in range(1, 4)]
    await stuck.wait_entered(2)
    assert await lender.recall(tier, keys_of(1)) == whole(keys_of(1))
    stuck.let_go()
    assert [outcome for store in stores for outcome in await store] == [None] * 27
    stuck = system_call("preadv", sticks=True)
    load = asyncio.create_task(lender.recall(tier, keys_of(1)))
    await stuck.wait_entered(1)
    async with asyncio.timeout(DEADLINE_S):
        await lender.keep(tier, keys_of(16, start=50))
    stuck.let_go()
    assert await load == whole(keys_of(1))


async def test_a_chunk_that_is_gone_or_corrupt_is_a_miss_and_reported_as_removed(open_tier, lender, path_of):
    tier = await open_tier(holds=keys_of(3))
    report = tier.watch()
    async with asyncio.timeout(DEADLINE_S):
        assert [await anext(report), await anext(report)] == [Added(keys_of(3)[::-1]), ScanDone(complete=True)]
        path_of(key_of(1)).unlink()
        os.truncate(path_of(key_of(2)), 5)
        assert list(await tier.probe(keys_of(3))) == [True, True, True]
        assert await lender.recall(tier, keys_of(3)) == [*whole(keys_of(1)), "ChunkMissing", "ChunkCorrupt"]
        assert set((await anext(report)).keys) == set(keys_of(2, 1))
    assert list(await tier.probe(keys_of(3))) == [True, False, False]
    assert tier.occupancy().chunks == 1
    await report.aclose()


async def test_a_chunk_that_somebody_else_has_put_there_is_found_and_reported(open_tier, lender, root):
    tier, other = await open_tier(), await open_tier(root=str(root.with_name("other")))
    report = tier.watch()
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(report) == ScanDone(complete=True)
        await lender.keep(other, [key_of(5)])
        shutil.copytree(root.with_name("other"), root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.json"))
        assert await lender.recall(tier, [key_of(5)]) == whole([key_of(5)])
        assert await anext(report) == Added([key_of(5)])
    assert tier.occupancy() == other.occupancy()
    await report.aclose()


async def test_what_a_cancelled_store_has_stored_is_reported(open_tier, lender, system_call, layout):
    tier = await open_tier(store_lanes=1, layout=layout)
    report = tier.watch()
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(report) == ScanDone(complete=True)
        await lender.keep(tier, [key_of(50)])  # The segment is there.
        stuck = system_call("pwritev", sticks=True)
        store = await stuck.met_by(tier.store(lender.writes(keys_of(2))))
        store.cancel()
        stuck.let_go()
        with pytest.raises(asyncio.CancelledError):
            await store
        event = await anext(report)
        assert isinstance(event, Added)
        assert set(event.keys) == set(keys_of(2))
    assert await lender.recall(tier, keys_of(2)) == whole(keys_of(2))
    await report.aclose()


async def test_closing_fails_what_waits_behind_a_hung_transfer(open_tier, lender, system_call, layout):
    tier = await open_tier(store_lanes=1, layout=layout, scanned=True)
    await lender.keep(tier, keys_of(1))
    stuck = system_call("pwritev", sticks=True)
    hung = await stuck.met_by(tier.store(lender.writes([key_of(0)])))
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
    open_tier, lender, system_call, root, tmp_path, options, call
):
    """Its number would be another file's, and the thread would go on there. Nor does a second end touch that file."""
    others = set(threading.enumerate())
    tier = await open_tier(**options)
    stuck = system_call(call, sticks=True)
    store = await stuck.met_by(tier.store(lender.writes([key_of(0)])))
    await tier.aclose(0)
    assert str(root) in held_below(root)
    stuck.let_go()
    await asyncio.gather(store, return_exceptions=True)
    await asyncio.to_thread(ended, set(threading.enumerate()) - others)
    assert held_below(root) == []
    with ExitStack() as files:
        opened = [files.enter_context((tmp_path / str(number)).open("wb")) for number in range(16)]
        await tier.aclose(DEADLINE_S)
        assert [os.fstat(file.fileno()).st_nlink for file in opened] == [1] * 16


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.EACCES])
async def test_an_error_of_the_disk_leaves_its_chunk_alone(open_tier, lender, system_call, layout, error):
    tier = await open_tier(queue_bytes=0, layout=layout, holds=keys_of(2))
    failing = system_call("preadv", error=error)
    outcomes = await tier.load(lender.reads(keys_of(2)))
    assert kinds(outcomes) == ["TransferFailed"] * 2
    assert os.strerror(error) in str(outcomes[0])
    assert key_of(0).hex() in str(outcomes[0])
    failing.let_go()
    del outcomes
    assert await lender.recall(tier, keys_of(2)) == whole(keys_of(2))
    assert tier.counters() == FsCounters()


@pytest.mark.parametrize("call", ["load", "store"])
async def test_a_file_system_that_is_away_is_the_whole_calls(open_tier, lender, call, system_call):
    tier = await open_tier(holds=keys_of(2))
    reads, writes = lender.reads(keys_of(2)), lender.writes(keys_of(2))
    move = partial(tier.load, reads) if call == "load" else partial(tier.store, writes)
    failing = system_call("open", error=errno.ESTALE)
    with pytest.raises(BackendUnavailable, match="Stale file handle"):
        await move()
    failing.let_go()
    assert await lender.recall(tier, keys_of(2)) == whole(keys_of(2))


async def test_a_delete_that_fails_says_how_much_of_it(open_tier, lender, path_of, system_call):
    tier = await open_tier(holds=keys_of(3))
    kept = path_of(key_of(1)).name
    refused = system_call("unlink", error=errno.EPERM, only=lambda name, **kwargs: name.endswith(kept))
    with pytest.raises(BackendUnavailable, match="1 of 3"):
        await tier.delete(keys_of(3))
    refused.let_go()
    assert await lender.recall(tier, keys_of(3)) == ["ChunkMissing", *whole([key_of(1)]), "ChunkMissing"]
    assert list(await tier.probe(keys_of(3))) == [False, True, False]


async def test_without_direct_io_and_counted_blocks_the_tier_works(open_tier, lender, mount, caplog):
    root = str(mount("ramfs", "size=1m"))
    tier = await open_tier(root=root, holds=keys_of(5))
    assert list(await tier.probe(keys_of(6))) == [True] * 5 + [False]
    assert await lender.recall(tier, keys_of(5)) == whole(keys_of(5))
    assert tier.counters().buffered_fallback == 1
    assert [record.levelno for record in caplog.records if "no direct I/O" in record.getMessage()] == [logging.WARNING]
    await tier.aclose(DEADLINE_S)
    assert await scanned(await open_tier(root=root)) == set(keys_of(5))


@pytest.mark.promise("The key is too long for the tier, or the row has a wrong length")
@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({}, 125),
        ({"naming": "flat"}, 119),
        ({"layout": "segments"}, 4_012),
        ({"layout": "segments", "seal": "aes-256-gcm", "seal_key_env": SECRETS}, 3_884),
    ],
)
async def test_the_longest_key_fits_and_longer_ones_cost_none(open_tier, lender, monkeypatch, options, longest):
    monkeypatch.setenv(SECRETS, "ab" * 32)
    tier = await open_tier(**options)
    fits, long, short = (make_offload_key(b"l" * length, 0xFFFF_FFFF) for length in (longest, longest + 1, 0))
    keys = [long, fits, OffloadKey(short[:3]), key_of(0)]
    outcomes = list(await tier.store(lender.writes(keys)))
    assert kinds(outcomes) == ["NoSpace", "NoneType", "NoSpace", "NoneType"]
    assert f"a key of {longest + 5:,} bytes, 4 to {longest + 4:,} accepted" in str(outcomes[0])
    assert await lender.recall(tier, keys) == ["ChunkMissing", *whole([fits]), "ChunkMissing", *whole([key_of(0)])]
    assert tier.counters().evicted == tier.counters().disk_full == 0


async def test_the_end_raises_what_was_wrong_with_a_background_task():
    async def fails():
        raise ZeroDivisionError

    background = Background()
    background.begin("test", [fails])
    with pytest.raises(ZeroDivisionError):
        await background.ended()
