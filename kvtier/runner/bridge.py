"""The bridge to a runner, as its owner sees it: actions go out, messages come in, and neither ever waits.

A runner lives on its owner's loop, in a process, or, where no other can map the rows (vLLM's own), in a thread.
"""

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import ClassVar

import uvloop

from kvtier.config import OPEN_S, EngineConfig
from kvtier.errors import BackendUnavailable
from kvtier.memory import Region, fill_standard_streams, reason, start_thread
from kvtier.runner.messages import Action, LocalMessage, Message, RunnerLost
from kvtier.runner.runner import GIVEN_UP_S, Runner, RunnerTier, open_tiers

START_S = 30.0  # For a runner to start, besides its tiers: on a busy machine an interpreter takes seconds.
CLOSING_S = 1.0  # Beyond the deadline that a runner in a thread keeps itself.


def opening_s(config: EngineConfig) -> float:
    """Return how long a start waits for its runner: until its tiers are open, or closed again."""
    return START_S + config.limits.close_s + OPEN_S * len(config.secondary_tiers)


class Bridge(ABC):
    """The owner's end. All methods belong to the owner's thread; the runner fills `mailbox` from any thread."""

    kind: ClassVar[str]
    """The runner's home, in the log."""
    returns: ClassVar[bool] = False
    """Whether a lost runner has a successor."""

    def __init__(self) -> None:
        self.mailbox: deque[Message | LocalMessage] = deque()
        self.notify: Callable[[], None] | None = None  # Called after messages came, from any thread; must not block.
        self._arrived = threading.Event()

    @property
    def pid(self) -> int | None:
        """The process id of the present runner; None while there is none."""
        return os.getpid()

    @abstractmethod
    def send(self, actions: Sequence[Action]) -> Sequence[Action]:
        """Hand actions to the runner, with one wake-up; return those that it cannot take. Never waits."""

    def admit(self, epoch: int) -> None:
        """Send to the runner of this epoch from now on: the owner has settled the transfers of the one before."""
        raise AssertionError(f"this runner is never replaced: there is no epoch {epoch}")

    def replace(self) -> bool:
        """Kill the runner and start another one; False where it cannot be killed."""
        return False

    @abstractmethod
    def close(self, deadline_s: float) -> int:
        """Close the tiers and end the runner; return how many transfers were left behind. Blocks; idempotent."""

    def drop(self) -> None:  # noqa: B027  # Some have nothing to end.
        """End the runner, then close the region, without waiting: their owner is gone. From any thread."""

    def forked(self) -> None:  # noqa: B027  # Some have nothing to release.
        """Release, in a forked child, the ties between the runner and its owner. It is the last call there."""

    def wait(self, timeout_s: float) -> bool:
        """Block until messages came since the last `wait`, or the time is over."""
        came = self._arrived.wait(timeout_s)
        self._arrived.clear()
        return came

    def _deliver(self, messages: Iterable[Message | LocalMessage]) -> None:
        self.mailbox.extend(messages)
        self._arrived.set()
        if self.notify is not None:
            self.notify()


class InlineBridge(Bridge):
    """The runner on its owner's own event loop, for asyncio programs and virtual time; made there, with open tiers."""

    kind = "inline"

    def __init__(self, tiers: Sequence[RunnerTier], region: Region, close_s: float) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._region = region
        self._close_s = close_s
        clock = self._loop.time  # In virtual time, too.
        self._runner = Runner(tiers, region, lambda message: self._deliver((message,)), clock)
        self._runner.start()
        self._closing: asyncio.Task[int] | None = None

    def send(self, actions: Sequence[Action]) -> Sequence[Action]:
        if self._closing is not None:
            return actions
        self._runner.submit(actions)
        return ()

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002  # It never waits.
        raise RuntimeError(
            "an inline runner cannot be waited for on its own loop: await the manager's drain(), reset(), aclose()"
        )

    def close(self, deadline_s: float) -> int:  # noqa: ARG002  # It never closes.
        raise RuntimeError("an inline runner is closed by its own loop: await aclose()")

    def drop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._end)
        except RuntimeError:  # The loop is closed, and with it every user of a row.
            self._region.close()
            with suppress(RuntimeError):  # The process may have no more threads.
                start_thread(threading.Thread(target=self._close_tiers, name="kvtier-closing", daemon=True))

    def _close_tiers(self) -> None:
        asyncio.run(self._runner.close_tiers(self._close_s))

    def _end(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._runner.aclose(self._close_s))
        self._closing.add_done_callback(lambda _: self._region.close())

    async def aclose(self, deadline_s: float) -> int:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._runner.aclose(deadline_s))
        return await asyncio.shield(self._closing)


class ThreadBridge(Bridge):
    """A daemon thread: one hung tier cannot hold up the interpreter's exit."""

    kind = "thread"

    def __init__(self, config: EngineConfig, region: Region) -> None:
        """Start the runner and wait until its tiers are open. Raises what opening them raised."""
        super().__init__()
        self._region = region
        self._abandoned: int | None = None
        self._opening_ended = threading.Event()
        fill_standard_streams()
        try:
            self._loop = uvloop.new_event_loop()
            self._thread = threading.Thread(target=self._run, name="kvtier-runner", daemon=True)
            start_thread(self._thread)
        except (OSError, MemoryError, RuntimeError) as error:
            raise BackendUnavailable(f"the runner's thread cannot be started: {reason(error)}") from error
        opening = asyncio.run_coroutine_threadsafe(self._open(config), self._loop)
        try:
            self._runner = opening.result(opening_s(config))
        except BaseException as error:  # An interrupt, too: a runner that did not start cannot be closed.
            opening.cancel()
            self._opening_ended.wait(GIVEN_UP_S + config.limits.close_s)  # It closes the tiers that it has opened.
            self._loop.call_soon_threadsafe(self._loop.stop)
            if isinstance(error, TimeoutError):
                message = f"the runner does not open within {opening_s(config):g} s: a tier blocks"
                raise BackendUnavailable(message) from error
            raise

    def send(self, actions: Sequence[Action]) -> Sequence[Action]:
        try:
            self._loop.call_soon_threadsafe(self._runner.submit, actions)
        except RuntimeError:  # The loop is closed.
            return actions
        return ()

    def close(self, deadline_s: float) -> int:
        if self._abandoned is None:
            self._abandoned = self._close_runner(deadline_s)
            with suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSING_S)
        return self._abandoned

    def _close_runner(self, deadline_s: float) -> int:
        """Close the tiers on their loop, if it still runs; return how many transfers were left behind."""
        closing = self._runner.aclose(deadline_s)
        try:
            return asyncio.run_coroutine_threadsafe(closing, self._loop).result(deadline_s + CLOSING_S)
        except RuntimeError:  # The loop is closed.
            closing.close()
        except TimeoutError:
            pass
        return self._runner.in_flight

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            if self._abandoned is None:
                self._deliver((RunnerLost(0, "the runner's thread ended"),))
            if not self._abandoned:  # What hangs keeps its loop: closing it would destroy tasks that still hold rows.
                self._loop.close()

    async def _open(self, config: EngineConfig) -> Runner:
        try:
            runner = Runner(await open_tiers(config), self._region, lambda message: self._deliver((message,)))
        finally:
            self._opening_ended.set()
        runner.start()
        return runner
