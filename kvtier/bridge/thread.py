"""The runner in a thread of its own, on a uvloop: for engines that are synchronous but not busy in Python."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Sequence

import uvloop

from kvtier.bridge.base import Bridge
from kvtier.bridge.messages import Action, RunnerLost
from kvtier.config import EngineConfig
from kvtier.opening import open_tiers
from kvtier.region import Region
from kvtier.runner import Runner

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
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvtier-runner", daemon=True)
        self._abandoned: int | None = None
        self._thread.start()
        self._runner = self._opened.result()

    def send(self, actions: Sequence[Action]) -> Sequence[Action]:
        try:
            self._loop.call_soon_threadsafe(self._runner.submit, actions)
        except RuntimeError:  # The loop is closed.
            return actions
        return ()

    def admit(self, epoch: int) -> None:
        raise AssertionError(f"a thread runner has no epoch {epoch}: it is never replaced")

    def replace(self) -> bool:
        return False

    def close(self, deadline_s: float) -> int:
        if self._abandoned is None:
            closing = asyncio.run_coroutine_threadsafe(self._runner.aclose(deadline_s), self._loop)
            self._abandoned = closing.result()  # Bounded: aclose keeps the deadline.
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        return self._abandoned

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            runner = self._loop.run_until_complete(self._open())
        except BaseException as error:  # noqa: BLE001  # Carried to the thread that waits in __init__.
            self._opened.set_exception(error)
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
