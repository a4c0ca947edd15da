"""Simulated engines: a fixed number of seeds keep every promise, a seed is one story, and broken engines are caught."""

import json
import logging
import os
import subprocess
import sys

import pytest

from kvtier.engine.inbox import Inbox
from kvtier.engine.ledger import Ledger
from kvtier.engine.primary import Primary
from kvtier.engine.progress import Progress
from kvtier.engine.tier import Tier
from kvtier.engine.transfers import Transfers
from kvtier_backends.dummy import DummyBackend
from tests.simulation import SimulationFailed, Subject, simulate
from tests.simulation.world import run_seeds

BATCHES = [range(10), *(pytest.param(batch, marks=pytest.mark.outside) for batch in (range(10, 55), range(55, 100)))]


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Keep the faults that a seed asks for out of the log."""
    caplog.set_level(logging.CRITICAL, "kvtier")


@pytest.mark.parametrize("seeds", BATCHES, ids=str)
def test_every_seed_keeps_every_promise(seeds):
    assert run_seeds(seeds, Subject()).failures == []


@pytest.mark.usefixtures("outside")
def test_a_seed_tells_one_story_in_every_process():
    stories = set()
    for hash_seed in ("1", "2"):
        ran = subprocess.run(
            [
                sys.executable,
                "-c",
                "import logging; logging.disable(); from tests.simulation import simulate\n"
                "print([simulate(seed).digest for seed in range(25)])",
            ],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        stories.add(ran.stdout)
    assert len(stories) == 1


@pytest.mark.usefixtures("thorough")
def test_seeds_meet_every_fault_and_every_ending():
    counts = run_seeds(range(60), Subject()).counts
    kinds = ("unavailable", "late_unavailable", "delay", "hang", "failed", "missing", "corrupt", "no_space")
    assert all(counts[f"fault:{kind}"] for kind in kinds)
    assert all(counts[f"ended by {ending}"] for ending in ("crash", "close", "calm"))
    assert all(counts[what] for what in ("cancelled", "resets", "deletes", "probes", "breaker opened", "tier hits"))


def test_a_policy_written_elsewhere_is_simulated():
    assert run_seeds(range(20), Subject(policy="kvtier.policies:LRU")).failures == []


def test_a_tier_written_elsewhere_is_simulated():
    inner = {"type": "kvtier_backends.dummy:DummyBackend", "latency_s": 0.01}
    assert run_seeds(range(20), Subject(tier=inner)).failures == []


# A simulation that finds nothing proves nothing: each of these breaks an engine, and a few seeds must find it out.


def first_failure(seeds):
    for seed in seeds:
        try:
            simulate(seed)
        except SimulationFailed as error:
            return str(error)
    return ""


def test_a_failure_names_its_seed_and_how_to_see_it_again(monkeypatch):
    monkeypatch.setattr(Primary, "unpin", lambda self, rows: None)
    message = first_failure(range(5))
    seed = message.split(":")[0].removeprefix("seed ")
    assert f"python -m tests.simulation --first {seed} --seeds 1" in message


@pytest.mark.usefixtures("thorough")
def test_a_row_that_is_freed_while_a_hung_load_still_writes_it_is_found(monkeypatch):
    abandon = Primary.abandon
    monkeypatch.setattr(Primary, "abandon", lambda self, key, *, lent: abandon(self, key, lent=False))
    assert first_failure(range(200))


def test_a_row_that_is_freed_while_a_hung_store_still_reads_it_is_found(monkeypatch):
    settle = Inbox._settle_cascade
    monkeypatch.setattr(Inbox, "_settle_cascade", lambda *args, lent: settle(*args, lent=False))
    assert first_failure(range(200))


def test_a_pin_that_a_finished_request_leaves_is_found(monkeypatch):
    monkeypatch.setattr(Ledger, "finish", lambda self, request: None)
    assert first_failure(range(50))


def test_an_outcome_that_is_lost_is_found(monkeypatch):
    apply, seen = Inbox.apply, []

    def lose_one(self, message, now):
        seen.append(message)
        if len(seen) % 50:
            apply(self, message, now)

    monkeypatch.setattr(Inbox, "apply", lose_one)
    assert first_failure(range(50))


def test_a_row_that_is_never_given_back_is_found(monkeypatch):
    monkeypatch.setattr(Transfers, "take_back", lambda self, id_: None)
    assert first_failure(range(200))


@pytest.mark.usefixtures("thorough")
def test_a_failed_store_that_stays_visible_is_found(monkeypatch):
    settle = Inbox._settle_cascade

    def settle_as_if_all_moved(self, transfer, moved, now, *, lent):
        settle(self, transfer, transfer.keys, now, lent=lent)

    monkeypatch.setattr(Inbox, "_settle_cascade", settle_as_if_all_moved)
    assert "believes True" in first_failure(range(80, 400))  # The first that meets it is 84.


@pytest.mark.usefixtures("thorough")
def test_an_absence_that_is_believed_forever_is_found(monkeypatch):
    answer = Tier.answer
    monkeypatch.setattr(Tier, "answer", lambda self, key, known, now: answer(self, key, known, 0.0))
    assert "believes False" in first_failure(range(110, 400))  # The first that meets it is 111.


def test_calls_that_do_not_let_the_loop_turn_are_found(monkeypatch):
    async def no_turn(self):
        pass

    monkeypatch.setattr(Progress, "turn", no_turn)
    assert "turns of the loop" in first_failure(range(50))


def test_a_call_that_spins_is_found(monkeypatch):
    made = Progress.made

    async def spin(self, **waits):
        while "loads_of" in waits:
            self._steps.end_step()
        await made(self, **waits)

    monkeypatch.setattr(Progress, "made", spin)
    assert "ms for the loop to turn" in first_failure(range(50))


def test_a_tier_that_loses_what_it_stored_is_found(monkeypatch):
    store = DummyBackend.store

    async def forget_the_last(self, writes):
        return [*await store(self, writes[:-1]), None] if writes else []

    monkeypatch.setattr(DummyBackend, "store", forget_the_last)
    assert first_failure(range(50))


def test_a_tier_that_swaps_chunks_is_found(monkeypatch):
    load = DummyBackend.load

    async def load_in_reverse(self, reads):
        keys = [read.key for read in reads]
        return await load(self, [read._replace(key=key) for read, key in zip(reads, reversed(keys), strict=True)])

    monkeypatch.setattr(DummyBackend, "load", load_in_reverse)
    assert "wrong bytes" in first_failure(range(9, 300))


@pytest.mark.usefixtures("outside")
def test_a_lost_process_is_reported_in_one_sentence():
    tier = '{"type": "tests.engine.rude_tiers:KillsItsProcess"}'
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "2", "--jobs", "1", "--tier", tier]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 3
    assert "A process that ran seeds was killed, or crashed" in ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout


@pytest.mark.usefixtures("outside")
def test_figures_for_standard_output_go_there_alone_and_the_table_to_standard_error(tmp_path):
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "1", "--jobs", "1", "--json", "-"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(ran.stdout)["seeds"] == 1
    assert "seeds a minute" in ran.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("outside")
def test_figures_that_cannot_be_written_are_refused_before_a_seed_is_run(tmp_path):
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "1", "--json", f"{tmp_path}/absent/out"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "--json" in ran.stderr
