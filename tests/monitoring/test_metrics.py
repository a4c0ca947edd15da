"""What the board, the alerts and their page name is there, in an engine with two tiers."""

from prometheus_client import generate_latest

from kvtier.engine.manager import TieringOffloadingManager
from tests.engine.kit import FAULTY, describe, found, put
from tests.monitoring.queries import EVERY, samples_of, unknown


async def page_of(folder):
    """Return the metrics of an engine to whose tiers something of everything happened."""
    disk = {"type": "fs", "name": "disk", "root": str(folder), "layout": "files", "capacity_bytes": "1MiB"}
    peer = {
        "type": FAULTY,
        "name": "peer",
        "inner": {"type": "dummy", "capacity_bytes": "1MiB"},
        "faults": {"failed": 1.0},
        "limits": {"store_chunks_in_flight": 4},
    }
    async with TieringOffloadingManager.open(describe(8, disk, peer, prefill_tokens_per_s=1.0)) as engine:
        assert await put(engine, range(6)) == 6
        await engine.drain()
        await engine.reset()
        assert await found(engine, range(6)) == 6
        for tier in engine._ledger.tiers:  # What is told once a second, and what takes a full queue.
            tier.counters.reported["evicted"] += 1
            tier.counters.dropped["budget"] += 1
        return generate_latest(engine.metrics).decode()


async def test_every_metric_and_label_that_is_named_is_there(tmp_path):
    samples = samples_of(await page_of(tmp_path))
    assert len(EVERY) > 40
    assert unknown(EVERY, samples) == []
