"""The engine that a replay runs, and in which directories its fs tiers keep their chunks.

A configuration that leaves an fs tier's `root` out gets a temporary one: so one file can serve every machine, and no
replay writes where nobody asked it to.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from shutil import disk_usage
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from kvtier.config import EngineConfig, TierConfig, TierLimits
from kvtier.errors import ConfigError, KVTierError
from kvtier.tools.replay.study import Extent

INTERRUPTED_WAIT_S = 0.1  # Enough for what a short run left; a part of the second in which Ctrl-C is to be obeyed.

SWEEPER = """
import os, shutil, sys, time
sys.stdin.buffer.read()
for _ in range(20):  # A runner that outlives its owner for a moment may still write.
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.lexists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


class Scratch:
    """A temporary directory that goes away however we end: by return, by Ctrl-C or by SIGKILL. Use it in a `with`.

    A small process waits for the end of a pipe that only we hold, and then removes the directory. It also is what lets
    an interrupted command end at once: a hundred thousand files take seconds to remove, and it goes on removing them.
    """

    def __init__(self, parent: str | None = None, prefix: str = "kvtier-replay-") -> None:
        """Make the directory in `parent`; None: where temporary ones belong."""
        self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        try:
            self._sweeper = subprocess.Popen(  # noqa: S603  # Our own few lines, with one path for an argument.
                [sys.executable, "-I", "-S", "-c", SWEEPER, self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # A terminal's Ctrl-C is for us, not for it.
            )
        except BaseException:
            os.rmdir(self.path)
            raise

    def remove(self, wait_s: float | None) -> bool:
        """Have the directory removed; wait for it so long (None: until it is done) and say whether it is gone."""
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()
        try:
            self._sweeper.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        refused = kind is not None and issubclass(kind, KVTierError)  # Then there is little to remove.
        self.remove(None if kind is None or refused else INTERRUPTED_WAIT_S)


CHUNK_BYTES = 16 << 10
PRIMARY_SHARE = 0.05  # Of the trace's unique blocks: small, so that much of what returns comes from the tier below.
PRIMARY_ROWS_MIN = 512  # Twice the longest prompt of 128 Ki tokens: half of the rows at most wait for a tier.
STORE_CHUNKS = 256  # Keeps the lanes busy. What waits pins its row: more would take the primary away from hits.
FILE_OVERHEAD_BYTES = 8 << 10  # A chunk's footer and, with vLLM's naming, the directory that is nearly its own.


def default_config(extent: Extent) -> EngineConfig:
    """Put a small primary over one fs tier, with the runner in a process."""
    return EngineConfig(
        cpu_bytes_to_use=primary_rows(extent) * CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        runner="process",
        secondary_tiers=(
            TierConfig(
                type="fs",
                limits=TierLimits(store_chunks_in_flight=STORE_CHUNKS),
            ),
        ),
    )


def primary_rows(extent: Extent) -> int:
    """Return the size of a small primary for a trace."""
    return max(PRIMARY_ROWS_MIN, extent.capacity(PRIMARY_SHARE))


def check_directory(what: str, path: str) -> None:
    """Raise `ConfigError` if there is no such directory: a mistyped path must not become one."""
    if not os.path.isdir(path):
        raise ConfigError(f"{what} {path!r}: no such directory; one that is there accepted")


def check_roots(config: EngineConfig) -> None:
    """Raise `ConfigError` if an fs tier's own root is not there."""
    for index, tier in enumerate(config.secondary_tiers):
        root = tier.options.get("root")
        if _is_fs(tier) and isinstance(root, str):
            check_directory(f"secondary_tiers[{index}].root", root)


def without_root(config: EngineConfig) -> bool:
    """Say whether an fs tier has yet to be told where to keep its chunks."""
    return any(_is_fs(tier) and "root" not in tier.options for tier in config.secondary_tiers)


def rooted(config: EngineConfig, directory: str, *, override: bool) -> EngineConfig:
    """Have fs tiers keep their chunks in a directory: all of them, or those without a root of their own.

    A configuration's only fs tier gets the directory itself; of several, each gets a folder in it that is named by the
    tier's place in the configuration.
    """
    tiers = config.secondary_tiers
    alone = sum(map(_is_fs, tiers)) == 1
    if override and not any(map(_is_fs, tiers)):
        raise ConfigError(f"--fs {directory}: the configuration has no tier of type fs")
    return replace(
        config,
        secondary_tiers=tuple(
            _with(tier, {"root": directory if alone else os.path.join(directory, str(index))})
            if _is_fs(tier) and (override or "root" not in tier.options)
            else tier
            for index, tier in enumerate(tiers)
        ),
    )


def check_room(config: EngineConfig, extent: Extent, directory: str) -> None:
    """Raise `ConfigError` if the trace's chunks would fill the disk of a directory that nobody chose."""
    copies = sum(map(_is_fs, config.secondary_tiers))
    needed = copies * extent.unique_blocks * (config.row_bytes + FILE_OVERHEAD_BYTES)
    free = disk_usage(directory).free
    if needed > free:
        raise ConfigError(
            f"{directory}: the trace's chunks take about {needed:,} bytes, {free:,} are free; a directory elsewhere "
            "(--fs DIR), or fewer requests (--limit N), accepted"
        )


def _is_fs(tier: TierConfig) -> bool:
    return tier.type == "fs"


def _with(tier: TierConfig, options: Mapping[str, Any]) -> TierConfig:
    return replace(tier, options={**tier.options, **options})
