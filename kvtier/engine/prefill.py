"""The prefill speed: how many tokens of prompts the LLM engine computes in a second, configured or learned.

Steps that mostly decode take their time for other tokens than a prompt's. They compute few of a prompt, so only full
steps count: those that compute at least a quarter of the step in which the average token was computed.

What is loaded is not computed, so a machine that has become faster does not show while everything is loaded. So now
and then a request computes what could be loaded: when nothing has counted for a hundred times as long as that costs.
"""

import math

from kvtier.config import TOKENS_PER_S_MAX

KEPT = 0.9  # Of what was known, after each average step: the last ten count most.
HALF_LIFE_S = 10.0  # And of its age: the machine has other work, or less, from one moment to the next.
SLOW_MAX = 4.0  # Times what was expected: one step that hung says no more than that.
TOKEN_S_MIN = 1.0 / TOKENS_PER_S_MAX  # As of a speed that is configured.
TOKENS_MIN = 4_096  # Noted before anything is concluded.
FIRST_STEPS = 1  # Full ones, that count until a later one is seen: they compile, or warm up.
STEPS_MIN = 16  # As good as that: of prompts that are loaded only the last tokens are computed.
HALF_LIFE_TOKENS = 500_000  # Of the size of steps.
FULL_STEP_SHARE = 0.25  # Of the step in which the average token was computed; less of it is mostly decoding.
BATCH_GROWTH = 4.0  # Times that step: of so many tokens at once nothing is known, but that each takes less.

EXPLORE_EVERY_S = 1.0  # At most: if a chunk takes a tier 5 ms, a hundredth of what it can do.
EXPLORE_SHARE = 0.01  # Of the time: what is lost by doing what is expected to be slower.
DOUBLED_MAX = 10  # Times: what was computed and showed nothing doubles the wait for the next.


class PrefillSpeed:
    """Tokens a second: what was configured, or else what steps have shown, the latest most."""

    def __init__(self, tokens_per_s: float | None = None) -> None:
        self.tokens_per_s = tokens_per_s
        """None: not known."""
        self._configured = tokens_per_s is not None
        self._steps = 0  # With tokens of prompts.
        self._noted = 0.0  # Their tokens, decayed.
        self._squares = 0.0  # Of the tokens of a step.
        self._token_s = 0.0  # Decayed average over full steps.
        self._counted = 0  # Full steps.
        self._counted_at = 0.0
        self._explored_at = 0.0
        self._unanswered = 0  # Requests that had to compute since the last full step.
        self._guesses = 0  # Those that had to because far smaller steps were all that was seen.

    def note(self, tokens: int, seconds: float, now: float) -> None:
        """Take note of a step that computed so many tokens of prompts; one of none, or of no time, says nothing."""
        if self._configured or tokens <= 0 or not 0.0 < seconds < math.inf:
            return
        left = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        average = self._average_step
        self._steps += 1
        self._noted = self._noted * left + tokens
        self._squares = self._squares * left + tokens * tokens
        if tokens >= FULL_STEP_SHARE * self._average_step:
            token_s = max(TOKEN_S_MIN, seconds / tokens)
            self._count(tokens / average if average else 1.0, token_s, now)
        if self._counted > FIRST_STEPS and (self._noted >= TOKENS_MIN or self._steps >= STEPS_MIN):
            self.tokens_per_s = 1.0 / self._token_s

    def explores(self, tokens: float, lost_s: float, now: float) -> bool:
        """Say whether a request is to compute so many tokens that could be loaded; if so, it counts as seen.

        `lost_s` is how much longer than the load that is expected to take. Where only far smaller steps have shown how
        fast the LLM engine is, nobody knows what is lost: that is tried sooner, but ever less often.
        """
        if self._configured or tokens < FULL_STEP_SHARE * self._average_step:
            return False
        guessed = tokens > BATCH_GROWTH * self._average_step
        if guessed and now - self._explored_at >= EXPLORE_EVERY_S * 2.0**self._guesses:
            self._guesses = min(self._guesses + 1, DOUBLED_MAX)
        elif now - max(self._counted_at, self._explored_at) < self._wait_s(lost_s):
            return False
        self._explored_at = now
        self._unanswered = min(self._unanswered + 1, DOUBLED_MAX)
        return True

    def _wait_s(self, lost_s: float) -> float:
        """Return how long nothing must have counted before so much time is lost to see something."""
        return max(EXPLORE_EVERY_S, lost_s / EXPLORE_SHARE) * 2.0**self._unanswered

    @property
    def _average_step(self) -> float:
        """The tokens of the step in which the average token was computed."""
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
