"""Lent buffers: blocking code in threads without losing a buffer, calls that hold buffers, chunks that fit a tier.

A cancelled `asyncio.to_thread` returns while its thread still writes. Rows are reused, so the thread would overwrite
another request's KV. So `in_thread` comes back when the thread does. The threads are our own daemons, because
`ThreadPoolExecutor` joins its threads at interpreter exit, and one hung mount would hang the exit with it.
"""

import asyncio
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import aiofiles.os

from kvtier.backend.contract import Abandoned, Outcome, Read, Write
from kvtier.backend.keys import GROUP_BYTES, OffloadKey
from kvtier.errors import BackendClosed, BackendUnavailable, ChunkMissing, NoSpace
from kvtier.memory import start_thread

P = ParamSpec("P")
T = TypeVar("T")
KEY_BYTES_SHOWN = 68  # In a message; a key that is refused may be as long as it likes.
Chunk = TypeVar("Chunk", Read, Write)


async def in_thread(lanes: "Lanes", fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `fn(*args)` on a lane and return what it returns, or raise what it raises.

    A cancelled call comes back when the thread is out of `fn`, however often it is cancelled again. Then it raises
    `CancelledError`. The return value of `fn` is lost, so `fn` itself must write down its results. If its turn had not
    come, `fn` never runs. Raises `BackendClosed` if the lanes were closed before its turn came.
    """
    return (await in_threads(lanes, [partial(fn, *args, **kwargs)]))[0]


async def in_threads(lanes: "Lanes", calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run the calls side by side on the lanes, as `in_thread` does one, and return their results in order.

    It comes back when the last call has ended. If calls failed, it raises the error of the first of them.
    """
    jobs = lanes.start(calls)
    ended = _when_ended(jobs)
    cancelled: asyncio.CancelledError | None = None
    while not ended.is_set():
        try:
            await ended.wait()
        except asyncio.CancelledError as error:
            cancelled = error
            for job in jobs:
                job.cancel()  # Only if its turn has not come: a running one is waited for.
    # An error's traceback keeps this frame, so nothing in it may keep the error: no variable, nor a variable's job.
    if cancelled is not None:
        try:
            raise cancelled
        finally:
            del cancelled
    return [jobs.pop(0).result() for _ in calls]


async def in_task(call: Coroutine[Any, Any, T]) -> T:
    """Run a client's coroutine to its end, and return what it returns, or raise what it raises.

    For clients that are asynchronous themselves. Hardly a client says what it does with a lent buffer when its call is
    cancelled: a transport may go on reading into it. So the client's call itself is never cancelled. The waiting call
    comes back when the client's call has ended, however often it is cancelled. Then it raises `CancelledError`, and the
    client's result is lost. Give the client's call a deadline of its own, after which it touches no buffer any more.
    Raises `BackendUnavailable` if the client cancels its own call.
    """
    tasks = [asyncio.ensure_future(call)]
    cancelled: asyncio.CancelledError | None = None
    while not tasks[0].done():
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    task = tasks.pop()  # As above: what an error's traceback keeps must not keep the error.
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # Or asyncio would complain of one that nobody looked at.
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
    """A fixed number of daemon threads that take calls in the order they came.

    An `Executor`, so that `loop.run_in_executor` and aiofiles run on it. The queue has no limit of its own: the
    runner's budgets bound its callers, and waiting calls hold nothing but their arguments.
    """

    def __init__(self, count: int, name: str) -> None:
        """Start `count` threads named `<name>-<i>`."""
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
        except RuntimeError:  # The process may have no more of them.
            self.shutdown(wait=False)
            raise

    def start(self, calls: Iterable[Callable[[], T]]) -> list["_Job[T]"]:
        """Queue the calls as parts of one; raises `BackendClosed` once closed."""
        whole = object()
        jobs = [_Job(call, whole) for call in calls]
        with self._lock:
            if self._closed:
                raise BackendClosed("lanes are closed")
            for job in jobs:
                self._open.add(job)
                job.add_done_callback(self._forget)
                self._queue.put(job)  # Under the lock: nothing may come behind the threads' last orders.
        return jobs

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue one call, as an `Executor` does; raises `BackendClosed` once closed."""
        return self.start([partial(fn, *args, **kwargs)])[0]

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one call that has no lent buffer, and return what it returns; raises `BackendClosed` once closed.

        A cancelled call returns at once. Its thread goes on if it has begun, and otherwise never begins.
        """
        return await aiofiles.os.wrap(fn)(*args, executor=self, **kwargs)

    async def aclose(self, deadline_s: float) -> int:
        """Refuse new calls, wait for calls under way, and drop calls whose turn has not come by then.

        Returns how many calls are still in their threads. Such a thread ends when its call returns. Nothing else waits
        for it, not even the interpreter's exit. May be called again.
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
        return len({job.whole for job in jobs if not job.done()})  # A lane may have taken one it has not begun yet.

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse new calls and let the threads go, as an `Executor` does; `aclose` is for use on a loop.

        Calls dropped by `cancel_futures` fail with `BackendClosed`. A task that waits for a cancelled future would take
        itself for cancelled.
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
        """Call it once, when no thread is in a call any more, nor will be: at once if that is so.

        Otherwise the last thread calls it, after its own call has ended. For what must stay open as long as that.
        """
        _call_when_ended(self._ends, call)

    def _drain(self) -> list["_Job[Any]"]:
        """Take the jobs that wait. A job is ended by the thread that takes it from the queue, and by no other."""
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
    """One call on its way through a lane, and the whole that it is a part of."""

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
        except BaseException as error:  # noqa: BLE001  # Carried to the task that waits, never swallowed.
            del call
            self.set_exception(error)
            del self  # Else the error's traceback would hold the job that holds the error.
        else:
            del call  # Before anybody hears that it is over: a buffer is lent no longer than the call lasts.
            self.set_result(result)

    def drop(self) -> None:
        """End a job that no lane has taken."""
        self._call = None
        if self.set_running_or_notify_cancel():
            self.set_exception(BackendClosed("closed before the call's turn came"))


def _serve(jobs: "queue.SimpleQueue[_Job[Any] | None]", end: Future[None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # An idle lane must not keep the last call's buffers alive.
    end.set_result(None)


def _when_ended(jobs: Sequence[Future[Any]]) -> asyncio.Event:
    """Return an event of the running loop that is set once every job has ended: one wake-up for all of them."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # The loop was closed while a lane hung: nobody waits any more.
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
    """The number of calls that hold lent buffers, on one event loop. Tiers with `Lanes` count their calls there."""

    def __init__(self, tier_name: str) -> None:
        self._tier_name = tier_name
        self._under_way = 0
        self._ended = asyncio.Event()
        self._ended.set()
        self.closed = False

    @contextmanager
    def one(self) -> Generator[None]:
        """Count a call for as long as the block lasts; raises `BackendClosed` once closed."""
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
        """Refuse new calls at once, wait at most `deadline_s` for calls under way, and say how many are left."""
        self.closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._ended.wait()
        return Abandoned(self._under_way)


class Fit:
    """The limits of chunks that a tier can hold. A chunk that does not fit has an outcome of its own; the others move.

    A batch in which everything fits, as in every batch of kvtier's, is passed on as it is.
    """

    def __init__(self, row_bytes: int, key_bytes_max: int = sys.maxsize) -> None:
        """Hold rows of this length, under keys that have a group and are at most so long."""
        self._row_bytes = row_bytes
        self._key_bytes_max = key_bytes_max

    async def probe(
        self, keys: Sequence[OffloadKey], call: Callable[[Sequence[OffloadKey]], Awaitable[Sequence[bool]]]
    ) -> Sequence[bool]:
        """Ask for the keys that fit. The others are absent."""
        fitting = self.keys(keys)
        answers = await call(fitting)
        if fitting is keys:
            return answers
        told = iter(answers)
        return [self._takes(key) and next(told) for key in keys]

    async def load(
        self, reads: Sequence[Read], call: Callable[[Sequence[Read]], Awaitable[Sequence[Outcome]]]
    ) -> Sequence[Outcome]:
        """Load the chunks that fit. The others are missing."""
        return await self._move(reads, call, ChunkMissing)

    async def store(
        self, writes: Sequence[Write], call: Callable[[Sequence[Write]], Awaitable[Sequence[Outcome]]]
    ) -> Sequence[Outcome]:
        """Store the chunks that fit. For the others there is never room, which is no fault of the tier."""
        return await self._move(writes, call, NoSpace)

    def keys(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys that fit."""
        return keys if all(map(self._takes, keys)) else list(filter(self._takes, keys))

    async def _move(
        self,
        batch: Sequence[Chunk],
        call: Callable[[Sequence[Chunk]], Awaitable[Sequence[Outcome]]],
        refused: type[ChunkMissing | NoSpace],
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


async def load_each_once(
    reads: Sequence[Read], call: Callable[[Sequence[Read]], Awaitable[Sequence[Outcome]]]
) -> Sequence[Outcome]:
    """Load each key of a batch once, and copy its chunk to the other places of the key.

    For services that take a key twice in a batch for one key, and fill only one of its buffers. A key that failed has
    failed in all its places. A batch in which no key comes twice is passed on as it is.
    """
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


async def store_each_once(
    writes: Sequence[Write], call: Callable[[Sequence[Write]], Awaitable[Sequence[Outcome]]]
) -> Sequence[Outcome]:
    """Store each key of a batch once, from its last place. All its places get that outcome."""
    last = {write.key: index for index, write in enumerate(writes)}
    if len(last) == len(writes):
        return await call(writes)
    sent = sorted(last.values())
    outcomes = dict(zip(sent, await call([writes[index] for index in sent]), strict=True))
    return [outcomes[last[write.key]] for write in writes]
