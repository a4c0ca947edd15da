"""A tier on a bucket, the asynchronous shell: it answers for known keys from memory, and asks the bucket for others."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar

import obstore
from obstore.store import ObjectStore

from kvtier import backend as api
from kvtier.backend.codec import CodedSeal
from kvtier.backend.remote import RemoteBackend, caused
from kvtier.errors import Remedy
from kvtier_backends.object.bucket import (
    MISTAKES,
    OF_ONE_CHUNK,
    PAGE_KEYS,
    STORE_ERRORS,
    ObjectNames,
    Trouble,
    TroubleKind,
    Turns,
    attributes_of,
    footer_of,
    make_store,
    released,
    trouble_of,
)
from kvtier_backends.object.options import ObjectOptions

logger = logging.getLogger("kvtier.object")

OBJECT_BYTES_MAX = 5 << 30  # In one request, on every store.
LANES = 4
INLINE_BYTES_MAX = 4 << 20  # Sealed and checked on the loop: a millisecond. Longer rows would delay other tasks.
LIST_RETRY_S = 1.0
CLOSE_GRACE_S = 1.0  # For cancelled requests: obstore takes a millisecond.

P = ParamSpec("P")
T = TypeVar("T")


class ObjectBackend(RemoteBackend[ObjectOptions]):
    """Chunks as objects, each with its seal in its metadata."""

    durability = api.Durability.POWER  # The object store's own promise.
    options_type = ObjectOptions
    described = ("url", "endpoint", "codec")

    @classmethod
    async def open(cls, options: ObjectOptions, context: api.TierContext) -> Self:
        """List the first page of names, which finds a wrong configuration. The others are listed meanwhile."""
        if context.row_bytes > OBJECT_BYTES_MAX:
            raise api.ConfigError(
                f"chunk_bytes: rows of {context.row_bytes:,} bytes, at most {OBJECT_BYTES_MAX:,} accepted: "
                "no store takes more in one request"
            )
        made = ExitStack()
        try:
            lanes = coders = api.Lanes(LANES, f"kvtier-{context.name}")
            made.callback(lanes.shutdown, wait=False)
            if options.codec != "none":  # Loads do not wait for rows that are encoded.
                coders = api.Lanes(options.codec_threads, f"kvtier-{context.name}-codec")
                made.callback(coders.shutdown, wait=False)
            store, seal = await api.in_thread(lanes, _prepared, options, context)
            tier = cls(options, context, store, seal, (lanes, coders))
            await tier._begin()
        except BaseException:
            made.close()
            raise
        return tier

    def __init__(
        self,
        options: ObjectOptions,
        context: api.TierContext,
        store: ObjectStore,
        seal: api.Seal,
        lanes: tuple[api.Lanes, api.Lanes],
    ) -> None:
        self._names = ObjectNames(options.target().prefix, context.mapper)
        super().__init__(options, context, self._names.key_bytes_max)
        self._row_bytes = context.row_bytes
        self._bucket = store
        self._seal: CodedSeal = options.make_coded(seal, context.mapper, self._counts)
        self._lanes, self._coders = lanes
        self._sealing = None if context.row_bytes <= INLINE_BYTES_MAX else self._lanes
        self._accept_bare = options.unverified == "accept"
        self._besides: list[bytearray] = []
        self._index = BucketIndex(options.index_chunks, options.absent_ttl_s, asyncio.get_running_loop().time)
        self._scan: asyncio.Task[None] | None = None
        at_once = max(1, options.window_bytes // context.row_bytes)
        self._load_turns = Turns(min(options.requests, at_once), options.timeout_s)
        self._store_turns = Turns(min(options.requests, at_once), options.timeout_s)
        self._ask_turns = Turns(2 * options.requests, options.timeout_s)

    async def aclose(self, deadline_s: float) -> api.Abandoned:
        """Close, as the contract says. Calls that miss the deadline fail at once: their requests are cancelled."""
        self._index.queue.close()
        if self._scan is not None:
            self._scan.cancel()
        try:
            left = await self._calls.close(deadline_s)
            if left.transfers:
                for turns in (self._load_turns, self._store_turns, self._ask_turns):
                    turns.end()
                left = await self._calls.close(CLOSE_GRACE_S)
            if self._scan is not None:
                await asyncio.wait((self._scan,), timeout=CLOSE_GRACE_S)
        finally:
            for lanes in (self._lanes, self._coders):
                lanes.shutdown(wait=False, cancel_futures=True)
        return left

    def watch(self) -> AsyncIterator[api.InventoryEvent]:
        return self._index.queue.watch()

    async def _begin(self) -> None:
        """List the first page. Raises `ConfigError` or `BackendUnavailable`."""
        (first,) = await self._ask_turns.each([None], self._page)
        page: Sequence[Any] = []
        if not isinstance(first, Trouble):
            page = first
        elif first.kind in MISTAKES:
            raise api.ConfigError(f"url: {self._options.url!r} cannot be used: {first.why}")
        elif first.kind is not TroubleKind.LISTED:
            raise api.BackendUnavailable(f"{self._name}: {self._options.url}: {first.why}")
        else:  # Another program's name: no obstacle.
            self._listing_failed(first)
        self._listed(page)
        if self._options.index_chunks and page:
            self._scan = asyncio.create_task(self._list_on(page[-1]["path"]))
        else:
            self._index.listing_ended()

    async def _page(self, offset: str | None) -> Sequence[Any]:
        with suppress(StopAsyncIteration):
            return await anext(self._listing(offset))
        return []

    def _listing(self, offset: str | None) -> AsyncIterator[Sequence[Any]]:
        # One of its overloads is for arro3, which is not installed.
        some = obstore.list  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return some(self._bucket, self._names.folder, offset=offset, chunk_size=PAGE_KEYS)

    async def _list_on(self, last: str) -> None:
        """List the other pages. After an error, wait and continue from the last name."""
        listing, tries = self._listing(last), 0
        try:
            while not self._index.full:
                try:
                    page = await anext(listing)
                except STORE_ERRORS as error:
                    trouble, tries = trouble_of(error), tries + 1
                    if trouble.kind is TroubleKind.LISTED or tries == 3:
                        return self._listing_failed(trouble)
                    await asyncio.sleep(LIST_RETRY_S)
                    listing = self._listing(last)
                else:
                    tries, last = 0, page[-1]["path"]
                    self._listed(page)
        except StopAsyncIteration:
            pass
        finally:
            self._index.listing_ended()

    def _listing_failed(self, trouble: Trouble) -> None:
        self._counts.count("listing_failed")
        logger.warning(
            "tier %s: some of its chunks are not known without a request: %s; see %s",
            self._name,
            trouble.why,
            Remedy.UNLISTED,
        )

    def _listed(self, page: Sequence[Any]) -> None:
        for about in page:
            if self._fits(about["size"]) and (key := self._names.key(about["path"])) is not None:
                self._index.listed(key)

    async def _probe(self, keys: Sequence[api.OffloadKey]) -> Sequence[bool]:
        known = self._index.knows(keys)
        if None not in known:
            return [bool(answer) for answer in known]
        unknown = dict.fromkeys(key for key, answer in zip(keys, known, strict=True) if answer is None)
        told = dict(zip(unknown, self._checked(await self._ask_turns.each(list(unknown), self._head)), strict=True))
        for key, answer in told.items():
            if answer is True:
                self._index.there(key)
            elif answer is False or answer.kind is TroubleKind.MISSING:
                self._index.gone(key)
        return [told[key] is True if answer is None else answer for key, answer in zip(keys, known, strict=True)]

    async def _head(self, key: api.OffloadKey) -> bool:
        about = await obstore.head_async(self._bucket, self._names.name(key))
        return self._fits(about["size"])

    async def _load(self, reads: Sequence[api.Read]) -> Sequence[api.Outcome]:
        began, coded = time.monotonic(), list[bool]()
        answers = self._checked(await self._load_turns.each(reads, partial(self._get, coded)))
        self._seal.pace.loaded(time.monotonic() - began, coded)
        outcomes = [self._loaded(read.key, answer) for read, answer in zip(reads, answers, strict=True)]
        corrupt = [read.key for read, got in zip(reads, outcomes, strict=True) if isinstance(got, api.ChunkCorrupt)]
        if corrupt:
            await self._ask_turns.each(corrupt, self._remove)
        return outcomes

    async def _get(self, coded: list[bool], read: api.Read) -> api.Outcome:
        result = await obstore.get_async(self._bucket, self._names.name(read.key))
        footer, size = footer_of(result.attributes), result.meta["size"]
        if footer is None:
            if not (size == self._row_bytes and self._accept_bare):
                self._counts.count("unverified_refused")
                return api.ChunkMissing(f"{read.key.hex()}: an object without a seal")
            read.into[:] = memoryview(await result.bytes_async())
            self._counts.count("unverified_accepted")
            return None
        fault: api.SealFault | None = api.SealFault.LENGTH
        if isinstance(footer, api.SealFault):
            fault = footer
        elif self._fits(size):
            body = memoryview(await result.bytes_async())
            lanes = self._lanes if size < self._row_bytes else self._sealing
            fault = await _beside_loop(lanes, self._opened, read, body, footer)
        if fault is None:
            coded.append(size < self._row_bytes)
            return None
        self._counts.count(f"{'corrupt' if fault.corrupt else 'sealed'}_{fault}")
        return fault.outcome(read.key)

    def _opened(self, read: api.Read, body: memoryview, footer: bytes) -> api.SealFault | None:
        stored_bytes = body.nbytes + api.SEAL_BYTES
        beside_bytes = self._seal.opening_bytes(stored_bytes)
        memory = self._beside(beside_bytes)
        beside = memoryview(memory)[:beside_bytes]
        places = self._seal.places(read.into, beside, stored_bytes)
        places[0][: body.nbytes], places[-1][-api.SEAL_BYTES :] = body, footer
        fault = self._seal.open(read.key, read.into, beside, stored_bytes)
        self._besides.append(memory)
        return fault

    def _loaded(self, key: api.OffloadKey, got: api.Outcome | Trouble) -> api.Outcome:
        if isinstance(got, Trouble):
            if got.kind is not TroubleKind.MISSING:
                return caused(api.TransferFailed(f"{key.hex()}: {got.why}"), got.number)
            got = api.ChunkMissing(key.hex())
        if got is None:
            self._index.there(key)
        else:
            self._index.gone(key)
        return got

    async def _store(self, writes: Sequence[api.Write]) -> Sequence[api.Outcome]:
        try:
            answers = self._checked(await self._store_turns.each(writes, self._put))
        except api.BackendUnavailable:
            for write in writes:
                self._index.unknown(write.key)
            raise
        return [self._stored(write.key, answer) for write, answer in zip(writes, answers, strict=True)]

    async def _put(self, write: api.Write) -> None:
        beside_bytes = self._seal.closing_bytes
        memory = self._beside(beside_bytes)
        beside, code_until = memoryview(memory)[:beside_bytes], self._seal.code_until()
        lanes = self._sealing if code_until is None else self._coders
        body, footer = await _beside_loop(lanes, self._closed, write, beside, code_until)
        try:
            await obstore.put_async(
                self._bucket, self._names.name(write.key), body, use_multipart=False, attributes=attributes_of(footer)
            )
        finally:
            await released(body)
            self._besides.append(memory)

    def _closed(self, write: api.Write, beside: memoryview, code_until: float | None) -> tuple[memoryview, bytes]:
        parts = self._seal.close(write.key, write.row, beside, code_until)
        body_bytes = sum(part.nbytes for part in parts) - api.SEAL_BYTES
        return parts[0][:body_bytes], bytes(parts[-1][-api.SEAL_BYTES :])

    def _stored(self, key: api.OffloadKey, answer: Trouble | None) -> api.Outcome:
        if answer is None:
            self._index.there(key)
            return None
        self._index.unknown(key)
        error = (api.NoSpace if answer.kind is TroubleKind.FULL else api.TransferFailed)(f"{key.hex()}: {answer.why}")
        return caused(error, answer.number)

    async def _delete(self, keys: Sequence[api.OffloadKey]) -> None:
        for key in keys:
            self._index.deleted(key)
        answers = self._checked(await self._ask_turns.each(keys, self._remove))
        failed = [answer for answer in answers if answer is not None and answer.kind is not TroubleKind.MISSING]
        if failed:
            raise caused(api.BackendUnavailable(f"{self._name}: {failed[0].why}"), failed[0].number)

    async def _remove(self, key: api.OffloadKey) -> None:
        await obstore.delete_async(self._bucket, self._names.name(key))

    def _fits(self, body_bytes: int) -> bool:
        return self._seal.fits(body_bytes + api.SEAL_BYTES)

    def _beside(self, size: int) -> bytearray:
        """Return private memory of at least this length: of one length for all calls of a tier that codes rows."""
        with suppress(IndexError):
            if len(memory := self._besides.pop()) >= size:
                return memory
        return bytearray(max(size, self._seal.closing_bytes))

    def _checked(self, answers: "list[T | Trouble]") -> "list[T | Trouble]":
        """Count the failures. Raises `BackendUnavailable` if the whole bucket is unusable."""
        for answer in answers:
            if isinstance(answer, Trouble) and answer.kind is not TroubleKind.MISSING:
                self._counts.count(answer.kind.value)
        away = [answer for answer in answers if isinstance(answer, Trouble) and answer.kind not in OF_ONE_CHUNK]
        if away and len(away) == len(answers):
            raise caused(api.BackendUnavailable(f"{self._name}: {away[0].why}"), away[0].number)
        return answers


async def _beside_loop(lanes: api.Lanes | None, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that reads a whole row: in a thread, or at once if the row is short."""
    return fn(*args, **kwargs) if lanes is None else await api.in_thread(lanes, fn, *args, **kwargs)


