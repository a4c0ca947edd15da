"""Requests at their own times: how long each waits for its first token."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvtier.config import EngineConfig
from kvtier.engine.manager import ON_LOOP_BYTES_MAX
from kvtier.errors import TraceError
from kvtier.memory import PAGE_BYTES
from kvtier.settings import decode
from kvtier.testing.virtual_time import run
from kvtier.tools.replay.model import KV_BYTES_PER_TOKEN, SSDS, model_engine, scale_model
from kvtier.tools.replay.replay import ChunkSource, ReplayTally
from kvtier.tools.replay.traces import Trace, TraceRequest
from kvtier.tools.replay.virtual import GPU_LOAD_BYTES_PER_S, Servers, VirtualReplay, arrivals_s, without_tiering_s
from kvtier.tools.replay.workload import GeneratedTrace, Workload
from tests.benchmarks.load_or_recompute import Case, replayed
from tests.tools.replay.real import CONVERSATION, Traces

BLOCK_TOKENS = 512
MIB = 1 << 20


def at(*stamps_ms: float) -> list[TraceRequest]:
    return [TraceRequest(stamp, 1, 1, ()) for stamp in stamps_ms]


def prompts(*prompts: tuple[float, Sequence[int]]) -> list[TraceRequest]:
    return [TraceRequest(at_ms, len(blocks) * BLOCK_TOKENS, 1, tuple(blocks)) for at_ms, blocks in prompts]


def engine(rows: int, *tiers: dict[str, Any], chunk_bytes: int = MIB) -> EngineConfig:
    return decode(
        EngineConfig, {"cpu_bytes_to_use": rows * chunk_bytes, "chunk_bytes": chunk_bytes, "secondary_tiers": tiers}
    )


def servers_of(tokens_per_s: float = 512, slots: int = 4, cache_tokens: int = 0) -> Servers:
    return Servers(tokens_per_s, slots, cache_tokens)


def replay_of(requests: Sequence[TraceRequest], config: EngineConfig, servers: Servers) -> VirtualReplay:
    model = scale_model(config).config
    return VirtualReplay(
        requests,
        model,
        ChunkSource(model.chunk_bytes),
        ReplayTally(len(requests)),
        chunk_bytes=config.chunk_bytes,
        block_tokens=BLOCK_TOKENS,
        servers=servers,
    )


def first_tokens_s(
    requests: Sequence[TraceRequest], config: EngineConfig, servers: Servers | None = None
) -> list[float]:
    """Replay, and return the times to first token in order."""
    replay = replay_of(requests, config, servers or servers_of())
    tally = run(replay.run())
    assert tally.wrong_chunks == 0
    assert tally.requests == len(requests)
    return list(replay.times_to_first_token_s)


# When requests arrive.


def test_a_primary_that_a_real_loop_prepares_in_a_thread_is_modelled_too() -> None:
    rows = ON_LOOP_BYTES_MAX // PAGE_BYTES + 1  # Of a scale model, in which a page stands for a chunk.
    replay = replay_of(prompts((0, [1, 2]), (1_000, [1, 2])), engine(rows), servers_of(1_000, 1))
    assert run(replay.run()).hits == 2


def test_requests_with_times_of_their_own_arrive_at_them_counted_from_the_first() -> None:
    assert list(arrivals_s(at(1_000, 1_250, 4_000))) == [0.0, 0.25, 3.0]


def test_those_of_a_batch_are_spread_over_the_time_that_a_batch_covers() -> None:
    assert list(arrivals_s(at(0, 0, 0, 3_000, 3_000, 9_000))) == [0.0, 1.0, 2.0, 3.0, 4.5, 9.0]


def test_the_last_batch_is_spread_like_the_others() -> None:
    assert list(arrivals_s(at(0, 3_000, 3_000, 3_000))) == [0.0, 3.0, 4.0, 5.0]


def test_where_there_is_one_time_only_all_arrive_at_once() -> None:
    assert list(arrivals_s(at(7, 7, 7))) == [0.0, 0.0, 0.0]
    assert list(arrivals_s([])) == []


def test_decreasing_times_are_rejected_with_the_request() -> None:
    with pytest.raises(TraceError, match="request 3: timestamp 4 after 5"):
        arrivals_s(at(0, 5, 4))


def test_the_conversation_of_an_hour_arrives_steadily(traces: Traces) -> None:
    arrivals = arrivals_s(Trace(traces / CONVERSATION))
    assert len(arrivals) == 12_031
    assert list(arrivals) == sorted(arrivals)
    assert len(set(arrivals)) == len(arrivals)
    assert 3_536 < arrivals[-1] < 3_540


# How long the first token takes.


def test_without_tiering_prompts_queue_for_the_servers_and_are_computed_whole() -> None:
    requests = prompts((0, range(2)), (0, range(2)), (0, range(4)), (5_000, range(1)))
    servers = servers_of(slots=2)
    assert list(without_tiering_s(requests, [0.0, 0.0, 0.0, 5.0], servers)) == [2.0, 2.0, 6.0, 1.0]


@pytest.mark.parametrize("slots", [1, 3])
def test_where_nothing_returns_an_engine_is_as_fast_as_none(slots: int) -> None:
    requests = prompts(*((number * 100, range(number * 10, number * 10 + 1 + number % 5)) for number in range(60)))
    servers = servers_of(10_000, slots)
    with_tiering = first_tokens_s(requests, engine(64, {"type": "dummy"}), servers)
    assert sorted(with_tiering) == pytest.approx(sorted(without_tiering_s(requests, arrivals_s(requests), servers)))


def test_a_prefix_in_the_primary_takes_the_time_of_its_copy_to_the_gpu() -> None:
    requests = prompts((0, range(4)), (60_000, range(6)))
    times = first_tokens_s(requests, engine(64))
    assert times == pytest.approx([4.0, 2.0 + 4 * MIB / GPU_LOAD_BYTES_PER_S])


def test_a_prefix_in_a_tier_takes_the_tiers_time_too() -> None:
    """Four chunks of a MiB at a MiB a second and half a second of latency; two others had pushed them out."""
    tier = {"type": "dummy", "latency_s": 0.5, "bandwidth_bytes_per_s": "1MiB"}
    requests = prompts((0, range(4)), (60_000, range(100, 106)), (120_000, range(200, 206)), (180_000, range(6)))
    times = first_tokens_s(requests, engine(12, tier))
    assert times == pytest.approx([4.0, 6.0, 6.0, 4.5 + 4 * MIB / GPU_LOAD_BYTES_PER_S + 2.0])


def test_a_prompt_that_is_all_there_still_computes_a_token() -> None:
    requests = prompts((0, range(2)), (60_000, range(2)))
    times = first_tokens_s(requests, engine(64))
    assert times[1] == pytest.approx(2 * MIB / GPU_LOAD_BYTES_PER_S + 1 / 512)


def test_chunks_that_a_tier_cannot_take_in_time_are_dropped_without_a_wait() -> None:
    slow = {"type": "dummy", "bandwidth_bytes_per_s": "1kB", "limits": {"store_chunks_in_flight": 2}}
    requests = prompts(*((number * 10_000, range(number * 10, number * 10 + 5)) for number in range(20)))
    replay = replay_of(requests, engine(1_000, slow), servers_of())
    tally = run(replay.run())
    assert tally.samples[-1].tiers["0:dummy"].dropped["budget"] > 0
    assert list(replay.times_to_first_token_s) == pytest.approx([5.0] * 20)


def test_a_chat_has_its_first_tokens_earlier_and_the_same_figures_every_time() -> None:
    requests = tuple(GeneratedTrace(Workload(seed=5), limit=400))
    chunk_bytes = BLOCK_TOKENS * KV_BYTES_PER_TOKEN

    def told() -> tuple[bytes, list[float]]:
        replay = replay_of(requests, model_engine(chunk_bytes, 1_000 * chunk_bytes, None, SSDS), servers_of(20_000))
        tally = run(replay.run())
        assert tally.wrong_chunks == 0
        assert tally.drained
        return msgspec.json.encode([sample._asdict() for sample in tally.samples]), list(replay.times_to_first_token_s)

    first = told()
    assert len(first[1]) == 400
    assert sum(first[1]) < 0.9 * sum(without_tiering_s(requests, arrivals_s(requests), servers_of(20_000)))
    assert told() == first


def test_an_interrupted_replay_has_the_times_of_the_requests_that_were_served() -> None:
    replay = replay_of(prompts((0, range(2)), (3_600_000, range(2))), engine(64), servers_of())

    async def interrupted() -> None:
        task = asyncio.create_task(replay.run())
        await asyncio.sleep(60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(interrupted())
    assert list(replay.times_to_first_token_s) == [2.0]
    assert replay.tally.requests == 1


# Loads that are weighed against computing.

WEIGHED_REQUESTS = 900  # Of the conversation: four minutes of it, and with them the slow one.


@pytest.mark.parametrize(
    ("gb_per_s", "slow"),
    [
        (0.2, False),
        *(pytest.param(*case, marks=pytest.mark.outside) for case in ((1.0, False), (7.0, False), (7.0, True))),
    ],
)
def test_no_disk_makes_a_conversation_wait_longer_than_none(traces: Traces, gb_per_s: float, slow: bool) -> None:
    trace = str(traces / CONVERSATION)
    case = Case(trace, WEIGHED_REQUESTS, 64 << 30, gb_per_s, slow, weighed=True)
    found = replayed(case)
    assert found.wrong_chunks == 0
    assert max(found.p50, found.p99) <= 1.02
    if gb_per_s == 7.0 and not slow:
        assert found.hit_ratio >= replayed(case._replace(weighed=False)).hit_ratio - 0.02
