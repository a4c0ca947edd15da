"""The runner in a thread of its owner's process: for rows that no other process can map.

That is vLLM's memory behind its own manager. Any other owner has its runner inline or in a process.
"""

import asyncio
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

CLOSING_S = 1.0  # Beyond the deadline that the runner itself keeps.


class ThreadBridge(Bridge):
    """A daemon thread: one hung tier cannot hold up the interpreter's exit."""

    kind = "thread"

    def __init__(self, config: EngineConfig, region: Region) -> None:
        """Start the runner and wait until its tiers are open. Raises what opening them raised."""
        super().__init__()
        self._region = region
        self._abandoned: int | None = None
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
        tiers = await open_tiers(config)
        runner = Runner(tiers, self._region, lambda message: self._deliver((message,)))
        runner.start()
        return runner
