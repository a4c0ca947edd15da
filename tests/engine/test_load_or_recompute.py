"""Whole engines that weigh loads against computing, in virtual time."""

import asyncio

import pytest

from tests.engine.kit import CHUNK_BYTES, at_rest, emptied, forget_rows, found, now, put
from tests.slow_tier import SLOWING, slow

pytestmark = pytest.mark.virtual_time

WEIGHED = {"prefill_tokens_per_s": 100.0, "chunk_tokens": 100}  # A second a chunk.


def dummy(chunk_s, **options):
    """Describe a device that takes so long for a chunk, one after the other."""
    return {"type": "dummy", "bandwidth_bytes_per_s": int(CHUNK_BYTES / chunk_s), **options}


async def test_a_probe_is_waited_for_no_longer_than_a_load(open_engine):
    """One request learns how long that takes; what the tier says late counts for the next one."""
    tier = {"type": "dummy", "latency_s": 8.0, "shared": True}
    engine = await open_engine(16, tier, **WEIGHED, late_margin=1.5)
    assert await found(engine, range(2)) == 0
    assert now() == 1.5 * 2
    assert await at_rest(engine)
    begun = now()
    assert await found(engine, range(10, 15)) == 0
    assert now() == begun, "it would come too late"
    assert engine.stats().tiers[0].dropped == {"asking": 2}
    assert await at_rest(engine)
    begun = now()
    assert await found(engine, range(10, 15)) == 0
    assert now() == begun, "it has said so by now"
    assert await found(engine, range(20, 28)) == 0
    assert now() == begun + 8.0, "it is sooner than computing"
    assert engine.stats().tiers[0].dropped == {"asking": 2}


async def test_a_tier_that_answered_late_for_a_while_is_waited_for_again(open_engine):
    tier = dummy(0.01, latency_s=0.1, shared=True, slow_at_s=100.0, slow_for_s=100.0, slow_factor=100.0) | SLOWING
    engine = await open_engine(16, tier, **WEIGHED, holds=range(8))
    assert await at_rest(engine)
    waited = []
    while now() < 300.0:
        await forget_rows(engine)
        await asyncio.sleep(10.5)  # An answer is believed for ten.
        begun = now()
        assert await found(engine, range(4)) in ((4,) if not 90.0 < begun < 240.0 else (0, 4))
        waited.append(now() - begun)
    assert max(waited) <= 1.5 * 4
    assert sum(waited) <= 2 * 1.5 * 4 + 1.0 * len(waited), "two requests were late: for its answer, or for its load"


@pytest.mark.parametrize("asked", [[0, 1], [1, 0]], ids=["first", "behind"])
async def test_seed_70054_a_request_that_waits_for_a_probe_does_not_poll(open_engine, asked):
    slow = {"type": "dummy", "latency_s": 5.0, "shared": True, "limits": {"answer_ttl_s": 0.001}}
    engine = await open_engine(16, slow, **WEIGHED, late_margin=1.0, holds=range(2))
    assert await at_rest(engine)
    engine.steps.on_new_request("r")
    assert await engine.reset()
    assert await found(engine, [1], request_id="r") == 0
    assert await found(engine, asked, request_id="r") == 0
    engine.steps.on_request_finished("r")
    assert await at_rest(engine)


