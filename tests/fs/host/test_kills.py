"""Engines and keepers that are killed or stopped in the middle of transfers cost hits, and nothing else.

`KVTIER_CRASH_ROUNDS` sets how many processes are killed or stopped, `KVTIER_CRASH_SEED` where the seeds begin.
"""

import asyncio
import logging
import os
import random
import re
import select
import signal
from collections import Counter, defaultdict
from contextlib import suppress

import pytest

from kvtier.testing.conformance import Lender, keys_of, label
from kvtier_backends.fs.host.meeting import Place
from tests.fs.conftest import ROW_BYTES
from tests.fs.host.conftest import CAPACITY_BYTES, LINGER_S, filled, is_unlocked, keepers, until, until_filled

logger = logging.getLogger(__name__)

ROUNDS = int(os.environ.get("KVTIER_CRASH_ROUNDS", "10"))
SEED = int(os.environ.get("KVTIER_CRASH_SEED", "1"))
ENGINES = 3
KEYS = 180
ANSWER_S = 1.0  # Of the engines, so that they give up a stopped keeper soon.
HANG_S = 20.0
MISSING = -1
AT = pytest.mark.parametrize("at", [0, 1], ids=["root", "pool"])


class Journal:
    """For each key, the versions that may be at the root: one that was confirmed, or of a store that was cut short."""

    def __init__(self):
        self.versions, self.confirmed, self._begun = defaultdict(lambda: {MISSING}), 0, {}

    def hear(self, lines):
        for line in lines:
            match line.split():
                case ["begin", worker, version, *numbers]:
                    self._begun[worker] = int(version)
                    for number in map(int, numbers):
                        self.versions[number] = {*self.versions[number], int(version)}
                case ["end", worker, *numbers]:
                    version = self._begun.pop(worker)
                    self.versions.update((int(number), {version}) for number in numbers)
                    self.confirmed += len(numbers)
                case _:
                    raise AssertionError(line)


@pytest.fixture
def engines(launch, root, pool):
    def engines(count, work="share", **asked):
        asked = {"keys": KEYS, "engines": ENGINES, "capacity_bytes": CAPACITY_BYTES, **asked}
        asked |= {"pool": pool, "linger_s": LINGER_S, "answer_s": ANSWER_S, "hang_s": HANG_S}
        return [launch(work, number=number, **asked) for number in range(count)]

    return engines


def stop(child):
    """Stop an engine; return what it said until then."""
    os.kill(child.pid, signal.SIGSTOP)
    return child.until("stopped")[:-1]


def descriptors(pid):
    """Return how many descriptors a keeper has, by what they are of."""
    found = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            name = os.readlink(f"/proc/{pid}/fd/{fd}")
            found[re.sub(r"[0-9]+|.*/|-test-.*", "", name)] += 1
    return found


def kill(place, number):
    """Send a signal to a place's keeper, as soon as there is one; wait until a killed one is gone."""
    until(lambda: keepers(place))
    for pid in keepers(place):
        its_end = os.pidfd_open(pid)
        os.kill(pid, number)
        assert number != signal.SIGKILL or select.select([its_end], [], [], HANG_S)[0]
        os.close(its_end)


