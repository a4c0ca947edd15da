"""What was said to be stored outlives a killed process, and with fsync a machine that stops.

`KVTIER_CRASH_ROUNDS` sets how many processes are killed, `KVTIER_POWER_ROUNDS` how often a machine stops,
`KVTIER_CRASH_SEED` where the seeds begin. `make crash` runs hundreds.

A machine that stops is a disk that forgets what it was not told to keep: a file system in a file of another one, each
on a loop device. The outer one is shut down as it is after a crash, without writing its journal. So what the inner one
wrote is lost, but for what it had flushed, and whatever the kernel had happened to write by itself.
"""

import fcntl
import logging
import os
import random
import struct
import subprocess
import time
from collections import defaultdict

import pytest

from kvtier.testing.conformance import Lender, keys_of, label
from tests.fs.conftest import DEADLINE_S, ROW_BYTES, SLOT_BYTES, taken_bytes, temporaries

logger = logging.getLogger(__name__)

ROUNDS = int(os.environ.get("KVTIER_CRASH_ROUNDS", "10"))
POWER_ROUNDS = int(os.environ.get("KVTIER_POWER_ROUNDS", "2"))
SEED = int(os.environ.get("KVTIER_CRASH_SEED", "1"))
KEYS = 120
DELETED = -1

FILES = {"layout": "files", "capacity_bytes": 48 << 20}
SEGMENTS = {"layout": "segments", "capacity_bytes": 48 << 20}
FULL = {"naming": "flat", "capacity_bytes": 100 * (SLOT_BYTES + 4_096) + 262_144}
FULL_KEYS = 400  # Four times what there is room for.
WAYS = pytest.mark.parametrize("way", [FILES, SEGMENTS, FULL], ids=["files", "segments", "full"])

EXT4_IOC_SHUTDOWN = 2 << 30 | 4 << 16 | ord("X") << 8 | 125  # _IOR('X', 125, __u32), of fs/ext4/ext4.h.
WITHOUT_LOG_FLUSH = 2


class Expected:
    """For each key, the versions that may be found: one that was confirmed, or those of a call that was cut short."""

    def __init__(self, *, evicts=False):
        """`evicts`: anything may be gone but what was stored last."""
        self.versions = defaultdict(lambda: {DELETED})
        self.confirmed = 0  # Chunks of which a writer was told that they are stored.
        self._evicts = evicts
        self._last = []  # Outcomes of the last finished call.
        self._begun = {}

    def hear(self, line):
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

    def found(self, number, version):
        evicted = self._evicts and version == DELETED and number not in self._last
        assert evicted or version in self.versions[number], (
            f"key {number}: {version} found, {self.versions[number]} expected"
        )
        self.versions[number] = {version}


def lives(child, rounds, patience, expected, before=lambda: None):
    """Kill a child at some moment of each of its lives, and yield after each; `before`: what happens first.

    `patience`: how much it says until then, at least and at most.
    """
    for seed in range(SEED, SEED + rounds):
        dice = random.Random(seed)
        child.begin(seed)
        for _ in range(dice.randint(*patience)):
            expected.hear(child.line())
        time.sleep(dice.random() * 0.002)  # Not to wait for anything, but to hit any moment of a call.
        before()
        for line in child.kill():
            expected.hear(line)
        yield
    logger.info("%d times stopped, %d chunks confirmed, none lost", rounds, expected.confirmed)


async def look(open_tier, expected, **options):
    """Open the tier as after a restart, and compare all that it has with what may be there; return what is corrupt."""
    lender, keys = Lender(ROW_BYTES), keys_of(max(KEYS, *expected.versions) + 1)
    for number, versions in expected.versions.items():
        for version in versions - {DELETED}:
            lender.chunk(keys[number], version)  # To know it again.
    tier = await open_tier(**options, scanned=True)
    there = await tier.probe(keys)
    for number, told in enumerate(await lender.recall(tier, keys)):
        found = {label(keys[number], version): version for version in expected.versions[number] - {DELETED}}
        missing = told in ("ChunkMissing", "ChunkCorrupt")  # Which of them: the caller asks the counters.
        expected.found(number, DELETED if missing else found[told])
        assert there[number] or missing
    assert await tier.aclose(DEADLINE_S) == (0,)
    return tier.counters().corrupt


