"""The diagrams say what the code does: each state and each change of one, and the names that go between parts."""

import itertools
import re
from collections import Counter
from pathlib import Path

from kvtier import LookupResult, StepManager, make_offload_key
from kvtier.backend import Backend
from kvtier.engine.metrics import row_states
from kvtier.engine.primary import Primary
from kvtier.engine.tier import Breaker, BreakerState
from kvtier.policies import LRU
from kvtier.runner import messages

EXPLANATION = Path(__file__).parents[2] / "docs" / "explanation"
CALLS_MAX = 6  # One after the other: the longest way to any change takes fewer.


def changes_drawn(page):
    text = (EXPLANATION / page).read_text()
    (drawn,) = re.findall(r"^```mermaid\nstateDiagram-v2\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"^ +(\w+) --> (\w+):", drawn, re.MULTILINE))


def states_of(changes):
    return set(itertools.chain.from_iterable(changes))


def test_the_diagram_of_a_breaker_is_what_a_breaker_does():
    found = set()
    for calls in itertools.product(("succeeded", "failed", "trip", "admits"), repeat=CALLS_MAX):
        breaker = Breaker(failures_max=2, cooldown_s=1.0, trial_chunks=1)
        for now, call in enumerate(calls):  # A second a call: each cool-down is over with the next one.
            before = breaker.state
            getattr(breaker, call)(*(() if call == "succeeded" else (float(now),)))
            found.add((before.value, breaker.state.value))
    drawn = changes_drawn("failure-modes.md")
    assert drawn == {(before, after) for before, after in found if before != after}
    assert states_of(drawn) == {state.value for state in BreakerState}


class OneRow:
    """A primary with one row, used as the ledger uses rows. A call that the ledger never makes does nothing."""

    def __init__(self):
        self.primary = Primary(1, LRU(1))
        self.key = make_offload_key(b"0")
        self.pins = 0  # Of stores into tiers.

    @property
    def state(self):
        """The row's state, as the metric `kvtier_primary_rows` has it."""
        (state,) = (name for name, count in row_states(self.primary).items() if count)
        return state

    def reserve(self):
        key = make_offload_key(self.key + b"0")
        if self.state in ("free", "ready") and self.primary.reserve([key]) is not None:
            self.key = key

    def arrive(self):
        self.primary.publish([self.key])

    def fail(self):
        self.primary.abandon(self.key, lent=False)

    def hang(self):
        self.primary.abandon(self.key, lent=True)

    def store(self):
        if self.state == "ready":
            self.primary.pin([0])
            self.pins += 1

    def end(self):
        if self.pins:
            self.primary.unpin([0])
            self.pins -= 1
        elif self.primary.quarantined:
            self.primary.release(0)

    def delete(self):
        self.primary.discard(self.key, self.pins)

    def reset(self):
        self.primary.clear(Counter({0: self.pins}) + Counter(self.primary.quarantined))
        self.pins = 0


def test_the_diagram_of_a_rows_states_is_what_becomes_of_a_row():
    found = set()
    names = ("reserve", "arrive", "fail", "hang", "store", "end", "delete", "reset")
    for calls in itertools.product(names, repeat=CALLS_MAX - 1):
        row = OneRow()
        for call in calls:
            before = row.state
            getattr(row, call)()
            found.add((before, row.state))
    drawn = changes_drawn("architecture.md")
    assert drawn == {(before, after) for before, after in found if before != after}
    assert states_of(drawn) == set(row_states(OneRow().primary))


def test_the_way_of_a_chunk_names_calls_actions_and_messages_that_there_are():
    text = (EXPLANATION / "architecture.md").read_text()
    (drawn,) = re.findall(r"^```mermaid\nsequenceDiagram\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    said = re.findall(r"^ +(\w)-+>>(\w): (.*)", drawn, re.MULTILINE)
    calls = {name for by, to, what in said if (by, to) == ("L", "E") for name in re.findall(r"(\w+)\(", what)}
    assert calls == {name for name in calls if callable(getattr(StepManager, name, None))}
    to_tiers = {name for by, to, what in said if (by, to) == ("R", "T") for name in re.findall(r"(\w+)\(", what)}
    assert to_tiers <= Backend.__abstractmethods__
    sent = {what.split("(")[0].split(":")[0] for by, to, what in said if {by, to} == {"E", "R"}}
    assert sent == {name for name in sent if hasattr(messages, name)}
    answers = {name for by, to, what in said if (by, to) == ("E", "L") for name in re.findall(r"\b[A-Z_]{3,}\b", what)}
    assert answers <= set(LookupResult.__members__)
    assert all((calls, to_tiers, sent, answers))
