"""Logs of requests in the formats of others, read as the requests of a trace.

| format | what one line holds | tokens of a block |
|---|---|---|
| `tokens` | the token ids of a prompt, in CSV or JSON | as asked for |
| `bailian` | a request of the usage traces of Qwen-Bailian, github.com/alibaba-edu/qwen-bailian-usagetraces-anon | 16 |
| `lmcache` | a look-up that an LMCache server wrote with `--lookup-hash-log-dir` | its `chunk_size` |
| `vllm` | a batch of vLLM's KV events, as JSON | its `block_size` |
| `mooncake` | a request of a trace | the trace's |

Whatever a line calls a block, the block's id is made anew here: it stands for the block together with all blocks before
it. So blocks that were hashed each for itself become chained, and blocks that were chained stay so. Several blocks of
the source may become one. A block that is only partly filled is dropped, because no engine stores one.
"""

import csv
import logging
import sys
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import xxhash

from kvtier.errors import ConfigError, TraceError
from kvtier.hints import Hint, IgnoredHints, hint_of
from kvtier.remedies import Remedy
from kvtier.settings import foreign
from kvtier.tools.replay.traces import Request, Trace, trace_lines

logger = logging.getLogger(__name__)

TOKENS_BLOCK = 16  # What vLLM hashes by default.
BAILIAN_BLOCK = 16
SAME_REQUEST_S = 2.0  # Between two events of one request: a step of vLLM's takes far less, and a person far more.
TOKEN_MAX = (1 << 63) - 1

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Hash = int | str
_T = TypeVar("_T")


class Logged(NamedTuple):
    """One request as its source tells it."""

    line: int
    timestamp_ms: float | None  # None: the source has no times.
    blocks: Sequence[Hashable]  # Whole ones only, first to last; equal blocks are equal values.
    input_length: int
    output_length: int = 0
    session_id: int | str | None = None
    hint: Hint | None = None


class Log(NamedTuple):
    """One file of a source: how many tokens a block has, and the requests, which are read once."""

    path: str
    block_tokens: int
    requests: Iterator[Logged]


class Conversion:
    """The requests of one or several logs as those of one trace, in the order of the files. Iterate once.

    Raises `ConfigError` if the blocks cannot have `block_tokens`, and `TraceError` for what a file holds: it names file
    and line, and what was expected.
    """

    def __init__(self, paths: Sequence[str], *, kind: str | None = None, block_tokens: int | None = None) -> None:
        """`kind`: one of `FORMATS`; None: seen from the first line. `block_tokens`: None for the source's own."""
        self._paths = list(paths)
        self.kind = kind
        self._numbers: dict[tuple[int, Hashable], int] = {}
        first = self._open(self._paths[0], block_tokens)
        self.block_tokens = block_tokens or first.block_tokens
        self.without_times = False
        self._first_ms = self._last_ms = 0.0
        self.requests = self.blocks = 0  # Given so far.
        self._logs = chain((first,), (self._open(path, self.block_tokens) for path in self._paths[1:]))

    def __iter__(self) -> Iterator[Request]:
        for log in self._logs:
            together = self._together(log)
            for logged in log.requests:
                now_ms = self._time(log.path, logged)
                ids = self._ids(logged.blocks, together)
                self.requests += 1
                self.blocks += len(ids)
                yield Request(
                    timestamp_ms=int(now_ms) if now_ms.is_integer() else now_ms,
                    input_length=logged.input_length,
                    output_length=logged.output_length,
                    hash_ids=ids,
                    session_id=logged.session_id,
                    hint=logged.hint,
                )

    def _time(self, path: str, logged: Logged) -> float:
        """Return when a request came, in milliseconds since the first; one a second where there are no times."""
        given_ms = logged.timestamp_ms
        if not self.requests:
            self.without_times, self._first_ms = given_ms is None, given_ms or 0.0
        if self.without_times != (given_ms is None):
            there = "a timestamp, and none before" if self.without_times else "no timestamp, and one before"
            raise TraceError(f"{path}, line {logged.line}: {there}; a timestamp in every line or in none accepted")
        now_ms = self.requests * 1_000.0 if given_ms is None else round(float(given_ms - self._first_ms), 3)
        if now_ms < self._last_ms:
            raise TraceError(
                f"{path}, line {logged.line}: {(self._last_ms - now_ms) / 1_000:,.3f} s earlier than the request "
                "before it; requests in the order in which they came accepted: sort the file, or the files"
            )
        self._last_ms = now_ms
        return now_ms

    def _open(self, path: str, block_tokens: int | None) -> Log:
        begin = list(islice(trace_lines(path), 1))
        if not begin:
            raise TraceError(f"{path}: it is empty; one of {', '.join(FORMATS)} accepted")
        self.kind = self.kind or _guessed(path, begin[0][1])
        return FORMATS[self.kind](path, begin[0][1], block_tokens)

    def _together(self, log: Log) -> int:
        """Return how many blocks of a log make one of the trace."""
        if self.block_tokens % log.block_tokens:
            raise ConfigError(
                f"--block-tokens {self.block_tokens}: a block of {log.path} has {log.block_tokens} tokens; "
                "a multiple of that accepted"
            )
        return self.block_tokens // log.block_tokens

    def _ids(self, blocks: Sequence[Hashable], together: int) -> tuple[int, ...]:
        ids: list[int] = []
        before = -1
        for end in range(together, len(blocks) + 1, together):
            block = blocks[end - 1] if together == 1 else tuple(blocks[end - together : end])
            before = self._numbers.setdefault((before, block), len(self._numbers))
            ids.append(before)
        return tuple(ids)


