"""A program that uses servers beside others, and looks at every byte: `user.py PREFIX SEED OPERATIONS SERVER…`.

It prints what it met as JSON: operations, chunks that came whole, misses, failures, and whatever came wrong.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from kvtier.backend import BackendUnavailable, OffloadKey
from kvtier.testing.conformance import Lender, keys_of, tier_context
from kvtier.testing.conformance.lender import chunk
from kvtier_backends.redis import RedisBackend, RedisOptions
from tests.remote.servers import PATIENCE_S

CHUNK_BYTES = 16_384
KEYS = 48
VERSIONS = range(8)

T = TypeVar("T")


async def use(prefix: str, seed: int, operations: int, servers: list[str]) -> Counter[str]:
    dice, met = random.Random(seed), Counter[str]()
    options = RedisOptions(
        url=f"redis://{','.join(servers)}",
        prefix=prefix,
        timeout_s=1,
        connect_timeout_s=1,
        retry_s="10ms",
        window_bytes="64KiB",
    )
    tier = await opened(partial(RedisBackend.open, options, tier_context(CHUNK_BYTES)))
    keys = keys_of(KEYS)
    for _ in range(operations):
        await one(tier, dice, keys, met)
    await tier.aclose(10)
    return met


async def opened(open_tier: Callable[[], Awaitable[T]]) -> T:
    """Open a tier, again and again as an engine does: its service may hang just now."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await open_tier()
            except BackendUnavailable:
                continue


async def one(tier: RedisBackend, dice: random.Random, keys: list[OffloadKey], met: Counter[str]) -> None:
    lender, some = Lender(CHUNK_BYTES), dice.sample(keys, dice.randrange(1, 9))
    operation = dice.choice(("load", "load", "store", "probe", "delete"))
    met[operation] += 1
    try:
        match operation:
            case "load":
                await load(tier, lender, some, met)
            case "store":
                outcomes = await tier.store(lender.writes(some, dice.choice(VERSIONS)))
                met["failed"] += sum(outcome is not None for outcome in outcomes)
            case "probe":
                await tier.probe(some)
            case "delete":
                await tier.delete(some[:1])
    except BackendUnavailable:
        met["unavailable"] += 1
    lender.take_back()


async def load(tier: RedisBackend, lender: Lender, keys: list[OffloadKey], met: Counter[str]) -> None:
    reads = lender.reads(keys)
    for read, outcome in zip(reads, await tier.load(reads), strict=True):
        if outcome is not None:
            met[type(outcome).__name__] += 1
            continue
        met[
            "whole" if bytes(read.into) in {chunk(read.key, version, CHUNK_BYTES) for version in VERSIONS} else "wrong"
        ] += 1


if __name__ == "__main__":
    prefix, seed, operations, *servers = sys.argv[1:]
    json.dump(asyncio.run(use(prefix, int(seed), int(operations), servers)), sys.stdout)
