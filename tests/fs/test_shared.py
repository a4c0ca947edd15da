"""Several processes, one directory, one budget, no server: whoever dies, the limit holds and the others go on.

`KVTIER_SHARED_ROUNDS` sets how often the directory is looked at, and processes are killed.
"""

import asyncio
import errno
import fcntl
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.backend import ScanDone
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs import FsOptions
from kvtier_backends.fs.ledger_file import PAGE_BYTES, SLOTS, LedgerFile

ROUNDS = int(os.environ.get("KVTIER_SHARED_ROUNDS", "20"))
SEED = int(os.environ.get("KVTIER_SHARED_SEED", "1"))
DEADLINE_S = 30.0
CHUNKS = 600
CAPACITY_BYTES = 40 * (8_192 + 4_096 + 8_192) + 524_288
BOOT = b"8 bytes."


@pytest.fixture
def open_ledger(tmp_path: Path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    opened: list[LedgerFile] = []

    def open_ledger(boot: bytes = BOOT) -> LedgerFile:
        opened.append(LedgerFile(fd, "ledger", boot))
        return opened[-1]

    yield open_ledger
    for ledger in opened:
        ledger.close()
    os.close(fd)


def counted(ledger: LedgerFile, seen_bytes: int) -> LedgerFile:
    ledger.end_count(ledger.begin_count(), seen_bytes)
    return ledger


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
    most = 0
    for number in range(ROUNDS):
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
    assert most > CAPACITY_BYTES / 3, "it holds far less than it may"  # Of two writers, most is promised.


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


async def test_what_another_has_used_is_spared(open_tier, lender: Lender, path_of) -> None:
    capacity_bytes = 24 * (8_192 + 4_096 + 16_384)
    one = await open_tier(shared=True, capacity_bytes=capacity_bytes)
    await lender.keep(one, keys_of(4))
    later_s = time.time() + 120
    os.utime(path_of(keys_of(1)[0]), (later_s, later_s))  # As another does that has used it.
    for start in range(100, 144, 4):
        await one.store(lender.writes(keys_of(4, start)))
    told = await lender.recall(one, keys_of(4))
    assert told == [label(keys_of(1)[0]), "BlockMissing", "BlockMissing", "BlockMissing"]


def test_only_lru_is_shared() -> None:
    with pytest.raises(ConfigError, match=r"^eviction_policy: 'arc' given, 'lru' accepted with shared"):
        FsOptions(root="/x", shared=True, eviction_policy="arc")


async def test_without_locks_it_is_not_shared(open_tier, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> bytes:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(ConfigError, match="with locks on files accepted"):
        await open_tier(shared=True)


def test_nothing_is_promised_before_the_directory_was_counted(open_ledger: Callable[..., LedgerFile]) -> None:
    ledger = open_ledger()
    assert ledger.reserve(10, 100) == 0
    counted(ledger, 40)
    assert ledger.reserve(100, 100) == 60
    assert ledger.taken() == (40, 60)


def test_what_one_promises_the_other_cannot(open_ledger: Callable[..., LedgerFile]) -> None:
    one, two = counted(open_ledger(), 0), open_ledger()
    assert (one.reserve(70, 100), two.reserve(70, 100)) == (70, 30)
    one.settle(70, 50)
    assert two.taken() == (50, 30)
    assert two.exchange(20, 15) == 15
    assert two.taken() == (30, 45)


def test_what_the_dead_had_promised_counts_as_written_until_it_is_counted(
    open_ledger: Callable[..., LedgerFile],
) -> None:
    dead, alive = counted(open_ledger(), 0), open_ledger()
    assert dead.reserve(60, 100) == 60
    dead.close()  # As the kernel does.
    assert alive.reserve(60, 100) == 40
    alive.settle(40, 40)
    assert alive.reserve(10, 100) == 0
    counted(alive, 40 + 20)  # Of the dead one's sixty, twenty had been written.
    assert alive.taken() == (60, 0)


def test_a_count_beside_stores_is_at_least_what_is_there(open_ledger: Callable[..., LedgerFile]) -> None:
    one, two = counted(open_ledger(), 0), open_ledger()
    began = one.begin_count()
    two.settle(two.reserve(50, 1_000), 50)  # May have been seen, or not.
    one.end_count(began, 50)
    assert 50 <= one.taken()[0] <= 100
    counted(one, 50)
    assert one.taken()[0] == 50


def test_a_damaged_page_says_that_nothing_is_known(open_ledger: Callable[..., LedgerFile], tmp_path: Path) -> None:
    ledger = counted(open_ledger(), 10)
    for damage in (b"", b"?" * PAGE_BYTES, (tmp_path / "ledger").read_bytes()[:-1] + b"!"):
        (tmp_path / "ledger").write_bytes(damage)
        assert ledger.reserve(10, 100) == 0
        ledger.settle(10, 5)
        counted(ledger, 40)
        assert ledger.taken() == (40, 0)


def test_after_another_boot_the_directory_is_counted_anew(open_ledger: Callable[..., LedgerFile]) -> None:
    """Unless somebody has been there all the time: another machine."""
    first = counted(open_ledger(), 10)
    assert open_ledger(b"another.").reserve(1, 100) == 1
    first.close()


def test_alone_after_another_boot_nothing_is_known(open_ledger: Callable[..., LedgerFile]) -> None:
    counted(open_ledger(), 10).close()
    assert open_ledger(b"another.").reserve(1, 100) == 0


def test_there_are_only_so_many_slots(open_ledger: Callable[..., LedgerFile]) -> None:
    for _ in range(SLOTS):
        open_ledger()
    with pytest.raises(BackendUnavailable, match="64 processes"):
        open_ledger()
