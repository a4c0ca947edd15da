"""A program that owns an engine on a remote beside others, and looks at every byte: `owner.py ENGINE SEED BASE`.

ENGINE is its configuration in JSON. It goes on until it is killed, or who started it has ended. It prints what it has
met as JSON, a line for every few operations. A chunk that came wrong ends it with an exception.
"""

import asyncio
import json
import random
import sys
from collections import Counter

from tests.remote.kit import found, key, opened, put
from tests.remote.servers import end_with_parent

CHUNKS = 64
ROWS = 16  # Of the primary: most of what is found comes from the remote.
RUN_MAX = 6
A_LINE = 10  # Operations.
OPERATIONS = ("fetch",) * 8 + ("put",) * 6 + ("delete",) * 2 + ("reset",)


async def own(described, dice, base):
    engine = await opened(described)
    while True:
        met = Counter[str]()
        for _ in range(A_LINE):
            await one(engine, dice, base, met)
        sys.stdout.write(json.dumps(met) + "\n")
        sys.stdout.flush()


async def one(engine, dice, base, met):
    first = base + dice.randrange(CHUNKS)
    numbers = range(first, min(first + dice.randint(1, RUN_MAX), base + CHUNKS))
    operation = dice.choice(OPERATIONS)
    met["operations"] += 1
    match operation:
        case "fetch":
            met["fetched"] += await found(engine, numbers)
        case "put":
            met["put"] += await put(engine, numbers)
        case "delete":
            met["deleted"] += await engine.delete([key(numbers[0])])
        case _:
            met["reset"] += await engine.reset()


if __name__ == "__main__":
    end_with_parent()
    described, seed, base = sys.argv[1:]
    asyncio.run(own(json.loads(described), random.Random(int(seed)), int(base)))
