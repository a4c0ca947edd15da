"""Pages at equal distances are found, in the order that has the fewest runs of them."""

import numpy as np
import pytest

from kvtier.kvcache.transfer.strided import runs_of


@pytest.mark.parametrize(
    ("indices", "period", "runs"),
    [
        ([4, 2, 3], None, [[2, 3, 4]]),
        ([9, 0, 6, 1, 3], None, [[0], [1], [3, 6, 9]]),  # The commonest distance, not the smallest.
        ([0, 1, 5, 6, 10, 11], None, [[0, 1], [5, 6], [10, 11]]),
        ([0, 1, 5, 6, 10, 11], 5, [[0, 5, 10], [1, 6, 11]]),  # Two pages of each of three rows: by position.
        ([0, 1, 2, 5, 6, 7], 5, [[0, 1, 2], [5, 6, 7]]),  # Three of two: row by row.
        ([7], 5, [[7]]),
    ],
)
def test_runs_are_as_few_as_there_can_be(indices: list[int], period: int | None, runs: list[list[int]]) -> None:
    given = np.array(indices)
    found = runs_of(given, period)
    bounds = zip(found.starts.tolist(), found.stops.tolist(), strict=True)
    assert [given[found.order[start:stop]].tolist() for start, stop in bounds] == runs
