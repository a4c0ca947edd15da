from kvtier.policies import LFU


def none_kept(key: int) -> bool:
    return False


def use(policy: LFU[int], key: int, times: int) -> None:
    for _ in range(times):
        policy.touch([key])


def test_what_was_used_least_goes_first_and_then_what_was_used_longest_ago() -> None:
    policy = LFU[int](4)
    policy.insert([1, 2, 3, 4])
    use(policy, 4, 3)
    use(policy, 2, 1)
    assert policy.evict(4, none_kept) == [3, 1, 2, 4]


def test_a_scan_does_not_evict_what_is_used_often() -> None:
    policy = LFU[int](4)
    policy.insert([1, 2, 3, 4])
    for key in range(10, 100):
        policy.touch([1])
        assert policy.evict(1, none_kept) != [1]
        policy.insert([key])


def test_what_was_used_often_and_is_used_no_more_goes_in_the_end() -> None:
    policy = LFU[int](4)
    policy.insert([1, 2, 3, 4])
    use(policy, 1, 1_000)
    victims: list[int] = []
    for key in range(10, 100):
        victims += policy.evict(1, none_kept) or ()
        policy.insert([key])
        policy.touch([key])
    assert 1 in victims


def test_without_ageing_it_never_goes_while_others_are_used_less() -> None:
    policy = LFU[int](4, ageing=False)
    policy.insert([1, 2, 3, 4])
    use(policy, 1, 1_000)
    victims: list[int] = []
    for key in range(10, 100):
        victims += policy.evict(1, none_kept) or ()
        policy.insert([key])
        policy.touch([key])
    assert 1 not in victims


def test_kept_keys_of_little_worth_leave_the_work_to_worthier_ones() -> None:
    policy = LFU[int](3)
    policy.insert([1, 2, 3])
    use(policy, 3, 5)
    assert policy.evict(1, {1, 2}.__contains__) == [3]
    assert policy.evict(2, none_kept) == [2, 1]
