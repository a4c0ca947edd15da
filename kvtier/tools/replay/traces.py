"""Traces of LLM requests in Mooncake's format: one JSON object a line, plain or in gzip or zstd.

A file is read as a stream, once for each pass; compression is recognised by the first bytes. The format is that of the
traces in https://github.com/kvcache-ai/Mooncake, "FAST25-release", optionally after one line `{"meta": {...}}`.

A wrong file parses as well, so each reader checks for three faults: ids that are not chained promise hits that no
engine can have; lengths must fit the number of ids; times must not be seconds.
"""

import codecs
import json
import logging
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any

import msgspec
import zstandard

from kvtier.errors import Remedy, TraceError
from kvtier.settings import foreign
from kvtier.settings.hints import Hint

BLOCK_TOKENS = 512  # Mooncake's own; another size is in the meta line.
HINT = "kvtier"  # The field of a line with its hint, as of a request to vLLM.
LINE_BYTES_MAX = 16 << 20  # A prompt of a million tokens takes 1.3 MB; a file with longer lines is not a trace.
_READ_BYTES = 64 << 10  # Of the file at once; decompressed, a trace is about 50 times as long.

_NOT_NEGATIVE = msgspec.Meta(ge=0)
_EXAMPLE = '{"timestamp": 0, "input_length": 1030, "output_length": 52, "hash_ids": [0, 1, 2]}'
IDS_MAX = 1 << 21  # Remembered, at about 100 bytes each. Wrong ids show long before.
TOKENS_PER_S_MAX = 4e6  # Of prompts: the rate of two hundred GPUs. Real traces in seconds exceed 5 million.
REQUESTS_MIN = 100  # Fewer may be one burst.
_CHAINED = (
    "hash_ids must be chained, an id standing for its block and all blocks before it, as in [0, 1, 2] and [0, 1, 3]: "
    "hash each block together with the id before it"
)
_LENGTHS = (
    "hash_ids and input_length must fit, as 3 ids of 512 tokens fit 1,030 or 1,536: write all of a prompt's ids, and "
    'how many tokens an id stands for in a first line {{"meta": {{"block_size": {block_tokens}}}}}'
)
_HINTS = 'a hint is a table of a hint\'s fields, such as {"over": true}; without it the request counts as any other'
_NAMES = {"timestamp_ms": "timestamp", "hint": HINT}

logger = logging.getLogger(__name__)


class TraceRequest(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename=_NAMES):
    """One request of a trace. Other fields of a line are ignored."""

    timestamp_ms: Annotated[int, _NOT_NEGATIVE] | Annotated[float, _NOT_NEGATIVE]
    input_length: Annotated[int, _NOT_NEGATIVE]  # In tokens, as `output_length`.
    output_length: Annotated[int, _NOT_NEGATIVE]
    hash_ids: tuple[int, ...]
    """Prefix-chained block ids, first to last: the same id always stands for the same tokens after the same tokens.

    The last one may stand for a block that is only partly filled.
    """
    session_id: int | str | None = None
    hint: Hint | None = None


class _MetaLine(msgspec.Struct, forbid_unknown_fields=True):
    meta: dict[str, Any]


class Trace:
    """The requests of one file. Each iteration reads the file again: a pass costs time, not memory.

    An unreadable or empty file is a `TraceError` at once, a bad line when it is reached. The first whole pass also
    warns of a trace that cannot be true; it remembers about 100 bytes for each of at most `IDS_MAX` ids.
    """

    def __init__(self, path: str | os.PathLike[str], *, limit: int | None = None, checked: bool = False) -> None:
        """Read the beginning of the file. An iteration yields at most `limit` requests; `checked` omits warnings."""
        self.path = os.fspath(path)
        self.limit = limit
        self._checked = checked
        begin = list(islice(_lines(self.path), 2))
        meta = _meta(begin[0][1]) if begin else None
        if len(begin) < (1 if meta is None else 2):
            raise TraceError(f"{self.path}: no requests in it; expected one a line, such as {_EXAMPLE}")
        self._lines_before = 0 if meta is None else 1
        self.meta: Mapping[str, Any] = meta or {}
        size: Any = self.meta.get("block_size", BLOCK_TOKENS)
        if type(size) is not int or size < 1:
            raise TraceError(f"{self.path}, line 1: meta.block_size is {size!r}; expected tokens a block, at least 1")
        self.block_tokens: int = size

    def __iter__(self) -> Iterator[TraceRequest]:
        decode = msgspec.json.Decoder(TraceRequest).decode
        stop = None if self.limit is None else self._lines_before + self.limit
        check = None if self._checked else TraceCheck(self.path, self.block_tokens)
        for number, line in islice(_lines(self.path), self._lines_before, stop):
            try:
                request, wrong_hint = _request(decode, line)
            except ValueError as error:
                raise TraceError(
                    f"{self.path}, line {number}: {error}; given {_excerpt(line)}, expected one JSON object a line, "
                    f"such as {_EXAMPLE}"
                ) from error
            if check is not None:
                check.look(number, request, wrong_hint)
            yield request
        if check is not None and not self._checked:
            self._checked = True
            check.end()


def _meta(line: bytes) -> dict[str, Any] | None:
    try:
        return foreign(msgspec.json.Decoder(_MetaLine).decode, line).meta
    except ValueError:
        return None  # A request, or a line that an iteration rejects.


