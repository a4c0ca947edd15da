"""An order whose keys leave before they go: with hints, what leaves and comes back is who it was."""

import pytest

from kvtier.policies import Hint, HintedOrder, Leaving, LinkedLRU
from tests.policies.test_base import none_kept

OVER = Hint(over=True)


class Order:
    """An order of numbers with hints."""

    def __init__(self) -> None:
        self.order = Leaving[int](LinkedLRU(100), 4)
        self.hints: HintedOrder[int] | None = None

    def end(self, keys: list[int], hint: Hint | None = None) -> None:
        self.order.come_back(keys)
        if self.hints is None:
            self.hints = self.order.take_hints(0)
        self.hints.end(keys, hint)

    def leave(self, count: int) -> None:
        assert self.order.leave(count, none_kept)


@pytest.fixture
def order() -> Order:
    """Make an order in which two sessions have used 0, and each others."""
    order = Order()
    order.end([])
    order.order.insert([0, 1, 7])
    order.end([0, 1, 7])
    order.order.insert([2])
    order.order.touch([0])
    order.end([0, 2])
    return order


def test_what_came_back_is_still_what_another_session_used(order: Order) -> None:
    order.leave(4)
    order.order.insert([9])
    order.order.touch([0])
    order.order.insert([3])
    order.end([0, 3], OVER)
    assert order.order.evict(3, none_kept) == [7, 1, 2]
    assert [order.order.evict(1, none_kept) for _ in range(3)] == [[3], [9], [0]]


def test_a_session_whose_chunks_came_back_is_the_same_session(order: Order) -> None:
    order.leave(4)
    order.order.insert([9])
    order.order.touch([0, 2])
    order.order.insert([4])
    order.end([0, 2, 4], OVER)
    assert [order.order.evict(1, none_kept) for _ in range(6)] == [[7], [1], [4], [2], [9], [0]]


def test_what_has_gone_and_is_stored_again_is_new(order: Order) -> None:
    order.leave(4)
    assert order.order.evict(4, none_kept) == [7, 1, 2, 0]
    order.order.insert([9])
    order.order.insert([0, 5])
    order.end([0, 5], OVER)
    assert order.order.evict(2, none_kept) == [5, 0]


def test_what_was_removed_while_it_was_leaving_is_new_when_it_is_stored_again(order: Order) -> None:
    order.leave(4)
    order.order.remove([0, 1, 7])
    order.order.insert([9])
    order.order.insert([0, 5])
    order.end([0, 5], OVER)
    assert order.order.evict(3, none_kept) == [2, 5, 0]


def test_what_had_left_before_the_first_hint_counts_as_used_by_others() -> None:
    order = Order()
    order.order.insert([0, 1])
    order.leave(2)
    order.end([])
    order.order.insert([9])
    order.order.insert([2])
    order.end([0, 1, 2], OVER)
    assert order.order.evict(2, none_kept) == [2, 9]
