"""Remedies: the sections of the troubleshooting page, which warnings and errors link to, one for each cause."""

from collections.abc import Callable
from enum import Enum

LINES_EVERY_S = 60.0  # Between two lines of one kind: more would fill the log.
PAGE = "https://github.com/kvtier/kvtier/blob/main/docs/how-to/troubleshooting.md"


class Remedy(Enum):
    """One section of the page; as text, its address."""

    # The engine does not start, or not as configured.
    CONFIGURATION = "configuration-refused"
    OPENING = "tier-cannot-be-opened"
    OTHER_LAYOUT = "chunks-in-another-layout"
    REWRITTEN = "configuration-of-a-namespace-written-anew"
    BUFFERED = "no-direct-io"

    # A tier costs hits.
    BREAKER = "breaker-open"
    LOSSES = "chunks-dropped-or-failed"
    UNAVAILABLE = "tier-unavailable"
    OVERDUE = "call-out-of-time"
    FAILED = "transfer-failed"
    MISSING = "chunk-missing"
    CORRUPT = "chunk-corrupt"
    NO_SPACE = "no-space"
    UNWRITTEN = "chunks-not-written-at-the-end"
    UNLISTED = "list-incomplete"

    # A tier's directory.
    ROOT_IN_USE = "root-used-by-another-tier"
    UNREADABLE = "folder-or-segment-unreadable"
    UNUSABLE = "segments-without-chunks-of-this-tier"
    UNDERFOOT = "segment-removed-by-somebody-else"
    IRREMOVABLE = "file-cannot-be-removed"
    CHECKPOINT = "checkpoint-not-written-or-read"
    WRITE_BUDGET = "write-budget-not-put-back"
    SHARED_PAGE = "shared-page-away"

    # Runners, and the code of tiers.
    RUNNER = "runner-lost"
    CONTRACT = "tier-breaks-its-contract"
    CLOSING = "tier-does-not-close"

    # A GPU.
    UNPINNED = "memory-not-pinned"
    UNBATCHED = "no-batched-copies"

    # The program that calls.
    CLOSED = "engine-closed"
    LOOP = "another-event-loop"
    CUT = "run-cut-short"
    LENT = "rows-still-read"
    DROPPED = "engine-not-closed"
    OBSERVER = "observer-raised"
    HINT = "hint-ignored"

    # Traces.
    TRACE = "trace-refused-or-doubted"

    ELSE = "anything-else"

    def __str__(self) -> str:
        return f"{PAGE}#{self.value}"


class LineLimit:
    """The limit of a log: at most one line of each kind a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: in seconds."""
        self._clock = clock
        self._again_at: dict[str, float] = {}

    def allows(self, kind: str = "") -> bool:
        """Return True if a line of this kind is due now; the next is due in a minute."""
        now = self._clock()
        if kind in self._again_at and now < self._again_at[kind]:
            return False
        self._again_at[kind] = now + LINES_EVERY_S
        return True
