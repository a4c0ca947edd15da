"""The contract of a policy, on every built-in one: against a set, a twin and, for three of them, a naive model."""

import copy
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.policies import ARC, FIFO, LRU, S3FIFO, Density, Hint, LinkedLRU, Policy, number_order
from tests.policies.naive_density import NaiveDensity

CAPACITY = 12
KEYS = 40
some_keys = st.lists(st.integers(0, KEYS - 1), unique=True, max_size=CAPACITY)
kept_keys = st.frozensets(st.integers(0, KEYS - 1))


def none_kept(key):
    return False


class NaiveFIFO(Policy[int]):
    def __init__(self, capacity):
        self.order = []

    def insert(self, keys):
        self.order += reversed(keys)

    def touch(self, keys):
        pass

    def rank(self, keys, hint=None):
        pass

    def evict(self, count, keep, incoming=()):
        victims = [key for key in self.order if not keep(key)][:count]
        if len(victims) < count:
            return None
        self.remove(victims)
        return victims

    def remove(self, keys):
        self.order = [key for key in self.order if key not in keys]


class NaiveLRU(NaiveFIFO):
    """Renews used keys, and kept keys at the cold end after an eviction."""

    def touch(self, keys):
        self.remove(keys)
        self.insert(keys)

    def rank(self, keys, hint=None):
        self.touch(keys)

    def evict(self, count, keep, incoming=()):
        victims = super().evict(count, keep)
        if victims is not None:
            passed_over = next((place for place, key in enumerate(self.order) if not keep(key)), 0)
            self.order = self.order[passed_over:] + self.order[:passed_over]
        return victims


class PolicyMachine(RuleBasedStateMachine):
    """Any calls that an owner may make. All `peers` must give the same answers."""

    types: ClassVar[tuple[Callable[[int], Any], ...]]

    def __init__(self):
        super().__init__()
        self.peers = [make(CAPACITY) for make in (*self.types, self.types[0])]
        self.resident = set()
        self.turns = itertools.cycle(range(len(self.peers)))

    @rule(keys=some_keys)
    def insert(self, keys):
        self.do_insert([key for key in keys if key not in self.resident][: CAPACITY - len(self.resident)])

    @rule(keys=some_keys)
    def touch(self, keys):
        for peer in self.peers:
            peer.touch([key for key in keys if key in self.resident])

    @rule(start=st.integers(0, CAPACITY), length=st.integers(2, CAPACITY))
    def touch_neighbours(self, start, length):
        keys = drained(self.peers[0])[start : start + length]
        for peer in self.peers:
            peer.touch(keys[::-1])

    @rule(keys=some_keys)
    def rank(self, keys):
        for peer in self.peers:
            peer.rank([key for key in keys if key in self.resident])

    @rule(keys=some_keys)
    def remove(self, keys):
        present = [key for key in keys if key in self.resident]
        for peer in self.peers:
            peer.remove(present)
        self.resident.difference_update(present)

    @rule(count=st.integers(0, CAPACITY + 1), kept=kept_keys)
    def evict(self, count, kept):
        self.do_evict(count, kept, ())

    @rule(keys=some_keys, kept=kept_keys)
    def make_room_and_insert(self, keys, kept):
        incoming = [key for key in keys if key not in self.resident]
        excess = max(0, len(self.resident) + len(incoming) - CAPACITY)
        if self.do_evict(excess, kept | set(keys), incoming):
            self.do_insert(incoming)

    @invariant()
    def exactly_the_resident_keys_can_be_evicted(self):
        """Checked on one peer after the other: all give the same answers, and copies take most of the time."""
        peer = copy.deepcopy(self.peers[next(self.turns)])
        assert set(peer.evict(len(self.resident), none_kept)) == self.resident
        assert peer.evict(1, none_kept) is None

    def do_insert(self, keys):
        for peer in self.peers:
            peer.insert(keys)
        self.resident.update(keys)

    def do_evict(self, count, kept, incoming):
        too_many = len(self.resident - kept) < count
        before = [drained(peer) for peer in self.peers] if too_many else []
        answers = [peer.evict(count, kept.__contains__, incoming) for peer in self.peers]
        victims = answers[0]
        assert answers == [victims] * len(self.peers)
        if too_many:
            assert victims is None
            assert [drained(peer) for peer in self.peers] == before
            return False
        assert len(victims) == len(set(victims)) == count
        assert self.resident - kept >= set(victims)
        self.resident.difference_update(victims)
        return True


def drained(policy):
    policy, order = copy.deepcopy(policy), []
    while victims := policy.evict(1, none_kept):
        order += victims
    return order


class FIFOMachine(PolicyMachine):
    types = (FIFO, NaiveFIFO)


class LRUMachine(PolicyMachine):
    types = (LRU, NaiveLRU, lambda _: LinkedLRU(KEYS))


class ARCMachine(PolicyMachine):
    types = (ARC,)


class S3FIFOMachine(PolicyMachine):
    types = (S3FIFO,)


