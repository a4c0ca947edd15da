from kvtier.policies import ARC


def none_kept(key: int) -> bool:
    return False


def test_a_scan_does_not_evict_what_was_used_again() -> None:
    policy = ARC[int](10)
    policy.insert([1, 2, 3])
    policy.touch([1, 2, 3])
    policy.insert(range(10, 17))
    for scanned in range(100, 200):
        assert not {1, 2, 3} & set(policy.evict(1, none_kept, [scanned]) or ())
        policy.insert([scanned])


def test_a_key_that_returns_from_the_ghosts_counts_as_used_again() -> None:
    policy = ARC[int](4)
    policy.insert([9])
    policy.touch([9])
    policy.insert([3, 2, 1])
    assert policy.evict(1, none_kept, [4]) == [1]
    policy.insert([4])
    assert policy.evict(1, none_kept, [1]) == [2]  # The balance is one key used once more than none.
    policy.insert([1])
    assert policy.evict(4, none_kept) == [3, 4, 9, 1]


def test_keys_used_again_make_room_when_keys_used_once_turn_out_to_be_missed() -> None:
    policy = ARC[int](8)
    policy.insert(range(8))
    policy.touch(range(4))
    assert policy.evict(4, none_kept, range(10, 14)) == [7, 6, 5, 4]
    policy.insert(range(10, 14))
    assert policy.evict(4, none_kept, range(4, 8)) == [3, 2, 1, 0]


def test_a_key_pinned_among_those_used_once_leaves_the_work_to_those_used_again() -> None:
    policy = ARC[int](4)
    policy.insert([4, 3, 2, 1])
    policy.touch([3, 4])
    assert policy.evict(2, {1, 2}.__contains__) == [4, 3]
    assert policy.evict(1, {1, 2}.__contains__) is None
    assert policy.evict(2, none_kept) == [1, 2]
