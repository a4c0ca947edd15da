"""A directory that goes away and comes back, empty or as it was: the tier works again without a restart."""

import asyncio
import os
import shutil
import subprocess
from contextlib import suppress

import pytest

from kvtier.backend import BackendUnavailable, Removed
from kvtier.errors import ConfigError
from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs import backend
from kvtier_backends.fs.disk import owner
from kvtier_backends.fs.disk.owner import OWNER
from tests.fs.conftest import DEADLINE_S, scanned, taken_bytes, whole

LAYOUTS = [{"layout": "segments"}, {"layout": "files"}, {"layout": "files", "shared": True}]
OLD, NEW = keys_of(3), keys_of(3, start=10)

pytestmark = pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(options))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Let a tier wait only a moment for the former owner of its root."""
    monkeypatch.setattr(owner, "PATIENCE_S", 0.1)


@pytest.fixture
def looking(monkeypatch):
    monkeypatch.setattr(backend, "LOOK_EVERY_S", 0.0)


@pytest.fixture
async def tier(open_tier, lender, options):
    return await open_tier(capacity_bytes="4MiB", **options, holds=OLD)


async def trial(tier, lender):
    """Store as a breaker's trial does: whatever fails, another one comes later."""
    try:
        return list(await tier.store(lender.writes(NEW))) == [None] * len(NEW)
    except BackendUnavailable:
        return False


async def works_again(tier, lender):
    """The first trial may find that the directory is gone, and the next one opens it."""
    stored = await trial(tier, lender) or await trial(tier, lender)
    return stored and await lender.recall(tier, NEW) == whole(NEW)


def rmtree(path):
    """Remove a tree, also one in which the tier makes a file meanwhile."""
    while path.exists():
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_chunks(root, mapper):
    for path in root.glob(f"{mapper.chunks_folder}*"):
        rmtree(path)


REMOVALS = {
    "the root": lambda root, mapper: rmtree(root),
    "the root, and it is made again": lambda root, mapper: (rmtree(root), root.mkdir()),
    "all in the root": lambda root, mapper: [rmtree(path) for path in root.iterdir()],
    "the books": lambda root, mapper: rmtree(root / mapper.folder),
    "the chunks": remove_chunks,
}


@pytest.mark.promise("The directory is removed, emptied or comes back on another disk")
@pytest.mark.parametrize("removed", REMOVALS)
async def test_what_is_removed_is_made_again(tier, lender, root, mapper, removed, open_tier, options, looking):
    await scanned(tier)
    gone = set[bytes]()

    async def listen():
        async for event in tier.watch():
            if isinstance(event, Removed):
                gone.update(event.keys)

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    REMOVALS[removed](root, mapper)
    assert await works_again(tier, lender)
    if removed != "the books":
        assert await lender.recall(tier, OLD) == ["ChunkMissing"] * len(OLD)
        assert not any(await tier.probe(OLD))
        async with asyncio.timeout(DEADLINE_S):
            while not gone >= set(OLD):
                await asyncio.sleep(0.001)
    assert 0 < taken_bytes(root) <= 4 << 20
    with pytest.raises(ConfigError, match="is used by"):  # It is owned again.
        await open_tier(shared=not options.get("shared", False))
    listening.cancel()
    await asyncio.wait([listening])


@pytest.mark.promise("The directory is removed, emptied or comes back on another disk")
async def test_a_directory_that_comes_back_full_has_its_chunks(tier, lender, root):
    kept = root.with_name("kept")
    shutil.copytree(root, kept)
    rmtree(root)
    root.mkdir(mode=0o000)
    assert not await trial(tier, lender)
    root.rmdir()
    kept.rename(root)
    assert await works_again(tier, lender)
    assert await lender.recall(tier, OLD) == whole(OLD)


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_renamed_root_goes_on_being_used(tier, lender, root, replaced):
    """Nothing is written to a directory in its place: when a mount goes away, the path leads to another disk."""
    away = root.with_name("away")
    root.rename(away)
    if replaced:
        root.mkdir()
    assert await works_again(tier, lender)
    assert not root.exists() or os.listdir(root) == []
    if replaced:
        root.rmdir()
    away.rename(root)
    assert await lender.recall(tier, OLD + NEW) == whole(OLD + NEW)


async def test_a_new_directory_that_another_tier_took_is_left_to_it(tier, lender, root, open_tier, options):
    rmtree(root)
    other = await open_tier(shared=not options.get("shared", False))
    for _ in range(2):
        assert not await trial(tier, lender)
    with pytest.raises(BackendUnavailable, match="is used by tier 0:fs"):
        await tier.probe(OLD)
    await other.aclose(DEADLINE_S)
    assert await works_again(tier, lender)


@pytest.mark.promise("The directory is removed, emptied or comes back on another disk")
async def test_an_unmounted_mount_point_is_never_filled(open_tier, lender, mount, options):
    place = mount("tmpfs", "size=32m")
    root = place / "tier"
    tier = await open_tier(root=str(root), capacity_bytes="4MiB", **options, holds=OLD)
    rmtree(root)
    await asyncio.to_thread(subprocess.run, ["umount", "-l", place], check=True)
    for _ in range(3):
        assert not await trial(tier, lender)
    assert os.listdir(place) == []
    await asyncio.to_thread(subprocess.run, ["mount", "-t", "tmpfs", "-o", "size=32m", "none", place], check=True)
    assert await works_again(tier, lender)
    assert OWNER in os.listdir(root)


async def test_no_call_reaches_a_lost_directory_and_its_tier_closes(tier, lender, root, options, looking):
    rmtree(root)
    root.write_bytes(b"a file in its place")
    assert not await trial(tier, lender)  # It was due to look, and no call had failed before.
    for call in (tier.load(lender.reads(OLD)), tier.probe(OLD), tier.delete(OLD)):
        with pytest.raises(BackendUnavailable):
            await call
    assert not await trial(tier, lender)
    assert await tier.aclose(DEADLINE_S) == (0,)


async def test_a_cancelled_call_keeps_no_root(tier, lender, root, mapper, options, monkeypatch, looking):
    """The folder of chunks alone is gone: the owner's file stays, locked until the life has ended."""
    ending, may_end, end = asyncio.Event(), asyncio.Event(), backend.Life.aclose

    async def slow_end(life, ends_at, close_files):
        ending.set()
        await may_end.wait()
        return await end(life, ends_at, close_files)

    monkeypatch.setattr(backend.Life, "aclose", slow_end)
    remove_chunks(root, mapper)
    call = asyncio.create_task(trial(tier, lender))
    await asyncio.wait_for(ending.wait(), DEADLINE_S)
    call.cancel()
    await asyncio.wait([call])
    may_end.set()
    assert await works_again(tier, lender)
