"""Log lines about a tier: its breaker with the cause, and losses, once a minute."""

import logging

import pytest

from kvtier.engine.tier_log import TierLog
from kvtier.errors import Remedy
from kvtier.runner.messages import Answered, Code, Finished, pack_rows
from tests.engine.ledger.bench import SECONDS, Bench


@pytest.fixture
def engine() -> Bench:
    return Bench(rows=64, tiers=[Bench.spec("disk", breaker_failures=2, store_chunks_max=8)])


@pytest.fixture
def log(engine: Bench) -> TierLog:
    return TierLog(engine.ledger.tiers)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "kvtier.engine.tier_log")
    return caplog


def fail(engine: Bench, names: str, cause: str = "EROFS", code: Code = Code.FAILED) -> None:
    """Store chunks, of which none moves."""
    engine.store(names)
    (store,) = engine.step()
    failed = pack_rows(range(len(names)))
    engine.ledger.apply(Finished(store.id, failed, bytes([code]) * len(names), SECONDS, cause=cause))


def test_a_breaker_that_opens_is_a_warning_with_the_tier_the_failures_and_the_last_cause(
    engine: Bench, log: TierLog, heard: pytest.LogCaptureFixture
) -> None:
    fail(engine, "abc", "EIO")
    fail(engine, "def")
    log.look(engine.now)
    (warning,) = heard.records
    assert warning.levelno == logging.WARNING
    assert warning.getMessage() == (
        "tier disk: the breaker is open after 2 failures in a row; the last cause is EROFS (Read-only file system);"
        f" it is tried again every 5 s; since the last line 6 chunks failed (failed 6); see {Remedy.BREAKER}"
    )


def test_a_closing_breaker_is_logged(engine: Bench, log: TierLog, heard: pytest.LogCaptureFixture) -> None:
    fail(engine, "abc")
    fail(engine, "def")
    log.look(engine.now)
    engine.step(seconds=5.0)
    engine.store("g")
    (trial,) = engine.step()
    engine.finish(trial)
    log.look(engine.now)
    assert (heard.records[-1].levelno, heard.messages[-1]) == (logging.INFO, "tier disk: the breaker is closed again")


def test_a_trial_that_fails_is_no_new_opening(engine: Bench, log: TierLog, heard: pytest.LogCaptureFixture) -> None:
    fail(engine, "abc")
    fail(engine, "def")
    log.look(engine.now)
    engine.step(seconds=5.0)
    fail(engine, "g")
    log.look(engine.now)
    assert len(heard.records) == 1


def test_drops_are_logged_once_a_minute_with_their_counts(
    engine: Bench, log: TierLog, heard: pytest.LogCaptureFixture
) -> None:
    fail(engine, "abc")
    fail(engine, "def")
    log.look(0.0)
    assert engine.store("ghijkl") is not None  # The breaker is open.
    for second in range(1, 60):
        log.look(float(second))
    assert len(heard.records) == 1
    log.look(60.0)
    assert heard.messages[1:] == [
        f"tier disk: since the last line 6 chunks were dropped (breaker 6); see {Remedy.LOSSES}"
    ]
    log.look(120.0)
    assert len(heard.records) == 2


def test_the_first_drops_are_logged_at_once_and_the_rest_at_the_end(
    engine: Bench, log: TierLog, heard: pytest.LogCaptureFixture
) -> None:
    engine.store("abcdefghij")
    log.look(1.0)
    engine.store("klm")
    log.look(2.0)
    assert heard.messages == [f"tier disk: since the last line 2 chunks were dropped (budget 2); see {Remedy.LOSSES}"]
    log.look(3.0, last=True)
    assert heard.messages[1:] == [
        f"tier disk: since the last line 3 chunks were dropped (budget 3); see {Remedy.LOSSES}"
    ]


def test_failures_that_open_no_breaker_are_logged_with_their_cause(
    engine: Bench, log: TierLog, heard: pytest.LogCaptureFixture
) -> None:
    fail(engine, "ab", "ENOSPC", Code.NO_SPACE)
    log.look(1.0)
    assert heard.messages == [
        "tier disk: since the last line 2 chunks failed (no_space 2);"
        f" the last cause is ENOSPC (No space left on device); see {Remedy.LOSSES}"
    ]


def test_a_missing_chunk_is_not_logged(engine: Bench, log: TierLog, heard: pytest.LogCaptureFixture) -> None:
    engine.holds("a")
    engine.lookup("a")
    (load,) = engine.step()
    engine.fail(load, Code.MISSING)
    log.look(1.0)
    assert heard.messages == []
    counters = engine.ledger.tiers[0].counters
    assert (counters.causes, counters.failed, counters.misses) == ({}, {}, 1)


def test_unanswered_probes_are_logged_once_a_minute(heard: pytest.LogCaptureFixture) -> None:
    engine = Bench(rows=8, tiers=[Bench.spec("peer", breaker_failures=99)])
    log = TierLog(engine.ledger.tiers)
    for number, name in enumerate("abc"):
        engine.lookup(name)
        (probe,) = engine.step()
        engine.ledger.apply(Answered(probe.id, b"", SECONDS, "deadline"))
        log.look(float(number))
    assert heard.messages == [
        f"tier peer: since the last line questions not answered: 1; the last cause is deadline; see {Remedy.LOSSES}"
    ]
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
        (Code.NO_SPACE, "", "no_space"),
        (Code.CORRUPT, "", "corrupt"),
        (Code.DEADLINE, "", "deadline"),
        (Code.LOST, "", "lost"),
    ],
)
def test_causes_are_counted_by_transfer_under_few_names(engine: Bench, code: Code, cause: str, label: str) -> None:
    fail(engine, "abc", cause, code)
    assert engine.ledger.tiers[0].counters.causes == {label: 1}


def test_a_probe_without_an_answer_has_a_cause(engine: Bench) -> None:
    engine.lookup("a")
    (probe,) = engine.step()
    engine.ledger.apply(Answered(probe.id, b"", SECONDS, "ESTALE"))
    counters = engine.ledger.tiers[0].counters
    assert (counters.causes, counters.last_cause) == ({"ESTALE": 1}, "ESTALE")
