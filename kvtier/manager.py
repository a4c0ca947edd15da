"""TieringOffloadingManager: the engine's two faces over one ledger, and its beginning and end.

The step protocol (`kvtier.stepping`) is for engines that must never wait; the asyncio face (`kvtier.waiting`) waits.
Both may be used by one program, on one thread. What is here decides where the runner lives.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvtier.bridge.base import Bridge
from kvtier.bridge.inline import InlineBridge
from kvtier.bridge.process import ProcessBridge
from kvtier.bridge.thread import ThreadBridge
from kvtier.config import EngineConfig, with_absolute_paths
from kvtier.inbox import Observe
from kvtier.lend import Lanes, in_thread
from kvtier.opening import open_tiers
from kvtier.policies.named import policy_class
from kvtier.region import Region
from kvtier.this_process import fill_standard_streams, require_descriptors
from kvtier.waiting import WaitingManager

ON_LOOP_BYTES_MAX = 64 << 20  # Of memory to prepare without a thread: some milliseconds' worth.


class TieringOffloadingManager(WaitingManager):
    """Tiers chunks over a primary in host memory and any number of secondary tiers.

    `start` is for synchronous engines, `open` for asyncio programs. A chunk is `config.chunk_bytes` long.
    """

    _closing: "asyncio.Task[int] | None" = None

    @classmethod
    def start(cls, config: EngineConfig, *, region: Region | None = None, observer: Observe | None = None) -> Self:
        """Start an engine with its runner in a thread or a process; blocks until its tiers are open.

        The rows are those of `region`, which other processes may have mapped, too; it belongs to the engine from now
        on, and is closed with it or with a start that fails. None: the engine makes one of its own.

        Raises:
            ConfigError: the configuration cannot be used; nothing was left behind.
            BackendUnavailable: a tier cannot be opened now.
        """
        if config.runner == "inline":
            raise ValueError("an inline runner needs a running event loop: await TieringOffloadingManager.open(config)")
        if region is not None and (region.rows, region.row_bytes) != (config.rows, config.row_bytes):
            raise ValueError(
                f"a region of {region.rows:,} rows of {region.row_bytes:,} bytes for a configuration of {config.rows:,}"
                f" of {config.row_bytes:,}"
            )
        bridge_class = ThreadBridge if config.runner == "thread" else ProcessBridge
        try:
            config = _checked(config)
            region = region or _region(config)
            bridge = bridge_class(config, region)
        except BaseException:
            if region is not None:
                region.close()
            raise
        return cls(config, region, bridge, observer=observer)

    @classmethod
    async def open(cls, config: EngineConfig, *, observer: Observe | None = None) -> Self:
        """Start an engine for this event loop, wherever its runner lives. Raises as `start` does."""
        loop = asyncio.get_running_loop()
        if config.runner == "inline":
            config = _checked(config)
            fill_standard_streams()
            if config.rows * config.row_bytes > ON_LOOP_BYTES_MAX:
                region = await loop.run_in_executor(None, _region, config)
            else:
                region = _region(config)
            try:
                bridge: Bridge = InlineBridge(await open_tiers(config), region)
            except BaseException:
                region.close()
                raise
            manager = cls(config, region, bridge, clock=loop.time, observer=observer)
        else:
            manager = await cls._started(config, observer)
        manager.attach(loop)
        return manager

    @classmethod
    async def _started(cls, config: EngineConfig, observer: Observe | None) -> Self:
        """Run `start` in a thread; a cancelled call waits for it, and leaves nothing of what it started."""
        started: list[Self] = []
        lanes = Lanes(1, "kvtier-start")
        try:
            await in_thread(lanes, lambda: started.append(cls.start(config, observer=observer)))
        except asyncio.CancelledError:
            for manager in started:
                await in_thread(lanes, manager.shutdown, 0.0)
            raise
        finally:
            lanes.shutdown(wait=False)
        return started[0]

    async def aclose(self, deadline_s: float | None = None) -> int:
        """Shut down as `shutdown` does, without blocking the loop. Once begun it goes on, even if cancelled."""
        if self._closing is None:
            if self._closed:
                return 0
            self._closing = asyncio.ensure_future(self._close(deadline_s))
        return await asyncio.shield(self._closing)

    async def _close(self, deadline_s: float | None) -> int:
        await self.drained(deadline_s)
        self._tier_log.look(self._clock(), last=True)
        self._closed = True
        self._stir()
        seconds = self._deadline(deadline_s)
        if isinstance(self._bridge, InlineBridge):
            abandoned = await self._bridge.aclose(seconds)
        else:
            abandoned = await asyncio.get_running_loop().run_in_executor(None, self._bridge.close, seconds)
        self._free()
        return abandoned

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _checked(config: EngineConfig) -> EngineConfig:
    """Report every mistake that can be known before anything is allocated; settle what relative paths mean."""
    policy_class(config.eviction_policy)
    require_descriptors()
    return with_absolute_paths(config)


def _region(config: EngineConfig) -> Region:
    make: Callable[[int, int], Region] = Region.memfd if config.runner == "process" else Region.private
    return make(config.rows, config.row_bytes)
