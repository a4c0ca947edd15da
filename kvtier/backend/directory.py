"""The directory of an fs tier as commands see it: without a kvtier engine, and next to one that uses it.

The fs tier's class reads file names and the footers stored with the chunks, and needs no configuration.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, Protocol, Self

from kvtier.backend.namespace import OffloadKey


class Place(NamedTuple):
    name: str  # The folder's name.
    model: str  # From the namespace's config.json; empty if it cannot be read.


MISPLACED = "misplaced"  # The fault of a chunk's file in a wrong folder, where no load finds it.


class Kind(Enum):
    CHUNK = "chunk"
    TEMPORARY = "temporary"  # A store in progress.
    LEFTOVER = "leftover"  # An unfinished store of a killed process, or a segment whose first page is damaged.
    LOST = "lost"  # A slot beyond the end of a truncated segment.
    UNREADABLE = "unreadable"  # A file or folder that the system refuses to read.
    BESIDE = "beside"  # Takes space without being a chunk: a folder, the tier's own files, free space in a segment.


class StoredFile(NamedTuple):
    kind: Kind
    name: str  # Relative to the directory.
    key: OffloadKey | None  # Of a chunk; None if its footer is damaged or its file misplaced.
    size_bytes: int
    allocated_bytes: int
    used_at_ns: int  # Since the epoch; the tier may round it to the hour.
    identity: int  # Of the file; its name may pass to another file.
    fault: str = ""  # Why no load takes the chunk, if this is known without reading it.


class State(Enum):
    """The state of a chunk's bytes."""

    WHOLE = "whole"
    SEALED = "sealed"  # Encrypted and undamaged. Only a tier with the key can tell who wrote it.
    CORRUPT = "corrupt"
    UNVERIFIED = "unverified"  # Stored without a checksum.
    UNREADABLE = "unreadable"  # The system refuses to read it.
    GONE = "gone"  # Replaced or removed since it was listed; this is no fault.


class Finding(NamedTuple):
    state: State
    fault: str = ""  # The kind of corruption by the tier's metric, or the reason for which it cannot be read.


class Directory(Protocol):
    """A tier's directory. Its methods block. Only `remove` and `clear` change a file."""

    @classmethod
    def open(cls, root: str) -> Self:
        """Open a path. Raises `ConfigError` if it is not a tier's directory."""
        ...

    def places(self) -> list[Place]:
        """Return the namespaces, sorted by name."""
        ...

    def parts(self, place: Place) -> list[str]:
        """Return the parts for `files`, at most a few thousand; a progress bar advances by parts."""
        ...

    def files(self, place: Place, part: str) -> Iterator[StoredFile]:
        """Yield the files of one part. A folder that cannot be listed is yielded as unreadable."""
        ...

    def check(self, place: Place, file: StoredFile) -> Finding:
        """Read a chunk and compare it with its footer or seal."""
        ...

    def remove(self, file: StoredFile) -> int | None:
        """Remove this file; return the freed bytes, None if it is gone or was replaced. Raises `OSError`."""
        ...

    def clear(self, place: Place) -> bool:
        """Remove the folders and own files of a namespace without chunks; return True if they are gone.

        Nothing is removed while a kvtier engine uses the namespace, or while any other file is left in it.
        """
        ...

    def close(self) -> None: ...
