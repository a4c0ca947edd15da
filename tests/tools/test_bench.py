"""`kvtier bench`: what it measures, writes and refuses, and that it leaves nothing behind."""

import errno
import fcntl
import json
import mmap
import os
import signal
import subprocess
import time
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest

from kvtier.tools.bench import RawFile
from kvtier.tools.figures import Side, interleaved, row_of, run_bench
from tests.benchmarks.remote_rate import served
from tests.tools.command import KVTIER, check_refusal
from tests.tools.command import run as run_command

ROOT = Path(__file__).parents[2]
COUNTING = """
import asyncio
from kvtier_backends.dummy import DummyBackend
class Counting(DummyBackend):
    deletions = at_once = most_at_once = 0
    async def delete(self, keys):
        Counting.deletions += 1
        Counting.at_once += 1
        Counting.most_at_once = max(Counting.most_at_once, Counting.at_once)
        await asyncio.sleep(0)
        await super().delete(keys)
        Counting.at_once -= 1
        with open(__file__ + ".counts", "w") as file:
            file.write(f"{Counting.deletions} {Counting.most_at_once}")
"""
OPERATIONS = {"store", "load"}
SHORT = ("--size", "256KiB", "--rounds", 1)


def run(*args):
    return run_command("bench", *args)


@pytest.fixture
def measured(capsys):
    def measured(*args):
        assert run(*args, "--json", "-") == 0
        told = json.loads(capsys.readouterr().out)
        for row in told["rows"]:
            assert row["figure"] > 0
            assert row["limit"] > 0
            assert row["spread"][0] <= row["ratio"] <= row["spread"][1]
            assert row["limit_is"]
        return told

    return measured


@pytest.fixture
def configured(tmp_path):
    def configured(tiers):
        path = tmp_path / "engine.toml"
        path.write_text(f'cpu_bytes_to_use = "4MiB"\nchunk_bytes = "8KiB"\n{tiers}')
        return path

    return configured


def test_a_directory_is_measured_as_a_tier_of_each_layout_and_left_as_it_was(outside, tmp_path, measured):
    (tmp_path / "mine").write_text("stays")
    moves = measured(tmp_path, "--chunk-sizes", "8KiB,16KiB", *SHORT)["rows"]
    assert len({(row["operation"], row["chunk_bytes"], row["settings"]["layout"]) for row in moves}) == len(moves) == 8
    assert {row["limit_is"] for row in moves} == {"preadv and pwritev of one file"}
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_each_tier_of_a_configuration_is_measured_next_to_its_limit(outside, tmp_path, configured, measured):
    root = tmp_path / "root"
    root.mkdir()
    tier = "[[secondary_tiers]]\ntype ="
    told = measured(configured(f'{tier} "fs"\nroot = "{root}"\n{tier} "dummy"\n'), *SHORT)
    for tier, limit in (("0:fs", "preadv and pwritev of one file"), ("1:dummy", "memcpy")):
        rows = {row["operation"]: row for row in told["rows"] if row["settings"]["tier"] == tier}
        assert (rows.keys(), rows["load"]["limit_is"]) == (OPERATIONS, limit)
    assert not list(root.iterdir())


def test_a_tier_with_a_codec_shows_raw_and_stored_bytes(outside, configured, measured, monkeypatch):
    monkeypatch.setattr("kvtier.backend.codec.TURN_S", 60)  # On a busy machine rows would be stored unchanged.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "bench")
    with ExitStack() as made:
        endpoint = f"http://127.0.0.1:{served(made, 'requests')}"
        tier = f'[[secondary_tiers]]\ntype = "object"\nurl = "s3://bucket/kv"\nendpoint = "{endpoint}"\n'
        for settings in (row["settings"] for row in measured(configured(f'{tier}codec = "bf16"'), *SHORT)["rows"]):
            assert settings["codec"] == "bf16"
            assert settings["raw_bytes"] >= 256 << 10
            assert 0.6 < settings["stored_bytes"] / settings["raw_bytes"] < 0.8
        unchanged = measured(configured(tier), *SHORT)["rows"][0]["settings"]
        assert not unchanged.keys() & {"codec", "raw_bytes", "stored_bytes"}


def test_a_tier_whose_answers_have_expired_is_asked_again(outside, configured, measured):
    slow = '[[secondary_tiers]]\ntype = "dummy"\nshared = true\nlatency_s = "10ms"\nlimits = { answer_ttl_s = "5ms" }\n'
    assert {row["operation"] for row in measured(configured(slow), *SHORT)["rows"]} == OPERATIONS


