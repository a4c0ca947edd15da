"""kvtier's fs tier beside LMCache's disk paths (0.5.6): its native file client (C++), and `LocalDiskBackend` (Python).

    PYTHONPATH=.:backends PEERS/lmcache/bin/python -m tests.benchmarks.peers.lmcache_disk [DIR]

The same chunks in the same directory, with O_DIRECT, in turn; 16 requests at once, each of which is one call. LMCache
has 4 threads, as by default. `LocalDiskBackend` moves chunks between files and LMCache's own memory, the others the
rows of one region. The figure is kvtier's, the limit LMCache's: above 1, kvtier is faster.
"""

import asyncio
import os
import selectors
import threading
import time

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")

import torch  # After LMCache was told to keep quiet.
from lmcache.lmcache_fs import LMCacheFSClient
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from tests.benchmarks.peers.side_by_side import arguments, compare_disks, give_out

WORKERS = 4
WAIT_S = 0.0002
END_S = 60.0


class NativeFiles:
    def __init__(self, root, region, call_chunks):
        self._client, self._call_chunks = LMCacheFSClient(root, WORKERS, "", True, 0), call_chunks

    def store(self, keys, rows):
        self._run(self._client.submit_batch_set, keys, rows)

    def load(self, keys, rows):
        self._run(self._client.submit_batch_get, keys, rows)

    def close(self):
        self._client.close()

    def _run(self, submit, keys, rows):
        size = self._call_chunks
        self._end(
            {
                submit(_named(keys[start : start + size]), list(rows[start : start + size]))
                for start in range(0, len(keys), size)
            }
        )

    def _end(self, under_way):
        while under_way:
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._client.event_fd(), selectors.EVENT_READ)
                waiting.select(END_S)
            for id_, ok, error, _ in self._client.drain_completions():
                assert ok, error
                under_way.discard(id_)


def _named(keys):
    """Write keys as LMCache's own adapter does: model, rank, group and hash."""
    return [f"bench@00000000@0@{key.hex()}" for key in keys]


class LocalDisk:
    def __init__(self, root, region, call_chunks):
        self._row_bytes, self._call_chunks = region.row_bytes, call_chunks
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False, local_disk=root, max_local_disk_size=64.0, extra_config={"use_odirect": True}
        )
        self._allocator = MixedMemoryAllocator(3 * region.rows * region.row_bytes)
        cpu = LocalCPUBackend(config, memory_allocator=self._allocator, dst_device="cpu")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._disk = LocalDiskBackend(config, self._loop, cpu, "cpu")
        assert self._disk.use_odirect
        self._objects = [self._copy_of(region.row(index)) for index in range(region.rows)]

    def store(self, keys, rows):
        named = [self._key(key) for key in keys]
        for start in range(0, len(named), self._call_chunks):
            part = slice(start, start + self._call_chunks)
            self._disk.batched_submit_put_task(named[part], self._objects[part])
        until = time.monotonic() + END_S
        while not all(map(self._disk.contains, named)):
            assert time.monotonic() < until, "a chunk was not stored"
            time.sleep(WAIT_S)

    def load(self, keys, rows):
        for start in range(0, len(keys), self._call_chunks):
            part = slice(start, start + self._call_chunks)
            for found in self._disk.batched_get_blocking([self._key(key) for key in keys[part]]):
                assert found is not None, "a chunk was not there"
                found.ref_count_down()

    def close(self):
        for each in self._objects:
            each.ref_count_down()
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _copy_of(self, row):
        made = self._allocator.allocate(torch.Size([self._row_bytes]), torch.uint8, MemoryFormat.KV_2LTD)
        made.tensor.view(torch.uint8).copy_(torch.frombuffer(row, dtype=torch.uint8))
        return made

    @staticmethod
    def _key(key):
        return CacheEngineKey("bench", 1, 0, int.from_bytes(key[:8], "big"), torch.uint8)


def main():
    given = arguments(__doc__)
    peers = {"LMCache's native file client": NativeFiles, "LMCache's LocalDiskBackend": LocalDisk}
    give_out("peers lmcache_disk", given, lambda folder: compare_disks(folder, given, peers))


if __name__ == "__main__":
    main()
