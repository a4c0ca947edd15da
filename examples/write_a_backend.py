"""A tier in 60 lines: chunks as rows of an SQLite database.

`docs/how-to/write-a-backend.md` explains it. In a configuration it is `type = "write_a_backend:SqliteBackend"`, with
this folder on the Python path.
"""

import sqlite3
from contextlib import closing
from functools import partial

from xxhash import xxh3_64_digest

from kvtier.backend import (
    Abandoned,
    Backend,
    BackendUnavailable,
    ChunkCorrupt,
    ChunkMissing,
    Durability,
    Fit,
    Lanes,
    Options,
    Path,
    Read,
    TierContext,
    in_thread,
)

COLUMNS = "name TEXT PRIMARY KEY, block BLOB, checksum BLOB"
TABLE = f"CREATE TABLE IF NOT EXISTS chunks ({COLUMNS}) WITHOUT ROWID"


class SqliteOptions(Options, frozen=True, kw_only=True):
    path: Path  # The database; created if it is absent.


class SqliteBackend(Backend[SqliteOptions]):
    durability = Durability.HOST  # Survives a killed process, not a power cut.
    options_type = SqliteOptions

    def __init__(self, path: str, context: TierContext) -> None:
        self.path, self.context = path, context
        self.fit = Fit(context.row_bytes)  # A chunk that does not fit fails alone.
        self.lanes = Lanes(1, context.name)  # SQLite has one writer at a time.

    @classmethod
    async def open(cls, options, context):
        tier = cls(options.path, context)
        await tier.run(TABLE, [()])
        return tier

    async def run(self, statement, batch):
        """Run a statement for each row of a batch on the lane, in one transaction."""
        return await in_thread(self.lanes, self.run_here, statement, batch)

    def run_here(self, statement, batch):
        try:
            with closing(sqlite3.connect(self.path)) as database, database:
                database.execute("PRAGMA synchronous = OFF")
                return [database.execute(statement, values).fetchone() for values in batch]
        except sqlite3.Error as error:
            raise BackendUnavailable(f"{self.path}: {error}") from error

    def names(self, keys):
        return [(self.context.mapper.name(key),) for key in keys]

    async def probe(self, keys):
        return await self.fit.probe(keys, self.probe_fitting)

    async def probe_fitting(self, keys):
        rows = await self.run("SELECT 1 FROM chunks WHERE name = ?", self.names(keys))
        return [row is not None for row in rows]

    async def load(self, reads):
        return await self.fit.load(reads, partial(in_thread, self.lanes, self.load_here))

    def load_here(self, reads):
        names = self.names(read.key for read in reads)
        rows = self.run_here("SELECT block, checksum FROM chunks WHERE name = ?", names)
        return [self.fill(read, row) for read, row in zip(reads, rows, strict=True)]

    def fill(self, read: Read, row: tuple[bytes, bytes] | None):
        if row is None:
            return ChunkMissing(f"{read.key.hex()}: not in {self.path}")
        if len(row[0]) != len(read.into) or xxh3_64_digest(row[0]) != row[1]:
            return ChunkCorrupt(f"{read.key.hex()}: not in {self.path} as it was stored")
        read.into[:] = row[0]
        return None

    async def store(self, writes):
        return await self.fit.store(writes, partial(in_thread, self.lanes, self.store_here))

    def store_here(self, writes):
        name = self.context.mapper.name
        rows = [(name(key), block, xxh3_64_digest(block)) for key, block in writes]
        self.run_here("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)", rows)
        return [None] * len(writes)

    async def delete(self, keys):
        await self.run("DELETE FROM chunks WHERE name = ?", self.names(self.fit.keys(keys)))

    async def aclose(self, deadline_s):
        return Abandoned(await self.lanes.aclose(deadline_s))
