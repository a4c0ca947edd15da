"""What was said to be stored outlives a killed process, and with fsync a machine that stops.

`KVTIER_CRASH_ROUNDS` sets how many processes are killed, `KVTIER_POWER_ROUNDS` how often a machine stops,
`KVTIER_CRASH_SEED` where the seeds begin. `make crash` runs hundreds.

A machine that stops is a disk that forgets what it was not told to keep: a file system in a file of another one, each
on a loop device. The outer one is shut down as it is after a crash, without writing its journal. So what the inner one
wrote is lost, but for what it had flushed, and whatever the kernel had happened to write by itself.
"""

import asyncio
import fcntl
import json
import logging
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtier.backend.contract import ScanDone, TierContext
from kvtier.backend.namespace import FileMapper
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs import FsBackend, FsOptions

logger = logging.getLogger(__name__)

ROUNDS = int(os.environ.get("KVTIER_CRASH_ROUNDS", "10"))
POWER_ROUNDS = int(os.environ.get("KVTIER_POWER_ROUNDS", "2"))
SEED = int(os.environ.get("KVTIER_CRASH_SEED", "1"))
KEYS = 120
LAYOUTS = ["files", "segments"]
MANY_KEYS = 400
FULL: dict[str, Any] = {"naming": "flat", "capacity_bytes": 100 * (12_288 + 4_096) + 262_144}  # For a quarter.
DELETED = -1
DEADLINE_S = 60.0

EXT4_IOC_SHUTDOWN = 2 << 30 | 4 << 16 | ord("X") << 8 | 125  # _IOR('X', 125, __u32), of fs/ext4/ext4.h.
WITHOUT_LOG_FLUSH = 2


class Expected:
    """For each key, the versions that may be found: one that was confirmed, or those of a call that was cut short."""

    def __init__(self, *, evicts: bool = False) -> None:
        """`evicts`: anything may be gone but what was stored last."""
        self.versions: dict[int, set[int]] = defaultdict(lambda: {DELETED})
        self.confirmed = 0  # Chunks of which a writer was told that they are stored.
        self._evicts = evicts
        self._last: list[int] = []  # Of the last call that has ended.
        self._begun: dict[str, tuple[int, list[int]]] = {}

    def hear(self, line: str) -> None:
        match line.split():
            case ["begin", worker, version, *numbers]:
                self._begun[worker] = int(version), [int(number) for number in numbers]
                for number in self._begun[worker][1]:
                    self.versions[number] = {*self.versions[number], int(version)}
            case ["end", worker]:
                version, numbers = self._begun.pop(worker)
                self.versions.update((number, {version}) for number in numbers)
                self.confirmed += len(numbers) if version != DELETED else 0
                self._last = numbers
            case _:
                raise AssertionError(line)

    def found(self, number: int, version: int) -> None:
        evicted = self._evicts and version == DELETED and number not in self._last
        assert evicted or version in self.versions[number], (
            f"key {number}: {version} found, {self.versions[number]} expected"
        )
        self.versions[number] = {version}


