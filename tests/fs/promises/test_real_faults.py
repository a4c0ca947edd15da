"""A disk that fails, hangs, goes read-only or goes away, for real: a file system of the test's own, or a remount.

Device-mapper would do it to a block device; where there is FUSE nothing else is needed, so that is what is used.
Skipped where mounting is not allowed.
"""

import asyncio
import errno
import logging
import os
import subprocess

import pytest

from kvtier import BackendUnavailable, TieringOffloadingManager
from kvtier.testing.conformance.lender import keys_of
from tests.engine.kit import describe, put
from tests.fs.conftest import DEADLINE_S, kinds, scanned, temporaries, whole


@pytest.fixture
async def tier(disk, open_tier, layout):
    return await open_tier(layout=layout, root=str(disk.path / "tier"), queue_bytes=0)


async def test_a_tier_without_a_segment_that_cannot_make_one_says_why(disk, open_tier, lender):
    tier = await open_tier(root=str(disk.path / "tier"), layout="segments")
    assert list(await tier.probe(keys_of(1))) == [False]
    disk.tell("eio")
    assert kinds(await tier.store(lender.writes(keys_of(3)))) == ["TransferFailed"] * 3
    disk.tell("well")
    await lender.keep(tier, keys_of(3))
    assert await lender.recall(tier, keys_of(3)) == whole(keys_of(3))


@pytest.mark.promise("It is read-only or answers `EIO`")
async def test_reads_and_writes_that_fail_leave_what_was_there_and_nothing_else(disk, tier, lender):
    await lender.keep(tier, keys_of(3))
    disk.tell("eio")
    assert await lender.recall(tier, keys_of(3)) == ["TransferFailed"] * 3
    assert kinds(await tier.store(lender.writes(keys_of(6), version=1))) == ["TransferFailed"] * 6
    disk.tell("well")
    assert await lender.recall(tier, keys_of(6)) == [*whole(keys_of(3)), *["ChunkMissing"] * 3]
    assert tier.counters().corrupt == {}
    assert temporaries(disk.path / "tier") == []


async def test_a_mount_that_hangs_holds_its_calls_and_nothing_else(disk, tier, lender, layout, system_call):
    await lender.keep(tier, keys_of(3))
    await scanned(tier)
    if layout == "segments":  # The system calls with which a load and a store come to the disk.
        load_begins, store_begins = system_call("preadv"), system_call("pwritev")
    else:
        load_begins = system_call("open", only=lambda path, *_, **__: path.endswith(".bin"))
        store_begins = system_call("open", only=lambda _, flags, *__, **___: flags & os.O_PATH)  # The folder.
    disk.tell("hang")
    load = asyncio.create_task(lender.recall(tier, keys_of(3)))
    store = asyncio.create_task(tier.store(lender.writes(keys_of(3, start=10))))
    async with asyncio.timeout(DEADLINE_S):
        await load_begins.wait_entered()
        await store_begins.wait_entered()
        assert list(await tier.probe(keys_of(4))) == [True] * 3 + [False]
        assert (await tier.aclose(0.1)).transfers == 2
        assert not load.done()
        assert not store.done()
        disk.tell("well")
        assert await load == whole(keys_of(3))
        assert list(await store) == [None] * 3


async def test_a_mount_whose_server_has_died_is_unavailable(disk, tier, lender):
    await lender.keep(tier, keys_of(3))
    disk.end()
    with pytest.raises(BackendUnavailable, match=os.strerror(errno.ENOTCONN)):
        await lender.recall(tier, keys_of(3))
    with pytest.raises(BackendUnavailable, match=os.strerror(errno.ENOTCONN)):
        await tier.store(lender.writes(keys_of(3)))


def remount(disk, how):
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


@pytest.mark.promise("It is read-only or answers `EIO`")
async def test_a_disk_that_was_remounted_read_only_serves_what_it_has(mount, open_tier, lender):
    disk = mount("ext4", image_bytes=32 << 20)
    tier = await open_tier(root=str(disk / "tier"), capacity_bytes="4MiB", holds=keys_of(3))
    remount(disk, "ro")
    assert kinds(await tier.store(lender.writes(keys_of(3, start=10)))) == ["TransferFailed"] * 3
    assert await lender.recall(tier, keys_of(3)) == whole(keys_of(3))
    remount(disk, "rw")
    await lender.keep(tier, keys_of(3, start=10))
    assert await lender.recall(tier, keys_of(3, start=10)) == whole(keys_of(3, start=10))


@pytest.mark.parametrize("runner", ["inline", "process"])
async def test_an_engine_whose_disk_is_remounted_read_only_says_the_cause(mount, runner, layout, caplog):
    disk = mount("ext4", image_bytes=32 << 20)
    options = {"root": str(disk / "tier"), "layout": layout, "capacity_bytes": "4MiB"}
    tier = {"type": "fs", "name": "disk", "limits": {"breaker_failures": 3}, **options}
    engine = await TieringOffloadingManager.open(describe(64, tier, runner=runner, limits={"action_chunks": 1}))
    caplog.set_level(logging.INFO, "kvtier.engine.metrics")
    async with engine:
        if layout == "files":
            await put(engine, range(4))
            assert await engine.drain()
        remount(disk, "ro")
        for number in range(4, 20):
            await put(engine, [number])
            assert await engine.drain()
        (told,) = engine.stats().tiers
        assert told.causes == {"EROFS": 3}
        assert told.dropped == {"breaker": 13}
        assert engine.metrics.get_sample_value("kvtier_tier_causes_total", {"tier": "disk", "cause": "EROFS"}) == 3
        remount(disk, "rw")
    first, opened, dropped = [record for record in caplog.records if record.name == "kvtier.engine.metrics"]
    assert first.levelno == opened.levelno == dropped.levelno == logging.WARNING
    assert "1 chunks failed (failed 1); the last cause is EROFS (Read-only file system)" in first.getMessage()
    assert "tier disk: the breaker is open after 3 failures in a row; the last cause is EROFS" in opened.getMessage()
    assert dropped.getMessage().startswith("tier disk: since the last line 13 chunks were dropped (breaker 13); see ")
