import gzip
import os

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import TraceError
from kvtier.tools.replay.traces import Trace, TraceRequest

LINES = (
    b'{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    b'{"timestamp": 2.5, "input_length": 512, "output_length": 0, "hash_ids": [0], "session_id": "a"}\n'
)

REQUESTS = [TraceRequest(0, 1030, 5, (0, 1, 2)), TraceRequest(2.5, 512, 0, (0,), "a")]
ZSTD = zstandard.ZstdCompressor()
META = b'{"meta": {"block_size": 16, "source": "here"}}\n'

COMPRESSIONS = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": ZSTD.compress,
    "zstd_stream": lambda content: (stream := ZSTD.compressobj()).compress(content) + stream.flush(),
}
compressed = pytest.mark.parametrize("compress", COMPRESSIONS.values(), ids=COMPRESSIONS.keys())


@compressed
def test_a_trace_is_read_whatever_it_is_compressed_with_and_called(trace_file, compress):
    trace = Trace(trace_file(compress(META + LINES), "trace.dat"))
    assert list(trace) == REQUESTS
    assert list(trace) == REQUESTS  # Each iteration is a separate pass.
    assert (trace.block_tokens, trace.meta) == (16, {"block_size": 16, "source": "here"})


@compressed
def test_compressed_streams_that_follow_each_other_are_one_trace(trace_file, compress):
    first, second = LINES[:100], LINES[100:]
    assert list(Trace(trace_file(compress(first) + compress(second)))) == REQUESTS


@pytest.mark.parametrize(
    "content",
    [
        LINES.rstrip(b"\n"),
        LINES.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + LINES,
        b"\n\n" + LINES.replace(b"\n", b"\n  \n"),
        LINES.replace(b'"timestamp"', b'"chat_id": 7, "type": "text", "timestamp"'),
    ],
    ids=["no_last_newline", "carriage_returns", "byte_order_mark", "blank_lines", "further_fields"],
)
def test_harmless_changes_to_a_file_are_accepted(trace_file, content):
    assert list(Trace(trace_file(content))) == REQUESTS


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
@pytest.mark.parametrize("before", [b"", META])
def test_a_limit_counts_requests(trace_file, before, limit):
    assert list(Trace(trace_file(before + LINES), limit=limit)) == REQUESTS[:limit]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1', "Input data was truncated"),
        (b'{"timestamp": 0, "input_length": 1030, "output_length": 5}', "missing required field `hash_ids`"),
        (b'{"timestamp": 0, "input_length": 1030, "hash_ids": [0]}', "missing required field `output_length`"),
        (b'{"timestamp": -1, "input_length": 1, "output_length": 5, "hash_ids": []}', ">= 0 - at `$.timestamp`"),
        (b'{"timestamp": 0, "input_length": -1, "output_length": 5, "hash_ids": []}', ">= 0 - at `$.input_length`"),
        (b'{"timestamp": 0, "input_length": 1, "output_length": -5, "hash_ids": []}', ">= 0 - at `$.output_length`"),
        (b'{"timestamp": 0, "input_length": 1, "output_length": 5, "hash_ids": [null]}', "`$.hash_ids[0]`"),
        (b'{"timestamp": 0, "input_length": 1, "output_length": 5, "hash_ids": ["a"]}', "Expected `int`, got `str`"),
        (b'{"timestamp": NaN, "input_length": 1, "output_length": 5, "hash_ids": []}', "malformed"),
        (b'{"timestamp": 1e999, "input_length": 1, "output_length": 5, "hash_ids": []}', "out of range"),
        (b'{"timestamp": "\xff", "input_length": 1, "output_length": 5, "hash_ids": []}', "`$.timestamp`"),
        (b'{"session_id": "\xff"}', "utf-8"),
        (b"[0, 1, 2]", "Expected `object`, got `array`"),
        (b'{"meta": {"block_size": 16}}', "missing required field"),
        (b'{"further": ' * 10_000, "nested too deeply"),
        (b"\x00\x01\x02", "malformed"),
    ],
)
def test_a_bad_line_is_named_by_number_with_what_is_wrong_and_what_was_expected(trace_file, line, complaint):
    path = trace_file(LINES + b"\n" + line + b"\n" + LINES)
    requests = iter(Trace(path))
    assert [next(requests), next(requests)] == REQUESTS
    with pytest.raises(TraceError) as refusal:
        next(requests)
    message = str(refusal.value)
    assert message.startswith(f"{path}, line 4: ")
    assert complaint in message
    assert 'expected one JSON object a line, such as {"timestamp": 0, ' in message
    assert "\n" not in message


@pytest.mark.parametrize("size", [b"0", b"-512", b'"512"', b"null", b"true", b"0.5"])
def test_an_invalid_block_size_is_rejected(trace_file, size):
    with pytest.raises(TraceError, match=r"line 1: meta.block_size is .*; expected tokens a block"):
        Trace(trace_file(b'{"meta": {"block_size": ' + size + b"}}\n" + LINES))


@pytest.mark.parametrize("name", ["gzip", "zstd", "zstd_stream"])
def test_a_compressed_trace_that_is_cut_short_is_an_error_wherever_it_ends(trace_file, name):
    content = COMPRESSIONS[name](LINES)
    for length in range(4, len(content)):
        with pytest.raises(TraceError, match=r"line [123]: the compressed file is cut short or damaged"):
            list(Trace(trace_file(content[:length])))


@pytest.mark.parametrize("content", [b"", b"\n \n", META, b"\xef\xbb\xbf"])
def test_a_file_without_requests_is_an_error_at_once(trace_file, content):
    with pytest.raises(TraceError, match="no requests in it; expected one a line"):
        Trace(trace_file(content))


def test_a_file_without_lines_is_rejected_early(trace_file, monkeypatch):
    monkeypatch.setattr("kvtier.tools.replay.traces.LINE_BYTES_MAX", 1 << 20)
    with pytest.raises(TraceError, match="line 1: longer than 1,048,576 bytes"):
        Trace(trace_file(b"x" * (4 << 20)))


def test_a_path_that_is_not_a_file_is_an_error_at_once(tmp_path):
    with pytest.raises(TraceError, match=r"absent\.jsonl: No such file"):
        Trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="no regular file"):
        Trace(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="no regular file"):
        Trace(tmp_path / "pipe")


@given(content=st.binary(max_size=200))
def test_any_bytes_are_requests_or_an_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="any"):
        list(Trace(path))
