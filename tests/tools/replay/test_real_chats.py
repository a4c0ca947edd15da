"""The hit ratios of a real conversation are the same in every command that reports one."""

import pytest
from msgspec import structs

from kvtier.tools.replay.traces import Trace
from tests.tools.command import reported
from tests.tools.replay.real import CONVERSATION
from tests.tools.replay.written import write_trace

SHARE = 0.05  # Of the unique blocks, in the cache.
CHUNK_BYTES = 512 * 8  # Of a model with eight bytes a token.
APART_MS = 60_000  # Each request is served before the next one arrives.


@pytest.mark.parametrize("overlap", [True, False])
def test_sizes_policies_and_simulate_report_the_same_hit_ratio(thorough, traces, tmp_path, overlap):
    """The study knows no time: if requests overlap, an engine's ratio differs a little."""
    path = traces / CONVERSATION
    memory_bytes = traces.extent(CONVERSATION).capacity(SHARE) * CHUNK_BYTES
    if not overlap:
        requests, path = Trace(path, checked=True), tmp_path / "apart.jsonl"
        write_trace(path, (structs.replace(each, timestamp_ms=APART_MS * at) for at, each in enumerate(requests)))
    config = tmp_path / "engine.toml"
    config.write_text(f'cpu_bytes_to_use = {memory_bytes}\nchunk_bytes = "{CHUNK_BYTES}B"\n')
    sizes = ("--kv-bytes-per-token", "8", "--gpu-cache-tokens", "0", "--memory", f"{memory_bytes}B", "--disk", "0")
    (cell,) = reported(tmp_path, "size", path, *sizes)["sizes"]
    simulated = reported(tmp_path, "simulate", path, "--gpu-cache-tokens", "0", "--config", config)
    assert simulated["hit_ratio"] == cell["hit_ratio"]
    policies = reported(tmp_path, "policies", path, "--policies", "lru", "--sizes", str(SHARE))
    assert policies["lru"][str(SHARE)] == pytest.approx(cell["hit_ratio"], abs=0.002 if overlap else 0)
