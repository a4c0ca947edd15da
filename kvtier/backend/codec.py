"""Lossless coding of rows, for tiers whose values may have any length.

The high byte of a bfloat16 number is its sign and most of its exponent, and carries about 3 bits; the low byte is
noise. So the bytes of numbers are split into planes. Zstandard codes the plane of high bytes, with few searches for
repetitions: Huffman's code does nearly all. The other planes stay as they are. Numbers of one byte are one plane.

A coded row is a header, the low bytes of each number in order, and one Zstandard frame. The header is little-endian:
magic 4, bytes of a number u8, zero 3, row length u64, XXH3-128 of the row 16. The row's checksum verifies the decoder,
too. The seal is the coded row's. A row that does not shrink is stored unchanged, without a header.
"""

import math
import struct
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from xxhash import xxh3_128_digest
from zstandard import STRATEGY_FAST, ZstdCompressionParameters, ZstdCompressor, ZstdDecompressor, ZstdError
from zstandard import frame_content_size as content_bytes

from kvtier.backend.namespace import FileMapper, OffloadKey
from kvtier.backend.remote import Totals
from kvtier.backend.seal import SEAL_BYTES, Seal, SealFault
from kvtier.backend.seal_options import SealOptions

MAGIC = b"\x89kvc"
WIDTHS = {"bf16": 2, "fp8": 1}
TURN_S = 0.05  # Longest wait of a row for its turn to be encoded: ten others of 2 MiB.
RUN_ROWS = 32  # Stored the same way by `auto`, so that most calls load rows of one kind and can be compared.
TRIAL_RUNS = 128  # One of them is stored the other way, so that the comparison goes on. Few: it may load slowly.
LEARNING_RUNS = 4  # One of them is stored the other way, until both ways are known.

_HEADER = struct.Struct("<4sB3xQ16s")


class CodecOptions(SealOptions, frozen=True, kw_only=True):
    """The seal and the codec of rows that leave the host."""

    codec: Literal["none", "bf16", "fp8", "auto"] = "none"
    """How rows are made smaller, without a loss: `"bf16"` for numbers of two bytes, `"fp8"` for those of one.
    `"auto"`: by the namespace's `dtype`, and only while such rows load faster. Rows of every codec are read."""

    codec_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    """Rows that are encoded at once. Further ones are stored unchanged after 50 ms."""

    def make_coded(self, seal: Seal, mapper: FileMapper, counts: Totals) -> "CodedSeal":
        """Return the seal of rows that may be coded. It counts what it does."""
        auto = self.codec == "auto"
        return CodedSeal(seal, self.number_bytes(mapper.namespace.dtype), self.codec_threads, counts, auto=auto)

    def number_bytes(self, dtype: str) -> int:
        """Return the bytes of a number that is coded, in a namespace with this `dtype`; 0: rows are not coded."""
        return WIDTHS.get(("fp8" if "8" in dtype else "bf16") if self.codec == "auto" else self.codec, 0)


class Pace:
    """The times of calls that load rows, coded and not, by which `auto` chooses.

    A whole call is timed: one row that is decoded while others arrive would seem to cost nothing. The means are of
    logarithms: one call that hangs must not decide for the next thousand.
    """

    def __init__(self) -> None:
        self._means = {True: 0.0, False: 0.0}  # By coded or not.
        self._loads = {True: 0.0, False: 0.0}
        self._stores = 0  # Counted in any thread: a lost update does no harm.

    def loaded(self, seconds: float, coded: Sequence[bool]) -> None:
        """Record a call that loaded these rows. It counts for a kind by the kind's share of them."""
        for kind in set(coded):
            share = coded.count(kind) / len(coded)
            self._loads[kind] += share
            weight = share / min(self._loads[kind], 32)  # Calls that count in a mean.
            self._means[kind] += (math.log(max(seconds, 1e-9) / len(coded)) - self._means[kind]) * weight

    def choose(self) -> bool:
        """Return True if the next row is to be coded: those load faster, or it is not known yet."""
        run, self._stores = self._stores // RUN_ROWS, self._stores + 1
        known = min(self._loads.values()) >= 8  # Calls after which a way is known.
        coded = not known or self._means[True] <= self._means[False]
        runs = TRIAL_RUNS if known else LEARNING_RUNS
        return coded != (run % runs == runs - 1)


