import tracemalloc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier import policies
from kvtier.settings.hints import Advice
from tests.policies.test_base import NaiveLRU, none_kept

CAPACITY = 12
KEYS = 30
RETAINED_MAX = 4
OVER = policies.Hint(over=True)
some_keys = st.lists(st.integers(0, KEYS - 1), unique=True, max_size=CAPACITY)


class NaiveHinted:
    """The specification of `HintedOrder` over an LRU, with lists that are searched from end to end."""

    def __init__(self):
        self.order, self.demoted = NaiveLRU(CAPACITY), []
        self.terms = []  # Key, until and priority, in order of retaining.
        self.users = {}  # Key -> the last request that used it and has ended; 0: none yet.
        self.shared, self.requests, self.cut = set(), 0, 0

    @property
    def retained(self):
        return {key for key, _, _ in self.terms}

    def insert(self, keys):
        self.order.insert(keys)
        self.users.update(dict.fromkeys(keys, 0))

    def touch(self, keys):
        self.demoted = [key for key in self.demoted if key not in keys]
        self.order.touch(keys)

    def end(self, keys, hint):
        self.touch(keys)
        last_used = [key for key in keys if self.users.get(key) != 0]
        if last_used:
            deepest = self.users.get(last_used[-1])
            rest = [key for key, user in self.users.items() if user == deepest and key not in keys]
            own = {0, deepest} if deepest is not None and len(rest) <= 1 else {0}
            self.shared |= {key for key in last_used if self.users.get(key) not in own}
        self.requests += 1
        self.users.update(dict.fromkeys(keys, self.requests))
        if hint is not None and hint.over:
            self.demote([key for key in keys if key not in self.shared])

    def demote(self, keys):
        self.terms = [term for term in self.terms if term[0] not in keys]
        self.demoted = [key for key in self.demoted if key not in keys] + list(reversed(keys))

    def retain(self, keys, until, priority):
        self.demoted = [key for key in self.demoted if key not in keys]
        room, fresh = RETAINED_MAX - len(self.terms), list[int]()
        for key in keys:
            had = [term for term in self.terms if term[0] == key]
            if had:
                self.terms.remove(had[0])
                self.terms.append((key, max(until, had[0][1]), max(priority, had[0][2])))
                continue
            lowest = min((term[2] for term in self.terms), default=priority)
            if room <= 0 and lowest < priority:
                self.let_go()
                room += 1
            if room > 0:
                room -= 1
                fresh.append(key)
            else:
                self.cut += 1
        self.terms += [(key, until, priority) for key in reversed(fresh)]

    def let_go(self):
        lowest = min(term[2] for term in self.terms)
        self.terms.remove(next(term for term in self.terms if term[2] == lowest))
        self.cut += 1

    def expire(self, now):
        self.terms = [term for term in self.terms if term[1] > now]

    def evict(self, count, kept):
        let_go = 1
        while (victims := self.chosen(count, kept | self.retained)) is None and self.terms:
            for _ in range(min(let_go, len(self.terms))):
                self.let_go()
            let_go *= 2
        if victims is not None:
            self.forget(victims)
        return victims

    def chosen(self, count, kept):
        first, rest = [key for key in self.demoted if key not in kept][:count], []
        if not first or len(first) < count:  # Else the order is not asked, and renews no kept key.
            rest = self.order.evict(count - len(first), lambda key: key in kept or key in first)
        if rest is None:
            return None
        self.order.remove(first)
        return first + rest

    def remove(self, keys):
        self.order.remove(keys)
        self.forget(keys)

    def forget(self, keys):
        self.demoted = [key for key in self.demoted if key not in keys]
        self.terms = [term for term in self.terms if term[0] not in keys]
        self.users = {key: user for key, user in self.users.items() if key not in keys}
        self.shared -= set(keys)


class HintedMachine(RuleBasedStateMachine):
    """Any calls that an owner may make. Orders of keys and of numbers must give the naive order's victims."""

    def __init__(self):
        super().__init__()
        self.naive, self.now = NaiveHinted(), 0.0
        orders = [policies.LRU[int](CAPACITY), policies.LinkedLRU(KEYS)]
        self.orders = [policies.HintedOrder[int](order, RETAINED_MAX) for order in orders]
        self.resident = set()

    def present(self, keys):
        return [key for key in keys if key in self.resident]

    @rule(keys=some_keys, start=st.integers(0, KEYS - 1), length=st.integers(0, 6), chain=st.booleans())
    def insert(self, keys, start, length, chain):
        keys = list(range(start, min(KEYS, start + length))) if chain else keys
        keys = [key for key in keys if key not in self.resident][: CAPACITY - len(self.resident)]
        for order in (self.naive, *self.orders):
            order.insert(keys)
        self.resident.update(keys)

    @rule(keys=some_keys)
    def touch(self, keys):
        for order in (self.naive, *self.orders):
            order.touch(self.present(keys))

    @rule(keys=some_keys, over=st.sampled_from([None, policies.Hint(), OVER]))
    def end(self, keys, over):
        for order in (self.naive, *self.orders):
            order.end(self.present(keys), over)

    @rule(start=st.integers(0, KEYS - 1), length=st.integers(1, 8), over=st.sampled_from([None, None, OVER]))
    def end_a_chain(self, start, length, over):
        for order in (self.naive, *self.orders):
            order.end(self.present(range(start, start + length)), over)

    @rule(keys=some_keys)
    def demote(self, keys):
        self.naive.demote(self.present(keys))
        for order in self.orders:
            order.advise(Advice("demote", self.present(keys)), self.now)

    @rule(keys=some_keys, seconds=st.integers(0, 9), priority=st.integers(0, 2))
    def retain(self, keys, seconds, priority):
        self.naive.expire(self.now)
        self.naive.retain(self.present(keys), self.now + seconds, priority)
        for order in self.orders:
            order.advise(Advice("retain", self.present(keys), seconds=seconds, priority=priority), self.now)

    @rule(seconds=st.integers(0, 9))
    def wait(self, seconds):
        self.now += seconds
        self.naive.expire(self.now)
        for order in self.orders:
            order.retained.expire(self.now)

    @rule(count=st.integers(1, CAPACITY + 1), kept=st.frozensets(st.integers(0, KEYS - 1)))
    def evict(self, count, kept):
        expected = self.naive.evict(count, kept)
        assert (expected is None) == (len(self.resident - kept) < count)
        for order in self.orders:
            assert order.evict(count, kept.__contains__) == expected
        self.resident.difference_update(expected or ())

    @rule(keys=some_keys)
    def remove(self, keys):
        present = self.present(keys)
        for order in (self.naive, *self.orders):
            order.remove(present)
        self.resident.difference_update(present)

    @invariant()
    def the_same_is_retained_and_no_more_than_the_share(self):
        for order in self.orders:
            assert {key for key in self.resident if key in order.retained} == self.naive.retained
            assert len(order.retained) == len(self.naive.retained) <= RETAINED_MAX
            assert order.retained.cut == self.naive.cut


TestHinted = HintedMachine.TestCase


def hinted(policy, keys=(), *, retained_max=8, names=range(100)):
    order = policies.number_order(policies.policy_class(policy)(100), 100, names, names.index)
    hinted = policies.HintedOrder[int](order, retained_max)
    for key in keys:
        hinted.insert([key])
    return hinted


each_policy = pytest.mark.parametrize("policy", policies.known_policies())


@each_policy
def test_under_every_policy_demoted_keys_go_first_unless_they_are_used_again(policy):
    order = hinted(policy, range(20))
    for key in range(20):
        order.end([key])
    order.demote([15, 16, 17, 18, 19])
    order.touch([18, 19])
    order.end([18, 19])
    assert order.evict(3, none_kept) == [17, 16, 15]
    assert not {18, 19} & set(order.evict(5, none_kept) or ())


@pytest.mark.parametrize("number", [2, 50])
@each_policy
def test_under_every_policy_retained_keys_go_last_also_when_they_have_moved(policy, number):
    names = list(range(100))
    order = hinted(policy, range(20), names=names)
    order.retain([0, 1, 2], 100.0, 5)
    names[2], names[number] = None, 2
    order.move(2, number)
    assert not {0, 1, number} & set(order.evict(17, none_kept) or ())
    assert set(order.evict(3, none_kept) or ()) == {0, 1, number}


def test_a_retained_key_that_is_used_at_its_number_keeps_its_place():
    order = hinted("lru", range(3), retained_max=2)
    order.retain([0], 100.0, 5)
    order.retain([1], 100.0, 5)
    order.move(0, 0)
    order.retain([2], 100.0, 6)
    assert set(order.retained) == {1, 2}


def test_requests_without_resident_keys_at_their_end_take_no_memory():
    order = hinted("lru", range(4))
    order.end(range(4), OVER)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            order.end([], policies.Hint())
        assert tracemalloc.get_traced_memory()[0] < 10_000
    finally:
        tracemalloc.stop()


def test_keys_from_before_the_first_hint_count_as_shared():
    plain = policies.LinkedLRU(100)
    plain.insert([0, 1, 2])
    order = policies.HintedOrder[int](plain, 0)
    order.insert([3, 4])
    order.end([0, 1, 2, 3, 4], OVER)
    order.insert([9])
    assert order.evict(2, none_kept) == [4, 3]
    assert order.evict(1, none_kept) == [2]  # By recency, like any other.
    order.touch([0, 1])
    assert order.evict(1, none_kept) == [9]


def test_density_does_not_demote_a_session_that_is_over_before_it_has_learned():
    order = policies.HintedOrder[int](policies.Density[int](100), 8)
    order.insert(range(5))
    order.end(range(5))
    order.insert(range(5, 10))
    order.end(range(5, 10), OVER)
    assert order.evict(1, none_kept) == [4]  # As an LRU, which it is at first.


def test_retaining_the_same_keys_again_takes_no_more_memory():
    retained = policies.Retained[int](10)
    for now in range(10_000):
        retained.retain(range(10), float(now + 1_000), 0)
    assert len(retained._ends) < 2_000


def test_a_share_of_nothing_retains_nothing():
    order = hinted("lru", range(10), retained_max=0)
    order.retain([0, 1], 100.0, 99)
    assert (order.evict(1, none_kept), order.retained.cut) == ([0], 2)
