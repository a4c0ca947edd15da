"""The wire between an owner and its runner's process: frames on their socket, and the runner's log, which they carry.

A frame is a length, then a MessagePack list: the messages of one step, or of one turn of the runner's loop. The owner's
loggers handle the process's log, under the same names. So the owner's program alone decides where it is shown; a
runner's stderr is for errors that end the process.
"""

import logging
from asyncio import AbstractEventLoop, IncompleteReadError, StreamReader
from collections.abc import Callable, Sequence
from logging.handlers import QueueHandler
from queue import SimpleQueue

import msgspec

from kvtier.runner.messages import Action, Close, Logged, Message

LENGTH_BYTES = 4  # Little-endian.
LOGGERS = ("kvtier", "kvtier_backends")

_encoder = msgspec.msgpack.Encoder()
_actions = msgspec.msgpack.Decoder(list[Action | Close])
_messages = msgspec.msgpack.Decoder(list[Message])


def frame(items: Sequence[Action | Close | Message]) -> bytes:
    return framed(_encoder.encode(items))


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def actions_of(body: bytes) -> list[Action | Close]:
    return _actions.decode(body)


def messages_of(body: bytes) -> list[Message]:
    return _messages.decode(body)


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

    def __init__(self, loop: AbstractEventLoop, post: Callable[[Message], None]) -> None:
        """`post` belongs to the loop's thread."""
        super().__init__(SimpleQueue())  # Unused: only the handler's `prepare` is.
        self._loop = loop
        self._post = post

    def enqueue(self, record: logging.LogRecord) -> None:
        message = Logged(
            record.name,
            record.levelno,
            record.getMessage(),
            record.created,
            record.process or 0,
            record.pathname,
            record.lineno,
            record.funcName or "",
        )
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._post, message)


def log_again(message: Logged) -> None:
    """Pass a runner's record to the owner's loggers."""
    logger = logging.getLogger(message.name)
    if not logger.isEnabledFor(message.level):
        return
    record = logger.makeRecord(
        message.name, message.level, message.path, message.line, message.text, (), None, message.function
    )
    record.created, record.process, record.processName = message.at, message.process, "kvtier-runner"
    logger.handle(record)
