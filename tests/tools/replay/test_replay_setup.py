"""Where a replay's tiers keep their chunks."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import EngineConfig, TierConfig
from kvtier.errors import ConfigError
from kvtier.settings import decode
from kvtier.testing.conformance import Lender, keys_of, tier_context
from kvtier.tools.outputs import check_directory, make_directory
from kvtier.tools.replay.setup import (
    PRIMARY_ROWS_MIN,
    check_room,
    check_roots,
    default_config,
    fs_options,
    primary_rows,
    rooted,
    taken_bytes,
    without_root,
)
from kvtier.tools.replay.study import Extent
from kvtier_backends.fs import FsBackend

HOUR = Extent(requests=12_031, block_references=288_500, unique_blocks=182_790, best_hits=105_710, lengths={247: 1})


def engine(*tiers: dict[str, Any]) -> EngineConfig:
    return decode(EngineConfig, {"cpu_bytes_to_use": "1MiB", "chunk_bytes": "16KiB", "secondary_tiers": tiers})


def roots(config: EngineConfig) -> list[object]:
    return [tier.options.get("root") for tier in config.secondary_tiers]


def test_by_default_a_small_primary_stands_over_files_without_a_place() -> None:
    config = default_config(HOUR, 8)
    assert (config.rows, config.chunk_bytes) == (9_140, 16 << 10)
    assert [tier.type for tier in config.secondary_tiers] == ["fs"]
    assert without_root(config)


def test_however_short_the_trace_the_default_primary_holds_a_long_prompt() -> None:
    assert default_config(Extent(1, 10, 10, 0, {10: 1}), 8).rows == PRIMARY_ROWS_MIN


def test_the_default_primary_holds_the_longest_request_for_each_concurrent_one_but_no_more_than_the_trace_twice() -> (
    None
):
    agents = Extent(
        requests=402, block_references=196_744, unique_blocks=12_626, best_hits=0, lengths={311: 401, 3_570: 1}
    )
    assert [primary_rows(agents, concurrency) for concurrency in (1, 2, 3, 8)] == [7_140, 7_140, 10_710, 25_252]


def test_the_only_fs_tier_gets_the_directory_itself() -> None:
    config = engine({"type": "dummy"}, {"type": "fs"})
    assert without_root(config)
    placed = rooted(config, "/there", override=False)
    assert roots(placed) == [None, "/there"]
    assert not without_root(placed)


def test_several_get_a_folder_each() -> None:
    placed = rooted(engine({"type": "fs"}, {"type": "dummy"}, {"type": "fs"}), "/there", override=True)
    assert roots(placed) == ["/there/0", None, "/there/2"]


def test_a_root_of_ones_own_is_kept_unless_it_is_to_be_overridden() -> None:
    config = engine({"type": "fs", "root": "/own"}, {"type": "fs"})
    assert roots(rooted(config, "/there", override=False)) == ["/own", "/there/1"]
    assert roots(rooted(config, "/there", override=True)) == ["/there/0", "/there/1"]


def test_a_directory_for_an_engine_without_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="--fs /there: the configuration has no tier of type fs"):
        rooted(engine({"type": "dummy"}), "/there", override=True)


def test_a_directory_that_is_not_there_is_refused_and_not_made(tmp_path: Path) -> None:
    missing, file = str(tmp_path / "missing"), tmp_path / "file"
    file.touch()
    for path in (missing, str(file)):
        with pytest.raises(ConfigError, match=f"--fs '{path}': no such directory"):
            check_directory("--fs", path)
        with pytest.raises(ConfigError, match=rf"secondary_tiers\[1\].root '{path}': no such directory"):
            check_roots(engine({"type": "dummy"}, {"type": "fs", "root": path}))
    assert os.listdir(tmp_path) == ["file"]
    check_roots(engine({"type": "fs", "root": str(tmp_path)}, {"type": "fs"}))


def test_a_trace_that_would_fill_the_disk_of_a_temporary_directory_is_refused(tmp_path: Path) -> None:
    check_room(engine({"type": "fs"}), Extent(1, 1, 1, 0, {1: 1}), str(tmp_path))
    check_room(engine({"type": "dummy"}), Extent(1, 1 << 40, 1 << 40, 0, {1: 1}), str(tmp_path))
    with pytest.raises(ConfigError, match=r"the trace's chunks take about .* PiB, .* are free"):
        check_room(engine({"type": "fs"}), Extent(1, 1 << 40, 1 << 40, 0, {1: 1}), str(tmp_path))


def test_a_tier_with_a_root_of_its_own_takes_nothing_of_a_temporary_directory(tmp_path: Path) -> None:
    config = engine({"type": "fs", "root": str(tmp_path)}, {"type": "fs", "capacity_bytes": "1MiB"})
    check_room(config, Extent(1, 1 << 40, 1 << 40, 0, {1: 1}), str(tmp_path))


@pytest.mark.parametrize("chunks", [40, 260, 520])
@pytest.mark.parametrize(
    "given",
    [
        {"layout": "segments"},
        {"layout": "files", "naming": "flat"},
        {"layout": "files"},
        {"layout": "segments", "capacity_bytes": "20MiB"},
    ],
    ids=str,
)
def test_what_a_tier_of_either_layout_will_take_of_the_disk_is_known_before(
    given: dict[str, Any], chunks: int, tmp_path: Path
) -> None:
    """The estimate is held against what a real tier takes: segments are made whole, files have folders."""
    row_bytes = 64 << 10
    tier = TierConfig(type="fs", options=given)
    expected = taken_bytes(fs_options(tier, "tier"), row_bytes, chunks)

    async def store() -> None:
        options = fs_options(TierConfig(type="fs", options={**given, "root": str(tmp_path)}), "tier")
        backend = await FsBackend.open(options, tier_context(row_bytes))
        lender = Lender(row_bytes)
        for start in range(0, chunks, 20):
            await backend.store(lender.writes(keys_of(20, start)))
            lender.take_back()
        await backend.aclose(10)

    asyncio.run(store())
    taken = sum(path.lstat().st_blocks * 512 for path in tmp_path.rglob("*"))
    assert 0.85 * expected < taken < 1.15 * expected


def test_a_directory_for_chunks_is_made_for_its_user_alone_where_its_parent_is(tmp_path: Path) -> None:
    path = tmp_path / "chunks"
    for _ in range(2):
        make_directory("--fs", str(path))
        assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match=r"--fs: cannot create .*: parent directory does not exist"):
        make_directory("--fs", str(tmp_path / "absent" / "chunks"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no such directory"):
        make_directory("--fs", str(tmp_path / "file"))