class Launcher:
    """Writers that can be stopped at any moment."""

    def __init__(
        self, root: Path, row_bytes: int, deletes: float, options: dict[str, object], keys: int = KEYS
    ) -> None:
        script = os.path.join(os.path.dirname(__file__), "..", "crash_writer.py")
        self._process = subprocess.Popen(
            [sys.executable, script, str(root), str(row_bytes), str(keys), str(deletes), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Of a writer whose disk goes away.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )

    def run(self, seed: int, patience: int, expected: Expected) -> Iterator[int]:
        """Run a writer, read its reports, and yield its id when it has said so much, for the caller to act."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        pid = 0
        while (line := self._process.stdout.readline().strip()) != "dead":
            assert line, "the launcher ended"
            if line.startswith("child"):
                pid = int(line.split()[1])
                continue
            expected.hear(line)
            patience -= 1
            if patience == 0:
                yield pid

    def lives(
        self, rounds: int, patience: tuple[int, int], expected: Expected, before: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Run writers, each killed at some moment, and yield after each; `before`: what happens first.

        `patience`: how much one says until then, at least and at most.
        """
        for seed in range(SEED, SEED + rounds):
            dice = random.Random(seed)
            for pid in self.run(seed, dice.randint(*patience), expected):
                any_moment(dice)
                before()
                os.kill(pid, signal.SIGKILL)
            yield

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def any_moment(dice: random.Random) -> None:
    """Pass up to two milliseconds: not to wait for anything, but to hit any moment of a call."""
    time.sleep(dice.random() * 0.002)


async def scanned(tier: FsBackend) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async for event in tier.watch():
            if isinstance(event, ScanDone):
                return


async def look(root: Path, mapper: FileMapper, row_bytes: int, expected: Expected, **options: object) -> Counter[str]:
    """Open the tier as after a restart, and compare all that it has with what may be there; return what is corrupt."""
    lender, keys = Lender(row_bytes), keys_of(max(KEYS, *expected.versions, 0) + 1)
    for number, versions in expected.versions.items():
        for version in versions - {DELETED}:
            lender.chunk(keys[number], version)  # To know it again.
    given = FsOptions(root=str(root), **options)  # type: ignore[arg-type]
    tier = await FsBackend.open(given, TierContext("0:fs", mapper, row_bytes))
    await scanned(tier)
    there = await tier.probe(keys)
    for number, told in enumerate(await lender.recall(tier, keys)):
        found = {label(keys[number], version): version for version in expected.versions[number] - {DELETED}}
        missing = told in ("ChunkMissing", "ChunkCorrupt")  # Which of them: the caller asks the counters.
        expected.found(number, DELETED if missing else found[told])
        assert there[number] or missing
    corrupt = tier.counters().corrupt
    assert await tier.aclose(DEADLINE_S) == (0,)
    return Counter(corrupt)


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob(".*.tmp"))


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_writer_loses_nothing_it_was_told_was_stored(
    root: Path, mapper: FileMapper, row_bytes: int, seal, layout: str
) -> None:
    """A deleted chunk does not come back, nor does an older one."""
    expected, options = Expected(), {"layout": layout, **seal}
    with closing(Launcher(root, row_bytes, 0.1, options)) as launcher:
        for _ in launcher.lives(ROUNDS, (1, 60), expected):
            assert asyncio.run(look(root, mapper, row_bytes, expected, **options)) == {}
            assert temporaries(root) == []
    logger.info("%d writers killed, %d chunks confirmed, none lost", ROUNDS, expected.confirmed)


@pytest.mark.usefixtures("outside")
def test_a_killed_writer_of_a_full_tier_leaves_whole_chunks_and_the_last_ones(
    root: Path, mapper: FileMapper, row_bytes: int, taken_bytes: Callable[[Path], int]
) -> None:
    """What goes for others and what comes for it: of each, all or nothing."""
    expected = Expected(evicts=True)
    with closing(Launcher(root, row_bytes, 0.1, FULL, MANY_KEYS)) as launcher:
        for _ in launcher.lives(ROUNDS, (30, 90), expected):
            assert asyncio.run(look(root, mapper, row_bytes, expected, **FULL)) == {}
            assert temporaries(root) == []
            assert taken_bytes(root) <= FULL["capacity_bytes"]
    logger.info("%d writers killed, %d chunks confirmed, none lost", ROUNDS, expected.confirmed)


