"""One runner's process, and the owner's end of its socket. `kvtier.bridge.process` listens to it and reaps it."""

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Self

import msgspec

from kvtier.bridge.log import wanted_level
from kvtier.bridge.messages import Action, Close
from kvtier.bridge.wire import frame, framed
from kvtier.config import EngineConfig
from kvtier.this_process import fill_standard_streams


class RunnerProcess:
    """A child, and what its socket did not take yet.

    Whoever queues and flushes from more than one thread does so under a lock of its own.
    """

    def __init__(self, epoch: int, process: "subprocess.Popen[bytes]", owner_socket: socket.socket) -> None:
        self.epoch = epoch
        self.process = process
        self.socket = owner_socket
        self.actions_unsent = 0
        self._unsent: deque[tuple[memoryview, int]] = deque()  # A frame's rest, and its number of actions.

    @classmethod
    def start(cls, epoch: int, config: EngineConfig, region_fd: int, environment: Mapping[str, str]) -> Self:
        """Start a child and give it the configuration; OSError if it cannot be started."""
        fill_standard_streams()  # They may have been closed since the last one was started.
        ours, theirs = socket.socketpair()
        with theirs, _this_process() as owner_fds, ExitStack() as unless_started:
            unless_started.callback(ours.close)
            fds = (theirs.fileno(), region_fd, *owner_fds)
            given = map(str, (theirs.fileno(), region_fd, wanted_level(), *owner_fds))
            process = subprocess.Popen(  # noqa: S603  # Our own module, with numbers for arguments.
                [sys.executable, "-P", "-m", "kvtier.bridge.child", *given],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
            unless_started.pop_all()
        with suppress(OSError):  # It has ended already: its socket says so to whoever listens.
            ours.sendall(framed(msgspec.msgpack.encode(config)))
        return cls(epoch, process, ours)

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def queue(self, items: Sequence[Action | Close]) -> None:
        """Put one frame behind those that wait."""
        self._unsent.append((memoryview(frame(items)), len(items)))
        self.actions_unsent += len(items)

    def flush(self) -> bool:
        """Send what the socket takes now, without waiting; say whether it has to be tried again.

        What a child that has ended will not take is lost with it: who listens to the socket hears of it.
        """
        while self._unsent:
            rest, actions = self._unsent[0]
            try:
                sent = self.socket.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if sent < len(rest):
                self._unsent[0] = (rest[sent:], actions)
            else:
                self._unsent.popleft()
                self.actions_unsent -= actions
        return False


def environment() -> dict[str, str]:
    """Return the environment in which a child finds the modules that this process finds now, wherever it is by then."""
    places: list[str] = []
    given: list[object] = list(sys.path)
    for place in given:
        if isinstance(place, str):  # Others, such as a `Path`, Python itself does not search.
            with suppress(FileNotFoundError):  # It is relative to a directory that is gone.
                places.append(os.path.abspath(place))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


@contextmanager
def _this_process() -> Generator[Sequence[int]]:
    """Give a descriptor by which a child sees this process end; none where the kernel, or a sandbox, has no such."""
    try:
        fd = os.pidfd_open(os.getpid())
    except OSError:
        yield ()
        return
    try:
        yield (fd,)
    finally:
        os.close(fd)
