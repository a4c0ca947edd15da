"""`kvtier policies`: hit ratios by policy and size."""

import os

import pytest

from kvtier.tools.replay.study import measure, simulation
from kvtier.tools.replay.traces import Trace, TraceRequest
from tests.tools.command import check_refusal, reported, run
from tests.tools.replay.written import write_trace


@pytest.fixture
def trace(tmp_path):
    """Return the path of a trace with three prompts over ten blocks, which return by turns."""
    prompts = [(0, 1, 2, 3), (0, 1, 4, 5, 6), (7, 8, 9)]
    path = tmp_path / "trace.jsonl.gz"
    write_trace(path, [TraceRequest(number, 512 * len(ids), 1, ids) for number, ids in enumerate(prompts * 10)])
    return str(path)


def test_the_table_shows_each_policy_at_each_size(trace, capsys):
    assert run("policies", trace, "--policies", "lru,opt", "--sizes", "0.4,1") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "Hit ratios, trace.jsonl.gz"
    assert "\nlru  " in shown.out
    assert "\nopt  " in shown.out
    assert "30 requests, 120 block references, 10 unique blocks; best possible hit ratio 0.9167" in shown.out
    line = "--sizes 0.4: a cache of 4 chunks is shorter than 10 requests of 30, the longest of 5 chunks"
    assert line in shown.out
    assert shown.err == ""


def test_the_json_has_the_studys_ratios_under_the_given_names(trace, tmp_path):
    own = "kvtier.policies:LRU"
    options = ("--policies", f"lru, arc,opt,lru,{own}", "--sizes", "0.30,0.5,.5")
    ratios = reported(tmp_path, "policies", trace, *options)
    extent = measure(Trace(trace))
    assert ratios.pop(own) == ratios["lru"]
    assert ratios == {
        name: {
            size: extent.hit_ratio(sum(simulation(name)(Trace(trace), extent.capacity(float(size)))))
            for size in ("0.30", "0.5", ".5")
        }
        for name in ("lru", "arc", "opt")
    }
    assert 0 < ratios["lru"]["0.5"] < 1


def test_by_default_all_policies_are_compared_at_five_sizes(trace, tmp_path):
    ratios = reported(tmp_path, "policies", trace, "--limit", "9")
    assert list(ratios) == ["fifo", "lru", "arc", "s3fifo", "density", "opt"]
    assert all(list(row) == ["0.01", "0.05", "0.10", "0.25", "0.50"] for row in ratios.values())


def test_a_trace_without_any_block_has_a_hit_ratio_of_zero(tmp_path):
    write_trace(tmp_path / "trace.jsonl", [TraceRequest(0, 5, 1, ())])
    assert set(reported(tmp_path, "policies", tmp_path / "trace.jsonl", "--sizes", "0.5")["lru"].values()) == {0.0}


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--sizes", "0"], "--sizes '0': expected shares of the unique blocks, above 0 and at most 1"),
        (["--sizes", "0.1,,0.2"], "--sizes '0.1,,0.2': expected names or numbers with commas between them"),
        (["--policies", "lru,lrru"], "'lrru' is no policy; did you mean 'lru'?"),
        (["--policies", "no_such_module:Own"], "policy 'no_such_module:Own': there is no module"),
        (["--json", "{tmp}/absent/out.json"], "--json {tmp}/absent/out.json: No such file or directory"),
    ],
)
def test_a_bad_call_is_rejected_before_the_trace_is_opened(tmp_path, capsys, args, complaint):
    given = [arg.format(tmp=tmp_path) for arg in args]
    assert run("policies", tmp_path / "absent.jsonl", *given) == 2
    check_refusal(capsys, complaint.format(tmp=tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_bad_trace_is_rejected_and_nothing_is_written(trace, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    write_trace(bad, Trace(trace))
    bad.write_bytes(bad.read_bytes()[:-10])
    os.unlink(trace)
    assert run("policies", bad, "--json", f"{tmp_path}/out.json") == 2
    check_refusal(capsys, f"{bad}, line 30: Input data was truncated")
    assert os.listdir(tmp_path) == ["bad.jsonl"]