@pytest.mark.parametrize(
    ("latency_s", "slow_s"),
    [
        (0.006, 0.25),
        pytest.param(0.001, 1.0, marks=pytest.mark.outside),
        pytest.param(0.02, 0.1, marks=pytest.mark.outside),
    ],
)
async def test_a_line_that_has_become_thin_costs_one_request_its_time_and_is_used_when_it_is_wide_again(
    open_engine, tmp_path, latency_s, slow_s
):
    """A call costs what it did, and only its bytes take longer: few chunks come nearly as fast as ever."""
    chunks, computing_s, speed = 62, 0.075, tmp_path / "speed"
    line = slow({"type": "dummy", "latency_s": latency_s, "concurrency": 64}, speed)
    weighed = {"prefill_tokens_per_s": 100 * chunks / computing_s, "chunk_tokens": 100}
    engine = await open_engine(2 * chunks, line, **weighed, holds=range(chunks))
    assert await engine.drain()

    async def asked(times):
        """Ask for all, five times a second; say how much was loaded each time, and what that took beyond computing."""
        loaded, beyond = list[int](), list[float]()
        for _ in range(times):
            await forget_rows(engine)
            await asyncio.sleep(0.2)
            begun = now()
            loaded.append(await found(engine, range(chunks)))
            beyond.append(max(0.0, now() - begun - computing_s * (loaded[-1] == chunks)))
        return loaded, beyond

    assert (await asked(40))[0] == [chunks] * 40
    speed.write_text(str(chunks * CHUNK_BYTES / slow_s))
    dear = [seconds for seconds in (await asked(100))[1] if seconds > 0.02 * computing_s]
    assert len(dear) <= 1, "of a hundred requests"
    (tier,) = engine.stats().tiers
    assert tier.given_up <= 1
    speed.unlink()
    assert (await asked(30))[0][-15:] == [chunks] * 15, "it is used again within three seconds"


# The machine becomes faster and slower, and prefill is measured.

PROMPT = range(8)
BUSY_S, IDLE_S, LOAD_S = 0.168, 0.089, 0.133  # For a prompt; that of a load lies between those of computing.
LAST_TOKENS, LAST_S = 8, 0.003  # Are computed of every prompt, whatever was loaded.


def chunk_of(prompt_s):
    return prompt_s / len(PROMPT)


async def answered(engine, prompt_s):
    """Answer the prompt on a machine that computes all of it in so many seconds; return how long it takes."""
    begun = now()
    computed = (len(PROMPT) - await found(engine, PROMPT)) * 100 or LAST_TOKENS
    seconds = 0.001 + prompt_s * computed / (100 * len(PROMPT))
    await asyncio.sleep(seconds)
    engine.note_prefill(computed, seconds)
    ended = now()
    await forget_rows(engine)
    return ended - begun


async def mean_s(engine, until_s, prompt_s):
    times = []
    while now() < until_s:
        times.append(await answered(engine, prompt_s))
    return sum(times) / len(times)


async def measured(open_engine, load_s=LOAD_S):
    """Open an engine whose tier holds the prompt, and that knows by now how fast a busy machine computes."""
    engine = await open_engine(16, dummy(chunk_of(load_s)), chunk_tokens=100)
    for _ in range(8):
        engine.note_prefill(800, BUSY_S)
    await put(engine, PROMPT)
    await forget_rows(engine)
    return engine


async def test_on_a_machine_of_changing_speed_a_hit_soon_costs_the_better_way(open_engine):
    engine = await measured(open_engine)
    busy = BUSY_S, 1.2 * LOAD_S, 1.02 * (LOAD_S + LAST_S)
    idle = IDLE_S, 1.3 * IDLE_S, 1.02 * IDLE_S
    for until_s, (prompt_s, at_first_s, then_s) in ((40, busy), (80, idle), (120, busy)):
        assert await mean_s(engine, until_s - 20, prompt_s) < at_first_s, "it has to notice"
        assert await mean_s(engine, until_s, prompt_s) < then_s


@pytest.mark.parametrize(("load_s", "until_s"), [(0.05, 10), (0.15, 30)])
async def test_measuring_the_prefill_speed_costs_a_hundredth(open_engine, load_s, until_s):
    engine = await measured(open_engine, load_s)
    assert await mean_s(engine, until_s, BUSY_S) < 1.02 * (load_s + LAST_S)


async def test_an_engine_that_began_with_hits_learns_how_fast_whole_prompts_are_computed(open_engine):
    """Only the last tokens of a loaded prompt are computed, and each of these looks slow."""
    engine = await emptied(open_engine, len(PROMPT), 16, dummy(chunk_of(LOAD_S)), chunk_tokens=100)
    assert await mean_s(engine, 20, IDLE_S) < 1.3 * IDLE_S
    assert await mean_s(engine, 60, IDLE_S) < 1.02 * IDLE_S
