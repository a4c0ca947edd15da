"""What every suite of a remote tier stands on: real servers on free ports of this machine, and a proxy before them.

A server does not outlive the test run, however that ends. The proxy does to connections what networks do.
"""

import ctypes
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PATIENCE_S = 60.0  # For what must happen: a machine under load may take its time.
NO_LINGER = struct.pack("ii", 1, 0)  # Closing sends a reset.
PR_SET_PDEATHSIG = 1
PIECE_BYTES = 1 << 16  # That a proxy passes on at once.

ENDS_WITH_US = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""

_starter = ThreadPoolExecutor(1, "starts-servers")  # The system ends a server with the thread that has started it.


def end_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def free_port(*, with_bus=False):
    """Return a port that nobody listens on; a cluster's node wants the one 10,000 above, too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if not with_bus:
                return port
            try:
                other.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port


class OneServer:
    _process: "ServerProcess | None" = None  # None until it is started.

    def signal(self, number):
        assert self._process is not None
        self._process.signal(number)

    def kill(self):
        if self._process is not None:
            self._process.kill()
            self._process = None


class ServerProcess:
    def __init__(self, command, log, environment=None):
        """Start it; what it prints goes to the end of `log`."""
        self._command, self._log = command, log
        self._environment = {**os.environ, **(environment or {})}
        self._process = _starter.submit(self._started).result()

    def _started(self):
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", ENDS_WITH_US, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    def check(self):
        assert self._process.poll() is None, f"{self._command[0]} has ended: {self._log.read_text()[-2_000:]}"

    def signal(self, number):
        """Send a signal; one that stops the program is waited for."""
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            wait_until_stopped(self._process.pid)

    def stop(self):
        self._process.terminate()
        self._process.wait()

    def kill(self):
        self._process.kill()
        self._process.wait()


def wait_until_stopped(pid):
    """Wait until a process that was sent SIGSTOP has stopped: on a busy machine its threads run on for a while."""
    tasks = Path(f"/proc/{pid}/task")
    until(lambda: all(_is_stopped(task) for task in tasks.iterdir()))


def _is_stopped(task):
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except (FileNotFoundError, ProcessLookupError):
        return True  # It ended meanwhile.


def until(condition, patience_s=PATIENCE_S):
    ends_at = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < ends_at, "it has not happened"
        time.sleep(0.01)


class Proxy:
    """Stands before a server. What is read from the server passes through `reply`, bytes in, bytes out; None resets.

    `pause_s` goes by before each piece, either way. With `tls`, clients speak TLS to it.
    """

    def __init__(self, port, host="127.0.0.1", tls=None):
        self.reply: Callable[[bytes], bytes | None] = lambda passed: passed
        self.held: list[bytes] = []  # Replies that had to wait.
        self._passes = threading.Event()
        self._passes.set()
        self.piece_bytes, self.pause_s, self._to = PIECE_BYTES, 0.0, port
        self._host, self._tls = host, tls
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listening, self.port = threading.Event(), 0
        self.listen()
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def listen(self):
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, self.port), family=family)
        self.port = listener.getsockname()[1]
        self._listening.set()
        self._run(self._accept, listener)

    def refuse(self):
        self._listening.clear()
        for thread in [thread for thread in self._threads if thread.name == self._accept.__name__]:
            thread.join(PATIENCE_S)
        self.reset()

    def hold(self):
        self._passes.clear()

    def pass_on(self):
        self.reply = lambda passed: passed
        self.piece_bytes, self.pause_s = PIECE_BYTES, 0.0
        self._passes.set()

    def _run(self, call, *arguments):
        self._threads.append(threading.Thread(target=call, args=arguments, name=call.__name__, daemon=True))
        self._threads[-1].start()

    def reset(self):
        connections, self._connections = self._connections, []
        for connection in connections:
            _reset(connection)

    def end(self):
        self._passes.set()
        self.refuse()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _accept(self, listener):
        with listener:
            while self._listening.is_set():
                if not select.select([listener], [], [], 0.05)[0]:
                    continue
                ours = listener.accept()[0]
                try:
                    ours = self._tls.wrap_socket(ours, server_side=True) if self._tls else ours
                    theirs = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # The server is away, or TLS fails, and the proxy stays.
                    _reset(ours)
                    continue
                self._connections += [ours, theirs]
                self._run(self._pump, ours, theirs, False)
                self._run(self._pump, theirs, ours, True)

    def _pump(self, source, target, is_reply):
        try:
            while passed := source.recv(self.piece_bytes):
                size_bytes = self.piece_bytes  # By now: it was asked for when pieces may have been longer.
                for start in range(0, len(passed), size_bytes):
                    if not self._pass(passed[start : start + size_bytes], target, is_reply):
                        return
        except (OSError, ValueError):
            pass
        finally:
            _reset(source)
            _reset(target)

    def _pass(self, piece, target, is_reply):
        if is_reply:
            if not self._passes.is_set():
                self.held.append(piece)
            self._passes.wait(PATIENCE_S)
            changed = self.reply(piece)
            if changed is None:
                return False
            piece = changed
        if self.pause_s:
            time.sleep(self.pause_s)
        target.sendall(piece)
        return True


def _reset(connection):
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()
