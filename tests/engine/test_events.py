import pytest

from kvtier.engine.answers import Event, EventKind, EventLog
from tests.engine.kit import key

STORED, REMOVED, FAILED = (
    Event(EventKind.STORED, "cpu", [key(1)]),
    Event(EventKind.REMOVED, "cpu", [key(1)]),
    Event(EventKind.FAILED, "0:fs", [key(1)], "corrupt"),
)


@pytest.mark.parametrize(("events_max", "kept", "dropped"), [(2, [REMOVED, FAILED], 1), (0, [], 0)])
def test_events_are_taken_once_and_in_order_and_beyond_a_limit_the_oldest_go_and_are_counted(events_max, kept, dropped):
    log = EventLog(events_max)
    log.add(EventKind.STORED, "cpu", [])  # No keys are no event.
    for event in (STORED, REMOVED, FAILED):
        log.add(*event)
    assert (log.take(), log.dropped) == (kept, dropped)
    assert log.take() == []
