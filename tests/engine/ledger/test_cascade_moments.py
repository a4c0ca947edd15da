"""Tiers that are written later: when a chunk leaves the primary, or when it is used for the second time."""

import gc
import sys

import pytest

from kvtier.backend import make_offload_key
from kvtier.engine.writeback import SEEN_MIN
from kvtier.runner.messages import Advise, Code, RunnerLost, unpack_keys, unpack_rows
from kvtier.settings.hints import Advice, Hint
from tests.engine.ledger.bench import HIT, PENDING, Bench, ending_at, keys_of, names_of
from tests.engine.ledger.bench import cascades as sent

NOTHING = {"no_store": True}


def skipped(engine, tier=0):
    return engine.counters(tier).skipped


def over(engine, request, hint):
    engine.ledger.hint(request, hint)
    engine.ledger.finish(request)


def written_at_the_end(engine):
    engine.ledger.writeback.end()
    return "".join(names for _, names in sent(engine.step()))


def promoted(engine, name, tier=0):
    engine.holds(name, tier)
    request = engine.request()
    assert engine.lookup(name, request) == [PENDING]
    engine.finish_all(engine.step())
    engine.load(name, request)


@pytest.fixture
def evicting(bench):
    """Four rows over a tier that is written when chunks leave; one row is kept ahead of demand."""

    def make(*, rows=4, tiers=(), ahead_rows=1, retained_rows_max=0, **spec):
        limits = {"ahead_rows": ahead_rows, "retained_rows_max": retained_rows_max}
        engine = bench(rows, [bench.spec(cascade="evict", **spec), *tiers], **limits)
        for index in range(1 + len(tiers)):
            engine.knows_all(index)
        return engine

    return make


def test_a_store_that_needs_rows_which_are_being_written_is_refused_until_they_have_been(evicting):
    """These are a twentieth of all: what leaves ahead of demand, and no row besides."""
    engine = evicting(rows=20)
    engine.store("abcdefghijklmnopqrst")
    writes = engine.step()
    assert sent(writes) == [(0, "t")]
    assert engine.step() == []
    assert engine.ledger.prepare_store(keys_of("ABCDEFGHIJKLMNOPQRST"), engine.request()) is None
    assert engine.ledger.prepare_store(keys_of("ABCDEFGHIJKLMNOPQRS"), engine.request()) is not None
    engine.finish_all(writes)
    assert engine.ledger.prepare_store(keys_of("T"), engine.request()) is not None


@pytest.mark.parametrize("used", [False, True])
def test_a_written_chunk_can_be_loaded_until_its_row_is_needed_and_stays_if_it_is_used(evicting, used):
    engine = evicting()
    engine.store("abcd")
    engine.finish_all(engine.step())
    assert engine.lookup("d") == [HIT]
    if used:
        engine.load("d")
    assert sent(engine.step()) == ([(0, "c")] if used else [])
    if not used:
        assert engine.store("e").evicted == keys_of("d")
    assert ("d" in engine.ready()) == used


def test_what_the_tier_has_is_renewed_there_and_ends_no_session(evicting):
    """It is of several requests. Taken for one's end, it would have the tier believe that they share their chunks."""
    engine = evicting()
    request = engine.request()
    engine.store("abcd", request)
    engine.holds("d")
    over(engine, request, Hint(class_="agent"))
    actions = engine.ledger.end_step()
    assert sent(actions) == []
    told = [action for action in actions if isinstance(action, Advise)]
    assert [(names_of(unpack_keys(rank.keys)), rank.hint) for rank in told] == [
        ("", Hint()),
        ("d", Hint(class_="agent")),
        ("d", None),
    ]


@pytest.mark.parametrize("source", [0, 1])
def test_a_chunk_that_came_from_a_tier_is_written_to_the_others_alone(evicting, bench, source):
    engine = evicting(tiers=[bench.spec("slow", cascade="evict")])
    promoted(engine, "x", source)
    engine.store("abc")
    assert sent(engine.step()) == [(1 - source, "x")]
    assert skipped(engine) == {}


