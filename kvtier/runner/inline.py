"""The runner on its owner's own event loop: for asyncio programs, and for virtual time."""

import asyncio
from collections.abc import Sequence

from kvtier.memory import Region
from kvtier.runner.bridge import Bridge
from kvtier.runner.messages import Action
from kvtier.runner.runner import Runner, RunnerTier


class InlineBridge(Bridge):
    """Made on the running loop, with open tiers."""

    kind = "inline"

    def __init__(self, tiers: Sequence[RunnerTier], region: Region) -> None:
        super().__init__()
        clock = asyncio.get_running_loop().time  # In virtual time, too.
        self._runner = Runner(tiers, region, lambda message: self._deliver((message,)), clock)
        self._runner.start()
        self._closing: asyncio.Task[int] | None = None

    def send(self, actions: Sequence[Action]) -> Sequence[Action]:
        if self._closing is not None:
            return actions
        self._runner.submit(actions)
        return ()

    def admit(self, epoch: int) -> None:
        raise AssertionError(f"an inline runner has no epoch {epoch}: it is never replaced")

    def replace(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002  # It never waits.
        raise RuntimeError(
            "an inline runner cannot be waited for on its own loop: await the manager's drain(), reset(), aclose()"
        )

    def close(self, deadline_s: float) -> int:  # noqa: ARG002  # It never closes.
        raise RuntimeError("an inline runner is closed by its own loop: await aclose()")

    async def aclose(self, deadline_s: float) -> int:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._runner.aclose(deadline_s))
        return await asyncio.shield(self._closing)
