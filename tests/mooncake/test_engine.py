"""Engines that share a pool: what one has computed another one finds, and a pool that fails costs hits alone."""

import asyncio
import json
import signal
import sys

import pytest

from kvtier import ConfigError
from kvtier.engine.manager import TieringOffloadingManager
from tests.engine.kit import at_rest, describe, found, put
from tests.remote.engines import costs_hits_alone


def remote(address: str, prefix: str, **options: object) -> dict[str, object]:
    return {"type": "mooncake", "master": address, "prefix": prefix, **options}


async def test_what_one_engine_has_stored_another_one_finds(pool, prefix) -> None:
    """Each has a runner's process of its own."""
    config = describe(64, remote(pool.address, prefix), runner="process")
    async with TieringOffloadingManager.open(config) as one, TieringOffloadingManager.open(config) as other:
        assert await put(one, range(64)) == 64
        assert await at_rest(one)
        assert await found(other, range(64)) == 64


async def test_engines_of_other_models_and_layouts_never_meet(pool, prefix) -> None:
    tier = remote(pool.address, prefix)
    one = describe(8, tier, runner="process", namespace={"model_name": "one"})
    async with TieringOffloadingManager.open(one) as engine:
        assert await put(engine, range(8)) == 8
        assert await at_rest(engine)
    for namespace in ({"model_name": "other"}, {"model_name": "one", "layout": "LBHNC"}):
        other = describe(8, tier, runner="process", namespace=namespace)
        async with TieringOffloadingManager.open(other) as engine:
            assert await found(engine, range(8)) == 0
    async with TieringOffloadingManager.open(one) as engine:
        assert await found(engine, range(8)) == 8


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_an_owner_that_fails_costs_hits_and_they_come_back_with_it(own_pool, prefix, how) -> None:
    pool = own_pool(client_ttl_s=2)
    owner = pool.add_owner()
    limits = {"breaker_cooldown_s": "10ms", "answer_ttl_s": "10ms"}
    config = describe(16, remote(pool.address, prefix, limits=limits, timeout_s=1), runner="process")

    def mend() -> None:
        if how == signal.SIGSTOP:
            owner.signal(signal.SIGCONT)
        else:
            pool.add_owner()

    async with TieringOffloadingManager.open(config) as engine:
        await costs_hits_alone(engine, lambda: owner.signal(how), mend)


async def test_a_client_that_may_crash_is_refused_in_the_engines_own_process(pool, prefix) -> None:
    told = "runner: 'inline' given, 'process' accepted with secondary_tiers\\[0\\] of type 'mooncake'"
    with pytest.raises(ConfigError, match=told):
        async with TieringOffloadingManager.open(describe(16, remote(pool.address, prefix), runner="inline")):
            pass


async def test_the_bench_shows_the_tier_beside_mooncakes_own_calls(pool, prefix, tmp_path) -> None:
    config = tmp_path / "engine.toml"
    config.write_text(
        'cpu_bytes_to_use = "4MiB"\nchunk_bytes = "8KiB"\nrunner = "process"\n'
        f'[[secondary_tiers]]\ntype = "mooncake"\nmaster = "{pool.address}"\nprefix = "{prefix}"\n'
    )
    options = ("--size", "256KiB", "--rounds", "1", "--json", "-")
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvtier", "bench", "tiers", config, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, why = await bench.communicate()
    assert bench.returncode == 0, why.decode()
    rows = {row["operation"]: row for row in json.loads(told)["rows"]}
    assert rows["load"]["limit_is"] == rows["store"]["limit_is"] == "Mooncake's own zero-copy calls"
    assert rows["load"]["figure"] > 0
