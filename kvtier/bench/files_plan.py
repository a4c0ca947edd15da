"""What a benchmark of a directory measures there, and whether there is room for it."""

import shutil
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.bench.raw import takes_direct
from kvtier.bench.rounds import steps_of
from kvtier.bench.tier import TierCase
from kvtier.errors import ConfigError
from kvtier.replay.setup import check_directory

FULL_SETS = 4  # What a full tier has room for, in what one measurement moves.
OVERHEAD_BYTES = 12 << 10  # A footer, and the folders that nearly each file has to itself.


class Plan(NamedTuple):
    """What is measured in which directory."""

    directory: str
    cases: Sequence[TierCase]
    size_bytes: int
    rounds: int
    fio: str | None  # Where it is.

    def chunks(self, chunk_bytes: int) -> int:
        return max(2, self.size_bytes // chunk_bytes)

    def modes(self) -> list[tuple[str, int, bool]]:
        """Return what the limits are measured for: I/O, threads, fsync."""
        return list(dict.fromkeys((case.io, case.depth, case.fsync) for case in self.cases))

    @property
    def bare(self) -> TierCase | None:
        """Return the case whose loads are measured without verification, too."""
        plain = [case for case in self.cases if case.layout == "files" and not case.fsync]
        return plain[0] if plain else None

    def steps(self) -> int:
        """Return how many measurements one chunk size takes."""
        limits = len({(io, depth) for io, depth, _ in self.modes()}) + len(self.modes())
        fio = 2 * len({(io, depth) for io, depth, _ in self.modes()}) if self.fio else 0
        return steps_of(3 * len(self.cases) + limits + len(self.modes()) + fio + (self.bare is not None), self.rounds)


def io_modes(directory: str, asked: Sequence[str]) -> list[str]:
    """Return how files are to be read and written. `ConfigError` if it cannot be there, or there is no such place."""
    check_directory("DIR", directory)
    direct = takes_direct(directory)
    if "direct" in asked and not direct:
        raise ConfigError(f"--io direct: {directory} refuses direct I/O, or cannot be written to; auto accepted")
    return list(dict.fromkeys(("direct" if direct else "buffered") if mode == "auto" else mode for mode in asked))


def check_room(plan: Plan, chunk_sizes: Sequence[int]) -> None:
    """Raise `ConfigError` if what is written until the end would not fit."""
    turns = plan.rounds + 1
    sets = (
        len(plan.cases) * (turns + 1 + 2 * FULL_SETS)
        + len(plan.modes()) * turns
        + len({case.io for case in plan.cases})
        + 2
    )
    needed = sum(sets * plan.chunks(size) * (size + OVERHEAD_BYTES) for size in chunk_sizes)
    free = shutil.disk_usage(plan.directory).free
    if needed > free:
        raise ConfigError(
            f"{plan.directory}: about {needed:,} bytes are needed, {free:,} are free; "
            "a smaller --size, or fewer --rounds, accepted"
        )
