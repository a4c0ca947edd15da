"""The prefill speed: how many tokens of prompts the LLM engine computes in a second, configured or learned.

Only full steps count, with at least a quarter of the tokens of an average token's step: others mostly decode. While
everything is loaded, a faster machine does not show. So now and then a request computes chunks that could be loaded:
when no step has counted for a hundred times as long as that costs.
"""

import math

from kvtier.config import TOKENS_PER_S_MAX

KEPT = 0.9  # Weight of earlier steps after each average step: the last ten count most.
HALF_LIFE_S = 10.0  # Of that weight, by age: the machine's other work changes from one moment to the next.
SLOW_MAX = 4.0  # Times the expected time: a hung step counts no more than that.
TOKENS_MIN = 4_096  # Recorded before a speed is known,
STEPS_MIN = 16  # or as many steps: of loaded prompts only the last tokens are computed.
FIRST_STEPS = 1  # Full steps that count only until a later one: they compile, or warm up.
HALF_LIFE_TOKENS = 500_000  # Of the size of steps.
FULL_STEP_SHARE = 0.25  # Of an average token's step; smaller ones mostly decode.
BATCH_GROWTH = 4.0  # Times that step: the speed of larger ones is unknown, but higher.

EXPLORE_EVERY_S = 1.0  # At most.
EXPLORE_SHARE = 0.01  # Of the time that may be lost by computing loadable chunks.
DOUBLED_MAX = 10  # Doublings of the wait after measurements that showed nothing.


class PrefillSpeed:
    """Tokens a second, as configured, or learned from steps."""

    def __init__(self, tokens_per_s: float | None = None) -> None:
        self.tokens_per_s = tokens_per_s
        """None while unknown."""
        self._configured = tokens_per_s is not None
        self._steps = 0  # With tokens of prompts.
        self._noted = 0.0  # Tokens of these, decayed.
        self._squares = 0.0  # Of the tokens of a step.
        self._token_s = 0.0  # Decayed average over full steps.
        self._counted = 0  # Full steps.
        self._counted_at = 0.0
        self._explored_at = 0.0
        self._unanswered = 0  # Measurements since the last full step.
        self._guesses = 0  # Measurements because only far smaller steps were seen.

    def note(self, tokens: int, seconds: float, now: float) -> None:
        """Record a step that computed `tokens` of prompts in `seconds`; one without either is ignored."""
        if self._configured or tokens <= 0 or not 0.0 < seconds < math.inf:
            return
        left = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        average = self._average_step
        self._steps += 1
        self._noted = self._noted * left + tokens
        self._squares = self._squares * left + tokens * tokens
        if tokens >= FULL_STEP_SHARE * self._average_step:
            self._count(tokens / average if average else 1.0, max(1.0 / TOKENS_PER_S_MAX, seconds / tokens), now)
        if self._counted > FIRST_STEPS and (self._noted >= TOKENS_MIN or self._steps >= STEPS_MIN):
            self.tokens_per_s = 1.0 / self._token_s

    def explores(self, tokens: float, lost_s: float, now: float) -> bool:
        """Return True if a request is to compute `tokens` that could be loaded; the measurement counts as done.

        `lost_s` is how much longer than the load that is expected to take. Where only far smaller steps were seen, the
        loss is unknown: that is tried sooner, but ever less often.
        """
        if self._configured or tokens < FULL_STEP_SHARE * self._average_step:
            return False
        guessed = tokens > BATCH_GROWTH * self._average_step
        if guessed and now - self._explored_at >= EXPLORE_EVERY_S * 2.0**self._guesses:
            self._guesses = min(self._guesses + 1, DOUBLED_MAX)
        else:  # So long no step must have counted before `lost_s` may be lost.
            wait_s = max(EXPLORE_EVERY_S, lost_s / EXPLORE_SHARE) * 2.0**self._unanswered
            if now - max(self._counted_at, self._explored_at) < wait_s:
                return False
        self._explored_at = now
        self._unanswered = min(self._unanswered + 1, DOUBLED_MAX)
        return True

    @property
    def _average_step(self) -> float:
        return self._squares / self._noted if self._noted else 0.0

    def _count(self, share: float, token_s: float, now: float) -> None:
        """Learn from a full step: `share` is its size in average steps before it."""
        kept = KEPT**share * 0.5 ** ((now - self._counted_at) / HALF_LIFE_S)
        if self._counted and share <= BATCH_GROWTH:
            token_s = min(token_s, SLOW_MAX * self._token_s)
        self._counted += 1
        newest = 1.0 / max(1, self._counted - FIRST_STEPS)
        self._token_s += max(1.0 - kept, newest) * (token_s - self._token_s)
        self._counted_at = now
        self._unanswered = 0
