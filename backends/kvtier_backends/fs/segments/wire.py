"""The session between an engine's tier and a keeper: messages, and their frames on a Unix socket.

A frame is a length, then one message in MessagePack. A descriptor travels with the first byte of its message's frame.
Slots and sequence numbers are packed arrays. A call has a number, and its answer has the same.
"""

import asyncio
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any, Literal

import msgspec

from kvtier.backend import Advice, Namespace, OffloadKey, PackedKeys
from kvtier.memory import let_go_in_forks
from kvtier_backends.fs.layout import Scarce
from kvtier_backends.fs.segments.catalog import Doubt, Judged

PROTOCOL = 1
LENGTH_BYTES = 4
FRAME_BYTES_MAX = 64 << 20  # A batch of a million keys.
FRAMES_AT_ONCE = 64  # Sent in one call.
SOON_S = 0.005  # What other sessions change is told together: each message wakes a process.
SOON_BYTES_MAX = 64 << 10  # A backlog is sent as it grows.
UNSENT_BYTES_MAX = 64 << 20  # To a peer that does not read: its session ends then, and it may open another.

_ANCILLARY_BYTES = socket.CMSG_SPACE(64 * array("i").itemsize)  # Of one receive: descriptors.

Samples = list[tuple[str, dict[str, str], float]]  # Metrics: name, labels, value.


class Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    """One of the messages below."""


class Hello(Message, frozen=True):
    """An engine's first message."""

    protocol: int
    kind: Literal["fs", "memory"]
    options: dict[str, Any]  # Of the tier; the keeper's own must be the same.
    namespace: Namespace
    row_bytes: int
    retained_share: float
    engine: str  # Who it is, for people.


class Call(Message, frozen=True):
    """A call with a number, which an `Answer` has, too. A `report` needs no `Hello`."""

    id: int
    kind: Literal["probe", "lease", "reserve", "delete", "judge", "report"]
    keys: PackedKeys
    doubts: list[Doubt] = []  # To be judged.


class End(Message, frozen=True):
    """End a call, and what it holds: a byte each says what was loaded or written. Empty: nothing was."""

    id: int  # 0: end the session. Its process touches no slot any more.
    done: bytes = b""


class Advise(Message, frozen=True):
    advice: Advice[OffloadKey]


class Welcome(Message, frozen=True):
    """The session is open, or refused. Segments and the inventory follow."""

    queue: bool = False  # Several direct reads may be in flight at once.
    refusal: str = ""
    is_config: bool = False  # The refusal is of a `ConfigError`.


class SegmentSaid(Message, frozen=True):
    """A segment with its descriptor; without slots, it is gone."""

    first_slot: int
    row_bytes: int = 0
    slots: int = 0


class Inventory(Message, frozen=True):
    keys: PackedKeys
    there: bool
    scanned: bool | None = None  # The end of the scan: whether it is complete.


class Answer(Message, frozen=True):
    """The result of a call: its fields depend on that."""

    id: int
    slots: bytes = b""  # i64 each.
    numbers: bytes = b""  # Of a lease: sequence numbers, u64. Of a reservation: positions, then the last number.
    own: bytes = b""  # A lease's chunks: 1 if this session has stored it. A probe's: 1 if it is there.
    refusals: list[tuple[list[int], Scarce, int, str]] = []  # Positions, reason, and an error's number and text, or 0.
    verdicts: list[Judged] = []
    samples: Samples = []  # Of a report: metrics, without their prefix.
    failure: str = ""


ToKeeper = Hello | Call | End | Advise
ToEngine = Welcome | SegmentSaid | Inventory | Answer


def framed(message: Message) -> bytes:
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def packed(code: Literal["q", "Q"], numbers: Sequence[int]) -> bytes:
    return array(code, numbers).tobytes()


def unpacked(code: Literal["q", "Q"], content: bytes) -> list[int]:
    return array(code, content).tolist()


