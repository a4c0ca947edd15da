import logging

import pytest

from kvtier.engine.metrics import TierLog
from kvtier.errors import Remedy
from kvtier.runner.messages import Answered, Code, Finished, pack_rows
from tests.engine.ledger.bench import SECONDS, Bench


@pytest.fixture
def engine():
    return Bench(rows=64, tiers=[Bench.spec("disk", breaker_failures=2, store_chunks_max=8)])


@pytest.fixture
def log(engine):
    return TierLog(engine.ledger.tiers)


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.INFO, "kvtier.engine.metrics")
    return caplog


def fail(engine, names, cause="EROFS", code=Code.FAILED):
    engine.store(names)
    (store,) = engine.step()
    failed = pack_rows(range(len(names)))
    engine.ledger.apply(Finished(store.id, failed, bytes([code]) * len(names), SECONDS, cause=cause))


def test_a_breaker_that_opens_is_a_warning_with_the_cause_and_its_closing_a_line(engine, log, heard):
    fail(engine, "abc", "EIO")
    fail(engine, "def")
    log.look(engine.now)
    engine.step(seconds=5.0)
    fail(engine, "g")  # A trial that fails is no new opening.
    log.look(engine.now)
    (warning,) = heard.records
    assert (warning.levelno, warning.getMessage()) == (
        logging.WARNING,
        "tier disk: the breaker is open after 2 failures in a row; the last cause is EROFS (Read-only file system);"
        f" it is tried again every 5 s; since the last line 6 chunks failed (failed 6); see {Remedy.BREAKER}",
    )
    engine.step(seconds=5.0)
    engine.store("h")
    engine.finish(*engine.step())
    log.look(engine.now)
    assert (heard.records[-1].levelno, heard.messages[-1]) == (logging.INFO, "tier disk: the breaker is closed again")


def test_drops_are_logged_once_a_minute_with_their_counts(engine, log, heard):
    engine.store("abcdefghij")
    for second in range(1, 60):
        log.look(float(second))
        engine.store("klm" if second == 1 else "")
    line = f"tier disk: since the last line %d chunks were dropped (budget %d); see {Remedy.LOSSES}"
    assert heard.messages == [line % (2, 2)]
    log.look(61.0)
    assert heard.messages[1:] == [line % (3, 3)]
    engine.store("nop")
    log.look(62.0, last=True)
    assert heard.messages[2:] == [line % (3, 3)]


def test_failures_that_open_no_breaker_are_logged_with_their_cause_and_a_missing_chunk_is_not(engine, log, heard):
    engine.holds("z")
    engine.lookup("z")
    engine.fail(*engine.step(), Code.MISSING)
    log.look(1.0)
    assert heard.messages == []
    counters = engine.counters()
    assert (counters.causes, counters.failed, counters.misses) == ({}, {}, 1)
    fail(engine, "ab", "ENOSPC", Code.NO_SPACE)
    log.look(2.0)
    assert heard.messages == [
        "tier disk: since the last line 2 chunks failed (no_space 2);"
        f" the last cause is ENOSPC (No space left on device); see {Remedy.LOSSES}"
    ]


def test_unanswered_probes_have_a_cause_and_are_logged_once_a_minute(heard):
    engine = Bench(rows=8, tiers=[Bench.spec("peer", breaker_failures=99)])
    log = TierLog(engine.ledger.tiers)
    for number, name in enumerate("abc"):
        engine.lookup(name)
        (probe,) = engine.step()
        engine.ledger.apply(Answered(probe.id, b"", SECONDS, "ESTALE"))
        log.look(float(number))
    assert (engine.counters().causes, engine.counters().last_cause) == ({"ESTALE": 3}, "ESTALE")
    (line,) = heard.messages
    assert line.startswith("tier peer: since the last line questions not answered: 1; the last cause is ESTALE")
    log.look(60.0)
    assert "since the last line questions not answered: 2" in heard.messages[-1]


@pytest.mark.parametrize(
    ("code", "cause", "label"),
    [
        (Code.FAILED, "EROFS", "EROFS"),
        (Code.UNAVAILABLE, "ENOTCONN", "ENOTCONN"),
        (Code.FAILED, "ZeroDivisionError", "other"),
        (Code.FAILED, "EXDEV", "other"),
        (Code.FAILED, "", "other"),
        (Code.NO_SPACE, "ENOSPC", "ENOSPC"),
        *((code, "", code.name.lower()) for code in (Code.NO_SPACE, Code.CORRUPT, Code.DEADLINE, Code.LOST)),
    ],
)
def test_causes_are_counted_by_transfer_under_few_names(engine, code, cause, label):
    fail(engine, "abc", cause, code)
    assert engine.counters().causes == {label: 1}
