"""All tiers side by side, through whole engines: `python -m tests.benchmarks.remote_tiers [DIR]`.

It needs the environment of `tests/remote/run`. Each tier has an engine of its own with its runner in a process, as in
vLLM, and a server of its own on this machine's loopback. Tiers take turns in one run; a round's figure is 64 MiB of
chunks, from the call that stores them until the tier has them, or from the look-up until they are in host memory. The
limit is the first tier in the same round: 1 is as fast. `KVTIER_REDIS_SERVER` and `KVTIER_S3_ENDPOINT` name other
servers than those from PyPI, of which the one for S3 is an emulation in Python. DIR is for the fs tiers.

Then each tier is asked for 1,000 keys, half of which it has, and stores and loads batches of 32 in this process: what
that takes of the processor depends least on what else the machine does.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from kvtier.backend import Backend, FileMapper, Namespace, Read, TierContext, Write, backend_class
from kvtier.config import EngineConfig
from kvtier.memory.region import Region
from kvtier.settings import decode
from kvtier.tools.bench.figures import (
    Figures,
    Pair,
    Row,
    Side,
    interleaved,
    load,
    print_figures,
    rate_of,
    row_of,
    this_machine,
)
from kvtier.tools.bench.tiers import PRIMARY_SHARES, Drive, new_keys, wait
from kvtier.tools.outputs import write_json
from tests.mooncake.pools import Pool
from tests.object.servers import MotoServer, S3Server
from tests.redis.servers import RedisServer

KEYS = "KVTIER_BENCH_SEAL_KEYS"
OWNER_BYTES = 2 << 30
ASKED_KEYS = 1_000
ASKED_ROW_BYTES = 4_096
ROUNDS_ASKED = 15
BATCH = 32

T = TypeVar("T")


def tiers_on(folder: Path, stack: ExitStack, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Start the servers, and return the tables of the tiers that are wanted."""
    os.environ[KEYS] = "ab" * 32
    sealed = {"seal": "aes-256-gcm", "seal_key_env": KEYS}
    made: dict[str, Any] = {
        "fs, segments": lambda: {"type": "fs", "root": str(new_folder(folder)), "layout": "segments"},
        "fs, files": lambda: {"type": "fs", "root": str(new_folder(folder)), "layout": "files"},
        "fs, shared": lambda: {"type": "fs", "root": str(new_folder(folder)), "shared": True, "capacity_bytes": "8GiB"},
        "redis": lambda: {"type": "redis", "url": f"redis://{redis(folder, stack)}"},
        "redis, aes-256-gcm": lambda: {"type": "redis", "url": f"redis://{redis(folder, stack)}", **sealed},
        "mooncake": lambda: {"type": "mooncake", "master": pool(folder, stack)},
        "mooncake, aes-256-gcm": lambda: {"type": "mooncake", "master": pool(folder, stack), **sealed},
        "object": lambda: bucket(folder, stack),
    }
    return {name: make() for name, make in made.items() if not names or name in names}


def new_folder(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=parent))


def redis(folder: Path, stack: ExitStack) -> str:
    server = RedisServer(new_folder(folder)).start()
    stack.callback(server.kill)
    return server.address


def pool(folder: Path, stack: ExitStack) -> str:
    pool = Pool(new_folder(folder), lease_s=60)
    stack.callback(pool.close)
    pool.add_owner(OWNER_BYTES)
    return pool.address


def bucket(folder: Path, stack: ExitStack) -> dict[str, Any]:
    server = S3Server.outside()
    if server is None:
        credentials = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret"}
        os.environ.update(credentials)
        server = MotoServer(new_folder(folder), credentials).start()
        stack.callback(server.kill)
    name = f"kvtier-{uuid.uuid4().hex}"
    server.client.create_bucket(Bucket=name)
    stack.callback(server.remove_bucket, name)
    return {"type": "object", "url": f"s3://{name}/bench", "endpoint": server.endpoint, "timeout_s": 30}


def rates(tiers: dict[str, dict[str, Any]], given: argparse.Namespace) -> Iterator[Row]:
    first, *_ = tiers
    for chunk_bytes in (int(kib) << 10 for kib in given.chunk_sizes_kib.split(",")):
        with ExitStack() as stack:
            drives = {
                name: Drive(engine_config(tier, chunk_bytes, given), given.size_mib << 20)
                for name, tier in tiers.items()
            }
            for drive in drives.values():
                stack.callback(drive.close)
            sides = [side for name, drive in drives.items() for side in sides_of(name, drive)]
            measured = interleaved(sides, given.rounds)
        for name in tiers:
            for way in ("store", "load"):
                yield row_of(
                    Pair(way, chunk_bytes, {"tier": name}, "MB/s", f"{way} {name}", f"{way} {first}", first), measured
                )


