"""What one store was promised: room, and the files that it is to overwrite for it."""

from collections import deque
from collections.abc import Sequence

from kvtier_backends.fs.entries import Held


class Grant:
    """One store's. Its lanes take files from it side by side; all else is the loop's thread's."""

    def __init__(self, chunks: int) -> None:
        """Promise nothing yet to a store of so many chunks."""
        self.chunks = chunks
        self.bytes = 0
        """Of room, what those files take included."""
        self.spares_bytes = 0
        """What those files take, whether they were overwritten by now or not."""
        self._spares: deque[Held] = deque()
        self._chosen: list[Held] = []
        self._gone: list[Held] = []
        self._told = 0  # Of these, whoever asked has heard of so many.

    @property
    def spares_wanted(self) -> int:
        """How many files more could be overwritten: one a chunk."""
        return self.chunks - len(self._chosen)

    def overwrite(self, victims: Sequence[Held]) -> int:
        """Have these files, which nobody else is at, overwritten; return the room that is promised with them."""
        taken_bytes = sum(victim.allocated_bytes for victim in victims)
        self.bytes += taken_bytes
        self.spares_bytes += taken_bytes
        self._chosen += victims
        self._spares += victims
        return taken_bytes

    def spare(self) -> Held | None:
        """Take a file; None if there is none left. Any thread may call."""
        try:
            return self._spares.popleft()
        except IndexError:
            return None

    def gone(self, spare: Held) -> None:
        """Note that a file which was taken is no more what it was. Any thread may call."""
        self._gone.append(spare)

    def news_bytes(self) -> int:
        """Return what files took that have gone since this was asked last."""
        news = self._gone[self._told :]
        self._told += len(news)
        return sum(spare.allocated_bytes for spare in news)

    def end(self) -> tuple[list[Held], list[Held]]:
        """Return the files that are gone, and those that are left as they were, when no lane is at it any more."""
        gone = {spare.key for spare in self._gone}
        return self._gone, [spare for spare in self._chosen if spare.key not in gone]
