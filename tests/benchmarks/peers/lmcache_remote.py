"""kvtier's redis and mooncake tiers beside LMCache's connectors (0.5.6), on one server.

    PYTHONPATH=.:backends PEERS/lmcache/bin/python -m tests.benchmarks.peers.lmcache_remote redis
    PYTHONPATH=.:backends PEERS/lmcache/bin/python -m tests.benchmarks.peers.lmcache_remote mooncake

Batches of 32 chunks, one after the other, in turn, on a server of their own. Each side is used as its engine uses it: a
tier of kvtier's by calls with rows of one region; a connector through LMCache's `RemoteBackend`, which takes memory
objects of its local backend's allocator for a put, and allocates them for a get. Settings are defaults: four threads
each way in kvtier's redis tier (`--lanes`), eight in LMCache's native client. kvtier seals and verifies every chunk;
LMCache has no checksum. The figure is kvtier's, the limit LMCache's: above 1, kvtier is faster, or takes less of the
processor. Processor time is the client's, of all its threads; other programs on the machine change it least.

For Mooncake, its libraries must be found, as `tests/remote/run` has them: LD_LIBRARY_PATH.
"""

import argparse
import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")

import torch  # After LMCache was told to keep quiet.
import uvloop
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from kvtier.backend import FileMapper, Namespace, Read, TierContext, Write, backend_class
from kvtier.backend.keys import OffloadKey
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
from kvtier.tools.outputs import write_json
from tests.benchmarks.peers.side_by_side import new_keys
from tests.mooncake.pools import Pool
from tests.redis.servers import RedisServer

END_S = 60.0
OWNER_BYTES = 6 << 30
TOKENS = 16  # In a chunk: LMCache has a shape for its bytes.


class Remote(Protocol):
    """One side. Keys and the chunks' bytes are the same for all."""

    def store(self, keys: Sequence[OffloadKey]) -> None: ...

    def load(self, keys: Sequence[OffloadKey]) -> None: ...

    def loaded(self, keys: Sequence[OffloadKey]) -> list[bytes]: ...

    def close(self) -> None: ...


class Tier:
    """A tier of kvtier's, with rows of a region."""

    def __init__(self, kind: str, options: dict[str, Any], chunks: Sequence[bytes]) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._region = Region.private(len(chunks), len(chunks[0]))
        self._rows = [self._region.row(index) for index in range(len(chunks))]
        for row, chunk in zip(self._rows, chunks, strict=True):
            row[:] = chunk
        found = backend_class(kind)
        context = TierContext("bench", FileMapper(Namespace(model_name="bench")), len(chunks[0]))
        self._tier = self._runner.run(found.open(decode(found.options_type, options), context))

    def store(self, keys: Sequence[OffloadKey]) -> None:
        writes = [Write(key, row) for key, row in zip(keys, self._rows, strict=True)]
        assert not any(self._runner.run(self._tier.store(writes)))

    def load(self, keys: Sequence[OffloadKey]) -> None:
        reads = [Read(key, row) for key, row in zip(keys, self._rows, strict=True)]
        assert not any(self._runner.run(self._tier.load(reads)))

    def loaded(self, keys: Sequence[OffloadKey]) -> list[bytes]:
        for row in self._rows:
            row[:] = bytes(len(row))
        self.load(keys)
        return [bytes(row) for row in self._rows]

    def close(self) -> None:
        self._runner.run(self._tier.aclose(END_S))
        self._runner.close()


