"""Density: the classes that it tells apart, hints as labels, and owners that never rank."""

import random

from kvtier.policies.density import DensityOrder
from kvtier.policies.returns import CLASSES_MAX, IDLE_HINTS, OFTEN, Classes
from kvtier.settings.hints import Hint

ROWS = 64
RESIDENT = 300


def test_a_frequent_name_becomes_a_class_and_keeps_its_number():
    classes = Classes()
    assert [classes.number("agent")[0] for _ in range(OFTEN + 2)] == [None] * (OFTEN - 1) + [0, 0, 0]


def test_made_up_names_become_no_classes():
    classes = Classes()
    assert {classes.number(f"request {number}") for number in range(10_000)} == {(None, False)}
    for _ in range(OFTEN):
        answer = classes.number("agent")
    assert answer == (0, False)


def test_a_class_unused_for_long_is_replaced():
    classes = Classes()
    for name in range(CLASSES_MAX):
        for _ in range(OFTEN):
            classes.number(str(name))
    for _ in range(OFTEN):
        answer = classes.number("late")
    assert answer == (None, False)
    for _ in range(IDLE_HINTS + CLASSES_MAX * OFTEN):
        answer = classes.number("late")
        if answer[0] is not None:
            break
    assert answer == (0, True)


def test_the_number_of_labels_is_bounded_whatever_clients_send(monkeypatch):
    """Every class and every expected time could be told apart from every other, by every turn and pause."""
    monkeypatch.setattr("kvtier.policies.returns.LABELS_MAX", 128)
    dice, order = random.Random(1), DensityOrder(ROWS, list(range(ROWS)), numbers=ROWS)
    order.insert(range(ROWS))
    for _ in range(2_000):
        first = dice.randrange(ROWS)
        keys = range(first, dice.randint(first + 1, ROWS))
        order.touch(keys)
        order.rank(keys, Hint(returns_in_s=10 ** dice.uniform(0, 6), class_=f"client {dice.randrange(60)}"))
    assert 128 <= len(order._returns._labels) <= 128 + 300
    assert order.evict(ROWS, lambda key: 0) is not None


def test_an_order_that_is_never_ranked_forgets_evicted_runs_and_stays_an_lru(monkeypatch):
    """A tier that is only written to learns of no request's end. It would remember each store forever."""
    monkeypatch.setattr("kvtier.policies.density._OPEN_RUNS", RESIDENT * 4 // 5)
    order = DensityOrder(16, list(range(RESIDENT)), numbers=RESIDENT, warm_up_requests=1)
    for number in range(RESIDENT):
        order.insert([number])
    for call in range(8 * RESIDENT):
        assert order.evict(1, lambda key: 0) == [call % RESIDENT]
        order.insert([call % RESIDENT])
    assert sum(map(len, order._aging)) < 2 * RESIDENT
