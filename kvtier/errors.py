"""The errors that kvtier raises or returns, named by what the caller can do next.

A `ChunkError` is a value in a batch's outcomes, and raised where a single chunk was asked for. Each kind has a remedy,
a section of the page on troubleshooting; a traceback ends with its code, `str(error)` lacks it.
"""

from collections.abc import Callable
from enum import Enum
from errno import errorcode
from functools import cached_property
from typing import ClassVar

MESSAGE_HEAD_MAX, MESSAGE_TAIL_MAX = 1_200, 600  # Characters: the path stands in front, the remedy at the end.


class Remedy(Enum):
    """One section of the troubleshooting page, by the code that warnings and errors end with."""

    # The engine does not start, or not as configured.
    CONFIGURATION = "configuration-refused"
    OPENING = "tier-cannot-be-opened"
    REWRITTEN = "namespace-configuration-rewritten"
    BUFFERED = "no-direct-io"
    # A tier costs hits.
    BREAKER = "breaker-open"
    LOSSES = "chunks-dropped-or-failed"
    UNAVAILABLE = "tier-unavailable"
    OVERDUE = "call-out-of-time"
    FAILED = "transfer-failed"
    MISSING = "chunk-missing"
    CORRUPT = "chunk-corrupt"
    NO_SPACE = "no-space"
    UNWRITTEN = "chunks-not-written-at-the-end"
    UNLISTED = "list-incomplete"
    # A tier's directory.
    ROOT_IN_USE = "root-used-by-another-tier"
    UNREADABLE = "folder-or-segment-unreadable"
    UNUSABLE = "segments-without-chunks-of-this-tier"
    UNDERFOOT = "segment-removed"
    IRREMOVABLE = "file-cannot-be-removed"
    CHECKPOINT = "checkpoint-not-written-or-read"
    WRITE_BUDGET = "write-budget-not-put-back"
    SHARED_PAGE = "shared-page-away"
    # Runners, and the code of tiers.
    RUNNER = "runner-lost"
    CONTRACT = "tier-breaks-its-contract"
    CLOSING = "tier-does-not-close"
    # A GPU.
    UNPINNED = "memory-not-pinned"
    UNBATCHED = "no-batched-copies"
    # The program that calls.
    CLOSED = "engine-closed"
    LOOP = "another-event-loop"
    CUT = "run-cut-short"
    LENT = "rows-still-read"
    DROPPED = "engine-not-closed"
    OBSERVER = "observer-raised"
    HINT = "hint-ignored"
    # Traces.
    TRACE = "trace-refused-or-doubted"
    ELSE = "anything-else"

    def __str__(self) -> str:
        return f"kvtier help {self.value}"


class KVTierError(Exception):
    """Everything kvtier raises on purpose."""

    remedy: ClassVar[Remedy] = Remedy.ELSE

    @cached_property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        """The end of a traceback; made on first use, because outcomes are made by the thousand."""
        return [f"see {self.remedy}"]


class ConfigError(KVTierError):
    """A configuration that cannot be used: mend the field that the message names. The message is one line."""

    remedy = Remedy.CONFIGURATION

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class TraceError(KVTierError):
    """A trace that cannot be read: mend the line that the message names. The message is one line."""

    remedy = Remedy.TRACE

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class EngineClosed(KVTierError):
    """The manager was shut down: this call is a bug of the caller's, or came too late."""

    remedy = Remedy.CLOSED


class WrongLoop(KVTierError, RuntimeError):
    """The call was made on another event loop than the engine's: open an engine on each loop."""

    remedy = Remedy.LOOP


class RowsStillRead(KVTierError):
    """Something still reads rows that were lent: copy the bytes, or drop it before the block ends."""

    remedy = Remedy.LENT


class BackendError(KVTierError):
    """A whole call of a tier failed; the state of its chunks is unknown."""

    remedy = Remedy.UNAVAILABLE


class BackendClosed(BackendError):
    """The tier was closed before this call: a bug of the caller's."""

    remedy = Remedy.CLOSED


class BackendUnavailable(BackendError):
    """The tier cannot be reached now: retry later."""

    remedy = Remedy.UNAVAILABLE


class ChunkError(KVTierError):
    """One chunk of a batch did not move."""

    remedy = Remedy.FAILED


class ChunkMissing(ChunkError):
    """The tier does not have the chunk: recompute it."""

    remedy = Remedy.MISSING


class ChunkCorrupt(ChunkError):
    """The tier's bytes under this key are not those that were stored: delete it, recompute."""

    remedy = Remedy.CORRUPT


class NoSpace(ChunkError):
    """The tier has no room for the chunk, now or ever: evict, or skip it."""

    remedy = Remedy.NO_SPACE


class TransferFailed(ChunkError):
    """The chunk's transfer failed or ran out of time: retry later; what is stored is untouched."""

    remedy = Remedy.FAILED


def one_line(text: str) -> str:
    """Return a message with control characters escaped and its middle cut if it is long: it may quote anything."""
    if len(text) > MESSAGE_HEAD_MAX + MESSAGE_TAIL_MAX:
        text = f"{text[:MESSAGE_HEAD_MAX]}…{text[-MESSAGE_TAIL_MAX:]}"
    return escaped(text)


def escaped(text: str) -> str:
    """Return text with all control characters escaped, such as ESC, U+009B or a change of direction."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def cause_of(error: BaseException) -> str:
    """Return a foreign error's cause in one word, an errno's name or a class; empty for kvtier's own errors."""
    word, link = "", error
    for _ in range(16):  # Chained errors; a ring of them has no end.
        if isinstance(link, OSError) and (name := errorcode.get(link.errno or 0)):
            return name
        if not isinstance(link, KVTierError):
            word = word or type(link).__name__
        behind = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        if behind is None:
            break
        link = behind
    return word


class LineLimit:
    """The limit of a log: at most one line of each kind a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: in seconds."""
        self._clock = clock
        self._again_at: dict[str, float] = {}

    def allows(self, kind: str = "") -> bool:
        """Return True if a line of this kind is due now; the next is due in a minute."""
        now = self._clock()
        if kind in self._again_at and now < self._again_at[kind]:
            return False
        self._again_at[kind] = now + 60.0  # Between two lines of one kind: more would fill the log.
        return True
