"""Hosts that share a service: what one has computed is a hit in the others, and nothing of the service's stops them."""

import asyncio
import re
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from blockbuster import blockbuster_ctx
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from tests.redis.servers import until
from tests.vllm.engines import BLOCK_TOKENS, PROMPT_HITS, Answer, Engine, hits, kvtier, prompts, right, sampling, tokens
from tests.vllm.remotes import FAULTS, HANGS, REMOTES, Remote, tier_of


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    started: dict[str, Remote] = {}

    def service(name):
        if name not in started:
            started[name] = REMOTES[name](tmp_path_factory.mktemp(name))
        return started[name]

    yield service
    for remote in started.values():
        remote.end()


def on(remote, own=None, *, quick=False, **changes):
    tiers = [tier_of(remote, quick=quick, name="pool")]
    if own is not None:
        tiers.insert(0, {"type": "fs", "name": "own", "root": str(own), "locality": "LOCAL"})
    return kvtier(secondary_tiers=tiers, **changes)


def forget(engine):
    """Have the GPU and the primary forget all: what comes back comes from tiers."""
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=True)


@pytest.mark.parametrize("name", REMOTES)
def test_what_one_engine_has_computed_is_a_hit_in_another_one_that_shares_the_service(llama, peer, services, name):
    asked = prompts(4)
    expected, extra = right(llama, asked), on(services(name))
    with Engine(llama, extra) as here, peer.engine(llama, extra) as there:
        assert tokens(here.answer(asked[:2])) == expected[:2]
        here.settle()
        answers = there.answer(asked)
        assert (tokens(answers), hits(answers)) == (expected, [PROMPT_HITS, PROMPT_HITS, 0, 0])
        there.settle()
        answers = here.answer(asked[2:])
        assert (tokens(answers), hits(answers)) == (expected[2:], [PROMPT_HITS] * 2)


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_service_that_goes_amid_loads_costs_hits_and_they_come_back_with_it(llama, services, name, fault):
    asked = prompts(4)
    expected, remote = right(llama, asked), services(name)
    with Engine(llama, on(remote, quick=True)) as engine:
        engine.answer(asked)
        forget(engine)
        (tier,) = engine.ledger.tiers
        with ExitStack() as trouble:  # Other tests have the same service.
            strike = partial(trouble.enter_context, FAULTS[name, fault](remote))
            answers = answer_and(engine, asked, strike, when=lambda: tier.loading > 0)
            assert tokens(answers) == expected
            engine.settle()
            engine.llm.reset_prefix_cache(reset_connector=True)
            answers = engine.answer(asked)
            assert (tokens(answers), hits(answers)) == (expected, [0] * len(asked))
            assert sum(tier.counters.causes.values()) > 0
            until(lambda: engine.kvtier.has_pending_work() or engine.ledger.traffic.rows_overdue == 0)
        until(lambda: found_again(engine, asked, expected))


def found_again(engine, asked, expected):
    """Ask once more, with nothing in memory; say whether every prompt was a hit, and be sure that it was right."""
    forget(engine)
    answers = engine.answer(asked)
    assert tokens(answers) == expected
    return hits(answers) == [PROMPT_HITS] * len(asked)


def test_a_hosts_own_directory_gets_what_it_computes_and_not_what_it_loads(llama, peer, services, tmp_path):
    asked, remote = prompts(2), services("redis")
    expected = right(llama, asked)
    with peer.engine(llama, on(remote, own=tmp_path / "there")) as there:
        there.answer(asked)
        there.settle()
    with Engine(llama, on(remote, own=tmp_path / "here")) as engine:
        own, pool = engine.ledger.tiers
        found = []
        for locality in ("REMOTE", "LOCAL", "LOCAL", "REMOTE"):
            answers = engine.answer(asked, load_tiers=[{"medium": "STORAGE", "locality": locality}])
            assert tokens(answers) == expected
            forget(engine)
            found.append((locality, hits(answers), own.counters.stored, own.counters.hits, pool.counters.hits))
    chunks, whole, nothing = 2 * PROMPT_HITS // BLOCK_TOKENS, [PROMPT_HITS] * 2, [0] * 2
    assert found == [
        ("REMOTE", whole, 0, 0, chunks),
        ("LOCAL", nothing, chunks, 0, chunks),  # It is computed, and so it is stored.
        ("LOCAL", whole, chunks, chunks, chunks),
        ("REMOTE", whole, chunks, chunks, 2 * chunks),
    ]


