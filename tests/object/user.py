"""A program that uses a bucket beside others, and looks at every byte: `user.py ENDPOINT BUCKET SEED OPERATIONS`.

It prints what it met as JSON: operations, chunks that came whole, misses, failures, and whatever came wrong.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from functools import partial

from kvtier.testing.conformance import keys_of, tier_context
from kvtier_backends.object import ObjectBackend, ObjectOptions
from tests.redis.user import CHUNK_BYTES, KEYS, one, opened


async def use(endpoint: str, bucket: str, seed: int, operations: int) -> Counter[str]:
    dice, met = random.Random(seed), Counter[str]()
    options = ObjectOptions(url=f"s3://{bucket}/kv", endpoint=endpoint, timeout_s=2, absent_ttl_s="100ms")
    tier = await opened(partial(ObjectBackend.open, options, tier_context(CHUNK_BYTES)))
    keys = keys_of(KEYS)
    for _ in range(operations):
        await one(tier, dice, keys, met)
    await tier.aclose(10)
    return met


if __name__ == "__main__":
    endpoint, bucket, seed, operations = sys.argv[1:]
    json.dump(asyncio.run(use(endpoint, bucket, int(seed), int(operations))), sys.stdout)
