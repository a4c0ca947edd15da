"""The rates of kvtier's stores and loads beside those of SGLang's HiCacheFile, over one disk.

    tests/sglang/run --rates [FOLDER [ROUNDS]]

Both move the same pages of one host pool, in turns, in batches of 128 as SGLang's controller does. Files leave the page
cache before they are loaded. A full tier has no room for half of a round's pages.
"""

import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.sglang.stubs import install

install()
warnings.simplefilter("ignore")

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName  # noqa: E402

from tests.sglang.doors import Doors, filled, mha_pool, new_keys, page_bytes, storage_config, transfer  # noqa: E402

BATCH, BATCHES = 128, 4
LAYERS = 32  # A page of 16 tokens has 256 KiB.


def kvtier(doors, pool, capacity_bytes):
    tier = {"type": "fs", "root": str(doors.root), "capacity_bytes": capacity_bytes}
    return doors.open(pool, {"secondary_tiers": [tier], "deadline_s": 60.0})


def hicache_file(doors, pool, capacity_bytes):
    options = {"file_storage_path": str(doors.root), "max_size": str(capacity_bytes)}
    files = HiCacheFile(storage_config(extra_config=options))
    files.register_mem_host_pool_v2(pool, PoolName.KV)
    return files


def forget(root):
    subprocess.run(["sync", "-f", str(root)], check=True)
    for path in filter(Path.is_file, root.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(call, keys):
    begun = time.perf_counter()
    for start in range(0, len(keys), BATCH):
        batch = range(start, start + BATCH)
        assert all(call([transfer(PoolName.KV, [keys[page] for page in batch], batch)])[PoolName.KV])
    return time.perf_counter() - begun


def measure(storage, pool, place, moved):
    """Return MB/s of stores with room, of loads, and of stores into a full tier."""
    keys, want = new_keys(BATCH * BATCHES), page_bytes(pool, 1)
    with Doors(place / "roomy") as doors:
        roomy = storage(doors, pool, 4 * moved)
        took_s = {"stores, with room": seconds(roomy.batch_set_v2, keys)}
        forget(doors.root)
        filled(pool)
        took_s["loads"] = seconds(roomy.batch_get_v2, keys)
        assert page_bytes(pool, 1) == want
    with Doors(place / "full") as doors:
        full = storage(doors, pool, moved // 2)
        for _ in range(2):  # The first time fills it.
            took_s["stores, full"] = seconds(full.batch_set_v2, new_keys(BATCH * BATCHES))
    return {what: moved / each / 1e6 for what, each in took_s.items()}


def main(folder="/var/tmp", rounds="5"):
    pool = mha_pool(BATCH * BATCHES, layers=LAYERS)
    moved = BATCH * BATCHES * len(page_bytes(pool, 0))
    print(f"{BATCH * BATCHES:,} pages, {moved:,} bytes a round, {rounds} rounds in turns, in {folder}")
    found = {kvtier: [], hicache_file: []}
    for number in range(int(rounds)):
        for storage in list(found)[:: -1 if number % 2 else 1]:
            with TemporaryDirectory(dir=folder) as place:
                found[storage].append(measure(storage, pool, Path(place), moved))
    for what in found[kvtier][0]:
        rates = {storage.__name__: [each[what] for each in all_] for storage, all_ in found.items()}
        ratio = statistics.median(map(float.__truediv__, *rates.values()))
        spread = (f"{name} {statistics.median(s):,.0f} ({min(s):,.0f} to {max(s):,.0f})" for name, s in rates.items())
        print(f"{what}, MB/s: {', '.join(spread)}; ratio {ratio:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
