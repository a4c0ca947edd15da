"""Hints, and calls about keys, on whole engines with real tiers: what goes first, what stays, and for how long."""

import asyncio
import re
from datetime import timedelta
from fractions import Fraction
from http import HTTPStatus

import msgspec
import numpy as np
import pytest

from kvtier import EventKind, Hint
from tests.engine.kit import CHUNK_BYTES, at_rest, chunk, emptied, found, key, keys, ledger_in, put, until

SLOT_BYTES = CHUNK_BYTES + 4_096


def fs(tmp_path, layout="segments", **options):
    return {"type": "fs", "name": "disk", "root": str(tmp_path / "tier"), "layout": layout, **options}


def here(engine, numbers):
    ready = ledger_in(engine).primary.ready
    return [number for number in numbers if key(number) in ready]


async def put_hinted(engine, numbers, hint):
    numbers = list(numbers)
    await engine.put(keys(numbers), [chunk(number) for number in numbers], hint=hint)


async def test_chunks_of_a_finished_session_and_demoted_ones_are_evicted_first(open_engine, tmp_path):
    """The session that is over is the newest: by recency it would go last."""
    engine = await open_engine(8, fs(tmp_path), holds=range(4))
    await put_hinted(engine, range(10, 14), {"over": True})
    assert await at_rest(engine)
    await put(engine, range(20, 23))
    assert here(engine, range(20)) == [0, 1, 2, 3, 10]
    assert engine.demote(keys([2, 3, 99])) == 2
    await put(engine, [30, 31, 32])
    assert here(engine, range(20)) == [0, 1]


@pytest.mark.virtual_time
async def test_a_retained_chunk_stays_until_its_time_is_up(open_engine):
    """In virtual time: an hour is nothing, and then it goes as any other."""
    engine = await open_engine(8)
    await put_hinted(engine, [0, 1], Hint(retain_s=3_600.0))
    for left in ([0, 1], []):
        for number in range(10, 40):
            await put(engine, [number + len(left)])
        assert here(engine, range(2)) == left
        assert engine.stats().primary.rows_retained == len(left)
        await asyncio.sleep(3_601)


async def test_no_more_than_the_share_is_retained_and_the_rest_is_counted(open_engine):
    engine = await open_engine(16, limits={"retained_share": 0.25})
    await put_hinted(engine, range(6), Hint(retain_s=60.0, priority=1))
    primary = engine.stats().primary
    assert (primary.rows_retained, primary.retentions_cut) == (4, 2)
    assert engine.retain(keys([4, 5]), 60.0, priority=2) == 2
    assert (engine.stats().primary.rows_retained, engine.stats().primary.retentions_cut) == (4, 4)


async def test_a_chunk_with_no_store_goes_to_no_tier(open_engine, tmp_path):
    other = {"type": "dummy", "name": "other"}
    engine = await open_engine(8, fs(tmp_path), other)
    await put_hinted(engine, [0, 1], Hint(no_store=True))
    await put_hinted(engine, [2, 3], Hint(no_store=("disk",)))
    await put(engine, [4])
    assert await at_rest(engine)
    disk, dummy = engine.stats().tiers
    assert (disk.stored, disk.skipped, dummy.stored, dummy.skipped) == (1, {"no_store": 4}, 3, {"no_store": 2})
    assert await engine.get(keys([0])) == [chunk(0)]


@pytest.mark.promise("A client sends an invalid hint")
async def test_a_bad_hint_costs_the_request_nothing_and_is_counted_and_said_once(open_engine, caplog):
    engine = await open_engine(8)
    for bad in ("over", {"ower": True}, {"over": "yes"}, {"retain_s": -1}, {"retain_s": float("nan")}, 7, [1]):
        await put_hinted(engine, [0], bad)
    await put_hinted(engine, [1], {"no_store": ["nowhere"]})
    assert engine.stats().hints_ignored == {"type": 3, "field": 1, "value": 3, "tier": 1}
    assert len([record for record in caplog.records if record.name == "kvtier.settings.hints"]) == 4
    assert await found(engine, [0]) == 1


class Name(str):
    """A string of a class of its own, as a member of an enum is."""

    __slots__ = ()


ODD_HINTS = [  # With the reason for which they are ignored.
    ({"over": True, "class": "\ud800"}, "value"),  # As JSON has it for half of a pair.
    ({"no_store": ["\udfff"]}, "value"),
    ({"tokens": 1 << 64}, "value"),
    ({"tokens": 10**400}, "value"),
    ({"retain_s": 10**400}, "value"),
    (Hint(over=True, class_="\ud800"), "value"),
    (Hint(retain_s=1.0, tokens=1 << 64), "value"),
    (Hint(priority=1_000), "value"),
    ({"x" * 1_000_000: True}, "field"),
]


