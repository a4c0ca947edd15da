"""A backend over a client of coroutines, in under 60 lines: chunks in Valkey or Redis.

The client is `redis.asyncio`. The page `docs/how-to/write-a-backend.md` explains the
lines. The suite in `test_valkey_backend.py` holds the backend to the contract. kvtier's
own tier of the type `redis` does more: many servers, their failures, rows without a copy.
"""

import asyncio

import redis.asyncio

import kvtier.backend as kv


class ValkeyOptions(kv.SealOptions, frozen=True, kw_only=True):
    url: str = "redis://127.0.0.1:6379"
    timeout_s: kv.PositiveDuration = 2.0


class ValkeyBackend(kv.Backend[ValkeyOptions]):
    durability = kv.Durability.HOST  # Chunks outlive kvtier's process.
    locality = "REMOTE"
    options_type = ValkeyOptions

    def __init__(self, options, context):
        # Without driver_info=None, each new connection reads a file, on the loop.
        self.client = redis.asyncio.from_url(options.url, driver_info=None)
        self.options, self.context = options, context
        self.seal = options.make_seal(context.mapper.fingerprint, context.row_bytes)
        self.beside = memoryview(bytearray(self.seal.beside_bytes))  # For one chunk.
        self.fit, self.calls = kv.Fit(context.row_bytes), kv.Calls(context.name)

    @classmethod
    async def open(cls, options, context):
        return await asyncio.to_thread(cls, options, context)  # It may read a file.

    async def ask(self, commands, raises=True):
        """Send commands in one round trip, and return their replies."""
        pipeline = self.client.pipeline(transaction=False)
        for word, key, *value in commands:
            pipeline.execute_command(word, self.context.mapper.name(key), *value)
        with self.calls.one():
            try:
                call = asyncio.wait_for(pipeline.execute(raises), self.options.timeout_s)
                return await kv.in_task(call)
            except (redis.RedisError, OSError) as error:  # A TimeoutError is an OSError.
                raise kv.BackendUnavailable(f"{self.context.name}: {error!r}") from error

    async def probe(self, keys):
        return await self.fit.probe(keys, self.probe_fitting)

    async def probe_fitting(self, keys):
        return [count == 1 for count in await self.ask(("EXISTS", key) for key in keys)]

    async def load(self, reads):
        return await self.fit.load(reads, self.load_fitting)

    async def load_fitting(self, reads):
        return list(map(self.fill, reads, await self.ask(("GET", k) for k, _ in reads)))

    def fill(self, read, value):
        if value is None:
            return kv.ChunkMissing(f"{read.key.hex()}: not in {self.context.name}")
        if len(value) != self.seal.sealed_bytes:
            return kv.SealFault.LENGTH.outcome(read.key)
        rest = memoryview(value)
        for place in self.seal.places(read.into, self.beside):
            place[:], rest = rest[: len(place)], rest[len(place) :]
        fault = self.seal.open(read.key, read.into, self.beside)
        return fault and fault.outcome(read.key)

    async def store(self, writes):
        return await self.fit.store(writes, self.store_fitting)

    async def store_fitting(self, writes):
        commands = [("SET", key, self.sealed(key, row)) for key, row in writes]
        return list(map(self.outcome, await self.ask(commands, raises=False)))

    def sealed(self, key, row):
        return b"".join(self.seal.close(key, row, self.beside))  # A copy: no row is kept.

    def outcome(self, reply):
        kind = {redis.OutOfMemoryError: kv.NoSpace}.get(type(reply), kv.TransferFailed)
        return kind(str(reply)) if isinstance(reply, Exception) else None

    async def delete(self, keys):
        await self.ask(("UNLINK", key) for key in self.fit.keys(keys))

    async def aclose(self, deadline_s):
        async with self.client:  # In the end its connections are closed.
            return await self.calls.close(deadline_s)