def engine_config(tier: dict[str, Any], chunk_bytes: int, given: argparse.Namespace) -> EngineConfig:
    return EngineConfig.from_dict(
        {
            "cpu_bytes_to_use": PRIMARY_SHARES * given.size_mib << 20,
            "chunk_bytes": chunk_bytes,
            "runner": "process",
            "namespace": {"model_name": "bench"},
            "secondary_tiers": [{**tier, "limits": {"deadline_s": 60}}],
        }
    )


def sides_of(name: str, drive: Drive) -> list[Side]:
    return [
        Side(f"store {name}", rate_of(drive.store_new, drive.moved_bytes), tidy=drive.remove_new),
        Side(f"load {name}", rate_of(lambda: drive.load(wait), drive.moved_bytes), prepare=drive.forget),
    ]


async def asked(table: dict[str, Any]) -> list[float]:
    """Return the ms that a look-up of 1,000 keys takes, half of which the tier has."""
    async with opened(table, ASKED_ROW_BYTES) as backend:
        keys, taken = new_keys(ASKED_KEYS), list[float]()
        with rows_of(ASKED_KEYS // 2, ASKED_ROW_BYTES) as rows:
            await moved(backend.store([Write(key, row) for key, row in zip(keys[::2], rows, strict=True)]))
            for _ in range(ROUNDS_ASKED):
                began = time.perf_counter()
                await backend.probe(keys)
                taken.append(1e3 * (time.perf_counter() - began))
        await backend.delete(keys[::2])
    return taken


async def spent(table: dict[str, Any], chunk_bytes: int, given: argparse.Namespace) -> dict[str, float]:
    """Return the processor time, in ms, that storing and loading take of this process, with all its threads."""
    async with opened(table, chunk_bytes) as backend:
        keys, taken = new_keys((given.size_mib << 20) // chunk_bytes), dict[str, list[float]](store=[], load=[])
        with rows_of(len(keys), chunk_bytes) as rows:
            writes = [Write(key, row) for key, row in zip(keys, rows, strict=True)]
            reads = [Read(key, row) for key, row in zip(keys, rows, strict=True)]
            for _ in range(given.rounds + 1):  # The first one starts threads and makes connections.
                for what, call in (("store", backend.store), ("load", backend.load)):
                    parts = writes if what == "store" else reads
                    began = time.process_time()
                    for start in range(0, len(keys), BATCH):
                        await moved(call(parts[start : start + BATCH]))
                    taken[what].append(1e3 * (time.process_time() - began))
        await backend.delete(keys)
    return {what: statistics.median(times[1:]) for what, times in taken.items()}


async def moved(call: Awaitable[Sequence[object]]) -> None:
    assert not any(await call)


@asynccontextmanager
async def opened(table: dict[str, Any], chunk_bytes: int) -> AsyncIterator[Backend]:
    """Open a tier in this process, though its client may crash."""
    options = {name: value for name, value in table.items() if name != "type"}
    found = backend_class(table["type"])
    context = TierContext("bench", FileMapper(Namespace(model_name="alone")), chunk_bytes)
    backend = await found.open(decode(found.options_type, options), context)
    yield backend
    await backend.aclose(10)


@contextmanager
def rows_of(count: int, row_bytes: int) -> Iterator[list[memoryview]]:
    with Region.private(count, row_bytes) as region:
        rows = [region.row(index) for index in range(count)]
        yield rows
        for row in rows:
            row.release()


def in_a_loop(call: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--tiers", nargs="*", default=[], help="Only these, by their names in the table.")
    parser.add_argument("--chunk-sizes-kib", default="128,2048")
    parser.add_argument("--size-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-engines", action="store_true", help="Only look-ups and processor time.")
    parser.add_argument("--json")
    given = parser.parse_args()
    before, begun = load(), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=given.directory) as folder, ExitStack() as stack:
        tiers = tiers_on(Path(folder), stack, given.tiers)
        rows = [] if given.no_engines else list(rates(tiers, given))
        waits = {name: in_a_loop(asked(table)) for name, table in tiers.items()}
        costs = [
            (name, kib, in_a_loop(spent(table, int(kib) << 10, given)))
            for kib in given.chunk_sizes_kib.split(",")
            for name, table in tiers.items()
        ]
    figures = Figures(
        command="remote_tiers",
        machine=this_machine(before, given.directory),
        seconds=time.perf_counter() - begun,
        rows=rows,
    )
    print_figures(figures, write_json(given.json, figures))
    for name, taken in waits.items():
        spread = f"{min(taken):.2f} to {max(taken):.2f}"
        print(f"{name:24} {ASKED_KEYS:,} keys in {statistics.median(taken):8.2f} ms ({spread})")
    for name, kib, cost in costs:
        told = ", ".join(f"{what} {ms:.1f} ms" for what, ms in cost.items())
        print(f"{name:24} {kib:>5} KiB, processor time for {given.size_mib} MiB: {told}")


if __name__ == "__main__":
    main()
