"""A real pool on free ports of this machine: a master, and owners whose memory it is."""

import importlib.util
import socket
import urllib.request
from contextlib import suppress
from pathlib import Path

from tests.remote.servers import PATIENCE_S, ServerProcess, free_port, until

__all__ = ["PATIENCE_S", "Pool", "Program", "folder", "free_port", "until"]

OWNER_BYTES = 256 << 20


def folder():
    """Return where the programs are: the commands on the path start Python first."""
    return Path(importlib.util.find_spec("mooncake").submodule_search_locations[0])


class Program(ServerProcess):
    def __init__(self, log, *command, **environment):
        super().__init__([str(word) for word in command], log, environment)


class Pool:
    def __init__(self, place, *, client_ttl_s=10, lease_s=1):
        self._place, self._lease_s, self._client_ttl_s = place, lease_s, client_ttl_s
        self.port, self._metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.owners = []
        self.master = self.start_master()

    def start_master(self):
        self.master = Program(
            self._place / "master.log",
            folder() / "mooncake_master",
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
            "--rpc_thread_num=2",
            f"--default_kv_lease_ttl={self._lease_s}s",
            f"--client_ttl={self._client_ttl_s}",
        )
        until(lambda: self._listens(self.port) and self._listens(self._metrics_port))
        return self.master

    def add_owner(self, size_bytes=OWNER_BYTES):
        before = set(self.segments())
        owner = Program(
            self._place / f"owner{len(self.owners)}.log",
            folder() / "mooncake_client",
            "--host=127.0.0.1",
            f"--port={free_port()}",
            f"--global_segment_size={size_bytes}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            "--start_offload_rpc_server=false",
            MC_TCP_BIND_ADDRESS="127.0.0.1",
        )
        self.owners.append(owner)
        until(lambda: set(self.segments()) - before)
        return owner

    def segments(self):
        about = f"http://127.0.0.1:{self._metrics_port}/get_all_segments"
        with suppress(OSError), urllib.request.urlopen(about, timeout=PATIENCE_S) as answer:
            return [line for line in answer.read().decode().splitlines() if line.strip()]
        return []

    def close(self):
        for program in [*self.owners, self.master]:
            program.kill()

    def _listens(self, port):
        self.master.check()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S):
            return True
        return False
