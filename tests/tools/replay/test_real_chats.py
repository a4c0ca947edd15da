"""What cascades are worth on real chats, and the same ratios by every command that says one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from kvtier.policies import LRU
from kvtier.tools.replay.tiered import CASCADES, tiered_hits
from kvtier.tools.replay.traces import Trace, write_trace
from tests.tools.replay.real import CONVERSATION, Traces
from tests.tools.test_cli_policies import run

SHARE, TIER_SHARE = 0.05, 0.10  # Of the unique blocks: in the cache, and in the tier under it.
CHUNK_BYTES = 512 * 8  # Of a model that takes eight bytes a token.
APART_MS = 60_000  # No request comes before the one before it has been served.

pytestmark = pytest.mark.usefixtures("thorough")


class Worth(NamedTuple):
    """What a cache over a tier comes to, as shares of the blocks that were asked for."""

    hit_ratio: float
    written: float


@pytest.fixture(scope="module")
def worth(traces: Traces) -> Mapping[str, Worth]:
    """Return what each cascade is worth."""
    extent = traces.extent(CONVERSATION)
    capacity, tier_capacity = extent.capacity(SHARE), extent.capacity(TIER_SHARE)

    def worth(cascade: str) -> Worth:
        trace = Trace(traces / CONVERSATION, checked=True)
        served = list(tiered_hits(trace, LRU(capacity), capacity, tier_capacity, cascade))
        return Worth(*map(extent.hit_ratio, map(sum, zip(*served, strict=True))))

    return {cascade: worth(cascade) for cascade in CASCADES}


def test_a_tier_that_is_written_what_leaves_has_more_hits_than_one_that_is_written_everything(
    worth: Mapping[str, Worth],
) -> None:
    assert worth["evict"].hit_ratio >= 0.310
    assert worth["store"].hit_ratio == pytest.approx(0.279, abs=0.0005)
    assert worth["evict"].written < worth["store"].written


def test_a_tier_that_is_written_on_second_use_is_written_a_quarter_and_has_as_many_hits(
    worth: Mapping[str, Worth],
) -> None:
    assert worth["second_use"].written <= worth["store"].written / 4
    assert worth["second_use"].hit_ratio >= worth["store"].hit_ratio


# The same ratio, whichever command says it.


def told(out: Path, *command: str) -> Any:
    """Run a command; return what it writes as JSON."""
    assert run(*command, "--json", str(out)) == 0
    return json.loads(out.read_bytes())


@pytest.fixture(scope="module", params=["as they came", "one after the other"])
def chats(
    request: pytest.FixtureRequest, traces: Traces, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bool]:
    """Return a trace's path, and whether its requests overlap."""
    path = traces / CONVERSATION
    overlap = request.param == "as they came"
    if not overlap:
        requests = Trace(path, checked=True)
        path = tmp_path_factory.mktemp("chats") / "apart.jsonl"
        write_trace(path, (structs.replace(each, timestamp_ms=APART_MS * at) for at, each in enumerate(requests)))
    return path, overlap


def test_sizes_policies_and_replay_say_the_same_of_a_memory(
    traces: Traces, chats: tuple[Path, bool], tmp_path: Path
) -> None:
    """The study knows no time: where requests overlap, an engine's ratio is a little off it."""
    path, overlap = chats
    memory_bytes = traces.extent(CONVERSATION).capacity(SHARE) * CHUNK_BYTES
    config, out = tmp_path / "engine.toml", tmp_path / "out.json"
    config.write_text(f'cpu_bytes_to_use = {memory_bytes}\nchunk_bytes = "{CHUNK_BYTES}B"\n')
    sizes = ("--kv-bytes-per-token", "8", "--gpu-cache", "0", "--memory", f"{memory_bytes}B", "--disk", "0")
    (cell,) = told(out, "size", str(path), *sizes)["sizes"]
    replay = ("--virtual-time", "--gpu-cache-blocks", "0", "--config", str(config))
    assert told(out, "replay", str(path), *replay)["hit_ratio"] == cell["hit_ratio"]
    policies = told(out, "policies", str(path), "--policies", "lru", "--sizes", str(SHARE))
    assert policies["lru"][str(SHARE)] == pytest.approx(cell["hit_ratio"], abs=0.002 if overlap else 0)
