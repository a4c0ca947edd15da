"""The rate of a remote tier beside its limit: `python -m tests.benchmarks.remote_rate redis|object|mooncake`.

Sides take turns in one run, on one machine, over its loopback. The figures are medians of the rounds. The limit checks
nothing: plain sockets, as many as the redis tier has lanes, to a process that keeps nothing; obstore's own requests, as
many at once; Mooncake's own zero-copy calls. The object tier's server keeps objects in memory and checks nothing: the
client is measured. Redis is PyPI's, or the server that `KVTIER_REDIS_SERVER` names.
"""

import argparse
import asyncio
import ctypes
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import obstore
import uvloop

from kvtier.backend.remote import RemoteBackend
from kvtier.testing.conformance import Lender, keys_of, tier_context
from kvtier_backends.mooncake import MooncakeBackend, MooncakeOptions
from kvtier_backends.mooncake.client import connect
from kvtier_backends.object import ObjectBackend, ObjectOptions
from kvtier_backends.object.bucket import make_store
from kvtier_backends.redis import RedisBackend, RedisOptions

LANES, AT_ONCE = 4, 16
ZERO_COPY_CHUNKS = 32  # In a call; Mooncake refuses more than some hundreds.
KEYS = "KVTIER_BENCH_SEAL_KEYS"
OK = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nLast-Modified: Mon, 12 Oct 2009 17:50:00 GMT\r\n'
EMPTY_LIST = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


def serve(answer):
    """Print a port, and answer each connection in a thread."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


def served(made, *arguments):
    """Start this program as a server, and return its port."""
    command = [sys.executable, "-m", "tests.benchmarks.remote_rate", *map(str, arguments)]
    process = made.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
    made.callback(process.kill)
    assert process.stdout is not None
    return int(process.stdout.readline())


def receive(connection, into):
    while into:
        into = into[connection.recv_into(into) :]


def answer_bytes(total_bytes):
    """Return a server of plain bytes: for a `g` it sends them, for anything else it receives them."""
    memory = memoryview(bytearray(total_bytes))

    def answer(connection):
        while asked := connection.recv(1):
            if asked == b"g":
                connection.sendall(memory)
            else:
                receive(connection, memory)
                connection.sendall(b"k")

    return answer


def answer_requests():
    """Return a server of PUT, GET, HEAD and LIST; every list is empty."""
    objects: dict[bytes, tuple[bytearray, bytes]] = {}

    def answer(connection):
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
            elif path not in objects:
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            else:
                body, seal = objects[path]
                connection.sendall(OK + b"x-amz-meta-kvtier: %b\r\nContent-Length: %d\r\n\r\n" % (seal, len(body)))
                if method == b"GET":
                    connection.sendall(body)

    return answer


def all_at_once(call, calls):
    threads = [threading.Thread(target=call, args=(number,)) for number in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def sockets(made, rows):
    share_bytes = len(rows) * len(rows[0]) // LANES
    port = served(made, "sockets", share_bytes)
    links = [made.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(LANES)]
    memory = [memoryview(bytearray(share_bytes)) for _ in range(LANES)]

    def put_one(lane):
        links[lane].sendall(b"p")
        links[lane].sendall(memory[lane])
        links[lane].recv(1)

    def get_one(lane):
        links[lane].sendall(b"g")
        receive(links[lane], memory[lane])

    async def put():
        all_at_once(put_one, range(LANES))

    async def get():
        all_at_once(get_one, range(LANES))

    return put, get


def bare_obstore(options, rows):
    store = make_store(options)
    at_once = max(1, min(AT_ONCE, options.window_bytes // len(rows[0])))

    async def put_one(index):
        await obstore.put_async(store, f"bare/{index}", rows[index], use_multipart=False)

    async def get_one(index):
        result = await obstore.get_async(store, f"bare/{index}")
        rows[index][:] = memoryview(await result.bytes_async())

    async def each(call):
        left = iter(range(len(rows)))

        async def some():
            for index in left:
                await call(index)

        await asyncio.gather(*(some() for _ in range(at_once)))

    return lambda: each(put_one), lambda: each(get_one)


def zero_copy(made, options, rows):
    """Return Mooncake's own calls on the rows themselves."""
    client = connect(options, "bench")
    names = [f"bare/{index}" for index in range(len(rows))]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(row)) for row in rows]
    made.callback(client.close)
    made.callback(client.remove, names)

    async def move(call):
        for start in range(0, len(names), ZERO_COPY_CHUNKS):
            part = slice(start, start + ZERO_COPY_CHUNKS)
            codes = call(names[part], addresses[part], rows[0].nbytes)
            assert min(codes) >= 0, codes

    return lambda: move(client.put), lambda: move(client.get)