def test_each_tier_is_written_at_its_own_moment(evicting, bench):
    engine = evicting(tiers=[bench.spec("at once"), bench.spec("again", cascade="second_use")])
    engine.store("abcd")
    assert sent(engine.step()) == [(1, "abcd")]
    engine.load("a")
    assert sent(engine.step()) == [(2, "a")]


def test_what_is_over_leaves_unwritten_and_is_counted(evicting):
    """It would be the newest chunk of the tier, and others would go for it there."""
    engine = evicting()
    request = engine.request()
    engine.ledger.hint(request, Hint(over=True))
    engine.store("abcd", request)
    engine.ledger.finish(request)
    assert sent(engine.step()) == []
    assert engine.store("ef").evicted == keys_of("dc")
    engine.step()
    assert skipped(engine) == {"over": 2}
    assert written_at_the_end(engine) == "ef"
    assert engine.ledger.writeback.give_up("closed") == 0
    assert skipped(engine) == {"over": 4}


def test_a_store_executes_no_more_instructions_where_chunks_are_written_when_they_leave(bench):
    """Counted in Python's instructions, over a tier that keeps up and over one that takes nothing."""
    without = instructions_of_stores(bench(200, 0), Bench.finish_all)
    keeps_up, hung = (
        bench(200, [bench.spec(cascade="evict", store_chunks_max=most)], ahead_rows=64) for most in (1_000, 64)
    )
    assert max(instructions_of_stores(keeps_up, Bench.finish_all)) <= max(without)
    assert sum(instructions_of_stores(hung, lambda *_: None)) <= 1.2 * sum(without)


def instructions_of_stores(engine, end_writes):
    """Store 16 new chunks a step until the rows have been used some times over; count what preparing each takes."""
    counted, before = [], sys.gettrace()

    def trace(frame, event, _):
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        counted[-1] += event == "opcode"
        return trace

    for tier in engine.ledger.tiers:
        engine.knows_all(tier.index)
    gc.disable()  # It may run the finalizers of what other tests have left.
    for step in range(40):
        request, keys = engine.request(), [make_offload_key(f"{step}-{number}".encode()) for number in range(16)]
        counted.append(0)
        sys.settrace(trace)
        plan = engine.ledger.prepare_store(keys, request)
        sys.settrace(before)
        engine.ledger.complete_store(plan.keys, request)
        end_writes(engine, engine.step())
    gc.enable()
    return counted[20:]


def test_what_waits_to_be_written_is_not_lost_while_others_come_back_and_leave_again(evicting):
    engine = evicting(rows=6, ahead_rows=3, store_chunks_max=1)
    engine.store("abcdef")
    (stuck,) = engine.step()
    for turn in range(40):
        name = "bcde"[turn % 4]
        request = engine.request()
        engine.lookup(name, request)
        engine.load(name, request)
        engine.ledger.finish(request)
        assert engine.step() == []
    left = {engine.ledger.primary.key(row) for row in engine.ledger.primary.ahead}
    assert keys_of("a")[0] in left, "it has waited all the time"
    assert engine.ledger.writeback.queued_rows <= 2 * 6
    written, actions = [], [stuck]
    while actions:
        engine.finish_all(actions)
        actions = engine.step()
        written += [name for _, names in sent(actions) for name in names]
    assert left <= {*keys_of("f"), *keys_of("".join(written))}


@pytest.mark.parametrize("runner_up", [True, False])
def test_an_open_breaker_costs_writes_and_no_store_a_row(evicting, runner_up):
    engine = evicting(breaker_failures=1)
    engine.store("abcd")
    if runner_up:
        engine.fail(*engine.step(), Code.UNAVAILABLE)
    else:
        engine.ledger.apply(RunnerLost(0, "killed"))
    for name in "efgh":
        assert engine.store(name) is not None
        assert sent(engine.step()) == []
    assert skipped(engine) == {"pressure": 3 if runner_up else 4}