class Disk:
    """A file system on a disk that forgets, when it is cut off, whatever it was not told to keep."""

    def __init__(self, folder: Path) -> None:
        self._image = folder / "outer.img"
        self._outer, self.mounted = folder / "outer", folder / "inner"
        self._up: list[Path] = []
        for path in (self._outer, self.mounted):
            path.mkdir()
        _make_file_system(self._image, 160 << 20)
        self._mount(self._image, self._outer)
        _make_file_system(self._outer / "inner.img", 96 << 20)
        os.sync()
        self._mount(self._outer / "inner.img", self.mounted)

    def cut_off(self) -> None:
        """From now on, nothing that is written reaches the disk; nor does what was, and was not flushed."""
        fd = os.open(self._outer, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", WITHOUT_LOG_FLUSH))
        finally:
            os.close(fd)

    def restart(self) -> None:
        """Mount what the disk has kept."""
        self.close()
        self._mount(self._image, self._outer)
        self._mount(self._outer / "inner.img", self.mounted)

    def close(self) -> None:
        while self._up:
            _run("umount", self._up.pop())

    def _mount(self, image: Path, at: Path) -> None:
        _run("mount", "-o", "loop", image, at)
        self._up.append(at)


def _make_file_system(image: Path, size_bytes: int) -> None:
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    _run("mkfs.ext4", "-q", "-F", image)


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")


@pytest.fixture
def disk(outside: None, tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    try:
        disk = Disk(tmp_path)
    except (OSError, FileNotFoundError) as error:
        pytest.skip(f"no ext4 on a loop device here: {error}")
    yield disk
    disk.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_synced_survives_a_machine_that_stops(
    disk: Disk, mapper: FileMapper, row_bytes: int, layout: str
) -> None:
    """Deletions are synced where chunks lie in segments: a deleted one does not come back then, either."""
    root = disk.mounted / "tier"
    options = {"fsync": True, "layout": layout, "capacity_bytes": "48MiB"}
    expected = Expected()
    with closing(Launcher(root, row_bytes, 0.1 if layout == "segments" else 0.0, options)) as launcher:
        for _ in launcher.lives(POWER_ROUNDS, (2, 40), expected, disk.cut_off):
            disk.restart()
            corrupt = asyncio.run(look(root, mapper, row_bytes, expected, **options))
            assert corrupt == {} or layout == "segments"  # A slot may be torn in which nothing was promised to be.
    logger.info("%d times cut off, %d chunks confirmed, none lost", POWER_ROUNDS, expected.confirmed)


def test_what_was_synced_last_in_place_of_others_survives_a_machine_that_stops(
    disk: Disk, mapper: FileMapper, row_bytes: int
) -> None:
    """A chunk that went may come back: that is room to make again, and no wrong byte."""
    root = disk.mounted / "tier"
    options = {**FULL, "fsync": True}
    expected = Expected(evicts=True)
    with closing(Launcher(root, row_bytes, 0.0, options, MANY_KEYS)) as launcher:
        for _ in launcher.lives(POWER_ROUNDS, (30, 60), expected, disk.cut_off):
            disk.restart()
            asyncio.run(look(root, mapper, row_bytes, expected, **options))
    logger.info("%d times cut off, %d chunks confirmed, none lost", POWER_ROUNDS, expected.confirmed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_is_cut_off_forgets_what_was_not_synced(
    disk: Disk, mapper: FileMapper, row_bytes: int, layout: str
) -> None:
    """Or the test above would prove nothing. What is left is what was stored, or a miss."""
    root, lender, keys = disk.mounted / "tier", Lender(row_bytes), keys_of(KEYS)
    given = FsOptions(root=str(root), layout=layout)  # type: ignore[arg-type]

    async def store() -> None:
        tier = await FsBackend.open(given, TierContext("0:fs", mapper, row_bytes))
        await lender.keep(tier, keys)
        assert await tier.aclose(DEADLINE_S) == (0,)

    async def recall() -> list[str]:
        tier = await FsBackend.open(given, TierContext("0:fs", mapper, row_bytes))
        await scanned(tier)
        told = await lender.recall(tier, keys)
        assert await tier.aclose(DEADLINE_S) == (0,)
        return list(told)

    asyncio.run(store())
    disk.cut_off()
    disk.restart()
    told = asyncio.run(recall())
    assert all(one in (label(key), "ChunkMissing", "ChunkCorrupt") for key, one in zip(keys, told, strict=True))
    assert told.count("ChunkMissing") + told.count("ChunkCorrupt") > 0
