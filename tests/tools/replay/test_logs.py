"""Logs of others as traces: which blocks are the same, when requests came, and what is refused."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.errors import ConfigError, TraceError
from kvtier.tools.replay.logs import FORMATS, Conversion
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.traces import Request, Trace, write_trace
from tests.tools.replay.real import Traces

Write = Callable[..., str]


def rows(*values: Any) -> bytes:
    return b"".join(msgspec.json.encode(value) + b"\n" for value in values)


def converted(*paths: str, **options: Any) -> list[Request]:
    return list(Conversion(paths, **options))


def ids(*paths: str, **options: Any) -> list[tuple[int, ...]]:
    return [request.hash_ids for request in converted(*paths, **options)]


def test_prompts_share_ids_as_far_as_their_tokens_are_the_same_and_no_further(trace_file: Write) -> None:
    begin, other = list(range(8)), list(range(100, 108))
    log = trace_file(rows(*({"token_ids": tokens} for tokens in (begin + other, begin + begin, other + begin))))
    assert ids(log, block_tokens=4) == [(0, 1, 2, 3), (0, 1, 4, 5), (6, 7, 8, 9)]


def test_the_last_partial_block_is_dropped_and_the_prompts_length_stays(trace_file: Write) -> None:
    (request,) = converted(trace_file(rows({"token_ids": list(range(11)), "output_length": 3})), block_tokens=4)
    assert (request.hash_ids, request.input_length, request.output_length) == ((0, 1), 11, 3)


def test_a_prompt_of_no_whole_block_is_a_request_without_ids(trace_file: Write) -> None:
    assert ids(trace_file(rows({"token_ids": [1, 2, 3]})), block_tokens=4) == [()]


def test_csv_and_json_of_the_same_tokens_are_the_same_trace(trace_file: Write) -> None:
    source = random.Random(3)
    prompts = [[source.randrange(4) for _ in range(source.randrange(40))] for _ in range(50)]
    as_json = trace_file(
        rows(*({"token_ids": tokens, "timestamp": 10 * at, "session_id": "a"} for at, tokens in enumerate(prompts)))
    )
    lines = [f'{10 * at},a,"{" ".join(map(str, tokens))}"' for at, tokens in enumerate(prompts)]
    as_csv = trace_file("\n".join(("timestamp,session_id,token_ids", *lines)).encode(), "log.csv")
    assert converted(as_csv, block_tokens=4) == converted(as_json, block_tokens=4)


def test_csv_that_cannot_be_read_is_refused_with_its_line(trace_file: Write) -> None:
    log = trace_file(b"token_ids\n1 2\n1 2\r3 4\n", "log.csv")
    with pytest.raises(TraceError, match=r"log\.csv, line 3: new-line character.*; expected token_ids with spaces"):
        converted(log)


def test_a_quoted_cell_of_csv_that_goes_on_in_the_next_line_is_refused_where_it_begins(trace_file: Write) -> None:
    """As NumPy's arrays are written: else the first line of it would be taken for a whole prompt."""
    log = trace_file(b'token_ids,timestamp\n"[1 2\n 3 4]",0\n', "log.csv")
    with pytest.raises(TraceError, match=r"log\.csv, line 2: .*; expected token_ids .* all in one line"):
        converted(log, block_tokens=2)


def test_csv_with_commas_between_the_ids_and_no_quotes_is_refused(trace_file: Write) -> None:
    log = trace_file(b"timestamp,token_ids\n0,1,2,3,4\n", "log.csv")
    with pytest.raises(TraceError, match=r"log\.csv, line 2: 5 cells, and 2 names.*; expected token_ids with spaces"):
        converted(log, block_tokens=4)


def test_csv_may_call_the_ids_as_servers_do(trace_file: Write) -> None:
    log = trace_file(b"prompt_token_ids\n1 2 3 4\n1 2 3 4\n", "log.csv")
    assert ids(log, block_tokens=4) == [(0,), (0,)]


@pytest.mark.parametrize("header", [b'"token_ids"', b'"timestamp","token_ids"', b"\xef\xbb\xbftoken_ids,x"])
def test_csv_is_seen_from_a_header_with_quotes_or_a_byte_order_mark_too(trace_file: Write, header: bytes) -> None:
    cells = b"1,1 2 3 4" if b"timestamp" in header else b"1 2 3 4"
    assert ids(trace_file(header + b"\n" + cells + b"\n", "log.csv"), block_tokens=4) == [(0,)]


