"""Several tiers, one directory, one budget, no server; the page between them may be damaged, or away for a while."""

import asyncio
import errno
import fcntl
import fnmatch
import itertools
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.backend.contract import ScanDone
from kvtier.errors import BackendUnavailable, ConfigError, NoSpace
from kvtier.memory import PAGE_BYTES
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs import FsOptions
from kvtier_backends.fs.disk.shared_page import read_page
from kvtier_backends.fs.files import accounts, eviction
from tests.fs.conftest import DEADLINE_S, SLOT_BYTES, taken_bytes, until, until_stored, whole

CAPACITY_BYTES = 40 * (SLOT_BYTES + 8_192) + 524_288
SHARED = {"shared": True, "capacity_bytes": CAPACITY_BYTES}


@pytest.fixture
def hasty(monkeypatch):
    """Count again soon, and do soon what is done beside the calls."""
    monkeypatch.setattr(accounts, "AGAIN_S_LEAST", 0.01)
    monkeypatch.setattr(eviction, "STAMP_EVERY_S", 0.01)


def is_page(fd, *_):
    return os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).startswith("ledger")


def page_of(tier):
    return tier._lives.now.layout._tier.root.shared_page


async def back(page):
    """Wait until the page is there again, and return what it says is used and promised.

    Until then a call may still fail: with the one that it waits behind.
    """
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(BackendUnavailable):
                return await asyncio.to_thread(page.taken)
            await asyncio.sleep(0.01)


def used_bytes(root, mapper):
    (path,) = (root / mapper.folder).glob("ledger*")
    return read_page(path.read_bytes()).used_bytes


async def test_each_sees_what_the_others_store_and_delete(open_tier, lender):
    one, two = [await open_tier(**SHARED) for _ in range(2)]
    report = two.watch()
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(report) == ScanDone(complete=False)
    await lender.keep(one, keys_of(4))
    assert list(await two.probe(keys_of(5))) == [True] * 4 + [False]
    assert await lender.recall(two, keys_of(4)) == whole(keys_of(4))
    await one.delete(keys_of(2))
    assert list(await two.probe(keys_of(4))) == [False, False, True, True]
    await report.aclose()


@pytest.mark.parametrize("remembers", [False, True])
async def test_what_another_has_used_is_spared(open_tier, lender, path_of, monkeypatch, remembers):
    capacity_bytes, asked, known = 24 * (SLOT_BYTES + 16_384), os.stat, dict[str, os.stat_result]()
    if remembers:
        monkeypatch.setattr(os, "stat", lambda path, **how: known.setdefault(str(path), asked(path, **how)))
    tier = await open_tier(shared=True, capacity_bytes=capacity_bytes, holds=keys_of(4))
    assert all(await tier.probe(keys_of(4)))
    later_s = time.time() + 120
    os.utime(path_of(keys_of(1)[0]), (later_s, later_s))  # As another does that has used it.
    others, start = [path_of(key) for key in keys_of(4)[1:]], 100
    while any(map(os.path.lexists, others)):
        await tier.store(lender.writes(keys_of(4, start := start + 4)))
    for _ in range(2):  # Then the first is next; and once it has been spared, all that is newer goes before it.
        await tier.store(lender.writes(keys_of(4, start := start + 4)))
    spared = [label(keys_of(1)[0]), "ChunkMissing", "ChunkMissing", "ChunkMissing"]
    async with asyncio.timeout(DEADLINE_S):
        while await lender.recall(tier, keys_of(4)) != spared:  # Missing, while the background looks at its time.
            await asyncio.sleep(0)


async def test_the_first_use_of_what_another_has_stored_is_written_down(open_tier, lender, path_of):
    one, other = [await open_tier(**SHARED) for _ in range(2)]
    await lender.keep(other, keys_of(1, 100))  # The start-up scan is over.
    await lender.keep(one, keys_of(1))
    os.utime(path_of(keys_of(1)[0]), (1_000, 1_000))
    assert await lender.recall(other, keys_of(1)) == whole(keys_of(1))
    await other.aclose(DEADLINE_S)  # Uses are written down then at the latest.
    assert path_of(keys_of(1)[0]).stat().st_mtime > 1_000


