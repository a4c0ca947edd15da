"""The runner in a process of its own: out of reach of the engine's GIL, and killed and replaced when it hangs.

A daemon thread of the owner's process supervises it: it reads messages, sends what the socket did not take at once,
listens for heartbeats, and starts the next runner when one is lost. The owner's thread only pops and pushes.
"""

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import msgspec

from kvtier.bridge.base import Bridge
from kvtier.bridge.messages import (
    Action,
    Beat,
    Close,
    Closed,
    Message,
    Opened,
    OpenFailed,
    RunnerBack,
    RunnerGone,
    RunnerLost,
)
from kvtier.bridge.wire import FrameBuffer, frame, framed, messages_of
from kvtier.config import EngineConfig
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.region import Region

RECEIVE_BYTES = 1 << 20
BEATS_MISSED = 3  # Silence for so many heartbeats is a hung loop.
RESTART_S = (0.0, 0.1, 0.5, 1.0, 5.0)  # Before each further start in a row that did not get as far as open tiers.

logger = logging.getLogger(__name__)


class _Child(NamedTuple):
    epoch: int
    process: "subprocess.Popen[bytes]"
    socket: socket.socket


class ProcessBridge(Bridge):
    """One runner's process at a time, counted by epoch."""

    def __init__(self, config: EngineConfig, region: Region) -> None:
        """Start the runner and wait until its tiers are open.

        Raises:
            ConfigError: the tiers' configuration cannot be used.
            BackendUnavailable: a tier cannot be opened now, or the process ended before it said anything.
        """
        super().__init__()
        assert region.fd is not None, "a process needs a region that can be shared"
        self._config = config
        self._region_fd = region.fd
        self._lock = threading.Lock()  # Around the unsent frames; never held across anything that waits.
        self._unsent: deque[tuple[memoryview, int]] = deque()  # A frame's rest, and its number of actions.
        self._actions_unsent = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready: _Child | None = None  # Open, but not yet admitted.
        self._child: _Child | None = None  # Takes actions.
        self._closing = False
        self._abandoned = 0
        self._started = threading.Event()
        self._failure: OpenFailed | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="kvtier-supervisor", daemon=True)
        self._supervisor.start()
        try:
            self._started.wait()
            if self._failure is not None:
                raise (ConfigError if self._failure.config else BackendUnavailable)(self._failure.reason)
        except BaseException:  # An interrupt, too: who is not there cannot be closed.
            self.close(0)
            raise
        self.admit(0)

    @property
    def pid(self) -> int | None:
        """The process id of the runner that takes actions."""
        return None if self._child is None else self._child.process.pid

    def send(self, actions: Sequence[Action]) -> Sequence[Action]:
        with self._lock:
            if self._child is None or self._closing:
                return actions
            if self._actions_unsent + len(actions) > self._config.limits.queued_actions:
                return actions
            self._queue(frame(actions), len(actions))
            self._flush(self._child)
        return ()

    def admit(self, epoch: int) -> None:
        with self._lock:
            if self._ready is not None and self._ready.epoch == epoch:
                self._child = self._ready

    def replace(self) -> bool:
        child = self._child
        if child is None:
            return False
        child.process.kill()  # The supervisor sees its socket end.
        return True

    def close(self, deadline_s: float) -> int:
        with self._lock:
            if not self._closing:
                self._closing = True
                if self._child is not None:
                    self._queue(frame([Close(deadline_s)]), 0)
                    self._flush(self._child)
                if self._supervisor.is_alive():
                    os.eventfd_write(self._wake, 1)
        self._supervisor.join(deadline_s + 1.0)  # It answers within the deadline, or is killed.
        child = self._child
        if child is not None and child.process.poll() is None:
            child.process.kill()
            self._supervisor.join(1.0)
        if self._wake >= 0 and not self._supervisor.is_alive():
            os.close(self._wake)
            self._wake = -1
        return self._abandoned

    def _queue(self, body: bytes, actions: int) -> None:
        self._unsent.append((memoryview(body), actions))
        self._actions_unsent += actions

    def _flush(self, child: _Child) -> None:
        """Send what the socket takes now. Under the lock."""
        while self._unsent:
            rest, actions = self._unsent[0]
            try:
                sent = child.socket.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                os.eventfd_write(self._wake, 1)  # The supervisor sends the rest.
                return
            except OSError:
                return  # It is lost: the supervisor will say so, and everything sent to it is settled then.
            if sent < len(rest):
                self._unsent[0] = (rest[sent:], actions)
            else:
                self._unsent.popleft()
                self._actions_unsent -= actions

    # The supervisor's thread.

    def _supervise(self) -> None:
        epoch, failures = 0, 0
        while not self._closing:
            opened = self._run_child(epoch)
            if not self._started.is_set():
                self._failure = self._failure or OpenFailed(
                    "the runner's process ended before it was open", config=False
                )
                self._started.set()
                return
            failures = 0 if opened else failures + 1
            epoch += 1
            if failures and not self._closing:
                self._pause(RESTART_S[min(failures, len(RESTART_S) - 1)])

    def _run_child(self, epoch: int) -> bool:
        """Have one runner from its start to its end; say whether it got as far as open tiers."""
        try:
            child = self._start_child(epoch)
        except OSError as error:
            self._failure = OpenFailed(f"the runner's process cannot be started: {error}", config=False)
            logger.error("%s", self._failure.reason)  # No bug of ours: a traceback tells nothing more.
            return False
        opened = self._listen(child)
        self._lose(child, announced=opened)
        return opened

    def _start_child(self, epoch: int) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as unless_started:
            unless_started.callback(ours.close)
            process = subprocess.Popen(  # noqa: S603  # Our own module, with numbers for arguments.
                [sys.executable, "-P", "-m", "kvtier.bridge.child", str(theirs.fileno()), str(self._region_fd)],
                pass_fds=(theirs.fileno(), self._region_fd),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            unless_started.pop_all()
        with suppress(OSError):  # It has ended already: its socket says so to whoever listens.
            ours.sendall(framed(msgspec.msgpack.encode(self._config)))
        return _Child(epoch, process, ours)

    def _listen(self, child: _Child) -> bool:
        """Deliver what a runner says until it ends; say whether it got as far as open tiers."""
        opened = False
        buffer = FrameBuffer()
        silence_s = self._config.limits.heartbeat_s * BEATS_MISSED
        heard = time.monotonic()
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while True:
            poller.register(child.socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            ready = dict(poller.poll(silence_s * 250))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if ready.get(child.socket.fileno(), 0) & select.POLLOUT:
                with self._lock:
                    self._flush(child)
            if ready.get(child.socket.fileno(), 0) & ~select.POLLOUT:
                try:
                    received = child.socket.recv(RECEIVE_BYTES)
                except OSError:
                    received = b""
                if not received:
                    return opened
                heard = time.monotonic()
                for body in buffer.feed(received):
                    opened = self._hear(child, messages_of(body)) or opened
            elif opened and time.monotonic() - heard > silence_s:
                logger.error("runner %d: no heartbeat for %.1f s: killed", child.process.pid, silence_s)
                child.process.kill()
                return opened
            if self._closing and self._child is not child:  # Nobody could tell it to close.
                child.process.kill()

    def _hear(self, child: _Child, messages: Sequence[Message]) -> bool:
        """Take the bridge's own messages out, deliver the rest; say whether the tiers are open now."""
        opened = False
        rest: list[Message] = []
        for message in messages:
            match message:
                case Opened():
                    opened = True
                    self._ready = child
                    if self._started.is_set():
                        self._deliver((RunnerBack(child.epoch),))
                    self._started.set()
                case OpenFailed():
                    self._failure = message
                    logger.error("runner %d: %s", child.process.pid, message.reason)
                case Closed():
                    self._abandoned = message.abandoned
                case Beat():
                    pass
                case _:
                    rest.append(message)
        if rest:
            self._deliver(rest)
        return opened

    def _lose(self, child: _Child, *, announced: bool) -> None:
        """Tell the owner that a runner is lost, and have a thread of its own tell when its process has ended."""
        with self._lock:
            if self._child is child:
                self._child = None
            if self._ready is child:
                self._ready = None
            self._unsent.clear()
            self._actions_unsent = 0
        child.socket.close()
        if announced and not self._closing:
            logger.error("runner %d is lost; starting another", child.process.pid)
            self._deliver((RunnerLost(child.epoch, "the runner's process ended or hung"),))
        threading.Thread(target=self._reap, args=(child,), name="kvtier-reaper", daemon=True).start()

    def _reap(self, child: _Child) -> None:
        child.process.kill()
        child.process.wait()  # For as long as it takes: a process in uninterruptible I/O still uses its rows.
        self._deliver((RunnerGone(child.epoch),))

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._closing and (left := deadline - time.monotonic()) > 0:
            select.select([self._wake], [], [], left)
