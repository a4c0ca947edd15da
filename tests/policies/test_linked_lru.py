"""What an LRU of numbers adds to the contract: places, growth, changed numbers. `LRUMachine` proves the rest."""

import pytest

from kvtier.policies import LinkedLRU
from tests.policies.test_base import none_kept


@pytest.mark.parametrize(
    ("after", "order"), [(0, [2, 1, 5, 4, 3, 0]), (1, [2, 5, 4, 3, 1, 0]), (2, [5, 4, 3, 2, 1, 0])]
)
def test_rows_that_continue_a_row_leave_just_before_it(after: int, order: list[int]) -> None:
    policy = LinkedLRU(6)
    policy.insert([0, 1, 2])
    policy.insert([3, 4, 5], after)
    assert policy.evict(6, none_kept) == order


@pytest.mark.parametrize("there", [[], [0], [0, 1, 2]])
def test_an_order_that_grows_keeps_its_order(there: list[int]) -> None:
    policy = LinkedLRU(0)
    policy.grow(3)
    policy.insert(there)
    policy.grow(6)
    policy.insert([3, 4, 5])
    assert policy.evict(3 + len(there), none_kept) == [*reversed(there), 5, 4, 3]


def test_a_key_that_moves_to_another_number_is_renewed() -> None:
    policy = LinkedLRU(4)
    policy.insert([0, 1, 2])
    policy.move(2, 3)
    assert policy.evict(3, none_kept) == [1, 0, 3]
