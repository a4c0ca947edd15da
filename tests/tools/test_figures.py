"""Rows of figures, and how sides are measured in turn."""

import pytest

from kvtier.tools.figures import Side, interleaved, row_of


def test_a_rows_ratio_is_the_median_of_the_rounds_ratios():
    """A round in which the whole machine was ten times slower does not count as half of a difference."""
    row = row_of("load", [90.0, 9.0, 80.0], [100.0, 10.0, 100.0], "preadv", {"depth": 4}, chunk_bytes=4_096)
    assert (row.figure, row.limit) == (80.0, 100.0)
    assert (row.ratio, row.spread, row.rounds) == (0.9, (0.8, 0.9), 3)


def test_every_side_is_measured_once_a_round_and_the_first_round_does_not_count():
    order: list[str] = []

    def side(name):
        def measure():
            order.append(name)
            return float(order.count(name))

        return Side(name, measure)

    measured = interleaved([side("a"), side("b"), side("c")], 20)
    assert measured == {name: [float(number) for number in range(2, 22)] for name in "abc"}
    rounds = [tuple(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1  # No side always follows the same other one.


def test_a_side_that_fails_is_tidied_up_after():
    done: list[str] = []

    def fail():
        raise OSError("no")

    side = Side("bad", fail, prepare=lambda: done.append("prepared"), tidy=lambda: done.append("tidied"))
    with pytest.raises(OSError, match="no"):
        interleaved([side], 1)
    assert done == ["prepared", "tidied"]
