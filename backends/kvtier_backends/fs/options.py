"""A tier's options, and the choice of its layout."""

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec.structs import force_setattr

from kvtier.backend import NamingKind, Options, SealOptions
from kvtier.errors import ConfigError
from kvtier.policies import require_policy
from kvtier.settings import Age, Path, PositiveSize, Size

LANES_MAX = 64  # A device that needs more requests at once than this needs another way of asking, not more threads.

Lanes = Annotated[int, msgspec.Meta(ge=1, le=LANES_MAX)]

_FILES_ALONE = {"naming": "chunks in segments have no names", "unverified": "every slot has a footer"}
"""The options that segments lack, each with the reason."""


_ENGINES_OWN = ("load_lanes", "store_lanes", "seal", "seal_key_file", "seal_key_env")
"""The options that each engine chooses for itself, though it shares a tier."""


class FsOptions(SealOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A directory and how it is used. Options that only files have choose files."""

    meant: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("dir", "directory", "folder", "path", "root_dir"), "'root'"),
        **dict.fromkeys(("max_size", "size", "size_bytes"), "'capacity_bytes'"),
    }

    root: Path
    """The directory. Its parent must exist. One engine writes to it, unless it is `shared`; others may read it."""

    capacity_bytes: PositiveSize | None = None
    """Most bytes of disk that the tier takes at any moment, with folders and its own files; unset: no limit."""

    eviction_policy: str = "lru"
    """Which chunks are evicted, as for the primary; `"lru"` if the directory is `shared`."""

    min_free_bytes: Size = 0
    """Free bytes of the file system left to others; chunks are evicted below it."""

    ttl_s: Age | None = None
    """Chunks unused for this long are removed."""

    write_budget_bytes_per_day: PositiveSize | None = None
    """Bytes written in any 24 hours, to spare flash; above it, stores are refused."""

    io: Literal["auto", "direct", "buffered"] = "auto"
    """`"direct"` keeps chunks out of the page cache; `"auto"` is direct where the file system allows it."""

    load_lanes: Lanes = 4
    """Threads that read. Four reach the limit of most disks; a network file system may want more."""

    store_lanes: Lanes = 4
    """Threads that write. They are separate, so that a load never queues behind stores."""

    fsync: bool = False
    """A store waits until its chunks are on the device: once a batch with segments, once a file with files."""

    layout: Literal["files", "segments"] | None = None
    """Slots in large files, for speed, or one file for each chunk, which vLLM can read. Unset: segments, unless an
    option that only files have is given. Each layout has its own folder: after a change the tier starts empty."""

    naming: NamingKind | None = None
    """Files only. `"vllm"`: as vLLM names them, almost one folder for each file. `"flat"`: 256 folders, which only
    kvtier reads and scans in an eighth of the time. Unset: `"vllm"`, or `"flat"` for encrypted files. Each has its
    folder."""

    shared: bool | None = None
    """Other engines use the directory, too; all of them set it, with the same options. With segments, they are of one
    host, and a keeper has the catalog. With files, which unset `layout` chooses, they may be of several hosts."""

    unverified: Literal["accept", "refuse"] | None = None
    """Files only. Accept or refuse files without a footer, as vLLM writes them, unverified. Unset: refuse."""

    def __post_init__(self) -> None:
        """Choose the layout, fill in what it has, and refuse what it lacks, and options that exclude each other."""
        super().__post_init__()
        require_policy(self.eviction_policy)
        of_files = [name for name in _FILES_ALONE if getattr(self, name) is not None]
        if self.layout is None:
            force_setattr(self, "layout", "files" if of_files or self.shared is not None else "segments")
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


class MemoryOptions(Options, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Host memory beside the primary's, without copies in the primary."""

    meant: ClassVar[Mapping[str, str]] = dict.fromkeys(("max_size", "size", "size_bytes"), "'capacity_bytes'")
    fsync: ClassVar[bool] = False
    min_free_bytes: ClassVar[int] = 0

    capacity_bytes: PositiveSize
    """Most bytes of memory that the tier takes at any moment. They are taken as they are needed."""

    eviction_policy: str = "lru"
    """Which chunks are evicted, as for the primary."""

    ttl_s: Age | None = None
    """Chunks unused for this long are removed."""

    load_lanes: Lanes = 4
    """Threads that copy chunks out of the tier."""

    store_lanes: Lanes = 4
    """Threads that copy chunks into the tier. They are separate, so that a load never queues behind stores."""

    shared: bool = False
    """Other engines of this host and user use the memory, too; all of them set it, with the same options."""

    pool: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")] = "default"
    """Name of the memory that is shared. Engines that must not know of each other's chunks have pools of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_policy(self.eviction_policy)


def common_options(options: FsOptions | MemoryOptions) -> dict[str, Any]:
    """Return the options that all engines that share a tier must agree on."""
    return {name: value for name, value in msgspec.to_builtins(options).items() if name not in _ENGINES_OWN}
