"""Virtual time: an event loop whose clock jumps to the next timer. An hour of sleeps takes no time, deadlocks raise.

It is asyncio's own loop with another selector, which moves the clock instead of waiting. A call that reaches for the
real world is refused. Callbacks run in the order in which they became due, timers of one moment in the order of
setting, and sets of tasks are walked by number: the same seed tells the same story.

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(asyncio.sleep(3_600))
        assert runner.get_loop().time() == 3_600
"""

import asyncio
import heapq
import itertools
import math
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from functools import partial
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from kvtier.errors import KVTierError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

ITERATIONS_AT_ONE_MOMENT_MAX = 1_000_000  # Some ten seconds of real time: a task that still polls then polls forever.
REFUSED = {  # Of what asyncio's own loop would begin, and not end; it refuses the rest itself.
    "a thread": ("run_in_executor", "set_default_executor"),
    "a file descriptor": ("add_reader", "remove_reader", "add_writer", "remove_writer"),
    "a socket": ("create_connection", "create_server", "create_datagram_endpoint", "getaddrinfo", "getnameinfo"),
    "a process": ("subprocess_exec", "subprocess_shell"),
    "a signal": ("add_signal_handler", "remove_signal_handler"),
}

__all__ = ["Deadlock", "NotVirtual", "VirtualTimeError", "VirtualTimeLoop", "run"]


class VirtualTimeError(KVTierError):
    """The code under test did something that virtual time cannot go on from: mend what the message names."""


class NotVirtual(VirtualTimeError, NotImplementedError):
    """The code under test reached for a thread, a socket, a process or a signal: use a fake, or a real loop."""


class Deadlock(VirtualTimeError):
    """The loop waits for what cannot happen: nothing is ready and no timer is set, or time no longer moves."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, as `asyncio.run` does. Raises `Deadlock` if it can never end."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """A loop for one thread that never waits. Pass the class itself as `loop_factory`."""

    _scheduled: "list[_Timer]"  # asyncio's heap of timers.

    def __init__(self, *, iterations_at_one_moment_max: int = ITERATIONS_AT_ONE_MOMENT_MAX) -> None:
        super().__init__()
        self._selector = self  # See `select`.
        self._iterations = 0  # Of this run, at this moment.
        self._iterations_max = iterations_at_one_moment_max
        self._numbers = itertools.count()
        self._own_thread = threading.get_ident()  # That it was made in, and later the one that it runs in.
        self._threads_refused: list[str] = []
        self.set_task_factory(self._new_task)
        self._jump(0.0)

    def run_forever(self) -> None:
        """Run until `stop` is called. Raises `Deadlock` if it can never be."""
        self._own_thread = threading.get_ident()
        self._iterations = 0  # Each run may take as many: many short ones are no polling.
        super().run_forever()

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> Sequence[Any]:
        """Move the clock to the next timer where asyncio would wait for it. Raises `Deadlock` if there is none."""
        if timeout == 0:
            self._iterations += 1
            if self._iterations == self._iterations_max:
                raise Deadlock(
                    self._story(f"time has stood still for {self._iterations:,} iterations: something polls")
                )
        elif not self._scheduled or math.isinf(self._scheduled[0].when()):  # A sleep for ever is no event.
            raise Deadlock(self._story("nothing is ready and no timer is set"))
        else:
            self._jump(self._scheduled[0].when())
        return ()

    def _jump(self, now_s: float) -> None:
        self._now_s = now_s
        self._clock_resolution = math.ulp(now_s)  # So much before its time asyncio lets a timer fire.
        self._iterations = 0

    def _process_events(self, event_list: Sequence[Any]) -> None:
        """Do nothing: `select` returns no events."""

    def _story(self, what: str) -> str:
        """Describe the event, its time, and where every task waits."""
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        lines = [f"{what}, at {self._now_s:,.6f} s; {len(tasks)} task(s) wait:"]
        lines += [f"  {task.get_name()} {place(task.get_coro())}" for task in tasks]
        lines += [f"  (refused a call_soon_threadsafe from thread {name!r})" for name in self._threads_refused]
        return "\n".join(lines)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Act as `call_soon` on the loop's own thread. Raises `NotVirtual` on any other."""
        if threading.get_ident() != self._own_thread:
            name = threading.current_thread().name
            self._threads_refused.append(name)
            raise NotVirtual(f"call_soon_threadsafe from thread {name!r}: a thread's time is real")
        return self.call_soon(callback, *args, context=context)

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        return _Task(next(self._numbers), coroutine, loop, **options)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = _Timer(next(self._numbers), when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        return timer


class _Timer(asyncio.TimerHandle):
    """A timer with a place among those of its moment."""

    __slots__ = ("_number",)

    def __init__(self, number: int, *settings: Any) -> None:
        super().__init__(*settings)
        self._number = number
        self._scheduled = True

    def __lt__(self, other: Any) -> bool:
        return (self.when(), self._number) < (other.when(), other._number)


class _Task(asyncio.Task[Any]):
    def __init__(self, number: int, coroutine: Any, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        self._number = number  # First: the base class puts the task into a set.
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


def _refuse(name: str, what: str, *_: object, **__: object) -> NoReturn:
    raise NotVirtual(f"loop.{name} was called: virtual time has no use for {what}; use a fake, or a real loop")


for _what, _names in REFUSED.items():
    for _name in _names:
        setattr(VirtualTimeLoop, _name, staticmethod(partial(_refuse, _name, _what)))


def place(coroutine: Any) -> str:
    """Return where a coroutine waits: its innermost known frame."""
    frame = None
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None) or frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    if frame is None:
        return "has ended"
    return f"in {frame.f_code.co_qualname}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
