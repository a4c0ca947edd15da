"""TieringOffloadingManager: the engine's two faces over one ledger, and its beginning and end.

The step protocol (`kvtier.engine.steps`) is for engines that must never wait; the asyncio face waits.
Both may be used by one program, on one thread. What is here decides where the runner lives.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from types import TracebackType
from typing import Self

from kvtier.backend import Lanes, OffloadKey, in_thread
from kvtier.config import EngineConfig, with_absolute_paths
from kvtier.engine.inbox import Observe
from kvtier.engine.ledger import LookupResult, StorePlan
from kvtier.engine.progress import WakingManager
from kvtier.engine.requests import Request
from kvtier.errors import RowsStillRead
from kvtier.memory import LentRow, Region, fill_standard_streams, require_descriptors
from kvtier.policies.named import policy_class
from kvtier.runner.bridge import Bridge
from kvtier.runner.inline import InlineBridge
from kvtier.runner.opening import open_tiers
from kvtier.runner.process import ProcessBridge
from kvtier.runner.thread import ThreadBridge

# The asyncio face of an engine: `put` waits for room and for the tiers' budgets, `fetch` for what is on its way.
#
# Both wait for a reset, too. Who waits for rows waits for whoever has them, and holds none itself that others wait
# for,
# except what it fetched already.


Chunk = bytes | bytearray | memoryview

KEYS_NAMED = 3  # In one message, of all that it is about.

logger = logging.getLogger(__name__)


class WaitingManager(WakingManager):
    """A stepped engine whose callers may also wait, on one event loop."""

    _calls = 0  # Of put and fetch, under way.
    _clearing = False  # A reset has waited for all rows in use: until it is done nobody gets any.

    async def put(self, keys: Sequence[OffloadKey], chunks: Sequence[Chunk], *, request_id: str | None = None) -> int:
        """Store `chunks[i]` under `keys[i]`, in prefix order; return how many leading keys are in the primary now.

        Waits for room in the primary and for budget of the tiers, so nothing is dropped for the lack of it, unless
        transfers hang: these nobody waits for. Fewer than all are stored only if the primary cannot hold more. Keys
        that are present keep their chunk. Without a `request_id` the call is a request of its own.

        A cancelled call has stored some leading part. ValueError for a chunk of the wrong length: nothing was stored.
        Do not wait for it while the same task holds rows of `fetch`: that room it would wait for.
        """
        self._check_chunks(keys, chunks)
        async with self._one(request_id) as request:
            plan = await self._reserve(keys[: self.config.rows], request)
            position = dict(zip(keys, range(len(keys)), strict=True)) if plan.keys else {}
            await self._fill(plan, [chunks[position[key]] for key in plan.keys], request)
            stored = 0
            while stored < len(keys) and self.ledger.primary.row(keys[stored]) is not None:
                stored += 1
            return stored

    @asynccontextmanager
    async def fetch(
        self, keys: Sequence[OffloadKey], *, request_id: str | None = None
    ) -> AsyncGenerator[Sequence[memoryview]]:
        """Have the longest leading run of `keys` that is anywhere brought into the primary, and lend it.

        Gives read-only views, one a key and each `chunk_bytes` long, valid inside the `async with` and released after
        it. A run longer than the primary can hold gives its leading part. What fails on its way ends the run before
        it; nothing raises for it.

        What is made of a view (a slice, an array) must be gone when the block ends, too: `RowsStillRead` if it is not,
        or a note to what the block itself raised. Such rows are nobody else's until it has gone. What
        `torch.frombuffer` makes of a view cannot be seen, and would read the row's next chunk: `get` gives copies.
        """
        async with self._one(request_id) as request:
            rows: list[int] = []
            lent: list[LentRow] = []
            try:
                await self._arrive(keys, request, rows)
                lent += [self.region.lend(row, self.config.chunk_bytes) for row in rows]
                yield [each.view for each in lent]
            except BaseException as error:
                if complaint := self._give_back(keys[: len(rows)], lent, request):
                    error.add_note(complaint)
                raise
            if complaint := self._give_back(keys[: len(rows)], lent, request):
                raise RowsStillRead(complaint)

    async def get(self, keys: Sequence[OffloadKey], *, request_id: str | None = None) -> list[bytes]:
        """Return copies of the chunks that `fetch` would lend: of the longest leading run that is anywhere."""
        async with self.fetch(keys, request_id=request_id) as rows:
            return [bytes(row) for row in rows]

    async def delete(self, keys: Sequence[OffloadKey], deadline_s: float | None = None) -> bool:
        """Forget keys in the primary and in every tier; waits for whoever holds their rows.

        False if the deadline came first. Then what was still held has stayed; the rest was forgotten, though a tier
        may not have said so yet.
        """
        self._check_open()
        held: Sequence[OffloadKey] = keys
        try:
            async with asyncio.timeout(self._deadline(deadline_s)):
                while held := self.ledger.delete(held):
                    await self._next_progress(for_rows=True)
                while self.ledger.pending:
                    await self._next_progress()
        except TimeoutError:
            return False
        return True

    def reset(self, deadline_s: float | None = None) -> bool:
        """Clear the primary at once, as an engine that steps does; RuntimeError if a `put` or `fetch` is under way."""
        if self._calls:
            raise RuntimeError(f"{self._calls} put or fetch under way, which may hold rows: await areset()")
        return super().reset(deadline_s)

    async def areset(self, deadline_s: float | None = None) -> bool:
        """Clear the primary as `reset` does, after all rows in use have come back; the deadline begins then.

        Nothing is promoted meanwhile, and from the deadline's beginning on `put` and `fetch` wait for the end. A
        cancelled call has changed nothing.
        """
        self._check_open()
        async with self._resets:
            try:
                self.ledger.promoting = False
                while self.ledger.rows_in_use:
                    await self._next_progress()
                self._clearing = True
                await self.drained(deadline_s)
                return self._reset()
            finally:
                self._clearing = False
                self.on_reset_flushed()
                self._stir()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ids = count()
        self._turn = asyncio.Lock()  # To cascade, in order of asking: or a long put would starve among short ones.
        self._resets = asyncio.Lock()
        super().attach(loop)

    # How the face waits.

    @asynccontextmanager
    async def _one(self, request_id: str | None) -> AsyncGenerator[Request]:
        """Give the caller's request, or one for this call alone."""
        self._check_open()
        if own := request_id is None:
            request_id = f"#{next(self._ids)}"
            self.on_new_request(request_id)
        request = self._known(request_id)
        self._calls += 1
        try:
            yield request
        finally:
            self._calls -= 1
            if own or request.finished:  # In the latter case once more: for what it has used and leased since.
                self._finish(request)
                self.end_step()

    async def _arrive(self, keys: Sequence[OffloadKey], request: Request, rows: list[int]) -> None:
        """Wait until the leading run of keys is in the primary, and pin it: `rows` are its rows, so far.

        What waiting requests may lease is less than the primary holds. What has come is pinned, leased no more, and so
        leaves its share to what comes after it.
        """
        while True:
            while self._clearing:
                await self._next_progress()
            self._receive()
            hits, waits = 0, False
            for key in keys[len(rows) :]:
                result = self.ledger.lookup(key, request)
                if result is LookupResult.MISS:
                    break
                if result is not LookupResult.HIT:
                    waits = True  # And look on, so that the rest sets out, too.
                elif not waits:
                    hits += 1
            if waits:
                await self._next_progress()
                continue
            rows += self.ledger.prepare_load(keys[len(rows) : len(rows) + hits], request)
            self.end_step()
            if not hits or len(rows) == len(keys):
                return

    def _give_back(self, keys: Sequence[OffloadKey], lent: Sequence[LentRow], request: Request) -> str:
        """Give back the rows that a fetch pinned for these keys; say what is wrong if some are still read."""
        read = [(key, each) for key, each in zip(keys, lent, strict=False) if not each.release()]
        self._keep([each for _, each in read])
        self.complete_load(keys, request.id)
        if not read:
            return ""
        named = ", ".join(key.hex() for key, _ in read[:KEYS_NAMED]) + ", …" * (len(read) > KEYS_NAMED)
        complaint = (
            f"{len(read)} of {len(lent)} rows are still read when their fetch is over ({named}): copy the bytes (get "
            "does), or drop what was made of the views before the block ends. Until it has gone nobody gets these rows."
        )
        logger.warning("%s", complaint)
        return complaint

    async def _reserve(self, keys: Sequence[OffloadKey], request: Request) -> StorePlan:
        """Wait for room for the keys, or for as many leading ones as there can be room for."""
        while True:
            while self._clearing:
                await self._next_progress()
            self.end_step()  # What a step found that nobody ends would be kept for ever.
            if not any(key in self.ledger.primary.filling for key in keys):
                plan = self.ledger.prepare_store(keys, request)
                if plan is not None:
                    return plan
                if not (self.ledger.rows_in_use or self.ledger.pending or self.ledger.leases.rows):
                    keys = keys[: len(keys) // 2]  # Nobody will give rows back: some are lost to hung transfers.
                    continue
            await self._next_progress(for_rows=True)

    async def _fill(self, plan: StorePlan, chunks: Sequence[Chunk], request: Request) -> None:
        """Write the chunks, and have them cascade in slices that exceed no limit, unless what does is stuck."""
        done = 0
        try:
            while done < len(plan.keys):
                end = min(done + self.ledger.outbox.slice_chunks, len(plan.keys))
                async with self._turn:
                    self._check_open()
                    while self.ledger.pending and not self.ledger.outbox.room(end - done):
                        await self._next_progress()
                for row, chunk in zip(plan.rows[done:end], chunks[done:end], strict=True):
                    self.region.row(row)[: self.config.chunk_bytes] = chunk
                self._complete_store(plan.keys[done:end], request, success=True)
                done = end
                self.end_step()
        finally:
            if done < len(plan.keys):
                self._complete_store(plan.keys[done:], request, success=False)

    def _check_chunks(self, keys: Sequence[OffloadKey], chunks: Sequence[Chunk]) -> None:
        if len(keys) != len(chunks):
            raise ValueError(f"{len(keys)} keys but {len(chunks)} chunks")
        for key, chunk in zip(keys, chunks, strict=True):
            if len(chunk) != self.config.chunk_bytes:
                raise ValueError(f"{key.hex()}: a chunk of {len(chunk):,} bytes, not {self.config.chunk_bytes:,}")


ON_LOOP_BYTES_MAX = 64 << 20  # Of memory to prepare without a thread: some milliseconds' worth.


class TieringOffloadingManager(WaitingManager):
    """Tiers chunks over a primary in host memory and any number of secondary tiers.

    `start` is for synchronous engines, `open` for asyncio programs. A chunk is `config.chunk_bytes` long.
    """

    _closing: "asyncio.Task[int] | None" = None

    @classmethod
    def start(cls, config: EngineConfig, *, region: Region | None = None, observer: Observe | None = None) -> Self:
        """Start an engine with its runner in a thread or a process; blocks until its tiers are open.

        The rows are those of `region`, which other processes may have mapped, too; it belongs to the engine from now
        on, and is closed with it or with a start that fails. None: the engine makes one of its own.

        Raises:
            ConfigError: the configuration cannot be used; nothing was left behind.
            BackendUnavailable: a tier cannot be opened now.
        """
        if config.runner == "inline":
            raise ValueError("an inline runner needs a running event loop: await TieringOffloadingManager.open(config)")
        if region is not None and (region.rows, region.row_bytes) != (config.rows, config.row_bytes):
            raise ValueError(
                f"a region of {region.rows:,} rows of {region.row_bytes:,} bytes for a configuration of {config.rows:,}"
                f" of {config.row_bytes:,}"
            )
        bridge_class = ThreadBridge if config.runner == "thread" else ProcessBridge
        try:
            config = _checked(config)
            region = region or _region(config)
            bridge = bridge_class(config, region)
        except BaseException:
            if region is not None:
                region.close()
            raise
        return cls(config, region, bridge, observer=observer)

    @classmethod
    async def open(cls, config: EngineConfig, *, observer: Observe | None = None) -> Self:
        """Start an engine for this event loop, wherever its runner lives. Raises as `start` does."""
        loop = asyncio.get_running_loop()
        if config.runner == "inline":
            config = _checked(config)
            fill_standard_streams()
            if config.rows * config.row_bytes > ON_LOOP_BYTES_MAX:
                region = await loop.run_in_executor(None, _region, config)
            else:
                region = _region(config)
            try:
                bridge: Bridge = InlineBridge(await open_tiers(config), region)
            except BaseException:
                region.close()
                raise
            manager = cls(config, region, bridge, clock=loop.time, observer=observer)
        else:
            manager = await cls._started(config, observer)
        manager.attach(loop)
        return manager

    @classmethod
    async def _started(cls, config: EngineConfig, observer: Observe | None) -> Self:
        """Run `start` in a thread; a cancelled call waits for it, and leaves nothing of what it started."""
        started: list[Self] = []
        lanes = Lanes(1, "kvtier-start")
        try:
            await in_thread(lanes, lambda: started.append(cls.start(config, observer=observer)))
        except asyncio.CancelledError:
            for manager in started:
                await in_thread(lanes, manager.shutdown, 0.0)
            raise
        finally:
            lanes.shutdown(wait=False)
        return started[0]

    async def aclose(self, deadline_s: float | None = None) -> int:
        """Shut down as `shutdown` does, without blocking the loop. Once begun it goes on, even if cancelled."""
        if self._closing is None:
            if self._closed:
                return 0
            self._closing = asyncio.ensure_future(self._close(deadline_s))
        return await asyncio.shield(self._closing)

    async def _close(self, deadline_s: float | None) -> int:
        await self.drained(deadline_s)
        self._tier_log.look(self._clock(), last=True)
        self._closed = True
        self._stir()
        seconds = self._deadline(deadline_s)
        if isinstance(self._bridge, InlineBridge):
            abandoned = await self._bridge.aclose(seconds)
        else:
            abandoned = await asyncio.get_running_loop().run_in_executor(None, self._bridge.close, seconds)
        self._free()
        return abandoned

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _checked(config: EngineConfig) -> EngineConfig:
    """Report every mistake that can be known before anything is allocated; settle what relative paths mean."""
    policy_class(config.eviction_policy)
    require_descriptors()
    return with_absolute_paths(config)


def _region(config: EngineConfig) -> Region:
    make: Callable[[int, int], Region] = Region.memfd if config.runner == "process" else Region.private
    return make(config.rows, config.row_bytes)
