"""Engines that share servers: what one has computed another one finds, and a server that fails costs hits alone."""

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from kvtier.engine.manager import TieringOffloadingManager
from tests.engine.kit import at_rest, describe, found, put
from tests.remote.engines import costs_hits_alone

USER = Path(__file__).with_name("user.py")
OPERATIONS = 3_400 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 800  # Of each of three programs.


def remote(*servers: str, prefix: str, **options: object) -> dict[str, object]:
    return {"type": "redis", "url": f"redis://{','.join(servers)}", "prefix": prefix, **options}


@pytest.mark.parametrize("runner", ["inline", "process"])
async def test_what_one_engine_has_stored_another_one_finds(server, prefix, runner) -> None:
    config = describe(64, remote(server.address, prefix=prefix), runner=runner)
    async with TieringOffloadingManager.open(config) as engine:
        assert await put(engine, range(64)) == 64
        assert await at_rest(engine)
    async with TieringOffloadingManager.open(config) as engine:
        assert await found(engine, range(64)) == 64


async def test_engines_of_other_models_and_layouts_never_meet(server, prefix) -> None:
    tier = remote(server.address, prefix=prefix)
    one = describe(8, tier, namespace={"model_name": "one"})
    others = [{"model_name": "other"}, {"model_name": "one", "layout": "LBHNC"}]
    async with TieringOffloadingManager.open(one) as engine:
        assert await put(engine, range(8)) == 8
        assert await at_rest(engine)
    for namespace in others:
        async with TieringOffloadingManager.open(describe(8, tier, namespace=namespace)) as engine:
            assert await found(engine, range(8)) == 0
    async with TieringOffloadingManager.open(one) as engine:
        assert await found(engine, range(8)) == 8


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_server_that_fails_costs_hits_and_they_come_back_with_it(own_server, prefix, how) -> None:
    server = own_server()
    limits = {"breaker_cooldown_s": "10ms", "answer_ttl_s": "10ms"}
    quick = {"timeout_s": 0.3, "connect_timeout_s": 0.3, "retry_s": "1ms"}
    config = describe(16, remote(server.address, prefix=prefix, limits=limits, **quick), runner="process")

    def mend() -> None:
        if how == signal.SIGSTOP:
            server.signal(signal.SIGCONT)
        else:
            server.kill()
            server.start()

    async with TieringOffloadingManager.open(config) as engine:
        await costs_hits_alone(engine, lambda: server.signal(how), mend)


async def test_three_programs_on_servers_that_are_killed_see_no_wrong_byte(own_server, prefix) -> None:
    servers, dice = [own_server() for _ in range(2)], random.Random(13)
    command = [sys.executable, str(USER), prefix]
    users = [
        await asyncio.create_subprocess_exec(
            *command,
            str(seed),
            str(OPERATIONS),
            *(server.address for server in servers),
            stdout=asyncio.subprocess.PIPE,
        )
        for seed in range(3)
    ]
    ended = asyncio.gather(*(user.communicate() for user in users))
    while not ended.done():
        await asyncio.wait([ended], timeout=dice.uniform(0.1, 0.6))  # Some moment, whatever they are at.
        server = dice.choice(servers)
        server.kill()
        await asyncio.to_thread(server.start)
    met = [json.loads(told) for told, _ in ended.result()]
    assert sum(one[what] for one in met for what in ("load", "store", "probe", "delete")) == 3 * OPERATIONS
    assert all(one.get("wrong", 0) == 0 and one["whole"] > 0 for one in met), met