def test_chunks_are_deleted_a_few_calls_at_a_time(outside, tmp_path, measured, monkeypatch):
    """A slow tier cannot answer thousands of deletions within its deadline."""
    (tmp_path / "counting_tier.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    engine = 'cpu_bytes_to_use = "32MiB"\nchunk_bytes = "8KiB"\n[[secondary_tiers]]\ntype = "counting_tier:Counting"\n'
    (tmp_path / "engine.toml").write_text(engine)
    assert measured(tmp_path / "engine.toml", "--size", "4MiB", "--rounds", 1)["rows"]
    deletions, most_at_once = map(int, (tmp_path / "counting_tier.py.counts").read_text().split())
    assert deletions > 8
    assert 1 <= most_at_once <= 4


def test_the_table_names_the_limit_and_json_is_written_to_a_file_or_alone_to_stdout(tmp_path, capsys):
    settings = {"layout": "files", "depth": 4}
    row = row_of("store", [100.0] * 3, [250.0] * 3, "pwritev of <one> file", settings, chunk_bytes=128 << 10)
    run_bench("bench", lambda: [row], str(tmp_path / "out.json"))
    shown = capsys.readouterr().out
    for words in ("store", "128.0 KiB", "pwritev of <one> file", "layout files, depth 4", "Medians of 3 rounds"):
        assert words in shown
    run_bench("bench", lambda: [row], "-")
    out, err = capsys.readouterr()
    told, written = json.loads(out), json.loads((tmp_path / "out.json").read_text())
    assert told["rows"] == written["rows"] == json.loads(msgspec.json.encode([row]))
    assert len(told["machine"]["load_before"]) == len(told["machine"]["load_after"]) == 3
    assert told["machine"]["processors"] >= 1
    assert err == ""


def test_an_engine_with_nothing_to_measure_is_refused(configured, capsys):
    assert run(configured("")) == 2
    check_refusal(capsys, "secondary_tiers: none given, at least one accepted")
    config = configured('[[secondary_tiers]]\ntype = "dummy"\n')
    config.write_text(config.read_text().replace("4MiB", "64KiB"))
    assert run(config) == 2
    check_refusal(capsys, "cpu_bytes_to_use: 64.0 KiB given, at least 512.0 KiB accepted")


def test_ctrl_c_ends_it_and_leaves_nothing(outside, tmp_path):
    command = [*KVTIER, "bench", str(tmp_path), "--chunk-sizes", "64KiB", "--size", "1MiB", "--rounds", "2000"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as running:
        while not list(tmp_path.glob("*/.kvtier-raw")):
            assert running.poll() is None, running.communicate()
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
    assert running.returncode == 130
    assert not list(tmp_path.iterdir())


CHUNK_BYTES = 8_192


def chunks(count):
    whole = memoryview(mmap.mmap(-1, count * CHUNK_BYTES))
    return [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_a_raw_file_gives_every_buffer_back_what_it_wrote(tmp_path, threads, monkeypatch):
    buffers = chunks(7)
    with closing(RawFile(str(tmp_path / "raw"), buffers, direct=True)) as raw:
        for number, buffer in enumerate(buffers):
            buffer[:] = bytes([number + 1]) * CHUNK_BYTES
        raw.write(threads, sync=True)
        for buffer in buffers:
            buffer[:] = bytes(CHUNK_BYTES)
        raw.read(threads)
        assert [bytes(buffer) for buffer in buffers] == [bytes([number + 1]) * CHUNK_BYTES for number in range(7)]
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, start: 5)
        with pytest.raises(OSError, match="5 bytes moved of 8,192"):
            raw.read(threads)
    assert not list(tmp_path.iterdir())


def test_a_raw_file_is_buffered_if_the_file_system_takes_nothing_else(tmp_path, monkeypatch):
    def refusing(fd, buffers, start):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, buffers, start)

    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", refusing)
    with closing(RawFile(str(tmp_path / "raw"), chunks(2), direct=True)) as raw:
        assert not raw.direct
    assert not list(tmp_path.iterdir())


def test_a_rows_ratio_is_the_median_of_the_rounds_ratios():
    """A round in which the whole machine was ten times slower does not count as half of a difference."""
    row = row_of("load", [90.0, 9.0, 80.0], [100.0, 10.0, 100.0], "preadv", {"depth": 4}, chunk_bytes=4_096)
    assert (row.figure, row.limit) == (80.0, 100.0)
    assert (row.ratio, row.spread, row.rounds) == (0.9, (0.8, 0.9), 3)


def test_every_side_is_measured_once_a_round_and_the_first_round_does_not_count():
    order = []

    def side(name):
        def measure():
            order.append(name)
            return float(order.count(name))

        return Side(name, measure)

    measured = interleaved([side("a"), side("b"), side("c")], 20)
    assert measured == {name: [float(number) for number in range(2, 22)] for name in "abc"}
    rounds = [tuple(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1  # No side always follows the same other one.


def test_a_side_that_fails_is_tidied_up_after():
    done = []

    def fail():
        raise OSError("no")

    side = Side("bad", fail, prepare=lambda: done.append("prepared"), tidy=lambda: done.append("tidied"))
    with pytest.raises(OSError, match="no"):
        interleaved([side], 1)
    assert done == ["prepared", "tidied"]