@pytest.mark.parametrize(("times", "line"), [((10, None, 20), 2), ((None, 10), 2)])
def test_times_in_some_lines_only_are_refused_with_the_first_line_that_differs(
    trace_file: Write, times: tuple[int | None, ...], line: int
) -> None:
    log = trace_file(rows(*({"token_ids": [1], "timestamp": time} for time in times)))
    with pytest.raises(TraceError, match=rf"line {line}: .*; a timestamp in every line or in none accepted"):
        converted(log)


def test_csv_takes_token_ids_as_a_json_list_too(trace_file: Write) -> None:
    log = trace_file(b'token_ids\n"[1, 2, 3, 4]"\n1 2 3 4\n', "log.csv")
    assert ids(log, block_tokens=2) == [(0, 1), (0, 1)]


def test_a_log_without_times_has_one_request_a_second(trace_file: Write) -> None:
    conversion = Conversion([trace_file(rows(*[{"token_ids": [1]}] * 3))])
    assert [request.timestamp_ms for request in conversion] == [0, 1_000, 2_000]
    assert conversion.without_times


def test_bailians_blocks_are_chained_and_its_seconds_become_milliseconds(trace_file: Write) -> None:
    log = trace_file(
        rows(
            {
                "chat_id": 7,
                "parent_chat_id": -1,
                "timestamp": 61.5,
                "input_length": 48,
                "hash_ids": [5, 6, 5],
                "turn": 1,
            },
            {"chat_id": 8, "parent_chat_id": 7, "timestamp": 62.25, "input_length": 40, "hash_ids": [5, 6, 9]},
            {"chat_id": 9, "parent_chat_id": 8, "timestamp": 63, "input_length": 32, "hash_ids": [6, 5]},
        )
    )
    requests = converted(log)
    assert [request.hash_ids for request in requests] == [(0, 1, 2), (0, 1), (3, 4)]
    assert [request.timestamp_ms for request in requests] == [0, 750, 1_500]
    assert [request.session_id for request in requests] == [7, 7, 7]


def test_lmcaches_look_ups_are_told_apart_by_model(trace_file: Write) -> None:
    look_up = {"timestamp": 1.0, "chunk_size": 256, "seq_len": 600, "chunk_hashes": ["0xa", "0xb"], "dtypes": []}
    log = trace_file(
        rows({**look_up, "model_name": "a"}, {**look_up, "model_name": "b"}, {**look_up, "model_name": "a"})
    )
    conversion = Conversion([log])
    assert conversion.block_tokens == 256
    assert [request.hash_ids for request in conversion] == [(0, 1), (2, 3), (0, 1)]


def test_look_ups_of_two_sizes_of_chunks_are_refused(trace_file: Write) -> None:
    look_up = {"timestamp": 1.0, "seq_len": 600, "chunk_hashes": ["0xa", "0xb"]}
    log = trace_file(rows({**look_up, "chunk_size": 256}, {**look_up, "chunk_size": 128}))
    with pytest.raises(TraceError, match=r"line 2: chunk_size is 128, and 256 in the first line"):
        converted(log)


def stored(blocks: list[Any], parent: Any, **fields: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": blocks,
        "parent_block_hash": parent,
        "token_ids": [],
        "block_size": 16,
    }
    return {**event, "lora_id": None, "medium": "GPU", "lora_name": None, **fields}


def batch(at_s: float, *events: Any) -> dict[str, Any]:
    return {"ts": at_s, "events": list(events)}


def test_a_chain_of_blocks_that_grows_without_a_pause_is_one_request_and_after_a_pause_the_next(
    trace_file: Write,
) -> None:
    log = trace_file(
        rows(
            batch(10.0, stored([1, 2], None)),
            batch(10.5, stored([3], 2), stored([8], 1)),
            batch(12.0, stored([4], 3)),
            batch(30.0, stored([5], 4)),
        )
    )
    requests = converted(log)
    assert [request.hash_ids for request in requests] == [(0, 1, 2, 3), (0, 4), (0, 1, 2, 3, 5)]
    assert [request.timestamp_ms for request in requests] == [0, 500, 20_000]
    assert [request.input_length for request in requests] == [64, 32, 80]


def test_what_was_loaded_or_belongs_to_another_group_is_not_a_request(trace_file: Write) -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    log = trace_file(
        rows(batch(1.0, stored([1], None), stored([1], None, medium="CPU"), stored([9], None, group_idx=1), removed))
    )
    assert ids(log) == [(0,)]


def test_a_request_that_computes_again_what_an_earlier_one_had_goes_on_when_that_one_is_over(trace_file: Write) -> None:
    again = (batch(0.0, stored([1], None)), batch(1.5, stored([1], None)), batch(2.1, stored([2], 1)))
    assert ids(trace_file(rows(*again))) == [(0,), (0, 1)]


