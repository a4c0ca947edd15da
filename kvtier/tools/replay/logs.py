"""Logs of prompts as token ids, in JSON lines, read as the requests of a trace.

A block's id stands for its tokens together with all tokens before it. The last partial block of a prompt is dropped,
because no LLM engine stores one.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import xxhash

from kvtier.errors import TraceError
from kvtier.settings import foreign
from kvtier.settings.hints import IgnoredHints, hint_of
from kvtier.tools.replay.traces import TraceRequest, trace_lines

TOKEN_MAX = (1 << 63) - 1

_Count = Annotated[int, msgspec.Meta(ge=0)]


class LoggedPrompt(msgspec.Struct):
    """One line of a log."""

    token_ids: list[_Count] | None = None
    prompt_token_ids: list[_Count] | None = None  # The name that the servers of OpenAI and vLLM use.
    timestamp: _Count | Annotated[float, msgspec.Meta(ge=0)] | None = None  # Milliseconds.
    output_length: _Count = 0
    session_id: int | str | None = None
    kvtier: Any = None  # A hint, as in a line of a trace.


class Conversion:
    """The requests of logs as those of one trace, in the order of the files. Iterate once.

    Raises `TraceError` for a line that cannot be used: it names file and line, and what is expected.
    """

    def __init__(self, paths: Sequence[str], block_tokens: int) -> None:
        self._paths = list(paths)
        self._block_tokens = block_tokens
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._ignored = IgnoredHints()
        self._first_ms = self._last_ms = 0.0
        self.without_times = False
        self.requests = self.blocks = 0  # Yielded so far.

    def __iter__(self) -> Iterator[TraceRequest]:
        for path in self._paths:
            for where, prompt in _prompts(path):
                now_ms = self._time(where, prompt.timestamp)
                tokens = _tokens(where, prompt)
                ids = self._ids(tokens)
                self.requests += 1
                self.blocks += len(ids)
                yield TraceRequest(
                    timestamp_ms=int(now_ms) if now_ms.is_integer() else now_ms,
                    input_length=len(tokens),
                    output_length=prompt.output_length,
                    hash_ids=ids,
                    session_id=prompt.session_id,
                    hint=hint_of(prompt.kvtier, self._ignored),
                )

    def _time(self, where: str, given_ms: float | None) -> float:
        """Return the milliseconds since the first request; a log without times has one request a second."""
        if not self.requests:
            self.without_times, self._first_ms = given_ms is None, given_ms or 0.0
        if self.without_times != (given_ms is None):
            there = "a timestamp, and none before" if self.without_times else "no timestamp, and one before"
            raise TraceError(f"{where}: {there}; a timestamp in every line or in none accepted")
        now_ms = self.requests * 1_000.0 if given_ms is None else round(float(given_ms - self._first_ms), 3)
        if now_ms < self._last_ms:
            raise TraceError(
                f"{where}: {(self._last_ms - now_ms) / 1_000:,.3f} s earlier than the request before it; requests in "
                "the order in which they came accepted: sort the file, or the files"
            )
        self._last_ms = now_ms
        return now_ms

    def _ids(self, tokens: "array[int]") -> tuple[int, ...]:
        packed, size = memoryview(tokens).cast("B"), 8 * self._block_tokens
        ids: list[int] = []
        before = -1
        for begin in range(0, len(packed) // size * size, size):
            block = xxhash.xxh3_128_digest(packed[begin : begin + size])
            before = self._numbers.setdefault((before, block), len(self._numbers))
            ids.append(before)
        return tuple(ids)


def _tokens(where: str, prompt: LoggedPrompt) -> "array[int]":
    tokens = prompt.token_ids if prompt.prompt_token_ids is None else prompt.prompt_token_ids
    if tokens is None:
        raise TraceError(f"{where}: no token_ids in it; expected the ids of the whole prompt")
    try:
        return array("q", tokens)
    except OverflowError as error:
        raise TraceError(f"{where}: a token id above {TOKEN_MAX}; expected a tokenizer's ids") from error


def _prompts(path: str) -> Iterator[tuple[str, LoggedPrompt]]:
    """Yield the prompts of a log, each with its place."""
    decode = msgspec.json.Decoder(LoggedPrompt).decode
    where = ""
    for number, line in trace_lines(path):
        where = f"{path}, line {number}"
        try:
            yield where, foreign(decode, line)
        except ValueError as error:
            raise TraceError(
                f"{where}: {error}; given {line[:60].decode(errors='replace')!r}, expected JSON lines with token_ids"
            ) from error
    if not where:
        raise TraceError(f"{path}: it is empty; token ids as JSON lines accepted")