@pytest.mark.promise("The engine's process is killed")
@WAYS
async def test_a_killed_writer_loses_nothing_it_was_told_was_stored(launch, open_tier, root, seal, way):
    """A deleted chunk does not come back, nor does an older one. A full tier has what was stored last."""
    expected, options, full = Expected(evicts=way is FULL), {**way, **seal}, way is FULL
    child = launch("journal", options=options, keys=FULL_KEYS if full else KEYS, deletes=0.1)
    for _ in lives(child, ROUNDS, (30, 90) if full else (1, 60), expected):
        assert await look(open_tier, expected, **options) == {}
        assert temporaries(root) == []
        assert taken_bytes(root) <= options["capacity_bytes"]


class Disk:
    """A file system on a disk that forgets, when it is cut off, whatever it was not told to keep."""

    def __init__(self, folder):
        self._image = folder / "outer.img"
        self._outer, self.mounted = folder / "outer", folder / "inner"
        self._up = []
        for path in (self._outer, self.mounted):
            path.mkdir()
        _make_file_system(self._image, 160 << 20)
        self._mount(self._image, self._outer)
        _make_file_system(self._outer / "inner.img", 96 << 20)
        os.sync()
        self._mount(self._outer / "inner.img", self.mounted)

    def cut_off(self):
        """From now on, nothing that is written reaches the disk; nor does what was, and was not flushed."""
        fd = os.open(self._outer, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", WITHOUT_LOG_FLUSH))
        finally:
            os.close(fd)

    def restart(self):
        self.close()
        self._mount(self._image, self._outer)
        self._mount(self._outer / "inner.img", self.mounted)

    def close(self):
        while self._up:
            _run("umount", self._up.pop())

    def _mount(self, image, at):
        _run("mount", "-o", "loop", image, at)
        self._up.append(at)


def _make_file_system(image, size_bytes):
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    _run("mkfs.ext4", "-q", "-F", image)


def _run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")


@pytest.fixture
def disk(outside, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    try:
        disk = Disk(tmp_path)
    except (OSError, FileNotFoundError) as error:
        pytest.skip(f"no ext4 on a loop device here: {error}")
    yield disk
    disk.close()


@WAYS
async def test_what_was_synced_survives_a_machine_that_stops(disk, launch, open_tier, way):
    """Deletions are synced in segments: a deleted chunk does not come back then, either.

    A chunk that went from a full tier may come back: that is room to make again, and no wrong byte.
    """
    full, segments = way is FULL, way is SEGMENTS
    options, expected = {**way, "fsync": True}, Expected(evicts=full)
    root, keys, deletes = str(disk.mounted / "tier"), FULL_KEYS if full else KEYS, 0.1 if segments else 0.0
    child = launch("journal", root=root, options=options, keys=keys, deletes=deletes, quiet=True)
    for _ in lives(child, POWER_ROUNDS, (30, 60) if full else (2, 40), expected, disk.cut_off):
        disk.restart()
        corrupt = await look(open_tier, expected, root=root, **options)
        assert corrupt == {} or way is not FILES  # A slot may be torn in which nothing was promised to be.


async def test_a_disk_that_is_cut_off_forgets_what_was_not_synced(disk, open_tier, layout):
    options, lender, keys = {"root": str(disk.mounted / "tier"), "layout": layout}, Lender(ROW_BYTES), keys_of(60)
    tier = await open_tier(**options, holds=keys)
    assert await tier.aclose(DEADLINE_S) == (0,)
    disk.cut_off()
    disk.restart()
    tier = await open_tier(**options, scanned=True)
    told = await lender.recall(tier, keys)
    assert await tier.aclose(DEADLINE_S) == (0,)
    assert all(one in (label(key), "ChunkMissing", "ChunkCorrupt") for key, one in zip(keys, told, strict=True))
    assert told.count("ChunkMissing") + told.count("ChunkCorrupt") > 0
