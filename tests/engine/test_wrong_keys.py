from array import array
from contextlib import suppress
from functools import partial

import pytest

from tests.engine.kit import chunk, found, key, ledger_in, put, store
from tests.simulation.audit import audit, audit_quiet

# What a program may give in place of a list of keys, and how the error names it.
NO_KEYS = {
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


@pytest.fixture(params=[False, True], ids=["a tier that knows", "a tier that is asked"])
async def engine(request, open_engine):
    return await open_engine(8, {"type": "dummy", "shared": request.param})


async def test_a_call_of_the_asyncio_face_or_between_steps_refuses_an_invalid_key(engine):
    assert await put(engine, [1, 2, 3]) == 3
    steps = engine.steps
    for keys, complaint in NO_KEYS.values():
        for call in (engine.delete, engine.prefetch, engine.get, lambda keys: engine.put(keys, [chunk(1)] * len(keys))):
            with pytest.raises(TypeError, match=complaint):
                await call(keys)
            audit(ledger_in(engine))
        for face in (engine, steps):
            for at_once in (face.forget, face.demote, partial(face.retain, seconds=60.0), steps.delete, steps.prefetch):
                with pytest.raises(TypeError, match=complaint):
                    at_once(keys)
                steps.end_step()
    await goes_on(engine)


async def goes_on(engine):
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


async def test_an_invalid_key_in_a_step_changes_nothing(engine):
    """A look-up of an invalid key may be a miss. Every other call raises, and changes nothing."""
    store(engine, [1, 2, 3])
    for bad in ("a key", 7, None, bytearray(key(1)), (b"hash", 0), [key(1)]):
        meet(engine.steps, bad)
        assert ledger_in(engine).rows_in_use == 0
    await goes_on(engine)


def meet(steps, bad):
    steps.on_new_request("bad")
    for call in (
        lambda: steps.lookup(bad, "bad"),
        lambda: steps.touch([bad], "bad"),
        lambda: steps.complete_store([bad], "bad"),
        lambda: steps.complete_store([bad], "bad", success=False),
    ):
        with suppress(TypeError):
            call()
    for call in (lambda: steps.prepare_load([bad], "bad"), lambda: steps.complete_load([bad], "bad")):
        with pytest.raises((TypeError, LookupError)):
            call()
    with pytest.raises(TypeError, match=r"bytes|unhashable"):
        steps.prepare_store([key(20), bad], "bad")
    plan = steps.prepare_store([key(20), key(21)], "bad")
    with pytest.raises(TypeError, match=r"keys\[1\]: .* given, bytes accepted|unhashable"):
        steps.complete_store([plan.keys[0], bad], "bad")
    steps.complete_store(plan.keys, "bad")
    steps.end_step()
    steps.on_request_finished("bad")
    steps.forget(plan.keys)
    steps.end_step()
