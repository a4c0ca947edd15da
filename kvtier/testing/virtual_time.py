"""An event loop whose clock jumps to the next timer: an hour of sleeps takes no time, and a deadlock is an error.

Nothing here waits: no selector, no thread and no signal wakes this loop, so what reaches for the real world is refused
at the call that tried. Callbacks run in the order in which they became due, timers of one moment in the order in which
they were set, and tasks hash by their number instead of their address, so that a set of tasks (`asyncio.wait` returns
them, `asyncio.TaskGroup` keeps one) is walked in the same order in every run: the same seed tells the same story.

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(asyncio.sleep(3_600))
        assert runner.get_loop().time() == 3_600
"""

# ruff: noqa: SLF001  An event loop is asyncio's other half: what looks private here is what asyncio has for loops.
import asyncio
import heapq
import itertools
import logging
import math
import os
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple
from weakref import WeakSet

from kvtier.errors import KVTierError

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]

logger = logging.getLogger("asyncio")


class VirtualTimeError(KVTierError):
    """The code under test did something that virtual time cannot go on from: mend what the message names."""


class NotVirtual(VirtualTimeError):
    """The code under test reached for a thread, a socket, a process or a signal: use a fake, or a real loop."""


class BareLoop(asyncio.AbstractEventLoop):
    """Settings, exception handling and asynchronous generators; scheduling and running are the subclass's."""

    def __init__(self) -> None:
        self._debug = False
        self._task_factory: Any = None
        self._exception_handler: ExceptionHandler | None = None
        self._generators: WeakSet[AsyncGenerator[Any, Any]] = WeakSet()

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        self._debug = enabled

    def set_task_factory(self, factory: Any) -> None:
        self._task_factory = factory

    def get_task_factory(self) -> Any:
        return self._task_factory

    def get_exception_handler(self) -> ExceptionHandler | None:
        return self._exception_handler

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        self._exception_handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._exception_handler is not None:
            self._exception_handler(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log the message, what else is known, and the traceback."""
        known = {key: value for key, value in context.items() if key not in {"message", "exception"}}
        logger.error("%s %r", context.get("message"), known, exc_info=context.get("exception"))

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that were left half-way."""
        generators = list(self._generators)
        self._generators.clear()
        await asyncio.gather(*(generator.aclose() for generator in generators), return_exceptions=True)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: there is no executor to wait for."""

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self.is_closed():
            self.call_soon(self.create_task, generator.aclose())


REFUSED = {
    "a thread": ("run_in_executor", "set_default_executor"),
    "a file descriptor": (
        *("add_reader", "remove_reader", "add_writer", "remove_writer"),
        *("connect_read_pipe", "connect_write_pipe"),
    ),
    "a socket": (
        *("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into", "sock_sendall", "sock_sendto"),
        *("sock_connect", "sock_accept", "sock_sendfile", "sendfile", "start_tls", "getaddrinfo", "getnameinfo"),
        *("create_connection", "create_server", "create_unix_connection", "create_unix_server"),
        *("create_datagram_endpoint", "connect_accepted_socket"),
    ),
    "a process": ("subprocess_exec", "subprocess_shell"),
    "a signal": ("add_signal_handler", "remove_signal_handler"),
}


def _refusal(name: str, what: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotVirtual(f"loop.{name} was called: virtual time has no use for {what}; use a fake, or a real loop")

    return refuse


for _what, _names in REFUSED.items():
    for _name in _names:
        setattr(BareLoop, _name, _refusal(_name, _what))


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

ITERATIONS_AT_ONE_MOMENT_MAX = 1_000_000  # Some ten seconds of real time: whoever still polls then polls for ever.
CANCELLED_TIMERS_MIN = 64  # Fewer are not worth rebuilding the heap for.

__all__ = ["Deadlock", "NotVirtual", "VirtualTimeError", "VirtualTimeLoop", "run"]


class Deadlock(VirtualTimeError):
    """What the loop waits for cannot happen: nothing is ready and no timer is set, or time no longer moves."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, as `asyncio.run` does in real time.

    Raises `Deadlock`, once every task has been cancelled, if the coroutine can never end.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class VirtualTimeLoop(BareLoop):
    """A loop for one thread that never waits. Pass the class itself as `loop_factory`."""

    def __init__(self, *, iterations_at_one_moment_max: int = ITERATIONS_AT_ONE_MOMENT_MAX) -> None:
        super().__init__()
        self._iterations_max = iterations_at_one_moment_max
        self._now_s = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_cancelled = 0
        self._numbers = itertools.count()
        self._thread_id = threading.get_ident()
        self._threads_refused: list[str] = []
        self._running = self._stopping = self._closed = False

    def __repr__(self) -> str:
        return f"<VirtualTimeLoop at {self._now_s:,.6f} s{' closed' * self._closed}>"

    # Running.

    def run_until_complete(self, future: Any) -> Any:
        """Run until the future is done; give its result. Raises `Deadlock` if it can never be."""
        self._check_startable()
        task: asyncio.Future[Any] = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(_stop_its_loop)
        try:
            self.run_forever()
        finally:
            task.remove_done_callback(_stop_its_loop)
        if not task.done():
            raise VirtualTimeError("the loop was stopped before the future was done")
        return task.result()

    def run_forever(self) -> None:
        """Run until `stop` is called. Raises `Deadlock` if it can never be."""
        self._check_startable()
        hooks = sys.get_asyncgen_hooks()
        self._thread_id = threading.get_ident()
        self._running = True
        sys.set_asyncgen_hooks(firstiter=self._generators.add, finalizer=self._close_generator)
        asyncio.events._set_running_loop(self)
        try:
            self._iterate_until_stopped()
        finally:
            self._running = self._stopping = False
            asyncio.events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _iterate_until_stopped(self) -> None:
        moment_s, iterations = self._now_s, 0
        while True:
            self._take_due_timers()
            if not (self._ready or self._stopping or self._jump()):
                raise Deadlock(self._story("nothing is ready and no timer is set"))
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()  # pyright: ignore[reportPrivateUsage]  # As every loop does.
            if self._stopping:
                return
            iterations = iterations + 1 if moment_s == self._now_s else 0
            moment_s = self._now_s
            if iterations == self._iterations_max:
                raise Deadlock(self._story(f"time has stood still for {iterations:,} iterations: something polls"))

    def _take_due_timers(self) -> None:
        while self._timers and (self._timers[0][0] <= self._now_s or self._timers[0][2].cancelled()):
            handle = heapq.heappop(self._timers)[2]
            self._timers_cancelled -= handle.cancelled()
            self._ready.append(handle)

    def _jump(self) -> bool:
        """Move the clock to the next timer; say whether there was one."""
        if not self._timers or math.isinf(self._timers[0][0]):  # A sleep for ever is no event.
            return False
        self._now_s = self._timers[0][0]
        self._take_due_timers()
        return True

    def _story(self, what: str) -> str:
        """Say what happened, when, and where every task waits."""
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        lines = [f"{what}, at {self._now_s:,.6f} s; {len(tasks)} task(s) wait:"]
        lines += [f"  {task.get_name()} {place(task.get_coro())}" for task in tasks]
        lines += [f"  (refused a call_soon_threadsafe from thread {name!r})" for name in self._threads_refused]
        return "\n".join(lines)

    def stop(self) -> None:
        """End `run_forever` after the iteration under way."""
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Forget everything that was scheduled; idempotent."""
        if self._running:
            raise RuntimeError("a running loop cannot be closed: stop it first")
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")

    def _check_startable(self) -> None:
        self._check_open()
        if self._running or asyncio.events._get_running_loop() is not None:
            raise RuntimeError("a loop is already running in this thread")

    # Scheduling.

    def time(self) -> float:
        """Give the virtual time in seconds."""
        return self._now_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Do what `call_soon` does, on the loop's own thread. Raises `NotVirtual` on any other."""
        if threading.get_ident() != self._thread_id:
            name = threading.current_thread().name
            self._threads_refused.append(name)
            raise NotVirtual(f"call_soon_threadsafe from thread {name!r}: a thread's time is real")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:  # noqa: ARG002
        self._timers_cancelled += 1
        if self._timers_cancelled > max(CANCELLED_TIMERS_MIN, len(self._timers) // 2):
            # Deadlines that were met would otherwise stay until virtual time reaches them.
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, **options: Any) -> asyncio.Task[Any]:
        self._check_open()
        if self._task_factory is None:
            return _Task(next(self._numbers), coro, loop=self, name=name, **options)
        given = {option: value for option, value in options.items() if value is not None}
        task: asyncio.Task[Any] = self._task_factory(self, coro, **given)
        if name is not None:
            task.set_name(name)
        return task


class _Task(asyncio.Task[Any]):
    """A task with a place in the order of tasks."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number  # First: the base class puts the task into a set.
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


def _stop_its_loop(future: asyncio.Future[Any]) -> None:
    if future.cancelled() or not isinstance(future.exception(), SystemExit | KeyboardInterrupt):
        future.get_loop().stop()  # The other two have ended run_forever by themselves.


def place(coroutine: Any) -> str:
    """Say where a coroutine waits: the innermost frame that Python knows of."""
    frame = None
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None) or frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    if frame is None:
        return "has ended"
    return f"in {frame.f_code.co_qualname}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
