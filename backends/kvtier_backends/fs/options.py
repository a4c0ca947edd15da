"""What a user may set of the tier."""

from typing import Annotated, Literal

import msgspec

from kvtier.config import Checked

LANES_MAX = 64  # A device that needs more requests at once than this needs another way of asking, not more threads.

Lanes = Annotated[int, msgspec.Meta(ge=1, le=LANES_MAX)]


class FsOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A directory and how it is used."""

    root: Annotated[str, msgspec.Meta(min_length=1)]
    """Its parent must exist. A directory is one engine's own; others may read it."""

    io: Literal["auto", "direct", "buffered"] = "auto"
    """`direct` keeps chunks out of the page cache; `auto` uses it where the file system allows."""

    load_lanes: Lanes = 4
    """Threads that read. Four reach the limit of most disks; a network file system may want more."""

    store_lanes: Lanes = 4
    """Threads that write: others than those that read, so that a load never queues behind stores."""

    fsync: bool = False
    """Whether a store waits until its file and its folder are on the device."""

    unverified: Literal["accept", "refuse"] = "refuse"
    """What becomes of files without a footer, which vLLM writes: there is no telling whether their bytes are right."""

    corrupt: Literal["delete", "quarantine"] = "delete"
    """What becomes of a file that is not what it should be: `quarantine` keeps some of them to be looked at."""