def test_nothing_that_kvtier_does_on_the_schedulers_thread_blocks_while_a_service_hangs(llama, services):
    asked, remote = prompts(2), services("redis")
    expected = right(llama, asked)

    async def serve(engine):  # What blocks is looked for where a loop runs.
        answers = engine.answer(asked)
        engine.settle()
        return answers

    with Engine(llama, on(remote, quick=True)) as engine:
        engine.answer(asked)
        forget(engine)
        with HANGS(remote):
            with blockbuster_ctx(scanned_modules=["kvtier", "kvtier_backends"]) as watch:
                watch.functions["socket.socket.send"].can_block_in("runner/process.py", "flush")  # It does not.
                for _ in range(2):
                    assert tokens(asyncio.run(serve(engine))) == expected
            assert sum(engine.ledger.tiers[0].counters.causes.values()) > 0


def test_a_router_can_follow_by_vllms_events_where_every_block_is(llama, services, tmp_path):
    asked, remote, router = prompts(2), services("redis"), sample("reference/events.md", "router.py")["Router"]()
    heard: list[Any] = []
    remote.server.ask("FLUSHALL")  # What others have stored is loaded, and of that vLLM describes nothing.
    with subscribed(f"ipc://{tmp_path}/events") as (socket, events):
        extra = on(remote, own=tmp_path / "own", self_describing_kv_events=True)
        with Engine(llama, extra, kv_events_config=events) as engine:

            def listen():
                engine.answer(prompts(1, tokens=BLOCK_TOKENS - 1))
                engine.settle()
                while socket.poll(timeout=0):
                    topic, _, payload = socket.recv_multipart()
                    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
                    heard.extend(batch.events)
                    router.hear(topic.decode(), batch)

            def blocks(prompt):
                told = {tuple(event.token_ids): event.block_hashes[0] for event in heard if described(event)}
                starts = range(0, PROMPT_HITS, BLOCK_TOKENS)
                return [told.get(tuple(prompt[start : start + BLOCK_TOKENS]), b"") for start in starts]

            def places():
                """Return where the prompts' last whole blocks are, but for the GPU."""
                listen()
                lasts = [blocks(prompt)[-1] for prompt in asked]
                return [{where for where in router.places.get(last, ()) if where[1] != "GPU"} for last in lasts]

            until(
                lambda: engine.answer(prompts(1, seed=time.monotonic_ns())) and (listen() or heard)
            )  # It is connected.
            engine.answer(asked)
            own, primary, pool = ("a", "STORAGE", "own"), ("a", "CPU", None), ("anybody", "STORAGE", "pool")
            until(lambda: places() == [{own, primary, pool}] * 2)
            assert router.prefix("a", blocks(asked[0])) == (PROMPT_HITS // BLOCK_TOKENS,) * 2
            assert router.prefix("b", blocks(asked[0])) == (0, PROMPT_HITS // BLOCK_TOKENS)
            remote.server.ask("FLUSHALL")
            forget(engine)
            until(lambda: places() == [{own, pool}] * 2)
            engine.answer(asked[:1], load_tiers=[{"locality": "REMOTE"}])
            until(lambda: any(gone(event, "pool") for event in (listen(), *heard)[1:]))
            until(lambda: places() == [{own, primary, pool}, {own, pool}])  # It was computed, and stored again.
            router.forget("a")
            assert places() == [{pool}] * 2


def described(event):
    return isinstance(event, BlockStored) and bool(event.token_ids)


def gone(event, tier):
    return isinstance(event, BlockRemoved) and (event.ownership, event.locality) == (tier, "REMOTE")


def sample(page, title):
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    (code,) = re.findall(rf'```python title="{re.escape(title)}"\n(.*?)```', text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, title, "exec"), names)
    return names


@contextmanager
def subscribed(endpoint):
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="a")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe("")
        socket.connect(endpoint)
        yield socket, events


def answer_and(engine, given, then, *, when):
    """Answer all prompts, and do something between the first two steps where it is time for it."""
    llm = engine.llm.llm_engine
    for index, prompt in enumerate(given):
        llm.add_request(str(index), {"prompt_token_ids": prompt}, sampling())
    answers: dict[str, Answer] = {}
    done = False
    while llm.has_unfinished_requests():
        if not done and when():
            then()
            done = True
        for output in llm.step():
            if output.finished:
                answers[output.request_id] = Answer(tuple(output.outputs[0].token_ids), output.num_cached_tokens)
    assert done, "it was never time for it"
    return [answers[str(index)] for index in range(len(given))]
