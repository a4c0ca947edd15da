"""The runner in a thread of its own, on a uvloop: for LLM engines that are synchronous but not busy in Python."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress

import uvloop

from kvtier.config import EngineConfig
from kvtier.errors import BackendUnavailable
from kvtier.memory import Region, fill_standard_streams, reason, start_thread
from kvtier.runner.bridge import Bridge, opening_s
from kvtier.runner.messages import Action, RunnerLost
from kvtier.runner.runner import Runner
from kvtier.runner.tiers import open_tiers

ENDED_EVERY_S = 0.1  # Who waits for the runner's thread looks so often whether it has ended.

logger = logging.getLogger(__name__)


class ThreadBridge(Bridge):
    """A daemon thread: one hung tier cannot hold up the interpreter's exit."""

    kind = "thread"

    def __init__(self, config: EngineConfig, region: Region) -> None:
        """Start the runner and wait until its tiers are open. Raises what opening them raised."""
        super().__init__()
        self._config = config
        self._region = region
        self._opened: concurrent.futures.Future[Runner] = concurrent.futures.Future()
        self._abandoned: int | None = None
        fill_standard_streams()
        try:
            self._loop = uvloop.new_event_loop()
        except (OSError, MemoryError) as error:
            raise BackendUnavailable(f"the runner's event loop cannot be made: {reason(error)}") from error
        self._thread = threading.Thread(target=self._run, name="kvtier-runner", daemon=True)
        try:
            start_thread(self._thread)
        except RuntimeError as error:
            self._loop.close()
            raise BackendUnavailable(f"the runner's thread cannot be started: {reason(error)}") from error
        try:
            self._runner = self._opened.result(opening_s(config))
        except TimeoutError as error:
            self._give_up()
            raise BackendUnavailable(
                f"the runner does not open within {opening_s(config):g} s: a tier blocks"
            ) from error
        except BaseException:  # An interrupt, too: who is not there cannot be closed.
            self._give_up()
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
            self._thread.join()
        return self._abandoned

    def drop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._undo, self._config.limits.close_s)
        except RuntimeError:  # The loop is closed.
            self._region.close()

    def _close_runner(self, deadline_s: float) -> int:
        """Close the tiers on their loop, if that has not ended before its time; return what was left behind."""
        closing = self._runner.aclose(deadline_s)
        try:
            closed = asyncio.run_coroutine_threadsafe(closing, self._loop)
        except RuntimeError:  # The loop is closed.
            closing.close()
            return self._runner.under_way
        while not concurrent.futures.wait((closed,), ENDED_EVERY_S).done:  # Bounded: aclose keeps the deadline.
            if not self._thread.is_alive():
                return self._runner.under_way
        return closed.result()

    def _give_up(self) -> None:
        """Have the thread end when it can: nobody waits for the tiers any more."""
        with suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._undo, 0.0)

    def _undo(self, deadline_s: float) -> None:
        if not self._opening.cancel() and self._opening.exception() is None:
            self._undoing = self._loop.create_task(self._end(self._opening.result(), deadline_s))

    async def _end(self, runner: Runner, deadline_s: float) -> None:
        self._abandoned = await runner.aclose(deadline_s)
        self._region.close()
        self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._opening = self._loop.create_task(self._open())
        try:
            runner = self._loop.run_until_complete(self._opening)
        except BaseException as error:  # noqa: BLE001  # Carried to the thread that waits in __init__.
            ended = None if isinstance(error, Exception) else BackendUnavailable(f"a tier ended its thread: {error!r}")
            self._opened.set_exception(ended or error)
            self._loop.close()
            return
        self._opened.set_result(runner)
        try:
            self._loop.run_forever()
        finally:
            if self._abandoned is None:
                self._deliver((RunnerLost(0, "the runner's thread ended"),))
            if not self._abandoned:  # What hangs keeps its loop: closing it would destroy tasks that still hold rows.
                self._loop.close()

    async def _open(self) -> Runner:
        tiers = await open_tiers(self._config)
        runner = Runner(tiers, self._region, lambda message: self._deliver((message,)))
        runner.start()
        return runner
