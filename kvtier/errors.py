"""The errors that kvtier raises or returns, named by what the caller can do next.

A `ChunkError` is a value in a batch's outcomes, so that one bad chunk does not cost its siblings. It is raised where a
single chunk was asked for.

Each kind has a remedy, the section of the page on troubleshooting that says what to do. A traceback ends with its
address, as a note; `str(error)` does not have it.
"""

from errno import errorcode
from functools import cached_property
from typing import ClassVar

from kvtier.remedies import Remedy

CAUSES_MAX = 16  # Chained errors; a ring of them has no end.
MESSAGE_HEAD_MAX, MESSAGE_TAIL_MAX = 1_200, 600  # Characters: the path stands in front, the remedy at the end.


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
    """Return the cause of an error in one word: an errno's name, or the class of an error that is not kvtier's.

    Empty for kvtier's own errors: their kind travels without it.
    """
    word, link = "", error
    for _ in range(CAUSES_MAX):
        if isinstance(link, OSError) and (name := errorcode.get(link.errno or 0)):
            return name
        if not isinstance(link, KVTierError):
            word = word or type(link).__name__
        behind = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        if behind is None:
            break
        link = behind
    return word