class CodedSeal:
    """Codes and seals rows, and opens rows of every codec. For any thread.

    The calls are a `Seal`'s, with the length of the stored value, which decides the length of `beside`.
    """

    def __init__(self, seal: Seal, width: int, threads: int, counts: Totals, *, auto: bool) -> None:
        """`width`: bytes of a number; 0: rows are not coded. `auto`: `pace` chooses for each row."""
        self.codes = width > 0 and seal.row_bytes % width == 0
        self.pace = Pace()
        self.sealed_bytes = seal.sealed_bytes  # At most.
        self._plain_beside_bytes = seal.beside_bytes
        self.closing_bytes = seal.beside_bytes + (seal.row_bytes if self.codes else 0)  # `close` needs them.
        self._seal = seal
        self._auto = auto
        self._width = width
        self._turns = threading.BoundedSemaphore(threads)
        self._counts = counts

    def fits(self, stored_bytes: int) -> bool:
        """Return True for a length that a stored row can have."""
        return stored_bytes == self.sealed_bytes or _HEADER.size + SEAL_BYTES < stored_bytes < self.sealed_bytes

    def opening_bytes(self, stored_bytes: int) -> int:
        """Return the length of `beside` for a received value of this length."""
        return self._plain_beside_bytes + (0 if stored_bytes == self.sealed_bytes else stored_bytes - SEAL_BYTES)

    def code_until(self) -> float | None:
        """Return the time until which the next row waits to be coded; None if it is not to be coded."""
        return time.monotonic() + TURN_S if self.codes and (not self._auto or self.pace.choose()) else None

    def close(self, key: OffloadKey, row: memoryview, beside: memoryview, code_until: float | None) -> list[memoryview]:
        """Seal a row, coded if that helps and its turn comes in time; return the bytes to send, the seal at the end."""
        coded = None
        if code_until is not None:
            coded = self._coded(row, beside[self._plain_beside_bytes :], code_until - time.monotonic())
        return self._seal.close(key, row if coded is None else coded, beside[: self._plain_beside_bytes])

    def places(self, row: memoryview, beside: memoryview, stored_bytes: int) -> list[memoryview]:
        """Return the places for a received value of this length, in order."""
        return self._seal.places(*self._split(row, beside, stored_bytes))

    def open(self, key: OffloadKey, row: memoryview, beside: memoryview, stored_bytes: int) -> SealFault | None:
        """Verify and decode received bytes. None: the row is the chunk, bit for bit; else it is undefined."""
        payload, sealing = self._split(row, beside, stored_bytes)
        fault = self._seal.open(key, payload, sealing)
        return decode(payload, row) if fault is None and payload is not row else fault

    def _split(self, row: memoryview, beside: memoryview, stored_bytes: int) -> tuple[memoryview, memoryview]:
        """Return the place of the bytes that the seal is of, and the seal's own buffer."""
        if stored_bytes == self.sealed_bytes:
            return row, beside
        room_at = self._plain_beside_bytes
        return beside[room_at : room_at + stored_bytes - SEAL_BYTES], beside[:room_at]

    def _coded(self, row: memoryview, room: memoryview, wait_s: float) -> memoryview | None:
        if wait_s < 0 or not self._turns.acquire(timeout=wait_s):
            self._counts.count("codec_busy")
            return None
        try:
            coded = encode(row, self._width, room)
        finally:
            self._turns.release()
        if coded is None:
            self._counts.count("codec_no_gain")
            return None
        self._counts.count("coded")
        self._counts.count("coded_bytes", coded.nbytes)
        self._counts.count("coded_saved_bytes", row.nbytes - coded.nbytes)
        return coded


class _Zstandard(threading.local):
    """A thread's coder: it may be used by one thread at a time, and takes longer to make than to use."""

    def __init__(self) -> None:
        few = ZstdCompressionParameters(  # Repetitions are chance: a tiny table finds few, and costs little.
            strategy=STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0
        )
        self.compress = ZstdCompressor(compression_params=few).compress
        self.decompress = ZstdDecompressor().decompress


_zstandard = _Zstandard()


def encode(row: memoryview, width: int, room: memoryview) -> memoryview | None:
    """Code a row of numbers of `width` bytes, and return its part of `room`; None if it shrinks too little."""
    numbers = np.frombuffer(row, np.uint8).reshape(-1, width)
    frame = _zstandard.compress(np.ascontiguousarray(numbers[:, -1]).data)
    frame_at = _HEADER.size + (width - 1) * len(numbers)
    end = frame_at + len(frame)
    if end > row.nbytes - row.nbytes // 16:  # A row that does not shrink by a sixteenth is not worth decoding.
        return None
    _HEADER.pack_into(room, 0, MAGIC, width, row.nbytes, xxh3_128_digest(row))
    np.frombuffer(room[_HEADER.size : frame_at], np.uint8).reshape(len(numbers), width - 1)[:] = numbers[:, :-1]
    room[frame_at:end] = frame
    return room[:end]


def decode(coded: memoryview, row: memoryview) -> SealFault | None:
    """Decode a row, and verify it. None: these are the bytes that were coded. Allocates a row's length at most."""
    magic, width, row_bytes, proof = _HEADER.unpack_from(coded)
    if magic != MAGIC or row_bytes != row.nbytes:
        return SealFault.NAMESPACE
    if width not in WIDTHS.values() or row_bytes % width:
        return SealFault.VERSION
    numbers = np.frombuffer(row, np.uint8).reshape(-1, width)
    frame_at = _HEADER.size + (width - 1) * len(numbers)
    frame = coded[frame_at:]
    try:
        if content_bytes(frame) != len(numbers):  # Before anything is allocated for it.
            return SealFault.PAYLOAD
        numbers[:, -1] = np.frombuffer(_zstandard.decompress(frame, allow_extra_data=False), np.uint8)
    except ZstdError:
        return SealFault.PAYLOAD
    numbers[:, :-1] = np.frombuffer(coded[_HEADER.size : frame_at], np.uint8).reshape(len(numbers), width - 1)
    return None if proof == xxh3_128_digest(row) else SealFault.PAYLOAD