def test_a_hung_write_keeps_its_row_and_no_other(evicting):
    engine = evicting()
    engine.store("abcd")
    (write,) = engine.step()
    engine.fail(write, Code.DEADLINE, lent=True)
    (lent,) = unpack_rows(write.rows)
    for name in "efghijkl":
        assert engine.store(name).rows != [lent]
        engine.finish_all(engine.step())
    engine.give_back(write)
    engine.step()
    assert lent in {engine.store(name).rows[0] for name in "mnopq"}


def test_a_reset_makes_every_row_clean(evicting):
    engine = evicting()
    engine.store("abc")
    engine.reset()
    assert skipped(engine) == {"reset": 3}
    engine.stored_alone("wxyz")
    assert engine.step() == []


@pytest.mark.parametrize("in_time", [True, False])
def test_at_the_end_dirty_rows_are_cleaned_in_the_order_of_storing_or_counted(evicting, in_time):
    engine = evicting(rows=8, store_chunks_max=3)
    engine.store("abcde")
    engine.step()
    engine.ledger.writeback.end()
    actions = engine.step()
    assert sent(actions) == [(0, "abc")]
    while in_time and engine.ledger.pending:
        engine.finish_all(actions)
        actions = engine.step()
    assert engine.ledger.writeback.give_up("closed") == (0 if in_time else 2)
    assert skipped(engine) == ({} if in_time else {"closed": 2})


@pytest.fixture
def careful(bench):
    engine = bench(4, [bench.spec(cascade="second_use")])
    engine.knows_all()
    return engine


def test_a_chunk_is_written_when_a_second_request_loads_or_stores_it(careful):
    request = careful.request()
    careful.store("abcd", request)
    careful.ledger.touch(keys_of("a"), request)
    careful.store("a", request)
    assert careful.step() == []
    assert skipped(careful) == {"first_use": 4}
    careful.load("b")
    assert sent(careful.step()) == [(0, "b")]
    careful.store("efg")
    careful.step()
    careful.store("a")
    assert sent(careful.step()) == [(0, "a")]


@pytest.mark.parametrize("use", ["stored", "used"])
def test_memory_for_first_uses_is_bounded(careful, use, monkeypatch):
    second_use, tier = careful.ledger.second_use, careful.ledger.tiers[0]
    assert second_use._seen_max == SEEN_MIN
    monkeypatch.setattr(second_use, "_seen_max", 100)
    for start in range(0, 300, 30):
        keys = [number.to_bytes(8, "big") for number in range(start, start + 30)]
        if use == "stored":
            second_use.stored(keys, tier, careful.request())
        else:
            second_use.used(keys, careful.request(), 0.0)
    assert len(second_use._seen[tier]) == 100


@pytest.mark.parametrize("why", ["kept out at its request's end", "forgotten"])
def test_a_chunk_that_was_kept_out_or_forgotten_counts_as_never_seen(careful, why):
    request = careful.request("first")
    careful.store("ab", request)
    if why == "forgotten":
        assert careful.ledger.forget(keys_of("ab")) == 2
        careful.finish(*careful.step())
    else:
        over(careful, request, NOTHING)
        careful.store("cdef", careful.request("between"))
    careful.store("ab", careful.request("second"))
    assert sent(careful.step()) == []
    careful.load("a", careful.request("third"))
    assert sent(careful.step()) == [(0, "a")]


def test_what_is_demoted_leaves_first_here_and_in_the_tier_and_what_is_retained_last(evicting):
    engine = evicting(rows=8, ahead_rows=2, retained_rows_max=2)
    engine.store("abcdefgh")
    engine.ledger.advise(Advice("demote", keys_of("ab")))
    engine.ledger.advise(Advice("retain", keys_of("gh"), seconds=60.0, priority=5))
    (write,) = engine.step()
    assert sent([write]) == [(0, "ab")]
    engine.finish(write)
    (demote,) = (action.advice() for action in engine.step() if action.kind == "demote")
    assert names_of(demote.keys) == "ab"
    engine.store("ij")
    assert sent(engine.step()) == [(0, "ef")]


@pytest.mark.parametrize("when", ["before", "at the end"])
def test_what_a_request_keeps_out_of_a_tier_is_written_to_the_others_alone(evicting, bench, when):
    engine = evicting(tiers=[bench.spec("other", cascade="evict")])
    request, hint = engine.request(), {"no_store": ["other"]}
    if when == "before":
        engine.ledger.hint(request, hint)
    engine.store("abcd", request)
    over(engine, request, hint)
    assert skipped(engine, 1) == {"no_store": 4}
    assert sent(engine.step()) == [(0, "d")]
    engine.store("e")
    assert skipped(engine, 1) == {"no_store": 4}


def stored_for_a_session_that_is_over(engine, names, position=None, **more):
    engine.ledger.hint(engine.request(), {"class": "first"})  # From here on, sessions are known.
    request = engine.request(position=position)
    engine.store(names, request)
    over(engine, request, {"over": True, **more})


def test_what_is_prefetched_after_its_session_was_over_is_written_as_any_other(evicting):
    engine = evicting()
    stored_for_a_session_that_is_over(engine, "abc")
    engine.ledger.prefetches.begin(keys_of("ab"))
    engine.step()
    assert written_at_the_end(engine) == "ab"


@pytest.mark.parametrize("ends", [None, [1, 2, 3, 4]])
def test_the_leading_part_that_is_retained_is_written_though_its_session_is_over(evicting, ends):
    engine = evicting(retained_rows_max=4)
    position = None if ends is None else ending_at(keys_of("abcd"), ends)
    stored_for_a_session_that_is_over(engine, "abcd", position, retain_s=60.0, tokens=2)
    assert written_at_the_end(engine) == "ab"
    assert engine.ledger.writeback.give_up("closed") == 0
    assert skipped(engine) == {"over": 2}


@pytest.mark.parametrize(
    ("by", "first", "written"), [("writer", "lost", ""), ("writer", "kept out", ""), ("reader", "lost", "a")]
)
def test_what_a_tier_lost_is_kept_out_by_the_request_that_stored_it_alone(evicting, by, first, written):
    engine = evicting(rows=1)
    writer, reader = engine.request("writer"), engine.request("reader")
    engine.store("a", writer)
    engine.finish_all(engine.step())
    engine.load("a", reader)
    if first == "lost":
        engine.loses("a")
    over(engine, writer if by == "writer" else reader, NOTHING)
    assert skipped(engine).get("no_store", 0) == (first == "lost" and by == "writer")
    engine.loses("a")
    assert written_at_the_end(engine) == written


@pytest.mark.parametrize("why", ["no_store", "not allowed"])
def test_what_a_tier_had_before_and_lost_is_not_written_for_a_request_that_keeps_its_own_out(evicting, why):
    engine = evicting()
    engine.holds("a")
    if why == "no_store":
        request = engine.request()
        request.hint = Hint(no_store=True)
        engine.store("a", request)
    else:
        engine.stored_alone("a")
    engine.loses("a")
    assert written_at_the_end(engine) == ""


def test_a_request_keeps_out_no_later_chunk_of_its_rows(evicting):
    engine = evicting(rows=1)
    request = engine.request()
    engine.store("a", request)
    engine.finish_all(engine.step())
    promoted(engine, "x")
    engine.load("x", request)
    engine.loses("x")
    over(engine, request, NOTHING)
    assert written_at_the_end(engine) == "x"


def test_a_forgotten_chunk_whose_row_is_lent_is_written_to_no_other_tier(evicting, bench):
    engine = evicting(ahead_rows=2, tiers=[bench.spec("busy", cascade="evict", store_chunks_max=1)])
    engine.store("abcd")
    first, second = engine.step()
    assert sent([first, second]) == [(0, "cd"), (1, "d")]
    assert engine.ledger.forget(keys_of("c")) == 0
    engine.finish(second)
    engine.loses("c", 1)
    assert sent(engine.step()) == []
    engine.finish(first)
    engine.step()
    assert engine.ready() == "abd"
