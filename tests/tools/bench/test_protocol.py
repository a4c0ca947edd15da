"""The benchmark of the step protocol measures what it says, over every size that it is given."""

import pytest

from kvtier.tools.bench.figures import Row
from tests.benchmarks.protocol import Engine, lookup_steps, measure_lookups, measure_steps, step_steps


def told(row: Row) -> tuple[object, ...]:
    assert row.figure > 0
    assert row.limit > 0
    return row.operation, *row.settings.values(), row.limit_is


def test_look_ups_stand_beside_dictionary_operations() -> None:
    done: list[int] = []
    rows = list(measure_lookups([1_024, 2_048], 1, lambda: done.append(1)))
    assert [told(row) for row in rows] == [
        ("look up, hit", 1_024, "dictionary operations"),
        ("look up, miss", 1_024, "dictionary operations"),
        ("look up, hit", 2_048, "dictionary operations"),
        ("look up, miss", 2_048, "dictionary operations"),
    ]
    assert len(done) == lookup_steps([1_024, 2_048], 1)


@pytest.mark.usefixtures("thorough")
def test_steps_are_measured_over_tiers_and_over_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.protocol.STEPS_A_ROUND", 1)
    done: list[int] = []
    engines = [Engine(1, 0), Engine(2, 0), Engine(1, 5_000)]
    rows = list(measure_steps(engines, 1, lambda: done.append(1)))
    assert [told(row) for row in rows if row.operation == "step"] == [
        ("step", 1, 0, "dictionary operations"),
        ("step", 2, 0, "dictionary operations"),
        ("step", 2, 0, "a step over 1 tier with 0 keys"),
        ("step", 1, 5_000, "dictionary operations"),
        ("step", 1, 5_000, "a step over 1 tier with 0 keys"),
    ]
    assert {"prepare and complete a store", "touch, prepare and complete a load"} < {row.operation for row in rows}
    assert len(done) == step_steps(engines, 1)