class DensityMachine(PolicyMachine):
    """With a short warm-up, until which it is an LRU."""

    types = (
        lambda capacity: Density(capacity, warm_up_requests=3),
        lambda capacity: NaiveDensity(capacity, warm_up_requests=3),
        lambda capacity: number_order(Density[int](capacity, warm_up_requests=3), KEYS, range(KEYS), int),
    )

    @rule(
        keys=some_keys,
        over=st.booleans(),
        returns_in_s=st.none() | st.floats(min_value=0),
        class_=st.sampled_from([None, "agent", "tool"]),
    )
    def rank_with_a_hint(self, keys, over, returns_in_s, class_):
        hint = Hint(over=over, returns_in_s=returns_in_s, class_=class_)
        for peer in self.peers:
            peer.rank([key for key in keys if key in self.resident], hint)

    @rule(start=st.integers(0, CAPACITY), length=st.integers(1, CAPACITY))
    def use_as_a_request(self, start, length):
        keys = drained(self.peers[0])[start : start + length][::-1]
        for peer in self.peers:
            peer.touch(keys)
            peer.rank(keys)


TestFIFO = FIFOMachine.TestCase
TestLRU = LRUMachine.TestCase
TestARC = ARCMachine.TestCase
TestS3FIFO = S3FIFOMachine.TestCase
TestDensity = DensityMachine.TestCase
for machine in (FIFOMachine, LRUMachine, ARCMachine, S3FIFOMachine, DensityMachine):
    machine.TestCase.settings = settings(stateful_step_count=30, max_examples=max(25, settings().max_examples // 2))


def test_a_prefix_outlives_its_continuation(policy_type):
    policy = policy_type(4)
    policy.insert(["head", "middle", "tail"])
    policy.touch(["head", "middle", "tail"])
    assert drained(policy) == ["tail", "middle", "head"]


@pytest.mark.parametrize("policy_type", [ARC, LRU, Density])  # The others do not order by recency.
def test_pieces_of_a_prefix_are_ranked_in_prefix_order(policy_type):
    policy = policy_type(4)
    for piece in ("head", "middle", "tail"):
        policy.insert([piece])
    policy.rank(["head", "middle", "tail"])
    assert drained(policy) == ["tail", "middle", "head"]


@pytest.mark.parametrize("policy_type", [ARC, S3FIFO])  # The others do not count accesses.
def test_ranking_counts_no_access(policy_type):
    policy = policy_type(20)
    policy.insert([1, 2])
    for _ in range(3):
        policy.touch([1])
    for _ in range(9):
        policy.rank([2])
    assert drained(policy) == [2, 1]


def test_a_removed_key_leaves_no_trace(policy_type):
    fresh, used = policy_type(4), policy_type(4)
    used.insert([1, 2, 3])
    used.touch([1, 2])
    used.remove([3, 1, 2])
    for policy in (fresh, used):
        policy.insert([1, 2, 3])
        policy.touch([3])
        policy.insert([4])
    assert drained(used) == drained(fresh)


def test_a_cache_of_one_key_works(policy_type):
    policy = policy_type(1)
    for key in (1, 2, 1, 1, 2):
        policy.insert([key])
        policy.touch([key])
        policy.rank([key])
        assert policy.evict(1, {key}.__contains__) is None
        assert policy.evict(1, none_kept, [key + 1]) == [key]


def test_kept_keys_at_the_cold_end_cost_one_look_a_call(policy_type):
    """A tenth of the cache is pinned at the cold end while 200 batches make room."""
    pinned, batch, batches = 1_000, 8, 200
    policy = policy_type(10 * pinned)
    policy.insert(range(10 * pinned))
    looks = 0

    def keep(key):
        nonlocal looks
        looks += 1
        return key >= 9 * pinned

    for number in range(batches):
        incoming = range((10 + number) * 10 * pinned, (10 + number) * 10 * pinned + batch)
        assert policy.evict(batch, keep, incoming) is not None
        policy.insert(incoming)
    assert looks <= batches * (pinned + 4 * batch)
    if policy_type in (ARC, LRU):
        assert looks <= 3 * pinned + batches * 4 * batch


# What an LRU of numbers adds: places, growth, changed numbers.


@pytest.mark.parametrize(
    ("after", "order"), [(0, [2, 1, 5, 4, 3, 0]), (1, [2, 5, 4, 3, 1, 0]), (2, [5, 4, 3, 2, 1, 0])]
)
def test_rows_that_continue_a_row_leave_just_before_it(after, order):
    policy = LinkedLRU(6)
    policy.insert([0, 1, 2])
    policy.insert([3, 4, 5], after)
    assert policy.evict(6, none_kept) == order


@pytest.mark.parametrize("there", [[], [0], [0, 1, 2]])
def test_an_order_that_grows_keeps_its_order(there):
    policy = LinkedLRU(0)
    policy.grow(3)
    policy.insert(there)
    policy.grow(6)
    policy.insert([3, 4, 5])
    assert policy.evict(3 + len(there), none_kept) == [*reversed(there), 5, 4, 3]


@pytest.mark.parametrize("number", [2, 3])
def test_a_key_that_moves_to_another_number_or_stays_is_renewed(number):
    policy = LinkedLRU(4)
    policy.insert([0, 1, 2])
    policy.move(2, number)
    assert policy.evict(3, none_kept) == [1, 0, number]
