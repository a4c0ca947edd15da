"""ARC and S3-FIFO: what they learn from ghosts and uses, case by case."""

import pytest

from kvtier.policies import ARC, S3FIFO
from tests.policies.test_base import none_kept


def test_a_scan_does_not_evict_from_arc_keys_that_were_used_again():
    policy = ARC[int](10)
    policy.insert([1, 2, 3])
    policy.touch([1, 2, 3])
    policy.insert(range(10, 17))
    for scanned in range(100, 200):
        assert not {1, 2, 3} & set(policy.evict(1, none_kept, [scanned]) or ())
        policy.insert([scanned])


def test_arc_counts_a_key_that_returns_from_the_ghosts_as_used_again():
    policy = ARC[int](4)
    policy.insert([9])
    policy.touch([9])
    policy.insert([3, 2, 1])
    assert policy.evict(1, none_kept, [4]) == [1]
    policy.insert([4])
    assert policy.evict(1, none_kept, [1]) == [2]  # The balance is one key used once more than none.
    policy.insert([1])
    assert policy.evict(4, none_kept) == [3, 4, 9, 1]


def test_in_arc_keys_used_again_make_room_when_keys_used_once_are_missed():
    policy = ARC[int](8)
    policy.insert(range(8))
    policy.touch(range(4))
    assert policy.evict(4, none_kept, range(10, 14)) == [7, 6, 5, 4]
    policy.insert(range(10, 14))
    assert policy.evict(4, none_kept, range(4, 8)) == [3, 2, 1, 0]


def test_in_arc_keys_used_again_make_up_for_pinned_keys_used_once():
    policy = ARC[int](4)
    policy.insert([4, 3, 2, 1])
    policy.touch([3, 4])
    assert policy.evict(2, {1, 2}.__contains__) == [4, 3]
    assert policy.evict(1, {1, 2}.__contains__) is None
    assert policy.evict(2, none_kept) == [1, 2]


def full(policy, *, used_twice):
    policy.insert(range(19, -1, -1))  # Key 0 came first.
    for _ in range(2):
        policy.touch(used_twice)
    return policy


def test_one_further_use_is_not_enough_for_main():
    policy = S3FIFO[int](20)
    policy.insert(range(19, -1, -1))
    policy.touch([0])
    assert policy.evict(1, none_kept) == [0]


def test_in_s3fifo_a_key_that_returns_from_the_ghosts_skips_probation():
    policy = full(S3FIFO(20), used_twice=range(0))
    assert policy.evict(1, none_kept) == [0]
    policy.insert([0])
    assert policy.evict(19, {0}.__contains__) == list(range(1, 20))
    assert policy.evict(1, none_kept) == [0]


def test_main_gives_a_second_chance_for_each_use():
    policy = full(S3FIFO(20), used_twice=range(20))
    assert policy.evict(1, none_kept) == [0]  # All went to main; there the first is the first.
    policy.touch([1])
    assert (policy.evict(18, none_kept), policy.evict(1, none_kept)) == (list(range(2, 20)), [1])


def test_ghosts_are_forgotten_in_turn():
    """Nine ghosts fit beside one key on probation: the tenth eviction makes the first a stranger again."""
    policy = S3FIFO[int](10)
    policy.insert(range(9, -1, -1))
    assert policy.evict(10, none_kept) == list(range(10))
    policy.insert([0])  # On probation again.
    policy.insert([1])  # In main.
    assert policy.evict(2, none_kept) == [0, 1]


@pytest.mark.parametrize(
    ("used_twice", "once", "kept", "room"),
    [
        (range(5), [5, 6, 7], range(8, 20), [0, 1]),  # One-hit wonders go; then all of probation is kept.
        (range(18), [18], range(18), [19]),  # All of main is kept; 19 alone is on probation, below its share.
    ],
)
def test_one_hit_wonders_go_first_and_where_one_queue_is_kept_the_other_makes_room(used_twice, once, kept, room):
    policy = full(S3FIFO(20), used_twice=used_twice)
    assert policy.evict(len(once), none_kept) == once  # Those used twice are in main now.
    assert policy.evict(len(room), set(kept).__contains__) == room
