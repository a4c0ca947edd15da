"""The examples that replay a trace, compare policies and embed an engine, run as their readers run them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.config import read_config
from tests.tools.replay.written import write_prompts

pytestmark = pytest.mark.usefixtures("outside")

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(name, *args):
    command = [sys.executable, str(EXAMPLES / name), *map(str, args)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""
    return ended.stdout


def test_replaying_a_trace_finds_all_that_can_be_found(tmp_path):
    """Twenty users take turns, each with a prompt that grows: with room for a twentieth, it comes from the disk."""
    prompts = [range(user * 1_000, user * 1_000 + turn) for turn in range(1, 11) for user in range(20)]
    shown = run("replay_trace.py", write_prompts(tmp_path / "trace.jsonl", prompts))
    assert "200 requests, 1,100 chunks, 0 of them wrong" in shown
    ratios = dict(re.findall(r"(\w+(?: best)?|\d:fs)  hit ratio (\d\.\d+)", shown))
    assert float(ratios["0:fs"]) > float(ratios["cpu"])
    assert 0.4 < float(ratios["together"]) <= float(ratios["at best"]) == 0.8182


def test_an_embedded_engine_finds_common_prefixes_and_after_a_restart_everything(tmp_path):
    first, again = run("embed.py", tmp_path), run("embed.py", tmp_path)
    assert re.findall(r"(\d) of (\d) chunks found", first)[0] == ("0", "5")
    assert sorted(re.findall(r"(\d) of (\d) chunks found", first)[1:]) == [("4", "5"), ("5", "7")]
    assert sorted(re.findall(r"(\d) of (\d) chunks found", again)) == [("5", "5"), ("5", "5"), ("7", "7")]


def test_an_embedded_engine_needs_no_directory_of_ones_own():
    assert run("embed.py").count("chunks found") == 3


def test_the_conversations_configuration_is_what_it_says():
    config = read_config(EXAMPLES / "conversation.toml")
    assert (config.rows, config.chunk_bytes) == (9_140, 16 << 10)
    assert [tier.type for tier in config.secondary_tiers] == ["fs"]
    assert "root" not in config.secondary_tiers[0].options


def test_the_example_tells_policies_apart(thorough):
    found = re.findall(r"(\w+)  hit ratio (0\.\d+)", run("compare_policies.py"))
    ratios = {name: float(ratio) for name, ratio in found}
    assert ratios["AnyOfThem"] < ratios["FIFO"] < ratios["LRU"] < ratios["everything"]
    assert {"S3FIFO", "ARC"} <= ratios.keys()