def prepared(remote, made, rows):
    """Start a server. Return the tier's class and options, and its limit."""
    folder = Path(made.enter_context(tempfile.TemporaryDirectory()))
    if remote == "redis":
        from tests.redis.servers import RedisServer

        server = RedisServer(folder).start()
        made.callback(server.kill)
        return RedisBackend, RedisOptions, {"url": f"redis://{server.address}"}, sockets(made, rows)
    if remote == "object":
        os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
        where = {"url": "s3://bucket/bench", "endpoint": f"http://127.0.0.1:{served(made, 'requests')}"}
        return ObjectBackend, ObjectOptions, where, bare_obstore(ObjectOptions(**where), rows)
    from tests.mooncake.pools import Pool

    pool = Pool(folder, lease_s=30)
    made.callback(pool.close)
    pool.add_owner(1 << 30)
    where = {"master": pool.address}
    return MooncakeBackend, MooncakeOptions, where, zero_copy(made, MooncakeOptions(**where), rows)


async def measure(remote, row_bytes, count, rounds):
    os.environ[KEYS] = "ab" * 32
    lender, keys = Lender(row_bytes), keys_of(count)
    writes, reads = lender.writes(keys), lender.reads(keys)
    with ExitStack() as made:
        backend, options, where, limit = prepared(remote, made, lender.rows(count))
        sealed = {remote: {}, f"{remote}, aes-256-gcm": {"seal": "aes-256-gcm", "seal_key_env": KEYS}}
        sides, tiers = {"limit": limit}, list[RemoteBackend[Any]]()
        for side, seal in sealed.items():
            tiers.append(await backend.open(options(**where, **seal), tier_context(row_bytes)))
            sides[side] = calls_of(tiers[-1], writes, reads)
        taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for turn in range(rounds + 1):  # The first is not counted.
            for side, calls in sides.items():
                for what, call in zip(("put", "get"), calls, strict=True):
                    began, began_cpu = time.perf_counter(), time.process_time()
                    assert not any(await call() or ())
                    if turn:
                        spent = time.perf_counter() - began, time.process_time() - began_cpu
                        taken.setdefault((what, side), []).append(spent)
        for (what, side), spent in sorted(taken.items()):
            seconds, cpu_s = (statistics.median(each) for each in zip(*spent, strict=True))
            ratio = statistics.median(one[0] for one in taken[what, "limit"]) / seconds
            rate, cpu_ms = row_bytes * count / seconds / 1e9, cpu_s / count * 1e3
            print(f"{what} {side:22} {rate:5.2f} GB/s, {ratio:4.2f} of the limit; {cpu_ms:6.3f} ms of CPU a chunk")
        await probed(tiers[0], rounds)
        for tier in tiers:
            await tier.aclose(10)


def calls_of(tier, writes, reads):
    return lambda: tier.store(writes), lambda: tier.load(reads)


async def probed(tier, rounds):
    keys, taken = keys_of(1_000, start=10_000), []
    for _ in range(rounds):
        began = time.perf_counter()
        await tier.probe(keys)
        taken.append(time.perf_counter() - began)
    print(f"probe of 1,000 keys {statistics.median(taken) * 1e3:.2f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("remote", choices=("redis", "object", "mooncake", "sockets", "requests"))
    parser.add_argument("total_bytes", type=int, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--row-bytes", type=int, default=2 << 20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    if given.remote == "sockets":
        serve(answer_bytes(given.total_bytes))
    elif given.remote == "requests":
        serve(answer_requests())
    else:
        uvloop.run(measure(given.remote, given.row_bytes, given.batch, given.rounds))


if __name__ == "__main__":
    main()
