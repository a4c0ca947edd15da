"""A tier that says nothing of what it removes: whoever keeps an index hears of it when the engine does."""

import pytest

from kvtier.engine.answers import EventKind
from kvtier.runner.messages import Code
from tests.engine.ledger.bench import Bench, names_of


def removals(engine: Bench) -> list[str]:
    """Take the events; name the keys that the tier was said to have lost."""
    return [
        names_of(event.keys)
        for event in engine.events.take()
        if (event.kind, event.tier) == (EventKind.REMOVED, "tier0")
    ]


@pytest.fixture
def silent(bench):
    """A ledger whose one tier has stored four chunks and does not report what it holds; the primary has none."""
    engine = bench()
    engine.knows_all(complete=False)
    engine.store("abcd")
    engine.finish_all(engine.step())
    engine.ledger.reset()
    engine.ledger.promoting = True
    engine.events.take()
    return engine


@pytest.mark.parametrize(("code", "told"), [(Code.MISSING, ["b"]), (Code.CORRUPT, ["b"]), (Code.FAILED, [])])
def test_a_load_that_finds_a_chunk_gone_removes_it(silent, code, told):
    silent.lookup("abc")
    (load,) = silent.step()
    silent.finish(load, {1: code})
    assert removals(silent) == told


def test_an_answer_that_a_chunk_is_gone_removes_it_once(silent):
    for present in ([True, False, False], [False, False, False]):
        silent.step(11.0)
        for key in "abz":  # No report ever named the last one.
            silent.lookup(key)
        silent.answer(*silent.step(), present)
    assert removals(silent) == ["b", "a"]


def test_a_probe_after_a_failed_load_removes_missing_chunks(silent):
    silent.lookup("ab")
    (load,) = silent.step()
    silent.fail(load, Code.UNAVAILABLE)  # Its server ends, and begins again without anything.
    for _ in range(2):
        silent.step(11.0)
        silent.lookup("a")
        silent.lookup("b")
        silent.answer(*silent.step(), [False, True])
    assert removals(silent) == ["a"]


def test_a_probe_after_a_failed_load_removes_listed_chunks(silent):
    silent.holds("z")
    silent.lookup("z")
    (load,) = silent.step()
    silent.fail(load, Code.UNAVAILABLE)
    for _ in range(2):
        silent.step(11.0)
        silent.lookup("z")
        silent.answer(*silent.step(), False)
    assert removals(silent) == ["z"]


def test_no_answer_removes_nothing_and_the_next_one_does(silent):
    silent.step(11.0)
    silent.lookup("a")
    silent.answer(*silent.step(), None)
    assert removals(silent) == []
    silent.step(11.0)
    silent.lookup("a")
    silent.answer(*silent.step(), False)
    assert removals(silent) == ["a"]


def test_a_chunk_that_is_there_after_a_failure_is_not_removed_until_it_is_gone(silent):
    silent.lookup("a")
    (load,) = silent.step()
    silent.fail(load, Code.UNAVAILABLE)
    silent.step(11.0)
    silent.lookup("a")
    silent.answer(*silent.step(), True)
    assert removals(silent) == []
    silent.lookup("a")
    (load,) = silent.step()
    silent.finish(load, {0: Code.MISSING})
    assert removals(silent) == ["a"]
    silent.step(11.0)
    silent.lookup("a")
    silent.answer(*silent.step(), False)
    assert removals(silent) == []


def test_a_deletion_removes_what_was_deleted(silent):
    silent.ledger.delete(silent.keys("ab"))
    (delete,) = silent.step()
    silent.finish(delete, {1: Code.FAILED})
    assert removals(silent) == ["a"]
    silent.lookup("a")
    silent.answer(*silent.step(), False)
    assert removals(silent) == []  # It was said.


def test_a_tier_that_reports_is_not_spoken_for(bench):
    engine = bench()
    engine.holds("ab")
    engine.knows_all()
    engine.lookup("a")
    (load,) = engine.step()
    engine.finish(load, {0: Code.MISSING})
    assert removals(engine) == []


def test_a_reporting_tier_sends_no_event_for_a_forgotten_key(bench):
    """No tier does, by the contract; so the engine does it, as for any other tier."""
    engine = bench()
    engine.holds("ab")
    engine.knows_all()
    engine.ledger.delete(engine.keys("b"))
    (delete,) = engine.step()
    assert removals(engine) == []
    engine.finish(delete)
    assert removals(engine) == ["b"]
