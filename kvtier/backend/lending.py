"""Lent buffers: threads that return them, calls that hold them, chunks that fit a tier, and staging.

A cancelled `asyncio.to_thread` returns while its thread still writes, perhaps into another request's KV by then. So
`in_thread` returns when the thread does. The threads are daemons, because `ThreadPoolExecutor` joins its own at
interpreter exit, where one hung mount would hang the exit.

Some clients write into a buffer minutes after they have reported the transfer as failed. So they are lent a slot of
staging, whose bytes are checked and copied. A slot whose transfer failed is retired, and stays mapped for late bytes.
"""

import asyncio
import mmap
import queue
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import aiofiles.os

from kvtier.backend.contract import Abandoned, Outcome, Read, Write
from kvtier.backend.namespace import GROUP_BYTES, OffloadKey
from kvtier.errors import BackendClosed, BackendUnavailable, ChunkMissing, NoSpace
from kvtier.memory import start_thread

P = ParamSpec("P")
T = TypeVar("T")
KEY_BYTES_SHOWN = 68  # In a message; a refused key may have any length.
Chunk = TypeVar("Chunk", Read, Write)
Move = Callable[[Sequence[Chunk]], Awaitable[Sequence[Outcome]]]


async def in_thread(lanes: "Lanes", fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `fn(*args)` on a lane, and return or raise its result.

    A cancelled call waits until the thread has left `fn`, however often it is cancelled, and then raises
    `CancelledError`. The return value is lost, so `fn` must record its results itself. If `fn` has not begun, it never
    runs. Raises `BackendClosed` if the lanes were closed before it began.
    """
    return (await in_threads(lanes, [partial(fn, *args, **kwargs)]))[0]


async def in_threads(lanes: "Lanes", calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run calls as `in_thread` does, concurrently; when all have ended, return results or raise the first error."""
    jobs = lanes.start(calls)
    ended = _when_ended(jobs)
    cancelled: asyncio.CancelledError | None = None
    while not ended.is_set():
        try:
            await ended.wait()
        except asyncio.CancelledError as error:
            cancelled = error
            for job in jobs:
                job.cancel()  # Has no effect on a running one, which is waited for.
    # An error's traceback keeps this frame, so no variable of it may keep the error.
    if cancelled is not None:
        try:
            raise cancelled
        finally:
            del cancelled
    return [jobs.pop(0).result() for _ in calls]


async def in_task(call: Coroutine[Any, Any, T]) -> T:
    """Run an asynchronous client's coroutine to its end, and return or raise its result.

    Few clients document what a cancelled call does with a lent buffer: a transport may go on reading into it. So the
    client's call is never cancelled. The waiting call returns when it has ended, however often it is cancelled, and
    then raises `CancelledError`; the client's result is lost. Give the client's call its own deadline, after which it
    touches no buffer. Raises `BackendUnavailable` if the client cancels its own call.
    """
    tasks = [asyncio.ensure_future(call)]
    cancelled: asyncio.CancelledError | None = None
    while not tasks[0].done():
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    task = tasks.pop()  # As above: the frame must not keep the error.
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # Retrieved, or asyncio would log it.
        try:
            raise cancelled
        finally:
            del cancelled, task
    if task.cancelled():
        raise BackendUnavailable("the client has cancelled its own call")
    try:
        return task.result()
    finally:
        del task


class Lanes(Executor):
    """Daemon threads that take calls in order of arrival; an `Executor`, for `loop.run_in_executor` and aiofiles.

    The queue is unlimited: the runner's budgets bound its callers, and waiting calls hold only their arguments.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._closed = False
        self._open: set[_Job[Any]] = set()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._ends: list[Future[None]] = [Future() for _ in range(count)]
        try:
            for index, end in enumerate(self._ends):
                serve = partial(_serve, self._queue, end)
                start_thread(threading.Thread(target=serve, name=f"{name}-{index}", daemon=True))
        except RuntimeError:  # The process has reached its limit of threads.
            self.shutdown(wait=False)
            raise

    def start(self, calls: Iterable[Callable[[], T]]) -> list["_Job[T]"]:
        """Queue the calls as parts of one. Raises `BackendClosed` once closed."""
        whole = object()
        jobs = [_Job(call, whole) for call in calls]
        with self._lock:
            if self._closed:
                raise BackendClosed("lanes are closed")
            for job in jobs:
                self._open.add(job)
                job.add_done_callback(self._forget)
                self._queue.put(job)  # Under the lock: no job may follow the threads' last entry.
        return jobs

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue one call. Raises `BackendClosed` once closed."""
        return self.start([partial(fn, *args, **kwargs)])[0]

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call without a lent buffer. A cancelled caller returns at once; a call that has begun goes on."""
        return await aiofiles.os.wrap(fn)(*args, executor=self, **kwargs)

    async def aclose(self, deadline_s: float) -> int:
        """Refuse new calls, wait for running ones, drop those not begun by the deadline; return how many still run.

        A thread ends with its call; not even the interpreter's exit waits for it. May be called again.
        """
        with self._lock:
            self._closed = True
            jobs = list(self._open)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await _when_ended(jobs).wait()
        finally:
            self.shutdown(wait=False, cancel_futures=True)
        return len({job.whole for job in jobs if not job.done()})  # A lane may have taken a job and not begun it.

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse new calls and end the threads, as an `Executor` does; `aclose` is for use on a loop.

        Calls dropped by `cancel_futures` fail with `BackendClosed`: a cancelled future looks like a cancelled task.
        """
        with self._lock:
            self._closed = True
            jobs = list(self._open)
            dropped = self._drain() if cancel_futures else []
            for _ in range(self.count):
                self._queue.put(None)
        for job in dropped:
            job.drop()
        if wait:
            ended = threading.Event()
            _call_when_ended(jobs, ended.set)
            ended.wait()

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call `call` once, when every thread has ended: now, or from the last thread."""
        _call_when_ended(self._ends, call)

    def _drain(self) -> list["_Job[Any]"]:
        """Take the waiting jobs. Only the thread that takes a job from the queue may end it."""
        waiting: list[_Job[Any]] = []
        with suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None:
                    waiting.append(job)
        return waiting

    def _forget(self, job: Future[Any]) -> None:
        with self._lock:
            self._open.discard(cast("_Job[Any]", job))


class _Job(Future[T]):
    def __init__(self, call: Callable[[], T], whole: object) -> None:
        super().__init__()
        self.whole = whole
        self._call: Callable[[], T] | None = call

    def run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  # Raised in the waiting task.
            del call
            self.set_exception(error)
            del self  # The error's traceback keeps this frame, and the job keeps the error.
        else:
            del call  # Before the result is visible: a buffer is lent only until then.
            self.set_result(result)

    def drop(self) -> None:
        self._call = None
        if self.set_running_or_notify_cancel():
            self.set_exception(BackendClosed("closed before the call's turn came"))


def _serve(jobs: "queue.SimpleQueue[_Job[Any] | None]", end: Future[None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # An idle lane must not keep the last call's buffers.
    end.set_result(None)


def _when_ended(jobs: Sequence[Future[Any]]) -> asyncio.Event:
    """Return an event that is set once every job has ended, with one wake-up for all."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # The loop was closed while a lane hung.
            loop.call_soon_threadsafe(ended.set)

    _call_when_ended(jobs, wake)
    return ended


def _call_when_ended(jobs: Sequence[Future[Any]], wake: Callable[[], object]) -> None:
    lock = threading.Lock()
    left = len(jobs)

    def count(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            wake()

    if not jobs:
        wake()
    for job in jobs:
        job.add_done_callback(count)


class Calls:
    """Counts the running calls of a tier, which hold lent buffers. Belongs to one event loop."""

    def __init__(self, tier_name: str) -> None:
        self._tier_name = tier_name
        self._under_way = 0
        self._ended = asyncio.Event()
        self._ended.set()
        self.closed = False

    @contextmanager
    def one(self) -> Generator[None]:
        """Count a call for the length of the block. Raises `BackendClosed` once closed."""
        if self.closed:
            raise BackendClosed(f"tier {self._tier_name}: called after it was closed")
        self._under_way += 1
        self._ended.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._ended.set()

    async def close(self, deadline_s: float) -> Abandoned:
        """Refuse new calls at once, wait up to `deadline_s` for running ones, and return how many are left."""
        self.closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._ended.wait()
        return Abandoned(self._under_way)


class Fit:
    """The lengths of keys and rows that a tier can hold. A chunk that does not fit gets its own outcome."""

    def __init__(self, row_bytes: int, key_bytes_max: int = sys.maxsize) -> None:
        self._row_bytes = row_bytes
        self._key_bytes_max = key_bytes_max

    async def probe(
        self, keys: Sequence[OffloadKey], call: Callable[[Sequence[OffloadKey]], Awaitable[Sequence[bool]]]
    ) -> Sequence[bool]:
        """Probe the keys that fit. The others are absent."""
        fitting = self.keys(keys)
        answers = await call(fitting)
        if fitting is keys:
            return answers
        told = iter(answers)
        return [self._takes(key) and next(told) for key in keys]

    async def load(self, reads: Sequence[Read], call: Move[Read]) -> Sequence[Outcome]:
        """Load the chunks that fit. The others are missing."""
        return await self._move(reads, call, ChunkMissing)

    async def store(self, writes: Sequence[Write], call: Move[Write]) -> Sequence[Outcome]:
        """Store the chunks that fit. The others get `NoSpace`, which is no fault of the tier."""
        return await self._move(writes, call, NoSpace)

    def keys(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        return keys if all(map(self._takes, keys)) else list(filter(self._takes, keys))

    async def _move(
        self, batch: Sequence[Chunk], call: Move[Chunk], refused: type[ChunkMissing | NoSpace]
    ) -> Sequence[Outcome]:
        row_bytes, most = self._row_bytes, self._key_bytes_max
        unfit = {
            index: self._why(key, buffer)
            for index, (key, buffer) in enumerate(batch)
            if buffer.nbytes != row_bytes or not GROUP_BYTES <= len(key) <= most
        }
        if not unfit:
            return await call(batch)
        moved = iter(await call([chunk for index, chunk in enumerate(batch) if index not in unfit]))
        return [refused(unfit[index]) if index in unfit else next(moved) for index in range(len(batch))]

    def _takes(self, key: OffloadKey) -> bool:
        return GROUP_BYTES <= len(key) <= self._key_bytes_max

    def _why(self, key: OffloadKey, buffer: memoryview) -> str:
        name = key[:KEY_BYTES_SHOWN].hex()
        if not self._takes(key):
            most = "" if self._key_bytes_max == sys.maxsize else f" to {self._key_bytes_max:,}"
            return f"{name}: a key of {len(key):,} bytes, {GROUP_BYTES}{most or ' or more'} accepted"
        return f"{name}: a buffer of {buffer.nbytes:,} bytes, rows of {self._row_bytes:,} accepted"


async def load_each_once(reads: Sequence[Read], call: Move[Read]) -> Sequence[Outcome]:
    """Load each key of a batch once, for services that fill one buffer a key; copy its outcome to its other places."""
    first = {read.key: index for index, read in reversed(list(enumerate(reads)))}
    if len(first) == len(reads):
        return await call(reads)
    sent = sorted(first.values())
    outcomes = dict(zip(sent, await call([reads[index] for index in sent]), strict=True))
    for index, (key, into) in enumerate(reads):
        outcome = outcomes[first[key]]
        if index not in outcomes and outcome is None:
            into[:] = reads[first[key]].into
        outcomes.setdefault(index, outcome)
    return [outcomes[index] for index in range(len(reads))]


async def store_each_once(writes: Sequence[Write], call: Move[Write]) -> Sequence[Outcome]:
    """Store each key of a batch once, from its last place. All its places get that outcome."""
    last = {write.key: index for index, write in enumerate(writes)}
    if len(last) == len(writes):
        return await call(writes)
    sent = sorted(last.values())
    outcomes = dict(zip(sent, await call([writes[index] for index in sent]), strict=True))
    return [outcomes[last[write.key]] for write in writes]


class Slots:
    def __init__(self, views: list[memoryview]) -> None:
        self.views = views
        self.retired: set[int] = set()

    def retire(self, indices: Iterable[int] | None = None) -> None:
        """Retire these slots, or all of them: their transfer failed or may go on. They are never used again."""
        self.retired.update(range(len(self.views)) if indices is None else indices)

    def empty(self, indices: Iterable[int] | None = None) -> None:
        """Return the memory of retired slots, or of all, to the system; the addresses stay mapped. For any thread."""
        for index in range(len(self.views)) if indices is None else indices:
            view = self.views[index]
            assert isinstance(view.obj, mmap.mmap)
            view.obj.madvise(mmap.MADV_DONTNEED)


class Staging:
    """A fixed number of page-aligned slots in use, and a limit to those that are retired. Belongs to one event loop."""

    def __init__(self, tier_name: str, slot_bytes: int, slots: int, retired_max: int) -> None:
        """Up to `retired_max` retired slots are replaced by new ones."""
        self.slots = slots
        self.retired = 0  # Slots that are kept and not used any more.
        self._tier_name = tier_name
        self._slot_bytes = slot_bytes
        self._retired_max = retired_max
        self._kept: list[memoryview] = []
        self._free: list[memoryview] = []
        self._unmapped = slots  # Slots that are mapped at their first use.
        self._turns = asyncio.Lock()  # First come, first served, even if a later call wants fewer slots.
        self._came_back = asyncio.Event()

    @asynccontextmanager
    async def lend(self, count: int) -> AsyncGenerator[Slots]:
        """Lend `count` slots for the length of the block. Waits until they are free.

        An exception or a cancellation retires the slots, because their transfer may go on. Raises `BackendUnavailable`
        when more were retired than the limit allows (the client's process has to be replaced), or the system has no
        memory for them. ValueError for more slots than there are.
        """
        if not 1 <= count <= self.slots:
            raise ValueError(f"{count} slots wanted, 1 to {self.slots} are there")
        slots = Slots(await self._taken(count))
        try:
            yield slots
        except BaseException:
            slots.retire()
            raise
        finally:
            self._put_back(slots)

    async def _taken(self, count: int) -> list[memoryview]:
        async with self._turns:
            while len(self._free) + self._unmapped < count:
                if count > self.slots - max(0, self.retired - self._retired_max):
                    raise BackendUnavailable(
                        f"tier {self._tier_name}: {self.retired} slots of staging are retired, "
                        f"{self._retired_max} accepted: restart its client"
                    )
                self._came_back.clear()
                await self._came_back.wait()
            while len(self._free) < count:
                self._free.append(self._mapped())
                self._unmapped -= 1
            taken = self._free[-count:]  # The most recently used ones may still be in a CPU cache.
            del self._free[-count:]
        return taken

    def _put_back(self, slots: Slots) -> None:
        """Return slots. Must not fail: other calls wait for them."""
        retired = len(slots.retired)
        self._unmapped += max(0, min(retired, self._retired_max - self.retired))
        self.retired += retired
        for index, view in enumerate(slots.views):
            (self._kept if index in slots.retired else self._free).append(view)
        self._came_back.set()

    def _mapped(self) -> memoryview:
        size_bytes = -(-self._slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:  # Private: the system takes back no shared memory.
            mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BackendUnavailable(
                f"tier {self._tier_name}: no memory for a slot of staging of {size_bytes:,} bytes: {error.strerror}"
            ) from error
        return memoryview(mapped)[: self._slot_bytes]
