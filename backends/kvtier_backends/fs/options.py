"""A tier's options, and the choice of its layout."""

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec.structs import force_setattr

from kvtier.backend import NamingKind, SealOptions
from kvtier.errors import ConfigError
from kvtier.policies import require_policy
from kvtier.settings import Age, Path, PositiveSize, Size

LANES_MAX = 64  # A device that needs more requests at once than this needs another way of asking, not more threads.

Lanes = Annotated[int, msgspec.Meta(ge=1, le=LANES_MAX)]

_FILES_ALONE = {
    "naming": "chunks in segments have no names",
    "shared": "each segment has one writer: give each process a root of its own",
    "unverified": "every slot has a footer",
}
"""The options that segments lack, each with the reason."""


class FsOptions(SealOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A directory and how it is used. Options that only files have choose files."""

    meant: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("dir", "directory", "folder", "path", "root_dir"), "'root'"),
        **dict.fromkeys(("max_size", "size", "size_bytes"), "'capacity_bytes'"),
    }

    root: Path
    """Its parent must exist. A directory is one engine's own; others may read it."""

    capacity_bytes: PositiveSize | None = None
    """What a tier writes may take of the disk, folders and all, at every moment; nothing: as much as there is."""

    eviction_policy: str = "lru"
    """Which chunks go for room: as for the primary. `shared` takes `lru` only."""

    min_free_bytes: Size = 0
    """What is left of the file system for others; chunks go when it is less."""

    ttl_s: Age | None = None
    """Chunks that were not used for so long are removed."""

    write_budget_bytes_per_day: PositiveSize | None = None
    """What may be written in any 24 hours, for the sake of flash; beyond it nothing is stored."""

    io: Literal["auto", "direct", "buffered"] = "auto"
    """`direct` keeps chunks out of the page cache; `auto` uses it where the file system allows."""

    load_lanes: Lanes = 4
    """Threads that read. Four reach the limit of most disks; a network file system may want more."""

    store_lanes: Lanes = 4
    """Threads that write: others than those that read, so that a load never queues behind stores."""

    fsync: bool = False
    """Whether a store waits until what it wrote is on the device."""

    layout: Literal["files", "segments"] | None = None
    """Slots of large files, or one file a chunk; None: segments, unless an option is given that only files have."""

    naming: NamingKind | None = None
    """How files are named: as vLLM does, which makes almost a directory a file, or `flat`, in 256 directories.

    Only kvtier reads the latter. A scan of a million files is done in an eighth of the time. What is encrypted is
    `flat`: vLLM would take it for KV.
    """

    shared: bool | None = None
    """Whether other processes use the directory, too; all of them say so, with one `capacity_bytes` between them."""

    unverified: Literal["accept", "refuse"] | None = None
    """What becomes of files without a footer, which vLLM writes: there is no telling whether their bytes are right."""

    def __post_init__(self) -> None:
        """Choose the layout, fill in what it has, and refuse what it lacks, and options that exclude each other."""
        super().__post_init__()
        require_policy(self.eviction_policy)
        of_files = [name for name in _FILES_ALONE if getattr(self, name) is not None]
        if self.layout is None:
            force_setattr(self, "layout", "files" if of_files else "segments")
        if self.layout == "files":
            self._complete_files()
        elif of_files:
            name = of_files[0]
            raise ConfigError(
                f"{name}: no such field with layout = 'segments': {_FILES_ALONE[name]}; layout = 'files' has it"
            )

    def doubts(self) -> Iterable[str]:
        """Yield why the root cannot be made, or what its disk is too small for."""
        yield from super().doubts()
        parent = os.path.dirname(os.path.normpath(self.root))
        try:
            disk = os.statvfs(self.root if os.path.lexists(self.root) else parent)
        except OSError as error:
            yield f"root: cannot create {self.root}: its parent directory: {error.strerror}"
            return
        disk_bytes = disk.f_blocks * disk.f_frsize  # 0 where a file system does not say.
        if 0 < disk_bytes < (self.capacity_bytes or 0):
            yield f"capacity_bytes: {self.capacity_bytes:,} given, but the disk of {self.root} has {disk_bytes:,} bytes"

    def _complete_files(self) -> None:
        sealed = self.seal != "xxh3"
        for name, value in {"naming": "flat" if sealed else "vllm", "shared": False, "unverified": "refuse"}.items():
            if getattr(self, name) is None:
                force_setattr(self, name, value)
        if sealed and self.naming == "vllm":
            raise ConfigError(
                f"naming: 'vllm' given, 'flat' accepted with seal = {self.seal!r}: vLLM would take what is encrypted "
                "for KV"
            )
        if sealed and self.unverified == "accept":
            raise ConfigError(
                f"unverified: 'accept' given, 'refuse' accepted with seal = {self.seal!r}: nobody needs a key to write "
                "a file without a footer"
            )
        if self.shared and self.eviction_policy != "lru":
            raise ConfigError(
                f"eviction_policy: {self.eviction_policy!r} given, 'lru' accepted with shared = true: "
                "all that processes know of each other's use is when a file was used last"
            )
