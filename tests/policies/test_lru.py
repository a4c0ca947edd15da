import pytest

from kvtier.policies import LRU, LinkedLRU, Policy


def none_kept(key: int) -> bool:
    return False


def test_what_was_used_longest_ago_goes_first() -> None:
    policy = LRU[int](3)
    policy.insert([3, 2, 1])
    policy.touch([1])
    assert policy.evict(2, none_kept) == [2, 3]


def test_what_is_kept_at_the_cold_end_is_renewed_when_room_is_made() -> None:
    policy = LRU[int](4)
    policy.insert([4, 3, 2, 1])
    assert policy.evict(1, {1, 2}.__contains__) == [3]
    assert policy.evict(3, none_kept) == [4, 1, 2]


def test_what_is_kept_is_not_renewed_when_no_room_could_be_made() -> None:
    policy = LRU[int](4)
    policy.insert([4, 3, 2, 1])
    assert policy.evict(3, {1, 2}.__contains__) is None
    assert policy.evict(4, none_kept) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("after", "order"), [(0, [2, 1, 5, 4, 3, 0]), (1, [2, 5, 4, 3, 1, 0]), (2, [5, 4, 3, 2, 1, 0])]
)
def test_what_continues_a_row_goes_just_before_it(after, order) -> None:
    policy = LinkedLRU(6)
    policy.insert([0, 1, 2])
    policy.insert([3, 4, 5], after)
    assert policy.evict(6, none_kept) == order


@pytest.mark.parametrize("there", [[], [0], [0, 1, 2]])
def test_an_order_of_numbers_that_grows_stays_as_it_was(there: list[int]) -> None:
    policy = LinkedLRU(0)
    policy.grow(3)
    policy.insert(there)
    policy.grow(6)
    policy.insert([3, 4, 5])
    assert policy.evict(3 + len(there), none_kept) == [*reversed(there), 5, 4, 3]


@pytest.mark.parametrize("there", [[], [0], [0, 1, 2]])
def test_what_is_older_than_all_goes_first(there: list[int]) -> None:
    policy = LinkedLRU(6)
    policy.insert(there)
    policy.insert_coldest([3, 4, 5])
    assert policy.evict(3 + len(there), none_kept) == [5, 4, 3, *reversed(there)]


def test_what_moves_to_another_number_is_renewed() -> None:
    policy = LinkedLRU(4)
    policy.insert([0, 1, 2])
    policy.move(2, 3)
    assert policy.evict(3, none_kept) == [1, 0, 3]


@pytest.mark.parametrize("make", [LRU[int], LinkedLRU])
@pytest.mark.parametrize(
    ("touched", "order"),
    [
        ([4, 5], [3, 2, 1, 0, 5, 4]),  # Neighbours at the cold end, hottest first,
        ([2, 3], [5, 4, 1, 0, 3, 2]),  # or between others.
        ([3, 2], [5, 4, 1, 0, 2, 3]),
        ([2, 4], [5, 3, 1, 0, 4, 2]),
        ([0, 1], [5, 4, 3, 2, 1, 0]),
        ([1, 0], [5, 4, 3, 2, 0, 1]),
        ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]),
    ],
)
def test_what_is_touched_goes_last_its_tail_first(make, touched, order) -> None:
    policy: Policy[int] = make(6)
    policy.insert(range(6))
    policy.touch(touched)
    assert policy.evict(6, none_kept) == order
