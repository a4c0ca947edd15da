"""kvtier's shared `memory` beside Mooncake's own client and LMCache's server (multiprocess mode), on one host.

    PYTHONPATH=.:backends LD_LIBRARY_PATH=$(tests/remote/libraries PEERS/lmcache) \
        PEERS/lmcache/bin/python -m tests.benchmarks.peers.host [ROUNDS]

Engines are processes. In a round, sides in random order, each puts 64 MiB of new chunks into a full pool of 1 GiB. Then
each looks up 1,024 keys, of which another engine has put 512 (of 2 MiB: 32), and gets these chunks; all bytes are
compared. Mooncake moves between its pool and registered rows, LMCache's clients copy between rows and its shared
memory; its chunks have 16 tokens, and its look-up pins them for the get. kvtier alone verifies a checksum.
"""

import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import uvloop

from kvtier.backend import FileMapper, Namespace, Read, TierContext, Write
from kvtier.testing.conformance import keys_of
from kvtier_backends.fs import MemoryBackend, MemoryOptions
from kvtier_backends.fs.host import meeting
from tests.benchmarks.shared import START_S, Engines
from tests.mooncake.pools import Pool, Program, free_port

BATCHES, BATCH_BYTES, POOL_BYTES, KEYS, TOKENS = 4, 16 << 20, 1 << 30, 1_024, 16
SERVER = "-m lmcache.v1.multiprocess.server --supported-transfer-mode=engine_driven --no-l1-use-lazy --max-workers=4"
SERVER += f" --disable-observability --eviction-policy=LRU --chunk-size={TOKENS} --l1-size-gb={POOL_BYTES / 2**29}"
SERVER += " --eviction-trigger-watermark=0.5"  # It evicts once a second and refuses puts until then: twice the memory.


async def kvtier(_, rows):
    context = TierContext("bench", FileMapper(Namespace(model_name="m")), rows["put"].shape[1])
    tier = await MemoryBackend.open(MemoryOptions(capacity_bytes=POOL_BYTES, shared=True), context)

    async def calls(what, number, parts):
        keys = keys_of(KEYS, start=number * KEYS)
        if what == "look-up":
            while sum(await tier.probe(keys)) < parts[-1].stop:
                await asyncio.sleep(0.001)  # The inventory is in flight.
            return [partial(tier.probe, keys)]
        kind, call = (Write, tier.store) if what == "put" else (Read, tier.load)
        chunks = [kind(key, memoryview(row)) for key, row in zip(keys, rows[what], strict=False)]
        return [partial(call, chunks[part]) for part in parts]

    return calls


async def mooncake(address, rows):
    from mooncake.store import MooncakeDistributedStore

    store, sizes = MooncakeDistributedStore(), [rows["put"].shape[1]] * KEYS
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address) == 0
    assert not any(store.register_buffer(each.ctypes.data, each.nbytes) for each in rows.values())
    places = {what: [row.ctypes.data for row in each] for what, each in rows.items()}

    async def calls(what, number, parts):
        names = [f"{number}/{index}" for index in range(KEYS)]
        if what == "look-up":
            return [partial(store.batch_is_exist, names)]
        call = store.batch_put_from if what == "put" else store.batch_get_into
        return [partial(call, names[part], places[what][part], sizes[part]) for part in parts]

    return calls


