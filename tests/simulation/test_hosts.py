"""Simulated hosts: seeds keep every promise, a seed is one story, and broken keepers and engines are found out."""

import re

import pytest

from kvtier_backends.fs.host.gate import Pass
from kvtier_backends.fs.host.keeper import KeptNamespace, Session
from kvtier_backends.fs.segments.catalog import LocalCatalog
from kvtier_backends.fs.segments.kept import KeptCatalog
from kvtier_backends.fs.segments.recovery import SegmentsStart
from tests.simulation.host import simulate
from tests.simulation.world import run_seeds


def test_every_seed_keeps_every_promise():
    assert run_seeds(range(10), simulate).failures == []


def test_many_seeds_keep_every_promise_and_meet_every_fault(thorough):
    met = run_seeds(range(10, 150), simulate)
    assert met.failures == []
    assert all(met.counts[f"{act} {who}"] for act in ("kill", "stop") for who in ("engine", "keeper"))
    assert all(met.counts[what] for what in ("cancelled", "deletes", "loaded", "no room", "unavailable"))


def test_a_seed_tells_one_story():
    assert [simulate(seed) for seed in range(5)] == [simulate(seed) for seed in range(5)]


# A simulation that finds nothing proves nothing: each of these breaks a keeper or an engine, and a few seeds find it.

publish, kept, note = Session._publish, KeptCatalog.publish, SegmentsStart._note


def publish_void(self, call_id, held, written, namespace):
    for key in held.keys:
        namespace.storing.setdefault(key, ((self, call_id),))
    publish(self, call_id, held, written, namespace)


def publish_all(self, held, written, *, told):
    kept(self, held, [True] * len(written), told=told)


def note_free(self, seen):
    note(self, seen._replace(held=(), free=[*seen.free, *((chunk.slot, 1) for chunk in seen.held)]))


BREAKS = {  # What is replaced, by what; how the simulation says it; and seeds, of which the first meets it soon.
    "a chunk that was deleted in its store is there": (Session, "_publish", publish_void, "deleted", range(1000, 1400)),
    "what a session holds outlives it": (Session, "_end", lambda *_: None, "", range(50)),
    "the gate gets nothing back": (Pass, "end", lambda _: None, "", range(50)),
    "a lease pins for ever": (LocalCatalog, "release", lambda *_: None, "pinned by nobody", range(50)),
    "others are told nothing": (KeptNamespace, "_tell", lambda *_: None, "believes", range(50)),
    "a lost keeper is not noticed": (KeptCatalog, "_lose", lambda *_: None, "never ends", range(50)),
    "a start takes chunks for free": (SegmentsStart, "_note", note_free, "promised and not there", range(111, 900, 2)),
    "a store that failed is published": (KeptCatalog, "publish", publish_all, "", range(29, 200)),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_broken_keeper_or_engine_is_found_and_the_seed_named(monkeypatch, fault):
    owner, name, replacement, complaint, seeds = BREAKS[fault]
    monkeypatch.setattr(owner, name, replacement)
    failure = next(failure for seed in seeds for failure in run_seeds(range(seed, seed + 1), simulate).failures)
    assert complaint in failure
    assert re.match(r"seed (\d+): (?s:.*)python -m tests.simulation --hosts --first \1 --seeds 1", failure)
