"""Several processes, one directory, one budget, no server: whoever dies, the limit holds and the others go on.

`KVTIER_SHARED_ROUNDS` sets how often the directory is looked at, and processes are killed.
"""

import asyncio
import errno
import fcntl
import itertools
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier.backend.contract import ScanDone
from kvtier.backend.namespace import FileMapper, OffloadKey
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.memory import PAGE_BYTES
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk.shared_page import SLOTS, VERSION, SharedPage, read_page
from kvtier_backends.fs.files import accounts

ROUNDS = int(os.environ.get("KVTIER_SHARED_ROUNDS", "20"))
SEED = int(os.environ.get("KVTIER_SHARED_SEED", "1"))
DEADLINE_S = 30.0
CHUNKS = 600
CAPACITY_BYTES = 40 * (8_192 + 4_096 + 8_192) + 524_288
BOOT = b"8 bytes."


@pytest.fixture
def open_page(tmp_path: Path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    opened: list[SharedPage] = []

    def open_page(boot: bytes = BOOT) -> SharedPage:
        opened.append(SharedPage(fd, "ledger", boot))
        return opened[-1]

    yield open_page
    for shared_page in opened:
        shared_page.close()
    os.close(fd)


def counted(shared_page: SharedPage, seen_bytes: int) -> SharedPage:
    shared_page.end_count(shared_page.begin_count(), seen_bytes)
    return shared_page


async def test_processes_that_are_killed_keep_the_limit_together(
    start_writer: Callable[..., Awaitable[Any]], taken_bytes: Callable[[Path], int], root: Path, open_tier
) -> None:
    """Two at a time; all are held still, looked at, and now and then one is killed and followed by another."""
    dice = random.Random(SEED)
    options = {"capacity_bytes": CAPACITY_BYTES, "shared": True}
    writers = [await start_writer(CHUNKS, **options) for _ in range(2)]
    for number, writer in enumerate(writers):
        await writer.begin(SEED + number)
        await writer.works()
    most = number = 0
    while number < ROUNDS or most <= CAPACITY_BYTES / 3:  # Of two writers, most is promised.
        number += 1
        assert number < 100 * ROUNDS, "it holds far less than it may"
        await asyncio.sleep(dice.random() * 0.05)  # Not to wait for anything: to stop at any moment of a call.
        for writer in writers:
            await writer.stop()
        most = max(most, taken_bytes(root))
        assert most <= CAPACITY_BYTES
        for writer in writers:
            writer.go_on()
        if number % 4 == 3:
            victim = dice.choice(writers)
            await victim.kill()
            assert taken_bytes(root) <= CAPACITY_BYTES + 0
            await victim.begin(1_000 + number)
            await victim.works()
    for writer in writers:
        await writer.works()
    assert [writer.wrong for writer in writers] == [[], []]


async def test_each_sees_what_the_others_store_and_delete(open_tier, lender: Lender) -> None:
    one, two = [await open_tier(shared=True, capacity_bytes="64MiB") for _ in range(2)]
    report = two.watch()
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(report) == ScanDone(complete=False)
    await lender.keep(one, keys_of(4))
    assert list(await two.probe(keys_of(5))) == [True] * 4 + [False]
    assert await lender.recall(two, keys_of(4)) == [label(key) for key in keys_of(4)]
    await one.delete(keys_of(2))
    assert list(await two.probe(keys_of(4))) == [False, False, True, True]
    await report.aclose()


@pytest.mark.parametrize("remembers", [False, True])
async def test_what_another_has_used_is_spared(
    open_tier, lender: Lender, path_of, monkeypatch: pytest.MonkeyPatch, remembers: bool
) -> None:
    """Also if this machine remembers a file as it was, as a client of a file server does."""
    capacity_bytes, asked, known = 24 * (8_192 + 4_096 + 16_384), os.stat, dict[str, os.stat_result]()
    if remembers:
        monkeypatch.setattr(os, "stat", lambda path, **how: known.setdefault(str(path), asked(path, **how)))
    one = await open_tier(shared=True, capacity_bytes=capacity_bytes)
    await lender.keep(one, keys_of(4))
    assert all(await one.probe(keys_of(4)))
    later_s = time.time() + 120
    os.utime(path_of(keys_of(1)[0]), (later_s, later_s))  # As another does that has used it.
    others, start = [path_of(key) for key in keys_of(4)[1:]], 100
    while any(map(os.path.lexists, others)):
        await one.store(lender.writes(keys_of(4, start := start + 4)))
    for _ in range(2):  # Then the first is next; and once it has been spared, all that is newer goes before it.
        await one.store(lender.writes(keys_of(4, start := start + 4)))
    spared = [label(keys_of(1)[0]), "ChunkMissing", "ChunkMissing", "ChunkMissing"]
    async with asyncio.timeout(DEADLINE_S):
        while await lender.recall(one, keys_of(4)) != spared:  # Missing, while the background looks at its time.
            await asyncio.sleep(0)


async def test_the_first_use_of_what_another_has_stored_is_written_down(open_tier, lender: Lender, path_of) -> None:
    """It is not known here yet when that was used last."""
    one, other = [await open_tier(shared=True, capacity_bytes=CAPACITY_BYTES) for _ in range(2)]
    await lender.keep(other, keys_of(1, 100))  # The start-up scan is over.
    await lender.keep(one, keys_of(1))
    os.utime(path_of(keys_of(1)[0]), (1_000, 1_000))
    assert await lender.recall(other, keys_of(1)) == [label(keys_of(1)[0])]
    await other.aclose(DEADLINE_S)  # Uses are written down then at the latest.
    assert path_of(keys_of(1)[0]).stat().st_mtime > 1_000


def test_only_lru_is_shared() -> None:
    with pytest.raises(ConfigError, match=r"^eviction_policy: 'arc' given, 'lru' accepted with shared"):
        FsOptions(root="/x", shared=True, eviction_policy="arc")


async def test_without_locks_it_is_not_shared(open_tier, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> bytes:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(ConfigError, match="with locks on files accepted"):
        await open_tier(shared=True)


def test_nothing_is_promised_before_the_directory_was_counted(open_page: Callable[..., SharedPage]) -> None:
    shared_page = open_page()
    assert shared_page.reserve(10, 100) is None
    counted(shared_page, 40)
    assert shared_page.reserve(100, 100) == 60
    assert shared_page.taken() == (40, 60)


def test_what_one_promises_the_other_cannot(open_page: Callable[..., SharedPage]) -> None:
    one, two = counted(open_page(), 0), open_page()
    assert (one.reserve(70, 100), two.reserve(70, 100)) == (70, 30)
    one.settle(70, 50)
    assert two.taken() == (50, 30)
    assert two.exchange(20, 15) == 15
    assert two.taken() == (30, 45)


def test_what_the_dead_had_promised_counts_as_written_until_it_is_counted(open_page: Callable[..., SharedPage]) -> None:
    dead, alive = counted(open_page(), 0), open_page()
    assert dead.reserve(60, 100) == 60
    dead.close()  # As the kernel does.
    assert alive.reserve(60, 100) == 40
    alive.settle(40, 40)
    assert alive.reserve(10, 100) == 0
    counted(alive, 40 + 20)  # Of the dead one's sixty, twenty had been written.
    assert alive.taken() == (60, 0)


def test_a_count_beside_stores_is_at_least_what_is_there(open_page: Callable[..., SharedPage]) -> None:
    one, two = counted(open_page(), 0), open_page()
    began = one.begin_count()
    two.settle(two.reserve(50, 1_000), 50)  # May have been seen, or not.
    one.end_count(began, 50)
    assert 50 <= one.taken()[0] <= 100
    counted(one, 50)
    assert one.taken()[0] == 50


def test_a_damaged_page_says_that_nothing_is_known(open_page: Callable[..., SharedPage], tmp_path: Path) -> None:
    shared_page = counted(open_page(), 10)
    for damage in (b"", b"?" * PAGE_BYTES, (tmp_path / "ledger").read_bytes()[:-1] + b"!"):
        (tmp_path / "ledger").write_bytes(damage)
        assert shared_page.reserve(10, 100) is None
        shared_page.settle(0, 5)
        counted(shared_page, 40)
        assert shared_page.taken() == (40, 0)


@pytest.mark.parametrize("damage", ["a flipped bit", "zeros", "truncated", "empty", "another version"])
async def test_for_a_damaged_page_nothing_is_removed_and_the_directory_is_counted_at_once(
    open_tier, lender: Lender, root: Path, mapper: FileMapper, path_of, damage: str
) -> None:
    """Two tiers share it; each says again what it has promised when it stores."""
    one, two = [await open_tier(shared=True, capacity_bytes="64MiB") for _ in range(2)]
    await until_taken(one, lender, keys_of(8))
    await until_taken(two, lender, keys_of(8, 8))
    (page,) = (root / mapper.folder).glob("ledger*")
    content = bytearray(page.read_bytes())
    match damage:
        case "a flipped bit":
            content[40] ^= 1
        case "zeros":
            content[:] = bytes(len(content))
        case "truncated":
            del content[-1:]
        case "empty":
            content.clear()
        case "another version":
            content[8:12] = (VERSION + 1).to_bytes(4, "little")
    page.write_bytes(content)
    await asyncio.gather(until_taken(one, lender, keys_of(8, 16)), until_taken(two, lender, keys_of(8, 24)))
    assert [tier.counters().evicted for tier in (one, two)] == [0, 0]
    assert await lender.recall(one, keys_of(32)) == [label(key) for key in keys_of(32)]


async def until_taken(tier: FsBackend, lender: Lender, keys: list[OffloadKey]) -> None:
    """Offer chunks until all are stored."""
    async with asyncio.timeout(DEADLINE_S):
        while any(outcome is not None for outcome in await tier.store(lender.writes(keys))):
            await asyncio.sleep(0.01)


def test_every_flipped_bit_is_seen(open_page: Callable[..., SharedPage], tmp_path: Path) -> None:
    """And whatever mixture of two pages a torn write leaves is one of them, or seen."""
    shared_page = counted(open_page(), 10)
    old = (tmp_path / "ledger").read_bytes()
    shared_page.settle(shared_page.reserve(77, 100) or 0, 33)
    new = (tmp_path / "ledger").read_bytes()
    for bit in range(8 * PAGE_BYTES):
        page = bytearray(new)
        page[bit // 8] ^= 1 << bit % 8
        assert read_page(bytes(page)) is None, bit
    for end in range(PAGE_BYTES):
        assert (torn := new[:end] + old[end:]) in (old, new) or read_page(torn) is None, end


@given(bits=st.lists(st.integers(0, 8 * PAGE_BYTES - 1), min_size=1, max_size=8, unique=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_promised_is_promised_still_on_a_page_that_is_begun_anew(
    bits: list[int], open_page: Callable[..., SharedPage], tmp_path: Path
) -> None:
    one, two = counted(open_page(), 10), open_page()
    assert one.reserve(60, 100) == 60
    assert two.reserve(5, 100) == 5
    page = bytearray((tmp_path / "ledger").read_bytes())
    for bit in bits:
        page[bit // 8] ^= 1 << bit % 8
    (tmp_path / "ledger").write_bytes(page)
    began = two.begin_count()
    two.end_count(began, 10)
    assert two.reserve(5, 100) is None, "the first has not said what it has promised"
    assert two.taken() is None
    assert one.taken() == (10, 65)
    assert two.reserve(50, 100) == 25
    one.settle(60, 0)
    two.settle(30, 0)
    assert one.taken() == two.taken() == (10, 0)
    one.close()
    two.close()


def test_whoever_dies_before_it_says_what_it_has_promised_is_not_waited_for(
    open_page: Callable[..., SharedPage], tmp_path: Path
) -> None:
    dead, alive = counted(open_page(), 10), open_page()
    assert dead.reserve(60, 100) == 60
    (tmp_path / "ledger").write_bytes(b"")
    assert alive.reserve(1, 100) is None
    dead.close()
    counted(alive, 40)
    assert alive.reserve(100, 100) == 60


def test_a_count_that_began_before_the_page_was_lost_is_not_taken(
    open_page: Callable[..., SharedPage], tmp_path: Path
) -> None:
    one, two = counted(open_page(), 0), open_page()
    one.settle(0, 80)
    began = one.begin_count()
    (tmp_path / "ledger").write_bytes(b"")
    assert two.taken() is None
    one.end_count(began, 80)
    assert one.taken() is None
    counted(two, 80)
    assert one.taken() == (80, 0)


def test_a_page_that_is_older_than_one_that_was_seen_is_not_taken(
    open_page: Callable[..., SharedPage], tmp_path: Path
) -> None:
    """As a backup brings it back, or a disk that has lost a write."""
    shared_page = counted(open_page(), 10)
    old = (tmp_path / "ledger").read_bytes()
    shared_page.settle(0, 80)
    (tmp_path / "ledger").write_bytes(old)
    assert shared_page.reserve(90, 100) is None
    counted(shared_page, 90)
    assert shared_page.reserve(90, 100) == 10


def test_a_page_of_version_0_1_0_is_taken_as_it_is(open_page: Callable[..., SharedPage], tmp_path: Path) -> None:
    """It has zeros where a page now says when it was begun; its processes may still be at it."""
    head = struct.pack("<8sII8sQQQ64Q", b"\x89kvledg\n", 1, 1, BOOT, 30, 70, 40, *bytes(64))
    body = head.ljust(PAGE_BYTES - 8, b"\0")
    former = body + xxh3_64_intdigest(body).to_bytes(8, "little")
    (tmp_path / "ledger").write_bytes(former)
    shared_page = open_page()
    assert shared_page.taken() == (30, 0)
    assert shared_page.reserve(50, 100) == 50
    (tmp_path / "ledger").write_bytes(former)  # As one of its processes does that has seen nothing of ours.
    assert shared_page.taken() == (30, 50)


@pytest.mark.usefixtures("outside")
def test_a_writer_that_is_killed_leaves_a_page_that_the_others_go_on_with(
    open_page: Callable[..., SharedPage], tmp_path: Path
) -> None:
    """Two processes change it all the time, and one is killed, over and over."""
    dice, shared_page = random.Random(SEED), counted(open_page(), 0)
    with LedgerWriter(tmp_path) as one, LedgerWriter(tmp_path) as two:
        for _ in range(ROUNDS):
            for writer in (one, two):
                writer.works()
            dice.choice((one, two)).kill()
            used_bytes, promised_bytes = shared_page.taken() or pytest.fail("the page is lost")
            assert used_bytes <= ROUNDS * 128
            assert promised_bytes <= 3 * 128


class LedgerWriter:
    """A process that changes a page until it is killed, and then another."""

    def __init__(self, directory: Path) -> None:
        program = os.path.join(os.path.dirname(__file__), "..", "page_writer.py")
        self._launcher = subprocess.Popen(
            [sys.executable, program, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        self._pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._launcher.communicate()

    def works(self) -> None:
        """Wait until it has changed the page some more; begin another if it was killed."""
        if not self._pid:
            self._pid = int(self._told("next\n").removeprefix("child "))
        assert self._told() == "changed\n"

    def kill(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            while (told := self._told()) != "dead\n":
                assert told == "changed\n"
            self._pid = 0

    def _told(self, asked: str = "") -> str:
        assert self._launcher.stdin is not None
        assert self._launcher.stdout is not None
        self._launcher.stdin.write(asked)
        self._launcher.stdin.flush()
        return self._launcher.stdout.readline()


def test_after_another_boot_the_directory_is_counted_anew(open_page: Callable[..., SharedPage]) -> None:
    """Unless somebody has been there all the time: another machine."""
    first = counted(open_page(), 10)
    assert open_page(b"another.").reserve(1, 100) == 1
    first.close()


def test_alone_after_another_boot_nothing_is_known(open_page: Callable[..., SharedPage]) -> None:
    counted(open_page(), 10).close()
    assert open_page(b"another.").reserve(1, 100) is None


def test_there_are_only_so_many_slots(open_page: Callable[..., SharedPage]) -> None:
    for _ in range(SLOTS):
        open_page()
    with pytest.raises(BackendUnavailable, match="64 processes"):
        open_page()


async def test_a_store_that_is_cancelled_while_it_makes_room_has_said_what_went(
    open_tier, lender: Lender, root: Path, mapper: FileMapper, taken_bytes, system_call
) -> None:
    """Else the page would count it as used until somebody has counted the directory again."""
    tier = await open_tier(shared=True, capacity_bytes=CAPACITY_BYTES, low_water=1.0)
    await until_taken(tier, lender, keys_of(8))

    async def store_on() -> None:
        for start in itertools.count(8, 8):
            await tier.store(lender.writes(keys_of(8, start)))

    removal = system_call("unlink", sticks=True, only=lambda name, **kwargs: name.endswith(".bin"))
    storing = asyncio.create_task(store_on())
    await removal.wait_entered()
    storing.cancel()
    removal.let_go()
    with pytest.raises(asyncio.CancelledError):
        await storing
    await tier.aclose(DEADLINE_S)
    assert used_bytes(root, mapper) == taken_bytes(root)


async def test_a_tier_that_is_closed_while_it_removes_what_is_too_much_has_said_what_went(
    open_tier, lender: Lender, root: Path, mapper: FileMapper, taken_bytes, system_call
) -> None:
    tier = await open_tier(shared=True, capacity_bytes=4 * CAPACITY_BYTES, low_water=0.1)
    removal = system_call("unlink", sticks=True, only=lambda name, **kwargs: name.endswith(".bin"))
    start = 0
    while not removal.times:
        await until_taken(tier, lender, keys_of(8, start := start + 8))
    closing = asyncio.create_task(tier.aclose(DEADLINE_S))
    await asyncio.sleep(0)  # It has begun: what ran beside the calls is cancelled.
    removal.let_go()
    await closing
    assert used_bytes(root, mapper) == taken_bytes(root)


def used_bytes(root: Path, mapper: FileMapper) -> int:
    """Return what the page says is used."""
    (path,) = (root / mapper.folder).glob("ledger*")
    page = read_page(path.read_bytes())
    assert page is not None
    return page.used_bytes


async def test_the_room_of_files_that_somebody_has_removed_is_given_out_after_the_next_count(
    open_tier, lender: Lender, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says on the page what went without it: a store that is refused has the directory counted."""
    monkeypatch.setattr(accounts, "AGAIN_S_LEAST", 0.01)
    monkeypatch.setattr(accounts, "AGAIN_TIMES", 0)  # The first scan may take long on a busy machine.
    tier = await open_tier(shared=True, capacity_bytes=CAPACITY_BYTES)
    for start in range(0, 200, 10):
        await lender.keep(tier, keys_of(10, start=start))
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".bin"):  # The tier may be faster.
                Path(folder, name).unlink(missing_ok=True)
    assert await lender.recall(tier, keys_of(200)) == ["ChunkMissing"] * 200
    assert tier.occupancy().used_bytes == 0
    async with asyncio.timeout(DEADLINE_S):
        while any(await tier.store(lender.writes(keys_of(10, start=300)))):
            await asyncio.sleep(0.001)
    assert await lender.recall(tier, keys_of(10, start=300)) == [label(key) for key in keys_of(10, start=300)]
