"""Never more than a day's bytes in any day, whoever is killed and whatever the clock does."""

import asyncio
import errno
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.backend.lending import Lanes
from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs.disk.write_budget import DAY_NS, DiskWriteBudget
from tests.fs.conftest import DEADLINE_S, SLOT_BYTES, kinds, whole

UNIT_BYTES = 1_000
DAY_BYTES = 3_200_000


@pytest.fixture
def clock():
    return SimpleNamespace(now_ns=1_800_000_000 * 10**9)


@pytest.fixture
async def open_budget(request, tmp_path, clock):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    lanes = Lanes(1, "budget")

    def open_budget(bytes_per_day=DAY_BYTES):
        budget = DiskWriteBudget(fd, "budget", bytes_per_day, UNIT_BYTES, lambda: clock.now_ns, lanes)
        request.addfinalizer(budget.close)
        return budget

    yield open_budget
    await lanes.aclose(10)
    os.close(fd)


async def spend(budget):
    total = 0
    while taken := await budget.take(8, UNIT_BYTES):
        total += taken * UNIT_BYTES
    return total


async def test_a_full_bucket_is_an_eighth_of_a_day_for_all_engines_together(open_budget):
    one, two = open_budget(), open_budget()
    assert sum(await asyncio.gather(spend(one), spend(two))) == DAY_BYTES // 8
    assert await one.take(1, UNIT_BYTES) == 0


async def test_only_whole_chunks_are_allowed(open_budget):
    assert await open_budget(8 * 2_500).take(5, UNIT_BYTES) == 2


async def test_no_day_sees_more_than_its_bytes(open_budget, clock):
    dice = random.Random(7)
    written = []
    passed_ns = 0
    budget = open_budget()
    for _ in range(600):
        step_ns = int(dice.expovariate(1.0) * 600e9)
        clock.now_ns += step_ns
        passed_ns += step_ns
        written.append((passed_ns, await budget.take(dice.randint(1, 400), UNIT_BYTES) * UNIT_BYTES))
        match dice.randrange(20):
            case 0:
                budget.put_back()
                budget.close()
                budget = open_budget()
            case 1:
                budget = open_budget()  # The one before was killed, with what it had drawn.
            case 2:
                clock.now_ns -= 3_600 * 10**9
    for at_ns, _ in written:
        assert sum(size for when, size in written if at_ns <= when < at_ns + DAY_NS) <= DAY_BYTES
    assert sum(size for _, size in written) > DAY_BYTES


async def test_a_restart_gives_back_what_was_not_written(open_budget):
    first = open_budget()
    assert await first.take(1, UNIT_BYTES) == 1
    first.put_back()
    first.close()
    assert await spend(open_budget()) == DAY_BYTES // 8 - UNIT_BYTES


async def test_a_damaged_file_is_an_empty_bucket(open_budget, tmp_path, clock):
    (tmp_path / "budget").write_bytes(b"?" * 24)
    budget = open_budget()
    assert await spend(budget) == 0
    clock.now_ns += DAY_NS
    assert await spend(budget) == DAY_BYTES // 8


async def test_a_budget_that_cannot_be_opened_leaves_no_file_open(open_budget, system_call, tmp_path):
    system_call("pwrite", error=errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        open_budget()
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    assert tmp_path / "budget" not in [link.readlink() for link in links if link.is_symlink()]


async def test_beyond_a_days_write_budget_nothing_is_stored_and_everything_loads(open_tier, lender, layout):
    options = {"layout": layout, "write_budget_bytes_per_day": 8 * 10 * SLOT_BYTES}
    tier = await open_tier(**options)
    outcomes = list(await tier.store(lender.writes(keys_of(16))))
    assert kinds(outcomes) == ["NoneType"] * 10 + ["NoSpace"] * 6
    assert all("write budget" in str(outcome) for outcome in outcomes[10:])
    assert tier.counters().refused == {"write_budget": 6}
    assert await lender.recall(tier, keys_of(10)) == whole(keys_of(10))
    await tier.aclose(DEADLINE_S)
    assert kinds(await (await open_tier(**options)).store(lender.writes(keys_of(1, 50)))) == ["NoSpace"]


@pytest.mark.parametrize("disk", ["fails", "hangs"])
async def test_giving_a_budget_back_keeps_no_tier_from_closing(open_tier, system_call, layout, disk):
    tier = await open_tier(layout=layout, write_budget_bytes_per_day="1MiB", holds=keys_of(1))
    giving_back = system_call("pwrite", **({"error": errno.EIO} if disk == "fails" else {"sticks": True}))
    closing = await giving_back.met_by(tier.aclose(DEADLINE_S))
    giving_back.let_go()
    assert await closing == (0,)
