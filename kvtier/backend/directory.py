"""The directory of an fs tier as commands see it: without a kvtier engine, and next to one that uses it.

The fs tier has a class with the methods of `Directory`. It reads file names and the footers stored with the chunks, and
needs no configuration.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, Protocol, Self

from kvtier.backend.keys import OffloadKey


class Place(NamedTuple):
    """One namespace's chunks in the directory."""

    name: str  # Of the folder that they are in.
    model: str  # As its configuration says; empty where there is none to read.


MISPLACED = "misplaced"  # As a fault: a chunk's file where no load looks for it.


class Kind(Enum):
    """The kind of a file, by its name."""

    CHUNK = "chunk"
    TEMPORARY = "temporary"  # A store that is under way.
    LEFTOVER = "leftover"  # A store that was when its process died, or a corrupt file that was kept.
    LOST = "lost"  # A place for a chunk beyond the end of a file that was cut off.
    UNREADABLE = "unreadable"  # A file or folder that there is no looking at.
    BESIDE = "beside"  # No chunk, and yet it takes room: a folder, the tier's own books, a segment's room for chunks.


class StoredFile(NamedTuple):
    """One file, as it was when it was listed."""

    kind: Kind
    name: str  # Relative to the directory.
    key: OffloadKey | None  # A chunk's, unless what says so is damaged or in the wrong place.
    size_bytes: int
    allocated_bytes: int
    used_at_ns: int  # Since the epoch; as far as the tier keeps note of it, which may be to the hour.
    identity: int  # Of the file rather than its name, which another may take.
    fault: str = ""  # What is wrong with it, where that is seen before a chunk is read: no load takes such a chunk.


class State(Enum):
    """The state of a chunk's bytes."""

    WHOLE = "whole"
    SEALED = "sealed"  # Encrypted, and as it was written. Who has written it, only a tier with the key can tell.
    CORRUPT = "corrupt"
    UNVERIFIED = "unverified"  # Nothing is stored with them that says what they should be.
    UNREADABLE = "unreadable"  # The system refuses it.
    GONE = "gone"  # Replaced or removed since it was listed, which is nothing bad.


class Finding(NamedTuple):
    """The finding about one chunk."""

    state: State
    fault: str = ""  # The kind of corruption, as the tier counts it, or why there was no reading it.


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
        """Return the parts that `files` takes one by one: a few thousand at most, for a progress bar."""
        ...

    def files(self, place: Place, part: str) -> Iterator[StoredFile]:
        """Yield the files of one part. A folder that cannot be listed is one of them, and the others still come."""
        ...

    def check(self, place: Place, file: StoredFile) -> Finding:
        """Read a chunk and compare it with its footer or seal."""
        ...

    def remove(self, file: StoredFile) -> int | None:
        """Remove this very file, and return the bytes that the file system has got back.

        Returns None if it is gone, or another file has taken its name.

        Raises `OSError` if it cannot be removed, such as while a kvtier engine is writing to it.
        """
        ...

    def clear(self, place: Place) -> bool:
        """Remove the folders and books of a namespace without chunks; say whether they are gone.

        Nothing goes while a kvtier engine uses the namespace, or while anything else is left in it.
        """
        ...

    def close(self) -> None:
        """Let go of the directory."""
        ...
