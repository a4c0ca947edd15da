"""Invalid keys: the call that gets one refuses it by name, and the engine goes on unchanged."""

from array import array
from contextlib import suppress
from typing import Any

import pytest

from tests.engine.kit import CHUNK_BYTES, chunk, found, key, ledger_in, put
from tests.simulation.audit import audit, audit_quiet

# What a program may give in place of a list of keys, and how the error names it.
NO_KEYS: dict[str, tuple[Any, str]] = {
    "text": ([key(1), "a key"], r"keys\[1\]: 'a key' \(str\) given, bytes accepted"),
    "a number": ([7], r"keys\[0\]: 7 \(int\) given, bytes accepted"),
    "nothing": ([key(1), None], r"keys\[1\]: None \(NoneType\) given, bytes accepted"),
    "bytes that can change": ([bytearray(key(1))], r"keys\[0\]: .* \(bytearray\) given, bytes accepted"),
    "a view of a key": ([memoryview(key(1))], r"keys\[0\]: .* \(memoryview\) given, bytes accepted"),
    "a tuple": ([(b"hash", 0)], r"keys\[0\]: \(b'hash', 0\) \(tuple\) given, bytes accepted"),
    "one key": (key(1), r"keys: one key of 36 bytes given, a sequence of keys accepted"),
    "one text": ("a key", r"keys: 'a key' \(str\) given, a sequence of keys accepted"),
    "numbers": (array("I", [1, 2]), r"keys\[0\]: 1 \(int\) given, bytes accepted"),
}

wrong = pytest.mark.parametrize(("keys", "complaint"), NO_KEYS.values(), ids=NO_KEYS.keys())
few = pytest.mark.parametrize("asked", [False, True], ids=["a tier that knows", "a tier that is asked"])


def tier(asked: bool = False) -> dict[str, Any]:
    return {"type": "dummy", "store": f"asked {asked} {id(object())}", "shared": asked}


@wrong
@few
async def test_a_call_of_the_asyncio_face_refuses_an_invalid_key(open_engine, keys, complaint, asked):
    engine = await open_engine(8, tier(asked))
    assert await put(engine, [1, 2, 3]) == 3
    calls = [
        lambda: engine.delete(keys),
        lambda: engine.prefetch(keys),
        lambda: engine.get(keys),
        lambda: engine.put(keys, [chunk(1)] * len(keys)),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=complaint):
            await call()
        audit(ledger_in(engine))
    for at_once in (engine.forget, engine.demote, lambda keys: engine.retain(keys, 60.0)):
        with pytest.raises(TypeError, match=complaint):
            at_once(keys)
    await _goes_on(engine)


async def _goes_on(engine) -> None:
    assert await engine.drain()
    assert await found(engine, [1, 2, 3]) == 3
    assert await put(engine, range(10, 18)) == 8  # Pushes the others out.
    assert await engine.drain()
    assert await found(engine, [1, 2, 3]) == 3
    assert await engine.delete([key(1)])
    assert await found(engine, [1]) == 0
    assert await engine.reset()
    assert await engine.drain()
    audit_quiet(engine)


@few
def test_a_call_between_steps_refuses_an_invalid_key(start_engine, asked):
    engine = start_engine(8, tier(asked))
    _store(engine, [1, 2, 3], "first")
    calls = (engine.delete, engine.prefetch, engine.forget, engine.demote, lambda keys: engine.retain(keys, 60.0))
    for keys, complaint in NO_KEYS.values():
        for call in calls:
            with pytest.raises(TypeError, match=complaint):
                call(keys)
            engine.end_step()
    _serves_on(engine)


@few
def test_an_invalid_key_in_a_step_changes_nothing(start_engine, asked):
    """A look-up of an invalid key may be a miss. Every other call raises, and changes nothing."""
    engine = start_engine(8, tier(asked))
    _store(engine, [1, 2, 3], "first")
    for bad in ("a key", 7, None, bytearray(key(1)), (b"hash", 0), [key(1)]):
        _meet(engine, bad)
    _serves_on(engine)


def _meet(engine, bad) -> None:
    engine.on_new_request("bad")
    _ignored_or_refused(lambda: engine.lookup(bad, "bad"))
    _ignored_or_refused(lambda: engine.touch([bad], "bad"))
    with pytest.raises((TypeError, LookupError)):
        engine.prepare_load([bad], "bad")
    with pytest.raises(TypeError, match=r"bytes|unhashable"):
        engine.prepare_store([key(20), bad], "bad")
    with pytest.raises((TypeError, LookupError)):
        engine.complete_load([bad], "bad")
    _ignored_or_refused(lambda: engine.complete_store([bad], "bad"))
    _ignored_or_refused(lambda: engine.complete_store([bad], "bad", success=False))
    engine.end_step()
    engine.on_request_finished("bad")
    engine.end_step()
    assert ledger_in(engine).rows_in_use == 0


@few
def test_a_store_completed_with_an_invalid_key_can_be_completed_again(start_engine, asked):
    engine = start_engine(8, tier(asked))
    _store(engine, [1, 2, 3], "first")
    for bad in ("a key", bytearray(key(1))):
        engine.on_new_request(f"{bad}")
        plan = engine.prepare_store([key(20), key(21)], f"{bad}")
        with pytest.raises(TypeError, match=r"keys\[1\]: .* given, bytes accepted"):
            engine.complete_store([plan.keys[0], bad], f"{bad}")
        engine.complete_store(plan.keys, f"{bad}")
        engine.end_step()
        engine.on_request_finished(f"{bad}")
        assert engine.drain()
        assert ledger_in(engine).rows_in_use == 0
        assert engine.delete(plan.keys) == []
    _serves_on(engine)


def _ignored_or_refused(call) -> None:
    with suppress(TypeError):
        call()


def _store(engine, numbers, request_id) -> None:
    engine.on_new_request(request_id)
    plan = engine.prepare_store([key(number) for number in numbers], request_id)
    for number, row in zip(numbers, plan.rows, strict=True):
        engine.region.row(row)[:CHUNK_BYTES] = chunk(number)
    engine.complete_store(plan.keys, request_id)
    engine.end_step()
    engine.on_request_finished(request_id)
    assert engine.drain()


def _serves_on(engine) -> None:
    assert engine.drain()
    audit(ledger_in(engine))
    _store(engine, range(10, 18), "others")
    keys = [key(number) for number in (1, 2, 3)]
    engine.prefetch(keys)
    assert engine.drain()
    engine.on_new_request("again")
    assert [engine.lookup(each, "again").name for each in keys] == ["HIT"] * 3
    rows = engine.prepare_load(keys, "again")
    assert [bytes(engine.region.row(row)[:CHUNK_BYTES]) for row in rows] == [chunk(number) for number in (1, 2, 3)]
    engine.complete_load(keys, "again")
    engine.end_step()
    engine.on_request_finished("again")
    assert engine.delete(keys) == []
    assert engine.drain()
    assert engine.reset()
    audit(ledger_in(engine))