async def test_no_hint_ends_an_engine_wherever_its_runner_lives(open_engine, tmp_path, runner):
    """A hint that cannot be sent is ignored. Otherwise the step's transfers would be lost with it, and their rows."""
    engine = await open_engine(8, fs(tmp_path), runner=runner, eviction_policy="density")
    await put_hinted(engine, [0], Hint(class_="first"))  # From then on tiers hear of every hint.
    ignored = {}
    for number, (odd, reason) in enumerate(ODD_HINTS, 1):
        await put_hinted(engine, [number], odd)
        ignored[reason] = ignored.get(reason, 0) + 1
        assert await at_rest(engine)
        assert engine.stats().hints_ignored == ignored, number
    assert [await found(engine, [number]) for number in range(len(ODD_HINTS) + 1)] == [1] * (len(ODD_HINTS) + 1)
    assert engine.stats().tiers[0].stored == len(ODD_HINTS) + 1
    assert engine.steps.stats().runners_lost == 0


async def test_more_is_prefetched_than_a_window_and_no_more_than_the_share_of_leases(open_engine):
    """Keys above the share are not loaded: a prefetch takes no rows from others."""
    engine = await emptied(open_engine, 1_500, 2_000, {"type": "dummy"}, limits={"lease_share": 0.5})
    assert await engine.prefetch(keys(range(1_500))) == 1_000
    assert await at_rest(engine)
    assert await engine.prefetch(keys(range(1_000))) == 1_000
    for nothing in ([], [7_777]):
        assert await engine.prefetch(keys(nothing)) == 0


@pytest.mark.virtual_time
async def test_a_prefetch_counts_nothing_that_has_gone_again_before_its_end(open_engine):
    """Its leases have an end, and a slow tier may take longer than that."""
    tier = {"type": "dummy", "latency_s": 4.0, "concurrency": 1}
    engine = await emptied(open_engine, 3, 4, tier, limits={"lease_s": 0.5, "action_chunks": 1, "lease_share": 1.0})
    call = asyncio.ensure_future(engine.prefetch(keys(range(3))))
    await until(lambda: here(engine, range(3)) == [0])
    await asyncio.sleep(1.0)
    await put(engine, range(10, 12))
    assert here(engine, range(3)) == []
    assert await call == 0
    assert here(engine, range(3)) == [1, 2]


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "reset"])
async def test_a_prefetch_that_is_cancelled_leaves_nothing_held(open_engine, cancelled):
    engine = await emptied(open_engine, 3, 8, {"type": "dummy", "latency_s": 0.05})
    given = keys(range(3))
    call = asyncio.ensure_future(engine.prefetch(given))
    await until(lambda: ledger_in(engine).traffic.in_flight)
    given.clear()  # A list of keys may be changed as soon as the call has begun.
    if cancelled:
        call.cancel()
        await asyncio.wait([call])
    else:
        assert await engine.reset()
        assert await call in (0, 3)
    assert await at_rest(engine)
    assert not cancelled or here(engine, range(3)) == [0, 1, 2]


async def test_a_forgotten_chunk_is_removed_everywhere_with_an_event_each(open_engine, tmp_path):
    engine = await open_engine(8, fs(tmp_path), events=True, holds=range(4))
    assert await at_rest(engine)
    engine.take_events()
    assert engine.forget(keys([2, 3, 99])) == 3
    assert await at_rest(engine)
    assert here(engine, range(4)) == [0, 1]
    removed = [(event.tier, list(event.keys)) for event in engine.take_events() if event.kind is EventKind.REMOVED]
    assert ("cpu", keys([2, 3])) in removed
    assert [tier for tier, gone in removed if set(keys([2, 3])) <= set(gone)] == ["cpu", "disk"]
    assert await engine.reset()
    assert await found(engine, range(4)) == 2


async def test_a_chunk_forgotten_during_its_store_does_not_stay_in_the_tier(open_engine):
    engine = await open_engine(8, {"type": "dummy", "latency_s": 0.1}, holds=range(3))
    assert engine.forget(keys(range(3))) == 0
    assert await at_rest(engine)
    assert await engine.reset()
    assert await found(engine, range(3)) == 0
    assert engine.stats().tiers[0].chunks == 0


@pytest.mark.parametrize(
    ("seconds", "priority"),
    [(Fraction(600), 3), (np.float64(600), np.int64(3)), (10**400, True)],
    ids=["fraction", "numpy", "huge"],
)
async def test_a_retention_may_be_said_in_numbers_of_any_kind(open_engine, runner, seconds, priority):
    engine = await open_engine(8, {"type": "dummy", "capacity_bytes": "64KiB"}, runner=runner, holds=range(4))
    assert await at_rest(engine)
    assert engine.retain(keys(range(2)), seconds, priority=priority) == 2
    assert await at_rest(engine)
    assert await engine.reset()
    assert await found(engine, range(4)) == 4
    assert engine.steps.stats().runners_lost == 0