async def test_only_lru_with_locks_is_shared(open_tier, monkeypatch):
    with pytest.raises(ConfigError, match=r"^eviction_policy: 'arc' given, 'lru' accepted with shared"):
        FsOptions(root="/x", shared=True, eviction_policy="arc")

    def refuse(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(ConfigError, match="with locks on files accepted"):
        await open_tier(shared=True)


@pytest.mark.promise("The shared page is damaged or outdated")
async def test_a_damaged_page_costs_no_chunk_and_is_counted_again(open_tier, lender, root, mapper):
    one, two = [await open_tier(shared=True, capacity_bytes="64MiB") for _ in range(2)]
    await until_stored(one, lender, keys_of(8))
    await until_stored(two, lender, keys_of(8, 8))
    (page,) = (root / mapper.folder).glob("ledger*")
    page.write_bytes(bytes(PAGE_BYTES))
    await asyncio.gather(until_stored(one, lender, keys_of(8, 16)), until_stored(two, lender, keys_of(8, 24)))
    assert [tier.counters().evicted for tier in (one, two)] == [0, 0]
    assert await lender.recall(one, keys_of(32)) == whole(keys_of(32))


async def test_a_store_cancelled_as_it_evicts_reports_what_went(open_tier, lender, root, mapper, system_call):
    tier = await open_tier(**SHARED, low_water=1.0)
    await until_stored(tier, lender, keys_of(8))

    async def store_on():
        for start in itertools.count(8, 8):
            await tier.store(lender.writes(keys_of(8, start)))

    removal = system_call("unlink", sticks=True, only=lambda name, **kwargs: name.endswith(".bin"))
    storing = await removal.met_by(store_on())
    storing.cancel()
    removal.let_go()
    with pytest.raises(asyncio.CancelledError):
        await storing
    await tier.aclose(DEADLINE_S)
    assert used_bytes(root, mapper) == taken_bytes(root)


async def test_a_tier_closed_as_it_evicts_reports_what_went(open_tier, lender, root, mapper, system_call):
    tier = await open_tier(shared=True, capacity_bytes=4 * CAPACITY_BYTES, low_water=0.1)
    removal = system_call("unlink", sticks=True, only=lambda name, **kwargs: name.endswith(".bin"))
    start = 0
    while not removal.times:
        await until_stored(tier, lender, keys_of(8, start := start + 8))
    closing = asyncio.create_task(tier.aclose(DEADLINE_S))
    await asyncio.sleep(0)  # It has begun: what ran beside the calls is cancelled.
    removal.let_go()
    await closing
    assert used_bytes(root, mapper) == taken_bytes(root)


@pytest.mark.promise("Chunk files are deleted under a running engine")
async def test_room_of_removed_files_is_given_out_after_a_count(open_tier, lender, root, monkeypatch, hasty):
    """Nobody says on the page what went without it: a store that is refused has the directory counted."""
    monkeypatch.setattr(accounts, "AGAIN_TIMES", 0)  # The first scan may take long on a busy machine.
    tier = await open_tier(**SHARED)
    for start in range(0, 200, 10):
        await until_stored(tier, lender, keys_of(10, start=start))
    for folder, _, names in os.walk(root):
        for name in fnmatch.filter(names, "*.bin"):
            Path(folder, name).unlink(missing_ok=True)  # The tier may be faster.
    assert await lender.recall(tier, keys_of(200)) == ["ChunkMissing"] * 200
    assert tier.occupancy().used_bytes == 0
    await until_stored(tier, lender, keys_of(10, start=300))
    assert await lender.recall(tier, keys_of(10, start=300)) == whole(keys_of(10, start=300))


# A page that is away for a while, as on a file server.


async def test_a_page_that_is_away_costs_stores_and_nothing_else(open_tier, lender, root, system_call, hasty):
    tier = await open_tier(**SHARED, holds=keys_of(16))
    failing = system_call("pread", error=errno.EIO, only=is_page)
    with pytest.raises(BackendUnavailable, match="the shared page is away"):
        await tier.store(lender.writes(keys_of(16, 16)))
    assert await lender.recall(tier, keys_of(16)) == whole(keys_of(16))
    asked = failing.times
    await until(lambda: failing.times >= asked + 3)  # What goes on beside the calls has met it, and goes on.
    failing.let_go()
    await back(page_of(tier))
    for first in range(16, 1_600, 16):
        await lender.keep(tier, keys_of(16, first))
        lender.take_back()
        if tier.counters().evicted > 32:
            break
    assert tier.counters().evicted
    assert taken_bytes(root) <= CAPACITY_BYTES


async def test_a_tier_whose_page_was_away_from_the_start_is_filled_later(open_tier, lender, system_call, hasty):
    failing = system_call("pread", error=errno.EIO, only=lambda fd, *_: is_page(fd) and failing.times > 1)
    tier = await open_tier(**SHARED)
    with pytest.raises(BackendUnavailable):
        await tier.store(lender.writes(keys_of(16)))
    failing.let_go()
    await back(page_of(tier))
    await until_stored(tier, lender, keys_of(16))


async def test_the_page_is_told_the_rest_when_it_is_back(open_tier, lender, root, system_call, hasty):
    tier, stored = await open_tier(**SHARED, holds=keys_of(4)), threading.Event()
    renamed = system_call("rename", only=lambda *_, **__: stored.set() is not None)
    failing = system_call("pwrite", error=errno.EIO, only=lambda fd, *_: is_page(fd) and stored.is_set())
    await lender.keep(tier, keys_of(16, 4))  # What was promised for them stays promised, until the page is back.
    assert renamed.times
    await failing.wait_entered()
    failing.let_go()
    used_bytes, promised_bytes = await back(page_of(tier))
    async with asyncio.timeout(DEADLINE_S):
        while promised_bytes:
            await asyncio.sleep(0.01)
            used_bytes, promised_bytes = await asyncio.to_thread(page_of(tier).taken)
    assert taken_bytes(root) - 2 * PAGE_BYTES <= used_bytes


@pytest.mark.parametrize("page", ["there", "gone"])
async def test_an_unreadable_folder_does_not_count_as_empty(open_tier, lender, root, system_call, hasty, page):
    one = await open_tier(**SHARED, holds=keys_of(16))
    before, _ = await asyncio.to_thread(page_of(one).taken)
    if page == "gone":
        await one.aclose(DEADLINE_S)
        next(root.rglob("ledger*")).unlink()
    failing, tier = system_call("scandir", error=errno.EIO), await open_tier(**SHARED)
    if page == "gone":
        assert {type(outcome) for outcome in await tier.store(lender.writes(keys_of(16, 16)))} == {NoSpace}
    else:
        await until(lambda: bool(tier.counters().scan_failed))
        assert (await asyncio.to_thread(page_of(one).taken))[0] >= before
    assert await lender.recall(tier, keys_of(16)) == whole(keys_of(16))
    failing.let_go()
    await until_stored(tier, lender, keys_of(16, 16))


async def test_a_chunk_that_another_host_removes_as_it_is_read_is_missing(open_tier, lender, system_call):
    """A file server keeps no file for those who have it open; its file system is not away."""
    tier = await open_tier(io="buffered", holds=keys_of(2))
    failing = system_call("preadv", error=errno.ESTALE)
    assert await lender.recall(tier, keys_of(2)) == ["ChunkMissing"] * 2
    failing.let_go()
