"""The trace check: whether what a trace says can be true. A wrong file parses as well, and gives figures, too.

A chained id stands for its block after all blocks before it, so it always follows the same id. Ids of each block's own
content do not: such a trace promises hits that no engine can have, since a block's KV depends on what precedes it. The
lengths must be those of so many blocks, and the times not those of a thousand times the load.
"""

import logging
from collections import Counter
from typing import TYPE_CHECKING

from kvtier.errors import TraceError

if TYPE_CHECKING:
    from kvtier.tools.replay.traces import Request  # Which has every trace checked, by this module.

IDS_MAX = 1 << 21  # Remembered, at about 100 bytes each. Ids that were made in a wrong way show long before.
TOKENS_PER_S_MAX = 4e6  # Of prompts: what two hundred GPUs compute. Real traces in seconds have more than 5 million.
REQUESTS_MIN = 100  # Fewer may well be one burst.

logger = logging.getLogger(__name__)

_CHAINED = (
    "hash_ids must be chained, an id standing for its block and all blocks before it, as in [0, 1, 2] and [0, 1, 3]: "
    "hash each block together with the id before it"
)
_LENGTHS = (
    "hash_ids and input_length must fit, as 3 ids of 512 tokens fit 1,030 or 1,536: write all of a prompt's ids, and "
    'how many tokens an id stands for in a first line {{"meta": {{"block_size": {block_tokens}}}}}'
)
_TIMES = "timestamp must be in milliseconds: multiply seconds by 1,000"


class TraceCheck:
    """One pass over one trace. Strict, it raises `TraceError` at the first line that cannot be true."""

    def __init__(self, path: str, block_tokens: int, *, strict: bool, ids_max: int = IDS_MAX) -> None:
        """`ids_max`: how many distinct ids are remembered; those that come later are not judged."""
        self._path = path
        self._block_tokens = block_tokens
        self._strict = strict
        self._ids_max = ids_max
        self._before: dict[int, int | None] = {}  # Id -> the one that it follows; None: it stands first.
        self._first: dict[str, str] = {}  # Remedy -> what is wrong with the first line that needs it.
        self._lines: Counter[str] = Counter()
        self._requests = self._tokens = self._line = 0
        self._first_ms = self._last_ms = 0.0

    def look(self, line: int, request: "Request") -> None:
        """Judge the request of one line."""
        ids = request.hash_ids
        before = (None, *ids[:-1]) if ids else ()
        known = self._before.setdefault if len(self._before) < self._ids_max else self._before.get
        if tuple(map(known, ids, before)) != before:
            self._note(line, self._unchained(ids, before), _CHAINED)
        if not request.input_length // self._block_tokens <= len(ids) <= -(-request.input_length // self._block_tokens):
            self._note(
                line,
                f"{len(ids):,} ids of {self._block_tokens:,} tokens for {request.input_length:,} tokens",
                _LENGTHS.format(block_tokens=self._block_tokens),
            )
        if not self._requests:
            self._first_ms = request.timestamp_ms
        self._requests += 1
        self._tokens += request.input_length
        self._last_ms, self._line = request.timestamp_ms, line

    def end(self) -> None:
        """Judge the whole: what no single line shows. Warn of each kind of fault, with its first line."""
        span_s = (self._last_ms - self._first_ms) / 1_000
        if self._requests >= REQUESTS_MIN and 0 < span_s * TOKENS_PER_S_MAX < self._tokens:
            self._note(
                self._line,
                f"{self._requests:,} requests with {self._tokens:,} tokens in {span_s:,.3g} s since the first",
                _TIMES,
            )
        for remedy, first in self._first.items():
            lines = self._lines[remedy]
            logger.warning("%s; %s%s", first, remedy, f" ({lines:,} such lines)" if lines > 1 else "")

    def _unchained(self, ids: tuple[int, ...], before: tuple[int | None, ...]) -> str:
        """Say which id is not where it was."""
        for block, now in zip(ids, before, strict=True):
            then = self._before.get(block, now)
            if then != now:
                here = "stands first" if now is None else f"follows id {now}"
                there = "later" if now is None else "stood first" if then is None else f"id {then}"
                return f"id {block} {here} here and {there} before"
        raise AssertionError(ids)

    def _note(self, line: int, what: str, remedy: str) -> None:
        message = f"{self._path}, line {line}: {what}"
        if self._strict:
            raise TraceError(f"{message}; {remedy}")
        self._first.setdefault(remedy, message)
        self._lines[remedy] += 1
