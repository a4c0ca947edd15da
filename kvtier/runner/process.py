"""The runner in its own process: independent of the LLM engine's GIL, and killed and replaced when it hangs.

A daemon thread of the owner's process supervises it. This thread reads messages, and sends bytes that the socket did
not take at once. It listens for heartbeats, and starts the next runner when one is lost. The owner's own thread only
pops and pushes.
"""

import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Self

import msgspec

from kvtier.backend import EngineId
from kvtier.config import QUEUED_ACTIONS_MAX, EngineConfig
from kvtier.errors import BackendUnavailable, ConfigError, Remedy
from kvtier.memory import GROUP_SIGNALS, Region, child_environment, fill_standard_streams, reason, start_thread
from kvtier.runner import messages
from kvtier.runner.bridge import Bridge, opening_s

RECEIVE_BYTES = 1 << 20
BEATS_MISSED = 3  # More of them in a row are a hung loop.
RESTART_S = (0.0, 0.1, 0.5, 1.0, 5.0)  # Before each further start in a row that did not get as far as open tiers.

logger = logging.getLogger(__name__)


class Detached:
    """A runner that is no child of this process, by a descriptor of its process: it has no exit status."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._lock = threading.Lock()  # Without it, a closed number could be another process's when it is killed.
        self._close = weakref.finalize(self, os.close, pidfd)  # In a fork, whose supervisor is gone, by itself.

    def poll(self) -> int | None:
        """Return 0 if it has ended."""
        with self._lock:
            return self._ended(0) if self._close.alive else 0

    def wait(self) -> int | None:
        """Return 0 once it has ended. One thread waits, and the descriptor is closed then."""
        ended = self._ended(None)
        with self._lock:
            self._close()
        return ended

    def kill(self) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._close.alive:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _ended(self, timeout_ms: int | None) -> int | None:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return 0 if poller.poll(timeout_ms) else None


Child = Detached | subprocess.Popen[bytes]


def _detached(starter: subprocess.Popen[bytes], owner_socket: socket.socket, timeout_s: float) -> Child:
    """Wait for the runner's first message and its starter's end; OSError if it does not come, or without a descriptor.

    A starter that ended without one is returned: its socket shows it.
    """
    owner_socket.settimeout(timeout_s)
    try:
        pid, fds, _, _ = socket.recv_fds(owner_socket, 20, 1)  # Any process id has fewer digits.
    finally:
        owner_socket.settimeout(None)
        starter.kill()
        starter.wait()
    if pid and not fds:  # The kernel leaves a descriptor out that exceeds the limit.
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return Detached(int(pid), fds[0]) if pid else starter


class RunnerProcess:
    """A child, the owner's end of its socket, and frames that are not sent yet. Threads share them under a lock."""

    def __init__(self, epoch: int, process: Child, owner_socket: socket.socket) -> None:
        self.epoch = epoch
        self.process = process
        self.socket = owner_socket
        self.actions_unsent = 0
        self.unsent: deque[tuple[memoryview, int]] = deque()  # A frame's rest, and its number of actions.

    @classmethod
    def start(
        cls, epoch: int, config: EngineConfig, region_fd: int, engine: EngineId, environment: Mapping[str, str]
    ) -> Self:
        """Start a child and send it the configuration; OSError if it cannot be started."""
        fill_standard_streams()  # They may have been closed since the last start.
        ours, theirs = socket.socketpair()
        owner_fds: list[int] = []
        with theirs, ExitStack() as at_end, ExitStack() as unless_started:
            unless_started.callback(ours.close)
            with suppress(OSError):  # The kernel, or a sandbox, lacks it.
                owner_fds.append(os.pidfd_open(os.getpid()))  # By which the child sees this process end.
                at_end.callback(os.close, owner_fds[0])
            fds = (theirs.fileno(), region_fd, *owner_fds)
            given = map(str, (theirs.fileno(), region_fd, messages.wanted_level(), *engine, *owner_fds))
            module = "kvtier.runner.detached" if owner_fds else "kvtier.runner.child"
            process = subprocess.Popen(  # noqa: S603  # Our own module, with numbers for arguments.
                [sys.executable, "-P", "-m", module, *given], pass_fds=fds, stdin=subprocess.DEVNULL, env=environment
            )
            theirs.close()  # A starter that ends shows at the other end.
            child = _detached(process, ours, opening_s(config)) if owner_fds else process
            unless_started.pop_all()
        with suppress(OSError):  # It has ended already, which its socket shows.
            ours.sendall(messages.framed(msgspec.msgpack.encode(config)))
        return cls(epoch, child, ours)

    def queue(self, items: Sequence[messages.Action | messages.Close]) -> None:
        self.unsent.append((memoryview(messages.frame(items)), len(items)))
        self.actions_unsent += len(items)

    def flush(self) -> bool:
        """Send as much as the socket takes, without waiting; return True if some is left. A dead child takes all."""
        while self.unsent:
            rest, actions = self.unsent[0]
            try:
                sent = self.socket.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if sent < len(rest):
                self.unsent[0] = (rest[sent:], actions)
            else:
                self.unsent.popleft()
                self.actions_unsent -= actions
        return False


