"""Files of an fs tier that are removed under a running engine: misses, which are stored again.

`find -delete` removes them one by one, and so does `systemd-tmpfiles`.
"""

import asyncio
import os
import random
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.engine.kit import PATIENCE_S, at_rest, children, found, keys, put, until
from tests.own import open_without_a_name

CLIENTS = 4
REQUESTS = 4  # Of each client, at least.
REMOVED_MIN = {"files": 10, "segments": 2}  # Files, before the clients may end.
ROWS = 32
PREFIXES = 12  # Of up to `LONGEST` chunks: more than the primary holds, and more than the tier holds.
LONGEST = 10
SUFFIX = {"files": ".bin", "segments": ".seg"}

TIERS = [
    pytest.param({"layout": "files", "capacity_bytes": "768KiB"}, id="files"),
    pytest.param({"layout": "files", "shared": True, "capacity_bytes": "1MiB"}, id="shared", marks=pytest.mark.outside),
    pytest.param({"layout": "segments", "capacity_bytes": "4MiB"}, id="segments"),
]


def tier(root, options):
    limits = {"breaker_failures": 1_000_000}  # A store that meets a removed segment fails by the tier's fault.
    return {"type": "fs", "name": "disk", "root": str(root), "limits": limits, **options}


def files(root, options):
    suffix = SUFFIX[options["layout"]]
    return [Path(folder, name) for folder, _, names in os.walk(root) for name in names if name.endswith(suffix)]


@contextmanager
def tidied(root, options):
    """Remove files at random during the block, in a thread; return those that were removed so far."""
    removed, over, dice = list[Path](), threading.Event(), random.Random(8)

    def tidy():
        while not over.wait(dice.choice([0.0, 0.001, 0.01])):
            there = files(root, options)
            for path in dice.sample(there, min(len(there), dice.choice([1, 1, 3, 100]))):
                with suppress(FileNotFoundError):  # The tier was faster.
                    path.unlink()
                    removed.append(path)

    thread = threading.Thread(target=tidy, name="asyncio tidier")
    thread.start()
    try:
        yield removed
    finally:
        over.set()
        thread.join()


async def serve(engine, dice):
    """Serve one request as a client does, or ask for what may come soon; hold every byte against what was put."""
    first = dice.randrange(PREFIXES) * 100
    numbers = range(first, first + dice.randrange(1, LONGEST + 1))
    if dice.random() < 0.2:
        await engine.prefetch(keys(numbers))
    run = await found(engine, numbers)
    await put(engine, numbers)
    if dice.random() < 0.05:
        await engine.delete(keys(numbers[run:]))


async def client(engine, dice, enough):
    served = 0
    while served < REQUESTS or not enough():
        await serve(engine, dice)
        served += 1


@pytest.mark.promise("Chunk files are deleted under a running engine")
@pytest.mark.parametrize("options", TIERS)
async def test_files_that_vanish_under_a_busy_engine_are_misses_that_are_stored_again(open_engine, tmp_path, options):
    """No wrong byte comes, no call raises, nothing is left open, and the tier's figures are those of the disk again."""
    root, dice = tmp_path / "tier", random.Random(7)
    engine = await open_engine(ROWS, tier(root, options))
    with tidied(root, options) as removed:
        async with asyncio.timeout(PATIENCE_S):
            dices = [random.Random(dice.random()) for _ in range(CLIENTS)]
            enough = REMOVED_MIN[options["layout"]]
            await asyncio.gather(*(client(engine, each, lambda: len(removed) >= enough) for each in dices))
    assert await at_rest(engine)

    async with asyncio.timeout(PATIENCE_S):
        while not await stored_again(engine):
            pass
    assert await engine.reset()
    loaded = 0
    for first in range(0, PREFIXES * 100, 100):  # A tier of files learns of what has vanished when that is asked for.
        for number in range(first, first + LONGEST):
            loaded += await found(engine, [number])
    assert await at_rest(engine)
    await until(lambda: engine.stats().tiers[0].chunks == loaded and not open_without_a_name(root, *children()), engine)
    assert loaded == len(files(root, options)) or options["layout"] == "segments"


async def stored_again(engine):
    """Offer chunks to the tier; say whether they come back from there."""
    numbers = range(LONGEST)
    await found(engine, numbers)
    await put(engine, numbers)
    assert await engine.reset()
    return await found(engine, numbers) == LONGEST