def _guessed(path: str, line: bytes) -> str:
    try:
        value = foreign(msgspec.json.decode, line)
    except ValueError:
        value = None
    if value is None or isinstance(value, str):  # A header of one name in quotes is JSON, too.
        value = dict.fromkeys(_header(line)) if b"token_ids" in line else None
    if isinstance(value, list):
        return "vllm"
    if isinstance(value, dict):
        for field, name in _FIELDS.items():
            if field in value:
                return name
    raise TraceError(
        f"{path}: its first line is of no known format; {', '.join(FORMATS)} accepted, and --from says which it is"
    )


_FIELDS = {
    "chat_id": "bailian",
    "chunk_hashes": "lmcache",
    "events": "vllm",
    "token_ids": "tokens",
    "prompt_token_ids": "tokens",
    "meta": "mooncake",
    "hash_ids": "mooncake",
}
"""A field that only lines of one format have, in the order of asking."""


def _decoded(path: str, line_type: type[_T]) -> Iterator[tuple[int, _T]]:
    decode = msgspec.json.Decoder(line_type).decode
    for number, line in trace_lines(path):
        try:
            yield number, foreign(decode, line)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}; given {line[:60].decode(errors='replace')!r}") from error


class _Tokens(msgspec.Struct):
    token_ids: list[_Count] | None = None
    prompt_token_ids: list[_Count] | None = None  # As OpenAI's and vLLM's servers call them.
    timestamp: _Count | Annotated[float, msgspec.Meta(ge=0)] | None = None
    output_length: _Count = 0
    session_id: int | str | None = None
    kvtier: Any = None  # A hint, as a line of a trace has it.


def _tokens(path: str, first: bytes, block_tokens: int | None) -> Log:
    size = block_tokens or TOKENS_BLOCK
    rows = _decoded(path, _Tokens) if first.lstrip().startswith(b"{") else _csv_rows(path, first)
    ignored = IgnoredHints()
    return Log(path, size, (_from_tokens(path, number, row, size, ignored) for number, row in rows))


