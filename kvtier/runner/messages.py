"""The messages that cross the bridge: actions to a runner, its answers and reports; and their frames on a socket.

Answers name an action by its id and its chunks by their index. Keys travel as one bytes object and rows as packed u32:
a list takes fifteen times as long to decode. A frame is a length, then a MessagePack list of one step's messages, or of
one turn of the runner's loop. The owner's loggers handle the process's log.
"""

import logging
from array import array
from asyncio import AbstractEventLoop, IncompleteReadError, StreamReader
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Literal, NamedTuple

import msgspec

from kvtier.backend import OffloadKey
from kvtier.backend import PackedKeys as PackedKeys
from kvtier.backend import pack_keys as pack_keys
from kvtier.backend import unpack_keys as unpack_keys
from kvtier.errors import ChunkCorrupt, ChunkError, ChunkMissing, NoSpace
from kvtier.settings.hints import Advice, Hint

LENGTH_BYTES = 4  # Of a frame, before it; little-endian.
LOGGERS = ("kvtier", "kvtier_backends")
RECORD_FIELDS = (
    *("name", "levelno", "levelname", "msg", "created", "msecs", "process"),
    *("pathname", "filename", "module", "lineno", "funcName"),
)


def pack_rows(rows: Sequence[int]) -> bytes:
    return array("I", rows).tobytes()


def unpack_rows(packed: bytes) -> "array[int]":
    return array("I", packed)


class Code(IntEnum):
    """The reason why a chunk did not move, in one byte."""

    MISSING = 1
    CORRUPT = 2
    NO_SPACE = 3
    FAILED = 4  # This transfer failed.
    UNAVAILABLE = 5  # The whole call failed.
    DEADLINE = 6  # It missed its deadline; its rows are still lent.
    REFUSED = 7  # It never started: the bridge was full, or there was no runner.
    LOST = 8  # Its runner died; its rows are lent until the process has ended.


def code_of(error: ChunkError) -> Code:
    match error:
        case ChunkMissing():
            return Code.MISSING
        case ChunkCorrupt():
            return Code.CORRUPT
        case NoSpace():
            return Code.NO_SPACE
        case _:
            return Code.FAILED


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An array that begins with a letter for its class."""


# Actions: owner → runner.


class _OfKeys(_Message, frozen=True):
    id: int
    tier: int
    keys: PackedKeys


class _Transfer(_OfKeys, frozen=True):
    rows: bytes


class Promote(_Transfer, frozen=True, tag="P"):
    """Load chunks from a tier into rows."""


class Cascade(_Transfer, frozen=True, tag="C"):
    """Store the chunks in rows to a tier."""


class Probe(_OfKeys, frozen=True, tag="Q"):
    """Ask a tier which of these keys it has."""


class Delete(_OfKeys, frozen=True, tag="D"):
    """Delete keys of a tier."""


class Advise(_Message, frozen=True, tag="A"):
    """Give a tier `Advice`. There is no answer. A lost one costs only hits."""

    tier: int
    kind: Literal["rank", "demote", "retain"]
    keys: PackedKeys
    hint: Hint | None = None
    seconds: float = 0.0
    priority: int = 0

    @classmethod
    def of(cls, tier: int, advice: Advice[OffloadKey]) -> "Advise":
        return cls(tier, advice.kind, pack_keys(advice.keys), advice.hint, advice.seconds, advice.priority)

    def advice(self) -> Advice[OffloadKey]:
        return Advice(self.kind, unpack_keys(self.keys), self.hint, self.seconds, self.priority)


class Acknowledge(_Message, frozen=True, tag="K"):
    """The last inventory batch of a tier has been applied: send the next."""

    tier: int


class Close(_Message, frozen=True, tag="Z"):
    """Close the tiers within the deadline and end. Only a bridge sends it."""

    deadline_s: float


Action = Promote | Cascade | Probe | Delete | Advise | Acknowledge


# Messages: runner → owner.


class Finished(_Message, frozen=True, tag="f"):
    """An action's outcome: the chunks at `failed` (packed u32) did not move, for the reasons in `codes` (a byte each).

    `lent`: its rows are still in use, and `Returned` follows when they are not. `cause`: the cause of the worst
    failure, as `cause_of` has it; empty if the codes say all.
    """

    id: int
    failed: bytes
    codes: bytes
    seconds: float
    lent: bool = False
    cause: str = ""

    @classmethod
    def of(
        cls, id_: int, failures: Mapping[int, Code], seconds: float, *, lent: bool = False, cause: str = ""
    ) -> "Finished":
        return cls(id_, pack_rows(list(failures)), bytes(failures.values()), seconds, lent, cause)

    def failures(self) -> dict[int, Code]:
        """Return why chunks did not move, by their index."""
        return dict(zip(unpack_rows(self.failed), map(Code, self.codes), strict=True)) if self.codes else {}


class Returned(_Message, frozen=True, tag="r"):
    """The rows of this action are unused; the chunks at `moved` (packed u32) had moved when it ended."""

    id: int
    moved: bytes = b""


class Answered(_Message, frozen=True, tag="a"):
    """A probe's answer: one byte a key, 1 if the tier has it; empty if the probe failed, for this `cause`."""

    id: int
    present: bytes
    seconds: float
    cause: str = ""


