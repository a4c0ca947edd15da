"""The files of one lane's loads, several of them open at a time, and what became of each."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

from kvtier.backend import Outcome, Read
from kvtier.errors import BlockMissing
from kvtier.keys import OffloadKey
from kvtier_backends.fs.below import ForeignError
from kvtier_backends.fs.failures import GONE, failure
from kvtier_backends.fs.files import ChunkFiles
from kvtier_backends.fs.footer import FOOTER_BYTES
from kvtier_backends.fs.open_chunk import OpenChunk
from kvtier_backends.fs.reads import Wanted

TAIL_BYTES = 2 * FOOTER_BYTES  # The second page stays empty unless a file is too long: no call asks for that.


@dataclass(slots=True)
class LoadShare:
    """Reads of one hop, and what became of them, in order, once it is over."""

    reads: Sequence[Read]
    leaving: Collection[OffloadKey]  # Keys whose files are on their way out, and may be anything by now.
    measure: bool  # Whether to say how much room the files take: for keys that the index does not know.
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    allocated_bytes: list[int | None] = field(default_factory=list[int | None])  # None: not loaded, or not measured.
    kept_bytes: int = 0  # Of corrupt files that are there still: quarantined, or not to be moved.
    gone: int = 0  # Failures that say that the whole file system is away.


Judge = Callable[[OpenChunk, Read, memoryview, int], Outcome]
"""Says what has come of a file, by the page behind the row and how many bytes a first read brought. Raises OSError."""


class LoadHop:
    """One share on its way; what is open still is closed with it."""

    def __init__(self, files: ChunkFiles, share: LoadShare, pages: memoryview, judge: Judge) -> None:
        """Read what is behind the rows into `pages`, `TAIL_BYTES` for each."""
        self._files = files
        self._share = share
        self._pages = pages
        self._judge = judge
        self._opened: dict[int, OpenChunk] = {}
        self._outcomes: list[Outcome] = [None] * len(share.reads)
        self._allocated_bytes: list[int | None] = [None] * len(share.reads)

    def wanted(self) -> Iterator[Wanted]:
        """Open one file after the other, and ask for what is in it."""
        for place, read in enumerate(self._share.reads):
            try:
                if read.key in self._share.leaving:
                    raise FileNotFoundError  # As good as.
                self._opened[place] = chunk = self._files.open(read.key)
            except (FileNotFoundError, NotADirectoryError, ForeignError):
                self._outcomes[place] = BlockMissing(f"{read.key.hex()}: no file")
            except OSError as error:
                self._fail(place, error)
            else:
                yield chunk.wanted([read.into, self._page(place)], partial(self._came, place))

    def end(self) -> None:
        """Write down in the share what became of all of it."""
        self._share.outcomes, self._share.allocated_bytes = self._outcomes, self._allocated_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._opened:
            self._opened.popitem()[1].close()

    def _came(self, place: int, result: int | OSError) -> None:
        with self._opened.pop(place) as chunk:
            if isinstance(result, OSError):
                self._fail(place, result)
                return
            try:
                outcome = self._judge(chunk, self._share.reads[place], self._page(place), result)
                if self._share.measure and outcome is None:
                    self._allocated_bytes[place] = chunk.allocated_bytes()
                self._outcomes[place] = outcome
            except OSError as error:
                self._fail(place, error)

    def _fail(self, place: int, error: OSError) -> None:
        self._outcomes[place] = failure(self._share.reads[place].key, error)
        self._share.gone += error.errno in GONE

    def _page(self, place: int) -> memoryview:
        return self._pages[place * TAIL_BYTES : (place + 1) * TAIL_BYTES]