async def test_engines_and_keepers_that_are_killed_or_stopped_cost_hits_only(engines, join, root, pool, tmp_path):
    """No byte is wrong, all that was said to be stored at the root is there, and in the end nothing is left behind."""
    places, journal, done = [Place(str(root)), Place.of_pool(pool)], Journal(), Counter()
    children = engines(ENGINES)
    for child in children:
        child.begin(SEED)
    for seed in range(SEED, SEED + ROUNDS):
        dice = random.Random(seed)
        for child in children:
            journal.hear(child.line() for _ in range(dice.randint(1, 30)))
        victim, stops = dice.randrange(ENGINES + 2), dice.random() < 0.4
        await asyncio.sleep(dice.random() * 0.003)  # Not to wait for anything, but to hit any moment of a call.
        if victim < ENGINES:
            journal.hear(stop(children[victim]) if stops else children[victim].kill())
        else:
            kill(places[victim - ENGINES], signal.SIGSTOP if stops else signal.SIGKILL)
        done["stopped" if stops else "killed", "engine" if victim < ENGINES else "keeper"] += 1
        for number, child in enumerate(children):
            if number != victim:
                journal.hear(child.line() for _ in range(20))
        if victim >= ENGINES and stops:
            kill(places[victim - ENGINES], signal.SIGCONT)
        elif victim < ENGINES:
            children[victim].go_on() if stops else children[victim].begin(seed)
    for child in children:
        journal.hear(child.kill())
    logger.info("%s, %d chunks confirmed", dict(done), journal.confirmed)

    fs, memory = await join(), await join("memory")
    lender, keys = Lender(ROW_BYTES), keys_of(KEYS)
    for number, versions in journal.versions.items():
        for version in versions - {MISSING}:
            lender.chunk(keys[number], version)  # To recognise it.
        names = ["ChunkMissing" if version == MISSING else label(keys[number], version) for version in versions]
        assert (await lender.recall(fs, [keys[number]]))[0] in names, (number, versions)
    assert fs.counters().corrupt == {}

    (tmp_path / "fresh").mkdir()
    fresh_places = [Place(str(tmp_path / "fresh" / root.name)), Place.of_pool(f"{pool}-fresh")]
    fresh = await join(root=fresh_places[0].directory), await join("memory", pool=f"{pool}-fresh")
    assert [await filled(tier) for tier in (fs, memory)] == [await filled(tier) for tier in fresh]
    pids = [keepers(place) for place in (*places, *fresh_places)]
    assert [len(one) for one in pids] == [1, 1, 1, 1]
    until(lambda: [descriptors(pid) for (pid,) in pids[:2]] == [descriptors(pid) for (pid,) in pids[2:]])
    for tier in (fs, memory, *fresh):
        assert await tier.aclose(HANG_S) == (0,)
    for place in (*places, *fresh_places):
        until(lambda place=place: not keepers(place))
        until(lambda place=place: is_unlocked(place))  # A process loses its memory before its descriptors.
        assert place.inode() is None


@AT
async def test_the_slots_of_a_stopped_engine_are_given_to_nobody(engines, join, at):
    """It goes on writing when it is continued. All that others store meanwhile is there, and its own chunks, too."""
    (child,) = engines(1, "halt", start=5_000_000)
    child.begin(at)
    journal = child.until("stopped")
    tier, lender = await join(("fs", "memory")[at]), Lender(ROW_BYTES)
    whole = await filled(tier)
    keys = keys_of(whole, 2_000_000)
    for start in range(0, len(keys), 64):
        await lender.keep(tier, keys[start : start + 64])
    child.go_on()
    stored = int(child.until("stored")[-1].split()[1])
    assert (journal, stored) == (["stopped"], 12)
    told = await lender.recall(tier, keys)
    assert told == [label(key) for key in keys]
    its = keys_of(stored, 5_000_000)
    lender.writes(its)  # To recognise them.
    assert await lender.recall(tier, its) == [label(key) for key in its]


async def test_an_engine_that_writes_when_its_keeper_is_gone_costs_chunks_and_makes_none_wrong(engines, join, root):
    """It was stopped, and the next keeper has given its slots to others."""
    (child,) = engines(1, "halt", start=5_000_000)
    child.begin(0)
    child.until("stopped")
    kill(Place(str(root)), signal.SIGKILL)
    tier, lender = await join(), Lender(ROW_BYTES)
    keys = keys_of(await filled(tier), 2_000_000)
    for start in range(0, len(keys), 64):
        await lender.keep(tier, keys[start : start + 64])
    child.go_on()
    assert child.until("stored", "away")[-1] == "away"
    told = await lender.recall(tier, keys)
    assert all(one in (label(key), "ChunkCorrupt") for key, one in zip(keys, told, strict=True))
    assert 0 < told.count("ChunkCorrupt") <= 12
    assert [one for one in await lender.recall(tier, keys_of(12, 5_000_000)) if one != "ChunkMissing"] == []


@AT
async def test_the_slots_of_an_engine_that_is_killed_in_a_store_are_free(engines, join, at):
    (child,) = engines(1, "halt", start=5_000_000)
    child.begin(at)
    child.until("stopped")
    tier, lender = await join(("fs", "memory")[at]), Lender(ROW_BYTES)
    less = await filled(tier)
    child.kill()
    await until_filled(tier, less + 12)
    assert await lender.recall(tier, keys_of(12, 5_000_000)) == ["ChunkMissing"] * 12


async def test_a_fork_of_an_engine_does_not_keep_its_session_alive(engines, root, pool):
    (child,) = engines(1, "fork")
    child.begin()
    forked = int(child.until("forked")[-1].split()[1])
    try:
        child.kill()
        for place in (Place(str(root)), Place.of_pool(pool)):
            until(lambda place=place: not [line for line in place.report() if "engine" in line[1]])
            until(lambda place=place: not keepers(place))
    finally:
        os.kill(forked, signal.SIGKILL)