class Connector:
    """One of LMCache's connectors, through its `RemoteBackend`."""

    def __init__(self, url: str, chunks: Sequence[bytes], **extra: Any) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,
            max_local_cpu_size=1.0,
            remote_url=url,
            remote_serde="naive",
            blocking_timeout_secs=int(END_S),
            extra_config=extra,
        )
        shape = (1, 2, TOKENS, 1, len(chunks[0]) // 2 // TOKENS)
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.uint8, shape, chunk_size=TOKENS)
        self._memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._backend = RemoteBackend(config, metadata, self._loop, self._memory, dst_device="cpu")
        assert self._backend.connection is not None, f"no connection to {url}"
        self._objects = [self._object_of(chunk, metadata) for chunk in chunks]

    def store(self, keys: Sequence[OffloadKey]) -> None:
        left, done = set(map(self._key, keys)), threading.Event()

        def complete(key: CacheEngineKey) -> None:
            left.discard(key)
            if not left:
                done.set()

        self._backend.batched_submit_put_task(list(map(self._key, keys)), self._objects, on_complete_callback=complete)
        assert done.wait(END_S), "a chunk was not stored"

    def load(self, keys: Sequence[OffloadKey]) -> None:
        for found in self._found(keys):
            found.ref_count_down()

    def loaded(self, keys: Sequence[OffloadKey]) -> list[bytes]:
        found = self._found(keys)
        loaded = [bytes(one.byte_array) for one in found]
        for one in found:
            one.ref_count_down()
        return loaded

    def close(self) -> None:
        """End its loop and leave the rest: the backend's own `close` waits for ever, on the loop that it blocks."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _found(self, keys: Sequence[OffloadKey]) -> list[MemoryObj]:
        found = self._backend.batched_get_blocking(list(map(self._key, keys)))
        assert None not in found, "a chunk was not there"
        return [one for one in found if one is not None]

    def _object_of(self, chunk: bytes, metadata: LMCacheMetadata) -> MemoryObj:
        made = self._memory.allocate(metadata.get_shapes(), metadata.get_dtypes(), MemoryFormat.KV_2LTD)
        assert made is not None
        made.tensor.view(-1).copy_(torch.frombuffer(bytearray(chunk), dtype=torch.uint8))
        return made

    @staticmethod
    def _key(key: OffloadKey) -> CacheEngineKey:
        return CacheEngineKey("bench", 1, 0, int.from_bytes(key[:8], "big"), torch.uint8)


def sides_of(name: str, remote: Remote, chunks: Sequence[bytes]) -> list[Side]:
    """Return gets of chunks that lie there, and puts of new ones."""
    kept, new = new_keys(len(chunks)), list[OffloadKey]()
    remote.store(kept)
    assert remote.loaded(kept) == list(chunks), f"{name}: other bytes came back"

    def prepare() -> None:
        new[:] = new_keys(len(chunks))

    moved_bytes = len(chunks) * len(chunks[0])
    return [
        Side(f"get {name}", rate_of(lambda: remote.load(kept), moved_bytes)),
        Side(f"put {name}", rate_of(lambda: remote.store(new), moved_bytes), prepare),
        Side(f"get, processor {name}", processor_ms(lambda: remote.load(kept))),
        Side(f"put, processor {name}", processor_ms(lambda: remote.store(new)), prepare),
    ]


def processor_ms(work: Callable[[], None]) -> Callable[[], float]:
    def measure() -> float:
        begun = time.process_time()
        work()
        return 1e3 * (time.process_time() - begun)

    return measure


def compare(
    opened: dict[str, Callable[[Sequence[bytes]], Remote]], forgetting: Callable[[], Callable[[], None]], given: Any
) -> Iterator[Row]:
    """Yield the first side's rates with each other's as the limit, for each chunk size."""
    ours, *peers = opened
    for chunk_bytes in (int(kib) << 10 for kib in given.chunk_sizes_kib.split(",")):
        chunks = [number.to_bytes(4, "big") * (chunk_bytes // 4) for number in range(1, given.batch + 1)]
        with ExitStack() as stack:
            remotes = {name: open_(chunks) for name, open_ in opened.items()}
            for remote in remotes.values():
                stack.callback(remote.close)
            sides = [side for name, remote in remotes.items() for side in sides_of(name, remote, chunks)]
            forget = forgetting()
            measured = interleaved([side._replace(tidy=forget) for side in sides], given.rounds)
        for peer in peers:
            for way, unit in (("get", "MB/s"), ("put", "MB/s"), ("get, processor", "ms"), ("put, processor", "ms")):
                pair = Pair(way, chunk_bytes, {"batch": given.batch}, unit, f"{way} {ours}", f"{way} {peer}", peer)
                yield row_of(pair, measured)


def compare_redis(given: Any, folder: str) -> Iterator[Row]:
    server = RedisServer(Path(folder)).start()
    lanes = {"lanes": given.lanes}

    def forgetting() -> Callable[[], None]:
        """Return what deletes all that is stored from now on."""
        with server.client() as client:
            kept = set(client.scan_iter(count=1_000))

        def forget() -> None:
            with server.client() as client:
                if new := set(client.scan_iter(count=1_000)) - kept:
                    client.delete(*new)

        return forget

    opened: dict[str, Callable[[Sequence[bytes]], Remote]] = {
        "kvtier": lambda chunks: Tier("redis", {"url": f"redis://{server.address}", **lanes}, chunks),
        "LMCache resp:// (C++)": lambda chunks: Connector(f"resp://{server.address}", chunks, save_chunk_meta=False),
        "LMCache redis:// (redis-py)": lambda chunks: Connector(f"redis://{server.address}", chunks),
    }
    try:
        yield from compare(opened, forgetting, given)
    finally:
        server.kill()


def compare_mooncake(given: Any, folder: str) -> Iterator[Row]:
    """Compare on one pool. What was put stays: it has room for all."""
    pool = Pool(Path(folder), lease_s=60)  # Or a get on a busy machine outlives its lease.
    pool.add_owner(OWNER_BYTES)
    setup = {  # By the names that this Mooncake reads: LMCache hands on whatever begins with `mooncake_`.
        "mooncake_local_hostname": "127.0.0.1",
        "mooncake_metadata_server": "P2PHANDSHAKE",
        "mooncake_master_server_addr": pool.address,
        "mooncake_global_segment_size": 0,
        "mooncake_local_buffer_size": 256 << 20,
        "transfer_timeout": int(END_S),
    }
    url = f"mooncakestore://{pool.address}"
    opened: dict[str, Callable[[Sequence[bytes]], Remote]] = {
        "kvtier": lambda chunks: Tier("mooncake", {"master": pool.address, "timeout_s": END_S}, chunks),
        "LMCache, zero-copy": lambda chunks: Connector(url, chunks, save_chunk_meta=False, **setup),
        "LMCache, as it comes": lambda chunks: Connector(url, chunks, **setup),
    }
    try:
        yield from compare(opened, lambda: lambda: None, given)
    finally:
        pool.close()


COMPARED = {"redis": compare_redis, "mooncake": compare_mooncake}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("service", choices=COMPARED)
    parser.add_argument("--chunk-sizes-kib", default="128,2048")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--lanes", type=int, default=4, help="kvtier's threads each way, with Redis.")
    parser.add_argument("--json")
    given = parser.parse_args()
    before, begun = load(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvtier-peers-") as folder:
        rows = list(COMPARED[given.service](given, folder))
    machine = this_machine(before)
    figures = Figures(
        command=f"peers lmcache_remote {given.service}", machine=machine, seconds=time.perf_counter() - begun, rows=rows
    )
    print_figures(figures, write_json(given.json, figures))


if __name__ == "__main__":
    main()
