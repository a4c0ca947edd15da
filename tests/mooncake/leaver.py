"""A program that closes its tier while a call of it hangs: `leaver.py MASTER PREFIX`, told when on its input."""

import asyncio
import os
import sys

from kvtier.testing.conformance import Lender, keys_of, tier_context
from kvtier_backends.mooncake import MooncakeBackend, MooncakeOptions

CHUNK_BYTES = 16_384


async def leave(master, prefix):
    lender, keys = Lender(CHUNK_BYTES), keys_of(16)
    tier = await MooncakeBackend.open(
        MooncakeOptions(master=master, prefix=prefix, timeout_s=60), tier_context(CHUNK_BYTES)
    )
    await lender.keep(tier, keys)
    say("stored")
    await asyncio.to_thread(sys.stdin.readline)
    call = asyncio.create_task(tier.load(lender.reads(keys)))
    await asyncio.sleep(0)
    say(f"closed: {await tier.aclose(0)}")
    await call


def say(what):
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(leave(*sys.argv[1:]))
    os._exit(0)
