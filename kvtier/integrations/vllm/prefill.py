"""The prefill meter: how fast the LLM engine computes prompts, from the times of its own steps.

A step's time begins when it could begin: when it was scheduled, or when the step before was answered, whichever was
later. It ends with the step's answer. So idle time does not count, and a step that waited behind another counts its own
time.
"""

from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

DECODE_NEWEST = 0.125  # The newest step's part in the mean time of a step that only decodes.


class Scheduled(Protocol):
    """The part of a scheduler's output that is read here."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...
    @property
    def total_num_scheduled_tokens(self) -> int: ...
    @property
    def scheduled_spec_decode_tokens(self) -> Mapping[str, Collection[int]]: ...
    @property
    def scheduled_encoder_inputs(self) -> Mapping[str, Collection[int]]: ...
    @property
    def has_sync_kv_loads(self) -> bool: ...


class StepTokens(NamedTuple):
    """The tokens of one step: of prompts, also those that a preempted request computes again, and of answers."""

    prefill: int
    decode: int


class MeasuredPrefill(NamedTuple):
    """A measured piece of prefill."""

    tokens: int
    seconds: float


NOTHING = StepTokens(0, 0)


def step_tokens(output: Scheduled) -> StepTokens:
    """Return the tokens that a step computes; none for a step whose time also goes to other work."""
    counts, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
    if output.scheduled_encoder_inputs or output.has_sync_kv_loads:
        return NOTHING
    if total == len(counts):  # Most steps: a token for each request.
        return StepTokens(0, total)
    drafts = output.scheduled_spec_decode_tokens
    prefill = sum(count for request, count in counts.items() if count > 1 + len(drafts.get(request, ())))
    return StepTokens(prefill, total - prefill)


class PrefillMeter:
    """Measures prefill from the times of steps: those in flight, in order, and those answered."""

    def __init__(self, steps_max: int) -> None:
        """`steps_max`: the most steps that the LLM engine has in flight at once."""
        self._under_way: deque[tuple[StepTokens, float]] = deque(maxlen=steps_max)
        self._answered_at = float("-inf")
        self._decode_s: float | None = None  # Mean time of a step that only decodes.

    def scheduled(self, step: StepTokens, now: float) -> None:
        """Record the start of a step, which may queue behind those in flight."""
        self._under_way.append((step, now))

    def answered(self, now: float) -> MeasuredPrefill | None:
        """Record the answer of the oldest step in flight; return its prefill, if it has one.

        The time of decoding is subtracted: that of a step which only decodes, but at most the decoded tokens' share of
        the step.
        """
        if not self._under_way:
            return None
        step, scheduled_at = self._under_way.popleft()
        seconds = now - max(scheduled_at, self._answered_at)
        self._answered_at = now
        if step.prefill:
            return self._prefill(step, seconds)
        if step.decode:
            self._note_decode(seconds)
        return None

    def _prefill(self, step: StepTokens, seconds: float) -> MeasuredPrefill:
        decoding_s = min(self._decode_s or 0.0, seconds * step.decode / (step.prefill + step.decode))
        return MeasuredPrefill(step.prefill, seconds - decoding_s)

    def _note_decode(self, seconds: float) -> None:
        mean = self._decode_s
        self._decode_s = seconds if mean is None else mean + DECODE_NEWEST * (seconds - mean)
