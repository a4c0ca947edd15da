from functools import cache
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tools.replay.study import opt_hits
from kvtier.tools.replay.traces import TraceRequest


@st.composite
def prefix_chained(draw: st.DrawFn) -> list[TraceRequest]:
    """Draw requests whose block ids stand for prefixes: the same id always comes after the same ids."""
    paths = draw(st.lists(st.lists(st.integers(0, 1), max_size=4).map(tuple), max_size=7))
    ids: dict[tuple[int, ...], int] = {}
    prompts = [tuple(ids.setdefault(path[:end], len(ids)) for end in range(1, len(path) + 1)) for path in paths]
    return [TraceRequest(0, 0, 0, blocks) for blocks in prompts]


def best_hits(requests: list[TraceRequest], capacity: int) -> int:
    """Try every set of blocks that could be kept after each request."""

    @cache
    def best_from(number: int, resident: frozenset[int]) -> int:
        if number == len(requests):
            return 0
        blocks = requests[number].hash_ids
        run = next((place for place, block in enumerate(blocks) if block not in resident), len(blocks))
        candidates = sorted(resident.union(blocks))
        kept = combinations(candidates, min(capacity, len(candidates)))
        return run + max(best_from(number + 1, frozenset(blocks)) for blocks in kept)

    return best_from(0, frozenset())


@given(requests=prefix_chained(), capacity=st.integers(1, 5))
def test_no_choice_of_blocks_to_keep_gives_more_hits(requests: list[TraceRequest], capacity: int) -> None:
    assert sum(opt_hits(requests, capacity)) == best_hits(requests, capacity)


def test_a_block_that_is_never_used_again_is_not_kept() -> None:
    requests = [TraceRequest(0, 0, 0, blocks) for blocks in [(1,), (2,), (3,), (1,)]]
    assert list(opt_hits(requests, 1)) == [0, 0, 0, 1]


def test_of_two_blocks_with_the_same_next_use_the_head_is_kept() -> None:
    requests = [TraceRequest(0, 0, 0, (1, 2)), TraceRequest(0, 0, 0, (1, 2))]
    assert list(opt_hits(requests, 1)) == [0, 1]


def test_outdated_entries_are_cleared_away_without_a_trace() -> None:
    """One prompt again and again outdates each entry as soon as it is made, more often than a heap is renewed."""
    requests = [TraceRequest(0, 0, 0, tuple(range(100)))] * 1_500
    assert list(opt_hits(requests, 50)) == [0] + [50] * 1_499


def test_blocks_that_come_twice_in_a_request_do_no_harm() -> None:
    requests = [TraceRequest(0, 0, 0, (1, 1, 2)), TraceRequest(0, 0, 0, (1, 1, 2))]
    assert list(opt_hits(requests, 2)) == [0, 3]


def test_an_empty_trace_has_no_hits() -> None:
    assert list(opt_hits([], 1)) == []
    assert list(opt_hits([TraceRequest(0, 0, 0, ())], 1)) == [0]