class Link:
    """One end of a session. Belongs to the loop's thread; nothing here waits."""

    def __init__(
        self,
        connected: socket.socket,
        accepted: Any,
        received: Callable[[Any, Callable[[], int]], None],
        lost: Callable[[], None],
    ) -> None:
        """Call `received` with each message of the type `accepted` and a function that takes its descriptor.

        `lost` is called once, at the peer's end, and for a frame that is none; not after `close`. At the peer's end the
        link still sends: the peer may only have given up what this end does not read.
        """
        connected.setblocking(False)
        self.closed = False
        self._socket, self._received, self._lost = connected, received, lost
        self._decode = msgspec.msgpack.Decoder(accepted).decode
        self._loop = asyncio.get_running_loop()
        self._read = bytearray()
        self._descriptors: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._unsent_bytes = 0
        self._closes = False  # Once all is sent.
        self.drained = asyncio.Event()  # All is sent, or never will be.
        self.ending = False  # The peer takes no message any more; what it has sent is read to its end.
        self._loop.add_reader(connected, self._receive)
        let_go_in_forks(self)

    def send(self, message: Message, descriptor: int | None = None, *, soon: bool = False) -> None:
        """Send a message and close its descriptor: at once, with the next one if `soon`, or when the peer takes it."""
        if self.closed or self.ending:
            if descriptor is not None:
                os.close(descriptor)
            return
        frame = framed(message)
        self._unsent_bytes += len(frame)
        if soon and not self._unsent:
            self._loop.call_later(SOON_S, self._flush)
        self._unsent.append((memoryview(frame), descriptor))
        self.drained.clear()
        if self._unsent_bytes > UNSENT_BYTES_MAX:  # What the peer says still is heard, until it ends the session.
            self._forget_unsent()
            with suppress(OSError):  # It has ended.
                self._socket.shutdown(socket.SHUT_WR)
        elif not soon or self._unsent_bytes > SOON_BYTES_MAX:
            self._flush()

    def close_when_sent(self) -> None:
        """Close the link once the peer has taken all, or has ended."""
        self._closes = True
        if self._unsent and not self.closed and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
        else:
            self.close()

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took; idempotent."""
        if not self.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
                self._loop.remove_writer(self._socket)
            self.forked()

    def forked(self) -> None:
        if not self.closed:
            self.closed = True
            self._socket.close()
            for fd in self._descriptors:
                os.close(fd)
            self._descriptors.clear()
            self._forget_unsent()

    def _forget_unsent(self) -> None:
        for _, fd in self._unsent:
            if fd is not None:
                os.close(fd)
        self._unsent.clear()
        self.ending = True
        self.drained.set()

    def _flush(self) -> None:
        while self._unsent:
            (first, descriptor), *others = islice(self._unsent, FRAMES_AT_ONCE)
            fds = [] if descriptor is None else [descriptor]
            frames = [first, *(frame for frame, _ in takewhile(lambda other: other[1] is None, others))]
            try:
                sent = socket.send_fds(self._socket, frames, fds, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError:
                self._forget_unsent()
                break
            for fd in fds:  # The peer has one of its own now.
                os.close(fd)
            self._unsent_bytes -= sent
            for frame in frames:
                if sent < len(frame):
                    self._unsent[0] = frame[sent:], None
                    break
                self._unsent.popleft()
                sent -= len(frame)
        if not self.closed:
            self._loop.remove_writer(self._socket)
        self.drained.set()
        if self._closes:
            self.close()

    def _receive(self) -> None:
        try:
            content, ancillary, _, _ = self._socket.recvmsg(1 << 20, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            content, ancillary = b"", []
        for _, _, descriptors in ancillary:
            self._descriptors += array("i", descriptors[: len(descriptors) // 4 * 4])
        if not content:
            self._loop.remove_reader(self._socket)
            self._lost()
            return
        self._read += content
        try:
            self._take_frames()
        except (msgspec.MsgspecError, IndexError, ValueError, KeyError):  # Not a peer of ours.
            if not self.closed:
                self.close()
                self._lost()

    def _take_frames(self) -> None:
        at = 0
        while len(self._read) - at >= LENGTH_BYTES:
            size = int.from_bytes(self._read[at : at + LENGTH_BYTES], "little")
            if size > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {size:,} bytes")
            if len(self._read) - at < LENGTH_BYTES + size:
                break
            content = bytes(self._read[at + LENGTH_BYTES : at + LENGTH_BYTES + size])
            at += LENGTH_BYTES + size
            self._received(self._decode(content), self._descriptors.popleft)
            if self.closed:
                return
        del self._read[:at]