class ProcessBridge(Bridge):
    """One runner's process at a time, counted by epoch."""

    kind = "process"
    returns = True

    def __init__(self, config: EngineConfig, region: Region) -> None:
        """Start the runner and wait for its tiers. `ConfigError`, or `BackendUnavailable` if one fails to open."""
        super().__init__()
        assert region.fd is not None, "a process needs a region that can be shared"
        self._config = config
        self._region = region
        self._region_fd = region.fd
        self._engine = EngineId.new()
        self._environment = child_environment()
        self._lock = threading.Lock()  # Around a child's frames; never held across a wait.
        fill_standard_streams()
        try:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise BackendUnavailable(f"the runner's process cannot be started: {reason(error)}") from error
        self._ready: RunnerProcess | None = None  # Open, but not yet admitted.
        self._child: RunnerProcess | None = None  # Takes actions.
        self._newest: RunnerProcess | None = None  # Has a socket of ours.
        self._closing = False
        self._dropped = False
        self._abandoned = 0
        self._started = threading.Event()
        self._failure: messages.OpenFailed | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="kvtier-supervisor", daemon=True)
        try:
            start_thread(self._supervisor)
            if not self._started.wait(opening_s(config)):
                self._failure = self._failure or _never_open(opening_s(config))
            if self._failure is not None:
                raise (ConfigError if self._failure.config else BackendUnavailable)(self._failure.reason)
        except RuntimeError as error:
            self._forget()
            raise BackendUnavailable(f"the runner's supervisor cannot be started: {reason(error)}") from error
        except BaseException:  # An interrupt, too: the caller has no runner to close.
            self.close(0)
            raise
        self.admit(0)

    @property
    def pid(self) -> int | None:
        child = self._child  # Once: the supervisor may lose it meanwhile.
        return None if child is None else child.process.pid

    def send(self, actions: Sequence[messages.Action]) -> Sequence[messages.Action]:
        with self._lock:
            child = self._child
            if child is None or self._closing:
                return actions
            if child.actions_unsent + len(actions) > QUEUED_ACTIONS_MAX:
                return actions
            child.queue(actions)
            self._flush(child)
        return ()

    def admit(self, epoch: int) -> None:
        with self._lock:
            if self._ready is not None and self._ready.epoch == epoch:
                self._child = self._ready

    def replace(self) -> bool:
        if (child := self._child) is None:
            return False
        child.process.kill()  # Its socket closes, which wakes the supervisor.
        return True

    def close(self, deadline_s: float) -> int:
        self._ask_to_close(deadline_s)
        self._supervisor.join(deadline_s + 1.0)  # The runner answers within the deadline, or is killed.
        child = self._child
        if child is not None and child.process.poll() is None:
            child.process.kill()
            self._supervisor.join(1.0)
        if not self._supervisor.is_alive():
            self._forget()
        return self._abandoned

    def drop(self) -> None:
        self._dropped = True  # The garbage collector may call this from within any line, so it takes no lock.
        os.eventfd_write(self._wake, 1)

    def _ask_to_close(self, deadline_s: float) -> None:
        with self._lock:
            if not self._closing:
                self._closing = True
                if self._child is not None:
                    self._child.queue([messages.Close(deadline_s)])
                    self._flush(self._child)
                if self._supervisor.is_alive():
                    os.eventfd_write(self._wake, 1)

    def forked(self) -> None:
        self._closing = True
        self._child = self._ready = None
        if self._newest is not None:
            self._newest.socket.close()
        self._forget()

    def _forget(self) -> None:
        """Close the supervisor's descriptor; idempotent."""
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _flush(self, child: RunnerProcess) -> None:
        """Send as many bytes as the socket takes, and leave the rest to the supervisor. The caller holds the lock."""
        if child.flush():
            os.eventfd_write(self._wake, 1)

    # The supervisor's thread.

    def _supervise(self) -> None:
        # A runner inherits this mask, so a signal to the whole group cannot end it before it ignores them.
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        epoch, failures = 0, 0
        while not (self._closing or self._dropped):
            opened = self._run_child(epoch)
            if not self._started.is_set():
                ended = MemoryError("the runner's process ended before it was open")  # The usual cause.
                self._failure = self._failure or messages.OpenFailed(reason(ended), config=False)
                self._started.set()
                return
            failures = 0 if opened else failures + 1
            epoch += 1
            if failures and not self._closing:
                self._pause(RESTART_S[min(failures, len(RESTART_S) - 1)])
        if self._dropped:
            self._region.close()
            self._forget()

    def _run_child(self, epoch: int) -> bool:
        """Run one runner from its start to its end; return True if it opened its tiers."""
        try:
            child = RunnerProcess.start(epoch, self._config, self._region_fd, self._engine, self._environment)
        except Exception as error:  # noqa: BLE001  # Reported to the caller of the start; a later start is tried again.
            self._fail(messages.OpenFailed(f"the runner's process cannot be started: {reason(error)}", config=False))
            return False
        self._newest = child
        try:
            opened = self._listen(child)
        except Exception:  # Our bug, or invalid messages: the next runner is started all the same.
            logger.exception("runner %d: cannot be listened to; see %s", child.process.pid, Remedy.RUNNER)
            opened = self._ready is child
        self._lose(child, announced=opened)
        return opened

    def _listen(self, child: RunnerProcess) -> bool:
        """Deliver a runner's messages until it ends; return True if it opened its tiers."""
        opened = False
        buffer = messages.FrameBuffer()
        silence_s, start_s = self._config.limits.heartbeat_s * BEATS_MISSED, opening_s(self._config)
        heard = time.monotonic()
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while True:
            poller.register(child.socket, select.POLLIN | (select.POLLOUT if child.unsent else 0))
            ready = dict(poller.poll(silence_s * 250))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._dropped:
                self._ask_to_close(self._config.limits.close_s)
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
                    opened = self._hear(child, messages.messages_of(body)) or opened
            elif opened and time.monotonic() - heard > silence_s:
                logger.error(
                    "runner %d: no heartbeat for %.1f s: killed; see %s", child.process.pid, silence_s, Remedy.RUNNER
                )
                child.process.kill()
                return True
            elif not opened and time.monotonic() - heard > start_s:
                self._fail(_never_open(start_s))
                child.process.kill()
                return False
            if self._closing and self._child is not child:  # It was not admitted, so it gets no `Close`.
                child.process.kill()

    def _hear(self, child: RunnerProcess, received: Sequence[messages.Message]) -> bool:
        """Handle the bridge's own messages and deliver the others; return True if one says that the tiers are open."""
        opened = False
        rest: list[messages.Message] = []
        for message in received:
            match message:
                case messages.Opened():
                    opened = True
                    self._ready = child
                    if self._started.is_set():
                        logger.info("runner %d takes its place", child.process.pid)
                        self._deliver((messages.RunnerBack(child.epoch),))
                    self._started.set()
                case messages.OpenFailed():
                    self._fail(message)
                case messages.Closed():
                    self._abandoned = message.abandoned
                case messages.Beat():
                    pass
                case messages.Logged():
                    messages.log_again(message)
                case _:
                    rest.append(message)
        if rest:
            self._deliver(rest)
        return opened

    def _fail(self, failure: messages.OpenFailed) -> None:
        """Keep the reason for the caller of the start; after the start, log it."""
        self._failure = failure
        if self._started.is_set():
            logger.error("no new runner: %s; see %s", failure.reason, Remedy.OPENING)

    def _lose(self, child: RunnerProcess, *, announced: bool) -> None:
        """Report a lost runner to its owner now, and from a thread once its process has ended."""
        with self._lock:
            if self._child is child:
                self._child = None
            if self._ready is child:
                self._ready = None
        child.socket.close()
        if announced and not self._closing:
            logger.error("runner %d is lost; starting another; see %s", child.process.pid, Remedy.RUNNER)
            self._deliver((messages.RunnerLost(child.epoch, "the runner's process ended or hung"),))
        try:
            start_thread(threading.Thread(target=self._reap, args=(child,), name="kvtier-reaper", daemon=True))
        except RuntimeError:  # No more threads: the next runner waits for this process to end.
            self._reap(child)

    def _reap(self, child: RunnerProcess) -> None:
        child.process.kill()
        child.process.wait()  # Without a limit: a process in uninterruptible I/O still uses its rows.
        self._deliver((messages.RunnerGone(child.epoch),))

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not (self._closing or self._dropped) and (left := deadline - time.monotonic()) > 0:
            poller = select.poll()  # select.select takes no descriptor above 1,023.
            poller.register(self._wake, select.POLLIN)
            poller.poll(left * 1_000)


def _never_open(seconds: float) -> messages.OpenFailed:
    return messages.OpenFailed(f"the runner does not open within {seconds:g} s: a tier blocks", config=False)