def test_events_as_vllm_encodes_them_are_read_too(trace_file: Write) -> None:
    event = ["BlockStored", [1, 2], None, [0] * 32, 16, None, "GPU"]
    log = trace_file(rows([1.0, [event, ["AllBlocksCleared"]], 0]))
    assert ids(log) == [(0, 1)]


def test_events_whose_beginning_was_missed_are_left_out_and_counted(
    trace_file: Write, caplog: pytest.LogCaptureFixture
) -> None:
    log = trace_file(rows(batch(1.0, stored([5], 4), stored([1], None))))
    assert ids(log) == [(0,)]
    assert "left out 1 events" in caplog.text


def test_blocks_that_follow_themselves_are_refused(trace_file: Write) -> None:
    log = trace_file(rows(batch(1.0, stored([1], None), stored([2, 1], 1))))
    with pytest.raises(TraceError, match="follows itself"):
        converted(log)


@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl.gz", "lmcache_miniswe_b16.jsonl.gz"])
def test_a_real_trace_converted_has_the_same_hits_as_before(traces: Traces, name: str, tmp_path: Path) -> None:
    before = Trace(traces / name)
    conversion = Conversion([str(traces / name)])
    out = tmp_path / "out.jsonl.zst"
    write_trace(out, conversion, {"block_size": conversion.block_tokens})
    after = Trace(out, strict=True)
    whole = [
        msgspec.structs.replace(request, hash_ids=request.hash_ids[: request.input_length // before.block_tokens])
        for request in before
    ]
    assert measure(after) == measure(whole)


def test_blocks_of_a_trace_can_be_merged_and_stay_chained(traces: Traces) -> None:
    merged = Conversion([str(traces / "lmcache_miniswe_b16.jsonl.gz")], block_tokens=256)
    extent = measure(merged)
    assert extent.hit_ratio(extent.best_hits) == pytest.approx(0.9353, abs=5e-5)


def test_logs_that_were_rotated_become_one_trace(trace_file: Write) -> None:
    look_up = {"chunk_size": 16, "seq_len": 32}
    one = trace_file(rows({"timestamp": 5.0, "chunk_hashes": ["a", "b"], **look_up}), "one")
    two = trace_file(rows({"timestamp": 6.0, "chunk_hashes": ["a", "c"], **look_up}), "two")
    assert [(request.timestamp_ms, request.hash_ids) for request in converted(one, two)] == [
        (0, (0, 1)),
        (1_000, (0, 2)),
    ]
    with pytest.raises(TraceError, match=r"one, line 1: 1\.000 s earlier than the request before it"):
        converted(two, one)


def test_blocks_of_fewer_tokens_than_the_logs_are_refused(trace_file: Write) -> None:
    log = trace_file(rows({"timestamp": 1.0, "chunk_hashes": [], "chunk_size": 256, "seq_len": 1}))
    with pytest.raises(ConfigError, match=r"--block-tokens 384: a block of .* has 256 tokens; a multiple"):
        converted(log, block_tokens=384)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"\x00\xff\n", "its first line is of no known format"),
        (b'{"prompt": "hello"}\n', "its first line is of no known format"),
        (b'{"token_ids": [1, -2]}\n', r"line 1: Expected `int` >= 0"),
        (b'{"token_ids": null}\n', "line 1: no token_ids in it"),
        (b'{"token_ids": [99999999999999999999]}\n', "line 1"),
        (b"token_ids\n1 two 3\n", "line 2: .*token_ids with spaces"),
        (b'{"chat_id": 1, "hash_ids": [1]}\n', "line 1: .*timestamp"),
        (b'{"chunk_hashes": [], "chunk_size": 0}\n', "line 1"),
        (b'{"events": 5}\n', "line 1: .*KV events"),
        (b'{"ts": 1.0, "events": [{"type": "BlockStored", "block_hashes": 1}]}\n', "line 1: .*KV events"),
        (b'{"ts": 1.0, "events": []}\n', "no BlockStored of the GPU in it"),
        (b'{"token_ids": [1], "timestamp": 5}\n{"token_ids": [1], "timestamp": 1}\n', "line 2: .* earlier"),
    ],
)
def test_a_log_that_cannot_be_read_is_refused_with_file_line_and_remedy(
    trace_file: Write, content: bytes, message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        converted(trace_file(content))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_that_is_named_is_not_guessed(trace_file: Write, kind: str) -> None:
    with pytest.raises(TraceError):
        converted(trace_file(b'{"other": 1}\n'), kind=kind)
