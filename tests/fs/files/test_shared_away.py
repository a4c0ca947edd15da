"""A shared page that is away for a while, as on a file server: what that costs, and that the tier goes on afterwards.

A machine that was cut off for longer than its lease has lost its locks, and its reads and writes of the page fail.
"""

import asyncio
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.errors import BackendUnavailable, NoSpace
from kvtier.memory import PAGE_BYTES
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs.disk.shared_page import SharedPage
from kvtier_backends.fs.files import accounts, eviction

CAPACITY_BYTES = 4 << 20
BOOT = b"8 bytes."
DEADLINE_S = 30.0


def is_page(fd: int, *_: object) -> bool:
    return os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).startswith("ledger")


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Callable[[], SharedPage]]:
    """Open the page of one directory as several processes do."""
    fd, opened = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), list[SharedPage]()

    def open_one() -> SharedPage:
        opened.append(SharedPage(fd, "ledger", BOOT))
        return opened[-1]

    yield open_one
    for page in opened:
        page.close()
    os.close(fd)


@pytest.fixture
def one_and_other(pages) -> tuple[SharedPage, SharedPage]:
    one, other = pages(), pages()
    one.end_count(one.begin_count(), 0)
    return one, other


def forget_locks(page: SharedPage, tmp_path: Path) -> None:
    """Release the locks of a page, as a file server does after its lease."""
    fd = os.open(tmp_path / "ledger", os.O_RDWR)
    os.dup2(fd, page._fd, inheritable=False)
    os.close(fd)


async def back(page: SharedPage) -> tuple[int, int] | None:
    """Wait until the page is there again, and return what it says is used and promised.

    Until then a call may still fail: with the one that it waits behind.
    """
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(BackendUnavailable):
                return await asyncio.to_thread(page.taken)
            await asyncio.sleep(0.01)


