"""The rate of the object tier beside bare obstore: `python -m tests.benchmarks.object_rate`.

Sides take turns in one run, on one machine, over its loopback; what is said is the median of the rounds, and of their
ratios. The bare side makes the same requests with the same client, as many at once, without a seal, and copies what it
gets into the rows. The server keeps objects in memory and checks nothing, so that the client is what is measured;
`--endpoint` and `--bucket` name a real one, with credentials in the environment.
"""

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import obstore
import uvloop

from kvtier.testing.conformance import Lender, keys_of, tier_context
from kvtier_backends.object import ObjectBackend, ObjectOptions
from kvtier_backends.object.bucket import make_store

KEYS = "KVTIER_BENCH_SEAL_KEYS"
OK = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nLast-Modified: Mon, 12 Oct 2009 17:50:00 GMT\r\n'
EMPTY_LIST = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


def serve() -> None:
    """Answer PUT, GET, HEAD and LIST, a thread a connection; every list is empty."""
    listener, objects = socket.create_server(("127.0.0.1", 0), backlog=256), {}
    print(listener.getsockname()[1], flush=True)

    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        left = b""
        while True:
            while b"\r\n\r\n" not in left:
                if not (more := connection.recv(1 << 16)):
                    return
                left += more
            head, left = left.split(b"\r\n\r\n", 1)
            request, *lines = head.split(b"\r\n")
            method, path, _ = request.split(b" ")
            headers = {name.lower(): value.strip() for name, value in (line.split(b":", 1) for line in lines)}
            if method == b"PUT":
                body = bytearray(int(headers[b"content-length"]))
                body[: len(left)] = left
                receive(connection, memoryview(body)[len(left) :])
                objects[path], left = (body, headers.get(b"x-amz-meta-kvtier", b"")), b""
                connection.sendall(OK + b"Content-Length: 0\r\n\r\n")
            elif b"list-type" in path:
                connection.sendall(OK + b"Content-Length: %d\r\n\r\n%b" % (len(EMPTY_LIST), EMPTY_LIST))
            else:
                body, seal = objects[path]
                connection.sendall(OK + b"x-amz-meta-kvtier: %b\r\nContent-Length: %d\r\n\r\n" % (seal, len(body)))
                if method == b"GET":
                    connection.sendall(body)

    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


def receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        into = into[connection.recv_into(into) :]


class Bare:
    """The same requests by obstore alone."""

    def __init__(self, options: ObjectOptions, at_once: int) -> None:
        self._store = make_store(options)
        self._at_once = at_once

    async def put(self, rows: Sequence[memoryview]) -> None:
        async def one(index: int) -> None:
            await obstore.put_async(self._store, f"bare/{index}", rows[index], use_multipart=False)

        await self._all(len(rows), one)

    async def get(self, rows: Sequence[memoryview]) -> None:
        async def one(index: int) -> None:
            result = await obstore.get_async(self._store, f"bare/{index}")
            rows[index][:] = memoryview(await result.bytes_async())

        await self._all(len(rows), one)

    async def _all(self, count: int, one: Callable[[int], Awaitable[None]]) -> None:
        left = iter(range(count))

        async def some() -> None:
            for index in left:
                await one(index)

        await asyncio.gather(*(some() for _ in range(self._at_once)))


async def measure(where: dict[str, Any], row_bytes: int, count: int, rounds: int) -> None:
    os.environ[KEYS] = "ab" * 32
    options = {
        "object": ObjectOptions(**where),
        "object, aes-256-gcm": ObjectOptions(**where, seal="aes-256-gcm", seal_key_env=KEYS),
    }
    at_once = max(1, min(16, (64 << 20) // row_bytes))
    bare, keys, lender = Bare(options["object"], at_once), keys_of(count), Lender(row_bytes)
    tiers = {name: await ObjectBackend.open(given, tier_context(row_bytes)) for name, given in options.items()}
    writes, reads = lender.writes(keys), lender.reads(keys)
    sent, got = [write.row for write in writes], [read.into for read in reads]
    seconds: dict[tuple[str, str], list[float]] = {}
    cpu: dict[tuple[str, str], list[float]] = {}

    async def timed(side: str, what: str, call: Awaitable[Any]) -> None:
        began, began_cpu = time.perf_counter(), time.process_time()
        assert not any(await call or ())
        seconds.setdefault((side, what), []).append(time.perf_counter() - began)
        cpu.setdefault((side, what), []).append(time.process_time() - began_cpu)

    for _ in range(rounds):
        await timed("obstore", "put", bare.put(sent))
        await timed("obstore", "get", bare.get(got))
        for name, tier in tiers.items():
            await timed(name, "put", tier.store(writes))
            await timed(name, "get", tier.load(reads))
    for (side, what), taken in sorted(seconds.items(), key=lambda item: item[0][1]):
        rates = [row_bytes * count / one / 1e9 for one in (statistics.median(taken), min(taken))]
        ratio = statistics.median(bare / ours for bare, ours in zip(seconds["obstore", what], taken, strict=True))
        spent, bare_spent = (statistics.median(cpu[one, what]) / count * 1e3 for one in (side, "obstore"))
        print(
            f"{what} {side:20} {rates[0]:5.2f} GB/s, at best {rates[1]:5.2f}; {ratio:4.2f} of obstore's rate; "
            f"{spent:6.3f} ms of CPU a chunk, obstore's is {bare_spent / spent:4.2f} of it"
        )
    await known(tiers["object"], writes, rounds)
    for tier in tiers.values():
        await tier.aclose(10)


async def known(tier: ObjectBackend, writes: Sequence[Any], rounds: int) -> None:
    """Say how long a look-up of 1,000 keys takes that are known to be there."""
    keys = keys_of(1_000, start=10_000)
    for start in range(0, len(keys), len(writes)):
        some = [write._replace(key=key) for write, key in zip(writes, keys[start:], strict=False)]
        assert not any(await tier.store(some))
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        assert all(await tier.probe(keys))
        taken.append(time.perf_counter() - began)
    print(f"probe of 1,000 keys that are known {statistics.median(taken) * 1e3:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint")
    parser.add_argument("--bucket", default="bucket")
    parser.add_argument("--row-bytes", type=int, default=2 << 20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    if given.serve:
        serve()
    server = None
    if (endpoint := given.endpoint) is None:
        os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
        server = subprocess.Popen([sys.executable, "-m", __spec__.name, "--serve"], stdout=subprocess.PIPE)
        assert server.stdout is not None
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
    where = {"url": f"s3://{given.bucket}/bench", "endpoint": endpoint}
    try:
        uvloop.run(measure(where, given.row_bytes, given.batch, given.rounds))
    finally:
        if server is not None:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
