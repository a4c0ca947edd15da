from kvtier.policies.lru import LRU


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
