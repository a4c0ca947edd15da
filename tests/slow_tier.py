"""A tier that is as fast as a file says, in bytes a second, from one load to the next; without the file, as it is.

type = "tests.slow_tier:SlowTier"
inner = { type = "fs", root = "/var/tmp/kvtier" }
speed = "/run/speed"
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from kvtier.backend import Backend, Outcome, Read, TierContext, Wrapper, backend_class
from kvtier.config import TierConfig, tier_options
from kvtier.settings import Checked
from kvtier.testing.faults import InnerTier


class SlowOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    inner: InnerTier
    speed: str


class SlowTier(Wrapper[SlowOptions]):
    """All loads share one line; a load has passed it when those before it have."""

    options_type = SlowOptions

    def __init__(self, inner: Backend, speed: Path) -> None:
        super().__init__(inner)
        self._speed = speed
        self._free_at = 0.0

    @classmethod
    async def open(cls, options: SlowOptions, context: TierContext) -> Self:
        inner = options.inner
        own = tier_options(TierConfig(type=inner.type, options=inner.options), "inner")
        return cls(await backend_class(inner.type).open(own, context), Path(options.speed))

    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        outcomes = await self._inner.load(reads)
        if speed := self._bytes_per_s():
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + sum(len(read.into) for read in reads) / speed
            await asyncio.sleep(self._free_at - now)
        return outcomes

    def _bytes_per_s(self) -> float:
        try:
            return float(self._speed.read_text())
        except FileNotFoundError:
            return 0.0


def slow(inner: dict[str, Any], speed: Path) -> dict[str, Any]:
    """Return the configuration of a tier that is as fast as a file says."""
    return {"type": "tests.slow_tier:SlowTier", "inner": inner, "speed": str(speed)}


def slow_fs(root: Path, speed: Path) -> dict[str, Any]:
    """Return the same of an fs tier."""
    return slow({"type": "fs", "root": str(root)}, speed)
