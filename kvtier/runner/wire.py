"""Frames on the socket between an owner and its runner's process: a length, then a MessagePack list.

One frame carries what one step, or one turn of the runner's loop, had to say.
"""

from asyncio import IncompleteReadError, StreamReader
from collections.abc import Sequence

import msgspec

from kvtier.runner.messages import Action, Close, Message

LENGTH_BYTES = 4  # Little-endian.

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
