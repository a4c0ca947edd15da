"""Logs of token ids as traces: which blocks are the same, when requests came, and what is refused."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvtier.errors import TraceError
from kvtier.tools.replay.logs import Conversion
from kvtier.tools.replay.traces import TraceRequest

Write = Callable[..., str]


def rows(*values: Any) -> bytes:
    return b"".join(msgspec.json.encode(value) + b"\n" for value in values)


def converted(*paths: str, block_tokens: int = 16) -> list[TraceRequest]:
    return list(Conversion(paths, block_tokens))


def ids(*paths: str, block_tokens: int = 16) -> list[tuple[int, ...]]:
    return [request.hash_ids for request in converted(*paths, block_tokens=block_tokens)]


def test_prompts_share_ids_as_far_as_their_tokens_are_the_same_and_no_further(trace_file: Write) -> None:
    begin, other = list(range(8)), list(range(100, 108))
    log = trace_file(rows(*({"token_ids": tokens} for tokens in (begin + other, begin + begin, other + begin))))
    assert ids(log, block_tokens=4) == [(0, 1, 2, 3), (0, 1, 4, 5), (6, 7, 8, 9)]


def test_the_last_partial_block_is_dropped_and_the_prompts_length_stays(trace_file: Write) -> None:
    (request,) = converted(trace_file(rows({"token_ids": list(range(11)), "output_length": 3})), block_tokens=4)
    assert (request.hash_ids, request.input_length, request.output_length) == ((0, 1), 11, 3)


def test_the_ids_may_have_the_name_that_servers_use(trace_file: Write) -> None:
    log = trace_file(rows({"prompt_token_ids": [1, 2, 3, 4]}, {"prompt_token_ids": [1, 2, 3, 4]}))
    assert ids(log, block_tokens=4) == [(0,), (0,)]


def test_a_prompt_of_no_whole_block_is_a_request_without_ids(trace_file: Write) -> None:
    assert ids(trace_file(rows({"token_ids": [1, 2, 3]})), block_tokens=4) == [()]


@pytest.mark.parametrize(("times", "line"), [((10, None, 20), 2), ((None, 10), 2)])
def test_times_in_some_lines_only_are_refused_with_the_first_line_that_differs(
    trace_file: Write, times: tuple[int | None, ...], line: int
) -> None:
    log = trace_file(rows(*({"token_ids": [1], "timestamp": time} for time in times)))
    with pytest.raises(TraceError, match=rf"line {line}: .*; a timestamp in every line or in none accepted"):
        converted(log)


def test_a_log_without_times_has_one_request_a_second(trace_file: Write) -> None:
    conversion = Conversion([trace_file(rows(*[{"token_ids": [1]}] * 3))], 16)
    assert [request.timestamp_ms for request in conversion] == [0, 1_000, 2_000]
    assert conversion.without_times


def test_logs_that_were_rotated_become_one_trace(trace_file: Write) -> None:
    one = trace_file(rows({"timestamp": 5_000, "token_ids": [1, 2]}), "one")
    two = trace_file(rows({"timestamp": 6_000, "token_ids": [1, 3]}), "two")
    requests = converted(one, two, block_tokens=1)
    assert [(each.timestamp_ms, each.hash_ids) for each in requests] == [(0, (0, 1)), (1_000, (0, 2))]
    with pytest.raises(TraceError, match=r"one, line 1: 1\.000 s earlier than the request before it"):
        converted(two, one)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"\x00\xff\n", "line 1: JSON is malformed.*expected JSON lines with token_ids"),
        (b"token_ids\n1 2 3\n", "line 1: .*expected JSON lines with token_ids"),
        (b'{"prompt": "hello"}\n', "line 1: no token_ids in it"),
        (b'{"token_ids": [1, -2]}\n', r"line 1: Expected `int` >= 0"),
        (b'{"token_ids": null}\n', "line 1: no token_ids in it"),
        (b'{"token_ids": [99999999999999999999]}\n', "line 1"),
        (b'{"token_ids": [1], "timestamp": 5}\n{"token_ids": [1], "timestamp": 1}\n', "line 2: .* earlier"),
    ],
)
def test_a_log_that_cannot_be_read_is_refused_with_file_line_and_remedy(
    trace_file: Write, content: bytes, message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        converted(trace_file(content))
