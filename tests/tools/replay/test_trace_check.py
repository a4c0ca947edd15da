"""A trace that parses may be wrong: ids that are not chained, lengths that do not fit, times in seconds."""

import logging
import tracemalloc

import pytest

from kvtier.errors import TraceError
from kvtier.settings.hints import Hint
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.traces import IDS_MAX, REQUESTS_MIN, Trace, TraceCheck, TraceRequest
from kvtier.tools.replay.workload import GeneratedTrace
from tests.tools.command import run
from tests.tools.replay.real import AGENTIC, CONVERSATION, MINI_SWE
from tests.tools.replay.written import write_trace

CHAINED, LENGTHS, TIMES = "hash_ids must be chained", "hash_ids and input_length must fit", "milliseconds"


@pytest.fixture
def told(tmp_path, caplog):
    def told(requests):
        path = tmp_path / "trace.jsonl"
        write_trace(path, requests)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            measure(Trace(path))
        return [record.getMessage() for record in caplog.records]

    return told


def prompts(*prompts):
    return [TraceRequest(number * 1_000, 512 * len(ids), 1, ids) for number, ids in enumerate(prompts)]


@pytest.mark.parametrize("name", [CONVERSATION, MINI_SWE, AGENTIC])
def test_a_real_trace_gives_no_warning(thorough, traces, caplog, name):
    assert measure(Trace(traces / name)).requests > 0
    assert caplog.records == []


def test_blocks_that_are_only_partly_filled_may_have_an_id_or_none(told):
    lengths = ((1_030, (0, 1)), (1_030, (0, 1, 2)), (5, ()))
    assert told([TraceRequest(at, tokens, 1, ids) for at, (tokens, ids) in enumerate(lengths)]) == []


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        ((4, 1), "line 2: id 1 follows id 4 here and id 0 before"),
        ((1, 2), "line 2: id 1 stands first here and later before"),
        ((0, 2, 3, 0), "line 2: id 0 follows id 3 here and stood first before"),
        ((5, 6, 5), "line 2: id 5 follows id 6 here and stood first before"),
    ],
    ids=["other_predecessor", "now_first", "twice", "new_and_twice"],
)
def test_an_id_after_two_different_ids_is_no_prefixs_hash_and_is_warned_of_with_its_line(told, second, complaint):
    (warning,) = told(prompts((0, 1), second))
    assert complaint in warning
    assert CHAINED in warning
    assert "[0, 1, 2] and [0, 1, 3]" in warning


def test_each_kind_of_fault_is_warned_of_once_with_its_first_line_and_how_many_there_are(told):
    (warning,) = told(prompts((0, 1), (0, 1), (2, 1), (3, 1), (0, 1), (4, 1)))
    assert "line 3: id 1 follows id 2 here" in warning
    assert "3 such lines" in warning


def test_a_trace_is_warned_of_once_however_often_it_is_read(tmp_path, caplog):
    write_trace(tmp_path / "trace", prompts((0, 1), (1, 0)))
    trace = Trace(tmp_path / "trace")
    assert next(iter(trace)).hash_ids == (0, 1)  # What is not read to its end is not judged.
    assert caplog.records == []
    for _ in range(3):
        measure(trace)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("tokens", [511, 1_536, 32, 0])
def test_a_length_that_does_not_fit_its_ids_is_warned_of_with_its_line(told, tokens):
    (warning,) = told([TraceRequest(0, 1_024, 1, (0, 1)), TraceRequest(1, tokens, 1, (0, 1))])
    assert f"line 2: 2 ids of 512 tokens for {tokens:,} tokens" in warning
    assert LENGTHS in warning
    assert '{"meta": {"block_size": ' in warning


def test_an_invalid_hint_is_a_warning_with_its_line_and_its_request_is_kept(trace_file, caplog):
    line = '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1], "kvtier": %s}'
    given = ('{"class": "tool"}', '{"priority": 100}', "[1]", '{"retain_s": 1e999}', "null")
    trace = Trace(trace_file("\n".join(line % hint for hint in given).encode()))
    assert [request.hint for request in trace] == [Hint(class_="tool"), None, None, None, None]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "line 2: Expected `int` <= 99 - at `$.kvtier.priority`" in warning
    assert "(3 such lines)" in warning
    assert "a hint is a table" in warning


def test_a_line_with_an_invalid_hint_is_refused_for_what_is_wrong_beside_it(trace_file):
    line = b'{"kvtier": {"oops": 1}, "timestamp": "x", "input_length": 512, "output_length": 1, "hash_ids": [1]}'
    with pytest.raises(TraceError, match=r"line 1: Expected `int \| float`, got `str` - at `\$\.timestamp`"):
        list(Trace(trace_file(line)))


def test_times_in_seconds_are_warned_of_with_the_rate_that_they_would_mean(told):
    requests = GeneratedTrace(limit=500)
    in_seconds = [TraceRequest(each.timestamp_ms / 1_000, each.input_length, 1, each.hash_ids) for each in requests]
    (warning,) = told(in_seconds)
    assert "line 500: 500 requests with " in warning
    assert TIMES in warning


def test_a_burst_and_a_trace_without_times_are_accepted(told):
    burst = [TraceRequest(number / 1_000, 512 * 40, 1, tuple(range(40))) for number in range(REQUESTS_MIN - 1)]
    assert told(burst) == []
    assert told([TraceRequest(7, 512 * 40, 1, tuple(range(40))) for _ in range(2 * REQUESTS_MIN)]) == []


def test_a_command_warns_in_one_line(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    write_trace(path, prompts((0, 1), (1, 2), (2, 1)))
    assert run("size", path, "--kv-bytes-per-token", "8", "--disk", "0", "--memory", "1MiB") == 0
    warning = capsys.readouterr().err
    assert f"{path}, line 2: id 1 stands first here and later before; {CHAINED}" in warning
    assert warning.count("\n") == 1


def kept_bytes(ids, ids_max):
    check = TraceCheck("trace", 1, ids_max=ids_max)
    tracemalloc.start()
    try:
        for start in range(10**12, 10**12 + ids, 100):
            check.look(1, TraceRequest(0, 100, 1, tuple(range(start, start + 100))))
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_an_id_costs_about_100_bytes_and_ids_beyond_the_limit_cost_nothing():
    assert 50 < kept_bytes(10_000, IDS_MAX) / 10_000 < 140
    assert kept_bytes(50_000, 10_000) < 12_500 * 140


def test_beyond_the_limit_known_ids_are_still_checked(caplog):
    check = TraceCheck("trace", 1, ids_max=2)
    for line, ids in enumerate(((0, 1), (2, 3, 4, 5), (3, 5), (3, 1)), 1):  # The third prompt is not remembered.
        check.look(line, TraceRequest(0, len(ids), 1, ids))
    check.end()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "line 4: id 1 follows id 3" in warning
