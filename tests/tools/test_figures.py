"""Rows of figures, and how sides are measured in turn."""

import pytest

from kvtier.tools.figures import Pair, Side, interleaved, row_of, steps_of, this_machine


@pytest.mark.parametrize(
    ("unit", "figure", "limit"), [("MB/s", 50.0, 100.0), ("keys/s", 50.0, 100.0), ("ms", 4.0, 2.0)]
)
def test_a_ratio_says_how_near_a_figure_is_whether_more_is_better_or_less(
    unit: str, figure: float, limit: float
) -> None:
    row = row_of(Pair("load", None, {}, unit, "tier", "raw", "preadv"), {"tier": [figure], "raw": [limit]})
    assert row.ratio == 0.5


def test_a_rows_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """A round in which the whole machine was ten times slower does not count as half of a difference."""
    measured = {"tier": [90.0, 9.0, 80.0], "raw": [100.0, 10.0, 100.0]}
    row = row_of(Pair("load", 4_096, {"depth": 4}, "MB/s", "tier", "raw", "preadv"), measured)
    assert (row.figure, row.limit) == (80.0, 100.0)
    assert row.ratio == 0.9
    assert row.spread == (0.8, 0.9)
    assert row.rounds == 3


def test_every_side_is_measured_once_a_round_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    steps: list[int] = []

    def side(name: str) -> Side:
        def measure() -> float:
            order.append(name)
            return float(order.count(name))

        return Side(name, measure)

    measured = interleaved([side("a"), side("b"), side("c")], 20, step=lambda: steps.append(1))
    assert measured == {name: [float(number) for number in range(2, 22)] for name in "abc"}
    rounds = [tuple(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1  # No side always follows the same other one.
    assert len(steps) == steps_of(3, 20)


def test_a_side_that_fails_is_tidied_up_after() -> None:
    done: list[str] = []

    def fail() -> float:
        raise OSError("no")

    side = Side("bad", fail, prepare=lambda: done.append("prepared"), tidy=lambda: done.append("tidied"))
    with pytest.raises(OSError, match="no"):
        interleaved([side], 1)
    assert done == ["prepared", "tidied"]


def test_a_machine_is_described_with_its_load_before_and_after() -> None:
    machine = this_machine((1.0, 2.0, 3.0))
    assert machine.load_before == (1.0, 2.0, 3.0)
    assert machine.load_after[0] >= 0.0
    assert machine.processors >= 1
    assert machine.memory_bytes > 1 << 20
