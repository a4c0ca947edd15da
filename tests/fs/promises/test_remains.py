"""What could not be removed takes room until it is gone, and no error is taken for a proof that it is."""

import asyncio
import errno
import os
from contextlib import suppress

import pytest

from kvtier.errors import BackendUnavailable
from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs import layout as fs_layout
from kvtier_backends.fs.disk import below, remains
from tests.fs.conftest import DEADLINE_S, kinds, taken_bytes, temporaries, until, until_stored, whole

CAPACITY_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Look often at what is in doubt."""
    for name in ("LOOK_S", "PAUSE_S_LEAST", "PAUSE_S_MOST"):
        monkeypatch.setattr(fs_layout, name, 0.01)


def counted_bytes(tier):
    return tier._lives.now.layout._tier.capacity.used_bytes


def of_kind(end):
    return lambda path, *_, **__: str(path).endswith(end)


@pytest.mark.promise("Files cannot be removed")
@pytest.mark.parametrize("error", [errno.EIO, errno.EBUSY, errno.ENOENT])
async def test_an_unfinished_file_counts_until_it_can_be_removed(open_tier, lender, root, system_call, error):
    tier = await open_tier(holds=keys_of(2))
    before_bytes = tier.occupancy().used_bytes
    rename = system_call("rename", error=errno.EIO, only=of_kind(".tmp"))
    unlink = system_call("unlink", error=error, only=of_kind(".tmp"))
    assert kinds(await tier.store(lender.writes(keys_of(4, start=10)))) == ["TransferFailed"] * 4
    assert len(temporaries(root)) == 4
    assert tier.occupancy().used_bytes > before_bytes
    assert counted_bytes(tier) >= taken_bytes(root)
    rename.let_go()
    unlink.let_go()
    await until(lambda: not temporaries(root))
    await until(lambda: counted_bytes(tier) == taken_bytes(root))
    await until(lambda: tier.counters().evictions_failed >= 4)


@pytest.mark.promise("Files cannot be removed")
@pytest.mark.parametrize("error", [errno.EIO, errno.EPERM, errno.ENOENT])
async def test_a_file_reported_as_missing_counts_until_it_is_gone(open_tier, lender, root, system_call, error):
    tier, kept = await open_tier(capacity_bytes=CAPACITY_BYTES), []
    unlink = system_call("unlink", error=error, only=of_kind(".bin"))
    for start in range(0, 80, 10):
        outcomes = await tier.store(lender.writes(keys_of(10, start)))
        kept += [key for key, outcome in zip(keys_of(10, start), outcomes, strict=True) if outcome is None]
        assert taken_bytes(root) <= CAPACITY_BYTES
    assert tier.counters().refused["capacity"] > 0
    if error == errno.EPERM:
        assert tier.counters().evictions_failed > 0
        async with asyncio.timeout(DEADLINE_S):
            while await lender.recall(tier, kept) != whole(kept):  # A removal that is being tried hides its chunk.
                await asyncio.sleep(0.001)
    unlink.let_go()
    await until_stored(tier, lender, keys_of(4, start=900))
    assert taken_bytes(root) <= CAPACITY_BYTES


async def test_a_load_of_a_file_reported_as_missing_fails_and_forgets_nothing(open_tier, lender, system_call):
    tier = await open_tier(holds=keys_of(1))
    missing = system_call("open", error=errno.ENOENT, only=of_kind(".bin"))
    assert await lender.recall(tier, keys_of(1)) == ["TransferFailed"]
    missing.let_go()
    assert await lender.recall(tier, keys_of(1)) == whole(keys_of(1))


async def test_a_chunk_that_a_failed_store_has_put_in_place_counts(open_tier, lender, root, system_call):
    tier = await open_tier(fsync=True, holds=keys_of(1))
    system_call("fsync", error=errno.EIO, only=lambda fd: os.path.isdir(f"/proc/self/fd/{fd}"))
    assert kinds(await tier.store(lender.writes(keys_of(1), version=1))) == ["TransferFailed"]
    assert await lender.recall(tier, keys_of(1)) == whole(keys_of(1), 1)
    assert counted_bytes(tier) == taken_bytes(root)


async def test_a_segment_made_though_the_disk_is_full_counts(open_tier, lender, root, system_call, monkeypatch):
    tier, allocate = await open_tier(layout="segments", capacity_bytes=CAPACITY_BYTES), os.posix_fallocate

    def allocate_and_fail(fd, offset, length):
        allocate(fd, offset, length)
        if length > CAPACITY_BYTES // 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate_and_fail)
    unlink = system_call("unlink", error=errno.EIO, only=of_kind(".tmp"))
    await tier.store(lender.writes(keys_of(2)))
    assert taken_bytes(root) <= CAPACITY_BYTES
    unlink.let_go()
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    await until_stored(tier, lender, keys_of(2))
    assert taken_bytes(root) <= CAPACITY_BYTES


async def test_a_file_system_that_goes_as_a_segment_is_made_is_unavailable(open_tier, lender, system_call):
    tier = await open_tier(layout="segments", capacity_bytes=CAPACITY_BYTES)
    system_call("posix_fallocate", error=errno.ENOTCONN)
    system_call("unlink", error=errno.ENOTCONN, only=of_kind(".tmp"))
    with pytest.raises(BackendUnavailable, match=os.strerror(errno.ENOTCONN)):
        await tier.store(lender.writes(keys_of(2)))


async def test_chunks_go_for_a_large_file_in_place_of_the_tiers_own(open_tier, lender, root, mapper, layout):
    tier = await open_tier(layout=layout, capacity_bytes=CAPACITY_BYTES)
    for start in range(0, 60, 10):
        await tier.store(lender.writes(keys_of(10, start)))
    (root / mapper.config_name).write_bytes(bytes(CAPACITY_BYTES // 2))
    await until(lambda: taken_bytes(root) <= CAPACITY_BYTES)
    assert counted_bytes(tier) >= taken_bytes(root)


async def test_unseen_room_counts_as_all_that_may_be_there(open_tier, lender, root, system_call, monkeypatch):
    monkeypatch.setattr("kvtier_backends.fs.files.accounts.AGAIN_S_LEAST", 0.01)
    monkeypatch.setattr("kvtier_backends.fs.files.accounts.AGAIN_TIMES", 0)
    before = await open_tier(capacity_bytes=CAPACITY_BYTES)
    for start in range(0, 60, 10):
        await before.store(lender.writes(keys_of(10, start)))
    await before.aclose(10)
    listing = system_call("scandir", error=errno.EIO)
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES)
    for start in range(100, 160, 10):
        await tier.store(lender.writes(keys_of(10, start)))
        assert taken_bytes(root) <= CAPACITY_BYTES
    listing.let_go()
    await until_stored(tier, lender, keys_of(4, start=900))
    assert taken_bytes(root) <= CAPACITY_BYTES


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EIO, errno.ENOENT])
async def test_a_disk_that_errs_is_not_taken_for_a_lost_one(open_tier, lender, system_call, layout, error):
    tier = await open_tier(layout=layout, holds=keys_of(2))
    before, by_name = tier._lives.now, lambda name, *_, **__: not isinstance(name, int)
    calls = [system_call(name, error=error, only=by_name) for name in ("stat", "open")]
    for _ in range(3):
        await lender.recall(tier, keys_of(2))
        with suppress(BackendUnavailable):
            await tier.store(lender.writes(keys_of(2, 10)))
    for call in calls:
        call.let_go()
    await lender.keep(tier, keys_of(2, 10))
    assert tier._lives.now is before


async def test_a_failed_deletion_of_what_is_not_there_takes_nothing_off(open_tier, root, system_call):
    tier = await open_tier(holds=keys_of(1))
    unlink = system_call(
        "open", error=errno.EBUSY, only=lambda name, flags, *_, **__: "/" in str(name) and flags & os.O_PATH
    )
    await tier.delete(keys_of(4, start=10))
    unlink.let_go()
    await until(lambda: tier._lives.now.layout._tier.root.sizes.doubtful == [])
    assert counted_bytes(tier) == taken_bytes(root)


async def test_folders_that_a_failed_store_has_made_go(open_tier, lender, root, system_call):
    tier = await open_tier(holds=keys_of(1))
    before = taken_bytes(root)
    mkdir = system_call("mkdir", error=errno.EBUSY, only=of_kind("_g0"))
    assert None not in await tier.store(lender.writes(keys_of(4, start=10)))
    mkdir.let_go()
    await until(lambda: counted_bytes(tier) == taken_bytes(root) == before)


def test_a_file_is_proved_absent_though_its_folder_is_made_between_two_calls(tmp_path, monkeypatch):
    opened = below.open_folder

    def open_folder(root_fd, name):
        try:
            return opened(root_fd, name)
        finally:
            (tmp_path / "folder").mkdir(exist_ok=True)

    monkeypatch.setattr(below, "open_folder", open_folder)
    root_fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert remains.is_absent(root_fd, "folder/chunk")
    finally:
        os.close(root_fd)
