"""Simulated engines: a fixed number of seeds keep every promise, a seed is one story, and broken engines are caught."""

import asyncio
import itertools
import os
import re
import subprocess
import sys
from unittest.mock import AsyncMock

import pytest

from kvtier.engine.fetches import Progress
from kvtier.engine.ledger import Ledger
from kvtier.engine.primary import Primary
from kvtier.engine.tier import Tier
from kvtier.engine.traffic import Traffic
from kvtier_backends.dummy import DummyBackend
from tests.simulation.turns import LongTurn
from tests.simulation.world import _World, run_seeds

FORKED_WITH_A_STEP_DUE = range(10_000_266, 10_000_267)


@pytest.mark.parametrize("seeds", [range(10), FORKED_WITH_A_STEP_DUE], ids=str)
def test_every_seed_keeps_every_promise(seeds):
    assert run_seeds(seeds).failures == []


def test_a_seed_tells_one_story_in_every_process(outside):
    stories = set()
    text = "from tests.simulation import simulate; print([simulate(seed).digest for seed in range(25)])"
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", f"import logging; logging.disable(); {text}"]
        stories.add(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)
    assert len(stories) == 1


def test_many_seeds_keep_every_promise_and_meet_every_fault_and_every_ending(thorough):
    met = run_seeds(range(10, 100))
    assert met.failures == []
    kinds = ("unavailable", "late_unavailable", "delay", "hang", "failed", "missing", "corrupt", "no_space")
    assert all(met.counts[f"fault:{kind}"] for kind in kinds)
    assert all(met.counts[f"ended by {ending}"] for ending in ("crash", "close", "calm"))
    assert all(met.counts[what] for what in ("cancelled", "resets", "deletes", "probes", "breaker opened", "tier hits"))


# A simulation that finds nothing proves nothing: each of these breaks an engine, and a few seeds must find it out.

abandon, answer, settle = Primary.abandon, Tier.answer, Traffic._settle_cascade
apply, made, store, load = Traffic.apply, Progress.made, DummyBackend.store, DummyBackend.load
messages = itertools.count(1)


async def spin(self, **waits):
    while "loads_of" in waits:
        self._steps.end_step()
    await made(self, **waits)


async def poll(self, **waits):
    if "loads_of" not in waits:
        await made(self, **waits)
        return
    self._steps.end_step()
    await asyncio.sleep(0)
    self._steps._check_open()
    self._steps._receive()


async def forget_the_last(self, writes):
    return [*await store(self, writes[:-1]), None] if writes else []


async def load_in_reverse(self, reads):
    keys = [read.key for read in reads]
    return await load(self, [read._replace(key=key) for read, key in zip(reads, reversed(keys), strict=True)])


BREAKS = {  # What is replaced, by what; how the simulation says it; and seeds, of which the first meets it soon.
    "a hung load's row is freed": (
        *(Primary, "abandon", lambda self, key, *, lent: abandon(self, key, lent=False)),
        *("", range(111, 400)),
    ),
    "a hung store's row is freed": (
        *(Traffic, "_settle_cascade", lambda *args, lent: settle(*args, lent=False)),
        *("", range(20, 200)),
    ),
    "a failed store stays visible": (
        *(
            Traffic,
            "_settle_cascade",
            lambda self, sent, _, now, *, lent: settle(self, sent, sent.keys, now, lent=lent),
        ),
        *("believes True", range(91, 400)),
    ),
    "an absence is believed for ever": (
        *(Tier, "answer", lambda self, key, known, now: answer(self, key, known, 0.0)),
        *("believes False", range(117, 400)),
    ),
    "a finished request keeps pins": (Ledger, "finish", lambda self, request: None, "", range(50)),
    "outcomes are lost": (
        *(Traffic, "apply", lambda self, message, now: next(messages) % 50 and apply(self, message, now)),
        *("", range(50)),
    ),
    "rows never come back": (Traffic, "_take_back", lambda self, id_: None, "", range(28, 200)),
    "calls do not let the loop turn": (Progress, "turn", AsyncMock(), "turns of the loop", range(50)),
    "a call spins": (Progress, "made", spin, "ms for the loop to turn", range(50, 100)),
    "a call polls": (Progress, "made", poll, "something polls", range(50, 100)),
    "a tier loses what it stored": (DummyBackend, "store", forget_the_last, "", range(50)),
    "a tier swaps chunks": (DummyBackend, "load", load_in_reverse, "wrong bytes", range(12, 300)),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_broken_engine_or_tier_is_found_and_the_seed_named(monkeypatch, fault):
    owner, name, replacement, complaint, seeds = BREAKS[fault]
    monkeypatch.setattr(owner, name, replacement)
    failure = next(failure for seed in seeds for failure in run_seeds(range(seed, seed + 1)).failures)
    assert complaint in failure
    assert re.match(r"seed (\d+): (?s:.*)python -m tests.simulation --first \1 --seeds 1", failure)


def test_a_turn_that_was_long_once_is_the_machines_and_fails_no_seed(monkeypatch):
    check, stops = _World.check_promises, iter([LongTurn("the machine stood still")])

    def check_promises(self):
        for stop in stops:
            raise stop
        check(self)

    monkeypatch.setattr(_World, "check_promises", check_promises)
    assert run_seeds(range(1)).failures == list(stops) == []


def test_the_command_runs_seeds_in_processes_and_says_what_they_met(outside):
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "10", "--first", "5"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "10 seeds, 0 failed" in ran.stdout
    assert "tier hits" in ran.stdout
