"""How much of a workload's KV cache comes back, and from where? Replay it through an engine, byte for byte.

    python examples/replay_trace.py [TRACE]

TRACE is a file in Mooncake's format; without one, a workload is generated. `kvtier replay` does the same and more; from
a program, requests can be anything that has block ids, and the figures can be read while they grow.
"""

import asyncio
import sys
import tempfile

from kvtier import EngineConfig, TierConfig
from kvtier.tools.replay.replay import CONCURRENCY, ChunkSource, Replay, ReplayTally
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.workload import open_trace

CHUNK_BYTES = 16 << 10
PRIMARY_SHARE = 0.05  # Of the trace's unique blocks; the disk has room for all.
REQUESTS = 200


async def main(trace_name: str = "generated") -> None:
    trace = open_trace(trace_name, limit=REQUESTS)
    extent = measure(trace)
    rows = max(extent.capacity(PRIMARY_SHARE), CONCURRENCY * extent.longest)  # Each open request fits.
    with tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(
            cpu_bytes_to_use=rows * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            secondary_tiers=(TierConfig(type="fs", options={"root": directory}),),
        )
        replay = Replay(trace, config, ChunkSource(CHUNK_BYTES), ReplayTally(extent.requests, CHUNK_BYTES))
        tally = await replay.run()

    print(f"{tally.requests:,} requests, {tally.chunk_references:,} chunks, {tally.wrong_chunks:,} of them wrong")
    for name, tier in tally.samples[-1].tiers.items():
        print(f"{name:>10}  hit ratio {extent.hit_ratio(tier.hits):.4f}  {tier.chunks_stored:,} chunks stored")
    print(f"{'together':>10}  hit ratio {tally.hit_ratio:.4f}")
    print(f"{'at best':>10}  hit ratio {extent.hit_ratio(extent.best_hits):.4f}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
