import os

import pytest

from kvtier import ConfigError, EngineConfig
from kvtier.settings import decode
from kvtier.tools.outputs import check_directory
from kvtier.tools.replay import replay_command
from kvtier.tools.replay.study import Extent
from tests.tools.command import check_refusal, run

HOUR = Extent(requests=12_031, block_references=288_500, unique_blocks=182_790, best_hits=105_710, lengths={247: 1})


def engine(*tiers):
    return decode(EngineConfig, {"cpu_bytes_to_use": "1MiB", "chunk_bytes": "16KiB", "secondary_tiers": tiers})


def roots(config):
    return [tier.options.get("root") for tier in config.secondary_tiers]


def test_the_default_primary_holds_the_longest_request_for_each_concurrent_one_but_no_more_than_the_trace_twice():
    assert replay_command.default_config(HOUR, 8).rows == 9_140
    agents = Extent(402, block_references=196_744, unique_blocks=12_626, best_hits=0, lengths={311: 401, 3_570: 1})
    assert [replay_command.primary_rows(agents, concurrency) for concurrency in (1, 2, 3, 8)] == [
        7_140,
        7_140,
        10_710,
        25_252,
    ]


@pytest.mark.parametrize(
    ("tiers", "override", "expected"),
    [
        ([{"type": "dummy"}, {"type": "fs"}], False, [None, "/there"]),  # The only one gets the directory itself.
        ([{"type": "fs"}, {"type": "dummy"}, {"type": "fs"}], True, ["/there/0", None, "/there/2"]),
        ([{"type": "fs", "root": "/own"}, {"type": "fs"}], False, ["/own", "/there/1"]),
        ([{"type": "fs", "root": "/own"}, {"type": "fs"}], True, ["/there/0", "/there/1"]),
    ],
)
def test_fs_tiers_get_the_directory_or_a_folder_each(tiers, override, expected):
    config = engine(*tiers)
    assert replay_command.without_root(config)
    placed = replay_command.rooted(config, "/there", override=override)
    assert roots(placed) == expected
    assert not replay_command.without_root(placed)


def test_a_directory_that_is_not_there_is_refused_and_not_made(tmp_path):
    missing, file = str(tmp_path / "missing"), tmp_path / "file"
    file.touch()
    for path in (missing, str(file)):
        with pytest.raises(ConfigError, match=f"--fs '{path}': no such directory"):
            check_directory("--fs", path)
        with pytest.raises(ConfigError, match=rf"secondary_tiers\[1\].root '{path}': no such directory"):
            replay_command.check_roots(engine({"type": "dummy"}, {"type": "fs", "root": path}))
    assert os.listdir(tmp_path) == ["file"]
    replay_command.check_roots(engine({"type": "fs", "root": str(tmp_path)}, {"type": "fs"}))


def test_a_trace_that_would_fill_the_disk_of_a_temporary_directory_is_refused(tmp_path):
    replay_command.check_room(engine({"type": "fs"}), Extent(1, 1, 1, 0, {1: 1}), str(tmp_path))
    for tier in ({"type": "dummy"}, {"type": "fs", "root": str(tmp_path)}, {"type": "fs", "capacity_bytes": "1MiB"}):
        replay_command.check_room(engine(tier), Extent(1, 1 << 40, 1 << 40, 0, {1: 1}), str(tmp_path))
    with pytest.raises(ConfigError, match=r"the trace's chunks take about .* PiB, .* are free"):
        replay_command.check_room(engine({"type": "fs"}), Extent(1, 1 << 40, 1 << 40, 0, {1: 1}), str(tmp_path))


def test_a_directory_for_chunks_is_made_for_its_user_alone_where_its_parent_is(outside, tmp_path, capsys):
    for _ in range(2):
        assert run("replay", "generated", "--limit", "1", "--fs", tmp_path / "chunks") == 0
        assert (tmp_path / "chunks").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    capsys.readouterr()
    for path, why in (("absent/chunks", "parent directory does not exist"), ("file", "no such directory")):
        assert run("replay", "generated", "--limit", "1", "--fs", tmp_path / path) == 2
        check_refusal(capsys, why)
