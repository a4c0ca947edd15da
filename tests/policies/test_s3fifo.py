from kvtier.policies import S3FIFO


def none_kept(key: int) -> bool:
    return False


def full(policy: S3FIFO[int], *, used_twice: range) -> S3FIFO[int]:
    policy.insert(range(19, -1, -1))  # Key 0 came first.
    for _ in range(2):
        policy.touch(used_twice)
    return policy


def test_one_hit_wonders_go_before_what_was_used_twice() -> None:
    policy = full(S3FIFO(20), used_twice=range(5))
    assert policy.evict(3, none_kept) == [5, 6, 7]


def test_one_further_use_is_not_enough_for_main() -> None:
    policy = S3FIFO[int](20)
    policy.insert(range(19, -1, -1))
    policy.touch([0])
    assert policy.evict(1, none_kept) == [0]


def test_a_key_that_returns_from_the_ghosts_skips_probation() -> None:
    policy = full(S3FIFO(20), used_twice=range(0))
    assert policy.evict(1, none_kept) == [0]
    policy.insert([0])
    assert policy.evict(19, {0}.__contains__) == list(range(1, 20))
    assert policy.evict(1, none_kept) == [0]


def test_main_gives_a_second_chance_for_each_use() -> None:
    policy = full(S3FIFO(20), used_twice=range(20))
    assert policy.evict(1, none_kept) == [0]  # All went to main; there the first is the first.
    policy.touch([1])
    assert policy.evict(18, none_kept) == list(range(2, 20))
    assert policy.evict(1, none_kept) == [1]


def test_ghosts_are_forgotten_in_turn() -> None:
    """Nine ghosts fit beside one key on probation: the tenth eviction makes the first a stranger again."""
    policy = S3FIFO[int](10)
    policy.insert(range(9, -1, -1))
    assert policy.evict(10, none_kept) == list(range(10))
    policy.insert([0])  # On probation again.
    policy.insert([1])  # In main.
    assert policy.evict(2, none_kept) == [0, 1]


def test_when_all_of_probation_is_kept_main_makes_room() -> None:
    policy = full(S3FIFO(20), used_twice=range(5))
    assert policy.evict(1, none_kept) == [5]  # 0 to 4 are in main now.
    assert policy.evict(2, set(range(6, 20)).__contains__) == [0, 1]


def test_when_all_of_main_is_kept_probation_makes_room() -> None:
    policy = full(S3FIFO(20), used_twice=range(18))
    assert policy.evict(1, none_kept) == [18]  # 0 to 17 are in main; 19 alone is on probation, below its share.
    assert policy.evict(1, set(range(18)).__contains__) == [19]