class _Inventory(_Message, frozen=True):
    tier: int
    keys: PackedKeys


class Found(_Inventory, frozen=True, tag="+"):
    """Inventory: the tier holds these keys."""


class Gone(_Inventory, frozen=True, tag="-"):
    """Inventory: the tier has removed these keys."""


class Scanned(_Message, frozen=True, tag="s"):
    """Inventory: all keys that were there at the start have been reported."""

    tier: int
    complete: bool


class TierUsage(_Message, frozen=True, tag="u"):
    """A tier's occupancy, sent about once a second while that changes, and before the last outcome in flight."""

    tier: int
    chunks: int
    used_bytes: int
    capacity_bytes: int | None
    reserved_bytes: int = 0
    counts: dict[str, int] = {}  # Its own counts since the last message, by name.


class TierSpeed(_Message, frozen=True, tag="v"):
    """A tier's present speed: the fields of `Speed`."""

    tier: int
    fixed_s: float
    s_per_byte: float


class Opened(_Message, frozen=True, tag="o"):
    """Every tier is open: the runner takes actions."""


class OpenFailed(_Message, frozen=True, tag="x"):
    """The tiers could not be opened; `config`: because of the configuration."""

    reason: str
    config: bool


class Beat(_Message, frozen=True, tag="b"):
    """The runner's loop is alive."""


class Logged(_Message, frozen=True, tag="l"):
    """A line of the runner's log: the fields of its record that travel."""

    record: dict[str, str | int | float]


class Closed(_Message, frozen=True, tag="c"):
    """The runner has closed its tiers; `abandoned` transfers were left behind."""

    abandoned: int


# Reports of a bridge on its runner; these never travel. An epoch counts a bridge's runners from 0.


class RunnerLost(NamedTuple):
    """This runner takes no more actions and sends no more outcomes; its rows may still be in use."""

    epoch: int
    reason: str


class RunnerGone(NamedTuple):
    """The process of a lost runner has ended: its rows are unused."""

    epoch: int


class RunnerBack(NamedTuple):
    """A new runner has opened the tiers and takes actions."""

    epoch: int


Message = (
    Finished
    | Returned
    | Answered
    | Found
    | Gone
    | Scanned
    | TierUsage
    | TierSpeed
    | Opened
    | OpenFailed
    | Beat
    | Logged
    | Closed
)
Post = Callable[[Message], None]
LocalMessage = RunnerLost | RunnerGone | RunnerBack

_encoder = msgspec.msgpack.Encoder()
actions_of = msgspec.msgpack.Decoder(list[Action | Close]).decode  # Of a frame's body.
messages_of = msgspec.msgpack.Decoder(list[Message]).decode


def frame(items: Sequence[Action | Close | Message]) -> bytes:
    return framed(_encoder.encode(items))


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


async def read_frame(reader: StreamReader) -> bytes | None:
    """Return the next frame's body; None at the end of the stream, wherever it comes."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
        return await reader.readexactly(length)
    except (IncompleteReadError, ConnectionError):
        return None


class FrameBuffer:
    """Cuts frames out of a stream of bytes, for a reader without an event loop."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """Add what was received; return the bodies that are complete now."""
        self._bytes += received
        bodies: list[bytes] = []
        start = 0
        while len(self._bytes) - start >= LENGTH_BYTES:
            end = start + LENGTH_BYTES + int.from_bytes(self._bytes[start : start + LENGTH_BYTES], "little")
            if end > len(self._bytes):
                break
            bodies.append(bytes(self._bytes[start + LENGTH_BYTES : end]))
            start = end
        del self._bytes[:start]
        return bodies


def wanted_level() -> int:
    """Return the lowest enabled log level; the runner does not send records below it."""
    return min(logging.getLogger(name).getEffectiveLevel() for name in LOGGERS)


class ToOwner(QueueHandler):
    """Posts records, from any thread; records after the loop's end are lost."""

    def __init__(self, loop: AbstractEventLoop, post: Post) -> None:
        """`post` belongs to the loop's thread."""
        super().__init__(SimpleQueue())  # Unused: only the handler's `prepare` is.
        self._loop = loop
        self._post = post

    def enqueue(self, record: logging.LogRecord) -> None:
        fields = vars(record)
        message = Logged({name: value for name in RECORD_FIELDS if (value := fields[name]) is not None})
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._post, message)


def log_again(message: Logged) -> None:
    """Pass a runner's record to the owner's loggers."""
    record = logging.makeLogRecord(message.record)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        record.processName = "kvtier-runner"
        logger.handle(record)
