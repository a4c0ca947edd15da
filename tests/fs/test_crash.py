"""What a killed process had said was stored is there, bit for bit; the rest is missing or whole.

`KVTIER_CRASH_ROUNDS` sets how many processes are killed, `KVTIER_CRASH_SEED` where the seeds begin.
"""

import asyncio
import os
import random
import signal
import sys
from asyncio.subprocess import Process
from collections import defaultdict
from pathlib import Path

from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, label
from kvtier_backends.fs import FsBackend

ROUNDS = int(os.environ.get("KVTIER_CRASH_ROUNDS", "20"))
SEED = int(os.environ.get("KVTIER_CRASH_SEED", "1"))
KEYS = 120
DELETED = -1


class Expected:
    """For each key, the versions that may be found: one that was confirmed, or those of a call that was cut short."""

    def __init__(self) -> None:
        self.versions: dict[int, set[int]] = defaultdict(lambda: {DELETED})
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
            case _:
                raise AssertionError(line)

    def found(self, number: int, version: int) -> None:
        assert version in self.versions[number], f"key {number}: {version} found, {self.versions[number]} expected"
        self.versions[number] = {version}


async def killed(launcher: Process, dice: random.Random, expected: Expected, seed: int) -> None:
    """Have a child work, kill it at a random moment, and hear what it had said."""
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    launcher.stdin.write(b"%d\n" % seed)
    pid, patience = 0, dice.randint(1, 60)
    while (line := (await launcher.stdout.readline()).decode().strip()) != "dead":
        assert line, "the launcher ended"
        if line.startswith("child"):
            pid = int(line.split()[1])
        else:
            expected.hear(line)
            patience -= 1
        if pid and patience <= 0:
            await asyncio.sleep(dice.random() * 0.002)  # Not to wait for anything: to hit any moment of a call.
            os.kill(pid, signal.SIGKILL)
            pid = 0


async def look(tier: FsBackend, lender: Lender, expected: Expected) -> None:
    keys = [key_of(number) for number in range(KEYS)]
    for number, versions in expected.versions.items():
        for version in versions - {DELETED}:
            lender.chunk(keys[number], version)  # To know it again.
    there = await tier.probe(keys)
    for number, told in enumerate(await lender.recall(tier, keys)):
        found = {label(keys[number], version): version for version in expected.versions[number] - {DELETED}}
        expected.found(number, found[told] if told != "BlockMissing" else DELETED)
        assert there[number] == (told != "BlockMissing")
    assert tier.counters().corrupt == {}


async def test_a_killed_writer_loses_nothing_it_was_told_was_stored(open_tier, root: Path, row_bytes: int) -> None:
    launcher = await asyncio.create_subprocess_exec(
        *(sys.executable, os.path.join(os.path.dirname(__file__), "crash_writer.py")),
        *(str(root), str(row_bytes), str(KEYS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        expected = Expected()
        for seed in range(SEED, SEED + ROUNDS):
            await killed(launcher, random.Random(seed), expected, seed)
            lender = Lender(row_bytes)
            tier = await open_tier()
            await look(tier, lender, expected)
            assert await tier.aclose(10) == (0,)
    finally:
        launcher.kill()
        await launcher.wait()
