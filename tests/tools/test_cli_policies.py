import pytest

from kvtier.tools.replay.traces import TraceRequest
from tests.tools.command import reported, run
from tests.tools.replay.written import write_prompts, write_trace


@pytest.fixture
def trace(tmp_path):
    return write_prompts(tmp_path / "trace.jsonl.gz", [(0, 1, 2, 3), (0, 1, 4, 5, 6), (7, 8, 9)] * 10)


def test_the_table_shows_each_policy_at_each_size(trace, capsys):
    assert run("policies", trace, "--policies", "lru,opt", "--sizes", "0.4,1") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "Hit ratios, trace.jsonl.gz"
    assert "\nlru  " in shown.out
    assert "\nopt  " in shown.out
    assert "30 requests, 120 block references, 10 unique blocks; best possible hit ratio 0.9167" in shown.out
    assert "--sizes 0.4: a cache of 4 chunks is shorter than 10 requests of 30, the longest of 5 chunks" in shown.out
    assert shown.err == ""


def test_by_default_all_policies_are_compared_at_five_sizes(trace, tmp_path):
    ratios = reported(tmp_path, "policies", trace, "--limit", "9")
    assert list(ratios) == ["fifo", "lru", "arc", "s3fifo", "density", "opt"]
    assert all(list(row) == ["0.01", "0.05", "0.10", "0.25", "0.50"] for row in ratios.values())


def test_a_trace_without_any_block_has_a_hit_ratio_of_zero(tmp_path):
    write_trace(tmp_path / "trace.jsonl", [TraceRequest(0, 5, 1, ())])
    assert set(reported(tmp_path, "policies", tmp_path / "trace.jsonl", "--sizes", "0.5")["lru"].values()) == {0.0}
