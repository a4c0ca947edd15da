"""What a user may set of the tier."""

from typing import Annotated, Literal

import msgspec

from kvtier.backend import NamingKind
from kvtier.config import Checked
from kvtier.errors import ConfigError
from kvtier.policies.named import policy_class
from kvtier.settings import Duration, Path, PositiveDuration, PositiveSize, Share, Size

LANES_MAX = 64  # A device that needs more requests at once than this needs another way of asking, not more threads.

Lanes = Annotated[int, msgspec.Meta(ge=1, le=LANES_MAX)]


class FsOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A directory and how it is used."""

    root: Path
    """Its parent must exist. A directory is one engine's own; others may read it."""

    naming: NamingKind = "vllm"
    """How files are named: as vLLM does, which makes almost a directory a file, or `flat`, in 256 directories.

    Only kvtier reads the latter. A scan of a million files is done in an eighth of the time.
    """

    layout: Literal["files", "segments"] = "files"
    """One file a chunk, or slots of large files: faster below about 1 MiB, and not for vLLM to read."""

    capacity_bytes: PositiveSize | None = None
    """What a tier writes may take of the disk, folders and all, at every moment; nothing: as much as there is."""

    eviction_policy: str = "lru"
    """Which chunks go for room: as for the primary. `shared` takes `lru` only."""

    low_water: Share = 0.95
    """Part of the capacity down to which chunks are evicted in the background, before stores have to wait for it."""

    min_free_bytes: Size = 0
    """What is left of the file system for others; chunks go when it is less."""

    ttl_s: PositiveDuration | None = None
    """Chunks that were not used for so long are removed."""

    write_budget_bytes_per_day: PositiveSize | None = None
    """What may be written in any 24 hours, for the sake of flash; beyond it nothing is stored."""

    shared: bool = False
    """Whether other processes use the directory, too; all of them say so, with one `capacity_bytes` between them."""

    io: Literal["auto", "direct", "buffered"] = "auto"
    """`direct` keeps chunks out of the page cache; `auto` uses it where the file system allows."""

    load_lanes: Lanes = 4
    """Threads that read. Four reach the limit of most disks; a network file system may want more."""

    load_queue_bytes: Size = 8 << 20
    """What each of these has under way at once, with direct I/O on a disk. Chunks that are longer come one by one."""

    store_lanes: Lanes = 4
    """Threads that write: others than those that read, so that a load never queues behind stores."""

    fsync: bool = False
    """Whether a store waits until its file and its folder are on the device."""

    unverified: Literal["accept", "refuse"] = "refuse"
    """What becomes of files without a footer, which vLLM writes: there is no telling whether their bytes are right."""

    corrupt: Literal["delete", "quarantine"] = "delete"
    """What becomes of a file that is not what it should be: `quarantine` keeps some of them to be looked at."""

    checkpoint_s: Duration = 1_800.0
    """How often the index is written down, besides at the end: a start that has it answers at once. 0: never."""

    def __post_init__(self) -> None:
        """Refuse what cannot be had together."""
        super().__post_init__()
        policy_class(self.eviction_policy)
        if self.shared and self.eviction_policy != "lru":
            raise ConfigError(
                f"eviction_policy: {self.eviction_policy!r} given, 'lru' accepted with shared = true: "
                "all that processes know of each other's use is when a file was used last"
            )
        if self.layout == "segments":
            self._check_segments()

    def _check_segments(self) -> None:
        if self.shared:
            raise ConfigError(
                "shared: True given, False accepted with layout = 'segments': each segment has one writer, who does "
                "not hear what others store in theirs; use layout = 'files', or give each process a root of its own"
            )
        for field, given, accepted, why in (
            ("naming", self.naming, "vllm", "chunks in segments have no names"),
            ("unverified", self.unverified, "refuse", "every slot has a footer"),
        ):
            if given != accepted:
                raise ConfigError(f"{field}: {given!r} given, none accepted with layout = 'segments': {why}")
