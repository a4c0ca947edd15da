"""Tiers whose speed changes. The speed of a `SlowTier` is read from a file, in bytes a second, before each load.

type = "tests.slow_tier:SlowTier"
inner = { type = "fs", root = "/var/tmp/kvtier" }
speed = "/run/speed"
"""

import asyncio
from pathlib import Path
from typing import Any

from kvtier.backend import Wrapper, backend_class
from kvtier.config import TierConfig, tier_options
from kvtier.settings import Checked, Duration, decode
from kvtier_backends.dummy import DummyBackend, DummyDevice, DummyOptions


class SlowOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    inner: dict[str, Any]
    speed: str


class SlowTier(Wrapper[SlowOptions]):
    """All loads share one line, in order."""

    options_type = SlowOptions

    def __init__(self, inner, speed):
        super().__init__(inner)
        self._speed, self._free_at = speed, 0.0

    @classmethod
    async def open(cls, options, context):
        inner = decode(TierConfig, options.inner, "inner")
        own = tier_options(inner, "inner")
        return cls(await backend_class(inner.type).open(own, context), Path(options.speed))

    async def load(self, reads):
        outcomes = await self._inner.load(reads)
        if speed := self._bytes_per_s():
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + sum(len(read.into) for read in reads) / speed
            await asyncio.sleep(self._free_at - now)
        return outcomes

    def _bytes_per_s(self):
        try:
            return float(self._speed.read_text())
        except FileNotFoundError:
            return 0.0


def slow(inner, speed):
    return {"type": "tests.slow_tier:SlowTier", "inner": inner, "speed": str(speed)}


class SlowingOptions(DummyOptions, frozen=True, kw_only=True):
    slow_at_s: Duration  # After its first use.
    slow_for_s: Duration = 60.0
    slow_factor: float = 20.0


class SlowingDevice(DummyDevice):
    def __init__(self, options):
        super().__init__(options)
        self._options = options
        self._usual = (self.latency_s, self.load_s_per_byte, self.store_s_per_byte)
        self._begun_at = None

    def load(self, now, sizes_bytes):
        self._slow_down(now)
        return super().load(now, sizes_bytes)

    def store(self, now, sizes_bytes):
        self._slow_down(now)
        return super().store(now, sizes_bytes)

    def _slow_down(self, now):
        self._begun_at = now if self._begun_at is None else self._begun_at
        passed_s, options = now - self._begun_at, self._options
        slow = options.slow_at_s <= passed_s < options.slow_at_s + options.slow_for_s
        factor = options.slow_factor if slow else 1.0
        self.latency_s, self.load_s_per_byte, self.store_s_per_byte = (factor * usual for usual in self._usual)


class SlowingDummy(DummyBackend):
    options_type = SlowingOptions

    def __init__(self, options, context):
        super().__init__(options, context)
        self._device = SlowingDevice(options)


SLOWING = {"type": "tests.slow_tier:SlowingDummy"}