def _from_tokens(path: str, number: int, row: _Tokens, size: int, ignored: IgnoredHints) -> Logged:
    tokens = row.token_ids if row.prompt_token_ids is None else row.prompt_token_ids
    if tokens is None:
        raise TraceError(f"{path}, line {number}: no token_ids in it; expected the ids of the whole prompt")
    try:
        packed = memoryview(array("q", tokens)).cast("B")
    except OverflowError as error:
        raise TraceError(f"{path}, line {number}: a token id above {TOKEN_MAX}; expected a tokenizer's ids") from error
    whole = range(0, len(tokens) // size * size * 8, size * 8)
    blocks = [xxhash.xxh3_128_digest(packed[begin : begin + size * 8]) for begin in whole]
    hint = hint_of(row.kvtier, ignored)
    return Logged(number, row.timestamp, blocks, len(tokens), row.output_length, row.session_id, hint)


def _csv_rows(path: str, first: bytes) -> Iterator[tuple[int, _Tokens]]:
    csv.field_size_limit(sys.maxsize)
    header = _header(first)
    text = ((number, line.decode(errors="replace")) for number, line in trace_lines(path))
    next(text)
    for number, line in text:
        try:
            yield number, _csv_row(header, next(csv.reader((line,), strict=True)))
        except (csv.Error, msgspec.ValidationError) as error:
            raise TraceError(
                f"{path}, line {number}: {error}; expected token_ids with spaces between them, and numbers, "
                "all in one line"
            ) from error


def _csv_row(header: Sequence[str], cells: Sequence[str]) -> _Tokens:
    if any(cells[len(header) :]):  # As where commas stand between the ids: nothing is thrown away unsaid.
        raise csv.Error(f"{len(cells)} cells, and {len(header)} names in the first line")
    row = {name: cell for name, cell in zip(header, cells, strict=False) if cell}
    listed = [row.pop(name, "") for name in ("token_ids", "prompt_token_ids")]
    tokens = (listed[1] or listed[0]).replace(",", " ").strip("[] ").split()
    return msgspec.convert({**row, "token_ids": tokens}, _Tokens, strict=False)


def _header(line: bytes) -> list[str]:
    return [name.strip().lstrip("\ufeff") for name in next(csv.reader((line.decode(errors="replace"),)))]


class _Bailian(msgspec.Struct):
    chat_id: int
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    hash_ids: list[_Hash]
    output_length: _Count = 0
    parent_chat_id: int = -1


def _bailian(path: str, _first: bytes, _block_tokens: int | None) -> Log:
    return Log(path, BAILIAN_BLOCK, _bailian_requests(path))


def _bailian_requests(path: str) -> Iterator[Logged]:
    session: dict[int, int] = {}  # Chat -> the first chat of its conversation.
    for number, row in _decoded(path, _Bailian):
        session[row.chat_id] = session.get(row.parent_chat_id, row.chat_id)
        yield Logged(
            number,
            row.timestamp * 1_000,
            row.hash_ids[: row.input_length // BAILIAN_BLOCK],
            row.input_length,
            row.output_length,
            session[row.chat_id],
        )


class _LookUp(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    chunk_hashes: list[_Hash]
    chunk_size: _Positive
    seq_len: _Count
    model_name: str = ""


def _lmcache(path: str, first: bytes, _block_tokens: int | None) -> Log:
    try:
        size = foreign(msgspec.json.Decoder(_LookUp).decode, first).chunk_size
    except ValueError as error:
        raise TraceError(f"{path}, line 1: {error}; expected a look-up of LMCache's") from error
    return Log(path, size, _look_ups(path, size))


def _look_ups(path: str, size: int) -> Iterator[Logged]:
    for number, row in _decoded(path, _LookUp):
        if row.chunk_size != size:
            raise TraceError(
                f"{path}, line {number}: chunk_size is {row.chunk_size}, and {size} in the first line; "
                "look-ups of one size of chunks accepted: convert them apart"
            )
        whole = row.chunk_hashes[: row.seq_len // size]
        blocks = [(row.model_name, block) for block in whole] if row.model_name else whole
        yield Logged(number, row.timestamp * 1_000, blocks, row.seq_len)


class _Stored(msgspec.Struct):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    block_size: _Positive
    medium: str | None = None
    group_idx: int | None = None
    session_id: str | None = None

    @property
    def computed(self) -> bool:
        """Whether a model computed these blocks: they came to the GPU, and in the first group, which has all tokens."""
        return self.medium in (None, "GPU") and not self.group_idx and bool(self.block_hashes)


_IN_ARRAY = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
"""The fields of an event where vLLM writes it as an array, as it did at first."""


def _vllm(path: str, _first: bytes, _block_tokens: int | None) -> Log:
    stored = _stored_events(path)
    begun = next(stored, None)
    if begun is None:
        raise TraceError(f"{path}: no BlockStored of the GPU in it; expected batches of vLLM's KV events, one a line")
    size = begun[2].block_size
    return Log(path, size, _event_requests(path, chain((begun,), stored), size))


class _Batch(msgspec.Struct):
    ts: float
    events: list[Any]


class _ArrayBatch(_Batch, array_like=True):
    """The same, as vLLM itself encodes it."""


def _stored_events(path: str) -> Iterator[tuple[int, float, _Stored]]:
    """Give line, time in seconds and event wherever blocks were computed."""
    for number, line in trace_lines(path):
        try:
            kind: type[_Batch] = _ArrayBatch if line.lstrip().startswith(b"[") else _Batch
            batch = foreign(msgspec.json.Decoder(kind).decode, line)
            for event in map(_as_object, batch.events):
                if event.get("type") == "BlockStored" and (stored := msgspec.convert(event, _Stored)).computed:
                    yield number, batch.ts, stored
        except ValueError as error:
            raise TraceError(
                f"{path}, line {number}: {error}; expected a batch of vLLM's KV events, as JSON: "
                '{"ts": seconds, "events": [{"type": "BlockStored", ...}]}'
            ) from error


def _as_object(event: Any) -> dict[str, Any]:
    if isinstance(event, list):
        return dict(zip(_IN_ARRAY, msgspec.convert(event, list[Any]), strict=False))
    return msgspec.convert(event, dict[str, Any])


class _Growing:
    """A request whose blocks are still being told."""

    def __init__(self, line: int, at_s: float, session_id: str | None) -> None:
        self.line, self.begun_s, self.last_s = line, at_s, at_s
        self.tail: _Hash = ""
        self.session_id = session_id

    def logged(self, path: str, before: Mapping[_Hash, _Hash | None], size: int) -> Logged:
        blocks: list[_Hash] = []
        block: _Hash | None = self.tail
        while block is not None:
            blocks.append(block)
            block = before[block]
            if len(blocks) > len(before):
                raise TraceError(f"{path}, line {self.line}: block {self.tail} follows itself; expected vLLM's events")
        blocks.reverse()
        return Logged(self.line, self.begun_s * 1_000, blocks, len(blocks) * size, 0, self.session_id)


def _event_requests(path: str, events: Iterable[tuple[int, float, _Stored]], size: int) -> Iterator[Logged]:
    """Give a request for each run of events in which one chain of blocks grows without a pause."""
    before: dict[_Hash, _Hash | None] = {}  # Block -> the one before it.
    growing: dict[_Hash, _Growing] = {}  # By the last block.
    begun: deque[_Growing] = deque()
    left_out = 0
    for line, at_s, stored in events:
        while begun and at_s - begun[0].last_s > SAME_REQUEST_S:
            over = begun.popleft()
            if growing.get(over.tail) is over:  # Not a later one that ends with the same block.
                del growing[over.tail]
            yield over.logged(path, before, size)
        parent = stored.parent_block_hash
        if parent is not None and parent not in before:
            left_out += 1
            continue
        before.update(zip(stored.block_hashes, (parent, *stored.block_hashes), strict=False))
        request = growing.pop(parent, None) if parent is not None else None
        if request is None:
            request = _Growing(line, at_s, stored.session_id)
            begun.append(request)
        request.tail, request.last_s = stored.block_hashes[-1], at_s
        growing[request.tail] = request
    for request in begun:
        yield request.logged(path, before, size)
    if left_out:
        logger.warning(
            "%s: left out %s events: what their blocks follow was stored before the first line; record from the "
            "engine's start; see %s",
            path,
            f"{left_out:,}",
            Remedy.LEFT_OUT,
        )


def _mooncake(path: str, _first: bytes, _block_tokens: int | None) -> Log:
    trace = Trace(path)
    size = trace.block_tokens
    return Log(path, size, (_from_trace(number, request, size) for number, request in enumerate(trace, 1)))


def _from_trace(number: int, request: Request, size: int) -> Logged:
    whole = request.hash_ids[: request.input_length // size]
    return Logged(
        number,
        request.timestamp_ms,
        whole,
        request.input_length,
        request.output_length,
        request.session_id,
        request.hint,
    )


FORMATS: dict[str, Callable[[str, bytes, int | None], Log]] = {
    "tokens": _tokens,
    "bailian": _bailian,
    "lmcache": _lmcache,
    "vllm": _vllm,
    "mooncake": _mooncake,
}
"""How a file of each format is opened: from its name, its first line and the tokens of a block that are wanted."""