async def lmcache(address, rows):
    import torch
    import zmq
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
    from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    torch.set_num_threads(1)  # Two threads for a chunk wait for each other.
    engine, shape = os.getpid(), (1, TOKENS, rows["put"].shape[1] // TOKENS)
    views = {what: torch.from_numpy(each).view(-1, *shape) for what, each in rows.items()}
    client = RequestClientFactory.create(address, context=zmq.Context())
    layout = RegisterEngineDrivenContextPayload(engine, "m", 1, TOKENS, 1, shape[2], "uint8", use_mla=True)
    pool = client.register_kv_cache_engine_driven_context(layout).result(timeout=START_S)
    memory = EngineDrivenContextShm(None, client, START_S, pool.shm_name, pool.pool_size)

    def look_up(key):
        client.lookup(key, 1).result(timeout=START_S)
        return [1] * client.wait_prefetch_status(key.request_id, START_S).result(timeout=START_S)

    def put(key, part):
        for slot, row in zip(memory.prepare_store(key, engine)[0], views["put"][part], strict=True):
            slot.copy_(row)
        assert memory.commit_store(key, engine, [])

    def get(key, part):
        for slot, row in zip(memory.prepare_retrieve(key, engine), views["get"][part], strict=True):
            row.copy_(slot)
        assert memory.commit_retrieve(key, engine)

    async def calls(what, number, parts):
        tokens = [token for chunk in range(KEYS) for token in (number, chunk, *range(TOKENS - 2))]
        session = f"{number} {engine}"

        def key(start, stop):
            given = tuple(tokens[: stop * TOKENS]), start * TOKENS, stop * TOKENS
            return IPCCacheServerKey("m", 1, 0, *given, request_id=session, num_kv_readers=1)

        if what == "look-up":
            return [partial(look_up, key(0, KEYS))]
        return [partial(put if what == "put" else get, key(part.start, part.stop), part) for part in parts]

    return calls


SIDES = (kvtier, mooncake, lmcache)


async def engine_main(addresses, row_bytes, _, pipe, barrier):
    meeting.LINGER_S = 1.0
    count = BATCH_BYTES // row_bytes
    rows = {what: np.zeros((BATCHES * count, row_bytes), np.uint8) for what in ("put", "get")}
    rows["put"][:] = np.random.default_rng(0).integers(256, size=rows["put"].shape, dtype=np.uint8)
    parts = [slice(start, start + count) for start in range(0, BATCHES * count, count)]
    sides = [await side(address, rows) for side, address in zip(SIDES, addresses, strict=True)]
    pipe.send("ready")
    while (asked := await asyncio.to_thread(pipe.recv)) is not None:
        side, what, number = asked
        rows["put"].view(np.uint64)[:, 0], rows["get"][:] = number, 0
        calls = await sides[side](what, number, parts) if what else []
        barrier.wait(START_S)
        begun = time.perf_counter()
        answers = [await answer if asyncio.iscoroutine(answer := call()) else answer for call in calls]
        spent_s = time.perf_counter() - begun
        assert what != "look-up" or sum(answers[0]) == BATCHES * count, "not what was put is found"
        assert what != "get" or np.array_equal(*rows.values()), "other bytes came back"
        pipe.send(spent_s)


def engine_process(*args):
    uvloop.run(engine_main(*args))


def compare(addresses, row_bytes, engines, rounds, chance, numbers):
    group, spent = Engines(engines + 1, engine_process, addresses, row_bytes), {}
    moved_bytes = engines * BATCHES * BATCH_BYTES
    for turn in range(-POOL_BYTES // moved_bytes - 1, rounds):  # First, the pools are filled.
        for side in chance.sample(range(len(SIDES)), len(SIDES)):
            own = list(itertools.islice(numbers, engines))
            for what in ("put", "look-up", "get")[: 3 if turn >= -1 else 1]:
                busy, idle = [(side, what, number) for number in own], [(side, None, 0)]
                seconds = max(group.round(busy + idle if what == "put" else idle + busy))
                if turn >= 0:
                    spent.setdefault((what, side), []).append(seconds)
    group.end()
    for (what, side), each in sorted(spent.items()):
        ratio = median(peer / ours for peer, ours in zip(each, spent[what, 0], strict=True))
        shown = [one * 1e3 if what == "look-up" else moved_bytes / one / 1e9 for one in each]
        low, middle, high = quantiles(shown, n=4)
        figures = f"{middle:6.2f} ({low:.2f} to {high:.2f}) {'ms' if what == 'look-up' else 'GB/s'}; kvtier {ratio:.2f}"
        print(f"{row_bytes >> 10:5} KiB {engines} {what:7} {SIDES[side].__name__:8} {figures}", flush=True)


def main():
    rounds, chance, numbers = int((*sys.argv[1:], 9)[0]), random.Random(0), itertools.count()
    os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR", MC_LOG_LEVEL="ERROR")
    for row_bytes in (128 << 10, 2 << 20):
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-host-"))
            os.environ["XDG_RUNTIME_DIR"] = folder
            pool, port = Pool(Path(folder)), free_port()
            stack.callback(pool.close)
            pool.add_owner(POOL_BYTES)
            server = f"{sys.executable} {SERVER} --host=127.0.0.1 --port={port} --shm-name=bench-{port}"
            stack.callback(Program(Path(folder) / "lmcache.log", *server.split()).stop)
            for engines in (1, 4):
                addresses = None, pool.address, f"tcp://127.0.0.1:{port}"
                compare(addresses, row_bytes, engines, rounds, chance, numbers)


if __name__ == "__main__":
    main()