def _prepared(options: ObjectOptions, context: api.TierContext) -> tuple[ObjectStore, api.Seal]:
    return make_store(options), options.make_seal(context.mapper.fingerprint, context.row_bytes)


class BucketIndex:
    """Hints, since other engines store and delete in the bucket, too. Belongs to the loop's thread."""

    def __init__(self, held_max: int, absent_ttl_s: float, clock: Callable[[], float]) -> None:
        # In order of arrival. A plain dictionary scans past all removed keys to find its first one.
        self.held: OrderedDict[api.OffloadKey, None] = OrderedDict()
        self.queue = api.InventoryQueue(self.held)
        self._held_max = held_max
        self._absent: OrderedDict[api.OffloadKey, float] = OrderedDict()  # By time of expiry.
        self._absent_ttl_s = absent_ttl_s
        self._clock = clock
        self._deleted: set[api.OffloadKey] = set()  # Since the scan began, which may still list them.

    @property
    def full(self) -> bool:
        return len(self.held) >= self._held_max

    def knows(self, keys: Sequence[api.OffloadKey]) -> list[bool | None]:
        self._forget_absent()
        held, absent = self.held, self._absent
        return [True if key in held else False if key in absent else None for key in keys]

    def listed(self, key: api.OffloadKey) -> None:
        if key not in self.held and not self.full and key not in self._deleted:
            self.held[key] = None
            self._absent.pop(key, None)
            self.queue.added(key)

    def listing_ended(self) -> None:
        """End the start-up scan. It is never complete: other engines' stores are not reported."""
        self._deleted.clear()
        self.queue.scan_ended(complete=False)

    def there(self, key: api.OffloadKey) -> None:
        self._absent.pop(key, None)
        if key in self.held or not self._held_max:
            return
        if self.full:
            self.held.popitem(last=False)
        self.held[key] = None

    def deleted(self, key: api.OffloadKey) -> None:
        if self.queue.complete is None:
            self._deleted.add(key)
        self.gone(key)

    def gone(self, key: api.OffloadKey) -> None:
        if key in self.held:
            del self.held[key]
            self.queue.lost(key)
        if self._absent_ttl_s:
            self._absent.pop(key, None)
            self._absent[key] = self._clock() + self._absent_ttl_s

    def unknown(self, key: api.OffloadKey) -> None:
        self.held.pop(key, None)
        self._absent.pop(key, None)

    def _forget_absent(self) -> None:
        now, absent = self._clock(), self._absent
        while absent:
            key = next(iter(absent))
            if absent[key] > now and len(absent) <= 1 << 16:  # Keys known to be absent; some megabytes.
                break
            del absent[key]
