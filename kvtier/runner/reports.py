"""What a tier says of itself, unasked: what it holds and holds no more, how full it is, and what it has counted."""

import asyncio
import logging
from collections.abc import Callable

from kvtier.backend import Added, Backend, Counted, Described, Inventory, Measured, Removed, ScanDone
from kvtier.runner.messages import Found, Gone, Message, Scanned, TierUsage, pack_keys

USAGE_EVERY_S = 1.0  # A gauge for people; more often only costs messages.

logger = logging.getLogger(__name__)


class Reports:
    """One tier's. All methods belong to the runner's loop."""

    def __init__(self, index: int, name: str, backend: Backend, post: Callable[[Message], None]) -> None:
        """`index`: what messages call the tier."""
        self._index = index
        self._name = name
        self._backend = backend
        self._post = post
        self._watcher: asyncio.Task[None] | None = None
        self._acknowledged = asyncio.Event()
        self._counts: dict[str, int] = {}
        self._usage_at = float("-inf")
        self._usage_due: asyncio.TimerHandle | None = None
        self._closed = False
        self._begun_at = 0.0

    def start(self) -> None:
        """Begin to report what the tier holds."""
        self._begun_at = asyncio.get_running_loop().time()
        self._watcher = asyncio.ensure_future(self._watch())

    def acknowledge(self) -> None:
        """Let the next batch of keys be sent."""
        self._acknowledged.set()

    def usage(self) -> None:
        """Say how full the tier is, at most once in `USAGE_EVERY_S`: now, or when that is over."""
        if self._closed or self._usage_due is not None or not isinstance(self._backend, Measured):
            return
        loop = asyncio.get_running_loop()
        due_at = max(loop.time(), self._usage_at + USAGE_EVERY_S)
        self._usage_due = loop.call_at(due_at, self._post_usage, self._backend)

    async def aclose(self, deadline_s: float) -> bool:
        """Say nothing more; False if the tier goes on reporting for longer than this."""
        self._closed = True
        if self._usage_due is not None:
            self._usage_due.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait((self._watcher,), timeout=deadline_s)
            if not self._watcher.done():
                logger.error("tier %s does not stop reporting what it holds", self._name)
                return False
        return True

    async def _watch(self) -> None:
        """Pass on what the tier says of its contents, one unacknowledged batch at a time."""
        if not isinstance(self._backend, Inventory):
            self._say_start("open; it is asked for what it holds")
            self._post(Scanned(self._index, complete=False))
            return
        try:
            async for event in self._backend.watch():
                self.usage()
                match event:
                    case Added():
                        self._post(Found(self._index, pack_keys(event.keys)))
                    case Removed():
                        self._post(Gone(self._index, pack_keys(event.keys)))
                    case ScanDone():
                        self._say_start(self._finding())
                        self._post(Scanned(self._index, event.complete))
                        continue
                await self._acknowledged.wait()
                self._acknowledged.clear()
        except Exception:  # The supervisor's edge: a tier that cannot list its contents is asked instead.
            logger.exception("tier %s: its inventory failed; from now on it is asked", self._name)
            self._post(Scanned(self._index, complete=False))

    def _finding(self) -> str:
        """Say what was there at the start, which is known now."""
        seconds = asyncio.get_running_loop().time() - self._begun_at
        if not isinstance(self._backend, Measured):
            return f"all that it holds is known after {seconds:.2f} s"
        holds = self._backend.occupancy()
        return f"found {holds.chunks:,} chunks of {holds.used_bytes:,} bytes in {seconds:.2f} s"

    def _say_start(self, finding: str) -> None:
        about = self._backend.description() if isinstance(self._backend, Described) else dict[str, str]()
        words = ", ".join(f"{name} {value}" for name, value in about.items())
        logger.info("tier %s: %s", self._name, f"{words}; {finding}" if words else finding)

    def _post_usage(self, backend: Measured) -> None:
        self._usage_due = None
        self._usage_at = asyncio.get_running_loop().time()
        self._post(TierUsage(self._index, *backend.occupancy(), self._counted()))

    def _counted(self) -> dict[str, int]:
        """Return what the tier has counted since it was last asked: the owner's totals outlive this runner."""
        if not isinstance(self._backend, Counted):
            return {}
        before, self._counts = self._counts, dict(self._backend.counts())
        return {
            name: total - before.get(name, 0) for name, total in self._counts.items() if total != before.get(name, 0)
        }
