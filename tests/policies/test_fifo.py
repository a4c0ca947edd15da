from kvtier.policies import FIFO


def test_what_came_first_goes_first_whatever_is_used() -> None:
    policy = FIFO[int](3)
    policy.insert([3, 2, 1])
    policy.touch([1, 2])
    assert policy.evict(3, set[int]().__contains__) == [1, 2, 3]


def test_what_is_kept_stays_in_its_place() -> None:
    policy = FIFO[int](3)
    policy.insert([3, 2, 1])
    assert policy.evict(1, {1}.__contains__) == [2]
    assert policy.evict(2, set[int]().__contains__) == [1, 3]
