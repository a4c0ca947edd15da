"""An order whose keys leave before they go: with hints, what leaves and comes back is who it was."""

import random

import pytest

from kvtier.policies import EvictionQueue, Hint, LinkedLRU
from tests.policies.test_base import none_kept

OVER = Hint(over=True)


class Order:
    def __init__(self):
        self.order, self.hints = EvictionQueue[int](LinkedLRU(100), 4), None

    def end(self, keys, hint=None):
        self.order.come_back(keys)
        if self.hints is None:
            self.hints = self.order.take_hints(0)
        self.hints.end(keys, hint)

    def choose(self, count):
        assert self.order.choose(count, none_kept)


@pytest.fixture
def order():
    order = Order()
    order.end([])
    order.order.insert([0, 1, 7])
    order.end([0, 1, 7])
    order.order.insert([2])
    order.order.touch([0])
    order.end([0, 2])
    return order


def test_what_came_back_is_still_what_another_session_used(order):
    order.choose(4)
    order.order.insert([9])
    order.order.touch([0])
    order.order.insert([3])
    order.end([0, 3], OVER)
    assert order.order.evict(3, none_kept) == [7, 1, 2]
    assert [order.order.evict(1, none_kept) for _ in range(3)] == [[3], [9], [0]]


def test_a_session_whose_chunks_came_back_is_the_same_session(order):
    order.choose(4)
    order.order.insert([9])
    order.order.touch([0, 2])
    order.order.insert([4])
    order.end([0, 2, 4], OVER)
    assert [order.order.evict(1, none_kept) for _ in range(6)] == [[7], [1], [4], [2], [9], [0]]


def test_what_has_gone_and_is_stored_again_is_new(order):
    order.choose(4)
    assert order.order.evict(4, none_kept) == [7, 1, 2, 0]
    order.order.insert([9])
    order.order.insert([0, 5])
    order.end([0, 5], OVER)
    assert order.order.evict(2, none_kept) == [5, 0]


def test_what_was_removed_while_it_was_leaving_is_new_when_it_is_stored_again(order):
    order.choose(4)
    order.order.remove([0, 1, 7])
    order.order.insert([9])
    order.order.insert([0, 5])
    order.end([0, 5], OVER)
    assert order.order.evict(3, none_kept) == [2, 5, 0]


def test_what_had_left_before_the_first_hint_counts_as_used_by_others():
    order = Order()
    order.order.insert([0, 1])
    order.choose(2)
    order.end([])
    order.order.insert([9])
    order.order.insert([2])
    order.end([0, 1, 2], OVER)
    assert order.order.evict(2, none_kept) == [2, 9]


@pytest.mark.parametrize("seed", range(5))
def test_over_an_lru_both_together_are_an_lru(seed):
    """What leaves, comes back and goes out of its turn is forgotten in time: there are many more turns than keys."""
    dice, plain, leaving = random.Random(seed), LinkedLRU(60), EvictionQueue[int](LinkedLRU(60), 20)
    here = []
    for _ in range(4_000):
        match dice.randrange(6):
            case 0 | 1 if len(here) < 50:
                new = dice.sample(sorted(set(range(60)) - set(here)), dice.randint(1, 10))
                plain.insert(new)
                leaving.insert(new)
                here += new
            case 0 | 1 | 2:
                count = dice.randint(1, 12)
                expected = plain.evict(count, none_kept)
                assert leaving.evict(count, none_kept) == expected
                here = [key for key in here if key not in (expected or ())]
            case 3:
                gone = dice.sample(here, min(len(here), dice.randrange(3)))
                plain.remove(gone)
                leaving.remove(gone)
                here = [key for key in here if key not in gone]
            case 4:
                used = dice.sample(here, min(len(here), dice.randrange(8)))
                plain.touch(used)
                leaving.touch(used)
            case _:
                leaving.choose(dice.randint(0, 15), none_kept)
                assert set(leaving) <= set(here)


class Kept:
    def __init__(self, keys):
        self.keys, self.asked = set(keys), 0

    def __call__(self, key):
        self.asked += 1
        return key in self.keys


@pytest.fixture
def gone_ahead():
    order = EvictionQueue[int](LinkedLRU(1_000), 500)
    order.insert(range(999, -1, -1))
    order.touch(range(499, -1, -1))
    assert order.choose(500, none_kept)
    return order


def test_who_may_not_go_for_long_is_not_asked_about_in_every_call(gone_ahead):
    kept = Kept(range(500, 900))
    assert [gone_ahead.evict(1, kept) for _ in range(50)] == [[number] for number in range(900, 950)]
    assert kept.asked < 1_000


def test_who_could_not_go_is_considered_again_and_goes_first_once_it_may(gone_ahead):
    assert gone_ahead.evict(2, Kept(range(500, 510))) == [510, 511]
    gone_ahead.reconsider(Kept([500]))
    assert gone_ahead.evict(10, none_kept) == [*range(501, 510), 512]
    gone_ahead.reconsider(none_kept)
    assert gone_ahead.evict(2, none_kept) == [500, 513]


def test_who_is_used_while_it_is_aside_is_as_any_other(gone_ahead):
    assert gone_ahead.evict(1, Kept([500, 501])) == [502]
    gone_ahead.touch([500])
    assert gone_ahead.choose(500, none_kept)
    gone_ahead.reconsider(none_kept)
    assert gone_ahead.evict(997, none_kept) == [501, *range(503, 1_000), *range(499)]
    assert gone_ahead.evict(2, none_kept) == [499, 500]


def test_a_call_for_too_many_changes_nothing(gone_ahead):
    kept = Kept([*range(500), 500, 700])
    assert gone_ahead.evict(499, kept) is None
    assert len(gone_ahead) == 500
    assert gone_ahead.evict(498, kept) == [number for number in range(501, 1_000) if number != 700]
    assert sorted(set(gone_ahead)) == [500, 700]


def test_whoever_is_aside_and_may_go_counts_for_a_call_that_needs_all(gone_ahead):
    assert gone_ahead.evict(1, Kept(range(500, 999))) == [999]
    assert gone_ahead.evict(3, Kept([*range(500), *range(500, 996)])) == [996, 997, 998]
