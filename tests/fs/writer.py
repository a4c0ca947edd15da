"""Stores the same keys again and again, with chunks of its own version: one of two that do so at once.

Arguments: root, row length, version, keys, rounds. Not collected by pytest: a test starts it.
"""

import asyncio
import sys

from kvtier.backend.contract import TierContext
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs import FsBackend, FsOptions


async def main(root: str, row_bytes: int, version: int, keys: int, rounds: int) -> None:
    mapper = FileMapper(Namespace(model_name="org/model"))
    tier = await FsBackend.open(FsOptions(root=root, shared=True), TierContext("0:fs", mapper, row_bytes))
    writes = Lender(row_bytes).writes(keys_of(keys), version)
    for _ in range(rounds):
        assert list(await tier.store(writes)) == [None] * keys
    assert await tier.aclose(10) == (0,)


asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
