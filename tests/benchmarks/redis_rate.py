"""The rate of the redis tier beside plain sockets: `python -m tests.benchmarks.redis_rate`.

Sides take turns in one run, on one machine, over its loopback; what is said is the median of the rounds. The plain side
is a process that sends and receives over as many connections as the tier has lanes, checks nothing and keeps nothing.
The server is PyPI's Redis, or the one that `KVTIER_REDIS_SERVER` names. Each put replaces values: a server's memory is
full for all its life but its first hours.
"""

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from kvtier.testing.conformance import Lender, keys_of, tier_context
from kvtier_backends.redis import RedisBackend, RedisOptions
from tests.redis.servers import RedisServer

LANES = 4
KEYS = "KVTIER_BENCH_SEAL_KEYS"


def serve(total_bytes: int) -> None:
    """Send or receive so many bytes on each connection, as often as it is asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    memory = memoryview(bytearray(total_bytes))

    def work(connection: socket.socket) -> None:
        while asked := connection.recv(1):
            if asked == b"g":
                connection.sendall(memory)
            else:
                receive(connection, memory)
                connection.sendall(b"k")

    while True:
        threading.Thread(target=work, args=(listener.accept()[0],), daemon=True).start()


def receive(connection: socket.socket, into: memoryview) -> None:
    got = 0
    while got < len(into):
        got += connection.recv_into(into[got:])


class Plain:
    """Connections to `serve`, and rows."""

    def __init__(self, row_bytes: int, count: int) -> None:
        self.share_bytes = row_bytes * count // LANES
        self.process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--serve", str(self.share_bytes)], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        port = int(self.process.stdout.readline())
        self.connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(LANES)]
        self.memory = [memoryview(bytearray(self.share_bytes)) for _ in range(LANES)]

    def get(self) -> None:
        self._all(
            lambda lane: (self.connections[lane].sendall(b"g"), receive(self.connections[lane], self.memory[lane]))
        )

    def put(self) -> None:
        def one(lane: int) -> None:
            self.connections[lane].sendall(b"p")
            self.connections[lane].sendall(self.memory[lane])
            self.connections[lane].recv(1)

        self._all(one)

    def _all(self, one: Callable[[int], object]) -> None:
        threads = [threading.Thread(target=one, args=(lane,)) for lane in range(LANES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


async def measure(server: RedisServer, row_bytes: int, count: int, rounds: int) -> None:
    os.environ[KEYS] = "ab" * 32
    tiers = {
        "redis": RedisOptions(url=f"redis://{server.address}", prefix="a/"),
        "redis, aes-256-gcm": RedisOptions(
            url=f"redis://{server.address}", prefix="b/", seal="aes-256-gcm", seal_key_env=KEYS
        ),
    }
    plain, keys = Plain(row_bytes, count), keys_of(count)
    seconds: dict[tuple[str, str], list[float]] = {}
    cpu: dict[tuple[str, str], list[float]] = {}

    async def timed(side: str, what: str, call: Callable[[], object]) -> None:
        began, began_cpu = time.perf_counter(), time.process_time()
        if asyncio.iscoroutine(made := call()):
            assert not any(await made)
        seconds.setdefault((side, what), []).append(time.perf_counter() - began)
        cpu.setdefault((side, what), []).append(time.process_time() - began_cpu)

    opened = {name: await RedisBackend.open(options, tier_context(row_bytes)) for name, options in tiers.items()}
    about = server.ask("INFO")
    name, version = about.get("server_name", "redis"), about.get("valkey_version", about["redis_version"])
    print(f"{name} {version}, {about['mem_allocator']}")
    lender = Lender(row_bytes)
    writes, reads = lender.writes(keys), lender.reads(keys)
    for _ in range(rounds):
        await timed("sockets", "put", plain.put)
        await timed("sockets", "get", plain.get)
        for name, tier in opened.items():
            await timed(name, "put", lambda tier=tier: tier.store(writes))
            await timed(name, "get", lambda tier=tier: tier.load(reads))
    for (side, what), taken in seconds.items():
        plain_taken = seconds["sockets", what]
        rates = [row_bytes * count / one / 1e9 for one in (statistics.median(taken), min(taken))]
        ratios = [one(plain_taken) / one(taken) for one in (statistics.median, min)]
        spent = statistics.median(cpu[side, what]) * 1e3
        print(
            f"{what} {side:20} median {rates[0]:5.2f} GB/s, {ratios[0]:4.2f} of sockets; "
            f"best {rates[1]:5.2f} GB/s, {ratios[1]:4.2f}; {spent:5.1f} ms of CPU"
        )
    probes = keys_of(1_000, start=10_000)
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        await opened["redis"].probe(probes)
        taken.append(time.perf_counter() - began)
    print(f"probe of 1,000 keys {statistics.median(taken) * 1e3:.2f} ms")
    for tier in opened.values():
        await tier.aclose(10)
    plain.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--row-bytes", type=int, default=2 << 20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder)).start()
        try:
            uvloop.run(measure(server, given.row_bytes, given.batch, given.rounds))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
