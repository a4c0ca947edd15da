"""Reports of a tier: a bug in one of them costs this report only."""

import asyncio
import logging

import pytest

from kvtier.backend import Added, Advice, FileMapper, Namespace, ScanDone, TierContext
from kvtier.memory import Region
from kvtier.runner.messages import Advise, Found, Message, Scanned, TierUsage, pack_keys
from kvtier.runner.reports import Reports, SpeedMeter
from kvtier.runner.runner import Budget, Runner, RunnerTier
from kvtier_backends.dummy import DummyBackend, DummyOptions
from tests.engine.kit import CHUNK_BYTES, PATIENCE_S, key

FOUND = Found(0, pack_keys([key(1)]))
ALL_IS_KNOWN, ASK_IT = Scanned(0, complete=True), Scanned(0, complete=False)

CONTEXT = TierContext("tier", FileMapper(Namespace(model_name="test")), CHUNK_BYTES)


class HoldsOne(DummyBackend):
    def __init__(self):
        super().__init__(DummyOptions(), CONTEXT)

    async def watch(self):
        yield Added([key(1)])
        yield ScanDone(complete=True)
        await asyncio.Event().wait()


def raises(bug):
    def method(*_):
        raise bug

    return method


def contents(said):
    return [each for each in said if not isinstance(each, TierUsage)]


async def reported(backend, last):
    posted: list[Message] = []
    reports = Reports(0, "tier", backend, SpeedMeter(), posted.append)
    reports.start()
    async with asyncio.timeout(PATIENCE_S):
        while last not in posted:
            reports.acknowledge()
            await asyncio.sleep(0.001)
    assert await reports.aclose(PATIENCE_S)
    return posted


BUGS = [ZeroDivisionError, SystemExit, asyncio.CancelledError]


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("method", ["description", "occupancy", "counts"])
async def test_a_tier_whose_description_fails_still_reports_its_chunks(method, bug, caplog):
    caplog.set_level(logging.INFO, "kvtier.runner.reports")
    tier = HoldsOne()
    setattr(tier, method, raises(bug))
    assert contents(await reported(tier, ALL_IS_KNOWN)) == [FOUND, ALL_IS_KNOWN]
    assert f"its {method}() raised" in caplog.text


@pytest.mark.parametrize("figures", [(1.5, 0, None), ("many", 0, None), (1, 2), None, (1, 0, None, 0, 0)], ids=repr)
async def test_figures_that_are_none_are_not_sent(figures, caplog):
    """They could not be read at the other end of a process's socket, which would cost the runner."""
    tier = HoldsOne()
    tier.occupancy = lambda: figures
    assert await reported(tier, ALL_IS_KNOWN) == [FOUND, ALL_IS_KNOWN]
    assert "its occupancy() raised" in caplog.text


async def test_a_tiers_bug_is_logged_once_and_not_every_second(caplog, monkeypatch):
    monkeypatch.setattr("kvtier.runner.reports.USAGE_EVERY_S", 0.0)
    asked: list[int] = []

    def occupancy():
        asked.append(1)
        raise ZeroDivisionError

    tier = HoldsOne()
    tier.occupancy = occupancy
    reports = Reports(0, "tier", tier, SpeedMeter(), lambda _: None)
    async with asyncio.timeout(PATIENCE_S):
        while len(asked) < 5:
            reports.usage()
            await asyncio.sleep(0)
    await reports.aclose(PATIENCE_S)
    assert caplog.text.count("occupancy() raised") == 1


async def test_counts_of_a_tier_without_an_occupancy_are_reported():
    """As the tiers on services have none: their chunks are the service's."""
    posted, counts = list[Message](), [{"coded": 5}, {"coded": 2}]

    class CountsOnly(HoldsOne):
        occupancy = None

        def counts(self):
            return counts.pop()

    reports = Reports(0, "tier", CountsOnly(), SpeedMeter(), posted.append)
    while counts:
        reports.usage(now=True)
    assert posted == [TierUsage(0, 0, 0, None, 0, {"coded": 2}), TierUsage(0, 0, 0, None, 0, {"coded": 3})]
    await reports.aclose(PATIENCE_S)


@pytest.mark.parametrize("bug", [*BUGS, None])
async def test_a_tier_whose_inventory_ends_before_the_tier_does_is_asked_from_then_on(bug):
    async def watch():
        yield Added([key(1)])
        yield ScanDone(complete=True)
        if bug is not None:
            raise bug

    tier = HoldsOne()
    tier.watch = watch
    assert contents(await reported(tier, ASK_IT)) == [FOUND, ALL_IS_KNOWN, ASK_IT]


async def test_a_tier_that_exits_on_advice_loses_the_advice_only(caplog):
    tier = HoldsOne()
    tier.advise = raises(SystemExit)
    with Region.private(1, CHUNK_BYTES) as region:
        runner = Runner([RunnerTier("tier", tier, 1.0, Budget(1, 1), Budget(1, 1))], region, lambda _: None)
        runner.submit([Advise.of(0, Advice("rank", [key(1)]))])
        assert "does not take Advise" in caplog.text
