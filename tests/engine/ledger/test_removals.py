"""A tier that says nothing of what it removes: whoever keeps an index hears of it when the engine does."""

import pytest

from kvtier.engine.answers import EventKind
from kvtier.runner.messages import Code
from tests.engine.ledger.bench import names_of


def removals(engine):
    """Take the events; name the keys that the tier was said to have lost."""
    removed = (EventKind.REMOVED, "tier0")
    return [names_of(event.keys) for event in engine.events.take() if (event.kind, event.tier) == removed]


def asked(engine, names, present):
    """Let every answer expire, ask for keys anew, and return what is said to have gone."""
    engine.step(11.0)
    for name in names:
        engine.lookup(name)
    engine.answer(*engine.step(), present)
    return removals(engine)


@pytest.fixture
def silent(bench):
    """A ledger whose one tier has stored four chunks and does not report what it holds; the primary has none."""
    engine = bench()
    engine.knows_all(complete=False)
    engine.stored_in_tiers("abcd")
    engine.reset()
    engine.events.take()
    return engine


@pytest.mark.promise("A tier has lost the chunk")
@pytest.mark.parametrize(("code", "told"), [(Code.MISSING, ["b"]), (Code.CORRUPT, ["b"]), (Code.FAILED, [])])
def test_a_load_that_finds_a_chunk_gone_removes_it(silent, code, told):
    silent.lookup("abc")
    silent.finish(*silent.step(), {1: code})
    assert removals(silent) == told


def test_an_answer_that_a_chunk_is_gone_removes_it_once_and_no_answer_removes_nothing(silent):
    assert asked(silent, "abz", None) == []
    assert asked(silent, "abz", [True, False, False]) == ["b"]  # No report ever named the last one.
    assert asked(silent, "abz", False) == ["a"]


@pytest.mark.parametrize("listed", [False, True])
def test_a_probe_after_a_failed_load_removes_missing_chunks(silent, listed):
    if listed:
        silent.holds("a")
    silent.lookup("ab")
    silent.fail(*silent.step(), Code.UNAVAILABLE)  # Its server ends, and begins again without anything.
    assert asked(silent, "ab", [False, True]) == ["a"]
    silent.lookup("b")
    silent.fail(*silent.step(), Code.MISSING)
    assert removals(silent) == ["b"]
    assert asked(silent, "ab", False) == []


@pytest.mark.parametrize("complete", [True, False])
def test_a_tier_that_reports_is_spoken_for_only_when_it_deletes(engine, complete):
    """No tier reports deletions, by the contract; so the engine does."""
    engine.holds("abc")
    engine.knows_all(complete=complete)
    engine.lookup("a")
    engine.fail(*engine.step(), Code.MISSING)
    engine.ledger.delete(engine.keys("bc"))
    (delete,) = engine.step()
    assert removals(engine) == [] if complete else ["a"]
    engine.finish(delete, {1: Code.FAILED})
    assert removals(engine)[-1] == "b"
    assert complete or asked(engine, "b", False) == []  # It was said.
