"""How long a file tier takes to start over many files, by either naming.

    PYTHONPATH=.:backends python tests/benchmarks/start_up.py DIR --chunks 100000

DIR must have room: with vLLM's names, 1,000,000 files make 644,000 directories, which take 2.6 GB; the files themselves
are as long as a tier's, but sparse, for a start reads none. Each start is a process of its own; as root, the kernel's
caches are dropped before it (`cold`), unless `--warm`.

Prints one JSON object a start: seconds until the tier is open, until the first look-up is answered, until the tier
knows of all chunks and until the scan is done; what its process's memory grew by; how long closing takes.
"""

import argparse
import asyncio
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.backend.contract import ScanDone, TierContext
from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk.footer import FOOTER_BYTES

ROW_BYTES = 4_096
LOOKED_UP = 512
DEADLINE_S = 600.0


def keys(chunks: int) -> Iterator[OffloadKey]:
    for number in range(chunks):
        yield make_offload_key(hashlib.sha256(number.to_bytes(8, "big")).digest())


def fill(root: Path, naming: str, chunks: int) -> None:
    """Make the files that a tier would, as long as its own."""
    mapper = FileMapper(Namespace(model_name="bench"), naming)  # type: ignore[arg-type]
    made: set[str] = set()
    for key in keys(chunks):
        name = os.path.join(root, mapper.name(key))
        if (folder := os.path.dirname(name)) not in made:
            os.makedirs(folder, exist_ok=True)
            made.add(folder)
        with open(name, "wb") as file:
            file.truncate(ROW_BYTES + FOOTER_BYTES)


async def start(root: str, naming: str, chunks: int) -> dict[str, float]:
    """Start a tier, look up the chunks that were stored last, and let the scan end."""
    asked = list(keys(chunks))[-LOOKED_UP:]
    context = TierContext("0:fs", FileMapper(Namespace(model_name="bench")), ROW_BYTES)
    before, begun = memory_bytes(), time.perf_counter()
    options = FsOptions(root=root, naming=naming)  # type: ignore[arg-type]
    tier = await FsBackend.open(options, context)
    measured = {"open_s": time.perf_counter() - begun}
    assert all(await tier.probe(asked))
    measured["first_answer_s"] = time.perf_counter() - begun
    known = asyncio.create_task(known_to(tier, chunks, begun))
    async for event in tier.watch():
        if isinstance(event, ScanDone):
            break
    measured["scan_s"] = time.perf_counter() - begun
    measured["all_known_s"] = await known
    measured["memory_bytes"] = memory_bytes() - before
    measured["memory_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024 - before
    measured["chunks"] = tier.occupancy().chunks
    begun = time.perf_counter()
    await tier.aclose(DEADLINE_S)
    measured["close_s"] = time.perf_counter() - begun
    return measured


async def known_to(tier: FsBackend, chunks: int, begun: float) -> float:
    """Return when the tier's memory had all chunks, to a hundredth of a second."""
    while tier.occupancy().chunks < chunks:  # The tier does not say when.
        await asyncio.sleep(0.01)
    return time.perf_counter() - begun


def memory_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def drop_caches() -> bool:
    """Have the next start read from the disk; False where that is not allowed."""
    try:
        os.sync()
        with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
            file.write("3")
    except OSError:
        return False
    return True


def measure(root: Path, naming: str, chunks: int, *, warm: bool) -> None:
    begun = time.perf_counter()
    fill(root, naming, chunks)
    print(
        json.dumps({"naming": naming, "chunks": chunks, "filled_s": round(time.perf_counter() - begun, 1)}), flush=True
    )
    cold = not warm and drop_caches()
    command = [sys.executable, __file__, str(root), "--start", naming, "--chunks", str(chunks)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    print(json.dumps({"naming": naming, "cold": cold, **json.loads(ran.stdout)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--namings", default="vllm,flat")
    parser.add_argument("--warm", action="store_true", help="Leave the kernel's caches as they are.")
    parser.add_argument("--start", metavar="NAMING", help="One start, in this process.")
    given = parser.parse_args()
    if given.start:
        found = asyncio.run(start(str(given.directory), given.start, given.chunks))
        print(json.dumps({name: round(value, 4) for name, value in found.items()}))
        return
    for naming in given.namings.split(","):
        root = given.directory / f"start-up-{naming}"
        root.mkdir(parents=True)
        try:
            measure(root, naming, given.chunks, warm=given.warm)
        finally:
            shutil.rmtree(root)


main()
