"""Engines that share a bucket: what one has computed another one finds, and a bucket that fails costs hits alone."""

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from kvtier import Namespace
from kvtier.engine.manager import TieringOffloadingManager
from tests.engine.kit import PATIENCE_S, at_rest, describe, found, put
from tests.remote.engines import costs_hits_alone

USER = Path(__file__).with_name("user.py")
OPERATIONS = 3_400 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 250  # Of each of three programs.


def remote(endpoint: str, bucket: str, **options: object) -> dict[str, object]:
    return {"type": "object", "url": f"s3://{bucket}/kv", "endpoint": endpoint, **options}


@pytest.mark.parametrize("runner", ["inline", "process"])
async def test_what_one_engine_has_stored_another_one_finds(server, bucket, runner) -> None:
    config = describe(64, remote(server.endpoint, bucket), runner=runner)
    async with TieringOffloadingManager.open(config) as engine:
        assert await put(engine, range(64)) == 64
        assert await at_rest(engine)
    async with TieringOffloadingManager.open(config) as engine:
        assert await found(engine, range(64)) == 64


async def test_engines_that_run_at_once_find_each_others_chunks(server, bucket) -> None:
    """What the other stores after our list was made is seen by asking."""
    tier = remote(server.endpoint, bucket, absent_ttl_s="10ms", limits={"answer_ttl_s": "10ms"})
    config = describe(32, tier, runner="process")
    async with TieringOffloadingManager.open(config) as one, TieringOffloadingManager.open(config) as other:
        assert await found(other, range(32)) == 0
        assert await put(one, range(32)) == 32
        assert await at_rest(one)
        async with asyncio.timeout(PATIENCE_S):
            while await found(other, range(32)) < 32:
                await asyncio.sleep(0.02)


async def test_engines_of_other_models_never_meet(server, bucket) -> None:
    tier = remote(server.endpoint, bucket)
    one = describe(8, tier, namespace={"model_name": "one"})
    async with TieringOffloadingManager.open(one) as engine:
        assert await put(engine, range(8)) == 8
        assert await at_rest(engine)
    async with TieringOffloadingManager.open(describe(8, tier, namespace={"model_name": "other"})) as engine:
        assert await found(engine, range(8)) == 0
    # vLLM gives the same names to rows of another layout: here the seal tells them apart, and the chunk is replaced.
    async with TieringOffloadingManager.open(
        describe(8, tier, namespace=Namespace(model_name="one", layout="LBHNC"))
    ) as engine:
        assert await found(engine, range(8)) == 0


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_server_that_fails_costs_hits_and_they_come_back_with_it(own_server, bucket, how) -> None:
    server = own_server()
    server.client.create_bucket(Bucket=bucket)
    limits = {"breaker_cooldown_s": "10ms", "answer_ttl_s": "10ms"}
    quick = {"timeout_s": 0.5, "connect_timeout_s": 0.5, "absent_ttl_s": "10ms"}
    config = describe(16, remote(server.endpoint, bucket, limits=limits, **quick), runner="process")

    def mend() -> None:
        if how == signal.SIGSTOP:
            server.signal(signal.SIGCONT)
        else:
            server.kill()
            server.start()
            server.client.create_bucket(Bucket=bucket)

    async with TieringOffloadingManager.open(config) as engine:
        await costs_hits_alone(engine, lambda: server.signal(how), mend)


async def test_three_programs_on_a_server_that_stops_at_random_see_no_wrong_byte(own_server, bucket) -> None:
    server, dice = own_server(), random.Random(13)
    server.client.create_bucket(Bucket=bucket)
    users = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, str(USER), server.endpoint, bucket, str(seed), str(OPERATIONS)),
            stdout=asyncio.subprocess.PIPE,
        )
        for seed in range(3)
    ]
    ended = asyncio.gather(*(user.communicate() for user in users))
    while not ended.done():
        await asyncio.wait([ended], timeout=dice.uniform(0.5, 2.0))  # Some moment, whatever they are at.
        server.signal(signal.SIGSTOP)
        await asyncio.wait([ended], timeout=dice.uniform(0.0, 0.3))
        server.signal(signal.SIGCONT)
    met = [json.loads(told) for told, _ in ended.result()]
    assert sum(one[what] for one in met for what in ("load", "store", "probe", "delete")) == 3 * OPERATIONS
    assert all(one.get("wrong", 0) == 0 and one["whole"] > 0 for one in met), met