def test_a_lock_that_is_free_again_is_had_though_nobody_is_woken(
    one_and_other, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that waits for a lock of a file server's sleeps for a second, then for two, up to thirty."""
    real = fcntl.fcntl

    def wakes_nobody(fd: int, command: int, lock: bytes = b"") -> object:
        assert command != fcntl.F_OFD_SETLKW, "this would sleep"
        return real(fd, command, lock)

    monkeypatch.setattr(fcntl, "fcntl", wakes_nobody)
    one, other = one_and_other
    had = threading.Event()

    def evict() -> None:
        with other.evicting():
            had.set()

    waiting = threading.Thread(target=evict)
    with one.evicting():
        waiting.start()
        assert other.taken() == (0, 0)
        assert not had.is_set()
    assert had.wait(DEADLINE_S)
    waiting.join()


def test_who_has_lost_its_locks_takes_a_slot_anew_and_keeps_its_promise(one_and_other, tmp_path, system_call) -> None:
    one, other = one_and_other
    assert one.reserve(60, 100) == 60
    forget_locks(one, tmp_path)
    assert other.reserve(10, 100) == 10
    failing = system_call("pread", error=errno.EIO, only=lambda fd, *_: fd == one._fd)
    with pytest.raises(BackendUnavailable, match="ledger: the shared page is away: Input/output error"):
        one.taken()
    failing.let_go()
    assert one.taken() == (60, 70)  # What was promised counts as written, and is promised still.
    one.settle(60, 50)
    assert other.taken() == (110, 10)
    one.end_count(one.begin_count(), 50)
    assert other.taken() == (50, 10)


def test_a_slot_that_another_process_has_had_meanwhile_stays_its(one_and_other, pages, tmp_path, system_call) -> None:
    one, other = one_and_other
    assert one.reserve(30, 100) == 30
    forget_locks(one, tmp_path)
    third = pages()  # It has the slot that the first has lost, and what that had promised counts as written.
    assert third.reserve(20, 100) == 20
    failing = system_call("pread", error=errno.EIO, only=lambda fd, *_: fd == one._fd)
    with pytest.raises(BackendUnavailable):
        one.settle(30, 30)
    failing.let_go()
    assert one.taken() == (30, 50)
    third.settle(20, 20)
    one.settle(30, 30)
    assert other.taken() == (80, 0)


def test_who_waits_behind_a_call_that_fails_fails_with_it(one_and_other, system_call) -> None:
    """And does not wait for a time-out of the file server's of its own."""
    page, _ = one_and_other
    hanging = system_call("pread", error=errno.EIO, sticks=True)
    told: list[Exception] = []

    def ask() -> None:
        try:
            page.taken()
        except BackendUnavailable as error:
            told.append(error)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    asking[0].start()
    assert hanging._entered.acquire(timeout=DEADLINE_S)
    for thread in asking[1:]:
        thread.start()
    while sum(b"futex" in Path(f"/proc/self/task/{each.native_id}/wchan").read_bytes() for each in asking) < 4:
        pass  # Until all of them wait.
    hanging._opened.set()
    for thread in asking:
        thread.join()
    assert len(told) == 4
    assert hanging.times == 1


async def test_a_page_that_is_away_costs_stores_and_nothing_else(
    open_tier, lender: Lender, taken_bytes, root: Path, system_call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "STAMP_EVERY_S", 0.01)
    tier = await open_tier(shared=True, capacity_bytes=CAPACITY_BYTES)
    await lender.keep(tier, keys_of(16))
    failing = system_call("pread", error=errno.EIO, only=is_page)
    with pytest.raises(BackendUnavailable, match="the shared page is away"):
        await tier.store(lender.writes(keys_of(16, 16)))
    assert await lender.recall(tier, keys_of(16)) == [label(key) for key in keys_of(16)]
    asked = failing.times
    async with asyncio.timeout(DEADLINE_S):
        while failing.times < asked + 3:  # What goes on beside the calls has met it, and goes on.
            await asyncio.sleep(0.01)
    failing.let_go()
    await back(tier._lives.now.tier.root.shared_page)
    for first in range(16, 1_600, 16):
        await lender.keep(tier, keys_of(16, first))
        lender.take_back()
        if tier.counters().evicted > 32:
            break
    assert tier.counters().evicted
    assert taken_bytes(root) <= CAPACITY_BYTES


async def test_a_tier_whose_page_was_away_from_its_first_count_on_is_filled_when_it_is_back(
    open_tier, lender: Lender, system_call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "AGAIN_S_LEAST", 0.01)
    system_calls = system_call("pread", error=errno.EIO, only=lambda fd, *_: is_page(fd) and system_calls.times > 1)
    tier = await open_tier(shared=True, capacity_bytes=CAPACITY_BYTES)
    with pytest.raises(BackendUnavailable):
        await tier.store(lender.writes(keys_of(16)))
    system_calls.let_go()
    await back(tier._lives.now.tier.root.shared_page)
    async with asyncio.timeout(DEADLINE_S):
        while set(await tier.store(lender.writes(keys_of(16)))) != {None}:
            await asyncio.sleep(0.01)


async def test_what_the_page_was_not_told_it_is_told_when_it_is_back(
    open_tier, lender: Lender, taken_bytes, root: Path, system_call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "STAMP_EVERY_S", 0.01)
    tier = await open_tier(shared=True, capacity_bytes=CAPACITY_BYTES)
    page = tier._lives.now.tier.root.shared_page
    await lender.keep(tier, keys_of(4))
    stored = threading.Event()
    renamed = system_call("rename", only=lambda *_, **__: stored.set() is not None)
    failing = system_call("pwrite", error=errno.EIO, only=lambda fd, *_: is_page(fd) and stored.is_set())
    await lender.keep(tier, keys_of(16, 4))  # What was promised for them stays promised, until the page is back.
    assert renamed.times
    await failing.wait_entered()
    failing.let_go()
    used_bytes, promised_bytes = await back(page)
    async with asyncio.timeout(DEADLINE_S):
        while promised_bytes:
            await asyncio.sleep(0.01)
            used_bytes, promised_bytes = await asyncio.to_thread(page.taken)
    assert taken_bytes(root) - 2 * PAGE_BYTES <= used_bytes


async def test_a_folder_that_cannot_be_read_does_not_count_as_empty(
    open_tier, lender: Lender, root: Path, system_call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "AGAIN_S_LEAST", 0.01)
    one = await open_tier(shared=True, capacity_bytes=CAPACITY_BYTES)
    await lender.keep(one, keys_of(16))
    page = one._lives.now.tier.root.shared_page
    used_bytes, _ = await asyncio.to_thread(page.taken)
    failing = system_call("scandir", error=errno.EIO)
    other = await open_tier(shared=True, capacity_bytes=CAPACITY_BYTES)
    async with asyncio.timeout(DEADLINE_S):
        await other._layout._start.done.wait()
    assert other.counters().scan_failed
    assert (await asyncio.to_thread(page.taken))[0] >= used_bytes
    failing.let_go()


async def test_stores_are_refused_where_nobody_has_counted_until_every_folder_can_be_read(
    open_tier, lender: Lender, root: Path, system_call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "AGAIN_S_LEAST", 0.01)
    before = await open_tier(shared=True, capacity_bytes=CAPACITY_BYTES)
    await lender.keep(before, keys_of(16))
    await before.aclose(DEADLINE_S)
    (ledger,) = root.rglob("ledger*")
    ledger.unlink()
    failing = system_call("scandir", error=errno.EIO)
    tier = await open_tier(shared=True, capacity_bytes=CAPACITY_BYTES)
    assert {type(outcome) for outcome in await tier.store(lender.writes(keys_of(16, 16)))} == {NoSpace}
    assert await lender.recall(tier, keys_of(16)) == [label(key) for key in keys_of(16)]
    failing.let_go()
    async with asyncio.timeout(DEADLINE_S):
        while set(await tier.store(lender.writes(keys_of(16, 16)))) != {None}:
            await asyncio.sleep(0.01)


async def test_a_chunk_that_another_host_removes_as_it_is_read_is_missing(
    open_tier, lender: Lender, system_call
) -> None:
    """A file server keeps no file for those who have it open; its file system is not away."""
    tier = await open_tier(io="buffered")
    await lender.keep(tier, keys_of(2))
    failing = system_call("preadv", error=errno.ESTALE)
    assert await lender.recall(tier, keys_of(2)) == ["ChunkMissing"] * 2
    failing.let_go()
