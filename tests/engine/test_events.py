from kvtier.backend.namespace import make_offload_key
from kvtier.engine.answers import Event, EventKind, EventLog

KEYS = [make_offload_key(b"a")]
STORED, REMOVED, FAILED = (
    Event(EventKind.STORED, "cpu", KEYS),
    Event(EventKind.REMOVED, "cpu", KEYS),
    Event(EventKind.FAILED, "0:fs", KEYS, "corrupt"),
)


def test_events_are_taken_once_and_in_order() -> None:
    log = EventLog(events_max=10)
    for event in (STORED, REMOVED, FAILED):
        log.add(*event)
    assert log.take() == [STORED, REMOVED, FAILED]
    assert log.take() == []


def test_no_keys_are_no_event_and_a_disabled_log_keeps_nothing() -> None:
    log, off = EventLog(events_max=2), EventLog()
    log.add(EventKind.STORED, "cpu", [])
    off.add(*STORED)
    assert (log.take(), off.take(), off.dropped) == ([], [], 0)


def test_beyond_its_limit_the_oldest_go_and_are_counted() -> None:
    log = EventLog(events_max=2)
    for event in (STORED, REMOVED, FAILED):
        log.add(*event)
    assert (log.take(), log.dropped) == ([REMOVED, FAILED], 1)
