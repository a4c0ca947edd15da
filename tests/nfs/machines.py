"""A file server and guests that mount it: real kernels' NFS clients on a bridge, in a network namespace of its own."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tests.remote import servers

PATIENCE_S = 120.0  # For what must happen: two guests share a machine with others.
until = partial(servers.until, patience_s=PATIENCE_S)
REPOSITORY = Path(__file__).parents[2]
BRIDGE = "kvbr0"
SERVER = "10.213.77.1"
TALK = "10.213.77.6"  # Where guests are told what to do, also while they do not reach the server.
NFS_PORT = 20_490
LEASE_S = 10  # A client that is silent for so long loses its locks.
GUEST_MEMORY = "640M"

CONFIG = """
NFS_CORE_PARAM {{
    Protocols = 4; NFS_Port = {port}; Bind_addr = {server}; Plugins_Dir = {plugins}; mount_path_pseudo = true;
    Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false;
}}
NFSv4 {{
    Lease_Lifetime = {lease_s}; Grace_Period = {grace_s}; Graceless = {graceless}; RecoveryBackend = fs;
    Minor_Versions = 1, 2; Delegations = false;
    Only_Numeric_Owners = true; UseGetpwnam = true; DomainName = kvtier;
}}
EXPORT {{
    Export_Id = 1; Path = {export}; Pseudo = /kv; Access_Type = RW; Squash = No_Root_Squash; Sectype = sys;
    Protocols = 4; Transports = TCP; FSAL {{ Name = VFS; }}
}}
LOG {{ Default_Log_Level = EVENT; }}
"""


def run(*command):
    subprocess.run(command, check=True, capture_output=True)


class Network:
    """A bridge with the server's address and ours; it goes with the namespace."""

    def __init__(self):
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        for address in (SERVER, TALK):
            run("ip", "addr", "add", f"{address}/29", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")

    def tap(self, name):
        run("ip", "tuntap", "add", "dev", name, "mode", "tap")
        run("ip", "link", "set", name, "master", BRIDGE, "up")


class FileServer:
    """An NFS server over a folder; its clients' locks are reclaimed after a restart, unless it is `graceless`."""

    def __init__(self, folder):
        self.export = folder / "export"
        self.export.mkdir()
        self._folder, self._process = folder, None

    def start(self, *, graceless=False):
        program = shutil.which("ganesha.nfsd")
        assert program, "ganesha.nfsd is not on the path"
        plugins = Path(program).parents[1] / "lib" / "x86_64-linux-gnu" / "ganesha"
        config = self._folder / "ganesha.conf"
        config.write_text(
            CONFIG.format(
                port=NFS_PORT,
                server=SERVER,
                plugins=plugins,
                export=self.export,
                lease_s=LEASE_S,
                grace_s=2 * LEASE_S,
                graceless="true" if graceless else "false",
            )
        )
        self._process = subprocess.Popen(
            [program, "-F", "-f", str(config), "-L", str(self._folder / "ganesha.log"), "-p", "/run/ganesha.pid"]
        )
        for _ in range(int(PATIENCE_S / 0.05)):
            assert self._process.poll() is None, (self._folder / "ganesha.log").read_text()
            with socket.socket() as asked:
                asked.settimeout(0.05)
                if asked.connect_ex((SERVER, NFS_PORT)) == 0:
                    return
                threading.Event().wait(0.05)
        raise TimeoutError("the file server does not answer")

    def signal(self, number):
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            servers.wait_until_stopped(self._process.pid)

    def go_on(self):
        if self._process is None:
            self.start()
        else:
            self.signal(signal.SIGCONT)

    def kill(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class GuestError(Exception):
    """What a call in a guest has raised."""


class Guest:
    """A machine that runs `host.py`. Calls are answered in any order; a call that hangs holds up no other."""

    def __init__(self, number, network, folder):
        """Give it a plug, and the address `number` places after the server's."""
        self.name = f"host{number}"
        self._tap = f"kvt{number}"
        self._number, self._log = number, folder / f"{self.name}.log"
        network.tap(self._tap)
        self._listening = socket.create_server((TALK, 0))
        self._listening.settimeout(PATIENCE_S)
        self._process = None

    def boot(self):
        self._calls, self._numbers = {}, count()
        words = {
            "NAME": self.name,
            "ADDRESS": SERVER.removesuffix("1") + str(1 + self._number),
            "TALK": TALK,
            "PORT": str(self._listening.getsockname()[1]),
            "PYTHON": sys.executable,
            "REPOSITORY": str(REPOSITORY),
            "PROGRAMS": os.environ["KVTIER_NFS_PROGRAMS"],
            "PATH": os.environ["PATH"],
            "LIBS": os.environ["LD_LIBRARY_PATH"],
        }
        program = shutil.which("linux.uml")
        assert program, "linux.uml is not on the path"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"mem={GUEST_MEMORY}",
                    *("rootfstype=hostfs", "rootflags=/", "rw", f"init={REPOSITORY}/tests/nfs/guest_init"),
                    f"vec0:transport=tap,ifname={self._tap},depth=128,gro=1",
                    *("con=null", "con0=null,fd:1", "quiet"),
                    *(f"KV_{name}={word}" for name, word in words.items()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            connection, _ = self._listening.accept()
        except TimeoutError:
            self.kill()
            raise AssertionError(f"{self.name} does not boot: {self.log()}") from None
        self._connection = connection
        threading.Thread(target=self._hear, args=(connection, self._calls), daemon=True).start()

    def log(self):
        return self._log.read_text(errors="replace")

    def begin(self, method, *arguments, **more):
        number, answer = next(self._numbers), Future[Any]()
        self._calls[number] = answer
        self._connection.sendall(json.dumps([number, method, arguments, more]).encode() + b"\n")
        return answer

    def call(self, method, *arguments, **more):
        try:
            return self.begin(method, *arguments, **more).result(PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"{self.name} does not answer {method}: {self.log()}") from None

    def kill(self):
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _hear(self, connection, calls):
        try:
            with connection, connection.makefile("rb") as answers:
                for line in answers:
                    number, result, error = json.loads(line)
                    answer = calls.pop(number)
                    answer.set_result(result) if error is None else answer.set_exception(GuestError(error))
        except OSError:
            return  # It was killed.