NO_RETENTIONS = [  # Seconds, priority, and how the error names what is wrong.
    ("60", 0, r"seconds: '60' \(str\) given, a positive, finite number accepted"),
    (None, 0, r"seconds: None \(NoneType\) given, a positive, finite number accepted"),
    (timedelta(minutes=1), 0, r"seconds: datetime\.timedelta\(seconds=60\) \(timedelta\) given, .* accepted"),
    (np.array([1.0, 2.0]), 0, r"seconds: array.* \(ndarray\) given, a positive, finite number accepted"),
    ([60.0] * 1_000, 0, r"seconds: \[60\.0, .{1,60}\] \(list\) given"),
    (60.0, 2.5, r"priority: 2\.5 \(float\) given, a whole number from 0 to 99 accepted"),
    (60.0, None, r"priority: None \(NoneType\) given, a whole number from 0 to 99 accepted"),
    *((seconds, 0, "seconds: ") for seconds in (0, -1, float("inf"), float("nan"))),
    *((1, priority, "priority: ") for priority in (100, -1)),
]


@pytest.mark.parametrize(("seconds", "priority", "complaint"), NO_RETENTIONS)
async def test_an_invalid_retention_is_refused_by_name_value_and_remedy(open_engine, seconds, priority, complaint):
    engine = await open_engine(4)
    for retain in (engine.retain, engine.steps.retain):
        with pytest.raises((TypeError, ValueError), match=complaint):
            retain(keys([0]), seconds, priority=priority)


WRONG_FIELDS = [  # Name, value, and how the error names it.
    ("over", 1, r"over: 1 \(int\) given, true or false accepted"),
    ("over", None, r"over: None \(NoneType\) given, true or false accepted"),
    ("returns_in_s", True, r"returns_in_s: True \(bool\) given, a finite number of seconds, at least 0, accepted"),
    ("retain_s", timedelta(minutes=1), r"retain_s: .*timedelta.* given, a finite number of seconds"),
    ("retain_s", Fraction(60), r"retain_s: Fraction\(60, 1\) \(Fraction\) given, a finite number of seconds"),
    ("priority", 2.5, r"priority: 2\.5 \(float\) given, a whole number from 0 to 99 accepted"),
    ("tokens", "100", r"tokens: '100' \(str\) given, a whole number, at least 0, accepted"),
    ("class_", b"coder", r"class: b'coder' \(bytes\) given, text of at most 256 characters accepted"),
    ("no_store", "disk", r"no_store: 'disk' \(str\) given, true, false, or a list of at most 64 tiers' names"),
    ("no_store", ("disk", 7), r"no_store: \('disk', 7\) \(tuple\) given, true, false, or a list"),
    ("class_", ["\x1b[31m\n" * 100_000], r"class: \['\\x1b.{1,80}'\] \(list\) given"),
]


@pytest.mark.parametrize(("field", "value", "complaint"), WRONG_FIELDS)
async def test_a_program_gets_an_error_and_the_log_a_short_line_for_a_field_of_a_wrong_type(
    open_engine, caplog, field, value, complaint
):
    """No request fails for a client's hint: it is ignored. What it sends neither fills nor steers the log."""
    with pytest.raises(TypeError, match=complaint):
        Hint(**{field: value})
    engine = await open_engine(4)
    await put_hinted(engine, [0], {field.rstrip("_"): value})
    assert engine.stats().hints_ignored == {"value": 1}
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvtier.settings.hints"]
    assert re.search(complaint, line), line
    assert line.isprintable()
    assert len(line) < 500


def test_a_valid_hint_takes_numbers_and_strings_of_any_class():
    said = Hint(over=True, returns_in_s=3, retain_s=2.5, priority=99, tokens=0, class_="x", no_store=("disk", "s3"))
    assert msgspec.json.decode(msgspec.json.encode(said), type=Hint) == said
    assert Hint(no_store=False, retain_s=None, tokens=None, class_=None) == Hint()
    as_others = Hint(retain_s=np.float64(2.5), priority=HTTPStatus.OK, class_=Name("agent"), no_store=["disk"])
    assert msgspec.json.encode(as_others) == b'{"retain_s":2.5,"priority":200,"class":"agent","no_store":["disk"]}'


async def test_retain_keeps_chunks_in_a_tier_too(open_engine, tmp_path):
    engine = await open_engine(64, fs(tmp_path, capacity_bytes=64 * SLOT_BYTES + 40_000), holds=range(4))
    assert await at_rest(engine)
    assert engine.retain(keys([*range(4), 99]), 600.0, priority=3) == 4
    for first in range(1_000, 1_160, 8):
        await put(engine, range(first, first + 8))
        assert await at_rest(engine)
    assert all(ledger_in(engine).locations.mask.get(each) for each in keys(range(4)))
    assert here(engine, range(4)) == [0, 1, 2, 3]
