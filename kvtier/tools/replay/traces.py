"""Traces of LLM requests in Mooncake's format: one JSON object a line, plain or in gzip or zstd.

A file is read as a stream, anew for each pass: parsing 11 million block references takes a third of a second, keeping
them as objects half a gigabyte. What a file is compressed with is seen from its first bytes, not from its name.

The format is that of the traces in https://github.com/kvcache-ai/Mooncake, "FAST25-release", optionally preceded by one
line `{"meta": {...}}`.
"""

import codecs
import gzip
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, BinaryIO, Protocol

import msgspec
import zstandard

from kvtier.errors import TraceError
from kvtier.tools.replay.outputs import replacing
from kvtier.tools.replay.trace_check import TraceCheck

BLOCK_TOKENS = 512  # Mooncake's own; a trace with another size says so in its meta line.
LINE_BYTES_MAX = 16 << 20  # A prompt of a million tokens takes 1.3 MB; a file with longer lines is no trace.
_READ_BYTES = 64 << 10  # Of the file at once; a compressed trace becomes about 50 times as long.

_NOT_NEGATIVE = msgspec.Meta(ge=0)
_EXAMPLE = '{"timestamp": 0, "input_length": 1030, "output_length": 52, "hash_ids": [0, 1, 2]}'


class Request(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename={"timestamp_ms": "timestamp"}):
    """One request of a trace. Further fields of a line are ignored."""

    timestamp_ms: Annotated[int, _NOT_NEGATIVE] | Annotated[float, _NOT_NEGATIVE]
    input_length: Annotated[int, _NOT_NEGATIVE]  # In tokens, as the output's.
    output_length: Annotated[int, _NOT_NEGATIVE]
    hash_ids: tuple[int, ...]
    """Prefix-chained block ids, first to last: the same id always stands for the same tokens after the same tokens.

    The last one may stand for a block that is only partly filled.
    """
    session_id: int | str | None = None


class _MetaLine(msgspec.Struct, forbid_unknown_fields=True):
    meta: dict[str, Any]


class Trace:
    """The requests of one file. Each iteration reads the file anew: a pass costs time, not memory.

    A file that cannot be read, or that holds no requests, is a `TraceError` at once; a bad line when it is reached,
    with its number, what is wrong with it and what was expected. The first pass that comes to the end also logs a
    warning of what is read but cannot be true; for this it remembers about 100 bytes a distinct id while it lasts, and
    at most `trace_check.IDS_MAX` ids.
    """

    def __init__(self, path: str | os.PathLike[str], *, limit: int | None = None, strict: bool = False) -> None:
        """Look at the beginning of the file. `limit`: the most requests that an iteration gives.

        `strict`: what cannot be true is a `TraceError`, not a warning.
        """
        self.path = os.fspath(path)
        self.limit = limit
        self.strict = strict
        self._checked = False
        begin = list(islice(_lines(self.path), 2))
        meta = _meta(begin[0][1]) if begin else None
        if len(begin) < (1 if meta is None else 2):
            raise TraceError(f"{self.path}: no requests in it; expected one a line, such as {_EXAMPLE}")
        self._lines_before = 0 if meta is None else 1
        self.meta: Mapping[str, Any] = meta or {}
        self.block_tokens = self._block_tokens()

    def __iter__(self) -> Iterator[Request]:
        decode = msgspec.json.Decoder(Request).decode
        stop = None if self.limit is None else self._lines_before + self.limit
        check = None if self._checked else TraceCheck(self.path, self.block_tokens, strict=self.strict)
        for number, line in islice(_lines(self.path), self._lines_before, stop):
            try:
                request = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise TraceError(
                    f"{self.path}, line {number}: {error}; given {_excerpt(line)}, expected one JSON object a line, "
                    f"such as {_EXAMPLE}"
                ) from error
            if check is not None:
                check.look(number, request)
            yield request
        if check is not None and not self._checked:
            self._checked = True
            check.end()

    def _block_tokens(self) -> int:
        size = self.meta.get("block_size", BLOCK_TOKENS)
        if type(size) is not int or size < 1:
            raise TraceError(f"{self.path}, line 1: meta.block_size is {size!r}; expected tokens a block, at least 1")
        return size


def write_trace(
    path: str | os.PathLike[str], requests: Iterable[Request], meta: Mapping[str, Any] | None = None
) -> None:
    """Write a trace that `Trace` reads back: in gzip or zstd if the name ends in `.gz` or `.zst`.

    The same requests give the same bytes. Blocks of other than 512 tokens need a `meta` with their `block_size`.
    If it raises, what was there under this name is still there.
    """
    encode = msgspec.json.Encoder().encode
    with replacing(path) as file, _compressing(file, os.fspath(path)) as out:
        if meta:
            out.write(encode({"meta": meta}) + b"\n")
        for request in requests:
            out.write(encode(request) + b"\n")


class _Writer(Protocol):
    def write(self, data: bytes, /) -> int: ...


def _compressing(file: BinaryIO, path: str) -> AbstractContextManager[_Writer]:
    if path.endswith(".gz"):
        return gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0)
    if path.endswith(".zst"):
        return zstandard.ZstdCompressor().stream_writer(file, closefd=False)
    return nullcontext(file)


def _meta(line: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(line, type=_MetaLine).meta
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # A request, or a line that iterating will refuse.


def _excerpt(line: bytes) -> str:
    text = line[:60].decode(errors="replace")
    return f"{text!r}{'…' if len(line) > 60 else ''}"


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Give each line that is not blank, with its number in the file, from 1."""
    number, rest = 1, b""
    try:
        for chunk in _content(path):
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            if len(rest) > LINE_BYTES_MAX:
                raise TraceError(
                    f"{path}, line {number + len(lines)}: longer than {LINE_BYTES_MAX:,} bytes; not a trace"
                )
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
    """Give the file's text in pieces, decompressed, without a byte-order mark."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # Asked before opening, because opening a pipe waits for its writer.
        raise OSError("it is no regular file, and a trace is read more than once")
    with open(path, "rb") as file:
        first = file.read(_READ_BYTES)
        pieces = chain((first,), iter(partial(file.read, _READ_BYTES), b""))
        new_stream = _decompressor(first)
        plain = pieces if new_stream is None else _decompressed(pieces, new_stream)
        yield next(plain, b"").removeprefix(codecs.BOM_UTF8)
        yield from plain


class _Decompressor(Protocol):
    """What zlib's and zstandard's decompression objects have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _decompressor(first: bytes) -> Callable[[], _Decompressor] | None:
    if first.startswith(b"\x1f\x8b"):
        return partial(zlib.decompressobj, wbits=31)  # 31: the largest window, in gzip's wrapping.
    if first.startswith(b"\x28\xb5\x2f\xfd"):
        return zstandard.ZstdDecompressor().decompressobj
    return None


def _decompressed(pieces: Iterable[bytes], new_stream: Callable[[], _Decompressor]) -> Iterator[bytes]:
    """Decompress streams that follow each other, as parallel compressors and `cat` leave them."""
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
