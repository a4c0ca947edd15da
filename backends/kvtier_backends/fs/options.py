"""A tier's options: those of both layouts, those of files alone, and the choice of the layout."""

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec.structs import asdict, force_setattr

from kvtier.backend import NamingKind, SealOptions
from kvtier.errors import ConfigError
from kvtier.policies import require_policy
from kvtier.settings import Age, Duration, Path, PositiveSize, Share, Size

CHECKPOINT_S_MIN = 0.01  # More often, a tier of a million chunks would do nothing but write checkpoints.
LANES_MAX = 64  # A device that needs more requests at once than this needs another way of asking, not more threads.

Lanes = Annotated[int, msgspec.Meta(ge=1, le=LANES_MAX)]

_LACKS = {
    "segments": {
        "naming": "chunks in segments have no names",
        "low_water": "a chunk in a segment goes when its slot is wanted",
        "shared": "each segment has one writer: give each process a root of its own",
        "unverified": "every slot has a footer",
    },
    "files": {"checkpoint_s": "the names of the files are the index"},
}
"""The options that a layout lacks, each with the reason; the other layout has it."""


class DiskOptions(SealOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of both layouts."""

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

    load_queue_bytes: Size = 8 << 20
    """What each of these has under way at once, with direct I/O on a disk. Chunks that are longer come one by one."""

    store_lanes: Lanes = 4
    """Threads that write: others than those that read, so that a load never queues behind stores."""

    fsync: bool = False
    """Whether a store waits until what it wrote is on the device."""

    def __post_init__(self) -> None:
        """Refuse an unknown policy."""
        super().__post_init__()
        require_policy(self.eviction_policy)

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


class SegmentsOptions(DiskOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of a tier of segments: slots of large files, for speed. The rest is fixed."""

    layout: ClassVar[Literal["segments"]] = "segments"
    naming: ClassVar[NamingKind] = "vllm"
    shared: ClassVar[bool] = False
    low_water: ClassVar[float] = 1.0

    checkpoint_s: Duration = 1_800.0
    """How often the place of each chunk is written down, besides at the end, for the next start. 0: never."""

    def __post_init__(self) -> None:
        """Refuse an interval in which nothing else could be done."""
        super().__post_init__()
        if 0 < self.checkpoint_s < CHECKPOINT_S_MIN:
            raise ConfigError(
                f"checkpoint_s: {self.checkpoint_s:g} s given, 0 (never) or at least {CHECKPOINT_S_MIN:g} s accepted"
            )


class FilesOptions(DiskOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of a tier of files: one a chunk, which vLLM and other processes can read."""

    layout: ClassVar[Literal["files"]] = "files"

    naming: NamingKind = "vllm"
    """How files are named: as vLLM does, which makes almost a directory a file, or `flat`, in 256 directories.

    Only kvtier reads the latter. A scan of a million files is done in an eighth of the time. What is encrypted is
    `flat`: vLLM would take it for KV.
    """

    low_water: Share = 0.95
    """Part of the capacity down to which chunks are evicted in the background, before stores have to wait for it."""

    shared: bool = False
    """Whether other processes use the directory, too; all of them say so, with one `capacity_bytes` between them."""

    unverified: Literal["accept", "refuse"] = "refuse"
    """What becomes of files without a footer, which vLLM writes: there is no telling whether their bytes are right."""

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        super().__post_init__()
        if self.seal != "xxh3":
            self._check_sealed()
        if self.shared and self.eviction_policy != "lru":
            raise ConfigError(
                f"eviction_policy: {self.eviction_policy!r} given, 'lru' accepted with shared = true: "
                "all that processes know of each other's use is when a file was used last"
            )

    def _check_sealed(self) -> None:
        if self.naming == "vllm":
            raise ConfigError(
                f"naming: 'vllm' given, 'flat' accepted with seal = {self.seal!r}: vLLM would take what is encrypted "
                "for KV"
            )
        if self.unverified == "accept":
            raise ConfigError(
                f"unverified: 'accept' given, 'refuse' accepted with seal = {self.seal!r}: nobody needs a key to write "
                "a file without a footer"
            )


LayoutOptions = FilesOptions | SegmentsOptions


class FsOptions(DiskOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options as a user writes them: a directory and how it is used. The options of `FilesOptions` choose files."""

    layout: Literal["files", "segments"] | None = None
    """Slots of large files, or one file a chunk; None: segments, unless an option is given that only files have."""

    naming: NamingKind | None = None
    low_water: Share | None = None
    shared: bool | None = None
    unverified: Literal["accept", "refuse"] | None = None
    checkpoint_s: Duration | None = None

    def __post_init__(self) -> None:
        """Choose the layout, fill in what it has, and refuse what it lacks."""
        super().__post_init__()
        if self.layout is None:
            of_files = any(getattr(self, name) is not None for name in _LACKS["segments"])
            force_setattr(self, "layout", "files" if of_files else "segments")
        other, lacks = ("segments", _LACKS["files"]) if self.layout == "files" else ("files", _LACKS["segments"])
        for name, why in lacks.items():
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name}: no such field with layout = {self.layout!r}: {why}; layout = {other!r} has it"
                )
        chosen = self.chosen()
        for name in _LACKS[other]:
            force_setattr(self, name, getattr(chosen, name))

    def chosen(self) -> LayoutOptions:
        """Return the options of the layout that is meant."""
        kind = FilesOptions if self.layout == "files" else SegmentsOptions
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.seal != "xxh3":
            given.setdefault("naming", "flat")
        return kind(**{name: value for name, value in given.items() if name in kind.__struct_fields__})
