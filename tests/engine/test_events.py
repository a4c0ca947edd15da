from kvtier.engine.answers import Event, EventKind, EventLog
from tests.engine.kit import key

STORED, REMOVED, FAILED = (
    Event(EventKind.STORED, "cpu", [key(1)]),
    Event(EventKind.REMOVED, "cpu", [key(1)]),
    Event(EventKind.FAILED, "0:fs", [key(1)], "corrupt"),
)


def test_events_are_taken_once_and_in_order_and_beyond_a_limit_the_oldest_go_and_are_counted() -> None:
    log = EventLog(events_max=2)
    log.add(EventKind.STORED, "cpu", [])  # No keys are no event.
    for event in (STORED, REMOVED, FAILED):
        log.add(*event)
    assert (log.take(), log.dropped) == ([REMOVED, FAILED], 1)
    assert log.take() == []


def test_a_disabled_log_keeps_nothing() -> None:
    off = EventLog()
    off.add(*STORED)
    assert (off.take(), off.dropped) == ([], 0)
