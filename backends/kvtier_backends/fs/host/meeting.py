"""The meeting of engines and their keeper: a socket in the root, or in a directory of this user's for pools of memory.

The first engine that wants a keeper starts it, under a lock, with a socket that already listens: so nobody waits for it
to be ready, and no second keeper takes the socket of a living one.
"""

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NamedTuple, Self

import msgspec

from kvtier.backend import pack_keys
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.memory import child_environment, fill_standard_streams, reason
from kvtier_backends.fs.options import FsOptions, MemoryOptions, common_options
from kvtier_backends.fs.segments import wire

NAME = "kvtier-keeper"
LINGER_S = 300.0  # A keeper goes on for so long after its last engine.
START_S = 10.0

# Forked twice, it is no child of an engine's: an engine may kill all of its own when it ends, as vLLM does.
_APART = "import os; os.fork() and os._exit(0); os.setsid(); "
_RUN = "import sys, kvtier_backends.fs.host.keeper as keeper; keeper.main(sys.argv[1:])"


class Place(NamedTuple):
    """The directory where a keeper is met, and the name that its files have there."""

    directory: str
    name: str = NAME

    @classmethod
    def of_pool(cls, pool: str) -> Self:
        """Return the place of a pool of memory. Raises `ConfigError` if no directory for it can be made."""
        runtime = os.environ.get("XDG_RUNTIME_DIR") or ("/run" if os.geteuid() == 0 else None)
        directory = os.path.join(runtime, "kvtier") if runtime else f"{tempfile.gettempdir()}/kvtier-{os.geteuid()}"
        return cls(directory, f"{NAME}-{pool}")

    def __str__(self) -> str:
        return os.path.join(self.directory, self.name)

    def meet(self) -> socket.socket:
        """Return a connection to the keeper, which is started if there is none. Blocks.

        Raises `ConfigError` for what the user can mend, `BackendUnavailable` if no keeper can be started.
        """
        ends_at = time.monotonic() + START_S
        try:
            while True:
                with suppress(FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                    return self.connect()
                if (listener := self.claim()) is not None:
                    with listener:
                        self.run(listener, LINGER_S)
                elif time.monotonic() < ends_at:
                    time.sleep(0.1)
                else:
                    raise BackendUnavailable(f"{self}: the keeper does not start within {START_S:g} s")
        except subprocess.SubprocessError as error:
            raise BackendUnavailable(f"{self}: the keeper cannot be started: {error}") from error
        except OSError as error:
            raise ConfigError(f"shared: no keeper can be met in {self.directory}: {reason(error)}") from error

    def run(
        self, listener: socket.socket, how: float | FsOptions | MemoryOptions, stdin: int = subprocess.DEVNULL
    ) -> int:
        """Run a keeper's process: a service's with options, until it or stdin ends; else one that lingers apart."""
        fill_standard_streams()
        told = msgspec.json.encode(how if isinstance(how, int | float) else common_options(how)).decode()
        apart = isinstance(how, float)
        command = [sys.executable, "-P", "-c", (_APART if apart else "") + _RUN, str(self), told]
        with open(self.log() if apart else 2, "wb", closefd=apart) as log:
            return subprocess.run(  # noqa: S603  # Our own module.
                [*command, str(listener.fileno())], pass_fds=[listener.fileno()], stdin=stdin,
                stdout=subprocess.DEVNULL, stderr=log, env=child_environment(), check=apart,
            ).returncode  # fmt: skip

    def report(self) -> wire.Samples:
        """Return the metrics of the keeper that is here; without one that answers, none."""
        with suppress(OSError, msgspec.MsgspecError), self.connect() as connected, connected.makefile("rb") as answer:
            connected.settimeout(2.0)
            connected.sendall(wire.framed(wire.Call(1, "report", pack_keys(()))))
            connected.shutdown(socket.SHUT_WR)
            return msgspec.msgpack.decode(answer.read()[wire.LENGTH_BYTES :], type=wire.Answer).samples
        return []

    def claim(self) -> socket.socket | None:
        """Return a socket that listens here; None if a keeper's does, or another process is about to start one."""
        with suppress(FileExistsError):
            os.mkdir(self.directory, stat.S_IRWXU)
        if (lock := self._locked()) is None:
            return None
        try:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                self.connect().close()
                return None
            return self.listen()
        except BlockingIOError:  # It is there, and its backlog is full.
            return None
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # A process that another thread forks meanwhile has it, too.
            os.close(lock)

    def listen(self) -> socket.socket:
        """Return a new socket that listens in the place of a dead keeper's. The caller has the lock."""
        self.remove_socket(self.inode())
        with ExitStack() as undo:
            listener = undo.enter_context(self._at(socket.socket.bind))
            os.chmod(f"{self}.sock", 0o660 if os.stat(self.directory).st_mode & stat.S_IWGRP else 0o600)
            listener.listen(256)
            undo.pop_all()
        return listener

    def lock(self) -> int | None:
        """Keep engines from starting another keeper while this descriptor is open; None if one is about to."""
        try:
            return self._locked()
        except OSError:  # The directory is gone, and no engine meets a keeper there.
            return os.open(os.devnull, os.O_RDONLY)

    def inode(self) -> tuple[int, int] | None:
        """Return the number and the age of the socket that engines find here; None if there is none."""
        with suppress(OSError):
            status = os.stat(f"{self}.sock")
            return status.st_ino, status.st_ctime_ns  # File systems give a number again at once.
        return None

    def remove_socket(self, inode: tuple[int, int] | None) -> None:
        if inode is not None and self.inode() == inode:
            os.unlink(f"{self}.sock")

    def connect(self) -> socket.socket:
        return self._at(socket.socket.connect)

    def log(self) -> int:
        """Return a new file for a keeper's log, or nowhere if there can be none; the last keeper's is kept once."""
        with suppress(OSError):
            with suppress(FileNotFoundError):
                os.replace(f"{self}.log", f"{self}.log.1")
            return os.open(f"{self}.log", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        return os.open(os.devnull, os.O_WRONLY)

    def _at(self, bind_or_connect: Callable[[socket.socket, str], None]) -> socket.socket:
        """Return a socket with an address of the directory's descriptor: a socket's path has at most 107 bytes."""
        fd = os.open(self.directory, os.O_PATH | os.O_DIRECTORY)
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            status = os.fstat(fd)
            if self.name != NAME and (status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022):
                raise PermissionError(errno.EPERM, "another user owns it, or may write there")
            made = undo.enter_context(socket.socket(socket.AF_UNIX))
            made.setblocking(False)  # With a full backlog it would wait.
            bind_or_connect(made, f"/proc/self/fd/{fd}/{self.name}.sock")
            undo.pop_all()
        os.close(fd)
        return made

    def _locked(self) -> int | None:
        fd = os.open(f"{self}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd
