"""The rate of a remote tier beside its limit: `python -m tests.benchmarks.remote_rate redis|object|mooncake`.

Sides take turns in one run, on one machine, over its loopback. The figures are medians of the rounds. The limit checks
nothing: plain sockets, as many as the redis tier has lanes, to a process that keeps nothing; obstore's own requests, as
many at once; Mooncake's own zero-copy calls. The object tier's server keeps objects in memory and checks nothing: the
client is measured. Redis is PyPI's, or the server that `KVTIER_REDIS_SERVER` names.

With `--codec`, coded rows of synthetic KV stand beside unchanged ones, and `auto` first learns. `--rate` is the rate of
the object tier's server: all connections share it, each way, as those of a link do.
"""

import argparse
import asyncio
import ctypes
import os
import random
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

from kvtier.backend import FileMapper, Namespace, TierContext
from kvtier.backend.codec import WIDTHS
from kvtier.backend.remote import RemoteBackend
from kvtier.testing.conformance import Lender, keys_of
from kvtier.tools.bench import synthetic_kv
from kvtier_backends.mooncake import MooncakeBackend, MooncakeOptions
from kvtier_backends.mooncake.client import connect
from kvtier_backends.object import ObjectBackend, ObjectOptions
from kvtier_backends.object.bucket import make_store
from kvtier_backends.redis import RedisBackend, RedisOptions

LANES, AT_ONCE = 4, 16
PIECE_BYTES = 256 << 10  # Sent at once on a slow link.
LATE_S = 0.01  # Time that a link catches up if a thread comes late.
LEARNING_ROUNDS = 40  # Rounds in which `auto` learns.
AGAIN = "none, again"  # The same side once more: their ratio is the noise of a run.
ZERO_COPY_CHUNKS = 32  # In a call; Mooncake refuses more than some hundreds.
KEYS = "KVTIER_BENCH_SEAL_KEYS"
OK = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nLast-Modified: Mon, 12 Oct 2009 17:50:00 GMT\r\n'
EMPTY_LIST = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


def serve(answer):
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


def served(made, *arguments):
    command = [sys.executable, "-m", "tests.benchmarks.remote_rate", *map(str, arguments)]
    process = made.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
    made.callback(process.kill)
    return int(process.stdout.readline())


def receive(connection, into):
    while into:
        into = into[connection.recv_into(into) :]


class SlowSocket:
    """A socket on a link that all sockets of this process share, of `rate` bytes a second each way."""

    _lock, _free_at = threading.Lock(), {"in": 0.0, "out": 0.0}

    def __init__(self, connection, rate):
        self._connection, self._rate = connection, rate
        self.setsockopt, self.recv = connection.setsockopt, connection.recv

    def recv_into(self, into):
        count = self._connection.recv_into(into[:PIECE_BYTES])
        self._wait("in", count)
        return count

    def sendall(self, data):
        for start in range(0, len(data), PIECE_BYTES):
            piece = memoryview(data)[start : start + PIECE_BYTES]
            self._wait("out", len(piece))
            self._connection.sendall(piece)

    def _wait(self, way, count):
        now = time.monotonic()
        with self._lock:
            self._free_at[way] = ends_at = max(self._free_at[way], now - LATE_S) + count / self._rate
        time.sleep(max(0.0, ends_at - now))


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


def answer_requests(rate):
    """Return a server of PUT, GET, HEAD and LIST; every list is empty. `rate`: GB/s of its network."""
    objects = {}

    def answer(plain):
        connection = plain if rate is None else SlowSocket(plain, rate * 1e9)
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


def prepared(remote, made, rows, rate):
    folder = Path(made.enter_context(tempfile.TemporaryDirectory()))
    if remote == "redis":
        from tests.redis.servers import RedisServer

        server = RedisServer(folder).start()
        made.callback(server.kill)
        return RedisBackend, RedisOptions, {"url": f"redis://{server.address}"}, sockets(made, rows)
    if remote == "object":
        os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
        port = served(made, "requests", *(() if rate is None else ("--rate", rate)))
        where = {"url": "s3://bucket/bench", "endpoint": f"http://127.0.0.1:{port}"}
        return ObjectBackend, ObjectOptions, where, bare_obstore(ObjectOptions(**where), rows)
    from tests.mooncake.pools import Pool

    pool = Pool(folder, lease_s=30)
    made.callback(pool.close)
    pool.add_owner(1 << 30)
    where = {"master": pool.address}
    return MooncakeBackend, MooncakeOptions, where, zero_copy(made, MooncakeOptions(**where), rows)


async def measure(remote, row_bytes, count, rounds, rate, codec):
    os.environ[KEYS] = "ab" * 32
    lender, keys = Lender(row_bytes), keys_of(count)
    writes, reads = lender.writes(keys), lender.reads(keys)
    dtype = "fp8_e4m3" if codec == "fp8" else "bfloat16"
    context = TierContext("bench", FileMapper(Namespace(model_name="bench", dtype=dtype)), row_bytes)
    with ExitStack() as made:
        backend, options, where, limit = prepared(remote, made, lender.rows(count), rate)
        fields = {remote: {}, f"{remote}, aes-256-gcm": {"seal": "aes-256-gcm", "seal_key_env": KEYS}}
        if codec is not None:
            fields = {each: {"codec": each} for each in ("none", codec, "auto")} | {AGAIN: {"codec": "none"}}
            for seed, write in enumerate(writes):
                write.row[:] = synthetic_kv(row_bytes, WIDTHS[codec], seed)
        sides, tiers = {"limit": limit}, dict[str, RemoteBackend[Any]]()
        for side, further in fields.items():
            tiers[side] = await backend.open(options(**where, **further), context)
            sides[side] = calls_of(tiers[side], writes, reads)
        taken = {}
        warm = 1 if codec is None else LEARNING_ROUNDS  # Not counted.
        dice = random.Random(0)
        for turn in range(-warm, rounds):
            # First, `auto` learns alone. Then in random order: a side overwrites what the one before stored.
            for side in dice.sample(list(sides), len(sides)) if turn >= -1 else ["auto"]:
                for what, call in zip(("put", "get"), sides[side], strict=True):
                    began, began_cpu = time.perf_counter(), time.process_time()
                    assert not any(await call() or ())
                    if turn >= 0:
                        spent = time.perf_counter() - began, time.process_time() - began_cpu
                        taken.setdefault((what, side), []).append(spent)
                assert side == "limit" or all(read.into == write.row for read, write in zip(reads, writes, strict=True))
        for (what, side), spent in sorted(taken.items()):
            seconds, cpu_s = zip(*spent, strict=True)
            slow, middle, fast = (row_bytes * count / each / 1e9 for each in statistics.quantiles(seconds, n=4)[::-1])
            ratio = ratio_of(taken[what, "limit"], spent)
            rates, cpu_ms = f"{middle:5.2f} GB/s ({slow:.2f} to {fast:.2f})", statistics.median(cpu_s) / count * 1e3
            print(f"{what} {side:22} {rates}, {ratio:4.2f} of the limit; {cpu_ms:6.3f} ms of CPU a chunk")
        for what in ("put", "get") if codec is not None else ():
            of_others = (ratio_of(taken[what, side], taken[what, "auto"]) for side in ("none", codec))
            print(f"{what} auto: {min(of_others):.3f} of the better one")
            print(f"{what} none: {ratio_of(taken[what, 'none'], taken[what, AGAIN]):.3f} of itself")
        await probed(next(iter(tiers.values())), rounds)
        for side, tier in tiers.items():
            print(side, tier.counts())
            await tier.aclose(10)


def ratio_of(limit, spent):
    return statistics.median(best[0] / one[0] for best, one in zip(limit, spent, strict=True))


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
    parser.add_argument("--rate", type=float, help="GB/s of the object tier's server")
    parser.add_argument("--codec", choices=WIDTHS)
    parser.add_argument("--row-bytes", type=int, default=2 << 20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    if given.remote == "sockets":
        serve(answer_bytes(given.total_bytes))
    elif given.remote == "requests":
        serve(answer_requests(given.rate))
    else:
        uvloop.run(measure(given.remote, given.row_bytes, given.batch, given.rounds, given.rate, given.codec))


if __name__ == "__main__":
    main()