def _request(decode: Callable[[bytes], TraceRequest], line: bytes) -> tuple[TraceRequest, str]:
    """Return a line's request, and the fault of its hint, which is then left out: the request is valid."""
    try:
        return foreign(decode, line), ""
    except msgspec.DecodeError as error:
        try:
            table: Any = foreign(json.loads, line)  # Takes numbers that are out of msgspec's range, too.
        except ValueError:
            raise error from None
        if not (isinstance(table, dict) and HINT in table):
            raise
        return msgspec.convert({**table, HINT: None}, TraceRequest), str(error)


def _excerpt(line: bytes) -> str:
    text = line[:60].decode(errors="replace")
    return f"{text!r}{'…' if len(line) > 60 else ''}"


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number in the file, from 1."""
    number, rest = 1, b""
    try:
        for chunk in _content(path):
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            if len(rest) > LINE_BYTES_MAX:
                raise TraceError(f"{path}, line {number + len(lines)}: longer than {LINE_BYTES_MAX:,} bytes; no trace")
            for line in lines:
                if line and not line.isspace():
                    yield number, line
                number += 1
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise TraceError(f"{path}, line {number}: the compressed file is cut short or damaged ({error})") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; expected a trace's file") from error
    if rest and not rest.isspace():
        yield number, rest


def _content(path: str) -> Iterator[bytes]:
    """Yield the file's text in pieces, decompressed, without a byte-order mark."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # Before opening: to open a pipe waits for its writer.
        raise OSError("it is no regular file, and a trace is read more than once")
    with open(path, "rb") as file:
        first = file.read(_READ_BYTES)
        pieces = chain((first,), iter(partial(file.read, _READ_BYTES), b""))
        plain: Iterator[bytes] = pieces
        if first.startswith(b"\x1f\x8b"):
            plain = _decompressed(pieces, partial(zlib.decompressobj, wbits=31))  # The largest window, gzip's header.
        elif first.startswith(b"\x28\xb5\x2f\xfd"):
            plain = _decompressed(pieces, zstandard.ZstdDecompressor().decompressobj)
        yield next(plain, b"").removeprefix(codecs.BOM_UTF8)
        yield from plain


def _decompressed(pieces: Iterable[bytes], new_stream: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress concatenated streams, as parallel compressors and `cat` write them."""
    stream, begun = new_stream(), False
    for piece in pieces:
        unread = piece
        while unread:
            yield stream.decompress(unread)
            unread, begun = b"", True
            if stream.eof:
                unread, stream, begun = stream.unused_data, new_stream(), False
    if begun:
        raise EOFError("its last stream has no end")


class TraceCheck:
    """The check of one pass over a trace. Remembers at most `ids_max` distinct ids; later ones are not checked."""

    def __init__(self, path: str, block_tokens: int, *, ids_max: int = IDS_MAX) -> None:
        self._path, self._block_tokens, self._ids_max = path, block_tokens, ids_max
        self._before: dict[int, int | None] = {}  # Id -> the id that it follows; None if it stands first.
        self._first: dict[str, str] = {}  # Remedy -> the fault of the first line that needs it.
        self._faults: Counter[str] = Counter()  # Lines by their remedy.
        self._requests = self._tokens = self._line = 0
        self._first_ms = self._last_ms = 0.0

    def look(self, line: int, request: TraceRequest, wrong_hint: str = "") -> None:
        if wrong_hint:
            self._note(line, wrong_hint, _HINTS)
        ids, size, tokens = request.hash_ids, self._block_tokens, request.input_length
        before = (None, *ids[:-1]) if ids else ()
        known = self._before.setdefault if len(self._before) < self._ids_max else self._before.get
        if tuple(map(known, ids, before)) != before:
            self._note(line, self._unchained(ids, before), _CHAINED)
        if not tokens // size <= len(ids) <= -(-tokens // size):
            lengths = f"{len(ids):,} ids of {size:,} tokens for {tokens:,} tokens"
            self._note(line, lengths, _LENGTHS.format(block_tokens=size))
        if not self._requests:
            self._first_ms = request.timestamp_ms
        self._requests += 1
        self._tokens += tokens
        self._last_ms, self._line = request.timestamp_ms, line

    def end(self) -> None:
        """Check the times of the whole trace, and warn of each kind of fault with its first line."""
        span_s = (self._last_ms - self._first_ms) / 1_000
        if self._requests >= REQUESTS_MIN and 0 < span_s * TOKENS_PER_S_MAX < self._tokens:
            rate = f"{self._requests:,} requests with {self._tokens:,} tokens in {span_s:,.3g} s since the first"
            self._note(self._line, rate, "timestamp must be in milliseconds: multiply seconds by 1,000")
        for remedy, first in self._first.items():
            lines = self._faults[remedy]
            such = f" ({lines:,} such lines)" if lines > 1 else ""
            logger.warning("%s; %s%s; see %s", first, remedy, such, Remedy.TRACE)

    def _unchained(self, ids: tuple[int, ...], before: tuple[int | None, ...]) -> str:
        block, now = next(each for each in zip(ids, before, strict=True) if self._before.get(*each) != each[1])
        then = self._before[block]
        here = "stands first" if now is None else f"follows id {now}"
        there = "later" if now is None else "stood first" if then is None else f"id {then}"
        return f"id {block} {here} here and {there} before"

    def _note(self, line: int, fault: str, remedy: str) -> None:
        self._first.setdefault(remedy, f"{self._path}, line {line}: {fault}")
        self._faults[remedy] += 1
